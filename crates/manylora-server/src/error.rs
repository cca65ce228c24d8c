//! Errors: OpenAI's envelope, and the one place where an engine's error becomes a status.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use manylora::model::ModelError;
use manylora::model::error::RefusalKind;
use manylora::{EngineError, FailureReason, LoadFault};
use serde_json::{Value, json};

use crate::metrics::Rejection;

/// Seconds after which what failed for want of something on this machine may go well.
const TRY_AGAIN_AFTER: u32 = 5;

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
    rejection: Option<Rejection>,
}

/// What the engine calls the fields that prompts are in.
pub(crate) const PROMPT: &str = "prompt";
/// The field of the engine's own that says what an output is to be.
pub(crate) const STRUCTURED_OUTPUTS: &str = "structured_outputs";

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, retry_after: None, rejection: None }
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
    pub(crate) fn too_many(rejection: Rejection, message: impl Into<String>, retry_after: u32) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "RateLimitError", message);
        Self { retry_after: Some(retry_after), rejection: Some(rejection), ..error }
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

    /// Calls the field that is to blame `field`, where it is called `name`: what the engine knows by one name, requests say
    /// in several fields.
    pub(crate) fn renamed(self, name: &str, field: &str) -> Self {
        if self.param.as_deref() == Some(name) { self.about(field) } else { self }
    }

    /// Why a request was turned away that may be taken another time.
    pub(crate) fn rejection(&self) -> Option<Rejection> {
        self.rejection
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
                    RefusalKind::Unavailable => Self::unavailable(message, TRY_AGAIN_AFTER),
                };
                Self { param: refusal.keys.first().cloned(), ..error }
            }
            EngineError::AdapterConflict { .. } | EngineError::AdapterOperation { .. } => {
                Self::invalid_user_input(message)
            }
            EngineError::RequestFailed(FailureReason::AdapterLoad(failure)) => {
                let message = without_paths(&message);
                let error = match failure.fault {
                    LoadFault::Missing => Self::not_found(message),
                    LoadFault::Forbidden => Self::forbidden(message),
                    LoadFault::Invalid => Self::bad_request(message),
                    LoadFault::Temporary => Self::unavailable(message, TRY_AGAIN_AFTER),
                };
                error.about("model")
            }
            EngineError::UnloadTimeout { .. } => Self::new(StatusCode::CONFLICT, "ConflictError", message),
            EngineError::StructuredOutputs(_) => Self::bad_request(message).about(STRUCTURED_OUTPUTS),
            EngineError::Busy(_) => {
                Self { rejection: Some(Rejection::StructuredOutputs), ..Self::unavailable(message, 1) }
            }
            EngineError::PromptTooLong { .. } => Self::bad_request(message).about(PROMPT),
            EngineError::PriorityWithoutPolicy(_) => Self::bad_request(message).about("priority"),
            EngineError::InvalidArgument(_)
            | EngineError::RequestFailed(_)
            | EngineError::Model(ModelError::ChatTemplate(_) | ModelError::Tokenizer(_)) => Self::bad_request(message),
            EngineError::Model(_) | EngineError::Kernel(_) | EngineError::Stopped(_) => Self::internal(message),
        }
    }
}

/// A message for users of the service, who need not know where its files lie: `<path>` for each absolute path.
pub(crate) fn without_paths(message: &str) -> String {
    let mut shown = String::with_capacity(message.len());
    let mut rest = message;
    while let Some(at) = rest.find('/') {
        let before = rest[..at].chars().next_back();
        let apart = before.is_none_or(|before| before.is_whitespace() || "`'\"(=:,".contains(before));
        // Not the two of a URL.
        let begins = apart && !rest[at + 1..].starts_with('/');
        // Between marks a path may have spaces; elsewhere it ends with the word.
        let quote = before.filter(|mark| "`'\"".contains(*mark));
        let word = || {
            let length = rest[at..].find(char::is_whitespace).unwrap_or(rest.len() - at);
            rest[at..at + length].trim_end_matches([',', ';', ':', '.', ')', '`', '\'', '"']).len()
        };
        let end = at + quote.and_then(|mark| rest[at..].find(mark)).unwrap_or_else(word);
        if begins && end > at + 1 {
            shown.push_str(&rest[..at]);
            shown.push_str("<path>");
            rest = &rest[end..];
        } else {
            let past = at + rest[at..].len() - rest[at..].trim_start_matches('/').len();
            shown.push_str(&rest[..past]);
            rest = &rest[past..];
        }
    }
    shown.push_str(rest);
    shown
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
    use manylora::LoadFailure;

    use super::*;

    #[test]
    fn users_are_not_told_where_files_lie() {
        for (message, shown) in [
            ("`/srv/a b/adapter_config.json` could not be read: no", "`<path>` could not be read: no"),
            ("there is no /data/x/y.json.", "there is no <path>."),
            ("(/a/b), '/c d'; x=/e:", "(<path>), '<path>'; x=<path>:"),
            (
                "adapter `team/beta` has 3/4 of a / and a key base_model.model",
                "adapter `team/beta` has 3/4 of a / and a key base_model.model",
            ),
            ("No adapter found for s3://bucket/a", "No adapter found for s3://bucket/a"),
            ("an unclosed `/a/b and more", "an unclosed `<path> and more"),
        ] {
            assert_eq!(without_paths(message), shown);
        }
    }

    #[test]
    fn who_failed_to_load_an_adapter_decides_the_status() {
        for (fault, status) in [
            (LoadFault::Missing, 404),
            (LoadFault::Forbidden, 403),
            (LoadFault::Invalid, 400),
            (LoadFault::Temporary, 503),
        ] {
            let failure = LoadFailure { fault, message: "`/srv/x` is not it".to_owned() };
            let error = ApiError::from(EngineError::RequestFailed(FailureReason::AdapterLoad(failure)));
            assert_eq!(error.retry_after.is_some(), status == 503);
            let told = error.to_json();
            assert_eq!(
                (told["error"]["code"].clone(), told["error"]["param"].clone()),
                (json!(status), json!("model"))
            );
            assert!(!told.to_string().contains("/srv"), "{told}");
        }
    }

    #[test]
    fn who_waits_too_long_for_a_grammar_is_to_come_back() {
        let error = ApiError::from(EngineError::Busy("`64` requests wait".to_owned()));
        assert!(matches!(error.rejection(), Some(Rejection::StructuredOutputs)));
        let response = error.into_response();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    }

    #[test]
    fn a_48_who_names_what_is_not_there_is_not_told_what_is() {
        let error = EngineError::UnknownAdapter { name: "mine".to_owned(), loaded: "secret, other".to_owned() };
        let told = ApiError::from(error).to_json().to_string();
        assert!(told.contains("'mine'") && told.contains("404") && !told.contains("secret"), "{told}");
    }
}
