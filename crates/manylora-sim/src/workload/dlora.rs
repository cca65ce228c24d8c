//! dLoRA's replay of Azure's function traces (Wu et al. 2024; `workload_generator/trace.py`): counts of invocations for each
//! model and interval become Gamma processes of those shares of one rate. Its Zipf and bimodal popularities are
//! [`super::popularity::Popularity::Ycsb`] and `Bimodal`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::numpy::RandomState;
use super::{SimRequest, positive};
use crate::error::SimError;
use crate::workload::lengths::Lengths;

/// What is replayed, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct AzureFunctions {
    /// Invocations of each model in each interval: all models have as many intervals.
    pub counts: Vec<Vec<u64>>,
    /// Requests in all, spread evenly over the intervals.
    pub requests: usize,
    /// Minutes of an interval: how many gaps a process draws at a time depends on it.
    pub interval_minutes: u32,
    /// Requests a second of all models together.
    pub rate: f64,
    /// Coefficient of variation of a model's gaps.
    pub cv: f64,
    /// Lengths of prompts.
    pub input: Lengths,
    /// Lengths of outputs.
    pub output: Lengths,
    /// Seed of the lengths. Every process is seeded with 0, as there.
    pub seed: u32,
}

/// A process of arrivals as the script has it: it seeds the one random state that all share, draws gaps for its interval at
/// once, and draws more from what the state has become by then.
struct Process {
    shape: f64,
    scale: f64,
    batch: usize,
    gaps: std::vec::IntoIter<f64>,
    now: f64,
}

impl Process {
    fn new(rate: f64, cv: f64, start: f64, interval_minutes: u32) -> Self {
        let (shape, scale) = (1.0 / (cv * cv), cv * cv / rate);
        let batch = ((rate * f64::from(interval_minutes) * 1.2) as usize).max(1);
        Self { shape, scale, batch, gaps: Vec::new().into_iter(), now: start }
    }

    fn draw(&mut self, shared: &mut RandomState) {
        let gaps: Vec<f64> = (0..self.batch).map(|_| shared.gamma(self.shape, self.scale)).collect();
        self.gaps = gaps.into_iter();
    }

    fn first(&mut self, shared: &mut RandomState) -> f64 {
        *shared = RandomState::new(0);
        self.draw(shared);
        self.next(shared)
    }

    fn next(&mut self, shared: &mut RandomState) -> f64 {
        if self.gaps.len() == 0 {
            self.draw(shared);
        }
        self.now += self.gaps.next().unwrap_or_default();
        self.now
    }
}

impl AzureFunctions {
    /// The requests, by arrival; the model is the adapter.
    pub fn requests(&self) -> Result<Vec<SimRequest>, SimError> {
        let (rate, cv) = (positive("rate", self.rate)?, positive("cv", self.cv)?);
        let intervals = self.counts.first().map_or(0, Vec::len);
        if intervals == 0 || self.counts.iter().any(|counts| counts.len() != intervals) {
            return Err(SimError::field("counts", intervals, "every model needs as many intervals, and at least one"));
        }
        self.input.validate("input")?;
        self.output.validate("output")?;
        let mut lengths = RandomState::new(self.seed);
        let mut shared = RandomState::new(0);
        let mut requests: Vec<SimRequest> = Vec::with_capacity(self.requests);
        let mut start = 0.0;
        for interval in 0..intervals {
            let total: u64 = self.counts.iter().map(|counts| counts[interval]).sum();
            let wanted = self.requests / intervals + usize::from(interval < self.requests % intervals);
            if total == 0 && wanted > 0 {
                let message = "nobody asks for anything in this interval; leave it out";
                return Err(SimError::field(format!("counts[..][{interval}]"), 0, message));
            }
            let mut processes: Vec<Option<Process>> = self
                .counts
                .iter()
                .map(|counts| {
                    let share = counts[interval] as f64 / total as f64;
                    (counts[interval] > 0).then(|| Process::new(share * rate, cv, start, self.interval_minutes))
                })
                .collect();
            let mut due = BinaryHeap::new();
            for (model, process) in processes.iter_mut().enumerate() {
                if let Some(process) = process {
                    // Arrivals are positive, so their bits are ordered as they are.
                    due.push(Reverse((process.first(&mut shared).to_bits(), model)));
                }
            }
            for _ in 0..wanted {
                let Some(Reverse((arrival, model))) = due.pop() else { break };
                start = f64::from_bits(arrival);
                let (prompt, output) = (self.input.draw(&mut lengths), self.output.draw(&mut lengths));
                requests.push(SimRequest::new(start, Some(model as u32), prompt, output));
                if let Some(process) = &mut processes[model] {
                    due.push(Reverse((process.next(&mut shared).to_bits(), model)));
                }
            }
        }
        Ok(requests)
    }
}
