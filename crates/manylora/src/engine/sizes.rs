//! How large everything is: decided at the start, before any weight is read, so that what cannot fit is refused then.
//!
//! The arithmetic is [`manylora_core::budget`]'s, which the planner asks, too; here an engine's settings and its device
//! become that arithmetic's arguments. `card` does it for cards.

use manylora_core::budget::division::{Division, ModelBytes, SizeSettings, divide_processor};
use manylora_core::budget::{ModelDimensions, TargetModule};
use manylora_core::{CoreConfig, Digest, SchedulingSettings};
use manylora_kernels::StorageType;
use manylora_kernels::cpu::CpuBackend;
use manylora_model::ModelSpec;
use manylora_model::adapter::MAX_RANK;
use manylora_model::checkpoint::memory;
use manylora_model::decoder::DecoderLimits;

use super::processor;
use super::startup::CardMemory;
use crate::config::{DType, EngineConfig};
use crate::error::EngineError;

/// What was decided.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    pub(super) division: Division,
    pub(super) dtype: StorageType,
    pub(super) dtype_name: &'static str,
    pub(super) block_bytes: u64,
    /// Most adapters that one request can compose; None = any number.
    pub(super) most_composed: Option<usize>,
    /// How a card's memory is divided.
    pub(super) card: Option<CardMemory>,
}

/// The settings that decide sizes.
pub(super) fn settings(config: &EngineConfig, spec: &ModelSpec) -> SizeSettings {
    SizeSettings {
        model_context: spec.max_position_embeddings,
        max_model_len: config.max_model_len,
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
        enable_chunked_prefill: config.enable_chunked_prefill,
        block_size: config.block_size,
        kv_cache_memory_bytes: config.kv_cache_memory_bytes,
        gpu_memory_utilization: config.gpu_memory_utilization,
        enable_lora: config.enable_lora,
        max_lora_rank: config.max_lora_rank.min(MAX_RANK),
        max_loras: config.max_loras,
    }
}

/// How a processor stores numbers, and what that is called.
pub(super) const fn processor_format(dtype: DType) -> (StorageType, &'static str) {
    match dtype {
        DType::Auto | DType::BFloat16 => (StorageType::Bf16, "bfloat16"),
        DType::Float32 => (StorageType::F32, "float32"),
        DType::Float16 => (StorageType::F32, "float16 (computed in float32)"),
    }
}

/// Decides a processor's sizes.
pub(super) fn for_processor(
    config: &EngineConfig,
    spec: &ModelSpec,
    backend: &CpuBackend,
    notes: &mut Vec<String>,
) -> Result<Sizes, EngineError> {
    let (dtype, dtype_name) = processor_format(config.dtype);
    let number = processor::number_format(dtype);
    let dimensions = model_dimensions(spec);
    let model = ModelBytes {
        weights: dimensions.weight_bytes(number, processor::packing(backend, number)),
        block: dimensions.kv_block_bytes(config.block_size as u64, number),
        largest_adapter: dimensions.adapter_bytes(config.max_lora_rank as u64, &TargetModule::ALL, number),
        dtype: dtype_name,
    };
    let free = memory::available_bytes().unwrap_or(u64::MAX);
    let working = |limits: &_| processor::working_bytes(backend, &dimensions, limits, number);
    let division = divide_processor(&settings(config, spec), &model, free, &working)?;
    notes.extend(division.notes.iter().cloned());
    Ok(Sizes { division, dtype, dtype_name, block_bytes: model.block, most_composed: None, card: None })
}

/// A model's sizes as the formulas of [`manylora_core::budget`] want them.
pub fn model_dimensions(spec: &ModelSpec) -> ModelDimensions {
    ModelDimensions {
        layers: spec.layers as u64,
        hidden: spec.hidden_size as u64,
        intermediate: spec.intermediate_size as u64,
        heads: spec.heads as u64,
        kv_heads: spec.kv_heads as u64,
        head_dim: spec.head_dim as u64,
        vocabulary: spec.vocab_size as u64,
        tied: spec.tied,
        attention_bias: spec.qkv_bias,
        output_bias: spec.o_bias,
        mlp_bias: spec.mlp_bias,
        head_norm: spec.qk_norm,
    }
}

/// The largest step of a decoder.
pub(super) fn decoder_limits(config: &EngineConfig, spec: &ModelSpec, sizes: &Sizes) -> DecoderLimits {
    let composed = sizes.most_composed.unwrap_or(1);
    let Division { max_rows, max_model_len, blocks, .. } = sizes.division;
    let limits = settings(config, spec).step_limits(max_rows, max_model_len, blocks, composed);
    DecoderLimits {
        max_rows: limits.max_rows,
        max_logit_rows: limits.max_logit_rows,
        max_position: limits.max_position,
        block_size: limits.block_size,
        blocks: limits.blocks,
        max_entries: limits.max_entries,
        max_rank: limits.max_rank,
    }
}

/// What the control plane is told.
pub(super) fn core_config(
    config: &EngineConfig,
    spec: &ModelSpec,
    sizes: &Sizes,
    loader_threads: usize,
    base_digest: Digest,
) -> CoreConfig {
    let scheduling = SchedulingSettings {
        policy: config.scheduling_policy,
        eviction: config.lora_eviction,
        enable_prefix_caching: config.enable_prefix_caching,
        max_cpu_loras: config.max_cpu_loras,
        lora_memory_bytes: config.lora_memory_bytes,
        max_deferred_steps: config.max_deferred_steps,
        loader_threads,
    };
    CoreConfig::of_engine(&settings(config, spec), &sizes.division, sizes.block_bytes, &scheduling, base_digest)
}
