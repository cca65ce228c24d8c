//! Checks of sampling parameters, with the messages that vLLM's users know: each names the value and the range.

use std::collections::HashSet;
use std::hash::Hash;

use super::{
    MAX_BAD_WORD_BYTES, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_BYTES, MAX_STOP_STRINGS, MIN_TEMPERATURE,
    SamplingLimits, SamplingParams,
};
use crate::error::CoreError;

/// Parameters in the form that the engine works with, and what the caller should be told about the change.
#[derive(Clone, Debug, PartialEq)]
pub struct NormalizedSampling {
    /// The parameters.
    pub params: SamplingParams,
    /// One line for each value that was changed and not merely spelled differently.
    pub warnings: Vec<String>,
}

pub(super) fn refuse<T>(parameter: &'static str, message: String) -> Result<T, CoreError> {
    Err(CoreError::InvalidArgument { parameter, message })
}

fn check_range(parameter: &'static str, value: f64, valid: bool, range: &str) -> Result<(), CoreError> {
    if valid { Ok(()) } else { refuse(parameter, format!("{parameter} must be {range}, got {value:?}.")) }
}

/// Each token is compared with them, on the thread that serves everybody.
fn check_size(parameter: &'static str, texts: &[String], most: usize, most_bytes: usize) -> Result<(), CoreError> {
    let bytes: usize = texts.iter().map(String::len).sum();
    if texts.len() <= most && bytes <= most_bytes {
        return Ok(());
    }
    let message =
        format!("{parameter} can have {most} strings of {most_bytes} bytes in all, got {} of {bytes}.", texts.len());
    refuse(parameter, message)
}

/// The ids that are not tokens of the model.
fn out_of_vocabulary(ids: impl IntoIterator<Item = u32>, vocab_size: usize) -> Vec<u32> {
    ids.into_iter().filter(|&id| id as usize >= vocab_size).collect()
}

fn check_vocabulary(
    parameter: &'static str,
    ids: impl IntoIterator<Item = u32>,
    vocab_size: usize,
) -> Result<(), CoreError> {
    let invalid = out_of_vocabulary(ids, vocab_size);
    if invalid.is_empty() {
        return Ok(());
    }
    let message =
        format!("token_id(s) {invalid:?} in {parameter} contain out-of-vocab token ids. Vocabulary size: {vocab_size}");
    refuse(parameter, message)
}

/// Keeps the first of equal values.
fn deduplicate<T: Clone + Eq + Hash>(values: &mut Vec<T>) {
    let mut seen = HashSet::with_capacity(values.len());
    values.retain(|value| seen.insert(value.clone()));
}

impl SamplingParams {
    /// Checks all that can be checked without a model and spells equal settings in one way: seed -1 is none,
    /// duplicates are dropped, biases are clamped, positive temperatures below [`MIN_TEMPERATURE`] are raised to it
    /// (with a warning), and greedy sampling switches top_p, top_k and min_p off.
    pub fn normalize(&self) -> Result<NormalizedSampling, CoreError> {
        check_size("stop", &self.stop, MAX_STOP_STRINGS, MAX_STOP_BYTES)?;
        check_size("bad_words", &self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_BYTES)?;
        let mut params = self.clone();
        let mut warnings = Vec::new();
        if params.temperature > 0.0 && params.temperature < MIN_TEMPERATURE {
            warnings.push(format!(
                "temperature `{:?}` is below {MIN_TEMPERATURE}, where probabilities overflow; {MIN_TEMPERATURE} is used \
                 instead (0 is greedy sampling)",
                params.temperature
            ));
            params.temperature = MIN_TEMPERATURE;
        }
        if params.seed == Some(-1) {
            params.seed = None;
        }
        params.check_numbers()?;
        params.check_texts()?;
        deduplicate(&mut params.stop_token_ids);
        deduplicate(&mut params.bad_words);
        for bias in params.logit_bias.values_mut() {
            *bias = bias.clamp(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS);
        }
        if params.is_greedy() {
            params.top_p = 1.0;
            params.top_k = 0;
            params.min_p = 0.0;
            if params.n > 1 {
                return refuse("n", format!("n must be 1 when using greedy sampling, got {}.", params.n));
            }
        }
        if params.prompt_logprobs.is_some() {
            params.skip_reading_prefix_cache = Some(true);
        }
        params.skip_reading_prefix_cache.get_or_insert(false);
        Ok(NormalizedSampling { params, warnings })
    }

    /// [`Self::normalize`], then the checks against a model's vocabulary and an engine's limits.
    pub fn validate_and_normalize(&self, limits: &SamplingLimits) -> Result<NormalizedSampling, CoreError> {
        let normalized = self.normalize()?;
        normalized.params.check_limits(limits)?;
        Ok(normalized)
    }

    fn check_numbers(&self) -> Result<(), CoreError> {
        if self.n < 1 {
            return refuse("n", format!("n must be at least 1, got {}.", self.n));
        }
        let penalties = [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)];
        for (name, penalty) in penalties {
            check_range(name, penalty, (-2.0..=2.0).contains(&penalty), "in [-2, 2]")?;
        }
        let repetition = self.repetition_penalty;
        check_range("repetition_penalty", repetition, repetition.is_finite(), "a finite number")?;
        check_range("repetition_penalty", repetition, repetition > 0.0, "greater than zero")?;
        let temperature = self.temperature;
        check_range("temperature", temperature, temperature.is_finite(), "a finite number")?;
        check_range("temperature", temperature, temperature >= 0.0, "non-negative")?;
        check_range("temperature", temperature, temperature <= 2.0, "in [0, 2]")?;
        check_range("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "in (0, 1]")?;
        if self.top_k < -1 {
            return refuse("top_k", format!("top_k must be 0 (disable), or at least 1, got {}.", self.top_k));
        }
        check_range("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "in [0, 1]")?;
        if let Some(max_tokens) = self.max_tokens {
            if max_tokens < 1 {
                return refuse("max_tokens", format!("max_tokens must be at least 1, got {max_tokens}."));
            }
            if self.min_tokens > max_tokens {
                let message = format!(
                    "min_tokens must be less than or equal to max_tokens={max_tokens}, got {}.",
                    self.min_tokens
                );
                return refuse("min_tokens", message);
            }
        }
        for (name, count) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if let Some(count) = count.filter(|&count| count < -1) {
                return refuse(name, format!("{name} must be non-negative or -1, got {count}."));
            }
        }
        if let Some((token, _)) = self.logit_bias.iter().find(|(_, bias)| bias.is_nan()) {
            return refuse("logit_bias", format!("logit_bias of token `{token}` must be a number, got NaN."));
        }
        Ok(())
    }

    fn check_texts(&self) -> Result<(), CoreError> {
        if self.stop.iter().any(String::is_empty) {
            return refuse("stop", format!("stop cannot contain an empty string. Got stop={:?}", self.stop));
        }
        if !self.stop.is_empty() && !self.detokenize {
            let message = format!(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop={:?}.",
                self.stop
            );
            return refuse("stop", message);
        }
        if self.bad_words.iter().any(String::is_empty) {
            let message = format!("bad_words cannot contain an empty string. Got bad_words={:?}", self.bad_words);
            return refuse("bad_words", message);
        }
        if let Some(outputs) = &self.structured_outputs {
            outputs.constraint()?;
        }
        Ok(())
    }

    fn check_limits(&self, limits: &SamplingLimits) -> Result<(), CoreError> {
        if self.n > limits.max_n {
            return refuse("n", format!("n must be at most {}, got {}.", limits.max_n, self.n));
        }
        let vocab_size = limits.vocab_size;
        let allowed = usize::try_from(limits.max_logprobs).unwrap_or(vocab_size);
        let counts = [("logprobs", "sample", self.logprobs), ("prompt_logprobs", "prompt", self.prompt_logprobs)];
        for (name, kind, count) in counts {
            let Some(count) = count else { continue };
            let count = usize::try_from(count).unwrap_or(vocab_size);
            if count > allowed {
                let message = format!(
                    "Requested {kind} logprobs of {count}, which is greater than max allowed: {allowed}. Raise \
                     max_logprobs, or set it to -1 for the whole vocabulary."
                );
                return refuse(name, message);
            }
        }
        check_vocabulary("logit_bias", self.logit_bias.keys().copied(), vocab_size)?;
        check_vocabulary("stop_token_ids", self.stop_token_ids.iter().copied(), vocab_size)?;
        if let Some(allowed) = &self.allowed_token_ids {
            if allowed.is_empty() {
                let message = "allowed_token_ids is not None and empty! Name at least one token, or leave it out.";
                return refuse("allowed_token_ids", message.into());
            }
            check_vocabulary("allowed_token_ids", allowed.iter().copied(), vocab_size)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "validation_tests.rs"]
mod tests;
