//! Which device an engine computes on: decided once, at the start, with the reason.

use manylora_model::ModelSpec;

#[cfg(feature = "cuda")]
use super::card::{self, Placed};
use crate::config::{Device, EngineConfig};
use crate::error::EngineError;

/// The device, ready to compute.
pub(super) enum Chosen {
    Processor,
    #[cfg(feature = "cuda")]
    Card(Box<Placed>),
}

/// Why no card is used.
pub(super) struct Unusable {
    pub(super) error: EngineError,
    /// Whether there seems to be a card, so that somebody may wonder.
    pub(super) surprising: bool,
}

/// Chooses the device. For [`Device::Auto`], what was chosen is told and the reason returned.
pub(super) fn choose(
    config: &EngineConfig,
    spec: &ModelSpec,
    notes: &mut Vec<String>,
) -> Result<(Chosen, Option<String>), EngineError> {
    match config.device {
        Device::Cpu => Ok((Chosen::Processor, None)),
        Device::Cuda { ordinal } => {
            open(config, spec, ordinal).map(|chosen| (chosen, None)).map_err(|unusable| unusable.error)
        }
        Device::Auto => {
            let (chosen, reason) = match open(config, spec, 0) {
                Ok(chosen) => (chosen, "device auto: cuda:0 can be used".to_owned()),
                Err(Unusable { error, surprising }) => {
                    let reason = format!("device auto: cpu, because {error}");
                    if surprising {
                        notes.push(reason.clone());
                    }
                    (Chosen::Processor, reason)
                }
            };
            tracing::info!("{reason}");
            Ok((chosen, Some(reason)))
        }
    }
}

#[cfg(feature = "cuda")]
fn open(config: &EngineConfig, spec: &ModelSpec, ordinal: usize) -> Result<Chosen, Unusable> {
    let card = card::open(config, spec, ordinal)?;
    // A card whose memory does not do cannot be used either.
    card.place(config, spec)
        .map(|placed| Chosen::Card(Box::new(placed)))
        .map_err(|error| Unusable { error, surprising: true })
}

#[cfg(not(feature = "cuda"))]
fn open(_config: &EngineConfig, _spec: &ModelSpec, ordinal: usize) -> Result<Chosen, Unusable> {
    let error = EngineError::InvalidArgument(format!(
        "device `cuda:{ordinal}` cannot be used: this build has no support for cards; build it with feature `cuda`, or use \
         device \"cpu\""
    ));
    Err(Unusable { error, surprising: false })
}
