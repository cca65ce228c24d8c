//! Text to token ids and back, whatever a checkpoint ships: `tokenizer.json` or GGUF metadata.
//!
//! The engine sees one [`Tokenizer`]. Reading order: this file, [`directory`] and [`gguf`] (where tokenizers come from;
//! what they read is checked by [`crate::vocabulary`] first), [`detokenizer`] (streaming), [`stop`] (stop strings),
//! [`reach`] (what a text comes to at least).

pub mod detokenizer;
mod directory;
mod gguf;
mod pre_tokenizer;
mod reach;
pub mod stop;

use std::any::Any;
use std::collections::{BTreeMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::{GgufTokenizer, TokenizerSource};
use crate::error::ModelError;

pub use detokenizer::Detokenizer;
pub(crate) use directory::{read_object, read_optional};
pub use stop::{Released, StopChecker, StopStrings};

use reach::Reach;

use crate::vocabulary::token_text::TokenText;

/// A tokenizer; clones share one vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    pipeline: tokenizers::Tokenizer,
    text: TokenText,
    /// None where a text of any length can be few tokens.
    reach: Option<Reach>,
    /// Sorted.
    special: Vec<u32>,
    added: HashSet<u32>,
    named: BTreeMap<String, String>,
    bos: Option<u32>,
    eos: Option<u32>,
    max_id: u32,
    vocab_size: usize,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.inner.vocab_size)
            .field("bos", &self.inner.bos)
            .field("eos", &self.inner.eos)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads the tokenizer of a checkpoint.
    pub fn from_source(source: &TokenizerSource) -> Result<Self, ModelError> {
        match source {
            TokenizerSource::Directory(directory) => Self::from_directory(directory),
            TokenizerSource::Gguf(metadata) => Self::from_gguf(metadata),
        }
    }

    /// Loads `tokenizer.json` with the special tokens of `tokenizer_config.json` and `special_tokens_map.json`, which
    /// may both be absent.
    pub fn from_directory(directory: &Path) -> Result<Self, ModelError> {
        without_panic(|| directory::load(directory).inspect(Self::probe))
    }

    /// Builds the tokenizer that the metadata of a GGUF file describes. Models `gpt2` (byte-level BPE) and `llama`
    /// (SentencePiece BPE with byte fallback) are known; another model or an unknown pre-tokenizer is refused by name.
    pub fn from_gguf(metadata: &GgufTokenizer) -> Result<Self, ModelError> {
        without_panic(|| gguf::build(metadata).inspect(Self::probe))
    }

    /// One text there and back, so that files which the library reads but panics over later are refused at load. Errors
    /// are no matter: a vocabulary need not have tokens for this text.
    fn probe(&self) {
        if let Ok(encoding) = self.inner.pipeline.encode_fast("a", true) {
            drop(self.inner.pipeline.decode(encoding.get_ids(), false));
        }
    }

    /// `named` maps `bos_token`, `eos_token` and the like to their text.
    fn assemble(pipeline: tokenizers::Tokenizer, text: TokenText, named: BTreeMap<String, String>) -> Self {
        let decoder = pipeline.get_added_tokens_decoder();
        let added: HashSet<u32> = decoder.keys().copied().collect();
        let mut special: Vec<u32> = decoder.iter().filter(|(_, token)| token.special).map(|(&id, _)| id).collect();
        special.sort_unstable();
        let id_named = |name: &str| named.get(name).and_then(|token| pipeline.token_to_id(token));
        let (bos, eos) = (id_named("bos_token"), id_named("eos_token"));
        let vocab_size = pipeline.get_vocab_size(true);
        let max_id = text.len().saturating_sub(1) as u32;
        let reach = Reach::of(&pipeline, &text);
        Self { inner: Arc::new(Inner { pipeline, text, reach, special, added, named, bos, eos, max_id, vocab_size }) }
    }

    /// The text of a `tokenizer.json` that says the same, as far as the library writes it: what joins tokens to text may be
    /// missing from those of GGUF files.
    pub(crate) fn to_json(&self) -> Result<serde_json::Value, ModelError> {
        serde_json::to_value(&self.inner.pipeline).map_err(|error| ModelError::Tokenizer(error.to_string()))
    }

    /// Token ids of a text. `add_special_tokens` adds what the tokenizer puts around a prompt (bos, for those that do);
    /// special tokens written out in the text are recognised either way.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, ModelError> {
        without_panic(|| match self.inner.pipeline.encode_fast(text, add_special_tokens) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => {
                Err(ModelError::Tokenizer(format!("the text ({} bytes) could not be encoded: {error}", text.len())))
            }
        })
    }

    /// Tokens that a text has at least, by its length alone: 0 where nothing can be said, because the tokenizer leaves
    /// out what it does not know.
    pub fn fewest_tokens(&self, text: &str) -> usize {
        self.inner.reach.map_or(0, |reach| reach.fewest_tokens(text))
    }

    /// Text of a sequence. Ids without a token (rows that pad the embedding) give nothing; bytes that are no UTF-8 give
    /// replacement characters. `spaces_between_special_tokens = false` drops the space some decoders put before an
    /// added token that follows another one.
    pub fn decode(
        &self,
        ids: &[u32],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> Result<String, ModelError> {
        if !self.inner.text.is_bytewise() && spaces_between_special_tokens {
            return self.pipeline_decode(ids, skip_special_tokens);
        }
        let mut stream = Detokenizer::new(self, skip_special_tokens, spaces_between_special_tokens);
        let mut text = String::new();
        for &id in ids {
            text.push_str(stream.push(id)?);
        }
        text.push_str(&stream.finish()?);
        Ok(text)
    }

    /// Decodes through the library's decoder, for tokenizers whose tokens are not plain bytes.
    fn pipeline_decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, ModelError> {
        without_panic(|| {
            self.inner
                .pipeline
                .decode(ids, skip_special_tokens)
                .map_err(|error| ModelError::Tokenizer(format!("{} tokens could not be decoded: {error}", ids.len())))
        })
    }

    /// Text of one token by itself, special or not, as log-probabilities show it: lone bytes of a character are
    /// replacement characters. Empty for ids without a token.
    pub fn token_text(&self, id: u32) -> String {
        self.decode(&[id], false, true).unwrap_or_default()
    }

    /// Bytes that a token adds to the text; None for ids without a token. Where a decoder joins tokens with more than
    /// concatenation, the token's own text.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.inner.text.bytes(id)
    }

    /// Whether a text is the bytes of its tokens, one after the other, and nothing else.
    pub fn is_bytewise(&self) -> bool {
        self.inner.text.is_bytewise()
    }

    /// Id of a token as the vocabulary spells it (byte-level tokens in their mapped alphabet).
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.pipeline.token_to_id(token)
    }

    /// Number of tokens, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.vocab_size
    }

    /// Largest id that has a token.
    pub fn max_id(&self) -> u32 {
        self.inner.max_id
    }

    /// Id of the begin-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.inner.bos
    }

    /// Id of the end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.inner.eos
    }

    /// Whether `skip_special_tokens` leaves this id out.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.special.binary_search(&id).is_ok()
    }

    /// `bos_token`, `eos_token`, `unk_token`, `pad_token` and the like, by name: what chat templates refer to.
    pub fn named_tokens(&self) -> &BTreeMap<String, String> {
        &self.inner.named
    }
}

/// The library panics over some damaged files (a broken character map, a template without its tokens) where it could
/// refuse them; nothing of it is shared or kept when that happens at load, and its caches bear it later.
fn without_panic<T>(action: impl FnOnce() -> Result<T, ModelError>) -> Result<T, ModelError> {
    catch_unwind(AssertUnwindSafe(action)).unwrap_or_else(|panic| {
        let message = panic_message(panic.as_ref());
        Err(ModelError::Tokenizer(format!(
            "the tokenizer's file is damaged, or asks for something that the tokenizer library does not do: {message}"
        )))
    })
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("it stopped without a reason")
}

#[cfg(test)]
mod tests;
