//! What a virtual engine is told: the control plane's own settings, the adapters, and the loader.

use manylora_core::CoreConfig;

use crate::cost::AdapterShape;
use crate::error::SimError;
use crate::plan::{Plan, PlanRequest, decide};

/// A virtual engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSettings {
    /// What the control plane is told.
    pub core: CoreConfig,
    /// The adapters, by number.
    pub adapters: Vec<AdapterShape>,
    /// Threads that read adapters: loads beyond that wait for one another.
    pub loader_threads: usize,
    /// Bytes of adapters' files that the host's memory keeps once they were read, the least recently used going first; None
    /// = all.
    pub host_cache_bytes: Option<u64>,
}

impl EngineSettings {
    /// The engine that a plan is about: its sizes are the plan's, its adapters the plan's groups in turn, so that adapter 0
    /// is of the first group, adapter 1 of the second, and so on while groups last.
    pub fn planned(request: &PlanRequest<'_>) -> Result<(Self, Plan), SimError> {
        let (plan, core) = decide(request)?;
        let mut left: Vec<u64> = plan.fleet.iter().map(|group| group.count).collect();
        let mut adapters = Vec::new();
        while left.iter().any(|&count| count > 0) {
            for (count, group) in left.iter_mut().zip(&plan.fleet) {
                if *count > 0 {
                    *count -= 1;
                    adapters.push(AdapterShape { bytes: group.bytes, parameters: group.parameters, rank: group.rank });
                }
            }
        }
        let loader_threads = request.scheduling.loader_threads;
        Ok((Self { core, adapters, loader_threads, host_cache_bytes: None }, plan))
    }

    pub(crate) fn validate(&self) -> Result<(), SimError> {
        if self.loader_threads == 0 {
            return Err(SimError::field("loader_threads", 0, "at least one is needed"));
        }
        if let Some(number) = self.adapters.iter().position(|adapter| adapter.bytes == 0) {
            return Err(SimError::field(format!("adapters[{number}].bytes"), 0, "an adapter takes at least one byte"));
        }
        Ok(())
    }
}
