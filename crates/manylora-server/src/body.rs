//! A request's body: JSON, no larger and no slower than the server allows.

use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody as _};
use axum::http::{HeaderMap, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::Value;

use crate::error::ApiError;
use crate::fields::Fields;

/// How long a body may take to arrive.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long one may take that nobody wants.
const DISCARD_PATIENCE: Duration = Duration::from_secs(5);

/// Reads a body as a JSON object.
pub(crate) async fn read(headers: &HeaderMap, body: Body, most: usize) -> Result<Fields, ApiError> {
    if let Err(error) = check_type(headers) {
        discard(body, most).await;
        return Err(error);
    }
    let too_large = || ApiError::too_large(format!("the body has more than the `{most}` bytes that are allowed"));
    // Where its length is told, nothing of it is kept.
    if body.size_hint().lower() > most as u64 {
        discard(body, most).await;
        return Err(too_large());
    }
    let whole = tokio::time::timeout(PATIENCE, Limited::new(body, most).collect()).await;
    let bytes = match whole {
        Err(_) => {
            return Err(ApiError::timeout(format!("the body did not arrive within {} s", PATIENCE.as_secs())));
        }
        Ok(Err(error)) if error.is::<LengthLimitError>() => return Err(too_large()),
        Ok(Err(error)) => return Err(ApiError::bad_request(format!("the body could not be read: {error}"))),
        Ok(Ok(collected)) => collected.to_bytes(),
    };
    parse(&bytes)
}

/// Reads a body that nobody wants, up to so many bytes and for a moment: an answer that comes while a client still sends can
/// get lost, and the connection with it. Returns whether that was all of it.
pub(crate) async fn discard(mut body: Body, most: usize) -> bool {
    let all = async {
        let mut left = most;
        while let Some(Ok(frame)) = body.frame().await {
            let length = frame.data_ref().map_or(0, Bytes::len);
            if length > left {
                return false;
            }
            left -= length;
        }
        body.is_end_stream()
    };
    tokio::time::timeout(DISCARD_PATIENCE, all).await.unwrap_or(false)
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

    fn json() -> HeaderMap {
        HeaderMap::from_iter([(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"))])
    }

    // Time passes when nothing else happens.
    #[tokio::test(start_paused = true)]
    async fn a_body_that_drips_is_waited_for_only_so_long() {
        let drops = futures_util::stream::unfold((), |()| async {
            tokio::time::sleep(Duration::from_secs(7)).await;
            Some((Ok::<_, std::convert::Infallible>(" "), ()))
        });
        let start = tokio::time::Instant::now();
        let error = read(&json(), Body::from_stream(drops), 1000).await.expect_err("no body").to_json();
        assert_eq!(error["error"]["code"], 408);
        assert!(start.elapsed() < PATIENCE + Duration::from_secs(1));
    }

    #[tokio::test]
    async fn a_body_may_have_so_many_bytes_and_no_more() {
        let body = format!("{{\"a\": \"{}\"}}", "x".repeat(90));
        for (most, status) in [(body.len(), None), (body.len() - 1, Some(413))] {
            let parts: Vec<_> =
                body.as_bytes().chunks(10).map(|part| Ok::<_, std::convert::Infallible>(part.to_vec())).collect();
            let streamed = Body::from_stream(futures_util::stream::iter(parts));
            for given in [Body::from(body.clone()), streamed] {
                let code = read(&json(), given, most).await.err().map(|error| error.to_json()["error"]["code"].clone());
                assert_eq!(code, status.map(serde_json::Value::from), "{most}");
            }
        }
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
