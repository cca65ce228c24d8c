//! Serving over HTTP: runs until the process is told to stop.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use manylora::EngineError;
use manylora_server::{
    ApiKey, Control, FetchError, ReasoningFormat, Server, ServerConfig, ServerError, Sources, ToolFormat, WaitingRoom,
    bind,
};
use pyo3::prelude::*;
use tokio::signal::unix::{SignalKind, signal};

use crate::engine::Engine;
use crate::errors::to_python;

/// Threads of the HTTP side: what it does is small beside what the engine does.
const THREADS: usize = 2;

/// A port that is bound, on which everybody is told that the model is being loaded.
#[pyclass(frozen, module = "manylora._core")]
pub(crate) struct Port(Mutex<Option<WaitingRoom>>);

#[pymethods]
impl Port {
    #[new]
    fn new(py: Python<'_>, host: &str, port: u16) -> PyResult<Self> {
        let opened = py.detach(|| bind(host, port).and_then(WaitingRoom::open));
        opened.map(|room| Self(Mutex::new(Some(room)))).map_err(|error| failed(py, &error))
    }
}

/// Every key must be there: `manylora/cli/serve.py` has the defaults.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Settings {
    host: String,
    port: u16,
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
    to_python(py, &EngineError::InvalidArgument(error.to_string()))
}

fn reload_keys(control: &Control, reload: &Py<PyAny>) {
    let read = Python::attach(|py| reload.call0(py)?.extract::<String>(py)).map_err(|error| error.to_string());
    let taken = read.and_then(|json| {
        parse_keys(&json).and_then(|keys| control.replace_keys(keys)).map_err(|error| error.to_string())
    });
    if let Err(message) = taken {
        // What the callback itself raises has nobody to go to.
        let _ = Python::attach(|py| reload.call1(py, (message,)));
    }
}

/// Serves an engine on a port until SIGINT or SIGTERM comes; what runs then is finished, unless a second one comes. Once it listens,
/// `ready(host, port, notes)` is called. SIGHUP calls `reload()`, which returns the keys of the keys file as JSON; where that or they
/// are wrong, `reload(error)` is called and the keys stay. `fetch(name, url)` brings an adapter to this machine and returns `("found", folder)`,
/// `("missing", why)` or `("failed", why)`.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python hands over is owned")]
pub(crate) fn serve(
    py: Python<'_>,
    engine: &Engine,
    port: &Port,
    settings: Settings,
    ready: Py<PyAny>,
    reload: Option<Py<PyAny>>,
    fetch: Py<PyAny>,
) -> PyResult<()> {
    let room = port.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(room) = room else {
        let message = "this port was served on already; bind another one".to_owned();
        return Err(to_python(py, &EngineError::InvalidArgument(message)));
    };
    let listener = py.detach(|| room.close());
    let handle = engine.handle();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("manylora-http")
        .enable_all()
        .build()?;
    let served = py.detach(|| {
        runtime.block_on(async {
            let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
            let mut hangup = signal(SignalKind::hangup())?;
            let server = match settings.into_config(fetch).and_then(|config| Server::on(listener, handle, config)) {
                Ok(server) => server,
                Err(error) => return Ok(Err(error)),
            };
            let (address, notes) = (server.address(), server.notes());
            Python::attach(|py| ready.call1(py, (address.ip().to_string(), address.port(), notes)))?;
            let control = server.control();
            let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
            let mut running = std::pin::pin!(server.run(async {
                // An error means that whoever could say stop is gone.
                let _ = stopped.await;
            }));
            let mut stop = Some(stop);
            loop {
                tokio::select! {
                    () = &mut running => break,
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hangup.recv() => {
                        if let Some(reload) = &reload {
                            reload_keys(&control, reload);
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
