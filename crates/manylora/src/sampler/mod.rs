//! From logits to the next token: vLLM's sampling semantics, as a pure function of one sequence.
//!
//! A token depends on the row's logits, the parameters, the sequence's own prompt and output, and a random number that
//! is computed from (seed, sample, position): never on the batch (promise P3). A row goes through these steps, in
//! vLLM's order:
//!
//! 1. logprobs are taken from the raw logits ([`token_logprobs`]);
//! 2. the grammar of a structured output, `allowed_token_ids`, `bad_words` and `min_tokens` mask tokens, `logit_bias` is added;
//! 3. repetition, frequency and presence penalties;
//! 4. greedy: the largest logit, the lowest id of equal ones. Otherwise temperature, min_p, top_k (ties for the last
//!    place stay), top_p, and a draw.
//!
//! Where nothing changes a row, the greedy token or, under top_k, the largest values are all that is needed of it
//! ([`SequenceSampler::need`]): a device can be asked for these, and the token is the same.
//!
//! NaN counts as minus infinity everywhere. A row that leaves nothing to choose gives the lowest id that no mask
//! excludes; where the masks exclude all, the grammar counts most.

mod arithmetic;
mod history;
mod logprobs;
mod random;
mod selection;

use manylora_core::sampling::{LogprobCount, LogprobsMode, SamplingParams};
use manylora_kernels::{LargestValues, ListedValues};

use arithmetic::ln;
use history::{BadWords, Penalties};
use logprobs::Listed;
use selection::{Filters, SelectionScratch};

use crate::structure::{Constraint, Fault};

pub use arithmetic::argmax;
pub use history::{PromptTokens, bad_word_sequences};
pub use logprobs::{TokenLogprob, TokenLogprobs, token_logprobs};
pub use random::RandomKey;

/// What a sequence's sampler needs to know besides the parameters.
#[derive(Clone, Copy, Debug)]
pub struct SamplerSetup<'a> {
    /// Tokens of the prompt, as far as penalties need them.
    pub prompt: &'a PromptTokens,
    /// Length of a row of logits.
    pub vocab_size: usize,
    /// Tokens that `min_tokens` holds back: the model's end tokens (also under `ignore_eos`) and `stop_token_ids`.
    pub end_tokens: &'a [u32],
    /// Token sequences of `bad_words`, from [`bad_word_sequences`].
    pub bad_words: &'a [Vec<u32>],
    /// The sequence's random numbers.
    pub key: RandomKey,
    /// What logprobs are.
    pub logprobs_mode: LogprobsMode,
}

/// Memory that one row after the other uses; one per thread.
#[derive(Clone, Debug, Default)]
pub struct SamplerScratch {
    processed: Vec<f32>,
    selection: SelectionScratch,
    listed: Vec<Listed>,
    tied: Vec<Listed>,
}

impl SamplerScratch {
    /// Room for the usual row of a vocabulary; what rarer settings need grows on first use.
    pub fn for_vocabulary(vocab_size: usize) -> Self {
        Self {
            processed: Vec::with_capacity(vocab_size),
            selection: SelectionScratch::for_vocabulary(vocab_size),
            listed: Vec::new(),
            tied: Vec::new(),
        }
    }
}

/// What the next token needs of a row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowNeed {
    /// Its [`argmax`], which is passed to [`SequenceSampler::accept`].
    Greedy,
    /// Its so many largest values, and what ties with the last of them: [`SequenceSampler::sample_listed`]. The whole row
    /// gives the same token.
    Largest(usize),
    /// All of it: [`SequenceSampler::sample`].
    Row,
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Logprobs, if the request asked for them.
    pub logprobs: Option<TokenLogprobs>,
}

/// Chooses the tokens of one sequence.
#[derive(Clone, Debug)]
pub struct SequenceSampler {
    /// None = greedy.
    filters: Option<Filters>,
    /// Sorted, without duplicates.
    allowed: Option<Vec<u32>>,
    /// What a structured output permits.
    constraint: Option<Constraint>,
    bad_words: BadWords,
    min_tokens: usize,
    end_tokens: Vec<u32>,
    logit_bias: Vec<(u32, f32)>,
    penalties: Option<Penalties>,
    logprobs: Option<LogprobCount>,
    logprobs_mode: LogprobsMode,
    key: RandomKey,
    output_len: usize,
}

impl SequenceSampler {
    /// A sampler at the start of the output. The parameters are those of
    /// [`SamplingParams::validate_and_normalize`]; ids outside the vocabulary have no effect.
    pub fn new(params: &SamplingParams, setup: SamplerSetup<'_>) -> Self {
        let filters = (!params.is_greedy()).then(|| Filters {
            inverse_temperature: (1.0 / params.temperature) as f32,
            min_p_logarithm: if params.min_p > 0.0 {
                ln(params.min_p.max(f64::MIN_POSITIVE)) as f32
            } else {
                f32::NEG_INFINITY
            },
            top_k: params.top_k_limit().filter(|&k| k < setup.vocab_size),
            top_p: params.top_p,
        });
        let allowed = params.allowed_token_ids.as_ref().map(|ids| {
            let mut ids: Vec<u32> = ids.iter().copied().filter(|&id| (id as usize) < setup.vocab_size).collect();
            ids.sort_unstable();
            ids.dedup();
            ids
        });
        Self {
            filters,
            allowed,
            constraint: None,
            bad_words: BadWords::new(setup.bad_words),
            min_tokens: params.min_tokens,
            end_tokens: if params.min_tokens > 0 { setup.end_tokens.to_vec() } else { Vec::new() },
            logit_bias: params.logit_bias.iter().map(|(&token, &bias)| (token, bias)).collect(),
            penalties: Penalties::new(params, setup.prompt),
            logprobs: params.logprobs.map(LogprobCount::from_parameter),
            logprobs_mode: setup.logprobs_mode,
            key: setup.key,
            output_len: 0,
        }
    }

    /// The sampler of a structured output, or this one where there is none.
    #[must_use]
    pub(crate) fn under(self, constraint: Option<Constraint>) -> Self {
        Self { constraint, ..self }
    }

    /// Gives away the constraint, where it can do of the next token's work what needs no logits ([`Constraint::prepare`]);
    /// [`Self::sample`] does it otherwise. It must be given back before a token is chosen, by [`Self::put_back`].
    pub(crate) fn take_unprepared(&mut self) -> Option<Constraint> {
        self.constraint.take_if(|constraint| constraint.is_unprepared())
    }

    /// See [`Self::take_unprepared`].
    pub(crate) fn put_back(&mut self, constraint: Constraint) {
        self.constraint = Some(constraint);
    }

    /// Whether the output is structured and nothing can follow what was chosen.
    pub(crate) fn is_complete(&self) -> bool {
        self.constraint.as_ref().is_some_and(Constraint::is_complete)
    }

    /// Why the structure of the output can be followed no further, if it cannot.
    pub(crate) fn fault(&self) -> Option<&Fault> {
        self.constraint.as_ref()?.fault()
    }

    /// Tokens chosen so far.
    pub fn output_len(&self) -> usize {
        self.output_len
    }

    /// What the next token needs of its row.
    pub fn need(&self) -> RowNeed {
        if self.logprobs.is_some() || self.changes_logits() {
            return RowNeed::Row;
        }
        match &self.filters {
            None => RowNeed::Greedy,
            Some(Filters { top_k: Some(k), .. }) if *k <= LargestValues::MOST => RowNeed::Largest(*k),
            Some(_) => RowNeed::Row,
        }
    }

    /// Chooses the next token from a row of raw logits (shape: vocabulary) and counts it.
    pub fn sample(&mut self, logits: &[f32], scratch: &mut SamplerScratch) -> Sampled {
        if let Some(constraint) = &mut self.constraint {
            constraint.prepare();
        }
        let token = self.choose(logits, scratch);
        let logprobs = self.logprobs.map(|top| token_logprobs(logits, token, top, self.logprobs_mode, scratch));
        self.accept(token);
        Sampled { token, logprobs }
    }

    /// Chooses the next token, where [`Self::need`] says that a list is enough, from one of at least so many values, and
    /// counts it: the token that [`Self::sample`] chooses from the row.
    pub fn sample_listed(&mut self, listed: ListedValues<'_>, scratch: &mut SamplerScratch) -> u32 {
        let uniform = self.key.uniform(self.output_len as u32);
        let ListedValues { values, tokens } = listed;
        let drawn =
            self.filters.and_then(|filters| filters.draw_listed(values, tokens, uniform, &mut scratch.selection));
        // Nothing is masked, so the lowest permitted token is the first.
        let token = drawn.unwrap_or(0);
        self.accept(token);
        token
    }

    /// Counts a token that was chosen elsewhere.
    pub fn accept(&mut self, token: u32) {
        self.output_len += 1;
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(token);
        }
        self.bad_words.record(token);
        if let Some(penalties) = &mut self.penalties {
            penalties.count(token);
        }
    }

    /// The distribution of the next token: every token that can be chosen, by id, with its probability. A greedy
    /// sampler has one token with probability 1.
    pub fn probabilities(&self, logits: &[f32], scratch: &mut SamplerScratch) -> Vec<(u32, f64)> {
        let SamplerScratch { processed, selection, .. } = scratch;
        let row = self.processed_row(logits, processed);
        let distribution = match &self.filters {
            None => argmax(row).map(|token| vec![(token, 1.0)]),
            Some(filters) => filters.probabilities(row, selection),
        };
        distribution.unwrap_or_else(|| vec![(self.lowest_permitted(logits.len()), 1.0)])
    }

    fn choose(&self, logits: &[f32], scratch: &mut SamplerScratch) -> u32 {
        let SamplerScratch { processed, selection, .. } = scratch;
        let row = self.processed_row(logits, processed);
        let choice = match &self.filters {
            None => argmax(row),
            Some(filters) => filters.draw(row, self.key.uniform(self.output_len as u32), selection),
        };
        choice.unwrap_or_else(|| self.lowest_permitted(logits.len()))
    }

    fn holds_back_end_tokens(&self) -> bool {
        self.output_len < self.min_tokens && !self.end_tokens.is_empty()
    }

    fn changes_logits(&self) -> bool {
        self.allowed.is_some()
            || self.constraint.is_some()
            || !self.bad_words.is_empty()
            || self.holds_back_end_tokens()
            || !self.logit_bias.is_empty()
            || self.penalties.is_some()
    }

    /// The tokens that must not come next although `allowed_token_ids` has them.
    fn banned(&self) -> impl Iterator<Item = u32> {
        let held_back: &[u32] = if self.holds_back_end_tokens() { &self.end_tokens } else { &[] };
        self.bad_words.banned().chain(held_back.iter().copied())
    }

    /// The row after masks, biases and penalties: the given one when there are none.
    fn processed_row<'a>(&self, logits: &'a [f32], processed: &'a mut Vec<f32>) -> &'a [f32] {
        if !self.changes_logits() {
            return logits;
        }
        processed.clear();
        match &self.allowed {
            None => processed.extend_from_slice(logits),
            Some(allowed) => {
                processed.resize(logits.len(), f32::NEG_INFINITY);
                for &token in allowed {
                    if let (Some(to), Some(&from)) = (processed.get_mut(token as usize), logits.get(token as usize)) {
                        *to = from;
                    }
                }
            }
        }
        if let Some(constraint) = &self.constraint {
            constraint.mask(processed);
        }
        for token in self.banned() {
            if let Some(logit) = processed.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        for &(token, bias) in &self.logit_bias {
            if let Some(logit) = processed.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if let Some(penalties) = &self.penalties {
            penalties.apply(processed);
        }
        processed
    }

    /// The answer for a row without any finite logit: the lowest id that no mask excludes. If all are excluded, the lowest
    /// that the grammar permits, an allowed one where there is any; without a grammar the lowest allowed one.
    fn lowest_permitted(&self, vocab_size: usize) -> u32 {
        let mut banned: Vec<u32> = self.banned().collect();
        banned.sort_unstable();
        let grammatical = |token: &u32| self.constraint.as_ref().is_none_or(|constraint| constraint.permits(*token));
        let permitted = |token: &u32| grammatical(token) && banned.binary_search(token).is_err();
        let all = || 0..vocab_size as u32;
        match &self.allowed {
            Some(allowed) => {
                let allowed = || allowed.iter().copied();
                allowed().find(permitted).or_else(|| allowed().find(grammatical))
            }
            None => all().find(permitted),
        }
        .or_else(|| all().find(grammatical))
        .unwrap_or(0)
    }
}
