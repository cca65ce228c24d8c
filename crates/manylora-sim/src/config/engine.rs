//! The engine's settings, by the names and with the defaults that `manylora serve` has.

use manylora_core::budget::division::SizeSettings;
use manylora_core::{EvictionPolicyKind, SchedulingPolicy, SchedulingSettings};
use serde::{Deserialize, Serialize};

use crate::plan::DType;

/// Whose turn it is, as settings spell it.
#[derive(Serialize, Deserialize)]
#[serde(remote = "SchedulingPolicy", rename_all = "snake_case")]
enum PolicyName {
    Fair,
    Fcfs,
    Priority,
}

/// Who goes, as settings spell it.
#[derive(Serialize, Deserialize)]
#[serde(remote = "EvictionPolicyKind", rename_all = "snake_case")]
enum EvictionName {
    Lru,
    CostAware,
}

/// How numbers are stored, as settings spell it.
#[derive(Serialize, Deserialize)]
#[serde(remote = "DType", rename_all = "lowercase")]
enum DTypeName {
    Auto,
    BFloat16,
    Float16,
    Float32,
}

/// Settings of the simulated engine. Those that an engine has, too, have its names and defaults; `null` is what it is when
/// nothing is said.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineOptions {
    /// How weights, adapters and KV blocks are stored.
    #[serde(with = "DTypeName")]
    pub dtype: DType,
    /// Longest sequence; None = the model's context, lowered to what fits.
    pub max_model_len: Option<usize>,
    /// Sequences per step.
    pub max_num_seqs: usize,
    /// Rows per step.
    pub max_num_batched_tokens: Option<usize>,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Bytes that KV blocks and adapters share; None = what `gpu_memory_utilization` leaves.
    pub kv_cache_memory_bytes: Option<u64>,
    /// Share of the card's memory that the engine takes.
    pub gpu_memory_utilization: f64,
    /// Whether the card multiplies by own kernels, which need no working memory of cuBLASLt's.
    pub batch_invariant: bool,
    /// Whether KV blocks are kept for requests with the same prefix.
    pub enable_prefix_caching: bool,
    /// Whether prompts may be split over steps.
    pub enable_chunked_prefill: bool,
    /// `fair`, `fcfs` or `priority`.
    #[serde(with = "PolicyName")]
    pub scheduling_policy: SchedulingPolicy,
    /// Largest rank that is accepted.
    pub max_lora_rank: usize,
    /// Distinct adapters per step; None = no cap.
    pub max_loras: Option<usize>,
    /// Resident adapters; None = unbounded.
    pub max_cpu_loras: Option<usize>,
    /// Most bytes of adapters; None = elastic.
    pub lora_memory_bytes: Option<u64>,
    /// `lru` or `cost_aware`.
    #[serde(with = "EvictionName")]
    pub lora_eviction: EvictionPolicyKind,
    /// Threads that read adapters.
    pub loader_threads: usize,
    /// Steps that `max_loras` may keep a waiting adapter out.
    pub max_deferred_steps: u64,
    /// Bytes of adapters' files that the host's memory keeps once they were read; None = all of them. No setting of an
    /// engine: it is what the machine has.
    pub host_cache_bytes: Option<u64>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        let (sizes, scheduling) = (SizeSettings::new(1), SchedulingSettings::default());
        Self {
            dtype: DType::Auto,
            max_model_len: sizes.max_model_len,
            max_num_seqs: sizes.max_num_seqs,
            max_num_batched_tokens: sizes.max_num_batched_tokens,
            block_size: sizes.block_size,
            kv_cache_memory_bytes: sizes.kv_cache_memory_bytes,
            gpu_memory_utilization: sizes.gpu_memory_utilization,
            batch_invariant: false,
            enable_prefix_caching: scheduling.enable_prefix_caching,
            enable_chunked_prefill: sizes.enable_chunked_prefill,
            scheduling_policy: scheduling.policy,
            max_lora_rank: sizes.max_lora_rank,
            max_loras: sizes.max_loras,
            max_cpu_loras: scheduling.max_cpu_loras,
            lora_memory_bytes: scheduling.lora_memory_bytes,
            lora_eviction: scheduling.eviction,
            loader_threads: scheduling.loader_threads,
            max_deferred_steps: scheduling.max_deferred_steps,
            host_cache_bytes: None,
        }
    }
}

impl EngineOptions {
    /// Those that decide sizes.
    pub fn sizes(&self, model_context: usize) -> SizeSettings {
        SizeSettings {
            model_context,
            max_model_len: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            enable_chunked_prefill: self.enable_chunked_prefill,
            block_size: self.block_size,
            kv_cache_memory_bytes: self.kv_cache_memory_bytes,
            gpu_memory_utilization: self.gpu_memory_utilization,
            enable_lora: true,
            max_lora_rank: self.max_lora_rank,
            max_loras: self.max_loras,
        }
    }

    /// Those that do not.
    pub const fn scheduling(&self) -> SchedulingSettings {
        SchedulingSettings {
            policy: self.scheduling_policy,
            eviction: self.lora_eviction,
            enable_prefix_caching: self.enable_prefix_caching,
            max_cpu_loras: self.max_cpu_loras,
            lora_memory_bytes: self.lora_memory_bytes,
            max_deferred_steps: self.max_deferred_steps,
            loader_threads: self.loader_threads,
        }
    }
}
