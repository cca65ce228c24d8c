//! What answers have in common: ids, times, usage.

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use serde::Serialize;

use crate::room::Room;

/// Says which version of an adapter served a request.
pub(crate) const VERSION_HEADER: HeaderName = HeaderName::from_static("x-manylora-adapter-version");

tokio::task_local! {
    /// The id of the request that a task answers.
    pub(crate) static REQUEST_ID: HeaderValue;
}

/// A fresh id: the prefix and 32 random hex digits.
pub(crate) fn fresh_id(prefix: &str) -> String {
    let mut bytes = [0; 16];
    // Without random numbers of the system ids are all alike, which no answer depends on.
    let _ = getrandom::fill(&mut bytes);
    bytes.iter().fold(prefix.to_owned(), |id, byte| format!("{id}{byte:02x}"))
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) total_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) prompt_tokens_details: CachedTokens,
}

/// Of a prompt's tokens, those that came from the prefix cache.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct CachedTokens {
    pub(crate) cached_tokens: usize,
}

impl Usage {
    pub(crate) fn new(prompt_tokens: usize, completion_tokens: usize, cached_tokens: usize) -> Self {
        let total_tokens = prompt_tokens + completion_tokens;
        Self { prompt_tokens, total_tokens, completion_tokens, prompt_tokens_details: CachedTokens { cached_tokens } }
    }
}

/// The field `usage` of an answer or of an event.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ToldUsage {
    /// Not there.
    Absent,
    /// null: it comes in the last event.
    Later,
    /// The tokens so far.
    Now(Usage),
}

impl ToldUsage {
    pub(crate) const fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

impl Serialize for ToldUsage {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Now(usage) => usage.serialize(serializer),
            Self::Absent | Self::Later => serializer.serialize_none(),
        }
    }
}

/// A JSON answer.
pub(crate) fn json(value: &impl Serialize) -> Response {
    of_json(Body::from(json_text(value)))
}

pub(crate) fn json_text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
}

/// A text, and the room that it takes.
struct Told {
    text: String,
    _room: Room,
}

impl AsRef<[u8]> for Told {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

/// A JSON answer of this text. The room is kept until it was sent, or cannot be.
pub(crate) fn json_in(room: Room, text: String) -> Response {
    let is_any = room.is_any();
    of_json(if is_any { Body::from(Bytes::from_owner(Told { text, _room: room })) } else { Body::from(text) })
}

fn of_json(body: Body) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A plain-text answer.
pub(crate) fn text(text: impl Into<String>) -> Response {
    let mut response = Response::new(Body::from(text.into()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

/// Adds the version header.
pub(crate) fn with_version(mut response: Response, version: Option<&str>) -> Response {
    if let Some(value) = version.and_then(|version| HeaderValue::from_str(version).ok()) {
        response.headers_mut().insert(VERSION_HEADER, value);
    }
    response
}
