//! Traces that an engine recorded: replayed, and fitted to.
#![expect(clippy::needless_pass_by_value, reason = "what Python hands over is owned")]

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use manylora::EngineError;
use manylora_sim::SimError;
use manylora_sim::calibrate::{Calibration, calibrate, compare};
use manylora_sim::replay::replay;
use pyo3::prelude::*;

use crate::errors::IntoPython;

fn wrong(error: &SimError) -> EngineError {
    EngineError::InvalidArgument(error.to_string())
}

fn open(path: &Path) -> Result<BufReader<File>, EngineError> {
    let file = File::open(path)
        .map_err(|error| EngineError::InvalidArgument(format!("trace `{}` cannot be read: {error}", path.display())))?;
    Ok(BufReader::with_capacity(1 << 20, file))
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("numbers and text")
}

/// Replays a trace; what that came to, as JSON. With a calibration, its load is simulated as well.
#[pyfunction]
pub(crate) fn replay_trace(py: Python<'_>, path: PathBuf, calibration: Option<String>) -> PyResult<String> {
    let answer = || {
        let file = open(&path)?;
        let of = |error: SimError| wrong(&error);
        match calibration {
            None => Ok(json(&serde_json::json!({ "replayed": replay(file, &mut ()).map_err(of)? }))),
            Some(text) => {
                let calibration = Calibration::from_json(&text).map_err(of)?;
                Ok(json(&compare(file, &calibration).map_err(of)?))
            }
        }
    };
    py.detach(answer).into_python(py)
}

/// Fits a cost model to traces; its file's text.
#[pyfunction]
pub(crate) fn calibrate_traces(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<String> {
    let answer = || {
        let files = paths.iter().map(|path| open(path)).collect::<Result<Vec<_>, _>>()?;
        Ok(calibrate(files).map_err(|error| wrong(&error))?.to_json())
    };
    py.detach(answer).into_python(py)
}
