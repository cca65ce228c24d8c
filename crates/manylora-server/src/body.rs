//! A request's body: JSON, no larger and no slower than the server allows.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody as _};
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;
use crate::fields::Fields;
use crate::json::{self, Document, Fault};

/// Bodies up to so many bytes are read whatever else is there, and parsed at once.
const SMALL: usize = 256 << 10;
/// Bytes for which room is taken at a time.
const STEP: usize = 64 << 10;
/// Bytes of large bodies that may be there at once, whatever one may have.
const LEAST_ROOM: usize = 8 << 20;
/// Fields that may be token ids: of prompts, and of what is to be text.
const OF_IDS: [&str; 2] = ["prompt", "tokens"];
/// How long a body may take to arrive.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long one may take that nobody wants.
const DISCARD_PATIENCE: Duration = Duration::from_secs(5);

/// Memory that a body has been given; it is given back when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Room(Option<OwnedSemaphorePermit>);

/// Reads bodies, of which only so many may be in memory at once.
#[derive(Debug)]
pub(crate) struct Bodies {
    /// Bytes that one may have.
    most: usize,
    /// In steps.
    room: Arc<Semaphore>,
}

impl Bodies {
    /// `most`: the bytes of the largest body. Two of them may be there at once.
    pub(crate) fn new(most: usize) -> Self {
        let steps = most.saturating_mul(2).max(LEAST_ROOM) / STEP;
        Self { most, room: Arc::new(Semaphore::new(steps.min(Semaphore::MAX_PERMITS))) }
    }

    /// Reads a body as a JSON object.
    pub(crate) async fn read(&self, headers: &HeaderMap, body: Body) -> Result<Fields, ApiError> {
        if let Err(error) = check_type(headers) {
            discard(body, self.most).await;
            return Err(error);
        }
        // Where its length is told, nothing of it is kept.
        if body.size_hint().lower() > self.most as u64 {
            discard(body, self.most).await;
            return Err(self.too_large());
        }
        let Ok(whole) = tokio::time::timeout(PATIENCE, self.collect(body)).await else {
            return Err(ApiError::timeout(format!("the body did not arrive within {} s", PATIENCE.as_secs())));
        };
        let (bytes, room) = whole?;
        if bytes.len() <= SMALL {
            return parse(&bytes, room);
        }
        // It takes long, and whoever has a stream is served by the same threads.
        let parsed = tokio::task::spawn_blocking(move || parse(&bytes, room)).await;
        parsed.unwrap_or_else(|_| Err(ApiError::internal("reading the body failed unexpectedly; please report this")))
    }

    fn too_large(&self) -> ApiError {
        ApiError::too_large(format!("the body has more than the `{}` bytes that are allowed", self.most))
    }

    /// All of a body, for which room is taken as it comes: who only announces a large one takes nothing from others.
    async fn collect(&self, mut body: Body) -> Result<(Vec<u8>, Room), ApiError> {
        let mut bytes = Vec::new();
        let mut room = Room::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| ApiError::bad_request(format!("the body could not be read: {error}")))?;
            let Some(data) = frame.data_ref() else { continue };
            let length = bytes.len() + data.len();
            if length > self.most {
                return Err(self.too_large());
            }
            if !self.make_room(&mut room, length) {
                // A client that still sends would lose the answer.
                discard(body, self.most - length).await;
                return Err(ApiError::unavailable(
                    "the server reads as many large bodies as it has memory for; try again in a moment",
                    1,
                ));
            }
            bytes.extend_from_slice(data);
        }
        Ok((bytes, room))
    }

    /// Takes what `length` bytes need beyond those that everybody has; false if it is not there.
    fn make_room(&self, room: &mut Room, length: usize) -> bool {
        let has = room.0.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let lacks = length.saturating_sub(SMALL).div_ceil(STEP).saturating_sub(has);
        if lacks == 0 {
            return true;
        }
        let taken =
            u32::try_from(lacks).ok().and_then(|lacks| Arc::clone(&self.room).try_acquire_many_owned(lacks).ok());
        match (taken, &mut room.0) {
            (None, _) => return false,
            (Some(more), Some(room)) => room.merge(more),
            (taken, room) => *room = taken,
        }
        true
    }
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
fn parse(bytes: &[u8], room: Room) -> Result<Fields, ApiError> {
    match json::read(bytes, &OF_IDS) {
        Ok(Document::Object(map, ids)) => Ok(Fields::of_body(map, ids, room)),
        Ok(Document::Other) => Err(ApiError::bad_request("the body must be a JSON object").about("body")),
        Err(Fault::TooMany) => Err(ApiError::too_large(format!(
            "the body has more than the `{}` values that are allowed, the token ids of prompts not counted",
            json::MOST_VALUES
        ))),
        Err(Fault::Syntax(error)) => {
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
        parse(body.as_bytes(), Room::default()).expect_err("not JSON").to_json()["error"]["message"]
            .as_str()
            .expect("text")
            .to_owned()
    }

    fn headers() -> HeaderMap {
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
        let error = Bodies::new(1000).read(&headers(), Body::from_stream(drops)).await.expect_err("no body").to_json();
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
                let code = Bodies::new(most)
                    .read(&headers(), given)
                    .await
                    .err()
                    .map(|error| error.to_json()["error"]["code"].clone());
                assert_eq!(code, status.map(serde_json::Value::from), "{most}");
            }
        }
    }

    #[tokio::test]
    async fn so_many_large_bodies_are_there_at_once() {
        let bodies = Bodies::new(32 << 20);
        let large = |bytes: usize| Body::from(format!("{{\"a\": \"{}\"}}", "x".repeat(bytes)));
        let read = async |bytes| bodies.read(&headers(), large(bytes)).await;
        let first = read(31 << 20).await.expect("room");
        let mut second = read(31 << 20).await.expect("room");
        assert_eq!(read(31 << 20).await.expect_err("no room").to_json()["error"]["code"], 503);
        // Small ones need none, and what was taken is given back with the fields.
        read(200 << 10).await.expect("a small one");
        let room = second.take_room();
        drop((first, second));
        read(31 << 20).await.expect("room again");
        assert_eq!(bodies.room.available_permits(), (64 << 20) / STEP - room.0.expect("room").num_permits());
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
