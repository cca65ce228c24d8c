//! A request's body: JSON, no larger and no slower than the server allows.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::Value;

use crate::error::ApiError;
use crate::fields::Fields;

/// How long a body may take to arrive.
const PATIENCE: Duration = Duration::from_secs(60);

/// Reads a body as a JSON object.
pub(crate) async fn read(headers: &HeaderMap, body: Body, most: usize) -> Result<Fields, ApiError> {
    check_type(headers)?;
    let whole = tokio::time::timeout(PATIENCE, Limited::new(body, most).collect()).await;
    let bytes = match whole {
        Err(_) => {
            return Err(ApiError::timeout(format!("the body did not arrive within {} s", PATIENCE.as_secs())));
        }
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            return Err(ApiError::too_large(format!("the body has more than the `{most}` bytes that are allowed")));
        }
        Ok(Err(error)) => return Err(ApiError::bad_request(format!("the body could not be read: {error}"))),
        Ok(Ok(collected)) => collected.to_bytes(),
    };
    parse(&bytes)
}

fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let given = headers.get(header::CONTENT_TYPE).map_or("", |value| value.to_str().unwrap_or("?"));
    let kind = given.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(ApiError::bad_request(format!(
        "Unsupported Media Type: Only 'application/json' is allowed, the header Content-Type is `{given}`"
    )))
}

/// Parses a body. What is not JSON is told with line, column and the characters there.
pub(crate) fn parse(bytes: &[u8]) -> Result<Fields, ApiError> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(Fields::new(map)),
        Ok(_) => Err(ApiError::bad_request("the body must be a JSON object").about("body")),
        Err(error) => {
            let (line, column) = (error.line(), error.column());
            let place = bytes.split(|&byte| byte == b'\n').nth(line.saturating_sub(1)).unwrap_or_default();
            let rest = String::from_utf8_lossy(&place[column.saturating_sub(1).min(place.len())..]).into_owned();
            let at: String = rest.trim_start().chars().take(20).collect();
            let hint = if at.starts_with('#') || at.starts_with("//") || at.starts_with("/*") {
                "; JSON has no comments"
            } else {
                ""
            };
            let message = error.to_string();
            let what = message.split(" at line ").next().unwrap_or_default();
            Err(ApiError::bad_request(format!(
                "the body is not JSON: {what} at line {line}, column {column}, near `{at}`{hint}"
            ))
            .about("body"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(body: &str) -> String {
        parse(body.as_bytes()).expect_err("not JSON").to_json()["error"]["message"].as_str().expect("text").to_owned()
    }

    #[test]
    fn syntax_errors_say_where_and_what() {
        let told = message("{\n  \"a\": 1,\n  # no\n}");
        assert!(told.contains("line 3, column 3") && told.contains("`# no`") && told.contains("no comments"), "{told}");
        let told = message("{\"a\": 1, // x\n}");
        assert!(told.contains("line 1, column 10") && told.contains("no comments"), "{told}");
        let told = message("{\"a\": +}");
        assert!(told.contains("line 1") && !told.contains("comments"), "{told}");
        assert!(message("").contains("line 1"));
        assert!(message("[1]").contains("object"));
    }
}
