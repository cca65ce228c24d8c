//! How much text a token can stand for, so that a text that is far too long is known as such without encoding it.
//!
//! The bound is never below the truth: a tokenizer that leaves text out (unknown characters, accents, what a pattern
//! removes) has none.

use serde_json::Value;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{ModelWrapper, PreTokenizerWrapper};

use crate::vocabulary::token_text::TokenText;

/// Bytes of a text for one of its normal form: at most 3.5 where characters are composed (`U+1FBE U+0308 U+0301`), and 4
/// where they are replaced by plain ones (letters of mathematics). Counted over all of Unicode.
const NORMAL_FORMS: usize = 4;
/// Bytes of a letter for one of its lower case: 3 (the sign of Kelvin).
const LOWER_CASE: usize = 3;

/// What one token stands for at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reach {
    /// Bytes of text.
    bytes: usize,
    /// Whether white space counts: it does not where some of it is left out.
    counts_space: bool,
}

impl Reach {
    /// None where a text of any length can be few tokens.
    pub(super) fn of(pipeline: &tokenizers::Tokenizer, text: &TokenText) -> Option<Self> {
        let added = pipeline.get_added_tokens_decoder();
        let mut reach = Self { bytes: 1, counts_space: added.values().all(|token| !token.lstrip && !token.rstrip) };
        let mut bytewise = false;
        if let Some(normalizer) = pipeline.get_normalizer() {
            reach.normalized(normalizer, &mut bytewise)?;
        }
        if let Some(pre_tokenizer) = pipeline.get_pre_tokenizer() {
            reach.split(pre_tokenizer, &mut bytewise)?;
        }
        let vocabulary = pipeline.get_vocab(true);
        let ModelWrapper::BPE(model) = pipeline.get_model() else { return None };
        let has_all = if bytewise {
            ByteLevel::alphabet().iter().all(|character| vocabulary.contains_key(character.encode_utf8(&mut [0; 4])))
        } else {
            model.byte_fallback && (0..=255u8).all(|byte| vocabulary.contains_key(format!("<0x{byte:02X}>").as_str()))
        };
        // With these, a character is looked up under another name at some places.
        let plain = [&model.continuing_subword_prefix, &model.end_of_word_suffix];
        if !has_all || plain.iter().any(|part| part.as_ref().is_some_and(|part| !part.is_empty())) {
            return None;
        }
        let longest = if bytewise {
            (0..text.len() as u32).filter_map(|id| text.bytes(id)).map(<[u8]>::len).max()
        } else {
            vocabulary.keys().map(String::len).max()
        };
        let longest = longest.max(added.values().map(|token| token.content.len()).max())?;
        Some(Self { bytes: reach.bytes.checked_mul(longest)?, ..reach })
    }

    fn normalized(&mut self, normalizer: &NormalizerWrapper, bytewise: &mut bool) -> Option<()> {
        let times = match normalizer {
            NormalizerWrapper::NFC(_)
            | NormalizerWrapper::NFD(_)
            | NormalizerWrapper::NFKC(_)
            | NormalizerWrapper::NFKD(_) => NORMAL_FORMS,
            NormalizerWrapper::Lowercase(_) => LOWER_CASE,
            NormalizerWrapper::Prepend(_) => 1,
            NormalizerWrapper::ByteLevel(_) => {
                *bytewise = true;
                1
            }
            NormalizerWrapper::StripNormalizer(_) => {
                self.counts_space = false;
                1
            }
            NormalizerWrapper::Replace(replace) => {
                // The pattern is not public, and what is saved is.
                let saved = serde_json::to_value(replace).ok()?;
                let pattern = saved["pattern"].get("String").and_then(Value::as_str)?;
                if replace.content.is_empty() {
                    return None;
                }
                pattern.len().div_ceil(replace.content.len())
            }
            NormalizerWrapper::Sequence(all) => {
                return all.as_ref().iter().try_for_each(|one| self.normalized(one, bytewise));
            }
            NormalizerWrapper::BertNormalizer(_)
            | NormalizerWrapper::StripAccents(_)
            | NormalizerWrapper::Nmt(_)
            | NormalizerWrapper::Precompiled(_) => return None,
        };
        self.bytes = self.bytes.checked_mul(times)?;
        Some(())
    }

    fn split(&mut self, pre_tokenizer: &PreTokenizerWrapper, bytewise: &mut bool) -> Option<()> {
        let removes = |behavior: &SplitDelimiterBehavior| *behavior == SplitDelimiterBehavior::Removed;
        match pre_tokenizer {
            PreTokenizerWrapper::ByteLevel(_) => *bytewise = true,
            PreTokenizerWrapper::Split(split) if removes(&split.behavior) => return None,
            PreTokenizerWrapper::Punctuation(split) if removes(&split.behavior) => return None,
            PreTokenizerWrapper::Delimiter(_) => return None,
            PreTokenizerWrapper::Whitespace(_)
            | PreTokenizerWrapper::WhitespaceSplit(_)
            | PreTokenizerWrapper::BertPreTokenizer(_) => self.counts_space = false,
            PreTokenizerWrapper::Sequence(all) => {
                return all.as_ref().iter().try_for_each(|one| self.split(one, bytewise));
            }
            PreTokenizerWrapper::Metaspace(_)
            | PreTokenizerWrapper::Split(_)
            | PreTokenizerWrapper::Punctuation(_)
            | PreTokenizerWrapper::Digits(_)
            | PreTokenizerWrapper::UnicodeScripts(_)
            | PreTokenizerWrapper::FixedLength(_) => {}
        }
        Some(())
    }

    /// Tokens that a text has at least.
    pub(super) fn fewest_tokens(self, text: &str) -> usize {
        let bytes = if self.counts_space {
            text.len()
        } else {
            text.chars().filter(|character| !character.is_whitespace()).map(char::len_utf8).sum()
        };
        bytes.div_ceil(self.bytes.max(1))
    }
}
