//! Server-sent events: what a stream of deltas becomes on the wire.

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures_util::FutureExt;
use futures_util::stream::unfold;
use manylora::Delta;
use serde::Serialize;

use crate::answer::{ToldUsage, Usage};
use crate::app::Answering;
use crate::error::ApiError;
use crate::generation::{Generation, MUCH, told_bytes};

/// Events that go out together.
#[derive(Debug, Default)]
pub(crate) struct Events {
    bytes: Vec<u8>,
}

impl Events {
    /// Adds an event.
    pub(crate) fn push(&mut self, value: &impl Serialize) {
        self.bytes.extend_from_slice(b"data: ");
        let before = self.bytes.len();
        if let Err(error) = serde_json::to_writer(&mut self.bytes, value) {
            self.bytes.truncate(before);
            self.bytes.extend_from_slice(ApiError::internal(error.to_string()).to_json().to_string().as_bytes());
        }
        self.bytes.extend_from_slice(b"\n\n");
    }

    fn done(&mut self) {
        self.bytes.extend_from_slice(b"data: [DONE]\n\n");
    }
}

/// Makes events of a generation's news.
pub(crate) trait Maker: Send + 'static {
    /// What an event tells.
    type Choice: Send;

    /// What is told before all news, an event each.
    fn opening(&self) -> Vec<Self::Choice> {
        Vec::new()
    }

    /// What news of a sample of a prompt become, an event each.
    fn choices(&mut self, prompt: usize, delta: Delta) -> Vec<Self::Choice>;

    /// Tokens so far.
    fn usage(&self) -> Usage;

    /// An event.
    fn event(&self, choice: Option<Self::Choice>, usage: ToldUsage) -> impl Serialize;
}

struct Stream<M> {
    generation: Generation,
    maker: M,
    options: StreamOptions,
    begun: bool,
    ended: bool,
    _answering: Answering,
}

impl<M: Maker> Stream<M> {
    fn tell(&self, choices: Vec<M::Choice>, events: &mut Events) {
        for choice in choices {
            events.push(&self.maker.event(Some(choice), self.options.usage(|| self.maker.usage())));
        }
    }

    fn tell_news(&mut self, prompt: usize, delta: Delta, events: &mut Events) {
        let choices = self.maker.choices(prompt, delta);
        self.tell(choices, events);
    }

    /// The events that are there, at least one if any comes; None at the end.
    async fn next(mut self) -> Option<(Result<Bytes, std::convert::Infallible>, Self)> {
        if self.ended {
            return None;
        }
        let mut events = Events::default();
        if !self.begun {
            self.begun = true;
            self.tell(self.maker.opening(), &mut events);
        }
        let mut news = self.generation.next().await;
        loop {
            match news {
                // It takes long: logprobs of a long prompt, most likely.
                Some(Ok((prompt, delta))) if told_bytes(&delta) > MUCH => {
                    let told = tokio::task::spawn_blocking(move || {
                        self.tell_news(prompt, delta, &mut events);
                        (self, events)
                    });
                    match told.await {
                        Ok(told) => (self, events) = told,
                        Err(failed) => std::panic::resume_unwind(failed.into_panic()),
                    }
                }
                Some(Ok((prompt, delta))) => self.tell_news(prompt, delta, &mut events),
                Some(Err(error)) => {
                    // An error is the last event: no [DONE], which would say that all went well.
                    events.push(&error.to_json());
                    self.ended = true;
                    break;
                }
                None => {
                    if self.options.include_usage {
                        events.push(&self.maker.event(None, ToldUsage::Now(self.maker.usage())));
                    }
                    events.done();
                    self.ended = true;
                    break;
                }
            }
            // What else has come meanwhile goes along.
            match self.generation.next().now_or_never() {
                Some(more) => news = more,
                None => break,
            }
        }
        Some((Ok(Bytes::from(events.bytes)), self))
    }
}

/// The answer that streams a generation.
pub(crate) fn respond(
    generation: Generation,
    maker: impl Maker,
    options: StreamOptions,
    answering: Answering,
) -> Response {
    let stream = Stream { generation, maker, options, begun: false, ended: false, _answering: answering };
    let mut response = Response::new(Body::from_stream(unfold(stream, Stream::next)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that collect answers would hold tokens back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// What a client wants beside the text of a stream.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StreamOptions {
    /// A last event with the usage.
    pub(crate) include_usage: bool,
    /// Usage in every event.
    pub(crate) continuous_usage: bool,
}

impl StreamOptions {
    /// What an event says of the usage so far.
    pub(crate) fn usage(self, usage: impl FnOnce() -> Usage) -> ToldUsage {
        match self {
            Self { continuous_usage: true, .. } => ToldUsage::Now(usage()),
            Self { include_usage: true, .. } => ToldUsage::Later,
            Self { .. } => ToldUsage::Absent,
        }
    }

    /// Reads `stream` and `stream_options`: None = no stream.
    pub(crate) fn read(fields: &mut crate::fields::Fields) -> Result<Option<Self>, ApiError> {
        let stream = fields.flag("stream")?.unwrap_or(false);
        let Some(options) = fields.object("stream_options")? else { return Ok(stream.then(Self::default)) };
        if !stream {
            return Err(
                ApiError::bad_request("Stream options can only be defined when `stream=True`.").about("stream_options")
            );
        }
        let mut options = crate::fields::Fields::new(options);
        Ok(Some(Self {
            include_usage: options.flag("include_usage")?.unwrap_or(false),
            continuous_usage: options.flag("continuous_usage_stats")?.unwrap_or(false),
        }))
    }
}
