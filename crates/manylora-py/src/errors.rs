//! The one place where engine errors become Python exceptions.

use manylora::EngineError;
use manylora::model::error::{AdapterRefusal, ModelError, RefusalKind};
use pyo3::call::PyCallArgs;
use pyo3::prelude::*;

/// The exception `manylora.exceptions.<class>(*arguments)`.
fn raise<'py, A: PyCallArgs<'py>>(py: Python<'py>, class: &str, arguments: A) -> PyErr {
    let made = py.import("manylora.exceptions").and_then(|module| module.getattr(class)?.call1(arguments));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

fn refused(py: Python<'_>, refusal: &AdapterRefusal) -> PyErr {
    let kind = match refusal.kind {
        RefusalKind::NotFound => "not_found",
        RefusalKind::Forbidden => "forbidden",
        RefusalKind::Invalid => "invalid",
        RefusalKind::Unavailable => "unavailable",
    };
    let report = refusal.report.as_ref().map(ToString::to_string);
    raise(py, "refused", (refusal.adapter.as_str(), refusal.keys.clone(), refusal.reason.as_str(), report, kind))
}

/// The exception for an error.
pub(crate) fn to_python(py: Python<'_>, error: &EngineError) -> PyErr {
    let message = error.to_string();
    match error {
        EngineError::InvalidArgument(_)
        | EngineError::StructuredOutputs(_)
        | EngineError::PromptTooLong { .. }
        | EngineError::PriorityWithoutPolicy(_) => raise(py, "ValidationError", (message,)),
        EngineError::UnknownAdapter { .. } => raise(py, "UnknownAdapterError", (message,)),
        EngineError::AdapterRefused(refusal) => refused(py, refusal),
        EngineError::AdapterConflict { existing, .. } => {
            raise(py, "refused", (existing.as_str(), Vec::<String>::new(), message, None::<String>, "conflict"))
        }
        EngineError::AdapterOperation { name, message } => {
            raise(py, "refused", (name.as_str(), Vec::<String>::new(), message.as_str(), None::<String>, "operation"))
        }
        EngineError::UnloadTimeout { name, .. } => {
            raise(py, "refused", (name.as_str(), Vec::<String>::new(), message, None::<String>, "timeout"))
        }
        EngineError::RequestFailed(_) | EngineError::Busy(_) => raise(py, "RequestError", (message,)),
        // What is wrong with messages, templates and text is wrong with an argument.
        EngineError::Model(ModelError::ChatTemplate(_) | ModelError::Tokenizer(_) | ModelError::Output { .. }) => {
            raise(py, "ValidationError", (message,))
        }
        EngineError::Model(ModelError::NotFound { .. }) => raise(py, "ModelNotFoundError", (message,)),
        EngineError::Model(_) | EngineError::Kernel(_) => raise(py, "ModelError", (message,)),
        EngineError::Stopped(_) => raise(py, "EngineStoppedError", (message,)),
    }
}

/// Maps a result on the way out.
pub(crate) trait IntoPython<T> {
    /// The value, or the exception.
    fn into_python(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> IntoPython<T> for Result<T, EngineError> {
    fn into_python(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| to_python(py, &error))
    }
}
