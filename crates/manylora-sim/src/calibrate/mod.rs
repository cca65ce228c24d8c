//! Calibration: from traces of a real engine to a cost model of it.
//!
//! Traces are replayed ([`crate::replay`]), which gives the work of every step beside the seconds that it took: all phases of
//! the engine's loop, so that what the engine does between two steps is in the time of the second. A step's time is a sum of
//! quantities of its work (rows, by stretches with slopes of their own; sequences, and those that begin; sampled rows; positions
//! read; adapters, their bytes, their arithmetic; loads that are under way), each with a coefficient that is not negative. The coefficients are those of
//! least squares of the *relative* deviation, found a few times over, with less weight for steps that took more than twice what
//! others like them do, because something else held them up; in the end all are multiplied by one number, so that the steps take as long
//! together as they did. A load is a constant and a time for each byte, by whether the engine had read that adapter before.

mod compare;
mod features;
mod fit;
mod least_squares;
mod report;

use std::collections::BTreeMap;
use std::io::{BufRead, Seek};

use manylora_core::budget::ModelDimensions;
use manylora_core::trace::TraceHeader;
use serde::{Deserialize, Serialize};

pub use compare::{Comparison, Observed, Percentiles, compare};
pub use report::{Fit, Residuals};

use crate::cost::{AdapterShape, CostModel, StepWork, Tier};
use crate::error::SimError;
use crate::replay::{ReplayObserver, replay};
use crate::run::Watch;
use features::features;
use fit::{LoadSample, StepSample};

/// What [`Calibration::format`] says.
pub const CALIBRATION_FORMAT: &str = "manylora-calibration";
/// The version of the file.
pub const CALIBRATION_VERSION: u32 = 1;

/// A measured engine, as a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// [`CALIBRATION_FORMAT`].
    pub format: String,
    /// [`CALIBRATION_VERSION`].
    pub version: u32,
    /// Names of the model that was measured.
    pub model: Vec<String>,
    /// Its shape: what is fitted holds for no other.
    pub dimensions: ModelDimensions,
    /// What it ran on.
    pub device: String,
    /// The backend in words.
    pub backend: String,
    /// Seconds of a step for each unit of a quantity of its work, by name; those that are not named take none.
    pub step_seconds: BTreeMap<String, f64>,
    /// Seconds of a load where the engine had not read the adapter before.
    pub first_load: LoadSeconds,
    /// Seconds of a load where it had.
    pub later_load: LoadSeconds,
    /// How well it fits what it was fitted to.
    pub fit: Fit,
}

/// Seconds of a load on one thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadSeconds {
    /// Of any.
    pub each: f64,
    /// For each byte that the adapter takes.
    pub per_byte: f64,
}

impl Calibration {
    /// Reads a file's text.
    pub fn from_json(text: &str) -> Result<Self, SimError> {
        let wrong = |value: String, message: String| SimError::field("calibration", value, message);
        let shown = || text.trim().lines().next().unwrap_or_default().chars().take(80).collect::<String>();
        let read: Self = serde_json::from_str(text).map_err(|error| wrong(shown(), error.to_string()))?;
        if read.format != CALIBRATION_FORMAT || read.version != CALIBRATION_VERSION {
            let message = format!(
                "this version reads `{CALIBRATION_FORMAT}` of version {CALIBRATION_VERSION}; make it again with \
                 `manylora sim calibrate`"
            );
            return Err(wrong(format!("{} {}", read.format, read.version), message));
        }
        read.cost()?;
        Ok(read)
    }

    /// The file's text.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a calibration is numbers and text") + "\n"
    }

    /// Refuses a calibration that was made without adapters: it would have them cost nothing.
    pub fn check_adapters(&self) -> Result<(), SimError> {
        if self.fit.has_adapters() {
            return Ok(());
        }
        let message = "no step of its traces had an adapter, so it would have adapters take no time; calibrate with traces \
                       of a load with adapters, or leave them out here";
        Err(SimError::field("calibration", self.model.join(", "), message))
    }

    /// What a run with adapters should be told, if anything.
    pub fn adapter_note(&self) -> Option<String> {
        let told = || "loads of adapters take no time here: the calibration's traces have none".to_owned();
        self.fit.loads.values().all(|one| one.count == 0).then(told)
    }

    /// The cost model.
    pub fn cost(&self) -> Result<Calibrated, SimError> {
        let mut coefficients = [0.0; features::COUNT];
        let names: Vec<String> = features::names().collect();
        for (name, &seconds) in &self.step_seconds {
            let Some(place) = names.iter().position(|known| known == name) else {
                return Err(SimError::field(
                    format!("step_seconds.{name}"),
                    seconds,
                    format!("known are {}", names.join(", ")),
                ));
            };
            coefficients[place] = seconds_of(&format!("step_seconds.{name}"), seconds)?;
        }
        for (name, load) in [("first_load", self.first_load), ("later_load", self.later_load)] {
            seconds_of(&format!("{name}.each"), load.each)?;
            seconds_of(&format!("{name}.per_byte"), load.per_byte)?;
        }
        Ok(Calibrated { coefficients, first_load: self.first_load, later_load: self.later_load })
    }
}

fn seconds_of(field: &str, value: f64) -> Result<f64, SimError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(value);
    }
    Err(SimError::field(field, value, "a finite number of seconds, from 0 up, is needed"))
}

/// The cost model of a measured engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibrated {
    coefficients: [f64; features::COUNT],
    first_load: LoadSeconds,
    later_load: LoadSeconds,
}

impl CostModel for Calibrated {
    fn step(&self, work: &StepWork) -> f64 {
        features(work).iter().zip(&self.coefficients).map(|(quantity, seconds)| quantity * seconds).sum()
    }

    fn load(&self, adapter: &AdapterShape, tier: Tier) -> f64 {
        let load = match tier {
            Tier::Disk => self.first_load,
            Tier::Host => self.later_load,
        };
        load.each + load.per_byte * adapter.bytes as f64
    }
}

/// What traces have of steps and loads.
#[derive(Default)]
struct Samples {
    header: Option<TraceHeader>,
    other: Option<TraceHeader>,
    steps: Vec<StepSample>,
    loads: Vec<LoadSample>,
}

impl ReplayObserver for Samples {
    fn engine(&mut self, header: &TraceHeader) {
        match &self.header {
            None => self.header = Some(header.clone()),
            Some(first) => {
                let same = |one: &TraceHeader| (one.dimensions, one.number, one.device.clone(), one.backend.clone());
                if same(first) != same(header) {
                    self.other = Some(header.clone());
                }
            }
        }
    }

    fn step(&mut self, _: f64, work: &StepWork, seconds: &[f64]) {
        self.steps.push(StepSample { work: *work, seconds: seconds.iter().sum() });
    }

    fn load(&mut self, adapter: &AdapterShape, again: bool, seconds: f64) {
        self.loads.push(LoadSample { bytes: adapter.bytes, again, seconds });
    }
}

/// Steps that a fit needs at least.
const FEWEST_STEPS: usize = 200;

/// Fits a cost model to recorded traces of one engine: one model, on one device, with one number of threads.
pub fn calibrate<R: BufRead + Seek>(
    traces: impl IntoIterator<Item = R>,
    watch: &Watch,
) -> Result<Calibration, SimError> {
    let mut samples = Samples::default();
    for (number, trace) in traces.into_iter().enumerate() {
        replay(trace, &mut samples, watch)?;
        if let (Some(other), Some(first)) = (&samples.other, &samples.header) {
            let described = |one: &TraceHeader| format!("{} on {}, {}", one.model.join(", "), one.device, one.backend);
            let message = format!("the first is of {}; calibrate one engine at a time", described(first));
            return Err(SimError::field(format!("traces[{number}]"), described(other), message));
        }
    }
    let Samples { header: Some(header), steps, loads, .. } = samples else {
        return Err(SimError::field("traces", 0, "at least one is needed; record one with --record-trace"));
    };
    if steps.len() < FEWEST_STEPS {
        let message = format!("at least {FEWEST_STEPS} are needed to fit a model to; record a longer load");
        return Err(SimError::field("steps of the traces", steps.len(), message));
    }
    let coefficients = fit::steps(&steps);
    let (first_load, later_load) = fit::loads(&loads);
    let cost = Calibrated { coefficients, first_load, later_load };
    let named = features::names().zip(coefficients).filter(|&(_, seconds)| seconds > 0.0);
    Ok(Calibration {
        format: CALIBRATION_FORMAT.to_owned(),
        version: CALIBRATION_VERSION,
        model: header.model,
        dimensions: header.dimensions,
        device: header.device,
        backend: header.backend,
        step_seconds: named.collect(),
        first_load,
        later_load,
        fit: Fit::of(&cost, &steps, &loads),
    })
}
