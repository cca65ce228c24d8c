//! Punica's loads (Chen et al. 2023; `benchmarks/benchmark_utils.py`, `bench_textgen.py`): four popularities, and the lengths
//! of its text generation. How many requests each adapter has is its script's; what the script draws with numpy's newer
//! generator is drawn from the same distributions here.

use super::SimRequest;
use super::numpy::RandomState;
use crate::error::SimError;

/// How a batch spreads over adapters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PunicaPopularity {
    /// One adapter for all (`bmm`).
    Identical,
    /// An adapter for each request (`bgmv`).
    Distinct,
    /// About the square root of the requests, all alike.
    Uniform,
    /// Each adapter has `alpha` times as many as the next (`zipf:1.5`).
    Skewed {
        /// The ratio, above 1.
        alpha: f64,
    },
}

impl PunicaPopularity {
    /// How many of `requests` each adapter has (`get_lora_lens`).
    pub fn sizes(self, requests: u32) -> Result<Vec<u32>, SimError> {
        if requests == 0 {
            return Err(SimError::field("requests", 0, "at least one is needed"));
        }
        Ok(match self {
            Self::Identical => vec![requests],
            Self::Distinct => vec![1; requests as usize],
            Self::Uniform => {
                let adapters = f64::from(requests).sqrt().ceil() as u32;
                let (each, more) = (requests / adapters, requests % adapters);
                (0..adapters).map(|number| each + u32::from(number < more)).collect()
            }
            Self::Skewed { alpha } => {
                if !alpha.is_finite() || alpha <= 1.0 {
                    return Err(SimError::field("alpha", alpha, "a finite number above 1 is needed"));
                }
                let (mut sizes, mut sum, mut next) = (Vec::new(), 0, 1.0_f64);
                while f64::from(sum) + next.floor() < f64::from(requests) {
                    sizes.push(next.floor() as u32);
                    sum += next.floor() as u32;
                    next *= alpha;
                }
                sizes.push(requests - sum);
                sizes.sort_unstable_by(|a, b| b.cmp(a));
                sizes
            }
        })
    }
}

/// Text generation: everything is there at the start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PunicaWorkload {
    /// How many requests.
    pub requests: u32,
    /// Most tokens of a sequence (`maxlen`).
    pub max_len: u32,
    /// Which adapters.
    pub popularity: PunicaPopularity,
    /// Seed.
    pub seed: u32,
}

impl PunicaWorkload {
    /// The requests. Prompts: log-normal (sigma 0.8, scale 18, less 1); sequences: uniform below `max_len`, and two tokens
    /// longer than the prompt at least.
    pub fn requests(&self) -> Result<Vec<SimRequest>, SimError> {
        if self.max_len < 4 {
            return Err(SimError::field("max_len", self.max_len, "at least 4 is needed"));
        }
        let mut adapters: Vec<u32> = Vec::with_capacity(self.requests as usize);
        for (adapter, size) in self.popularity.sizes(self.requests)?.into_iter().enumerate() {
            adapters.extend(std::iter::repeat_n(adapter as u32, size as usize));
        }
        let mut random = RandomState::new(self.seed);
        for end in (1..adapters.len()).rev() {
            adapters.swap(end, random.randint(0, end as u32 + 1) as usize);
        }
        let request = |adapter| {
            let prompt = (18.0 * random.lognormal(0.0, 0.8) - 1.0).clamp(1.0, f64::from(self.max_len - 2)) as u32;
            let total = (prompt + 2).max(random.randint(0, self.max_len));
            SimRequest::new(0.0, Some(adapter), prompt, total - prompt)
        };
        Ok(adapters.into_iter().map(request).collect())
    }
}
