//! Vocabularies from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

use std::collections::{BTreeMap, HashMap, HashSet};

use super::token_text::{Entry, Joining, TokenText, byte_token};
use crate::checkpoint::GgufTokenizer;
use crate::error::ModelError;

// Values of `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// Longest token, in bytes. Real ones end near 1000 (runs of spaces).
pub const LONGEST_TOKEN: usize = 4096;

/// Most bytes that all merges of a SentencePiece vocabulary have together, which do not stand in the file but follow
/// from it: tokens that begin and end in each other can have the square of their length. Real ones have some 10 MB.
pub const MERGE_BYTES: usize = 256 << 20;

/// Most bytes that are looked at to find those merges: every split of every token is.
const SPLIT_BYTES: u64 = 4 << 30;

/// Which kind of vocabulary it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Tokens are written in GPT-2's byte alphabet.
    ByteLevel,
    /// Tokens are text, with `▁` for a space and `<0xHH>` for a byte.
    SentencePiece,
}

/// A token that is looked for in texts before anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Added {
    /// Its id.
    pub id: u32,
    /// Whether `skip_special_tokens` leaves it out.
    pub special: bool,
}

/// A vocabulary that can be built: every id is a token's, every merge joins two tokens into a third.
#[derive(Clone, Debug)]
pub struct GgufVocabulary {
    /// Which kind it is.
    pub kind: Kind,
    /// Id of each text; of two ids with one text the first, which is the one that the text is encoded as.
    pub ids: HashMap<String, u32>,
    /// Left and right of each merge, best first.
    pub merges: Vec<(String, String)>,
    /// Added tokens by rising id.
    pub added: Vec<Added>,
    /// Text of `bos_token`, `eos_token`, `unk_token` and `pad_token`.
    pub named: BTreeMap<String, String>,
    /// Whether all 256 bytes have a token to fall back to.
    pub byte_fallback: bool,
    /// Whether texts get a space in front.
    pub space_prefix: bool,
}

impl GgufVocabulary {
    /// Reads and checks the metadata's tokens, types, scores, merges and special ids.
    pub fn read(metadata: &GgufTokenizer) -> Result<Self, ModelError> {
        let kind = match metadata.model.as_str() {
            "gpt2" => Kind::ByteLevel,
            "llama" => Kind::SentencePiece,
            other => {
                return Err(ModelError::Unsupported {
                    message: format!(
                        "the GGUF file's tokenizer model `{}` (tokenizer.ggml.model) is not known; `gpt2` and `llama` \
                         are, so use the model's safetensors folder with its tokenizer.json instead",
                        shown(other)
                    ),
                });
            }
        };
        check(metadata).map_err(ModelError::Tokenizer)?;
        let ids: HashMap<String, u32> =
            metadata.tokens.iter().enumerate().rev().map(|(id, token)| (token.clone(), id as u32)).collect();
        let merges = match kind {
            Kind::ByteLevel => stored_merges(metadata, &ids),
            Kind::SentencePiece => scored_merges(metadata),
        }
        .map_err(ModelError::Tokenizer)?;
        let bytes: HashSet<u8> = metadata.tokens.iter().filter_map(|token| byte_token(token)).collect();
        Ok(Self {
            kind,
            ids,
            merges,
            added: added(metadata),
            named: named(metadata),
            byte_fallback: kind == Kind::SentencePiece && bytes.len() == 256,
            space_prefix: kind == Kind::SentencePiece && metadata.add_space_prefix.unwrap_or(true),
        })
    }

    /// How tokens join to text.
    pub fn joining(&self) -> Joining {
        match self.kind {
            Kind::ByteLevel => Joining::ByteLevel,
            Kind::SentencePiece => {
                Joining::SentencePiece { strip: usize::from(self.space_prefix), byte_fallback: self.byte_fallback }
            }
        }
    }

    /// The bytes of every id of the metadata that this was read from.
    pub fn token_text(&self, metadata: &GgufTokenizer) -> TokenText {
        let added: HashSet<u32> = self.added.iter().map(|added| added.id).collect();
        let entries =
            metadata.tokens.iter().enumerate().map(|(id, token)| {
                if added.contains(&(id as u32)) { Entry::Added(token) } else { Entry::Model(token) }
            });
        TokenText::new(self.joining(), entries)
    }
}

/// Everything else indexes by these ids.
fn check(metadata: &GgufTokenizer) -> Result<(), String> {
    let count = metadata.tokens.len();
    if count == 0 {
        return Err(
            "the GGUF file holds no tokens (tokenizer.ggml.tokens); it is damaged or no language model".to_owned()
        );
    }
    for (key, length) in [("token_type", metadata.token_types.len()), ("scores", metadata.scores.len())] {
        if length != 0 && length != count {
            return Err(format!("tokenizer.ggml.{key} has {length} entries and the GGUF file has {count} tokens"));
        }
    }
    let roles = [
        ("bos_token_id", metadata.bos),
        ("eos_token_id", metadata.eos),
        ("unknown_token_id", metadata.unknown),
        ("padding_token_id", metadata.padding),
    ];
    for (key, id) in roles {
        if let Some(id) = id.filter(|&id| id as usize >= count) {
            return Err(format!("tokenizer.ggml.{key} is `{id}` and the GGUF file has {count} tokens"));
        }
    }
    if let Some((id, token)) = metadata.tokens.iter().enumerate().find(|(_, token)| token.len() > LONGEST_TOKEN) {
        return Err(format!(
            "token `{id}` of the GGUF file has {} bytes, and at most {LONGEST_TOKEN} are understood; it is damaged",
            token.len()
        ));
    }
    if let Some(id) = metadata.scores.iter().position(|score| score.is_nan()) {
        return Err(format!("the score of token `{id}` in the GGUF file is no number; it is damaged"));
    }
    Ok(())
}

fn token_type(metadata: &GgufTokenizer, id: usize) -> i32 {
    metadata.token_types.get(id).copied().unwrap_or(NORMAL)
}

/// The merges that the file holds.
fn stored_merges(metadata: &GgufTokenizer, ids: &HashMap<String, u32>) -> Result<Vec<(String, String)>, String> {
    let mut merges = Vec::with_capacity(metadata.merges.len());
    let mut joined = String::new();
    for merge in &metadata.merges {
        // The first character may itself be a space in damaged files only: byte-level tokens hold none.
        let pair = merge.split_once(' ').filter(|(left, right)| {
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            [*left, *right, &joined].iter().all(|token| !token.is_empty() && ids.contains_key(*token))
        });
        let Some((left, right)) = pair else {
            return Err(format!(
                "the merge `{}` in the GGUF file does not join two of its tokens into a third",
                shown(merge)
            ));
        };
        merges.push((left.to_owned(), right.to_owned()));
    }
    Ok(merges)
}

/// SentencePiece merges the neighbours whose union has the best score; as BPE that is every split of every token into
/// two tokens, ordered by the score of the union.
fn scored_merges(metadata: &GgufTokenizer) -> Result<Vec<(String, String)>, String> {
    let scored: HashMap<&str, usize> = metadata
        .tokens
        .iter()
        .enumerate()
        .filter(|(id, _)| token_type(metadata, *id) == NORMAL)
        .map(|(id, token)| (token.as_str(), id))
        .collect();
    let too_much =
        || "the GGUF file's tokens are made of each other in more ways than any vocabulary's; it is damaged".to_owned();
    let split_bytes: u64 = scored.keys().map(|token| (token.len() as u64).pow(2)).sum();
    if split_bytes > SPLIT_BYTES {
        return Err(too_much());
    }
    let score = |id: usize| metadata.scores.get(id).copied().unwrap_or(0.0);
    let mut candidates: Vec<(f32, usize, usize, &str, &str)> = Vec::new();
    let mut bytes = 0;
    for (&token, &id) in &scored {
        for (split, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(split);
            if let (Some(&left_id), Some(&right_id)) = (scored.get(left), scored.get(right)) {
                // A merge is two strings of the allocator and an entry of the list beside its text.
                bytes += token.len() + 64;
                if bytes > MERGE_BYTES {
                    return Err(too_much());
                }
                candidates.push((score(id), left_id, right_id, left, right));
            }
        }
    }
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    Ok(candidates.into_iter().map(|(_, _, _, left, right)| (left.to_owned(), right.to_owned())).collect())
}

fn added(metadata: &GgufTokenizer) -> Vec<Added> {
    // The end token of a chat turn is a control token even where a converter forgot to say so.
    let named: HashSet<usize> = [metadata.bos, metadata.eos].into_iter().flatten().map(|id| id as usize).collect();
    (0..metadata.tokens.len())
        .filter(|id| matches!(token_type(metadata, *id), UNKNOWN | CONTROL | USER_DEFINED) || named.contains(id))
        .map(|id| Added { id: id as u32, special: token_type(metadata, id) != USER_DEFINED || named.contains(&id) })
        .collect()
}

fn named(metadata: &GgufTokenizer) -> BTreeMap<String, String> {
    [
        ("bos_token", metadata.bos),
        ("eos_token", metadata.eos),
        ("unk_token", metadata.unknown),
        ("pad_token", metadata.padding),
    ]
    .into_iter()
    .filter_map(|(role, id)| Some((role.to_owned(), metadata.tokens.get(id? as usize)?.clone())))
    .collect()
}

/// A text from the file, cut to what a message can bear.
fn shown(text: &str) -> String {
    crate::checkpoint::gguf::metadata::shown(text)
}
