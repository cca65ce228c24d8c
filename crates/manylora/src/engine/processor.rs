//! What things take on this machine's processors, which depends on their SIMD level and on threads: for engines, and for the
//! planner, which asks before there is one.

use manylora_core::budget::working::StepLimits;
use manylora_core::budget::{ModelDimensions, NumberFormat, WeightPacking};
use manylora_kernels::cpu::{CpuBackend, CpuOptions, SimdLevel};
use manylora_kernels::{Backend, KvShape, StorageType};
use manylora_model::checkpoint::memory;

use crate::error::EngineError;

/// How numbers of this type are stored on a processor.
pub(super) const fn number_format(dtype: StorageType) -> NumberFormat {
    match dtype {
        StorageType::Bf16 | StorageType::F16 => NumberFormat::Bf16,
        StorageType::F32 => NumberFormat::F32,
    }
}

/// How a backend packs base weights.
pub(super) fn packing(backend: &CpuBackend, number: NumberFormat) -> WeightPacking {
    match (backend.level(), number) {
        (SimdLevel::Avx512Bf16 | SimdLevel::Amx, NumberFormat::Bf16) => WeightPacking::Panels32Pairs,
        _ => WeightPacking::Panels16,
    }
}

/// Bytes of working memory for steps of these limits: activations, tables, and the kernels' own. Nothing is added later; pages
/// are committed as they are used.
pub(super) fn working_bytes(
    backend: &CpuBackend,
    dimensions: &ModelDimensions,
    limits: &StepLimits,
    number: NumberFormat,
) -> u64 {
    let width = dimensions.widest_input() as usize;
    let reserved = backend.reserved_bytes(limits.max_rows, limits.max_entries, limits.max_rank, width);
    let shape = KvShape {
        layers: dimensions.layers as usize,
        kv_heads: dimensions.kv_heads as usize,
        head_dim: dimensions.head_dim as usize,
        block_size: limits.block_size,
        blocks: limits.blocks,
        dtype: match number {
            NumberFormat::Bf16 => StorageType::Bf16,
            NumberFormat::F32 => StorageType::F32,
        },
    };
    let attention = backend.attention_bytes(&shape, limits.max_position);
    dimensions.processor_activation_bytes(limits).saturating_add(reserved as u64).saturating_add(attention as u64)
}

/// This machine's processors, as the planner has to know them.
pub struct ProcessorBytes {
    backend: CpuBackend,
}

impl ProcessorBytes {
    /// As an engine with these settings would use them.
    pub fn new(num_threads: Option<usize>, simd: Option<&str>) -> Result<Self, EngineError> {
        let level = simd.map(SimdLevel::parse).transpose()?;
        Ok(Self { backend: CpuBackend::new(CpuOptions { num_threads, level, ..CpuOptions::default() })? })
    }

    /// Bytes of memory that are free; None if the system does not tell.
    pub fn available() -> Option<u64> {
        memory::available_bytes()
    }

    /// How base weights are packed.
    pub fn packing(&self, number: NumberFormat) -> WeightPacking {
        packing(&self.backend, number)
    }

    /// Bytes of working memory for steps of these limits.
    pub fn working(&self, dimensions: &ModelDimensions, limits: &StepLimits, number: NumberFormat) -> u64 {
        working_bytes(&self.backend, dimensions, limits, number)
    }
}
