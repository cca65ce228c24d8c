//! How a request wants its tokens chosen: vLLM's `SamplingParams`, with its names, defaults and limits.
//!
//! The parameters are plain data, so that they travel in traces and over the wire. They are checked in two steps, as
//! the things to check against become known: [`SamplingParams::normalize`] needs nothing, and
//! [`SamplingParams::validate_and_normalize`] needs the model's vocabulary and the engine's limits too.

mod structured;
mod validation;

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::CoreError;

pub use structured::{OutputConstraint, StructuredOutputs};
pub use validation::NormalizedSampling;

/// Sequences that one request may ask for, unless [`SamplingLimits::max_n`] says otherwise.
pub const DEFAULT_MAX_N: usize = 16_384;
/// Logprobs per token that one request may ask for, unless [`SamplingLimits::max_logprobs`] says otherwise.
pub const DEFAULT_MAX_LOGPROBS: i32 = 20;
/// The lowest temperature that is not greedy; lower positive ones are raised to it.
pub const MIN_TEMPERATURE: f64 = 0.01;
/// Below this temperature the most likely token is taken.
pub const GREEDY_TEMPERATURE: f64 = 1e-5;
/// Logit biases are clamped to plus and minus this value.
pub const MAX_LOGIT_BIAS: f32 = 100.0;

/// Stop strings that one request may have.
pub const MAX_STOP_STRINGS: usize = 1024;
/// Bytes of its stop strings together.
pub const MAX_STOP_BYTES: usize = 32 << 10;
/// Bad words that one request may have.
pub const MAX_BAD_WORDS: usize = 4096;
/// Bytes of its bad words together.
pub const MAX_BAD_WORD_BYTES: usize = 64 << 10;

/// What a logprob is computed from and as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogprobsMode {
    /// The log-softmax of the model's logits, before temperature, penalties and masks.
    #[default]
    RawLogprobs,
    /// The model's logits themselves.
    RawLogits,
}

impl FromStr for LogprobsMode {
    type Err = CoreError;

    fn from_str(name: &str) -> Result<Self, CoreError> {
        match name {
            "raw_logprobs" => Ok(Self::RawLogprobs),
            "raw_logits" => Ok(Self::RawLogits),
            _ => Err(CoreError::InvalidArgument {
                parameter: "logprobs_mode",
                message: format!("logprobs_mode must be `raw_logprobs` or `raw_logits`, got `{name}`."),
            }),
        }
    }
}

/// How many tokens are listed with their logprobs, besides the chosen one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogprobCount {
    /// The most likely ones; 0 = only the chosen token.
    Top(usize),
    /// The whole vocabulary.
    All,
}

impl LogprobCount {
    /// Reads the parameters `logprobs` and `prompt_logprobs`, where a negative number stands for the whole vocabulary.
    pub fn from_parameter(count: i32) -> Self {
        usize::try_from(count).map_or(Self::All, Self::Top)
    }
}

/// What an engine allows, and the vocabulary of its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplingLimits {
    /// Tokens that the model has logits for.
    pub vocab_size: usize,
    /// Logprobs per token; -1 allows the whole vocabulary.
    pub max_logprobs: i32,
    /// Sequences per request.
    pub max_n: usize,
}

impl SamplingLimits {
    /// vLLM's default limits for a vocabulary.
    pub fn for_vocabulary(vocab_size: usize) -> Self {
        Self { vocab_size, max_logprobs: DEFAULT_MAX_LOGPROBS, max_n: DEFAULT_MAX_N }
    }
}

/// Sampling parameters of a request. Names, defaults and meaning are those of vLLM's class of the same name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[expect(clippy::struct_excessive_bools, reason = "the fields are vLLM's")]
pub struct SamplingParams {
    /// Sequences to generate for the prompt.
    pub n: usize,
    /// Subtracted from the logit of every token that the output already has; in \[-2, 2\].
    pub presence_penalty: f64,
    /// Subtracted from a token's logit once per occurrence in the output; in \[-2, 2\].
    pub frequency_penalty: f64,
    /// Divides the positive and multiplies the negative logits of tokens in the prompt or the output; above 0.
    pub repetition_penalty: f64,
    /// Divides the logits; 0 takes the most likely token; in \[0, 2\].
    pub temperature: f64,
    /// Keeps the most likely tokens whose probabilities first add up to this; in (0, 1\].
    pub top_p: f64,
    /// Keeps this many of the most likely tokens (more when several tie for the last place); 0 and -1 keep all.
    pub top_k: i64,
    /// Keeps tokens that are at least this fraction as likely as the most likely one; in \[0, 1\].
    pub min_p: f64,
    /// Makes the draws reproducible; None and -1 leave them to the engine's own seed.
    pub seed: Option<i64>,
    /// Texts that end the output.
    pub stop: Vec<String>,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<u32>,
    /// Words that must not appear: the token that would complete one is never chosen.
    pub bad_words: Vec<String>,
    /// Whether the model's end token is a token like any other.
    pub ignore_eos: bool,
    /// Tokens to generate at most; None = as many as the context has room for.
    pub max_tokens: Option<usize>,
    /// Tokens to generate before the end token or a stop token can be chosen.
    pub min_tokens: usize,
    /// Most likely tokens to list per output token, besides the chosen one; -1 = the whole vocabulary.
    pub logprobs: Option<i32>,
    /// The same for every prompt token.
    pub prompt_logprobs: Option<i32>,
    /// Whether the output is turned into text at all.
    pub detokenize: bool,
    /// Whether special tokens are left out of the text.
    pub skip_special_tokens: bool,
    /// Whether special tokens in the text are set off by spaces.
    pub spaces_between_special_tokens: bool,
    /// Whether the text keeps the stop string that ended it.
    pub include_stop_str_in_output: bool,
    /// Added to the logits of these tokens; clamped to \[-100, 100\].
    pub logit_bias: BTreeMap<u32, f32>,
    /// If given, no other token is ever chosen.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Whether the prompt is computed although its blocks are cached; None = only for prompt logprobs, which need it.
    pub skip_reading_prefix_cache: Option<bool>,
    /// What the output must be; None = whatever comes.
    pub structured_outputs: Option<StructuredOutputs>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            n: 1,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            bad_words: Vec::new(),
            ignore_eos: false,
            max_tokens: Some(16),
            min_tokens: 0,
            logprobs: None,
            prompt_logprobs: None,
            detokenize: true,
            skip_special_tokens: true,
            spaces_between_special_tokens: true,
            include_stop_str_in_output: false,
            logit_bias: BTreeMap::new(),
            allowed_token_ids: None,
            skip_reading_prefix_cache: None,
            structured_outputs: None,
        }
    }
}

impl SamplingParams {
    /// Takes the most likely token each time, up to `max_tokens` tokens.
    pub fn greedy(max_tokens: usize) -> Self {
        Self { temperature: 0.0, max_tokens: Some(max_tokens), ..Self::default() }
    }

    /// Whether the most likely token is taken and no random number is drawn.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_TEMPERATURE
    }

    /// The most tokens to choose from by `top_k`, None when it is off.
    pub fn top_k_limit(&self) -> Option<usize> {
        usize::try_from(self.top_k).ok().filter(|&limit| limit > 0)
    }

    /// Bytes of lists that each sequence has for itself.
    pub fn list_bytes(&self) -> usize {
        let texts = self.stop.iter().chain(&self.bad_words).map(|text| size_of::<String>() + text.len());
        let ids = self.stop_token_ids.len() + self.allowed_token_ids.as_ref().map_or(0, Vec::len);
        texts.sum::<usize>() + ids * size_of::<u32>() + self.logit_bias.len() * size_of::<(u32, f32)>()
    }

    /// Whether any of the three penalties has an effect.
    pub fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_vllm() {
        let params: SamplingParams = serde_json::from_str("{}").expect("every field has a default");
        assert_eq!(params, SamplingParams::default());
        assert_eq!((params.n, params.max_tokens, params.min_tokens), (1, Some(16), 0));
        assert_eq!((params.temperature, params.top_p, params.top_k, params.min_p), (1.0, 1.0, 0, 0.0));
        assert_eq!((params.presence_penalty, params.frequency_penalty, params.repetition_penalty), (0.0, 0.0, 1.0));
        assert!(params.detokenize && params.skip_special_tokens && params.spaces_between_special_tokens);
        assert!(!params.ignore_eos && !params.include_stop_str_in_output);
        assert_eq!((params.seed, params.logprobs, params.prompt_logprobs), (None, None, None));
    }

    #[test]
    fn serialization_keeps_every_field() {
        let params = SamplingParams {
            n: 3,
            temperature: 0.7,
            seed: Some(-5),
            stop: vec!["\n\n".into()],
            stop_token_ids: vec![2],
            bad_words: vec!["no".into()],
            max_tokens: None,
            logit_bias: BTreeMap::from([(7, -1.5)]),
            allowed_token_ids: Some(vec![1, 7]),
            skip_reading_prefix_cache: Some(true),
            structured_outputs: Some(StructuredOutputs { regex: Some("[ab]+".into()), ..StructuredOutputs::default() }),
            ..SamplingParams::default()
        };
        let text = serde_json::to_string(&params).expect("serializable");
        assert_eq!(serde_json::from_str::<SamplingParams>(&text).expect("what was written"), params);
    }

    #[test]
    fn greedy_is_temperature_zero() {
        assert!(SamplingParams::greedy(4).is_greedy());
        assert!(!SamplingParams::default().is_greedy());
        assert!(!SamplingParams { temperature: MIN_TEMPERATURE, ..SamplingParams::default() }.is_greedy());
    }

    #[test]
    fn top_k_zero_and_minus_one_are_off() {
        let limit = |top_k| SamplingParams { top_k, ..SamplingParams::default() }.top_k_limit();
        assert_eq!((limit(-1), limit(0), limit(1), limit(40)), (None, None, Some(1), Some(40)));
    }

    #[test]
    fn logprob_modes_are_read_by_name() {
        assert_eq!("raw_logits".parse::<LogprobsMode>().expect("a mode"), LogprobsMode::RawLogits);
        assert_eq!("raw_logprobs".parse::<LogprobsMode>().expect("a mode"), LogprobsMode::RawLogprobs);
        let refusal = "processed_logits".parse::<LogprobsMode>().expect_err("not offered").to_string();
        assert_eq!(refusal, "logprobs_mode must be `raw_logprobs` or `raw_logits`, got `processed_logits`.");
    }

    #[test]
    fn a_negative_logprob_count_is_the_whole_vocabulary() {
        assert_eq!(LogprobCount::from_parameter(-1), LogprobCount::All);
        assert_eq!(LogprobCount::from_parameter(0), LogprobCount::Top(0));
        assert_eq!(LogprobCount::from_parameter(5), LogprobCount::Top(5));
    }
}
