//! The machine's limits, for benches.

use std::time::Duration;

use manylora::EngineError;
use pyo3::prelude::*;

use crate::errors::{IntoPython, to_python};

/// Bytes per second at which an engine's threads read memory, measured for about `seconds`.
#[pyfunction]
pub(crate) fn read_bandwidth(py: Python<'_>, num_threads: Option<usize>, seconds: f64) -> PyResult<f64> {
    let budget = budget(py, seconds)?;
    py.detach(|| manylora::limits::read_bandwidth(num_threads, budget)).into_python(py)
}

/// Floating-point operations per second of an engine's threads, measured for about `seconds`.
#[pyfunction]
pub(crate) fn arithmetic_peak(py: Python<'_>, num_threads: Option<usize>, seconds: f64) -> PyResult<f64> {
    let budget = budget(py, seconds)?;
    py.detach(|| manylora::limits::arithmetic_peak(num_threads, budget)).into_python(py)
}

fn budget(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        let message = format!("seconds must be a time that a clock can count, got `{seconds}`");
        to_python(py, &EngineError::InvalidArgument(message))
    })
}
