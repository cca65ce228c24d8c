//! The engine and a request's stream, as Python objects. Every call that waits releases the GIL.

#![expect(clippy::needless_pass_by_value, reason = "what Python hands over is owned")]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream as _;
use manylora::engine::LoadProgress;
use manylora::model::chat::{ContentFormat, RenderOptions};
use manylora::model::error::{AdapterRefusal, RefusalKind};
use manylora::{AdapterSource, Digest, EngineError, RequestStream, Share, UnloadMode};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::Value;

use crate::array::Array;
use crate::bell::Bell;
use crate::config::Config;
use crate::dlpack;
use crate::errors::{IntoPython, to_python};
use crate::output::{AdapterRecord, Delta, Info};
use crate::request::Request;

/// How long a wait may delay Ctrl-C.
const PATIENCE: Duration = Duration::from_millis(50);

fn invalid(message: impl Into<String>) -> EngineError {
    EngineError::InvalidArgument(message.into())
}

fn parse(py: Python<'_>, name: &str, text: &str) -> PyResult<Value> {
    serde_json::from_str(text).map_err(|error| to_python(py, &invalid(format!("{name} is not JSON: {error}"))))
}

/// Does something that may take long without the GIL, and lets Ctrl-C end the wait for it; the work itself goes on.
pub(crate) fn wait_for<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, EngineError> + Send + 'static,
) -> PyResult<T> {
    let (done, mut result) = sync_channel(1);
    // The receiver is gone if the caller was interrupted.
    let worker = move || drop(done.send(work()));
    std::thread::Builder::new().name("manylora-wait".to_owned()).spawn(worker)?;
    loop {
        // Lent as a whole: a receiver may be sent to other threads, not shared with them.
        let waiting = &mut result;
        match py.detach(move || waiting.recv_timeout(PATIENCE)) {
            Ok(result) => return result.into_python(py),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                let message = "the call failed unexpectedly; please report this".to_owned();
                return Err(to_python(py, &EngineError::Stopped(message)));
            }
        }
    }
}

/// A running engine.
#[pyclass(frozen, module = "manylora._core")]
pub(crate) struct Engine {
    engine: Mutex<Option<manylora::Engine>>,
    handle: manylora::EngineHandle,
}

#[pymethods]
impl Engine {
    /// Loads the base. `progress(done_bytes, total_bytes)` is called while it loads; what it raises ends the load at
    /// once (Ctrl-C arrives there).
    #[new]
    fn new(py: Python<'_>, config: Config, progress: Py<PyAny>) -> PyResult<Self> {
        let config = config.into_engine().into_python(py)?;
        let mut report = |at: LoadProgress| {
            if let Err(raised) = Python::attach(|py| progress.call1(py, (at.done_bytes, at.total_bytes))) {
                // The engine's callback cannot fail; unwinding is what ends a load half way and frees what it has.
                resume_unwind(Box::new(raised));
            }
        };
        let start = || manylora::Engine::start_with_progress(config, &mut report);
        let engine = match py.detach(|| catch_unwind(AssertUnwindSafe(start))) {
            Ok(started) => started.into_python(py)?,
            Err(payload) => {
                return Err(payload.downcast::<PyErr>().map_or_else(|other| resume_unwind(other), |raised| *raised));
            }
        };
        Ok(Self { handle: engine.handle(), engine: Mutex::new(Some(engine)) })
    }

    /// Stops the engine and joins its threads. What runs ends with an error.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(engine);
        });
    }

    /// Raises where requests can be run no more. Waits for nothing.
    fn check_health(&self, py: Python<'_>) -> PyResult<()> {
        self.handle.check_health().into_python(py)
    }

    /// What was decided at start.
    fn info(&self) -> Info {
        self.handle.info().into()
    }

    /// Validates all requests, then queues them: either all or none.
    fn submit(&self, py: Python<'_>, requests: Vec<Request>, stream: bool) -> PyResult<Vec<Stream>> {
        let requests = requests.into_iter().map(Into::into).collect();
        let streams = py.detach(|| self.handle.submit_all(requests, stream)).into_python(py)?;
        Ok(streams.into_iter().map(Stream::new).collect())
    }

    /// Reads, validates and registers an adapter. With `replace` other content may have the name; with `expected` it must
    /// be that version then.
    fn load_adapter(
        &self,
        py: Python<'_>,
        name: String,
        int_id: Option<u64>,
        path: PathBuf,
        replace: bool,
        expected: Option<&str>,
    ) -> PyResult<AdapterRecord> {
        self.load(py, AdapterSource { int_id, replace, ..AdapterSource::directory(name, path) }, expected)
    }

    /// Registers adapters (name, integer id, folder, what it was named by) by their configurations and headers: a record or an exception for
    /// each. They are read when a request asks for them.
    fn register_adapters(
        &self,
        py: Python<'_>,
        adapters: Vec<(String, Option<u64>, PathBuf, Option<String>)>,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let source =
            |(name, int_id, path, root)| AdapterSource { int_id, root, ..AdapterSource::directory(name, path) };
        let sources: Vec<AdapterSource> = adapters.into_iter().map(source).collect();
        let handle = self.handle.clone();
        wait_for(py, move || Ok(handle.register_adapters(&sources)))?
            .into_iter()
            .map(|result| match result {
                Ok(info) => Ok(Py::new(py, AdapterRecord::from(info))?.into_any()),
                Err(error) => Ok(to_python(py, &error).into_value(py).into_any()),
            })
            .collect()
    }

    /// Copies an adapter from arrays, validates and registers it. `config` is what `adapter_config.json` would say.
    #[expect(clippy::too_many_arguments, reason = "what a request with tensors has")]
    fn load_adapter_tensors(
        &self,
        py: Python<'_>,
        name: String,
        int_id: Option<u64>,
        tensors: &Bound<'_, PyDict>,
        config: &str,
        replace: bool,
        expected: Option<&str>,
    ) -> PyResult<AdapterRecord> {
        let config = parse(py, "peft_config", config)?;
        let mut copied = BTreeMap::new();
        for (key, array) in tensors {
            let key: String = key.extract()?;
            match dlpack::import(&array)? {
                Ok(tensor) => drop(copied.insert(key, tensor)),
                Err(reason) => {
                    let refusal = AdapterRefusal {
                        adapter: name,
                        reason: format!("tensor `{key}` {reason}"),
                        keys: vec![key],
                        kind: RefusalKind::Invalid,
                        report: None,
                    };
                    return Err(to_python(py, &refusal.into()));
                }
            }
        }
        self.load(py, AdapterSource { int_id, replace, ..AdapterSource::memory(name, config, copied) }, expected)
    }

    /// Takes an adapter off the shelf; `mode` is `drain` or `abort`, `timeout` in seconds.
    fn unload_adapter(&self, py: Python<'_>, name: String, mode: &str, timeout: Option<f64>) -> PyResult<()> {
        let mode = match mode {
            "drain" => UnloadMode::Drain,
            "abort" => UnloadMode::Abort,
            other => return Err(to_python(py, &invalid(format!("mode must be drain or abort, got `{other}`")))),
        };
        // Longer than any clock can count is no limit.
        let timeout = timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok());
        let handle = self.handle.clone();
        wait_for(py, move || match timeout {
            Some(timeout) => handle.unload_adapter_within(&name, mode, timeout),
            None => handle.unload_adapter(&name, mode),
        })
    }

    /// One registered adapter.
    fn adapter(&self, name: &str) -> Option<AdapterRecord> {
        self.handle.adapter(name).ok().map(Into::into)
    }

    /// The adapter that an integer id leads to.
    fn adapter_of_id(&self, int_id: u64) -> Option<AdapterRecord> {
        self.handle.adapter_of_id(int_id).map(Into::into)
    }

    /// Gives requests more or less of a fair service: those of an adapter, of a tenant, or of the base.
    fn set_weight(&self, py: Python<'_>, adapter: Option<&str>, tenant: Option<&str>, weight: f64) -> PyResult<()> {
        let share = match (adapter, tenant) {
            (Some(name), None) => Share::Adapter(name),
            (None, Some(tenant)) => Share::Tenant(tenant),
            (None, None) => Share::Base,
            (Some(_), Some(_)) => {
                let message = "a weight is given to an adapter or to a tenant, not to both at once";
                return Err(to_python(py, &invalid(message)));
            }
        };
        py.detach(|| self.handle.set_weight(share, weight)).into_python(py)
    }

    /// The load report of a registered adapter as JSON.
    fn load_report(&self, py: Python<'_>, name: &str) -> PyResult<String> {
        let report = self.handle.load_report(name).into_python(py)?;
        Ok(serde_json::to_string(report.as_ref()).unwrap_or_default())
    }

    /// Keeps an adapter resident, or allows its eviction again.
    fn pin_adapter(&self, py: Python<'_>, name: String, pinned: bool) -> PyResult<()> {
        let handle = self.handle.clone();
        wait_for(py, move || if pinned { handle.pin_adapter(&name) } else { handle.unpin_adapter(&name) })
    }

    /// The integer ids that lead to an adapter.
    fn adapter_ids(&self) -> Vec<u64> {
        self.handle.list_adapters().into_iter().flat_map(|info| info.int_ids).collect()
    }

    /// The registered adapters.
    fn list_adapters(&self) -> Vec<AdapterRecord> {
        self.handle.list_adapters().into_iter().map(Into::into).collect()
    }

    /// Logits of every position of a prompt, `[positions, vocab_size]`.
    fn logits(&self, py: Python<'_>, token_ids: Vec<u32>, adapters: Vec<(String, f32)>) -> PyResult<Array> {
        let adapters: Vec<_> =
            adapters.into_iter().map(|(name, scale)| manylora::AdapterSelection { name, scale }).collect();
        let logits = py.detach(|| self.handle.logits(&token_ids, &adapters)).into_python(py)?;
        Ok(Array::new(logits.values, vec![logits.rows, logits.vocab_size]))
    }

    /// Counters and levels, as JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        let stats = py.detach(|| self.handle.stats()).into_python(py)?;
        Ok(serde_json::to_string(&stats).unwrap_or_default())
    }

    /// Forgets cached prefixes.
    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.handle.reset_prefix_cache()).into_python(py)
    }

    /// Text to token ids.
    fn encode(&self, py: Python<'_>, text: &str, add_special_tokens: bool) -> PyResult<Vec<u32>> {
        let tokenizer = self.handle.tokenizer().into_python(py)?;
        py.detach(|| tokenizer.encode(text, add_special_tokens)).map_err(EngineError::from).into_python(py)
    }

    /// Token ids to text.
    fn decode(&self, py: Python<'_>, token_ids: Vec<u32>, skip_special_tokens: bool) -> PyResult<String> {
        let tokenizer = self.handle.tokenizer().into_python(py)?;
        py.detach(|| tokenizer.decode(&token_ids, skip_special_tokens, true)).map_err(EngineError::from).into_python(py)
    }

    /// Text of single tokens, for logprobs; None without a tokenizer.
    fn token_texts(&self, token_ids: Vec<u32>) -> Option<Vec<String>> {
        let tokenizer = self.handle.tokenizer().ok()?;
        Some(token_ids.into_iter().map(|token| tokenizer.token_text(token)).collect())
    }

    /// The end token of the tokenizer.
    fn eos_token_id(&self) -> Option<u32> {
        self.handle.tokenizer().ok()?.eos()
    }

    /// Number of ids of the tokenizer.
    fn tokenizer_size(&self) -> Option<usize> {
        Some(self.handle.tokenizer().ok()?.vocab_size())
    }

    /// Renders messages (JSON) with the model's template, or with `template`.
    #[pyo3(signature = (messages, *, tools=None, template=None, add_generation_prompt=true, continue_final_message=false, kwargs=None, content_format="auto"))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of vLLM's chat")]
    fn render_chat(
        &self,
        py: Python<'_>,
        messages: &str,
        tools: Option<&str>,
        template: Option<&str>,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Option<&str>,
        content_format: &str,
    ) -> PyResult<String> {
        let content_format = match content_format {
            "auto" => ContentFormat::Auto,
            "string" => ContentFormat::String,
            "openai" => ContentFormat::Parts,
            other => {
                let message = format!("content_format must be auto, string or openai, got `{other}`");
                return Err(to_python(py, &invalid(message)));
            }
        };
        let messages = parse(py, "messages", messages)?;
        let tools = tools.map(|tools| parse(py, "tools", tools)).transpose()?;
        let kwargs = match kwargs.map(|kwargs| parse(py, "chat_template_kwargs", kwargs)).transpose()? {
            Some(Value::Object(map)) => map,
            _ => serde_json::Map::new(),
        };
        let options = RenderOptions {
            tools,
            add_generation_prompt,
            continue_final_message,
            kwargs,
            content_format,
            ..RenderOptions::default()
        };
        py.detach(|| self.handle.render_chat(&messages, template, &options)).into_python(py)
    }
}

impl Engine {
    /// A handle to the engine.
    pub(crate) fn handle(&self) -> manylora::EngineHandle {
        self.handle.clone()
    }

    fn load(&self, py: Python<'_>, source: AdapterSource, expected: Option<&str>) -> PyResult<AdapterRecord> {
        let expected = match expected {
            None => None,
            Some(text) => Some(Digest::try_from(text.to_owned()).map_err(|error| to_python(py, &invalid(error)))?),
        };
        let handle = self.handle.clone();
        let load = move || match expected {
            Some(expected) => handle.replace_adapter(source, Some(expected)),
            None => handle.load_adapter(source),
        };
        wait_for(py, load).map(Into::into)
    }
}

/// A request's stream of deltas. Dropping it aborts the request.
#[pyclass(frozen, module = "manylora._core")]
pub(crate) struct Stream {
    stream: Mutex<RequestStream>,
}

impl Stream {
    fn new(stream: RequestStream) -> Self {
        Self { stream: Mutex::new(stream) }
    }
}

#[pymethods]
impl Stream {
    /// The next delta; None when all samples have finished. Raises `TimeoutError` after `timeout` seconds.
    fn next(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<Delta>> {
        let timeout = Duration::try_from_secs_f64(timeout).unwrap_or(Duration::ZERO);
        let next = py.detach(|| self.stream.lock().unwrap_or_else(PoisonError::into_inner).next_timeout(timeout));
        match next {
            Err(()) => Err(pyo3::exceptions::PyTimeoutError::new_err("no delta in time")),
            Ok(None) => Ok(None),
            Ok(Some(delta)) => delta.into_python(py).map(|delta| Some(delta.into())),
        }
    }

    /// The next delta; None when all samples have finished. Where there is none yet it raises `BlockingIOError`, and rings
    /// `bell` with `key` once there is.
    fn poll(&self, py: Python<'_>, bell: &Bell, key: u64) -> PyResult<Option<Delta>> {
        let waker = bell.waker(key);
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        match Pin::new(&mut *stream).poll_next(&mut Context::from_waker(&waker)) {
            Poll::Pending => Err(pyo3::exceptions::PyBlockingIOError::new_err("no delta yet")),
            Poll::Ready(None) => Ok(None),
            Poll::Ready(Some(delta)) => delta.into_python(py).map(|delta| Some(delta.into())),
        }
    }

    /// Stops the request.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| self.stream.lock().unwrap_or_else(PoisonError::into_inner).abort());
    }

    /// The prompt's tokens.
    fn prompt_token_ids(&self) -> Vec<u32> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner).prompt_token_ids().to_vec()
    }
}
