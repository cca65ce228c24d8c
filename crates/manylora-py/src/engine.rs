//! The engine and a request's stream, as Python objects. Every call that waits releases the GIL.

#![expect(clippy::needless_pass_by_value, reason = "what Python hands over is owned")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use manylora::engine::LoadProgress;
use manylora::model::chat::{ContentFormat, RenderOptions};
use manylora::{AdapterSource, EngineError, RequestStream, UnloadMode};
use pyo3::prelude::*;

use crate::config::Config;
use crate::errors::{IntoPython, to_python};
use crate::output::{AdapterRecord, Delta, Info};
use crate::request::Request;

fn invalid(message: impl Into<String>) -> EngineError {
    EngineError::InvalidArgument(message.into())
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

    /// Reads, validates and registers an adapter.
    fn load_adapter(
        &self,
        py: Python<'_>,
        name: String,
        int_id: Option<u64>,
        path: PathBuf,
        replace: bool,
    ) -> PyResult<AdapterRecord> {
        let source = AdapterSource { name, int_id, path, replace };
        py.detach(|| self.handle.load_adapter(source)).into_python(py).map(Into::into)
    }

    /// Takes an adapter off the shelf; `mode` is `drain` or `abort`.
    fn unload_adapter(&self, py: Python<'_>, name: &str, mode: &str) -> PyResult<()> {
        let mode = match mode {
            "drain" => UnloadMode::Drain,
            "abort" => UnloadMode::Abort,
            other => return Err(to_python(py, &invalid(format!("mode must be drain or abort, got `{other}`")))),
        };
        py.detach(|| self.handle.unload_adapter(name, mode)).into_python(py)
    }

    /// Keeps an adapter resident, or allows its eviction again.
    fn pin_adapter(&self, py: Python<'_>, name: &str, pinned: bool) -> PyResult<()> {
        py.detach(|| if pinned { self.handle.pin_adapter(name) } else { self.handle.unpin_adapter(name) })
            .into_python(py)
    }

    /// The registered adapters.
    fn list_adapters(&self) -> Vec<AdapterRecord> {
        self.handle.list_adapters().into_iter().map(Into::into).collect()
    }

    /// Logits of every position of a prompt: `(rows, vocab_size, little-endian f32 bytes)`.
    fn logits<'py>(
        &self,
        py: Python<'py>,
        token_ids: Vec<u32>,
        adapters: Vec<(String, f32)>,
    ) -> PyResult<(usize, usize, Bound<'py, pyo3::types::PyBytes>)> {
        let adapters: Vec<_> =
            adapters.into_iter().map(|(name, scale)| manylora::AdapterSelection { name, scale }).collect();
        let logits = py.detach(|| self.handle.logits(&token_ids, &adapters)).into_python(py)?;
        let bytes: Vec<u8> = logits.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Ok((logits.rows, logits.vocab_size, pyo3::types::PyBytes::new(py, &bytes)))
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
        let parse = |name: &str, text: &str| {
            serde_json::from_str::<serde_json::Value>(text)
                .map_err(|error| to_python(py, &invalid(format!("{name} is not JSON: {error}"))))
        };
        let messages = parse("messages", messages)?;
        let tools = tools.map(|tools| parse("tools", tools)).transpose()?;
        let kwargs = match kwargs.map(|kwargs| parse("chat_template_kwargs", kwargs)).transpose()? {
            Some(serde_json::Value::Object(map)) => map,
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

    /// Stops the request.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| self.stream.lock().unwrap_or_else(PoisonError::into_inner).abort());
    }

    /// The prompt's tokens.
    fn prompt_token_ids(&self) -> Vec<u32> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner).prompt_token_ids().to_vec()
    }
}
