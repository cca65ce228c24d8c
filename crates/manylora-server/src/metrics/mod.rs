//! `/metrics`: what runs, waits, is resident and was served, under vLLM's names for the dashboards and routers that know
//! them, and per adapter and per tier under names of our own.
//!
//! What the engine counts is asked of it when somebody looks; what only the server knows - whose a request was, how HTTP
//! went - is counted here. Series of adapters go with their adapters, and there are never more than so many (`adapters`).

mod account;
mod adapters;
mod http;
mod own;
mod page;
mod report;
mod vllm;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use manylora::engine::EngineInfo;
use manylora::{Distribution, EngineHandle, EngineStats};

pub(crate) use account::Account;
use adapters::AdapterTable;
use http::HttpMeters;
pub(crate) use http::count as count_http;
pub(crate) use report::report;

use crate::app::App;
use crate::error::ApiError;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Bounds of `n`.
const SAMPLES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];

/// What the server counts.
#[derive(Debug)]
pub(crate) struct Metrics {
    http: HttpMeters,
    adapters: Mutex<AdapterTable>,
    requests: Mutex<RequestMeters>,
    rejections: Rejections,
}

/// Of requests whose samples have all ended well.
#[derive(Clone, Debug)]
struct RequestMeters {
    /// `n`.
    samples: Distribution,
    /// Tokens of the longest sample.
    longest: Distribution,
}

/// Why a request is turned away that may be taken another time.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rejection {
    /// The server has as many sequences as it takes.
    MaxPending,
    /// It takes none any more.
    Draining,
    /// The key's owner has as many sequences as its entry permits.
    MaxConcurrent,
    /// Or has made as many requests in a minute.
    RateLimit,
    /// Too many grammars wait to be compiled, or the machine has no time for one.
    StructuredOutputs,
    /// Large bodies have all the room that there is for them.
    MaxBodies,
}

/// In the order of [`Rejection`].
const REJECTIONS: [&str; 6] =
    ["max_pending", "draining", "max_concurrent", "rate_limit", "structured_outputs", "max_bodies"];

/// Requests that were turned away.
#[derive(Debug, Default)]
pub(crate) struct Rejections([AtomicU64; REJECTIONS.len()]);

impl Rejections {
    pub(crate) fn count(&self, reason: Rejection) {
        self.0[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn series(&self) -> [(&'static str, u64); REJECTIONS.len()] {
        std::array::from_fn(|index| (REJECTIONS[index], self.0[index].load(Ordering::Relaxed)))
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Metrics {
    /// Nothing yet, for the base of this name; at most `most` adapters have series of their own.
    pub(crate) fn new(engine: &EngineHandle, base: &str, most: usize) -> Self {
        let tokens = manylora::engine::meters::token_bounds(engine.info().max_model_len);
        Self {
            http: HttpMeters::new(),
            adapters: Mutex::new(AdapterTable::new(base, most)),
            requests: Mutex::new(RequestMeters {
                samples: Distribution::new(SAMPLES),
                longest: Distribution::new(tokens),
            }),
            rejections: Rejections::default(),
        }
    }

    pub(crate) fn rejections(&self) -> &Rejections {
        &self.rejections
    }
}

/// The page.
pub(crate) async fn show(State(app): State<Arc<App>>, headers: HeaderMap) -> Result<Response, ApiError> {
    app.keys.check_watcher(&headers)?;
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let open = accepted.into_iter().any(|value| value.contains("application/openmetrics-text"));
    let written = app
        .blocking(move |app| {
            let stats = app.engine.stats()?;
            Ok(write(app, stats).map(|page| if open { page } else { page::plain(&page) }))
        })
        .await?;
    let page = written.map_err(|_| ApiError::internal("the metrics could not be written; please report this"))?;
    let mut response = Response::new(Body::from(page));
    let kind = HeaderValue::from_static(if open { OPEN_METRICS } else { PLAIN });
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}

/// All that there is to tell, as OpenMetrics.
fn write(app: &App, stats: EngineStats) -> Result<String, fmt::Error> {
    let adapters = {
        let mut table = locked(&app.metrics.adapters);
        table.forget(|name| app.engine.adapter(name).is_ok());
        table.clone()
    };
    let seen = Arc::new(Seen {
        stats,
        adapters,
        requests: locked(&app.metrics.requests).clone(),
        rejections: app.metrics.rejections.series(),
        config: app.engine.config().clone(),
        info: app.engine.info().clone(),
        most_series: app.config.max_adapter_series,
    });
    let mut page = String::new();
    page::write(&mut page, &[("model_name", app.base_name()), ("engine", "0")], &seen, vllm::write)?;
    page::write(&mut page, &[], &seen, vllm::write_adapters)?;
    page::write(&mut page, &[], &seen, own::write)?;
    app.metrics.http.write(&mut page)?;
    prometheus_client::encoding::text::encode_eof(&mut page)?;
    Ok(page)
}

/// What a page is written from.
#[derive(Debug)]
struct Seen {
    stats: EngineStats,
    adapters: AdapterTable,
    requests: RequestMeters,
    rejections: [(&'static str, u64); REJECTIONS.len()],
    config: manylora::EngineConfig,
    info: EngineInfo,
    most_series: usize,
}

impl Seen {
    fn tier(&self) -> Tier {
        tier(&self.info)
    }

    /// Distinct adapters that a step can have.
    fn max_adapters(&self) -> usize {
        self.config.max_loras.map_or(self.config.max_num_seqs, |most| most.min(self.config.max_num_seqs))
    }
}

/// Where adapters are resident.
pub(crate) fn tier(info: &EngineInfo) -> Tier {
    if info.card.is_some() { Tier::Device } else { Tier::Host }
}

/// Share of the KV blocks that requests hold, from 0 to 1.
fn kv_cache_usage(stats: &EngineStats) -> f64 {
    stats.total_blocks.saturating_sub(stats.free_blocks) as f64 / stats.total_blocks.max(1) as f64
}

/// Where adapters can be resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    /// The processor's memory.
    Host,
    /// A card's.
    Device,
}

impl Tier {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Device => "device",
        }
    }
}
