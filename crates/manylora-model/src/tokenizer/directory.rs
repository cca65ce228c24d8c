//! Tokenizers of Hugging Face folders.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde_json::Value;
use tokenizers::AddedToken;

use crate::error::ModelError;

use super::Tokenizer;
use super::token_text::{Entry, Joining, TokenText};

/// The roles of special tokens that configuration files name.
const ROLES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Ids beyond this are damage, not vocabulary.
const LARGEST_ID: u64 = 1 << 24;

pub(super) fn load(directory: &Path) -> Result<Tokenizer, ModelError> {
    let path = directory.join("tokenizer.json");
    let Some(bytes) = read_optional(&path)? else {
        let what = if directory.join("tokenizer.model").is_file() {
            "only a SentencePiece tokenizer.model is here; load it once with transformers and save_pretrained to get \
             tokenizer.json"
        } else {
            "the model's tokenizer; copy it from the model's repository, or give prompts as token ids"
        };
        return Err(ModelError::NotFound { path, what: what.to_owned() });
    };
    let damaged = |message: String| ModelError::Malformed { path: path.clone(), message };
    let json: Value = serde_json::from_slice(&bytes).map_err(|error| damaged(format!("not JSON: {error}")))?;
    check_model(&json).map_err(damaged)?;
    let mut pipeline = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| damaged(error.to_string()))?;
    // Saved truncation and padding are training settings; a prompt is never cut silently.
    pipeline.with_truncation(None).map_err(|error| damaged(error.to_string()))?;
    pipeline.with_padding(None);

    let configuration = read_object(&directory.join("tokenizer_config.json"))?;
    let map = read_object(&directory.join("special_tokens_map.json"))?;
    let mut named = BTreeMap::new();
    for source in [&map, &configuration] {
        for role in ROLES {
            if let Some(token) = source.get(role).and_then(token_content) {
                named.insert(role.to_owned(), token.to_owned());
            }
        }
    }
    add_configured(&mut pipeline, &configuration, &directory.join("tokenizer_config.json"))?;
    let additional = [&map, &configuration]
        .into_iter()
        .filter_map(|source| source.get("additional_special_tokens").and_then(Value::as_array))
        .flatten()
        .filter_map(token_content);
    let special: HashSet<&str> = additional.chain(named.values().map(String::as_str)).collect();
    let mut missing: Vec<&str> = special
        .into_iter()
        .filter(|token| !is_special(&pipeline, token) && pipeline.token_to_id(token).is_some())
        .collect();
    missing.sort_unstable();
    let missing = missing.into_iter().map(|token| AddedToken::from(token, true));
    pipeline.add_special_tokens(missing).map_err(|error| ModelError::Tokenizer(error.to_string()))?;

    let joining = Joining::of_decoder(&json["decoder"]);
    let text = table(&pipeline, joining);
    Ok(Tokenizer::assemble(pipeline, text, named))
}

/// What the library takes for granted about a BPE model: every merge joins two tokens into a third.
fn check_model(json: &Value) -> Result<(), String> {
    let model = &json["model"];
    let vocabulary = match &model["vocab"] {
        Value::Object(vocabulary) => vocabulary,
        Value::Array(_) if model["type"] == "Unigram" => return Ok(()),
        _ => return Err("`model.vocab` is missing".to_owned()),
    };
    if let Some((token, id)) = vocabulary.iter().find(|(_, id)| id.as_u64().is_none_or(|id| id > LARGEST_ID)) {
        return Err(format!("token `{token}` has the id `{id}`"));
    }
    let added = json["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
    if let Some(id) = added.iter().map(|token| &token["id"]).find(|id| id.as_u64().is_none_or(|id| id > LARGEST_ID)) {
        return Err(format!("an added token has the id `{id}`"));
    }
    let mut joined = String::new();
    for merge in model["merges"].as_array().map(Vec::as_slice).unwrap_or_default() {
        let (left, right) = match merge {
            Value::String(pair) => pair.split_once(' ').unwrap_or_default(),
            Value::Array(pair) if pair.len() == 2 => {
                (pair[0].as_str().unwrap_or_default(), pair[1].as_str().unwrap_or_default())
            }
            _ => return Err(format!("`{merge}` is no merge")),
        };
        let prefix = model["continuing_subword_prefix"].as_str().unwrap_or_default();
        joined.clear();
        joined.push_str(left);
        joined.push_str(right.strip_prefix(prefix).unwrap_or(right));
        let known = [left, right, joined.as_str()].iter().all(|token| vocabulary.contains_key(*token));
        if !known {
            return Err(format!("the merge `{merge}` names tokens that are not in the vocabulary"));
        }
    }
    Ok(())
}

/// Adds the tokens of `added_tokens_decoder` that `tokenizer.json` lacks, as transformers does.
fn add_configured(pipeline: &mut tokenizers::Tokenizer, configuration: &Value, path: &Path) -> Result<(), ModelError> {
    let Some(tokens) = configuration.get("added_tokens_decoder").and_then(Value::as_object) else {
        return Ok(());
    };
    let damaged = |message: String| ModelError::Malformed { path: path.to_path_buf(), message };
    let mut wanted: BTreeMap<u32, AddedToken> = BTreeMap::new();
    for (id, token) in tokens {
        let id: u32 = id.parse().map_err(|_| damaged(format!("`{id}` in added_tokens_decoder is no token id")))?;
        let content = token_content(token).ok_or_else(|| damaged(format!("added token `{id}` has no content")))?;
        let flag = |name: &str| token.get(name).and_then(Value::as_bool).unwrap_or(false);
        let special = flag("special");
        let normalized = token.get("normalized").and_then(Value::as_bool).unwrap_or(!special);
        let token = AddedToken::from(content, special)
            .single_word(flag("single_word"))
            .lstrip(flag("lstrip"))
            .rstrip(flag("rstrip"))
            .normalized(normalized);
        wanted.insert(id, token);
    }
    let present = pipeline.get_added_tokens_decoder();
    for (id, token) in wanted {
        if present.contains_key(&id) {
            continue;
        }
        let content = token.content.clone();
        pipeline.add_tokens([token]).map_err(|error| damaged(error.to_string()))?;
        let given = pipeline.token_to_id(&content);
        if given != Some(id) {
            return Err(damaged(format!(
                "added token `{content}` should have the id {id} and tokenizer.json gives it {given:?}; the two files \
                 do not belong together"
            )));
        }
    }
    Ok(())
}

fn is_special(pipeline: &tokenizers::Tokenizer, token: &str) -> bool {
    pipeline.get_added_vocabulary().is_special_token(token)
}

/// Bytes of every id of a finished pipeline.
fn table(pipeline: &tokenizers::Tokenizer, joining: Joining) -> TokenText {
    let vocabulary = pipeline.get_vocab(true);
    let added = pipeline.get_added_tokens_decoder();
    let largest = vocabulary.values().copied().max().map_or(0, |id| id as usize + 1);
    let mut by_id: Vec<Option<&str>> = vec![None; largest];
    for (token, &id) in &vocabulary {
        by_id[id as usize] = Some(token);
    }
    let entries = by_id.into_iter().enumerate().map(|(id, token)| match (added.get(&(id as u32)), token) {
        (Some(added), _) => Entry::Added(&added.content),
        (None, Some(token)) => Entry::Model(token),
        (None, None) => Entry::Hole,
    });
    TokenText::new(joining, entries)
}

/// A token is written as a string or as an object with `content`.
fn token_content(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content").and_then(Value::as_str))
}

pub(crate) fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, ModelError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ModelError::Io { path: path.to_path_buf(), source }),
    }
}

/// A JSON object; a file that is not there is an empty one.
pub(crate) fn read_object(path: &Path) -> Result<Value, ModelError> {
    let Some(bytes) = read_optional(path)? else {
        return Ok(Value::Object(serde_json::Map::new()));
    };
    let damaged = |message: String| ModelError::Malformed { path: path.to_path_buf(), message };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(object)) => Ok(Value::Object(object)),
        Ok(_) => Err(damaged("it should hold a JSON object".to_owned())),
        Err(error) => Err(damaged(format!("not JSON: {error}"))),
    }
}
