//! What can be wrong with a question: the field, its value, and what to do.

use manylora_core::CoreError;
use manylora_core::budget::division::SizeError;

/// A question that has no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SimError {
    /// A field has a value that it cannot have.
    #[error("{field} `{value}`: {message}")]
    Field {
        /// Which.
        field: String,
        /// What it has.
        value: String,
        /// What is wrong, and what to do.
        message: String,
    },
    /// Sizes that cannot be met, as an engine would refuse them at its start.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// Settings that the control plane refuses.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// One of many runs is not possible.
    #[error("at {point}: {error}")]
    Point {
        /// The values that it has.
        point: String,
        /// What is wrong.
        error: Box<SimError>,
    },
    /// Whoever asked does not want to know any more.
    #[error("the simulation was interrupted")]
    Interrupted,
    /// A trace was replayed, and something was decided in another way than when it was recorded.
    #[error(
        "trace line {line}: {what} was `{recorded}` when it was recorded and is `{replayed}` now: the trace was changed, or \
         comes from another version, or this is a mistake; report it with the trace"
    )]
    Diverged {
        /// Where.
        line: usize,
        /// What was decided.
        what: &'static str,
        /// How the engine did.
        recorded: String,
        /// How it was done now.
        replayed: String,
    },
    /// A run ended, and a replica has not taken what the router gave it.
    #[error(
        "replica `{replica}` ended without `{left}` of its requests, first the one that arrived at `{arrival}` s: this is a \
         mistake in the simulator; report it with the configuration"
    )]
    NotTaken {
        /// Which.
        replica: usize,
        /// How many.
        left: usize,
        /// When the first of them arrived, in seconds.
        arrival: f64,
    },
    /// Nothing can run, and nothing will happen that could change that.
    #[error(
        "at {now} s nothing can run and `{live}` requests are not done: this is a mistake in the scheduler; report it"
    )]
    Stuck {
        /// When, in seconds.
        now: f64,
        /// Requests that are under way.
        live: usize,
    },
}

impl SimError {
    /// A field with a wrong value.
    pub fn field(field: impl Into<String>, value: impl std::fmt::Display, message: impl Into<String>) -> Self {
        Self::Field { field: field.into(), value: value.to_string(), message: message.into() }
    }
}
