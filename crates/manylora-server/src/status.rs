//! `/health`, `/ping`, `/version`, `/load`: for whoever watches a server.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::answer;
use crate::app::App;

/// 200 while requests are taken, 503 else; at once, whatever the step in progress takes.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Response {
    let alive = !app.is_draining() && app.engine.check_health().is_ok();
    if alive { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }.into_response()
}

/// The version of this build.
pub(crate) async fn version() -> Response {
    answer::json(&json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// Requests that are being answered.
pub(crate) async fn load(State(app): State<Arc<App>>) -> Response {
    answer::json(&json!({"server_load": app.load()}))
}
