//! What the engine's thread spends its time on: a clock that is read between the phases of a step, never per sequence.

use std::time::Instant;

use serde::{Serialize, Serializer};

/// What the engine's thread does. All but [`Phase::Forward`] is its own work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Commands: requests that are submitted and cancelled, adapters. Answering [`crate::EngineHandle::stats`] is not counted.
    Commands,
    /// The scheduler decides what the step is: admission, KV blocks, loads.
    Plan,
    /// The plan becomes the batch that kernels read.
    Lower,
    /// The backend computes: layers, logits, greedy tokens.
    Forward,
    /// Tokens are chosen from logits, other than greedy ones.
    Sample,
    /// Tokens are looked at for what ends a sequence, and become text where a stop string may end it; else readers make the
    /// text.
    Text,
    /// The scheduler takes the step's results.
    Commit,
    /// News goes to the streams, and what follows from the step is carried out.
    Deliver,
}

impl Phase {
    /// All of them, in the order of a step.
    pub const ALL: [Self; 8] =
        [Self::Commands, Self::Plan, Self::Lower, Self::Forward, Self::Sample, Self::Text, Self::Commit, Self::Deliver];

    /// In one word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Commands => "commands",
            Self::Plan => "plan",
            Self::Lower => "lower",
            Self::Forward => "forward",
            Self::Sample => "sample",
            Self::Text => "text",
            Self::Commit => "commit",
            Self::Deliver => "deliver",
        }
    }
}

/// Seconds that were spent on each phase so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseSeconds([f64; Phase::ALL.len()]);

impl PhaseSeconds {
    /// Seconds of one.
    pub const fn of(&self, phase: Phase) -> f64 {
        self.0[phase as usize]
    }

    pub(crate) fn add(&mut self, phase: Phase, seconds: f64) {
        self.0[phase as usize] += seconds;
    }
}

impl Serialize for PhaseSeconds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(Phase::ALL.map(|phase| (phase.name(), self.of(phase))))
    }
}

/// Tells how long it was since it was looked at last.
#[derive(Debug)]
pub(crate) struct Stopwatch(Instant);

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// Seconds since the last lap, or the start.
    pub(crate) fn lap(&mut self) -> f64 {
        let now = Instant::now();
        now.saturating_duration_since(std::mem::replace(&mut self.0, now)).as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_phase_has_its_own_sum() {
        let mut seconds = PhaseSeconds::default();
        for (number, phase) in Phase::ALL.into_iter().enumerate() {
            seconds.add(phase, number as f64);
            seconds.add(phase, 1.0);
        }
        for (number, phase) in Phase::ALL.into_iter().enumerate() {
            assert_eq!(seconds.of(phase), number as f64 + 1.0, "{}", phase.name());
        }
    }
}
