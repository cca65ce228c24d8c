//! S-LoRA's synthetic load (Sheng et al. 2023; `benchmarks/trace.py`, `generate_requests`), draw for draw.
//!
//! The paper writes of a Gamma process for each adapter; the script, which made the published figures, has one Gamma process
//! and draws the adapter of each request on its own. For `cv` above 1 these differ, and here is the script's.

use super::numpy::RandomState;
use super::popularity::{Chooser, Popularity};
use super::{SimRequest, count, positive};
use crate::error::SimError;
use crate::workload::arrivals::Arrivals;
use crate::workload::lengths::Lengths;

/// The arguments of `generate_requests`.
#[derive(Clone, Debug, PartialEq)]
pub struct SloraWorkload {
    /// `num_adapters`; 0 = all requests are for the base.
    pub adapters: u32,
    /// `alpha` of the power law.
    pub alpha: f64,
    /// `req_rate`: requests a second.
    pub rate: f64,
    /// Coefficient of variation of the gaps.
    pub cv: f64,
    /// Seconds.
    pub duration: f64,
    /// `input_range`, the end excluded.
    pub input: [u32; 2],
    /// `output_range`, the end excluded.
    pub output: [u32; 2],
    /// Seed.
    pub seed: u32,
}

impl SloraWorkload {
    /// As in the paper's tables: lengths 8..512, `cv` 1, `alpha` 1, seed 42.
    pub const fn new(adapters: u32, rate: f64, duration: f64) -> Self {
        Self { adapters, alpha: 1.0, rate, cv: 1.0, duration, input: [8, 512], output: [8, 512], seed: 42 }
    }

    /// The requests, by arrival.
    pub fn requests(&self) -> Result<Vec<SimRequest>, SimError> {
        let count = count(self.rate, self.duration)?;
        let arrivals = Arrivals::Gamma { rate: self.rate, cv: positive("cv", self.cv)? };
        let [input, output] = [self.input, self.output].map(|[low, high]| Lengths::Uniform { low, high });
        input.validate("input")?;
        output.validate("output")?;
        let chooser = Chooser::new(Popularity::PowerLaw { alpha: self.alpha }, self.adapters.max(1))?;
        let mut random = RandomState::new(self.seed);
        // Each in one go, as the script draws them.
        let mut requests: Vec<SimRequest> = (0..count)
            .map(|_| {
                let adapter = chooser.draw(&mut random);
                SimRequest::new(0.0, (self.adapters > 0).then_some(adapter), 0, 0)
            })
            .collect();
        for request in &mut requests {
            request.prompt_tokens = input.draw(&mut random);
        }
        for request in &mut requests {
            request.output_tokens = output.draw(&mut random);
        }
        let mut now = 0.0;
        for request in &mut requests {
            now += arrivals.gap(&mut random);
            request.arrival = now;
        }
        Ok(requests)
    }
}

/// Ranks of S-LoRA's adapters: those of its list of folders in turn, so that the most popular one has the first.
pub fn ranks_in_turn(adapters: u32, ranks: &[u64]) -> Vec<u64> {
    ranks.iter().copied().cycle().take(if ranks.is_empty() { 0 } else { adapters as usize }).collect()
}
