//! Tokenizers from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

use std::collections::{BTreeMap, HashMap, HashSet};

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, decoders};

use crate::checkpoint::GgufTokenizer;
use crate::error::ModelError;

use super::Tokenizer;
use super::pre_tokenizer::PreTokenizer;
use super::token_text::{Entry, Joining, TokenText, byte_token};

// Values of `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

pub(super) fn build(metadata: &GgufTokenizer) -> Result<Tokenizer, ModelError> {
    check(metadata)?;
    let (mut pipeline, joining, adds_bos) = match metadata.model.as_str() {
        "gpt2" => byte_level(metadata)?,
        "llama" => sentence_piece(metadata)?,
        other => {
            return Err(ModelError::Unsupported {
                message: format!(
                    "the GGUF file's tokenizer model `{other}` (tokenizer.ggml.model) is not known; `gpt2` and `llama` \
                     are, so use the model's safetensors folder with its tokenizer.json instead"
                ),
            });
        }
    };
    let kinds: Vec<i32> = (0..metadata.tokens.len()).map(|id| kind(metadata, id)).collect();
    // The end token of a chat turn is a control token even where a converter forgot to say so.
    let named_ids: HashSet<u32> = [metadata.bos, metadata.eos].into_iter().flatten().collect();
    let is_added =
        |id: usize| matches!(kinds[id], UNKNOWN | CONTROL | USER_DEFINED) || named_ids.contains(&(id as u32));
    let added = metadata.tokens.iter().enumerate().filter(|(id, _)| is_added(*id)).map(|(id, token)| {
        let special = kinds[id] != USER_DEFINED || named_ids.contains(&(id as u32));
        AddedToken::from(token.as_str(), special).normalized(false)
    });
    let failed = |error: tokenizers::Error| ModelError::Tokenizer(format!("the GGUF file's tokenizer: {error}"));
    pipeline.add_tokens(added).map_err(failed)?;
    surround(&mut pipeline, metadata, adds_bos)?;

    let entries = metadata
        .tokens
        .iter()
        .enumerate()
        .map(|(id, token)| if is_added(id) { Entry::Added(token) } else { Entry::Model(token) });
    let text = TokenText::new(joining, entries);
    let named: BTreeMap<String, String> = [
        ("bos_token", metadata.bos),
        ("eos_token", metadata.eos),
        ("unk_token", metadata.unknown),
        ("pad_token", metadata.padding),
    ]
    .into_iter()
    .filter_map(|(role, id)| Some((role.to_owned(), metadata.tokens[id? as usize].clone())))
    .collect();
    Ok(Tokenizer::assemble(pipeline, text, named))
}

/// Longest token, in bytes. Real ones end near 1000 (runs of spaces); every split of a token is looked at, so that a
/// longer one would take the square of its length.
const LONGEST_TOKEN: usize = 4096;

/// Everything below indexes by these ids.
fn check(metadata: &GgufTokenizer) -> Result<(), ModelError> {
    let count = metadata.tokens.len();
    if count == 0 {
        return Err(ModelError::Tokenizer(
            "the GGUF file holds no tokens (tokenizer.ggml.tokens); it is damaged or no language model".to_owned(),
        ));
    }
    let roles = [
        ("bos_token_id", metadata.bos),
        ("eos_token_id", metadata.eos),
        ("unknown_token_id", metadata.unknown),
        ("padding_token_id", metadata.padding),
    ];
    for (key, id) in roles {
        if let Some(id) = id.filter(|&id| id as usize >= count) {
            return Err(ModelError::Tokenizer(format!(
                "tokenizer.ggml.{key} is `{id}` and the GGUF file has {count} tokens"
            )));
        }
    }
    if let Some((id, token)) = metadata.tokens.iter().enumerate().find(|(_, token)| token.len() > LONGEST_TOKEN) {
        return Err(ModelError::Tokenizer(format!(
            "token `{id}` of the GGUF file has {} bytes, and at most {LONGEST_TOKEN} are understood; it is damaged",
            token.len()
        )));
    }
    Ok(())
}

fn kind(metadata: &GgufTokenizer, id: usize) -> i32 {
    metadata.token_types.get(id).copied().unwrap_or(NORMAL)
}

type Built = (tokenizers::Tokenizer, Joining, bool);

fn byte_level(metadata: &GgufTokenizer) -> Result<Built, ModelError> {
    let pre_tokenizer = PreTokenizer::named(metadata.pre.as_deref())?;
    let vocabulary = vocabulary(metadata);
    let mut merges: Merges = Vec::with_capacity(metadata.merges.len());
    for merge in &metadata.merges {
        // The first character may itself be a space in damaged files only: byte-level tokens hold none.
        let pair = merge.split_once(' ').filter(|(left, right)| {
            [*left, *right, &format!("{left}{right}")].iter().all(|token| vocabulary.contains_key(*token))
        });
        let Some((left, right)) = pair else {
            return Err(ModelError::Tokenizer(format!(
                "the merge `{merge}` in the GGUF file does not join two of its tokens into a third"
            )));
        };
        merges.push((left.to_owned(), right.to_owned()));
    }
    let model = BPE::builder()
        .vocab_and_merges(vocabulary, merges)
        .ignore_merges(pre_tokenizer.ignore_merges)
        .build()
        .map_err(|error| ModelError::Tokenizer(format!("the GGUF file's vocabulary: {error}")))?;
    let mut pipeline = tokenizers::Tokenizer::new(model);
    pipeline.with_pre_tokenizer(Some(pre_tokenizer.build()?));
    pipeline.with_decoder(Some(decoders::byte_level::ByteLevel::new(false, true, false)));
    Ok((pipeline, Joining::ByteLevel, pre_tokenizer.adds_bos))
}

/// SentencePiece merges the neighbours whose union has the best score; as BPE that is every split of every token into
/// two tokens, ordered by the score of the union.
fn sentence_piece(metadata: &GgufTokenizer) -> Result<Built, ModelError> {
    let vocabulary = vocabulary(metadata);
    let normal = |id: usize| kind(metadata, id) == NORMAL;
    let scored: HashMap<&str, usize> = metadata
        .tokens
        .iter()
        .enumerate()
        .filter(|(id, _)| normal(*id))
        .map(|(id, token)| (token.as_str(), id))
        .collect();
    let score = |id: usize| metadata.scores.get(id).copied().unwrap_or(0.0);
    let mut candidates: Vec<(f32, usize, usize, &str, &str)> = Vec::new();
    for (&token, &id) in &scored {
        for (split, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(split);
            if let (Some(&left_id), Some(&right_id)) = (scored.get(left), scored.get(right)) {
                candidates.push((score(id), left_id, right_id, left, right));
            }
        }
    }
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let merges: Merges =
        candidates.into_iter().map(|(_, _, _, left, right)| (left.to_owned(), right.to_owned())).collect();
    let all_bytes = metadata.tokens.iter().filter_map(|token| byte_token(token)).collect::<HashSet<u8>>().len() == 256;
    let mut builder = BPE::builder().vocab_and_merges(vocabulary, merges).byte_fallback(all_bytes).fuse_unk(true);
    if let Some(unknown) = metadata.unknown {
        builder = builder.unk_token(metadata.tokens[unknown as usize].clone());
    }
    let model =
        builder.build().map_err(|error| ModelError::Tokenizer(format!("the GGUF file's vocabulary: {error}")))?;
    let mut pipeline = tokenizers::Tokenizer::new(model);
    let failed = |error: tokenizers::Error| ModelError::Tokenizer(error.to_string());
    let spaces = Replace::new(" ", "\u{2581}").map_err(failed)?;
    let prefix = metadata.add_space_prefix.unwrap_or(true);
    let mut steps = Vec::new();
    if prefix {
        steps.push(NormalizerWrapper::Prepend(Prepend::new("\u{2581}".to_owned())));
    }
    steps.push(NormalizerWrapper::Replace(spaces));
    pipeline.with_normalizer(Some(Sequence::new(steps))).map_err(failed)?;
    let joining = Joining::SentencePiece { strip: usize::from(prefix), byte_fallback: all_bytes };
    Ok((pipeline, joining, true))
}

fn vocabulary(metadata: &GgufTokenizer) -> Vocab {
    // Of two ids with one text the first is the one that text is encoded as.
    metadata.tokens.iter().enumerate().rev().map(|(id, token)| (token.clone(), id as u32)).collect()
}

/// bos before and eos after every prompt, where the file asks for it.
fn surround(pipeline: &mut tokenizers::Tokenizer, metadata: &GgufTokenizer, adds_bos: bool) -> Result<(), ModelError> {
    let bos = metadata.bos.filter(|_| metadata.add_bos.unwrap_or(adds_bos));
    let eos = metadata.eos.filter(|_| metadata.add_eos.unwrap_or(false));
    if bos.is_none() && eos.is_none() {
        return Ok(());
    }
    let special = |id: u32| serde_json::json!({"SpecialToken": {"id": metadata.tokens[id as usize], "type_id": 0}});
    let piece = |id: &str| serde_json::json!({"Sequence": {"id": id, "type_id": 0}});
    let single: Vec<_> = bos.map(special).into_iter().chain([piece("A")]).chain(eos.map(special)).collect();
    let pair: Vec<_> = single.iter().cloned().chain([piece("B")]).collect();
    let tokens: serde_json::Map<String, serde_json::Value> = [bos, eos]
        .into_iter()
        .flatten()
        .map(|id| {
            let token = &metadata.tokens[id as usize];
            (token.clone(), serde_json::json!({"id": token, "ids": [id], "tokens": [token]}))
        })
        .collect();
    let template = serde_json::json!({
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens
    });
    let template: TemplateProcessing = serde_json::from_value(template)
        .map_err(|error| ModelError::Tokenizer(format!("bos and eos of the GGUF file: {error}")))?;
    pipeline.with_post_processor(Some(template));
    Ok(())
}
