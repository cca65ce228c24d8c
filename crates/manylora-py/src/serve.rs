//! Serving over HTTP: runs until the process is told to stop.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use manylora::EngineError;
use manylora_server::{
    ApiKey, Control, CorsConfig, FetchError, ReasoningFormat, Server, ServerConfig, ServerError, Sources, TlsConfig,
    ToolFormat, WaitingRoom, bind,
};
use pyo3::prelude::*;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::engine::Engine;
use crate::errors::to_python;

/// Threads of the HTTP side: what it does is small beside what the engine does.
const THREADS: usize = 2;

/// A port that is bound, on which everybody is told that the model is being loaded, and what those who answer there later will do.
#[pyclass(frozen, module = "manylora._core")]
pub(crate) struct Port(Mutex<Option<(WaitingRoom, ServerConfig)>>);

#[pymethods]
impl Port {
    /// Checks settings and binds their port. `fetch(name, url)` brings an adapter to this machine and returns `("found", folder)`,
    /// `("missing", why)` or `("failed", why)`.
    #[new]
    fn new(py: Python<'_>, settings: Settings, fetch: Py<PyAny>) -> PyResult<Self> {
        let prepared = py.detach(|| {
            let config = settings.into_config(fetch)?;
            config.check()?;
            let room = WaitingRoom::open(bind(&config.host, config.port)?, &config)?;
            Ok((room, config))
        });
        prepared.map(|prepared| Self(Mutex::new(Some(prepared)))).map_err(|error| failed(py, &error))
    }
}

/// Every key must be there: `manylora/cli/serve.py` has the defaults.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Settings {
    host: String,
    port: u16,
    ssl_certfile: Option<PathBuf>,
    ssl_keyfile: Option<PathBuf>,
    ssl_ca_certs: Option<PathBuf>,
    ssl_cert_reqs: u64,
    enable_ssl_refresh: bool,
    allowed_origins: Vec<String>,
    allowed_methods: Option<Vec<String>>,
    allowed_headers: Option<Vec<String>>,
    allow_credentials: bool,
    root_path: String,
    describe_routes: bool,
    page: bool,
    served_model_names: Vec<String>,
    model_root: String,
    api_keys: Vec<String>,
    /// JSON.
    keys: Option<String>,
    admin_api_key: Option<String>,
    allow_runtime_lora_updating: bool,
    lora_root: Option<PathBuf>,
    lora_sources: Vec<String>,
    lora_resolve_root: Option<PathBuf>,
    use_generation_config: bool,
    trust_request_chat_template: bool,
    tool_call_parser: Option<String>,
    exclude_tools_when_tool_choice_none: bool,
    reasoning_parser: Option<String>,
    max_body_bytes: usize,
    max_pending: Option<usize>,
    max_adapter_series: usize,
    log_requests: bool,
    log_stats_interval: Option<f64>,
    shutdown_timeout: f64,
}

impl Settings {
    fn into_config(self, fetch: Py<PyAny>) -> Result<ServerConfig, ServerError> {
        let settings = self;
        let keys = settings.keys.as_deref().map(parse_keys).transpose()?;
        let fetch = Arc::new(move |name: &str, url: &str| fetch_adapter(&fetch, name, url));
        let lora_sources = match settings.lora_sources.as_slice() {
            [] => None,
            prefixes => Some(Sources::new(prefixes, fetch)?),
        };
        Ok(ServerConfig {
            keys,
            host: settings.host,
            port: settings.port,
            tls: TlsConfig {
                certfile: settings.ssl_certfile,
                keyfile: settings.ssl_keyfile,
                ca_certs: settings.ssl_ca_certs,
                // What is far too large is wrong as 255 is.
                cert_reqs: u8::try_from(settings.ssl_cert_reqs).unwrap_or(u8::MAX),
                refresh: settings.enable_ssl_refresh,
            },
            cors: CorsConfig {
                origins: settings.allowed_origins,
                methods: settings.allowed_methods,
                headers: settings.allowed_headers,
                credentials: settings.allow_credentials,
            },
            root_path: settings.root_path,
            describe_routes: settings.describe_routes,
            page: settings.page,
            served_model_names: settings.served_model_names,
            model_root: settings.model_root,
            api_keys: settings.api_keys,
            admin_api_key: settings.admin_api_key,
            allow_runtime_lora_updating: settings.allow_runtime_lora_updating,
            lora_root: settings.lora_root,
            lora_sources,
            lora_resolve_root: settings.lora_resolve_root,
            use_generation_config: settings.use_generation_config,
            trust_request_chat_template: settings.trust_request_chat_template,
            tool_format: known(settings.tool_call_parser, "tool_call_parser", ToolFormat::of_name)?,
            exclude_tools_when_tool_choice_none: settings.exclude_tools_when_tool_choice_none,
            reasoning_format: known(settings.reasoning_parser, "reasoning_parser", ReasoningFormat::of_name)?,
            max_body_bytes: settings.max_body_bytes,
            max_pending: settings.max_pending,
            max_adapter_series: settings.max_adapter_series,
            log_requests: settings.log_requests,
            log_stats_interval: settings
                .log_stats_interval
                .map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)),
            shutdown_timeout: Duration::try_from_secs_f64(settings.shutdown_timeout).unwrap_or(Duration::MAX),
        })
    }
}

/// What `fetch(name, url)` returns: the folder and that it was found, or why not.
fn fetch_adapter(fetch: &Py<PyAny>, name: &str, url: &str) -> Result<PathBuf, FetchError> {
    let answer = Python::attach(|py| fetch.call1(py, (name, url))?.extract::<(String, String)>(py));
    match answer {
        Ok((kind, text)) => match kind.as_str() {
            "found" => Ok(text.into()),
            "missing" => Err(FetchError::NotFound(text)),
            _ => Err(FetchError::Failed(text)),
        },
        Err(error) => Err(FetchError::Failed(format!("lora_path `{url}` of `{name}` could not be fetched: {error}"))),
    }
}

/// A setting that is one of a few names.
fn known<T>(
    name: Option<String>,
    setting: &str,
    of_name: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, ServerError> {
    let Some(name) = name else { return Ok(None) };
    let unknown = || ServerError::InvalidSetting(format!("{setting} `{name}` is not known"));
    of_name(&name).map(Some).ok_or_else(unknown)
}

/// Entries of a keys file, as JSON.
fn parse_keys(json: &str) -> Result<Vec<ApiKey>, ServerError> {
    serde_json::from_str(json).map_err(|error| ServerError::InvalidSetting(format!("the keys file is wrong: {error}")))
}

fn failed(py: Python<'_>, error: &ServerError) -> PyErr {
    match error {
        ServerError::EngineStopped(error) => to_python(py, error),
        error => to_python(py, &EngineError::InvalidArgument(error.to_string())),
    }
}

/// Reads a keys file, which may take long: not for the thread that waits for signals.
fn reload_keys(control: &Control, reload: &Py<PyAny>) {
    let read = Python::attach(|py| reload.call0(py)?.extract::<Option<String>>(py)).map_err(|error| error.to_string());
    let taken = read.and_then(|json| match json {
        Some(json) => parse_keys(&json).and_then(|keys| control.replace_keys(keys)).map_err(|error| error.to_string()),
        None => Ok(()),
    });
    if let Err(message) = taken {
        // What the callback itself raises has nobody to go to.
        let _ = Python::attach(|py| reload.call1(py, (message,)));
    }
}

/// The next signal of a kind that is listened for; never, where it is not.
async fn next(signals: &mut Option<Signal>) {
    let came = match signals {
        Some(signals) => signals.recv().await,
        None => None,
    };
    if came.is_none() {
        std::future::pending::<()>().await;
    }
}

/// Serves an engine on a port until SIGINT or SIGTERM comes; what runs then is finished, unless a second one comes. Once it listens,
/// `ready(scheme, host, port, notes)` is called. SIGHUP calls `reload()`, which returns the keys of the keys file as JSON, or None where there
/// are none to read; where that or they are wrong, `reload(error)` is called and the keys stay. Without `reload` it ends the process. Raises if the engine ends by itself.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python hands over is owned")]
pub(crate) fn serve(
    py: Python<'_>,
    engine: &Engine,
    port: &Port,
    ready: Py<PyAny>,
    reload: Option<Py<PyAny>>,
) -> PyResult<()> {
    let prepared = port.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some((room, config)) = prepared else {
        let message = "this port was served on already; bind another one".to_owned();
        return Err(to_python(py, &EngineError::InvalidArgument(message)));
    };
    let listener = py.detach(|| room.close());
    let handle = engine.handle();
    let reload = reload.map(Arc::new);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("manylora-http")
        .enable_all()
        .build()?;
    let served = py.detach(|| {
        runtime.block_on(async {
            let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
            // Where nobody wants it, the signal does what it does to any process.
            let mut hangup = reload.as_ref().map(|_| signal(SignalKind::hangup())).transpose()?;
            let server = match Server::on(listener, handle, config) {
                Ok(server) => server,
                Err(error) => return Ok(Err(error)),
            };
            let (address, notes) = (server.address(), server.notes());
            Python::attach(|py| ready.call1(py, (server.scheme(), address.ip().to_string(), address.port(), notes)))?;
            let control = server.control();
            let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
            let mut running = std::pin::pin!(server.run(async {
                // An error means that whoever could say stop is gone.
                let _ = stopped.await;
            }));
            let mut stop = Some(stop);
            // The keys are read again by one task at a time; signals that come meanwhile are one signal after it.
            let mut reloading = tokio::task::JoinSet::new();
            loop {
                tokio::select! {
                    ended = &mut running => return PyResult::Ok(ended),
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    Some(_) = reloading.join_next() => continue,
                    () = next(&mut hangup), if reloading.is_empty() => {
                        if let Some(reload) = &reload {
                            let (control, reload) = (control.clone(), Arc::clone(reload));
                            reloading.spawn_blocking(move || reload_keys(&control, &reload));
                        }
                        continue;
                    }
                }
                match stop.take() {
                    Some(stop) => drop(stop.send(())),
                    // Asked twice.
                    None => break,
                }
            }
            PyResult::Ok(Ok(()))
        })
    })?;
    // Connections that are left end with their tasks.
    runtime.shutdown_background();
    served.map_err(|error| failed(py, &error))
}
