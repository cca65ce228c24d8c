//! How large everything is: decided at the start, before any weight is read, so that what cannot fit is refused then.
//!
//! Here is what all devices share, and the processor's own; `card` has a card's.

use manylora_core::budget::{Ledger, ModelDimensions, NumberFormat, TargetModule};
use manylora_core::{CoreConfig, Digest, LoraMemory};
use manylora_kernels::StorageType;
use manylora_kernels::cpu::CpuBackend;
use manylora_model::adapter::MAX_RANK;
use manylora_model::checkpoint::memory;
use manylora_model::decoder::{DecoderLimits, packed_bytes, working_bytes};
use manylora_model::{ModelError, ModelSpec};

use super::startup::CardMemory;
use crate::config::{DType, EngineConfig};
use crate::error::EngineError;

/// Share of the free memory that the KV cache and adapters take when nothing is said.
const DEFAULT_SHARE_OF_FREE: u64 = 2;
/// Room for adapters that the default budget adds to the KV cache's need.
const DEFAULT_ADAPTER_BYTES: u64 = 1 << 30;
/// Rows of a step when nothing is said.
const DEFAULT_BATCHED_TOKENS: usize = 2048;

/// What was decided.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    pub(super) max_rows: usize,
    pub(super) dtype: StorageType,
    pub(super) dtype_name: &'static str,
    pub(super) block_bytes: u64,
    /// Bytes that KV blocks and adapters share.
    pub(super) ledger_bytes: u64,
    pub(super) blocks: usize,
    pub(super) max_model_len: usize,
    /// Most adapters that one request can compose; None = any number.
    pub(super) most_composed: Option<usize>,
    /// How a card's memory is divided.
    pub(super) card: Option<CardMemory>,
}

/// Rows of a step.
pub(super) fn max_rows(config: &EngineConfig, context: usize) -> usize {
    let whole_prompts = if config.enable_chunked_prefill { 1 } else { context };
    config.max_num_batched_tokens.unwrap_or(DEFAULT_BATCHED_TOKENS.max(config.max_num_seqs).max(whole_prompts))
}

/// The longest sequence that was asked for, or the model's context.
pub(super) fn context(config: &EngineConfig, spec: &ModelSpec) -> Result<usize, EngineError> {
    let context = config.max_model_len.unwrap_or(spec.max_position_embeddings);
    if context > spec.max_position_embeddings {
        return Err(EngineError::InvalidArgument(format!(
            "max_model_len `{context}` is beyond the model's context of {} positions; give a smaller one",
            spec.max_position_embeddings
        )));
    }
    Ok(context)
}

/// Decides a processor's sizes.
pub(super) fn for_processor(
    config: &EngineConfig,
    spec: &ModelSpec,
    backend: &CpuBackend,
    notes: &mut Vec<String>,
) -> Result<Sizes, EngineError> {
    let (dtype, dtype_name) = match config.dtype {
        DType::Auto | DType::BFloat16 => (StorageType::Bf16, "bfloat16"),
        DType::Float32 => (StorageType::F32, "float32"),
        DType::Float16 => (StorageType::F32, "float16 (computed in float32)"),
    };
    let context = context(config, spec)?;
    let max_rows = max_rows(config, context);
    let weights = packed_bytes(spec, dtype);
    // The context and the number of blocks are at most these: what is left depends on what is needed here.
    let limits = limits_for(config, max_rows, context, u32::MAX as usize / config.block_size);
    let working = working_bytes(backend, spec, &limits, dtype);
    let needed = weights.saturating_add(working);
    let free = memory::available_bytes().unwrap_or(u64::MAX);
    if needed > free {
        return Err(EngineError::Model(ModelError::DoesNotFit {
            needed,
            available: free,
            message: format!(
                "weights in {dtype_name} ({weights} bytes) and the working memory of {max_rows} rows ({working} bytes); use \
                 a smaller model, dtype bfloat16, a smaller max_num_batched_tokens, or a bigger machine"
            ),
        }));
    }
    let number = match dtype {
        StorageType::Bf16 | StorageType::F16 => NumberFormat::Bf16,
        StorageType::F32 => NumberFormat::F32,
    };
    let dimensions = model_dimensions(spec);
    let block_bytes = dimensions.kv_block_bytes(config.block_size as u64, number);
    let ledger_bytes = config.kv_cache_memory_bytes.unwrap_or_else(|| {
        let sequence = (context.div_ceil(config.block_size) as u64).saturating_mul(block_bytes);
        let wanted = sequence.saturating_mul(config.max_num_seqs as u64).saturating_add(DEFAULT_ADAPTER_BYTES);
        wanted.min((free - needed) / DEFAULT_SHARE_OF_FREE)
    });
    if ledger_bytes > free - needed {
        return Err(EngineError::InvalidArgument(format!(
            "kv_cache_memory_bytes `{ledger_bytes}` and {needed} bytes of weights and working memory are more than the \
             {free} bytes that are free; lower it"
        )));
    }
    let ledger = Ledger { bytes: ledger_bytes, block_bytes, block_size: config.block_size };
    // A lowered context leaves room for one adapter of the largest rank, so that the shelf is not empty for ever.
    let adapter = dimensions.adapter_bytes(config.max_lora_rank as u64, &TargetModule::ALL, number);
    let kept = if config.enable_lora { adapter.min(ledger_bytes / 2) } else { 0 };
    let max_model_len = lowered_context(config, &ledger, (context, kept), RAISE)?;
    notes.extend(lowered_note(context, max_model_len, ledger_bytes));
    let blocks = ledger.blocks_beside(0).min(u32::MAX as usize / config.block_size);
    Ok(Sizes {
        max_rows,
        dtype,
        dtype_name,
        block_bytes,
        ledger_bytes,
        blocks,
        max_model_len,
        most_composed: None,
        card: None,
    })
}

/// What to raise where a context does not fit.
pub(super) const RAISE: &str = "kv_cache_memory_bytes";

/// The context, or what of it fits beside `kept` bytes of adapters where nobody has asked for one that does not. `raise` says
/// what would give it room.
pub(super) fn lowered_context(
    config: &EngineConfig,
    ledger: &Ledger,
    (context, kept): (usize, u64),
    raise: &str,
) -> Result<usize, EngineError> {
    let bytes = ledger.bytes;
    if ledger.sequence_bytes(context) <= bytes {
        return Ok(context);
    }
    let fits = ledger.longest_sequence(if config.max_model_len.is_none() { kept } else { 0 });
    if config.max_model_len.is_some() || fits == 0 {
        return Err(EngineError::InvalidArgument(format!(
            "max_model_len `{context}` needs {} bytes of KV cache and there are {bytes}; at most {fits} tokens fit: lower \
             max_model_len or raise {raise}",
            ledger.sequence_bytes(context),
        )));
    }
    Ok(fits)
}

/// What to tell about a lowered context.
pub(super) fn lowered_note(context: usize, fits: usize, bytes: u64) -> Option<String> {
    let told = || format!("max_model_len lowered from {context} to {fits}: {bytes} bytes of KV cache hold no more");
    (fits < context).then(told)
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
        head_norm: spec.qk_norm,
    }
}

pub(super) fn decoder_limits(config: &EngineConfig, sizes: &Sizes) -> DecoderLimits {
    let limits = limits_for(config, sizes.max_rows, sizes.max_model_len, sizes.blocks);
    DecoderLimits { max_entries: limits.max_entries * sizes.most_composed.unwrap_or(1), ..limits }
}

pub(super) fn limits_for(config: &EngineConfig, max_rows: usize, max_position: usize, blocks: usize) -> DecoderLimits {
    // One entry per row is the common case.
    let (max_entries, max_rank) =
        if config.enable_lora { (max_rows, config.max_lora_rank.min(MAX_RANK)) } else { (0, 0) };
    DecoderLimits {
        max_rows,
        max_logit_rows: config.max_num_seqs.min(max_rows),
        max_position,
        block_size: config.block_size,
        blocks,
        max_entries,
        max_rank,
    }
}

pub(super) fn core_config(
    config: &EngineConfig,
    sizes: &Sizes,
    loader_threads: usize,
    base_digest: Digest,
) -> CoreConfig {
    CoreConfig {
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: sizes.max_rows,
        max_model_len: sizes.max_model_len,
        block_size: config.block_size,
        block_bytes: sizes.block_bytes,
        ledger_bytes: sizes.ledger_bytes,
        enable_prefix_caching: config.enable_prefix_caching,
        enable_chunked_prefill: config.enable_chunked_prefill,
        policy: config.scheduling_policy,
        max_loras: config.max_loras,
        max_cpu_loras: config.max_cpu_loras,
        lora_memory: config.lora_memory_bytes.map_or(LoraMemory::Elastic, LoraMemory::Bytes),
        eviction: config.lora_eviction,
        base_digest,
        max_deferred_steps: config.max_deferred_steps,
        // One that is read and one that is next, for each thread.
        max_loading: Some(2 * loader_threads),
    }
}
