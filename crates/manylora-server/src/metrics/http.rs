//! HTTP requests by where they led and how they ended, under the names of Prometheus's instrumentation for FastAPI.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode_registry;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::app::App;

/// What those who watch the server ask for: no traffic.
const UNCOUNTED: [&str; 5] = ["/health", "/ping", "/version", "/load", "/metrics"];

const SECONDS: [f64; 10] = [0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

// Routes, methods and classes are few: no value here is what a client makes up.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    handler: String,
    method: &'static str,
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Route {
    handler: String,
    method: &'static str,
}

#[derive(Debug)]
pub(super) struct HttpMeters {
    registry: Registry,
    requests: Family<Answered, Counter>,
    seconds: Family<Route, Histogram, fn() -> Histogram>,
}

fn histogram() -> Histogram {
    Histogram::new(SECONDS)
}

impl HttpMeters {
    pub(super) fn new() -> Self {
        let mut registry = Registry::default();
        let requests = Family::<Answered, Counter>::default();
        let seconds = Family::new_with_constructor(histogram as fn() -> Histogram);
        registry.register("http_requests", "Answered requests by route, method and class of status", requests.clone());
        registry.register(
            "http_request_duration_seconds",
            "Seconds to the head of an answer, which of a stream comes with its first token",
            seconds.clone(),
        );
        Self { registry, requests, seconds }
    }

    pub(super) fn write(&self, page: &mut String) -> fmt::Result {
        encode_registry(page, &self.registry)
    }
}

fn known(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        Method::PATCH => "PATCH",
        _ => "OTHER",
    }
}

/// Counts a request once its answer begins.
pub(crate) async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>();
    let handler = path.map_or("none", MatchedPath::as_str).to_owned();
    if UNCOUNTED.contains(&handler.as_str()) {
        return next.run(request).await;
    }
    let (method, start) = (known(request.method()), Instant::now());
    let response = next.run(request).await;
    let status = match response.status().as_u16() / 100 {
        1 => "1xx",
        2 => "2xx",
        3 => "3xx",
        4 => "4xx",
        _ => "5xx",
    };
    let meters = &app.metrics.http;
    meters.seconds.get_or_create(&Route { handler: handler.clone(), method }).observe(start.elapsed().as_secs_f64());
    meters.requests.get_or_create(&Answered { handler, method, status }).inc();
    response
}
