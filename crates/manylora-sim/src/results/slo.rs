//! What is promised to requests.

use serde::{Deserialize, Serialize};

use super::RequestRecord;
use crate::error::SimError;

/// Service-level objectives in seconds; None = nothing is promised of it. A request attains them if it ends well and holds all
/// of them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Slo {
    /// Time to first token.
    pub ttft: Option<f64>,
    /// Mean time between a request's tokens.
    pub tpot: Option<f64>,
    /// From arrival to end.
    pub e2e: Option<f64>,
}

impl Default for Slo {
    /// S-LoRA's: the first token within six seconds.
    fn default() -> Self {
        Self { ttft: Some(6.0), tpot: None, e2e: None }
    }
}

impl Slo {
    pub(crate) fn validate(&self) -> Result<(), SimError> {
        for (field, value) in [("slo.ttft", self.ttft), ("slo.tpot", self.tpot), ("slo.e2e", self.e2e)] {
            if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.0)) {
                return Err(SimError::field(field, value, "a finite number of seconds above 0, or null"));
            }
        }
        Ok(())
    }

    /// Whether a request attained them.
    pub fn attained(&self, record: &RequestRecord) -> bool {
        let within = |value: Option<f64>, limit: Option<f64>| {
            limit.is_none_or(|limit| value.is_some_and(|value| value <= limit))
        };
        record.failure.is_none()
            && within(record.ttft(), self.ttft)
            && within(Some(record.tpot().unwrap_or(0.0)), self.tpot)
            && within(Some(record.e2e()), self.e2e)
    }
}
