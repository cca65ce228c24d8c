//! `/shelf`: what is resident where and who runs, in numbers that can be drawn (promise P8). The page at `/` draws them.
//!
//! Somebody who looks costs the engine's thread one short look, and all who look within a moment share one; nothing is done
//! while nobody looks. Adapters change seldom and may be thousands: who knows the list, by its revision, is not told it again.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::extract::{RawQuery, State};
use axum::response::Response;
use manylora::{AdapterUsers, Distribution, EngineStats, NamedUsers};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::answer;
use crate::app::App;
use crate::error::ApiError;
use crate::keys::Caller;
use crate::metrics;

/// How long a look serves all who ask.
const FRESH: Duration = Duration::from_millis(250);

/// The last look.
#[derive(Debug)]
pub(crate) struct Looks {
    since: Instant,
    last: Mutex<Option<Arc<Look>>>,
}

#[derive(Debug)]
struct Look {
    at: Instant,
    stats: EngineStats,
    /// By name; versions that no name leads to are last.
    adapters: Vec<Adapter>,
}

/// An adapter that requests can name, or a version that some still use although no name leads to it any more.
#[derive(Clone, Debug, Hash, Serialize)]
struct Adapter {
    name: Option<String>,
    version: Option<String>,
    /// Packed where it is resident, else as they are stored.
    bytes: u64,
    rank: u32,
    /// Where it is resident: `host`, `device`, or nowhere.
    tier: Option<&'static str>,
    pinned: bool,
    loading: bool,
}

/// Values of a histogram, without its buckets.
#[derive(Serialize)]
struct Sum {
    count: u64,
    seconds: f64,
}

impl From<&Distribution> for Sum {
    fn from(values: &Distribution) -> Self {
        Self { count: values.count(), seconds: values.sum() }
    }
}

impl Looks {
    pub(crate) fn new() -> Self {
        Self { since: Instant::now(), last: Mutex::default() }
    }

    /// A look that is new enough. Who comes while somebody looks waits for what that brings.
    async fn look(&self, app: &Arc<App>) -> Result<Arc<Look>, ApiError> {
        let mut last = self.last.lock().await;
        match &*last {
            Some(look) if look.at.elapsed() < FRESH => Ok(Arc::clone(look)),
            _ => {
                let look = Arc::new(app.blocking(|app| Ok(Look::take(app.engine.stats()?, app))).await?);
                *last = Some(Arc::clone(&look));
                Ok(look)
            }
        }
    }
}

impl Look {
    fn take(stats: EngineStats, app: &App) -> Self {
        let at = Instant::now();
        let tier = Some(metrics::tier(app.engine.info()).name());
        let registered = app.engine.list_adapters();
        let by_version: HashMap<_, _> = stats.residents.iter().map(|resident| (resident.version, resident)).collect();
        let named = registered.iter().map(|info| {
            let resident = info.version.and_then(|version| by_version.get(&version));
            Adapter {
                name: Some(info.name.clone()),
                version: info.version.map(|version| version.to_string()),
                bytes: resident.map_or(info.report.bytes, |it| it.bytes),
                rank: info.rank(),
                tier: resident.and(tier),
                pinned: resident.is_some_and(|it| it.pinned),
                loading: stats.loading.binary_search(&info.name).is_ok(),
            }
        });
        let nameless = stats.residents.iter().filter(|it| it.names.is_empty()).map(|it| Adapter {
            name: None,
            version: Some(it.version.to_string()),
            bytes: it.bytes,
            rank: it.rank,
            tier,
            pinned: it.pinned,
            loading: false,
        });
        let adapters = named.chain(nameless).collect();
        Self { at, stats, adapters }
    }

    /// Bytes of the parts of the memory, which add up to what the engine has.
    fn memory(&self, app: &App) -> Value {
        let (stats, info) = (&self.stats, app.engine.info());
        let blocks = |count: usize| count as u64 * info.block_bytes;
        let held = stats.total_blocks.saturating_sub(stats.free_blocks);
        json!({
            "weights": info.weight_bytes,
            "working": info.working_bytes,
            "kv_cache": blocks(stats.total_blocks),
            "kv_cache_used": blocks(held),
            "adapters": stats.adapter_bytes,
            "loading": stats.loading_bytes,
            "adapter_room": stats.adapter_room,
            "ledger": stats.ledger_bytes,
        })
    }

    /// What has been counted since the start.
    fn counters(&self, since: Instant) -> Value {
        let (stats, meters) = (&self.stats, &self.stats.meters);
        let ended = &meters.ended;
        json!({
            "seconds": self.at.duration_since(since).as_secs_f64(),
            "steps": stats.steps,
            "prompt_tokens": meters.prompt_tokens,
            "cached_prompt_tokens": meters.cached_prompt_tokens,
            "generation_tokens": meters.generation_tokens,
            "requests": {"stop": ended.stop, "length": ended.length, "abort": ended.abort, "error": ended.error},
            "time_to_first_token": Sum::from(&meters.time_to_first_token),
            "inter_token_latency": Sum::from(&meters.inter_token_latency),
            "request_latency": Sum::from(&meters.request_seconds),
            "preemptions": stats.preemptions,
            "evictions": stats.evictions,
            "loads": stats.loads,
        })
    }
}

fn rows(running: usize, waiting: usize) -> Value {
    json!({"running": running, "waiting": waiting})
}

/// Settings that say how the picture is to be read. The same for everybody.
fn settings(app: &App) -> Value {
    let (config, info) = (app.engine.config(), app.engine.info());
    json!({
        "backend": info.backend,
        "device": info.device,
        "dtype": info.dtype,
        "max_model_len": info.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_loras": config.max_loras,
        "max_cpu_loras": config.max_cpu_loras,
        "max_lora_rank": config.max_lora_rank,
        "block_size": info.block_size,
        "enable_lora": config.enable_lora,
        "enable_prefix_caching": config.enable_prefix_caching,
        "chat": app.engine.chat_template().is_some(),
    })
}

/// Whether and how adapters can be loaded, unloaded and pinned: not at all, with the admin key, or without one from this machine.
fn management(app: &App) -> &'static str {
    match (app.config.allow_runtime_lora_updating, app.keys.loopback_rule) {
        (false, _) => "off",
        (true, false) => "key",
        (true, true) => "local",
    }
}

/// The revision that a query says is known.
fn known(query: Option<&str>) -> Option<&str> {
    query?.split('&').find_map(|pair| pair.strip_prefix("known="))
}

/// The picture in numbers. A key that is confined to some adapters is told of these alone.
pub(crate) async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let look = app.looks.look(&app).await?;
    let all = caller.sees_all();
    let is_told = |name: Option<&str>| all || name.is_some_and(|name| caller.may_name(name));
    let adapters: Vec<&Adapter> = look.adapters.iter().filter(|it| is_told(it.name.as_deref())).collect();
    let revision = {
        let mut hasher = DefaultHasher::new();
        adapters.hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    };
    let registered = adapters.iter().filter(|it| it.name.is_some()).count();
    let users = look.stats.adapter_users.iter().filter(|it| is_told(Some(&it.name)));
    let per_adapter = users.map(|NamedUsers { name, users: AdapterUsers { running, waiting } }| {
        json!({"name": name, "running": running, "waiting": waiting})
    });
    let base = look.stats.base_users;
    let names = if caller.may_ask_base() { app.names.as_slice() } else { &[] };
    let is_known = known(query.as_deref()) == Some(&revision);
    Ok(answer::json(&json!({
        "version": env!("CARGO_PKG_VERSION"),
        "base": {"names": names, "bytes": app.engine.info().weight_bytes},
        "settings": settings(&app),
        "management": management(&app),
        "complete": all,
        "memory": all.then(|| look.memory(&app)),
        "counters": all.then(|| look.counters(app.looks.since)),
        "running": all.then_some(look.stats.running),
        "waiting": all.then_some(look.stats.waiting),
        "rows": {
            "base": all.then(|| rows(base.running, base.waiting)),
            "adapters": per_adapter.collect::<Vec<_>>(),
        },
        "registered": registered,
        "revision": revision,
        "adapters": (!is_known).then_some(adapters),
    })))
}
