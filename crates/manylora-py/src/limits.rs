//! The machine's limits, for benches.

use std::time::Duration;

use manylora::EngineError;
use pyo3::prelude::*;

use crate::errors::{IntoPython, to_python};

/// Bytes per second at which an engine's threads read memory, measured for about `seconds`.
#[pyfunction]
pub(crate) fn read_bandwidth(py: Python<'_>, num_threads: Option<usize>, seconds: f64) -> PyResult<f64> {
    let budget = Duration::try_from_secs_f64(seconds).map_err(|_| {
        let message = format!("seconds must be a time that a clock can count, got `{seconds}`");
        to_python(py, &EngineError::InvalidArgument(message))
    })?;
    py.detach(|| manylora::limits::read_bandwidth(num_threads, budget)).into_python(py)
}
