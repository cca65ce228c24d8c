//! What comes back: plain records with attributes.

use std::borrow::Cow;
use std::path::Path;

use manylora::sampler::TokenLogprobs;
use manylora::{AdapterInfo, EngineInfo, FinishReason, StopReason};
use pyo3::prelude::*;

/// `(token id, logprob, rank)` of the chosen token, then of the most likely ones.
pub(crate) type Position = Vec<(u32, f32, u32)>;

fn position(logprobs: &TokenLogprobs) -> Position {
    logprobs.entries.iter().map(|entry| (entry.token, entry.logprob, entry.rank)).collect()
}

/// A stop reason: a token id or a stop string.
#[derive(IntoPyObject, Clone)]
pub(crate) enum Stop {
    Token(u32),
    Text(String),
}

/// News of one sample of a request.
#[pyclass(frozen, get_all, module = "manylora._core")]
pub(crate) struct Delta {
    index: usize,
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<Position>,
    prompt_logprobs: Option<Vec<Position>>,
    cached_tokens: usize,
    finish_reason: Option<&'static str>,
    stop_reason: Option<Stop>,
}

impl From<manylora::Delta> for Delta {
    fn from(delta: manylora::Delta) -> Self {
        Self {
            index: delta.index,
            text: delta.text,
            token_ids: delta.token_ids,
            logprobs: delta.logprobs.iter().map(position).collect(),
            prompt_logprobs: delta.prompt_logprobs.map(|positions| positions.iter().map(position).collect()),
            cached_tokens: delta.cached_tokens,
            finish_reason: delta.finish_reason.map(FinishReason::as_str),
            stop_reason: delta.stop_reason.map(|reason| match reason {
                StopReason::Token(token) => Stop::Token(token),
                StopReason::Text(text) => Stop::Text(text),
            }),
        }
    }
}

/// A registered adapter, as it was when it was asked for.
#[pyclass(frozen, module = "manylora._core")]
pub(crate) struct AdapterRecord {
    info: AdapterInfo,
}

#[pymethods]
impl AdapterRecord {
    #[getter]
    fn name(&self) -> &str {
        &self.info.name
    }

    #[getter]
    fn int_ids(&self) -> Vec<u64> {
        self.info.int_ids.clone()
    }

    /// The folder; None for tensors given in memory.
    #[getter]
    fn path(&self) -> Option<Cow<'_, str>> {
        self.info.origin.path().map(Path::to_string_lossy)
    }

    /// None until its tensors were read.
    #[getter]
    fn version(&self) -> Option<String> {
        self.info.version.map(|version| version.to_string())
    }

    /// What a user should look at.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.info.report.warnings.clone()
    }

    /// The load report as JSON: long, so that it is made for those who ask.
    #[getter]
    fn report(&self) -> String {
        serde_json::to_string(self.info.report.as_ref()).unwrap_or_default()
    }
}

impl From<AdapterInfo> for AdapterRecord {
    fn from(info: AdapterInfo) -> Self {
        Self { info }
    }
}

/// What the engine decided at start.
#[pyclass(frozen, get_all, module = "manylora._core")]
pub(crate) struct Info {
    backend: String,
    device: String,
    device_reason: Option<String>,
    dtype: String,
    weight_bytes: u64,
    working_bytes: u64,
    ledger_bytes: u64,
    kv_blocks: usize,
    block_bytes: u64,
    block_size: usize,
    max_model_len: usize,
    vocab_size: usize,
    base_names: Vec<String>,
    notes: Vec<String>,
    /// Sampling defaults of generation_config.json, as JSON.
    generation: String,
}

impl From<&EngineInfo> for Info {
    fn from(info: &EngineInfo) -> Self {
        Self {
            backend: info.backend.clone(),
            device: info.device.clone(),
            device_reason: info.device_reason.clone(),
            dtype: info.dtype.to_owned(),
            weight_bytes: info.weight_bytes,
            working_bytes: info.working_bytes,
            ledger_bytes: info.ledger_bytes,
            kv_blocks: info.kv_blocks,
            block_bytes: info.block_bytes,
            block_size: info.block_size,
            max_model_len: info.max_model_len,
            vocab_size: info.vocab_size,
            base_names: info.base_names.clone(),
            notes: info.notes.clone(),
            generation: serde_json::to_string(&info.generation).unwrap_or_default(),
        }
    }
}
