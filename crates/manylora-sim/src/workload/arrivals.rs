//! When requests arrive.

use super::numpy::RandomState;
use super::positive;
use crate::error::SimError;

/// A stream of arrivals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// Gaps of a Gamma distribution: shape `1/cv^2`, scale `cv^2/rate`. `cv` 1 is a Poisson process, more is burstier.
    Gamma {
        /// Requests a second.
        rate: f64,
        /// Coefficient of variation of the gaps.
        cv: f64,
    },
    /// The same gap between any two.
    Regular {
        /// Requests a second.
        rate: f64,
    },
    /// All at once.
    AtOnce,
}

impl Arrivals {
    /// A Poisson process.
    pub const fn poisson(rate: f64) -> Self {
        Self::Gamma { rate, cv: 1.0 }
    }

    /// Whether its numbers make sense.
    pub fn validate(&self) -> Result<(), SimError> {
        match *self {
            Self::Gamma { rate, cv } => positive("rate", rate).and_then(|_| positive("cv", cv)).map(drop),
            Self::Regular { rate } => positive("rate", rate).map(drop),
            Self::AtOnce => Ok(()),
        }
    }

    /// The gap before the next arrival, in seconds.
    pub fn gap(&self, random: &mut RandomState) -> f64 {
        match *self {
            Self::Gamma { rate, cv } => random.gamma(1.0 / (cv * cv), cv * cv / rate),
            Self::Regular { rate } => 1.0 / rate,
            Self::AtOnce => 0.0,
        }
    }
}
