//! What the engine counts and times while it runs. A steady step takes nothing here but counters: no memory, no lock, and
//! of the clock a few readings, however many sequences run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use manylora_core::FinishReason;
use manylora_model::RefusalKind;

use crate::error::EngineError;

/// Bounds of seconds to a first token.
pub const FIRST_TOKEN_SECONDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Bounds of seconds between two tokens.
pub const TOKEN_SECONDS: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
/// Bounds of seconds of requests, and of parts of them.
pub const REQUEST_SECONDS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
/// Bounds of seconds of loads.
const LOAD_SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// Bounds of distinct adapters per step.
const STEP_ADAPTERS: &[f64] = &[0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];
/// Bounds of rows per step.
const STEP_TOKENS: &[f64] = &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
/// Bounds of how often a request was preempted.
const PREEMPTIONS: &[f64] = &[0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0];
/// Bounds of tokens of requests, as far as a request can be long.
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6,
    1e7,
];

/// Those of 1, 2, 5, 10, 20, ... that are not above `most` tokens.
pub fn token_bounds(most: usize) -> &'static [f64] {
    &TOKENS[..TOKENS.partition_point(|&bound| bound <= most as f64)]
}

/// How values were distributed: a histogram with fixed bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
}

impl Distribution {
    /// Nothing yet; `bounds` ascend, and one more bucket takes what is above the last.
    pub fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    /// Takes a value.
    pub fn observe(&mut self, value: f64) {
        self.counts[self.bounds.partition_point(|&bound| bound < value)] += 1;
        self.sum += value;
    }

    /// Upper bounds, inclusive, each with how many values are in its bucket alone; the last one is infinite.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        self.bounds.iter().copied().chain([f64::INFINITY]).zip(self.counts.iter().copied())
    }

    /// Number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum of the values.
    pub const fn sum(&self) -> f64 {
        self.sum
    }
}

/// Samples by how they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// At an end token, stop token or stop string.
    pub stop: u64,
    /// At `max_tokens` or the context's end.
    pub length: u64,
    /// Cancelled.
    pub abort: u64,
    /// With an error.
    pub error: u64,
}

/// What the engine counted and timed so far. Seconds are measured from the moment a request was submitted.
#[derive(Clone, Debug, PartialEq)]
pub struct Meters {
    /// Distinct adapters per step.
    pub step_adapters: Distribution,
    /// Those of the last step.
    pub last_step_adapters: usize,
    /// Rows per step: tokens of prompts, and one per token to come.
    pub step_tokens: Distribution,
    /// Seconds that reading and packing an adapter took.
    pub load_seconds: Distribution,
    /// Adapters that submitted requests named, and those of them that were resident then.
    pub adapter_lookups: u64,
    /// See [`Self::adapter_lookups`].
    pub adapter_hits: u64,
    /// Prompt tokens of samples that got their first token, and those of them that came from the prefix cache.
    pub prompt_tokens: u64,
    /// See [`Self::prompt_tokens`].
    pub cached_prompt_tokens: u64,
    /// Tokens that were sampled.
    pub generation_tokens: u64,
    /// Seconds to the first token.
    pub time_to_first_token: Distribution,
    /// Seconds between tokens of a sample.
    pub inter_token_latency: Distribution,
    /// Samples that have ended.
    pub ended: Ended,
    /// Of samples that ended well: prompt tokens.
    pub request_prompt_tokens: Distribution,
    /// Those that were computed.
    pub request_computed_tokens: Distribution,
    /// Generated tokens.
    pub request_generation_tokens: Distribution,
    /// `max_tokens`.
    pub request_max_tokens: Distribution,
    /// Preemptions.
    pub request_preemptions: Distribution,
    /// Seconds from start to end.
    pub request_seconds: Distribution,
    /// Seconds until it was first scheduled.
    pub queue_seconds: Distribution,
    /// Seconds from there to the first token.
    pub prefill_seconds: Distribution,
    /// Seconds from there to the last token.
    pub decode_seconds: Distribution,
    /// Seconds of both.
    pub inference_seconds: Distribution,
    /// Mean seconds between tokens.
    pub seconds_per_token: Distribution,
    /// The last step in which each slot of the adapter table was used.
    used: Vec<u64>,
}

impl Meters {
    /// Nothing yet, for sequences of up to `max_model_len` tokens.
    pub(crate) fn new(max_model_len: usize) -> Self {
        let (tokens, seconds) =
            (|| Distribution::new(token_bounds(max_model_len)), || Distribution::new(REQUEST_SECONDS));
        Self {
            step_adapters: Distribution::new(STEP_ADAPTERS),
            last_step_adapters: 0,
            step_tokens: Distribution::new(STEP_TOKENS),
            load_seconds: Distribution::new(LOAD_SECONDS),
            adapter_lookups: 0,
            adapter_hits: 0,
            prompt_tokens: 0,
            cached_prompt_tokens: 0,
            generation_tokens: 0,
            time_to_first_token: Distribution::new(FIRST_TOKEN_SECONDS),
            inter_token_latency: Distribution::new(TOKEN_SECONDS),
            ended: Ended::default(),
            request_prompt_tokens: tokens(),
            request_computed_tokens: tokens(),
            request_generation_tokens: tokens(),
            request_max_tokens: tokens(),
            request_preemptions: Distribution::new(PREEMPTIONS),
            request_seconds: seconds(),
            queue_seconds: seconds(),
            prefill_seconds: seconds(),
            decode_seconds: seconds(),
            inference_seconds: seconds(),
            seconds_per_token: Distribution::new(TOKEN_SECONDS),
            used: Vec::new(),
        }
    }

    /// Takes note of a step: its number (from 1), its rows, and the slots of its adapters, each once or several times.
    pub(crate) fn step(&mut self, step: u64, rows: usize, slots: impl Iterator<Item = u32>) {
        let mut distinct = 0;
        for slot in slots {
            let slot = slot as usize;
            if self.used.len() <= slot {
                self.used.resize(slot + 1, 0);
            }
            distinct += usize::from(self.used[slot] != step);
            self.used[slot] = step;
        }
        self.last_step_adapters = distinct;
        self.step_adapters.observe(distinct as f64);
        self.step_tokens.observe(rows as f64);
    }

    /// Takes note of an adapter that a submitted request names.
    pub(crate) fn look_up(&mut self, resident: bool) {
        self.adapter_lookups += 1;
        self.adapter_hits += u64::from(resident);
    }
}

/// How a sample went, in seconds since its request was submitted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// When it was first part of a step.
    pub scheduled: f64,
    /// When its first token was there.
    pub first_token: f64,
    /// When its last token was there.
    pub last_token: f64,
    /// How often it lost its KV blocks to others.
    pub preemptions: u32,
    /// Whether its adapters were resident when it came; true for the base.
    pub resident: bool,
}

/// What is known of a running sequence's course.
#[derive(Debug)]
pub(crate) struct Course {
    submitted: Instant,
    scheduled: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    preemptions: u32,
    pub(crate) resident: bool,
    prompt_tokens: usize,
    cached_tokens: usize,
    tokens: usize,
    max_tokens: usize,
}

impl Course {
    /// That of a sequence which is being submitted.
    pub(crate) fn new(prompt_tokens: usize, max_tokens: usize) -> Self {
        Self {
            submitted: Instant::now(),
            scheduled: None,
            first_token: None,
            last_token: None,
            preemptions: 0,
            resident: true,
            prompt_tokens,
            cached_tokens: 0,
            tokens: 0,
            max_tokens,
        }
    }

    /// When it was submitted.
    pub(crate) const fn submitted(&self) -> Instant {
        self.submitted
    }

    /// It is part of a step that begins `now`.
    pub(crate) fn schedule(&mut self, now: Instant, cached_tokens: usize, preemptions: u32) {
        if self.scheduled.is_none() {
            self.scheduled = Some(now);
            self.cached_tokens = cached_tokens;
        }
        self.preemptions = preemptions;
    }

    /// It has got a token `now`.
    pub(crate) fn token(&mut self, now: Instant, meters: &mut Meters) {
        self.tokens += 1;
        meters.generation_tokens += 1;
        if let Some(last) = self.last_token.replace(now) {
            return meters.inter_token_latency.observe(now.saturating_duration_since(last).as_secs_f64());
        }
        self.first_token = Some(now);
        meters.prompt_tokens += self.prompt_tokens as u64;
        meters.cached_prompt_tokens += self.cached_tokens as u64;
        meters.time_to_first_token.observe(self.since(now));
    }

    fn since(&self, moment: Instant) -> f64 {
        moment.saturating_duration_since(self.submitted).as_secs_f64()
    }

    /// How it went; None if it got no token.
    pub(crate) fn timing(&self) -> Option<Timing> {
        Some(Timing {
            scheduled: self.since(self.scheduled?),
            first_token: self.since(self.first_token?),
            last_token: self.since(self.last_token?),
            preemptions: self.preemptions,
            resident: self.resident,
        })
    }

    /// It has ended.
    pub(crate) fn end(&self, reason: FinishReason, meters: &mut Meters) {
        match reason {
            FinishReason::Stop => meters.ended.stop += 1,
            FinishReason::Length => meters.ended.length += 1,
            FinishReason::Abort => meters.ended.abort += 1,
        }
        let (false, Some(timing)) = (reason == FinishReason::Abort, self.timing()) else { return };
        let Timing { scheduled, first_token, last_token, preemptions, .. } = timing;
        meters.request_prompt_tokens.observe(self.prompt_tokens as f64);
        meters.request_computed_tokens.observe(self.prompt_tokens.saturating_sub(self.cached_tokens) as f64);
        meters.request_generation_tokens.observe(self.tokens as f64);
        meters.request_max_tokens.observe(self.max_tokens as f64);
        meters.request_preemptions.observe(f64::from(preemptions));
        meters.request_seconds.observe(last_token);
        meters.queue_seconds.observe(scheduled);
        meters.prefill_seconds.observe(first_token - scheduled);
        meters.decode_seconds.observe(last_token - first_token);
        meters.inference_seconds.observe(last_token - scheduled);
        let between = self.tokens.saturating_sub(1);
        meters.seconds_per_token.observe(if between == 0 { 0.0 } else { (last_token - first_token) / between as f64 });
    }
}

/// Adapters that could not be loaded, by what kept them out. Counted where they are read: on callers' threads and the
/// loaders'.
#[derive(Debug, Default)]
pub(crate) struct LoadFailures {
    refused: AtomicU64,
    io: AtomicU64,
}

/// Adapters that could not be loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LoadFailureCounts {
    /// What was read cannot be served here.
    pub refused: u64,
    /// It could not be read, or was not what it was before.
    pub io: u64,
}

impl LoadFailures {
    pub(crate) fn count(&self, error: &EngineError) {
        let refused = matches!(error, EngineError::AdapterRefused(refusal) if refusal.kind != RefusalKind::NotFound);
        if refused { &self.refused } else { &self.io }.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn counts(&self) -> LoadFailureCounts {
        LoadFailureCounts { refused: self.refused.load(Ordering::Relaxed), io: self.io.load(Ordering::Relaxed) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn values_are_counted_under_the_bound_they_do_not_exceed() {
        let mut distribution = Distribution::new(&[0.0, 1.0, 2.0]);
        for value in [0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 7.0] {
            distribution.observe(value);
        }
        let buckets: Vec<(f64, u64)> = distribution.buckets().collect();
        assert_eq!(buckets, [(0.0, 1), (1.0, 2), (2.0, 3), (f64::INFINITY, 1)]);
        assert_eq!((distribution.count(), distribution.sum()), (7, 14.0));
        assert_eq!(token_bounds(512), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0]);
    }

    #[test]
    fn a_step_counts_each_of_its_adapters_once() {
        let mut meters = Meters::new(64);
        meters.step(1, 5, [3, 0, 3].into_iter());
        assert_eq!(meters.last_step_adapters, 2);
        meters.step(2, 1, [3].into_iter());
        meters.step(3, 1, std::iter::empty());
        assert_eq!(meters.last_step_adapters, 0);
        assert_eq!((meters.step_adapters.count(), meters.step_adapters.sum()), (3, 3.0));
        assert_eq!(meters.step_tokens.sum(), 7.0);
    }

    #[test]
    fn the_parts_of_a_course_add_up() {
        let mut meters = Meters::new(64);
        let mut course = Course::new(10, 3);
        let start = course.submitted;
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(course.timing().is_none());
        course.schedule(after(1), 4, 0);
        course.schedule(after(2), 8, 0);
        course.token(after(3), &mut meters);
        course.schedule(after(4), 0, 1);
        course.token(after(5), &mut meters);
        course.token(after(9), &mut meters);
        course.end(FinishReason::Length, &mut meters);
        let timing = course.timing().expect("it has tokens");
        let expected = Timing { scheduled: 1.0, first_token: 3.0, last_token: 9.0, preemptions: 1, resident: true };
        assert_eq!(timing, expected);
        assert_eq!((meters.prompt_tokens, meters.cached_prompt_tokens, meters.generation_tokens), (10, 4, 3));
        let sums = [
            (&meters.time_to_first_token, 3.0),
            (&meters.inter_token_latency, 6.0),
            (&meters.request_seconds, 9.0),
            (&meters.queue_seconds, 1.0),
            (&meters.prefill_seconds, 2.0),
            (&meters.decode_seconds, 6.0),
            (&meters.inference_seconds, 8.0),
            (&meters.seconds_per_token, 3.0),
            (&meters.request_computed_tokens, 6.0),
            (&meters.request_max_tokens, 3.0),
        ];
        for (place, (distribution, sum)) in sums.into_iter().enumerate() {
            assert_eq!(distribution.sum(), sum, "{place}");
        }
        assert_eq!(meters.ended, Ended { length: 1, ..Ended::default() });
    }

    #[test]
    fn an_aborted_sample_is_only_counted() {
        let mut meters = Meters::new(64);
        let mut course = Course::new(10, 3);
        course.schedule(course.submitted, 0, 0);
        course.token(course.submitted, &mut meters);
        course.end(FinishReason::Abort, &mut meters);
        assert_eq!((meters.ended.abort, meters.request_seconds.count()), (1, 0));
    }
}
