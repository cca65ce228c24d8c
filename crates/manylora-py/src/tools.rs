//! What looks at machines and files without an engine: `doctor`, `inspect` and `merge`. Answers are JSON.
#![expect(clippy::needless_pass_by_value, reason = "what Python hands over is owned")]

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use manylora::machine::Machine;
use manylora::model::merge::{MergeRequest, MergedAdapter, MergedType, merge};
use manylora::{DType, EngineConfig, EngineError, inspect_adapter};
use pyo3::prelude::*;

use crate::engine::wait_for;
use crate::errors::IntoPython;

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("numbers and text")
}

/// What there is on this machine and in this build.
#[pyfunction]
pub(crate) fn machine(py: Python<'_>, cuda_library_folders: Vec<PathBuf>) -> String {
    py.detach(|| json(&Machine::look(&cuda_library_folders)))
}

/// Of `inspect`. Every key must be there.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Look {
    model: PathBuf,
    model_names: Vec<String>,
    adapter: PathBuf,
    name: String,
    dtype: String,
    max_lora_rank: usize,
}

/// What an engine would say of an adapter.
#[pyfunction]
pub(crate) fn inspect(py: Python<'_>, look: Look) -> PyResult<String> {
    let answer = move || {
        let config = EngineConfig {
            model_names: look.model_names,
            dtype: DType::parse(&look.dtype)
                .ok_or_else(|| EngineError::InvalidArgument(format!("dtype `{}` is not known", look.dtype)))?,
            max_lora_rank: look.max_lora_rank,
            ..EngineConfig::new(look.model)
        };
        inspect_adapter(&config, &look.name, &look.adapter).map(|found| json(&found))
    };
    wait_for(py, answer)
}

/// Of `merge`. Every key must be there.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Wanted {
    base: PathBuf,
    base_names: Vec<String>,
    /// Folders and weights.
    adapters: Vec<(PathBuf, f32)>,
    output: PathBuf,
    dtype: String,
    max_shard_bytes: u64,
    overwrite: bool,
}

/// Merges; `progress` is called with the bytes that are written and all of them.
#[pyfunction(name = "merge")]
pub(crate) fn merge_adapters(py: Python<'_>, wanted: Wanted, progress: Py<PyAny>) -> PyResult<String> {
    let dtype = match MergedType::parse(&wanted.dtype) {
        None if wanted.dtype != "auto" => {
            let message = format!("dtype must be auto, float32, bfloat16 or float16, got `{}`", wanted.dtype);
            return Err(EngineError::InvalidArgument(message)).into_python(py);
        }
        dtype => dtype,
    };
    let request = MergeRequest {
        base: wanted.base,
        base_names: wanted.base_names,
        adapters: wanted.adapters.into_iter().map(|(path, weight)| MergedAdapter { path, weight }).collect(),
        output: wanted.output,
        dtype,
        max_shard_bytes: wanted.max_shard_bytes,
        overwrite: wanted.overwrite,
    };
    // What the callback raised, or a signal: raised again once everything is cleaned up.
    let raised = Mutex::new(None);
    let merged = py.detach(|| {
        merge(&request, &mut |done, total| {
            let told = Python::attach(|py| {
                py.check_signals()?;
                progress.call1(py, (done, total)).map(drop)
            });
            let goes_on = told.is_ok();
            *raised.lock().unwrap_or_else(PoisonError::into_inner) = told.err();
            goes_on
        })
    });
    if let Some(error) = raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    merged.map(|merged| json(&merged)).map_err(EngineError::from).into_python(py)
}
