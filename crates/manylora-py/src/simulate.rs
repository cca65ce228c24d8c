//! `manylora.sim`: configurations come as JSON, and what they come to goes back as JSON and bytes.

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use manylora::EngineError;
use manylora_sim::config::Described;
use manylora_sim::results::Records;
use manylora_sim::search::{Condition, Goal, Which, find};
use manylora_sim::sweep::{Axis, sweep};
use manylora_sim::{Config, SimError, Watch, run_recorded, run_watched};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use serde::Serialize;
use serde_json::Value;

use crate::errors::IntoPython;
use crate::plan::{describe, wrong};

/// How long a look at signals and progress may wait.
const LOOK: Duration = Duration::from_millis(50);

/// A column of records: its name, its dtype as numpy spells it, its bytes.
type Column<'py> = (&'static str, &'static str, Bound<'py, PyByteArray>);

fn read(config: &str) -> Result<Config, EngineError> {
    let invalid = |error: serde_json::Error| EngineError::InvalidArgument(format!("config: {error}"));
    let value: Value = serde_json::from_str(config).map_err(invalid)?;
    Config::from_value(value).map_err(wrong)
}

/// A model by the path of a checkpoint or of a config.json becomes its figures.
fn with_model(config: Config) -> Result<Config, EngineError> {
    let model = match &config.model {
        Described::Name(name) if Path::new(name).exists() => Described::Is(describe(name)?),
        other => other.clone(),
    };
    Ok(Config { model, ..config })
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("a report is numbers and text")
}

/// Works on a thread of its own, while this one looks at signals and tells progress: requests done, and in all.
pub(crate) fn watched<T: Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&Watch) -> Result<T, EngineError> + Send,
) -> PyResult<T> {
    let watch = Watch::default();
    let progress = progress.map(|progress| progress.clone().unbind());
    let tell = |py: Python<'_>| -> PyResult<()> {
        py.check_signals()?;
        progress.as_ref().map_or(Ok(()), |progress| progress.call1(py, watch.progress()).map(drop))
    };
    let result = py.detach(|| {
        std::thread::scope(|scope| {
            let (sender, receiver) = channel();
            let watch = &watch;
            scope.spawn(move || sender.send(work(watch)));
            loop {
                match receiver.recv_timeout(LOOK) {
                    Ok(result) => return result.map_err(Ok),
                    Err(RecvTimeoutError::Disconnected) => {
                        let message = "the simulation ended without a result: this is a mistake; report it";
                        return Err(Ok(EngineError::InvalidArgument(message.to_owned())));
                    }
                    Err(RecvTimeoutError::Timeout) => {
                        if let Err(error) = Python::attach(tell) {
                            watch.interrupt();
                            return Err(Err(error));
                        }
                    }
                }
            }
        })
    });
    match result {
        Ok(value) => {
            tell(py)?;
            Ok(value)
        }
        Err(Ok(error)) => Err(error).into_python(py),
        Err(Err(error)) => Err(error),
    }
}

/// Runs a configuration; its report as JSON, and a column for each fact of its requests if they are wanted.
#[pyfunction]
#[pyo3(signature = (config, records, progress))]
pub(crate) fn simulate<'py>(
    py: Python<'py>,
    config: &str,
    records: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<(String, Vec<Column<'py>>)> {
    let config = read(config).and_then(with_model).into_python(py)?;
    let (report, kept) = watched(py, progress, |watch| {
        let (report, kept) = if records {
            run_recorded(&config, watch).map(|(report, kept)| (report, Some(kept))).map_err(wrong)?
        } else {
            (run_watched(&config, watch).map_err(wrong)?, None)
        };
        Ok((json(&report), kept))
    })?;
    Ok((report, kept.map_or_else(Vec::new, |kept| columns(py, &kept))))
}

fn columns<'py>(py: Python<'py>, records: &Records) -> Vec<Column<'py>> {
    let times = [
        ("arrival", &records.arrival),
        ("admitted", &records.admitted),
        ("first_token", &records.first_token),
        ("end", &records.end),
    ];
    let counts = [
        ("adapter", &records.adapter),
        ("replica", &records.replica),
        ("prompt_tokens", &records.prompt_tokens),
        ("output_tokens", &records.output_tokens),
        ("cached_tokens", &records.cached_tokens),
        ("preemptions", &records.preemptions),
        ("failed", &records.failed),
    ];
    let times = times.map(|(name, column)| {
        let bytes: Vec<u8> = column.iter().flat_map(|value| value.to_le_bytes()).collect();
        (name, "<f8", PyByteArray::new(py, &bytes))
    });
    let counts = counts.map(|(name, column)| {
        let bytes: Vec<u8> = column.iter().flat_map(|value| value.to_le_bytes()).collect();
        (name, "<i8", PyByteArray::new(py, &bytes))
    });
    times.into_iter().chain(counts).collect()
}

/// Runs every combination of parameters' values, given as JSON lists; its points as JSON.
#[pyfunction]
#[pyo3(signature = (config, axes, progress))]
pub(crate) fn simulate_sweep(
    py: Python<'_>,
    config: &str,
    axes: Vec<(String, String)>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    let config = read(config).and_then(with_model).into_python(py)?;
    let axes = axes.into_iter().map(|(parameter, values)| {
        let values = serde_json::from_str(&values)
            .map_err(|error| EngineError::InvalidArgument(format!("sweep `{parameter}`: {error}")))?;
        Ok(Axis { parameter, values })
    });
    let axes = axes.collect::<Result<Vec<_>, EngineError>>().into_python(py)?;
    watched(py, progress, |watch| sweep(&config, &axes, watch).map(|points| json(&points)).map_err(wrong))
}

/// Finds the smallest or the largest value of a parameter at which conditions hold; what was found as JSON. The goal is the
/// parameter, whether the smallest is wanted, the least and the most that is tried, and how near.
#[pyfunction]
#[pyo3(signature = (config, goal, conditions, progress))]
pub(crate) fn simulate_find(
    py: Python<'_>,
    config: &str,
    goal: (String, bool, f64, f64, Option<f64>),
    conditions: Vec<String>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    let config = read(config).and_then(with_model).into_python(py)?;
    let conditions = conditions.into_iter().map(|text| text.parse()).collect::<Result<Vec<Condition>, SimError>>();
    let conditions = conditions.map_err(wrong).into_python(py)?;
    let (parameter, smallest, low, high, tolerance) = goal;
    let which = if smallest { Which::Smallest } else { Which::Largest };
    let goal = Goal { which, parameter, low, high, tolerance };
    watched(py, progress, |watch| find(&config, &goal, &conditions, watch).map(|found| json(&found)).map_err(wrong))
}

/// A configuration with parameters changed, given as JSON, all as JSON; it is checked as a run of it would be.
#[pyfunction]
pub(crate) fn simulated_config(py: Python<'_>, config: &str, changes: Vec<(String, String)>) -> PyResult<String> {
    let changed = || {
        let mut config = read(config)?;
        for (name, value) in changes {
            let value = serde_json::from_str(&value)
                .map_err(|error| EngineError::InvalidArgument(format!("{name} `{value}`: {error}")))?;
            config = config.with(&name, value).map_err(wrong)?;
        }
        Ok(json(&config))
    };
    changed().into_python(py)
}
