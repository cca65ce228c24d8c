//! What all routes share: the engine, the settings, and how many sequences are on their way.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue};
use manylora::{EngineHandle, SchedulingPolicy, Share};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::answer::REQUEST_ID;
use crate::auth::Keys;
use crate::body::Bodies;
use crate::config::ServerConfig;
use crate::error::{ApiError, ServerError};
use crate::fields::Fields;
use crate::keys::{ApiKey, Caller, Running};
use crate::metrics::{Metrics, Rejection};
use crate::resolver::Resolver;
use crate::room::{Held, Room, Store};
use crate::roots::LoraRoot;
use crate::routes::Routing;
use crate::shelf::Looks;
use crate::tools::ToolFormat;

/// Kilobytes of large texts that may be encoded at once; a larger one alone.
const MOST_ENCODED: usize = 4 << 10;
/// Bytes of texts that are encoded whatever else is.
const SMALL_TEXT: usize = 64 << 10;

/// Tokens that the logprobs of one answer may list, those of its prompts and those of its samples each: 20 beside the one that
/// is there, for 50,000 tokens. One takes a dozen bytes as long as its request runs, and some 80 more in the answer.
pub(crate) const MOST_LISTED: usize = 1 << 20;
/// Answers of which the prompts' logprobs may list the most at once; others wait. Of a few tokens nobody has to wait.
const LISTS_AT_ONCE: usize = 2;
const FEW_LISTED: usize = 4 << 10;
const LISTED_STEP: usize = 1 << 10;

/// State of a server.
pub(crate) struct App {
    pub(crate) engine: EngineHandle,
    pub(crate) config: ServerConfig,
    /// Names of the base; the first is the one that answers have.
    pub(crate) names: Vec<String>,
    pub(crate) keys: Keys,
    pub(crate) lora_root: LoraRoot,
    /// Finds adapters at first use.
    pub(crate) resolver: Option<Resolver>,
    pub(crate) metrics: Metrics,
    pub(crate) looks: Looks,
    /// How the model writes calls of tools, where that is known.
    pub(crate) tool_format: Option<ToolFormat>,
    pub(crate) routing: Routing,
    bodies: Bodies,
    /// Kilobytes of large texts that may be encoded at once: what the tokenizer makes of them takes a hundred times as much.
    encoding: Arc<Semaphore>,
    /// Tokens that the logprobs of prompts list, of all requests together.
    listed: Store,
    /// Unix time.
    pub(crate) started: u64,
    /// Sequences that wait or run.
    pending: AtomicUsize,
    /// Requests that are being answered.
    load: AtomicUsize,
    draining: AtomicBool,
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("names", &self.names).finish_non_exhaustive()
    }
}

impl App {
    /// `bound`: where it listens, if somebody told.
    pub(crate) fn new(
        engine: EngineHandle,
        config: ServerConfig,
        bound: Option<IpAddr>,
    ) -> Result<Arc<Self>, ServerError> {
        let mut names = config.served_model_names.clone();
        let mut seen = HashSet::new();
        names.retain(|name| seen.insert(name.clone()));
        if let Some(blank) = names.iter().find(|name| name.trim().is_empty()) {
            return Err(ServerError::InvalidSetting(format!("served_model_name {blank:?} is blank; give a name")));
        }
        if names.is_empty() {
            // The first is the path or id that the model was named by.
            names.extend(engine.info().base_names.first().cloned());
        }
        if let Some(taken) = names.iter().find(|name| engine.adapter(name).is_ok()) {
            return Err(ServerError::InvalidSetting(format!(
                "The lora adapter '{taken}' conflicts with a served base model; give one of them another name"
            )));
        }
        let (keys, lora_root) = (Keys::new(&config, bound)?, LoraRoot::new(&config)?);
        let resolver = config.lora_resolve_root.as_deref().map(Resolver::new).transpose()?;
        let routing = Routing::new(&config)?;
        let metrics = Metrics::new(&engine, names.first().map_or("", String::as_str), config.max_adapter_series);
        let tool_format = config.tool_format.or_else(|| ToolFormat::of_template(&engine));
        let bodies = Bodies::new(config.max_body_bytes)
            .map_err(|source| ServerError::Io { what: "preparing to read bodies", source })?;
        let app = Arc::new(Self {
            metrics,
            looks: Looks::new(),
            routing,
            bodies,
            encoding: Arc::new(Semaphore::new(MOST_ENCODED)),
            listed: Store::new(LISTS_AT_ONCE * MOST_LISTED, LISTED_STEP, FEW_LISTED),
            resolver,
            tool_format,
            engine,
            config,
            names,
            keys,
            lora_root,
            started: unix_time(),
            pending: AtomicUsize::new(0),
            load: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
        });
        app.share(&HashMap::new(), &app.keys.weights())?;
        app.engine.prepare_structured_outputs();
        Ok(app)
    }

    /// Takes the keys of a keys file in place of those before.
    pub(crate) fn replace_keys(&self, keys: Vec<ApiKey>) -> Result<(), ServerError> {
        self.keys.replace(keys, |before, now| {
            // Who has left, and comes back, begins as everybody does.
            for tenant in before.keys().filter(|tenant| !now.contains_key(*tenant)) {
                self.set_weight(tenant, 1.0)?;
            }
            self.share(before, now)
        })
    }

    /// Tells the engine what share of the service each user has now, where it was another one before.
    fn share(&self, before: &HashMap<String, f64>, now: &HashMap<String, f64>) -> Result<(), ServerError> {
        if self.engine.config().scheduling_policy != SchedulingPolicy::Fair && now.values().any(|weight| *weight != 1.0)
        {
            tracing::warn!("weights of keys have no effect: they are for --scheduling-policy fair");
        }
        let changed = now.iter().filter(|(tenant, weight)| before.get(*tenant).unwrap_or(&1.0) != *weight);
        changed.into_iter().try_for_each(|(tenant, weight)| self.set_weight(tenant, *weight))
    }

    fn set_weight(&self, tenant: &str, weight: f64) -> Result<(), ServerError> {
        let set = self.engine.set_weight(Share::Tenant(tenant), weight);
        set.map_err(|error| ServerError::InvalidSetting(error.to_string()))
    }

    /// The name that answers have for the base.
    pub(crate) fn base_name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// Reads a body as a JSON object.
    pub(crate) async fn read(&self, headers: &HeaderMap, body: Body) -> Result<Fields, ApiError> {
        self.bodies.read(headers, body).await.inspect_err(|error| {
            if error.is_unavailable() {
                self.metrics.rejections().count(Rejection::MaxBodies);
            }
        })
    }

    /// Whether texts of so many bytes are encoded a few at a time.
    pub(crate) fn is_large_text(bytes: usize) -> bool {
        bytes > SMALL_TEXT
    }

    /// Waits until texts of so many bytes may be encoded. What is given back then belongs into [`Self::blocking`]'s work, so
    /// that it lasts as long as that does, whether or not somebody waits for it.
    pub(crate) async fn encoding(&self, bytes: usize) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        if !Self::is_large_text(bytes) {
            return Ok(None);
        }
        let share = (bytes >> 10).clamp(1, MOST_ENCODED) as u32;
        let permit = Arc::clone(&self.encoding).acquire_many_owned(share).await;
        permit.map(Some).map_err(|error| ApiError::internal(error.to_string()))
    }

    /// Waits until the logprobs of prompts may list so many tokens.
    pub(crate) async fn listing(&self, entries: usize) -> Result<Held, ApiError> {
        if entries <= MOST_LISTED {
            return Ok(self.listed.wait(entries).await);
        }
        Err(ApiError::bad_request(format!(
            "the logprobs of the prompts would list `{entries}` tokens (each token of a prompt, times one more than \
             `prompt_logprobs`, or than `logprobs` with `echo`), and those of one request may list {MOST_LISTED}; ask for fewer, \
             or send fewer prompts at a time"
        ))
        .about("prompt_logprobs"))
    }

    /// Does something that may wait - for the engine, for files - where waiting holds nobody up.
    pub(crate) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Arc<Self>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let app = Arc::clone(self);
        let id = REQUEST_ID.try_with(HeaderValue::clone).ok();
        let work = move || match id {
            Some(id) => REQUEST_ID.sync_scope(id, || work(&app)),
            None => work(&app),
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(done) => done,
            Err(_) => Err(ApiError::internal("the call failed unexpectedly; please report this")),
        }
    }

    /// Takes what is needed out of the fields of a body: elsewhere, where that takes long. Also gives the room that the body
    /// was given: to be kept as long as what is made of it.
    pub(crate) async fn take<T: Send + 'static>(
        self: &Arc<Self>,
        mut fields: Fields,
        read: impl FnOnce(&Arc<Self>, &mut Fields) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Room), ApiError> {
        let is_large = fields.is_large();
        let work = move |app: &Arc<Self>| Ok((read(app, &mut fields)?, fields.take_room()));
        if is_large { self.blocking(work).await } else { work(self) }
    }

    /// Admits `sequences` more, unless there are too many or the server is about to end.
    pub(crate) fn admit(self: &Arc<Self>, caller: &Caller, sequences: usize) -> Result<Pending, ApiError> {
        if self.is_draining() {
            self.metrics.rejections().count(Rejection::Draining);
            return Err(ApiError::unavailable("the server is shutting down and takes no new requests", 5));
        }
        let before = self.pending.fetch_add(sequences, Ordering::Relaxed);
        let mut admitted = Pending { app: Arc::clone(self), sequences, running: None };
        match self.config.max_pending {
            // One request alone may always run, however many samples it wants.
            Some(most) if before > 0 && before.saturating_add(sequences) > most => {
                self.metrics.rejections().count(Rejection::MaxPending);
                Err(ApiError::unavailable(
                    format!(
                        "the server has `{before}` sequences waiting and running, and takes `{most}` at most (max_pending); try \
                         again in a moment"
                    ),
                    1,
                ))
            }
            _ => {
                admitted.running = caller.admit(sequences).inspect_err(|error| {
                    if let Some(reason) = error.rejection() {
                        self.metrics.rejections().count(reason);
                    }
                })?;
                Ok(admitted)
            }
        }
    }

    /// Counts a request that is being answered.
    pub(crate) fn answering(self: &Arc<Self>) -> Answering {
        self.load.fetch_add(1, Ordering::Relaxed);
        Answering(Arc::clone(self))
    }

    /// Requests that are being answered.
    pub(crate) fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }

    /// Steps of room for bodies' bytes and values that are left, and sequences that are pending.
    #[cfg(test)]
    pub(crate) fn left(&self) -> ((usize, usize), usize) {
        (self.bodies.left(), self.pending.load(Ordering::Relaxed))
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// From now on no request is taken.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }
}

/// Sequences that were admitted, until this is dropped.
#[derive(Debug)]
pub(crate) struct Pending {
    app: Arc<App>,
    sequences: usize,
    /// Of a user who may not have any number at once.
    running: Option<Running>,
}

impl Drop for Pending {
    fn drop(&mut self) {
        drop(self.running.take());
        self.app.pending.fetch_sub(self.sequences, Ordering::Relaxed);
    }
}

/// A request that is being answered, until this is dropped.
#[derive(Debug)]
pub(crate) struct Answering(Arc<App>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.load.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use manylora::{Device, Engine, EngineConfig};
    use serde_json::json;

    use super::*;

    /// Of a server on a base of the oracle, or on one that is made of it. The engine ends when it is dropped.
    pub(crate) fn app(base: Option<&Path>) -> (Engine, Arc<App>) {
        let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle/llama/base");
        let engine = Engine::start(EngineConfig {
            device: Device::Cpu,
            enable_lora: true,
            max_lora_rank: 64,
            kv_cache_memory_bytes: Some(1 << 20),
            num_threads: Some(1),
            ..EngineConfig::new(base.unwrap_or(&oracle))
        })
        .expect("an engine");
        let app = App::new(engine.handle(), ServerConfig::default(), None).expect("good settings");
        (engine, app)
    }

    #[tokio::test]
    async fn large_bodies_are_read_where_nobody_is_served() {
        let (_engine, app) = app(None);
        let headers =
            HeaderMap::from_iter([(axum::http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        let here = std::thread::current().id();
        for (count, is_here) in [(10, true), (10_000, false)] {
            let body = Body::from(json!({"messages": vec!["x"; count]}).to_string());
            let fields = app.read(&headers, body).await.expect("an object");
            let id = HeaderValue::from_static("mine");
            let read = app.take(fields, |_, fields| {
                let id = REQUEST_ID.try_with(HeaderValue::clone).ok();
                Ok((fields.array("messages")?.map(|items| items.len()), std::thread::current().id(), id))
            });
            let ((items, thread, told), room) = REQUEST_ID.scope(id.clone(), read).await.expect("an array");
            assert_eq!((items, thread == here, told), (Some(count), is_here, Some(id)));
            assert_eq!(room.is_any(), !is_here);
        }
    }
}
