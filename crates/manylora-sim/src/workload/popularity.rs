//! Which adapter a request asks for.

use super::numpy::RandomState;
use super::positive;
use crate::error::SimError;

/// How requests spread over adapters; number 0 is the most popular.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Popularity {
    /// All alike.
    Uniform,
    /// S-LoRA's power law: `floor(n U^(1/alpha))`; `alpha` 1 is uniform, less is more skewed.
    PowerLaw {
        /// Its exponent, above 0.
        alpha: f64,
    },
    /// Zipf's law: adapter k, from 1, has a share of `k^-s`.
    Zipf {
        /// Its exponent, from 0.
        s: f64,
    },
    /// Zipf's law as YCSB and dLoRA draw it, by Gray et al.'s approximation (1994).
    Ycsb {
        /// Its exponent, from 0 to below 1.
        theta: f64,
    },
    /// One of two adapters.
    Bimodal {
        /// Share of the first.
        ratio: f64,
    },
}

/// A popularity over so many adapters, ready to be drawn from.
#[derive(Clone, Debug)]
pub struct Chooser {
    popularity: Popularity,
    adapters: u32,
    /// Of Zipf's law: shares of all up to each, ascending to 1.
    cumulative: Vec<f64>,
    /// Of YCSB's form: eta.
    eta: f64,
}

impl Chooser {
    /// Checks the numbers and prepares.
    pub fn new(popularity: Popularity, adapters: u32) -> Result<Self, SimError> {
        if adapters == 0 {
            return Err(SimError::field("adapters", 0, "at least one is needed to choose from"));
        }
        let mut chooser = Self { popularity, adapters, cumulative: Vec::new(), eta: 0.0 };
        match popularity {
            Popularity::Uniform => {}
            Popularity::PowerLaw { alpha } => drop(positive("alpha", alpha)?),
            Popularity::Zipf { s } => {
                if !s.is_finite() || s < 0.0 {
                    return Err(SimError::field("s", s, "a finite number from 0 up is needed"));
                }
                let mut sum = 0.0;
                let shares = (1..=adapters).map(|number| {
                    sum += f64::from(number).powf(-s);
                    sum
                });
                chooser.cumulative = shares.collect();
                chooser.cumulative.iter_mut().for_each(|share| *share /= sum);
            }
            Popularity::Ycsb { theta } => {
                if !(0.0..1.0).contains(&theta) {
                    return Err(SimError::field("theta", theta, "a number from 0 to below 1 is needed"));
                }
                if adapters < 3 {
                    return Err(SimError::field("adapters", adapters, "this popularity needs at least 3"));
                }
                let zeta = |up_to: u32| (1..=up_to).map(|number| f64::from(number).powf(-theta)).sum::<f64>();
                chooser.eta = (1.0 - (2.0 / f64::from(adapters)).powf(1.0 - theta)) / (1.0 - zeta(2) / zeta(adapters));
            }
            Popularity::Bimodal { ratio } => {
                if !(0.0..=1.0).contains(&ratio) {
                    return Err(SimError::field("ratio", ratio, "a share from 0 to 1 is needed"));
                }
                if adapters < 2 {
                    return Err(SimError::field("adapters", adapters, "this popularity needs two"));
                }
            }
        }
        Ok(chooser)
    }

    /// Draws an adapter.
    pub fn draw(&self, random: &mut RandomState) -> u32 {
        let last = self.adapters - 1;
        match self.popularity {
            Popularity::Uniform => random.randint(0, self.adapters),
            // 1 itself can be drawn, once in 2^53.
            Popularity::PowerLaw { alpha } => ((random.power(alpha) * f64::from(self.adapters)) as u32).min(last),
            Popularity::Zipf { .. } => {
                let u = random.random();
                (self.cumulative.partition_point(|&share| share <= u) as u32).min(last)
            }
            Popularity::Ycsb { theta } => {
                let place = (self.eta * random.random() - self.eta + 1.0).powf(1.0 / (1.0 - theta));
                ((f64::from(self.adapters) * place) as u32).min(last)
            }
            Popularity::Bimodal { ratio } => u32::from(random.random() >= ratio),
        }
    }
}
