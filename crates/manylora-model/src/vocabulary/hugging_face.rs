//! Tokenizers of Hugging Face folders: `tokenizer.json` before the library reads it, and what the files beside it add.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Map, Value};

/// The roles of special tokens that configuration files name.
const ROLES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Ids beyond this are damage, not vocabulary: the largest ones have some 300 thousand.
pub const LARGEST_ID: u64 = 1 << 22;

/// Most characters of a token or merge in a message.
const SHOWN: usize = 80;

/// Checks what the library takes for granted about `tokenizer.json`: ids in range and of one token each, and every
/// merge of a BPE model joining two tokens into a third.
pub fn check(json: &Value) -> Result<(), String> {
    let added = match &json["added_tokens"] {
        Value::Array(added) => added.as_slice(),
        Value::Null => &[],
        other => return Err(format!("`added_tokens` is {}, not a list", shown(other))),
    };
    for token in added {
        let id = &token["id"];
        if id.as_u64().is_none_or(|id| id > LARGEST_ID) {
            return Err(format!("an added token has the id `{}`", shown(id)));
        }
        if !token["content"].is_string() {
            return Err(format!("the added token `{id}` has no content"));
        }
    }
    let model = &json["model"];
    let vocabulary = match &model["vocab"] {
        Value::Object(vocabulary) => vocabulary,
        Value::Array(pieces) if model["type"] == "Unigram" => return check_unigram(pieces, &model["unk_id"]),
        _ => return Err("`model.vocab` is missing".to_owned()),
    };
    check_ids(vocabulary)?;
    check_merges(model, vocabulary)
}

/// A list of texts with their scores; the id is the place.
fn check_unigram(pieces: &[Value], unknown: &Value) -> Result<(), String> {
    if pieces.len() as u64 > LARGEST_ID {
        return Err(format!("`model.vocab` has {} entries", pieces.len()));
    }
    let is_piece = |piece: &Value| matches!(piece.as_array().map(Vec::as_slice), Some([text, score]) if text.is_string() && score.is_number());
    if let Some(piece) = pieces.iter().find(|piece| !is_piece(piece)) {
        return Err(format!("`{}` in `model.vocab` is no text with its score", shown(piece)));
    }
    match unknown {
        Value::Null => Ok(()),
        id if id.as_u64().is_some_and(|id| id < pieces.len() as u64) => Ok(()),
        id => Err(format!("`model.unk_id` is `{}` and there are {} tokens", shown(id), pieces.len())),
    }
}

fn check_ids(vocabulary: &Map<String, Value>) -> Result<(), String> {
    let mut tokens: HashMap<u64, &str> = HashMap::with_capacity(vocabulary.len());
    for (token, id) in vocabulary {
        let Some(id) = id.as_u64().filter(|&id| id <= LARGEST_ID) else {
            return Err(format!("token `{}` has the id `{}`", cut(token), shown(id)));
        };
        if let Some(other) = tokens.insert(id, token) {
            return Err(format!("the tokens `{}` and `{}` both have the id `{id}`", cut(other), cut(token)));
        }
    }
    Ok(())
}

fn check_merges(model: &Value, vocabulary: &Map<String, Value>) -> Result<(), String> {
    let merges = match &model["merges"] {
        Value::Array(merges) => merges.as_slice(),
        Value::Null => &[],
        other => return Err(format!("`model.merges` is {}, not a list", shown(other))),
    };
    let prefix = model["continuing_subword_prefix"].as_str().unwrap_or_default();
    let mut joined = String::new();
    for merge in merges {
        let (left, right) = match merge {
            Value::String(pair) => pair.split_once(' ').unwrap_or_default(),
            Value::Array(pair) if pair.len() == 2 => {
                (pair[0].as_str().unwrap_or_default(), pair[1].as_str().unwrap_or_default())
            }
            _ => return Err(format!("`{}` is no merge", shown(merge))),
        };
        joined.clear();
        joined.push_str(left);
        // The library cuts the prefix's length off, whatever stands there.
        let known = right.get(prefix.len()..).is_some_and(|rest| {
            joined.push_str(rest);
            [left, right, joined.as_str()].iter().all(|token| vocabulary.contains_key(*token))
        });
        if !known {
            return Err(format!("the merge `{}` names tokens that are not in the vocabulary", shown(merge)));
        }
    }
    Ok(())
}

/// An entry of `added_tokens_decoder`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfiguredToken {
    /// Its text.
    pub content: String,
    /// Whether `skip_special_tokens` leaves it out.
    pub special: bool,
    /// Only as a word of its own.
    pub single_word: bool,
    /// Takes the white space before it.
    pub lstrip: bool,
    /// Takes the white space after it.
    pub rstrip: bool,
    /// Looked for in the normalized text.
    pub normalized: bool,
}

/// The tokens of `added_tokens_decoder` in a `tokenizer_config.json`, by id.
pub fn configured_tokens(configuration: &Value) -> Result<BTreeMap<u32, ConfiguredToken>, String> {
    let tokens = match configuration.get("added_tokens_decoder") {
        None | Some(Value::Null) => return Ok(BTreeMap::new()),
        Some(Value::Object(tokens)) => tokens,
        Some(other) => return Err(format!("`added_tokens_decoder` is {}, not an object", shown(other))),
    };
    let mut configured = BTreeMap::new();
    for (key, token) in tokens {
        let id = key.parse().ok().filter(|&id| u64::from(id) <= LARGEST_ID);
        let id: u32 = id.ok_or_else(|| format!("`{}` in added_tokens_decoder is no token id", cut(key)))?;
        let content = token_content(token).ok_or_else(|| format!("added token `{id}` has no content"))?.to_owned();
        let flag = |name: &str| token.get(name).and_then(Value::as_bool).unwrap_or(false);
        let special = flag("special");
        let token = ConfiguredToken {
            content,
            special,
            single_word: flag("single_word"),
            lstrip: flag("lstrip"),
            rstrip: flag("rstrip"),
            normalized: token.get("normalized").and_then(Value::as_bool).unwrap_or(!special),
        };
        if configured.insert(id, token).is_some() {
            return Err(format!("added_tokens_decoder names the id {id} twice"));
        }
    }
    Ok(configured)
}

/// The special tokens that configuration files name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// `bos_token` and the like, by role.
    pub named: BTreeMap<String, String>,
    /// All of them, `additional_special_tokens` included.
    pub all: BTreeSet<String>,
}

impl SpecialTokens {
    /// From `special_tokens_map.json` and `tokenizer_config.json`, of which the second one counts more.
    pub fn read(map: &Value, configuration: &Value) -> Self {
        let mut named = BTreeMap::new();
        let mut all = BTreeSet::new();
        for source in [map, configuration] {
            for role in ROLES {
                if let Some(token) = source.get(role).and_then(token_content) {
                    named.insert(role.to_owned(), token.to_owned());
                }
            }
            let additional = source.get("additional_special_tokens").and_then(Value::as_array);
            all.extend(additional.into_iter().flatten().filter_map(token_content).map(str::to_owned));
        }
        all.extend(named.values().cloned());
        Self { named, all }
    }
}

/// A token is written as a string or as an object with `content`.
fn token_content(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content").and_then(Value::as_str))
}

/// JSON for a message.
fn shown(value: &Value) -> String {
    cut(&match value {
        Value::String(text) => text.clone(),
        Value::Object(_) => "an object".to_owned(),
        other => other.to_string(),
    })
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
