//! What steps and loads take, as a configuration says it.

use std::path::PathBuf;

use manylora_core::budget::ModelDimensions;
use serde::{Deserialize, Serialize};

use crate::calibrate::Calibration;
use crate::cost::{CostModel, Efficiency, Roofline};
use crate::error::SimError;
use crate::plan::PlannedDevice;

/// What steps and loads take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CostConfig {
    /// A card's figures, and what of them is reached.
    Roofline(Efficiency),
    /// What a real engine was measured to take.
    Calibrated(CalibrationFile),
}

/// A calibration, as `manylora sim calibrate` writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CalibrationFile {
    /// Where it is.
    pub path: PathBuf,
}

impl Default for CostConfig {
    fn default() -> Self {
        Self::Roofline(Efficiency::default())
    }
}

impl CostConfig {
    /// The model of a model on a device, for a run with adapters or without, and what the run should be told.
    pub(super) fn model(
        &self,
        dimensions: &ModelDimensions,
        device: &PlannedDevice<'_>,
        with_adapters: bool,
    ) -> Result<(Box<dyn CostModel + Send + Sync>, Option<String>), SimError> {
        match (self, device) {
            (Self::Roofline(efficiency), PlannedDevice::Card(card)) => {
                efficiency.validate()?;
                Ok((Box::new(Roofline::new(dimensions, card.clone(), *efficiency)), None))
            }
            (Self::Roofline(_), PlannedDevice::Processor(_)) => {
                let message =
                    "no figures of processors are known: give cost.calibrated (`manylora sim calibrate`), or a card";
                Err(SimError::field("gpu", "cpu", message))
            }
            (Self::Calibrated(file), _) => {
                let wrong = |message: String| SimError::field("cost.calibrated.path", file.path.display(), message);
                let text = std::fs::read_to_string(&file.path)
                    .map_err(|error| wrong(format!("it cannot be read: {error}")))?;
                let calibration = Calibration::from_json(&text)?;
                if calibration.dimensions != *dimensions {
                    return Err(wrong(format!(
                        "it is of {}, a model of another shape; calibrate this one",
                        calibration.model.join(", ")
                    )));
                }
                let mut note = None;
                if with_adapters {
                    calibration.check_adapters()?;
                    note = calibration.adapter_note();
                }
                Ok((Box::new(calibration.cost()?), note))
            }
        }
    }
}
