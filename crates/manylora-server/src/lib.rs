//! The OpenAI-compatible HTTP surface of ManyLoRA: every request picks its adapter by the name in `model`.
//!
//! [`router`] is an axum router over a running engine, for mounting in another service; [`Server`] binds a port and runs it
//! until it is told to stop, draining what runs. Names, shapes and messages are those of OpenAI's API as vLLM extends it.
//!
//! Reading order: [`config`]; `app` (what all routes share) and `routes`; then the way of a request: `body`, `json` and `fields` (JSON in,
//! within bounds, with errors that name the place), `sampling` and `structured` (fields to sampling parameters), `target` (model name to adapters), `resolver` (adapters found at first use),
//! `completions` and `chat` (with `tools`, `reasoning` and `speech`, which take what a model says apart), `generation` (the engine's streams), `events` (server-sent events), `logprobs`. `adapters` loads,
//! unloads and pins, behind `auth`; `keys` has what each user may do; `metrics` counts and tells; `error` is the one place where errors become answers; `listener` has the port, `waiting` answers on it until there is a model, `connection` is what comes in by it, `tls` its encryption.

mod adapters;
mod answer;
mod app;
mod auth;
mod body;
mod chat;
mod completions;
pub mod config;
mod connection;
mod cors;
mod error;
mod events;
mod fields;
mod generation;
mod identity;
mod json;
mod keys;
mod listener;
mod logprobs;
mod metrics;
mod models;
mod openapi;
mod page;
mod prefix;
mod reasoning;
mod resolver;
mod room;
mod roots;
mod routes;
mod sampling;
mod shelf;
mod sources;
mod speech;
mod status;
mod structured;
mod target;
mod tls;
mod tokens;
mod tools;
mod waiting;

pub use config::{CorsConfig, ServerConfig, TlsConfig};
pub use error::ServerError;
pub use keys::ApiKey;
pub use listener::{Control, Server, bind};
pub use reasoning::ReasoningFormat;
pub use routes::router;
pub use sources::{Fetch, FetchError, Sources};
pub use tools::ToolFormat;
pub use waiting::WaitingRoom;
