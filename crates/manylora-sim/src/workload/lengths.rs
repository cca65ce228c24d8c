//! How long prompts and outputs are.

use super::numpy::RandomState;
use super::positive;
use crate::error::SimError;

/// A distribution of lengths, in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// Always the same.
    Fixed(u32),
    /// Uniform in `low..high`.
    Uniform {
        /// Least.
        low: u32,
        /// One more than the most.
        high: u32,
    },
    /// Log-normal, rounded, from 1 to `most`.
    LogNormal {
        /// Half of all are below this.
        median: f64,
        /// The mean, before what is beyond `most` is cut.
        mean: f64,
        /// Most.
        most: u32,
    },
}

/// Prompts and outputs of Azure's LLM inference traces of 2023 (Splitwise, Patel et al. 2024), as log-normal distributions of
/// the same medians and means: the traces themselves are replayed by [`super::trace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AzureService {
    /// Median 1020 and mean 1155 in, 129 and 211 out.
    Conversation,
    /// Median 1500 and mean 2048 in, 13 and 28 out.
    Code,
}

impl AzureService {
    /// Lengths of prompts and of outputs, up to so many tokens.
    pub const fn lengths(self, most_prompt: u32, most_output: u32) -> [Lengths; 2] {
        let (prompt, output) = match self {
            Self::Conversation => ((1020.0, 1155.0), (129.0, 211.0)),
            Self::Code => ((1500.0, 2048.0), (13.0, 28.0)),
        };
        [
            Lengths::LogNormal { median: prompt.0, mean: prompt.1, most: most_prompt },
            Lengths::LogNormal { median: output.0, mean: output.1, most: most_output },
        ]
    }
}

impl Lengths {
    /// Whether its numbers make sense; `field` is what it is the value of.
    pub fn validate(&self, field: &str) -> Result<(), SimError> {
        match *self {
            Self::Fixed(0) => Err(SimError::field(field, 0, "at least one token is needed")),
            Self::Uniform { low, high } if low == 0 || high <= low => {
                Err(SimError::field(field, format!("{low}..{high}"), "from at least 1 to less than the end"))
            }
            Self::Fixed(_) | Self::Uniform { .. } => Ok(()),
            Self::LogNormal { median, mean, most } => {
                positive(field, median)?;
                if !mean.is_finite() || mean < median || most == 0 {
                    let message =
                        format!("a mean of at least the median `{median}`, and at most `{most}` tokens, at least 1");
                    return Err(SimError::field(field, mean, message));
                }
                Ok(())
            }
        }
    }

    /// Draws a length.
    pub fn draw(&self, random: &mut RandomState) -> u32 {
        match *self {
            Self::Fixed(tokens) => tokens,
            Self::Uniform { low, high } => random.randint(low, high),
            Self::LogNormal { median, mean, most } => {
                let sigma = (2.0 * (mean / median).ln()).sqrt();
                (random.lognormal(median.ln(), sigma).round().max(1.0) as u32).min(most)
            }
        }
    }
}
