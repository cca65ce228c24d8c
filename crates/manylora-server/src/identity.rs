//! What requests say of themselves in headers or in bodies: their id and their priority.

use axum::http::{HeaderMap, HeaderName};

use crate::answer::{self, REQUEST_ID};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::routes;

const PRIORITY: HeaderName = HeaderName::from_static("x-vllm-priority");
/// Characters of an id in a body.
const LONGEST_ID: usize = 256;

/// The id of an answer, which its line of the log has, too, so that both are found by the request's: the one in the header,
/// or in the body, or the one that the request was given here.
pub(crate) fn answer_id(prefix: &str, headers: &HeaderMap, fields: &mut Fields) -> Result<String, ApiError> {
    let said = fields.text("request_id")?;
    if let Some(id) = said.as_ref().filter(|id| id.is_empty() || id.chars().count() > LONGEST_ID) {
        return Err(ApiError::bad_request(format!(
            "`request_id` must have 1 to {LONGEST_ID} characters, got `{}`",
            id.chars().count()
        ))
        .about("request_id"));
    }
    let header = headers.get(routes::REQUEST_ID).and_then(|id| id.to_str().ok()).filter(|id| !id.is_empty());
    let given = || REQUEST_ID.try_with(|id| id.to_str().ok().map(str::to_owned)).ok().flatten();
    let id = header.map(str::to_owned).or(said).or_else(given).unwrap_or_else(|| answer::fresh_id(""));
    Ok(format!("{prefix}{id}"))
}

/// Lower runs first: the body's, or else the header's.
pub(crate) fn priority(headers: &HeaderMap, fields: &mut Fields) -> Result<i64, ApiError> {
    if let Some(priority) = fields.integer("priority")? {
        return Ok(priority);
    }
    let Some(value) = headers.get(PRIORITY) else { return Ok(0) };
    let parsed = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    parsed.ok_or_else(|| {
        let shown = String::from_utf8_lossy(value.as_bytes());
        ApiError::bad_request(format!("the header X-Vllm-Priority must be an integer, got `{shown}`")).about("priority")
    })
}
