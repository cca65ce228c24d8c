//! Tokenizers from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, decoders};

use crate::checkpoint::GgufTokenizer;
use crate::error::ModelError;
use crate::vocabulary::GgufVocabulary;
use crate::vocabulary::gguf::Kind;

use super::Tokenizer;
use super::pre_tokenizer::PreTokenizer;

pub(super) fn build(metadata: &GgufTokenizer) -> Result<Tokenizer, ModelError> {
    let mut vocabulary = GgufVocabulary::read(metadata)?;
    let (mut pipeline, adds_bos) = match vocabulary.kind {
        Kind::ByteLevel => byte_level(metadata, &mut vocabulary)?,
        Kind::SentencePiece => (sentence_piece(metadata, &mut vocabulary)?, true),
    };
    let added = vocabulary
        .added
        .iter()
        .map(|added| AddedToken::from(metadata.tokens[added.id as usize].as_str(), added.special).normalized(false));
    pipeline.add_tokens(added).map_err(failed)?;
    surround(&mut pipeline, metadata, adds_bos)?;
    let text = vocabulary.token_text(metadata);
    Ok(Tokenizer::assemble(pipeline, text, vocabulary.named))
}

#[expect(clippy::needless_pass_by_value, reason = "what `map_err` hands over")]
fn failed(error: tokenizers::Error) -> ModelError {
    ModelError::Tokenizer(format!("the GGUF file's tokenizer: {error}"))
}

fn byte_level(
    metadata: &GgufTokenizer,
    vocabulary: &mut GgufVocabulary,
) -> Result<(tokenizers::Tokenizer, bool), ModelError> {
    let pre_tokenizer = PreTokenizer::named(metadata.pre.as_deref())?;
    let ids: Vocab = std::mem::take(&mut vocabulary.ids).into_iter().collect();
    let model = BPE::builder()
        .vocab_and_merges(ids, std::mem::take(&mut vocabulary.merges))
        .ignore_merges(pre_tokenizer.ignore_merges)
        .build()
        .map_err(failed)?;
    let mut pipeline = tokenizers::Tokenizer::new(model);
    pipeline.with_pre_tokenizer(Some(pre_tokenizer.build()?));
    pipeline.with_decoder(Some(decoders::byte_level::ByteLevel::new(false, true, false)));
    Ok((pipeline, pre_tokenizer.adds_bos))
}

fn sentence_piece(
    metadata: &GgufTokenizer,
    vocabulary: &mut GgufVocabulary,
) -> Result<tokenizers::Tokenizer, ModelError> {
    let ids: Vocab = std::mem::take(&mut vocabulary.ids).into_iter().collect();
    let mut builder = BPE::builder()
        .vocab_and_merges(ids, std::mem::take(&mut vocabulary.merges))
        .byte_fallback(vocabulary.byte_fallback)
        .fuse_unk(true);
    if let Some(unknown) = metadata.unknown {
        builder = builder.unk_token(metadata.tokens[unknown as usize].clone());
    }
    let mut pipeline = tokenizers::Tokenizer::new(builder.build().map_err(failed)?);
    let spaces = Replace::new(" ", "\u{2581}").map_err(failed)?;
    let mut steps = Vec::new();
    if vocabulary.space_prefix {
        steps.push(NormalizerWrapper::Prepend(Prepend::new("\u{2581}".to_owned())));
    }
    steps.push(NormalizerWrapper::Replace(spaces));
    pipeline.with_normalizer(Some(Sequence::new(steps))).map_err(failed)?;
    Ok(pipeline)
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
