//! Tokenizers of Hugging Face folders.

use std::fs;
use std::io::Read;
use std::path::Path;

use serde_json::Value;
use tokenizers::AddedToken;

use crate::error::ModelError;
use crate::vocabulary::hugging_face::{self, ConfiguredToken, SpecialTokens};
use crate::vocabulary::token_text::{Entry, Joining, TokenText};

use super::Tokenizer;

/// Longest file that is read, in bytes. Real ones have up to 40 MB.
const LONGEST_FILE: u64 = 256 << 20;

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
    hugging_face::check(&json).map_err(damaged)?;
    let mut pipeline = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| damaged(error.to_string()))?;
    // Saved truncation and padding are training settings; a prompt is never cut silently.
    pipeline.with_truncation(None).map_err(|error| damaged(error.to_string()))?;
    pipeline.with_padding(None);

    let configured = directory.join("tokenizer_config.json");
    let configuration = read_object(&configured)?;
    let special = SpecialTokens::read(&read_object(&directory.join("special_tokens_map.json"))?, &configuration);
    add_configured(&mut pipeline, &configuration, &configured)?;
    let missing: Vec<AddedToken> = special
        .all
        .iter()
        .filter(|token| !is_special(&pipeline, token) && pipeline.token_to_id(token).is_some())
        .map(|token| AddedToken::from(token.as_str(), true))
        .collect();
    pipeline.add_special_tokens(missing).map_err(|error| ModelError::Tokenizer(error.to_string()))?;

    let joining = Joining::of_decoder(&json["decoder"]);
    let text = table(&pipeline, joining);
    Ok(Tokenizer::assemble(pipeline, text, special.named))
}

/// Adds the tokens of `added_tokens_decoder` that `tokenizer.json` lacks, as transformers does.
fn add_configured(pipeline: &mut tokenizers::Tokenizer, configuration: &Value, path: &Path) -> Result<(), ModelError> {
    let damaged = |message: String| ModelError::Malformed { path: path.to_path_buf(), message };
    let mut configured = hugging_face::configured_tokens(configuration).map_err(damaged)?;
    let present = pipeline.get_added_tokens_decoder();
    configured.retain(|id, _| !present.contains_key(id));
    // All at once: the library builds its search anew at every call.
    let tokens: Vec<AddedToken> = configured.values().map(added_token).collect();
    pipeline.add_tokens(tokens).map_err(|error| damaged(error.to_string()))?;
    for (id, token) in configured {
        let given = pipeline.token_to_id(&token.content);
        if given != Some(id) {
            return Err(damaged(format!(
                "added token `{}` should have the id {id} and tokenizer.json gives it {given:?}; the two files do not \
                 belong together",
                token.content
            )));
        }
    }
    Ok(())
}

fn added_token(token: &ConfiguredToken) -> AddedToken {
    AddedToken::from(token.content.as_str(), token.special)
        .single_word(token.single_word)
        .lstrip(token.lstrip)
        .rstrip(token.rstrip)
        .normalized(token.normalized)
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

/// The content of a file of a bearable length; None when it is not there.
pub(crate) fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, ModelError> {
    let failed = |source| ModelError::Io { path: path.to_path_buf(), source };
    let damaged = |message| ModelError::Malformed { path: path.to_path_buf(), message };
    // Asked before opening, because opening a pipe would wait for its writer.
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => return Err(damaged("it is not a regular file".to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    }
    let mut bytes = Vec::new();
    fs::File::open(path).and_then(|file| file.take(LONGEST_FILE + 1).read_to_end(&mut bytes)).map_err(failed)?;
    if bytes.len() as u64 > LONGEST_FILE {
        return Err(damaged(format!("it is longer than {LONGEST_FILE} bytes, which no such file is")));
    }
    Ok(Some(bytes))
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
