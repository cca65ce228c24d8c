//! The router: which path leads where, who may go there, and what every answer has.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use manylora::EngineHandle;

use crate::app::App;
use crate::config::ServerConfig;
use crate::error::{ApiError, ServerError};
use crate::{adapters, answer, chat, completions, metrics, models, status, tokens};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The whole surface over a running engine, for mounting in another service. Without the listener of this crate nothing
/// tells who the peer is, so that managing adapters needs an admin key.
pub fn router(engine: EngineHandle, config: ServerConfig) -> Result<Router, ServerError> {
    Ok(routes(&App::new(engine, config)?))
}

pub(crate) fn routes(app: &Arc<App>) -> Router {
    let open = Router::new()
        .route("/health", get(status::health))
        .route("/ping", get(status::health).post(status::health))
        .route("/version", get(status::version))
        .route("/load", get(status::load))
        .route("/metrics", get(metrics::show));
    let users = Router::new()
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::get))
        .route("/v1/completions", post(completions::create))
        .route("/v1/chat/completions", post(chat::create))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .layer(from_fn_with_state(Arc::clone(app), only_users));
    // Each of them asks for a `Manager`.
    let managers = Router::new()
        .route("/v1/load_lora_adapter", post(adapters::load))
        .route("/v1/unload_lora_adapter", post(adapters::unload))
        .route("/v1/pin_lora_adapter", post(adapters::pin));
    open.merge(users)
        .merge(managers)
        .fallback(nowhere)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(app), metrics::count_http))
        .layer(from_fn(with_request_id))
        .with_state(Arc::clone(app))
}

async fn only_users(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    match app.keys.identify(request.headers()) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

async fn nowhere(request: Request) -> ApiError {
    ApiError::not_found(format!("Not Found: there is no {} {}", request.method(), request.uri().path()))
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::method_not_allowed(format!("Method Not Allowed: {} {}", request.method(), request.uri().path()))
}

/// Gives the answer the request's id, or a fresh one.
async fn with_request_id(request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).cloned();
    let Some(id) = given.or_else(|| HeaderValue::from_str(&answer::fresh_id("")).ok()) else {
        return next.run(request).await;
    };
    let mut response = answer::REQUEST_ID.scope(id.clone(), next.run(request)).await;
    response.headers_mut().insert(REQUEST_ID, id);
    response
}
