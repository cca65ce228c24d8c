//! Any arrivals with any popularity and any lengths.

use super::arrivals::Arrivals;
use super::lengths::Lengths;
use super::numpy::RandomState;
use super::popularity::{Chooser, Popularity};
use super::{MOST_REQUESTS, SharedPrefix, SimRequest};
use crate::error::SimError;

/// A load. Requests are drawn one after the other, each from four states of its own kind, so that another rate leaves
/// adapters and lengths as they were.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticWorkload {
    /// How many requests.
    pub requests: usize,
    /// When they arrive.
    pub arrivals: Arrivals,
    /// How many adapters there are; 0 = all requests are for the base.
    pub adapters: u32,
    /// Which of them a request asks for.
    pub popularity: Popularity,
    /// Share of requests that ask for the base.
    pub base_share: f64,
    /// Lengths of prompts.
    pub input: Lengths,
    /// Lengths of outputs.
    pub output: Lengths,
    /// Tokens that prompts for the same adapter begin with, at most all but one of a prompt's.
    pub shared_prefix: u32,
    /// Seed.
    pub seed: u32,
}

impl SyntheticWorkload {
    /// Checks the numbers, and draws request after request.
    pub fn generate(&self) -> Result<impl Iterator<Item = SimRequest> + use<>, SimError> {
        if self.requests as f64 > MOST_REQUESTS {
            return Err(SimError::field(
                "requests",
                self.requests,
                format!("at most {MOST_REQUESTS:.0} are simulated"),
            ));
        }
        if !(0.0..=1.0).contains(&self.base_share) {
            return Err(SimError::field("base_share", self.base_share, "a share from 0 to 1 is needed"));
        }
        self.arrivals.validate()?;
        self.input.validate("input")?;
        self.output.validate("output")?;
        let chooser = (self.adapters > 0).then(|| Chooser::new(self.popularity, self.adapters)).transpose()?;
        let [mut gaps, mut who, mut inputs, mut outputs] =
            [0, 1, 2, 3].map(|kind: u32| RandomState::new(self.seed.wrapping_mul(4).wrapping_add(kind)));
        let load = self.clone();
        let mut now = 0.0;
        Ok((0..self.requests).map(move |_| {
            now += load.arrivals.gap(&mut gaps);
            let for_base = who.random() < load.base_share;
            let adapter = chooser.as_ref().map(|chooser| chooser.draw(&mut who)).filter(|_| !for_base);
            let mut request =
                SimRequest::new(now, adapter, load.input.draw(&mut inputs), load.output.draw(&mut outputs));
            let tokens = load.shared_prefix.min(request.prompt_tokens - 1);
            request.prefix = (tokens > 0).then(|| SharedPrefix { group: adapter.map_or(0, |one| one + 1), tokens });
            request
        }))
    }
}
