//! Logprobs of output and prompt tokens, from the model's logits as they are.

use manylora_core::sampling::{LogprobCount, LogprobsMode};

use super::SamplerScratch;
use super::arithmetic::{ln, mass, maximum};
use super::selection::kth_largest;

/// A token with its logprob.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Its log-probability, or its logit under [`LogprobsMode::RawLogits`].
    pub logprob: f32,
    /// 1 + the number of tokens with a larger logit; equal logits share a rank.
    pub rank: u32,
}

/// The logprobs at one position: the chosen token first, then the most likely others, most likely first and of equal
/// ones the lowest id first. The chosen token is listed once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLogprobs {
    /// At least one; one more than asked for when the chosen token is not among the most likely ones.
    pub entries: Vec<TokenLogprob>,
}

impl TokenLogprobs {
    /// The logprob of the chosen token.
    pub fn chosen(&self) -> f32 {
        self.entries.first().map_or(f32::NEG_INFINITY, |entry| entry.logprob)
    }
}

/// A token that is listed, with its logit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Listed {
    logit: f32,
    token: u32,
}

/// A logit that is not a number counts as minus infinity.
fn comparable(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit }
}

/// The logprob of the chosen token and of the most likely ones in a row of raw logits (shape: vocabulary).
pub fn token_logprobs(
    logits: &[f32],
    chosen: u32,
    top: LogprobCount,
    mode: LogprobsMode,
    scratch: &mut SamplerScratch,
) -> TokenLogprobs {
    let top = match top {
        LogprobCount::Top(count) if count < logits.len() => count,
        _ => logits.len(),
    };
    let logprob = log_softmax(logits, mode);
    list_most_likely(logits, top, scratch);
    let listed = &scratch.listed;

    let mut entries = Vec::with_capacity(top + 1);
    let chosen_logit = logits.get(chosen as usize).map_or(f32::NEG_INFINITY, |&logit| comparable(logit));
    let larger = logits.iter().filter(|&&logit| logit > chosen_logit).count();
    entries.push(TokenLogprob { token: chosen, logprob: logprob(chosen_logit), rank: larger as u32 + 1 });
    let mut rank = 1;
    for (index, &Listed { logit, token }) in listed.iter().enumerate() {
        if index > 0 && logit < listed[index - 1].logit {
            rank = index as u32 + 1;
        }
        if token != chosen {
            entries.push(TokenLogprob { token, logprob: logprob(logit), rank });
        }
    }
    TokenLogprobs { entries }
}

/// How a logit of this row becomes a logprob.
fn log_softmax(logits: &[f32], mode: LogprobsMode) -> impl Fn(f32) -> f32 {
    let top = maximum(logits);
    let log_mass = match mode {
        LogprobsMode::RawLogits => 0.0,
        LogprobsMode::RawLogprobs if top.is_finite() => ln(mass(logits, top)),
        // Infinite logits share the probability among them.
        LogprobsMode::RawLogprobs => ln(logits.iter().filter(|&&logit| logit == f32::INFINITY).count().max(1) as f64),
    };
    move |logit| {
        if mode == LogprobsMode::RawLogits || logit == f32::NEG_INFINITY {
            logit
        } else if logit == top {
            (0.0 - log_mass) as f32
        } else {
            (f64::from(logit) - f64::from(top) - log_mass) as f32
        }
    }
}

/// Fills `scratch.listed` with the `count` most likely tokens in order.
fn list_most_likely(logits: &[f32], count: usize, scratch: &mut SamplerScratch) {
    let SamplerScratch { listed, tied, selection, .. } = scratch;
    listed.clear();
    tied.clear();
    if count == 0 {
        return;
    }
    let all = count == logits.len();
    let threshold = if all { f32::NEG_INFINITY } else { kth_largest(logits, count, selection.values()) };
    for (token, &logit) in (0..).zip(logits) {
        // Written so that NaN passes when everything does.
        if logit < threshold {
            continue;
        }
        let logit = comparable(logit);
        if logit > threshold {
            listed.push(Listed { logit, token });
        } else if logit == threshold && tied.len() < count {
            tied.push(Listed { logit, token });
        }
    }
    let room = count - listed.len();
    listed.extend(tied.iter().take(room));
    listed.sort_unstable_by(|a, b| b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token)));
}
