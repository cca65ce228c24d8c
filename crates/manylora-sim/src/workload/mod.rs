//! Loads: who asks when, for which adapter, with how many tokens.
//!
//! [`slora`], [`punica`] and [`dlora`] are the published generators; [`synthetic`] puts any arrivals, popularity and lengths
//! together; [`trace`] reads requests from a file, and [`recorded`] those that an engine recorded. All that is drawn comes from one seed, by numpy's legacy random numbers
//! ([`numpy`]), so that S-LoRA's load of a seed is the very load that its own script makes.

pub mod arrivals;
pub mod dlora;
pub mod lengths;
pub mod numpy;
pub mod popularity;
pub mod punica;
pub mod recorded;
pub mod slora;
pub mod synthetic;
pub mod trace;

use serde::{Deserialize, Serialize};

use crate::error::SimError;

/// Tokens that the prompts of a group of requests begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedPrefix {
    /// Which group.
    pub group: u32,
    /// How many tokens.
    pub tokens: u32,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimRequest {
    /// When it arrives, in seconds.
    pub arrival: f64,
    /// Its adapter, by number; None = the base.
    pub adapter: Option<u32>,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens that it generates.
    pub output_tokens: u32,
    /// Who is charged for it, by number; None = its adapter, or the base.
    pub tenant: Option<u32>,
    /// Lower runs first under the priority policy.
    pub priority: i64,
    /// What its prompt has in common with others'.
    pub prefix: Option<SharedPrefix>,
}

impl SimRequest {
    /// A request of nobody in particular.
    pub const fn new(arrival: f64, adapter: Option<u32>, prompt_tokens: u32, output_tokens: u32) -> Self {
        Self { arrival, adapter, prompt_tokens, output_tokens, tenant: None, priority: 0, prefix: None }
    }
}

/// Requests of one load are at most so many.
pub const MOST_REQUESTS: f64 = 1e9;

pub(crate) fn positive(field: &str, value: f64) -> Result<f64, SimError> {
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    Err(SimError::field(field, value, "a finite number above 0 is needed"))
}

/// Requests that a rate brings in a duration.
pub(crate) fn count(rate: f64, duration: f64) -> Result<usize, SimError> {
    let count = positive("rate", rate)? * positive("duration", duration)?;
    if count > MOST_REQUESTS {
        return Err(SimError::field(
            "duration",
            duration,
            format!("that is {count:.0} requests; at most {MOST_REQUESTS:.0}"),
        ));
    }
    Ok(count as usize)
}
