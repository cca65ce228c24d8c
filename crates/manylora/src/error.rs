//! Errors of the engine: each says what failed, with the value, and what to do.

use manylora_core::budget::division::SizeError;
use manylora_core::{CoreError, FailureReason, LoadFailure, LoadFault};
use manylora_kernels::KernelError;
use manylora_model::error::RefusalKind;
use manylora_model::{AdapterRefusal, ModelError};

use crate::registry::AdapterOrigin;

/// What can go wrong between a caller and the engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// An argument is out of range, of the wrong kind, or does not go with another one.
    #[error("{0}")]
    InvalidArgument(String),
    /// What an output is to be cannot be held to.
    #[error("{0}")]
    StructuredOutputs(String),
    /// Too much is under way just now.
    #[error("{0}")]
    Busy(String),
    /// A prompt leaves no room for output. What it begins with is what clients know such errors by.
    #[error(
        "This model's maximum context length is {max_model_len} tokens. However, your request has {}{tokens} input tokens, and \
         at least one of output is to follow them. Please shorten the prompt, or raise max_model_len.",
        if *.counted { "" } else { "no fewer than " }
    )]
    PromptTooLong {
        /// Tokens it has.
        tokens: usize,
        /// Whether that is what it has; else it was not encoded, because it has no fewer than these.
        counted: bool,
        /// Tokens that it may have with its output.
        max_model_len: usize,
    },
    /// A request has a priority, and priorities are not what decides whose turn it is.
    #[error(
        "Got priority {0} but priority scheduling is not enabled: start the engine with scheduling_policy='priority'"
    )]
    PriorityWithoutPolicy(i64),
    /// A request names an adapter that is not on the shelf.
    #[error("adapter `{name}` is not loaded; loaded: {loaded}")]
    UnknownAdapter {
        /// The name that was given.
        name: String,
        /// The names there are.
        loaded: String,
    },
    /// The adapter was refused at load.
    #[error(transparent)]
    AdapterRefused(Box<AdapterRefusal>),
    /// The name or the integer id is taken by other content.
    #[error(
        "{what} is already used by adapter `{existing}` of {origin} (version {version}), and this one has other content; \
         unload it first, give another name and id, or ask for replacement"
    )]
    AdapterConflict {
        /// `name "x"` or `id 3`.
        what: String,
        /// Name of the adapter that holds it.
        existing: String,
        /// Where that came from.
        origin: AdapterOrigin,
        /// Its version.
        version: String,
    },
    /// A request's adapter could not be made resident, or the request itself cannot run.
    #[error("request failed: {0}")]
    RequestFailed(#[from] FailureReason),
    /// A pin, load or unload could not be carried out.
    #[error("adapter `{name}`: {message}")]
    AdapterOperation {
        /// Which adapter.
        name: String,
        /// Why, with the numbers.
        message: String,
    },
    /// An adapter is still held by requests.
    #[error(
        "adapter `{name}` is still held by `{requests}` requests after `{seconds}` s: it takes no new ones and will be \
         unloaded when they end; wait again, or unload it with mode abort"
    )]
    UnloadTimeout {
        /// Which adapter.
        name: String,
        /// How long was waited.
        seconds: f64,
        /// Requests that hold it.
        requests: usize,
    },
    /// The model, its tokenizer or its template.
    #[error(transparent)]
    Model(ModelError),
    /// The backend.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The engine's thread is gone: dropped, or stopped by a failure that is named.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

impl EngineError {
    /// What requests are told whose adapter could not be read.
    pub(crate) fn load_failure(&self) -> LoadFailure {
        let fault = match self {
            Self::AdapterRefused(refusal) => match refusal.kind {
                RefusalKind::NotFound => LoadFault::Missing,
                RefusalKind::Forbidden => LoadFault::Forbidden,
                RefusalKind::Invalid => LoadFault::Invalid,
                RefusalKind::Unavailable => LoadFault::Temporary,
            },
            Self::Kernel(_) | Self::Stopped(_) | Self::Model(ModelError::Io { .. } | ModelError::Kernel(_)) => {
                LoadFault::Temporary
            }
            _ => LoadFault::Invalid,
        };
        LoadFailure { fault, message: self.to_string() }
    }

    /// The same error for another caller who waited for the same thing.
    pub(crate) fn for_another(&self) -> Self {
        match self {
            Self::InvalidArgument(message) => Self::InvalidArgument(message.clone()),
            Self::StructuredOutputs(message) => Self::StructuredOutputs(message.clone()),
            Self::Busy(message) => Self::Busy(message.clone()),
            Self::PromptTooLong { tokens, counted, max_model_len } => {
                Self::PromptTooLong { tokens: *tokens, counted: *counted, max_model_len: *max_model_len }
            }
            Self::PriorityWithoutPolicy(priority) => Self::PriorityWithoutPolicy(*priority),
            Self::AdapterRefused(refusal) => Self::AdapterRefused(refusal.clone()),
            Self::AdapterConflict { what, existing, origin, version } => Self::AdapterConflict {
                what: what.clone(),
                existing: existing.clone(),
                origin: origin.clone(),
                version: version.clone(),
            },
            Self::UnknownAdapter { name, loaded } => {
                Self::UnknownAdapter { name: name.clone(), loaded: loaded.clone() }
            }
            Self::AdapterOperation { name, message } => {
                Self::AdapterOperation { name: name.clone(), message: message.clone() }
            }
            Self::UnloadTimeout { name, seconds, requests } => {
                Self::UnloadTimeout { name: name.clone(), seconds: *seconds, requests: *requests }
            }
            Self::RequestFailed(reason) => Self::RequestFailed(reason.clone()),
            Self::Stopped(message) => Self::Stopped(message.clone()),
            Self::Model(_) | Self::Kernel(_) => Self::InvalidArgument(self.to_string()),
        }
    }
}

impl From<ModelError> for EngineError {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Adapter(refusal) => Self::AdapterRefused(refusal),
            other => Self::Model(other),
        }
    }
}

impl From<AdapterRefusal> for EngineError {
    fn from(refusal: AdapterRefusal) -> Self {
        Self::AdapterRefused(Box::new(refusal))
    }
}

impl From<SizeError> for EngineError {
    fn from(error: SizeError) -> Self {
        match error {
            SizeError::Setting(message) => Self::InvalidArgument(message),
            SizeError::DoesNotFit { needed, available, message } => {
                Self::Model(ModelError::DoesNotFit { needed, available, message })
            }
        }
    }
}

impl From<CoreError> for EngineError {
    fn from(error: CoreError) -> Self {
        Self::InvalidArgument(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_go_well_another_time_is_told_apart() {
        let refused = |kind| {
            let (adapter, reason) = ("x".to_owned(), "it is as it is".to_owned());
            EngineError::from(AdapterRefusal { adapter, keys: Vec::new(), reason, kind, report: None })
        };
        let source = std::io::Error::from(std::io::ErrorKind::OutOfMemory);
        let memory = || KernelError::OutOfMemory { what: "x".to_owned(), bytes: 1 };
        for (error, fault) in [
            (refused(RefusalKind::NotFound), LoadFault::Missing),
            (refused(RefusalKind::Forbidden), LoadFault::Forbidden),
            (refused(RefusalKind::Invalid), LoadFault::Invalid),
            (refused(RefusalKind::Unavailable), LoadFault::Temporary),
            (ModelError::Io { path: "x".into(), source }.into(), LoadFault::Temporary),
            (ModelError::Kernel(memory()).into(), LoadFault::Temporary),
            (memory().into(), LoadFault::Temporary),
            (EngineError::Stopped("x".to_owned()), LoadFault::Temporary),
            (ModelError::Tokenizer("x".to_owned()).into(), LoadFault::Invalid),
            (EngineError::InvalidArgument("x".to_owned()), LoadFault::Invalid),
        ] {
            let told = error.load_failure();
            assert_eq!((told.fault, told.message), (fault, error.to_string()));
        }
    }
}
