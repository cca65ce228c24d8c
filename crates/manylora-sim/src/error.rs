//! What can be wrong with a question: the field, its value, and what to do.

use manylora_core::budget::division::SizeError;

/// A question that has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
}

impl SimError {
    /// A field with a wrong value.
    pub fn field(field: impl Into<String>, value: impl ToString, message: impl Into<String>) -> Self {
        Self::Field { field: field.into(), value: value.to_string(), message: message.into() }
    }
}
