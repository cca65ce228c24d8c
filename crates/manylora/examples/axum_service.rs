//! The engine inside a tokio service: `POST /generate {"prompt": "...", "adapter": "name"}` streams text.
//!
//! `LISTEN=127.0.0.1:8080 cargo run --release -p manylora --example axum_service -- BASE NAME=ADAPTER_DIR ...`
//!
//! Submitting tokenizes and validates on the calling thread, so it runs on tokio's blocking pool; the stream itself is a
//! `futures` stream. A client that disconnects drops the stream, which aborts its request.

#![expect(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;

use axum::body::Body;
use axum::extract::{Json, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::post;
use manylora::{AdapterSource, Engine, EngineConfig, EngineHandle, GenerateRequest, SamplingParams};
use serde::Deserialize;
use tokio_stream::StreamExt;

#[derive(Deserialize)]
struct Generate {
    prompt: String,
    adapter: Option<String>,
    max_tokens: Option<usize>,
}

type Refusal = (StatusCode, String);

async fn generate(State(engine): State<EngineHandle>, Json(body): Json<Generate>) -> Result<Response, Refusal> {
    let params = SamplingParams { max_tokens: Some(body.max_tokens.unwrap_or(64)), ..SamplingParams::default() };
    let mut request = GenerateRequest::text(body.prompt).params(params);
    if let Some(adapter) = body.adapter {
        request = request.adapter(adapter);
    }
    let stream = tokio::task::spawn_blocking(move || engine.submit(request))
        .await
        .map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?
        .map_err(|error| (StatusCode::BAD_REQUEST, error.to_string()))?;
    let text = stream.map(|delta| delta.map(|delta| delta.text));
    Ok(Response::new(Body::from_stream(text)))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let base = arguments.next().ok_or("usage: axum_service BASE NAME=ADAPTER_DIR ...")?;
    let mut config = EngineConfig::new(base);
    config.max_lora_rank = 64;
    let engine = Engine::start(config)?;
    for argument in arguments {
        let (name, path) = argument.split_once('=').ok_or("an adapter is NAME=ADAPTER_DIR")?;
        engine.load_adapter(AdapterSource::directory(name, path))?;
    }
    let service = axum::Router::new().route("/generate", post(generate)).with_state(engine.handle());
    let address = std::env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:8080".to_owned());
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, service).await?;
    Ok(())
}
