//! A sampler as a request has it that asks for nothing but its parameters.

use manylora::sampler::{PromptTokens, RandomKey, SamplerSetup, SequenceSampler};
use manylora_core::SamplingParams;
use manylora_core::sampling::LogprobsMode;

/// What it is made from, with the random numbers of a key.
#[allow(dead_code, reason = "not every test program draws with keys of its own")]
pub(crate) fn setup(vocab_size: usize, key: RandomKey) -> SamplerSetup<'static> {
    let logprobs_mode = LogprobsMode::RawLogprobs;
    SamplerSetup { prompt: &PromptTokens::NONE, vocab_size, end_tokens: &[], bad_words: &[], key, logprobs_mode }
}

/// The sampler of a request with a seed.
pub(crate) fn sampler(params: &SamplingParams, vocab_size: usize, seed: i64) -> SequenceSampler {
    SequenceSampler::new(params, setup(vocab_size, RandomKey::of_request(seed, 0)))
}
