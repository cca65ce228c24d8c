//! What a virtual engine is told: the control plane's own settings, the adapters, and the loader.

use manylora_core::{CoreConfig, Digest, EvictionPolicyKind, LoraMemory, SchedulingPolicy};

use crate::cost::AdapterShape;
use crate::error::SimError;
use crate::plan::{Plan, PlanRequest, plan};

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

/// How requests and adapters are scheduled: what of an engine's settings decides no sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduling {
    /// Whose turn it is.
    pub policy: SchedulingPolicy,
    /// Which resident adapter goes.
    pub eviction: EvictionPolicyKind,
    /// Whether blocks are kept for requests that share a prefix.
    pub enable_prefix_caching: bool,
    /// The bound on waiting for the cap on adapters, in steps.
    pub max_deferred_steps: u64,
    /// Threads that read adapters.
    pub loader_threads: usize,
}

impl Default for Scheduling {
    /// An engine's defaults.
    fn default() -> Self {
        Self {
            policy: SchedulingPolicy::default(),
            eviction: EvictionPolicyKind::default(),
            enable_prefix_caching: true,
            max_deferred_steps: 256,
            loader_threads: 2,
        }
    }
}

impl EngineSettings {
    /// The engine that a plan is about: its sizes are the plan's, its adapters the plan's groups in turn, so that adapter 0
    /// has the first group's rank, adapter 1 the second's, and so on while groups last.
    pub fn planned(request: &PlanRequest<'_>, scheduling: Scheduling) -> Result<(Self, Plan), SimError> {
        let plan = plan(request)?;
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
        let settings = &request.settings;
        let core = CoreConfig {
            max_num_seqs: settings.max_num_seqs,
            max_num_batched_tokens: plan.max_num_batched_tokens,
            max_model_len: plan.max_model_len,
            block_size: plan.block_size,
            block_bytes: plan.block_bytes,
            ledger_bytes: plan.ledger_bytes,
            enable_prefix_caching: scheduling.enable_prefix_caching,
            enable_chunked_prefill: settings.enable_chunked_prefill,
            policy: scheduling.policy,
            max_loras: settings.max_loras,
            max_cpu_loras: request.max_cpu_loras,
            lora_memory: request.lora_memory_bytes.map_or(LoraMemory::Elastic, LoraMemory::Bytes),
            eviction: scheduling.eviction,
            base_digest: Digest([0; 32]),
            max_deferred_steps: scheduling.max_deferred_steps,
            // As the engine: one that is read and one that is next, for each thread.
            max_loading: Some(2 * scheduling.loader_threads),
        };
        let loader_threads = scheduling.loader_threads;
        Ok((Self { core, adapters, loader_threads, host_cache_bytes: None }, plan))
    }

    pub(super) fn validate(&self) -> Result<(), SimError> {
        if self.loader_threads == 0 {
            return Err(SimError::field("loader_threads", 0, "at least one is needed"));
        }
        if let Some(number) = self.adapters.iter().position(|adapter| adapter.bytes == 0) {
            return Err(SimError::field(format!("adapters[{number}].bytes"), 0, "an adapter takes at least one byte"));
        }
        Ok(())
    }
}
