//! Traces that an engine recorded: replayed, and fitted to.
#![expect(clippy::needless_pass_by_value, reason = "what Python hands over is owned")]

use std::cell::Cell;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use manylora::EngineError;
use manylora_sim::SimError;
use manylora_sim::calibrate::{Calibration, calibrate, compare};
use manylora_sim::replay::replay;
use pyo3::prelude::*;

use crate::simulate::watched;

/// What is wrong with a trace, or with what was to be made of it.
fn wrong(error: &SimError, path: &Path) -> EngineError {
    let told = error.to_string();
    // What is said of a line says in which file.
    let is_of_line = told.starts_with("trace line");
    EngineError::InvalidArgument(if is_of_line { format!("`{}`, {told}", path.display()) } else { told })
}

fn open(path: &Path) -> Result<BufReader<File>, EngineError> {
    let file = File::open(path)
        .map_err(|error| EngineError::InvalidArgument(format!("trace `{}` cannot be read: {error}", path.display())))?;
    Ok(BufReader::with_capacity(1 << 20, file))
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("numbers and text")
}

/// Replays a trace; what that came to, as JSON. With a calibration, its load is simulated as well. Signals end it.
#[pyfunction]
pub(crate) fn replay_trace(py: Python<'_>, path: PathBuf, calibration: Option<String>) -> PyResult<String> {
    watched(py, None, |watch| {
        let file = open(&path)?;
        let of = |error: SimError| wrong(&error, &path);
        match calibration {
            None => Ok(json(&serde_json::json!({ "replayed": replay(file, &mut (), watch).map_err(of)? }))),
            Some(text) => {
                let calibration = Calibration::from_json(&text).map_err(of)?;
                Ok(json(&compare(file, &calibration, watch).map_err(of)?))
            }
        }
    })
}

/// Fits a cost model to traces; its file's text. Signals end it.
#[pyfunction]
pub(crate) fn calibrate_traces(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<String> {
    watched(py, None, |watch| {
        let files = paths.iter().map(|path| open(path)).collect::<Result<Vec<_>, _>>()?;
        let reading = Cell::new(Path::new(""));
        let each = files.into_iter().zip(&paths).map(|(file, path)| {
            reading.set(path);
            file
        });
        Ok(calibrate(each, watch).map_err(|error| wrong(&error, reading.get()))?.to_json())
    })
}
