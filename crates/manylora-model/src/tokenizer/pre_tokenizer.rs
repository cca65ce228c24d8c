//! How text is cut into words before BPE, by the names GGUF files use (`tokenizer.ggml.pre`).
//!
//! The patterns are those of the models' own published `tokenizer.json` files, as llama.cpp names them. An unknown name
//! is refused: with another pattern the model would see other tokens than it was trained on, and nothing would tell.

use tokenizers::SplitDelimiterBehavior;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

use crate::error::ModelError;

/// Everything a pre-tokenizer's name decides.
pub(super) struct PreTokenizer {
    /// Applied one after the other, each to the pieces of the one before.
    patterns: &'static [&'static str],
    /// A word that is a token as a whole is not built up by merges.
    pub(super) ignore_merges: bool,
    /// Whether a prompt starts with bos when the file does not say.
    pub(super) adds_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

impl PreTokenizer {
    /// By name; none at all is `default`, as in files from before the key existed.
    pub(super) fn named(name: Option<&str>) -> Result<Self, ModelError> {
        let plain = |patterns| Self { patterns, ignore_merges: false, adds_bos: false };
        Ok(match name.unwrap_or("default") {
            "default" => plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
            "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" => plain(&[GPT2]),
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" => {
                plain(&[r"\p{N}", GPT2])
            }
            "qwen2" | "deepseek-r1-qwen" | "stablelm2" => plain(&[QWEN2]),
            "qwen35" => plain(&[QWEN35]),
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "pixtral" => {
                Self { patterns: &[LLAMA3], ignore_merges: true, adds_bos: true }
            }
            "dbrx" | "smaug-bpe" => plain(&[LLAMA3]),
            "tekken" => Self { patterns: &[TEKKEN], ignore_merges: true, adds_bos: true },
            "deepseek-v3" => plain(&[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3]),
            "falcon" => plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
            unknown => {
                return Err(ModelError::Unsupported {
                    message: format!(
                        "the GGUF file's pre-tokenizer `{unknown}` (tokenizer.ggml.pre) is not known; guessing another \
                         one would change the tokens silently, so use the model's safetensors folder with its \
                         tokenizer.json instead"
                    ),
                });
            }
        })
    }

    /// The cutting steps, then the byte alphabet.
    pub(super) fn build(&self) -> Result<Sequence, ModelError> {
        let mut steps = Vec::new();
        for pattern in self.patterns {
            let pattern = SplitPattern::Regex((*pattern).to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map_err(|error| ModelError::Tokenizer(format!("the pre-tokenizer's pattern is broken: {error}")))?;
            steps.push(PreTokenizerWrapper::Split(split));
        }
        steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, false)));
        Ok(Sequence::new(steps))
    }
}
