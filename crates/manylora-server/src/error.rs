//! Errors: OpenAI's envelope, and the one place where an engine's error becomes a status.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use manylora::EngineError;
use manylora::model::ModelError;
use manylora::model::error::RefusalKind;
use serde_json::{Value, json};

/// Why a server could not be made, or ended.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A setting cannot be used.
    #[error("{0}")]
    InvalidSetting(String),
    /// The port could not be had.
    #[error("could not listen on {address}: {source}; give another --host or --port")]
    Bind {
        /// `host:port`.
        address: String,
        /// The system's word.
        source: std::io::Error,
    },
    /// The engine has ended, and nothing can be served without it.
    #[error("{0}; start the server again")]
    EngineStopped(EngineError),
    /// Something that the system refused.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The system's word.
        source: std::io::Error,
    },
}

/// The answer to a request that failed: `{"error": {"message", "type", "param", "code"}}` with `code` as its status.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    /// Seconds, as a hint to whoever tries again.
    retry_after: Option<u32>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, retry_after: None }
    }

    /// The request is wrong.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequestError", message)
    }

    /// What vLLM's management calls answer to names and paths that cannot be.
    pub(crate) fn invalid_user_input(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "InvalidUserInput", message)
    }

    /// Something that is named does not exist.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFoundError", message)
    }

    /// A key is missing or wrong; `message` names the header.
    pub(crate) fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "AuthenticationError", message)
    }

    /// Whoever asks may not do that.
    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "PermissionDeniedError", message)
    }

    /// The body is too long.
    pub(crate) fn too_large(message: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "BadRequestError", message)
    }

    /// The body took too long to arrive.
    pub(crate) fn timeout(message: impl Into<String>) -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "BadRequestError", message)
    }

    /// The route is there, the method is not.
    pub(crate) fn method_not_allowed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "BadRequestError", message)
    }

    /// Not now.
    pub(crate) fn unavailable(message: impl Into<String>, retry_after: u32) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailableError", message);
        Self { retry_after: Some(retry_after), ..error }
    }

    /// Whoever asks has asked too often, or for too much at once.
    pub(crate) fn too_many(message: impl Into<String>, retry_after: u32) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "RateLimitError", message);
        Self { retry_after: Some(retry_after), ..error }
    }

    /// Our own fault.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalServerError", message)
    }

    /// Whether what was asked for is not there.
    pub(crate) fn is_not_found(&self) -> bool {
        self.status == StatusCode::NOT_FOUND
    }

    /// Whether it is to be asked for later.
    pub(crate) fn is_unavailable(&self) -> bool {
        self.status == StatusCode::SERVICE_UNAVAILABLE
    }

    /// Names the field that is to blame.
    pub(crate) fn about(self, param: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    /// The envelope.
    pub(crate) fn to_json(&self) -> Value {
        let Self { status, kind, message, param, .. } = self;
        json!({"error": {"message": message, "type": kind, "param": param, "code": status.as_u16()}})
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        match error {
            // Not the names there are: whoever asks may be one who must not know them.
            EngineError::UnknownAdapter { name, .. } => {
                Self::not_found(format!("The lora adapter '{name}' cannot be found.")).about("model")
            }
            EngineError::AdapterRefused(refusal) => {
                let error = match refusal.kind {
                    RefusalKind::NotFound => Self::not_found(message),
                    RefusalKind::Forbidden => Self::forbidden(message),
                    RefusalKind::Invalid => Self::bad_request(message),
                };
                Self { param: refusal.keys.first().cloned(), ..error }
            }
            EngineError::AdapterConflict { .. } | EngineError::AdapterOperation { .. } => {
                Self::invalid_user_input(message)
            }
            EngineError::UnloadTimeout { .. } => Self::new(StatusCode::CONFLICT, "ConflictError", message),
            EngineError::InvalidArgument(_)
            | EngineError::RequestFailed(_)
            | EngineError::Model(ModelError::ChatTemplate(_) | ModelError::Tokenizer(_)) => Self::bad_request(message),
            EngineError::Model(_) | EngineError::Kernel(_) | EngineError::Stopped(_) => Self::internal(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.to_json().to_string()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if matches!(self.status, StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT) {
            // What is left of the body is not read.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_48_who_names_what_is_not_there_is_not_told_what_is() {
        let error = EngineError::UnknownAdapter { name: "mine".to_owned(), loaded: "secret, other".to_owned() };
        let told = ApiError::from(error).to_json().to_string();
        assert!(told.contains("'mine'") && told.contains("404") && !told.contains("secret"), "{told}");
    }
}
