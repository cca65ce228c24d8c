//! A request's body: JSON, no larger and no slower than the server allows.

use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody as _};
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use tokio::runtime::{Builder, Runtime};

use crate::error::ApiError;
use crate::fields::Fields;
use crate::json::{self, Document, Fault};
use crate::room::{Room, Store};

/// Bodies up to so many bytes are read whatever else is there, and parsed at once.
const SMALL: usize = 256 << 10;
/// Bytes for which room is taken at a time.
const STEP: usize = 64 << 10;
/// Values of which everybody may have as many, and for which room is taken at a time beyond that. One takes some 70 bytes.
const FEW_VALUES: usize = 4 << 10;
const VALUES_STEP: usize = 1 << 10;
/// Bodies with the most values that may be there at once.
const TREES_AT_ONCE: usize = 2;
/// Bytes of large bodies that may be there at once, whatever one may have.
const LEAST_ROOM: usize = 8 << 20;
/// Fields that may be token ids: of prompts, and of what is to be text.
const OF_IDS: [&str; 2] = ["prompt", "tokens"];
/// How long a body may take to arrive.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long one may take that nobody wants.
const DISCARD_PATIENCE: Duration = Duration::from_secs(5);

/// A thread that parses large bodies, one after the other: of those that come together not each takes some of the room and none
/// enough, and what an allocator keeps for a thread it keeps for one.
#[derive(Debug)]
struct Parsers(Option<Runtime>);

impl Parsers {
    fn new() -> std::io::Result<Self> {
        let mut builder = Builder::new_current_thread();
        builder.max_blocking_threads(1).thread_keep_alive(Duration::from_secs(3600)).thread_name("manylora-bodies");
        builder.build().map(|runtime| Self(Some(runtime)))
    }

    async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        self.0.as_ref()?.spawn_blocking(work).await.ok()
    }
}

impl Drop for Parsers {
    /// Waits for nothing: this may be a thread that must not.
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Reads bodies, of which only so many may be in memory at once.
#[derive(Debug)]
pub(crate) struct Bodies {
    /// Bytes that one may have.
    most: usize,
    bytes: Store,
    values: Store,
    parsers: Parsers,
}

impl Bodies {
    /// `most`: the bytes of the largest body. Two of them may be there at once, and two with the most values.
    pub(crate) fn new(most: usize) -> std::io::Result<Self> {
        Ok(Self {
            most,
            bytes: Store::new(most.saturating_mul(2).max(LEAST_ROOM), STEP, SMALL),
            values: Store::new(TREES_AT_ONCE * json::MOST_VALUES, VALUES_STEP, FEW_VALUES),
            parsers: Parsers::new()?,
        })
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
            return parse(&bytes, room, &self.values);
        }
        // It takes long, and whoever has a stream is served by the same threads.
        let values = self.values.clone();
        let parsed = self.parsers.run(move || parse(&bytes, room, &values)).await;
        parsed.unwrap_or_else(|| Err(ApiError::internal("reading the body failed unexpectedly; please report this")))
    }

    /// Steps of room for bytes and for values that are left.
    #[cfg(test)]
    pub(crate) fn left(&self) -> (usize, usize) {
        (self.bytes.left(), self.values.left())
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
            if !self.bytes.take(&mut room.bytes, length) {
                // A client that still sends would lose the answer.
                discard(body, self.most - length).await;
                return Err(no_room());
            }
            bytes.extend_from_slice(data);
        }
        Ok((bytes, room))
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

fn no_room() -> ApiError {
    ApiError::unavailable("the server reads as many large bodies as it has memory for; try again in a moment", 1)
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
fn parse(bytes: &[u8], mut room: Room, values: &Store) -> Result<Fields, ApiError> {
    let mut make_room = |wanted| values.take(&mut room.values, wanted);
    match json::read(bytes, &OF_IDS, &mut make_room) {
        Ok(Document::Object(map, ids)) => Ok(Fields::of_body(map, ids, room)),
        Ok(Document::Other) => Err(ApiError::bad_request("the body must be a JSON object").about("body")),
        Err(Fault::TooMany) => Err(ApiError::too_large(format!(
            "the body has more than the `{}` values that are allowed, the token ids of prompts not counted",
            json::MOST_VALUES
        ))),
        Err(Fault::NoRoom) => Err(no_room()),
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

    fn bodies(most: usize) -> Bodies {
        Bodies::new(most).expect("threads")
    }

    fn message(body: &str) -> String {
        parse(body.as_bytes(), Room::default(), &bodies(1 << 20).values).expect_err("not JSON").to_json()["error"]
            ["message"]
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
        let error = bodies(1000).read(&headers(), Body::from_stream(drops)).await.expect_err("no body").to_json();
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
                let code = bodies(most)
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
        let bodies = bodies(32 << 20);
        let large = |bytes: usize| Body::from(format!("{{\"a\": \"{}\"}}", "x".repeat(bytes)));
        let read = async |bytes| bodies.read(&headers(), large(bytes)).await;
        let first = read(31 << 20).await.expect("room");
        let mut second = read(31 << 20).await.expect("room");
        assert_eq!(read(31 << 20).await.expect_err("no room").to_json()["error"]["code"], 503);
        // Small ones need none, and what was taken is given back with the fields.
        read(200 << 10).await.expect("a small one");
        let room = second.take_room();
        assert!(room.is_any());
        let held = ((64 << 20) / STEP - bodies.bytes.left()) / 2;
        // They are freed elsewhere.
        let freed = async || {
            while bodies.bytes.left() != (64 << 20) / STEP - held {
                tokio::task::yield_now().await;
            }
        };
        drop((first, second));
        freed().await;
        read(31 << 20).await.expect("room again");
        freed().await;
    }

    #[tokio::test]
    async fn so_many_values_are_there_at_once() {
        let bodies = bodies(32 << 20);
        let most = json::MOST_VALUES;
        let read = async |values: usize| {
            let body = Body::from(format!("{{\"a\": [{}0]}}", "0,".repeat(values - 3)));
            bodies.read(&headers(), body).await
        };
        let (first, second) = (read(most).await.expect("room"), read(most).await.expect("room"));
        // Small ones, too, if they have many.
        for values in [most, SMALL / 2 - 100] {
            assert_eq!(read(values).await.expect_err("no room").to_json()["error"]["code"], 503);
        }
        // They are freed elsewhere.
        let freed = async || {
            while bodies.values.left() < TREES_AT_ONCE * most / VALUES_STEP {
                tokio::task::yield_now().await;
            }
        };
        drop((first, second));
        freed().await;
        // Of those that come at once as many are read as there is room for.
        let all = futures_util::future::join_all((0..8).map(|_| read(most))).await;
        let (good, refused): (Vec<_>, Vec<_>) = all.into_iter().partition(Result::is_ok);
        assert_eq!((good.len(), refused.len()), (TREES_AT_ONCE, 8 - TREES_AT_ONCE));
        let few = read(FEW_VALUES).await.expect("as many as everybody may have");
        assert!(!few.is_large() && good.iter().flatten().all(Fields::is_large));
        drop(good);
        freed().await;
        read(most).await.expect("room again");
    }

    #[tokio::test]
    async fn names_that_come_again_are_no_work_for_those_between() {
        // Each that came a second time, taken out with those behind it moved up, would take a quarter of an hour in all.
        let names: Vec<String> = (0..250_000).map(|name| format!("\"{name}\":0,")).collect();
        let names = names.concat();
        let body = format!("{{{names}{names}\"prompt\":[1],\"prompt\":\"x\",\"prompt\":[2]}}");
        let bodies = bodies(32 << 20);
        let mut fields = bodies.read(&headers(), Body::from(body)).await.expect("an object");
        assert_eq!(fields.ids("prompt"), Some(json::Ids::One(vec![2])));
        for name in 0..250_000 {
            assert_eq!(fields.count(&name.to_string()).expect("a number"), Some(0));
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
