//! The CPU backend: SIMD levels chosen at run time, one barrier pool, packed weights.
//!
//! Reading order: `level` (which instructions), `pool` (how work is shared), `memory`, `pack` and `adapter` (how
//! matrices lie in memory; `panel` puts them there), `linear` (base and adapters in one pass) with its `expand` and `kernels`, then the smaller operations
//! over `vector`.

mod activation;
mod adapter;
mod ahead;
mod argmax;
mod attention;
mod clock;
mod embed;
mod exp;
mod expand;
mod factor_measure;
mod kernels;
mod kv_cache;
mod level;
pub mod limits;
mod linear;
#[cfg(target_os = "linux")]
mod mapping;
mod memory;
mod norm;
mod pack;
mod panel;
mod parallel;
mod pool;
mod portable;
mod rope;
mod scratch;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(not(target_arch = "x86_64"))]
#[path = "tiles_absent.rs"]
mod tiles;
mod topology;
mod vector;
mod weight_memory;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::{Arc, Mutex};

pub use adapter::{CpuAdapter, packed_adapter_bytes};
pub use clock::ThreadClock;
pub use factor_measure::{FactorMeasure, FactorMeter};
pub use kv_cache::{KvCache, attention_scratch_bytes, kv_block_bytes};
pub use level::{LEVEL_VARIABLE, SimdLevel};
pub use memory::{AlignedVec, Buffer, HeldBytes, Plain};
pub use pack::{PackedWeight, PanelFormat, packed_weight_bytes};
pub use pool::{CoreLoan, Pool, PoolOptions, take_what_is_left};
pub use topology::{Processors, default_threads};

use crate::backend::{
    AdapterTable, AttentionShape, Backend, BufferKind, FactorFeed, FillFactors, HeadInputs, KvShape, LinearPart,
    RowSource, StorageType,
};
use crate::batch::{RowAdapterPlan, StepBatch};
use crate::error::KernelError;
use crate::site::{Site, SiteShape};

/// What a CPU backend is made with.
#[derive(Clone, Copy, Debug)]
pub struct CpuOptions {
    /// Threads, the engine's own included; None = min(physical cores, affinity mask, cgroup quota).
    pub num_threads: Option<usize>,
    /// SIMD level; None = `MANYLORA_SIMD`, or the fastest this processor has.
    pub level: Option<SimdLevel>,
    /// Bind each worker thread to one core.
    pub pin_threads: bool,
    /// Let waiting threads park after some tens of microseconds. Off only where system calls must not happen.
    pub park_threads: bool,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self { num_threads: None, level: None, pin_threads: false, park_threads: true }
    }
}

/// The backend that runs on this processor.
pub struct CpuBackend {
    level: SimdLevel,
    pool: Arc<Pool>,
    weights: weight_memory::WeightMemory,
    /// Uncontended: one step runs at a time per backend.
    scratch: Mutex<scratch::Scratch>,
}

impl CpuBackend {
    /// A backend on the process's shared pool.
    pub fn new(options: CpuOptions) -> Result<Self, KernelError> {
        let level = options.level.map_or_else(SimdLevel::from_environment, SimdLevel::require)?;
        let pool = Pool::shared(PoolOptions {
            threads: options.num_threads,
            pin_threads: options.pin_threads,
            park: options.park_threads,
        })?;
        Ok(Self {
            level,
            pool,
            weights: weight_memory::WeightMemory::new(),
            scratch: Mutex::new(scratch::Scratch::new()),
        })
    }

    /// The SIMD level in use.
    pub const fn level(&self) -> SimdLevel {
        self.level
    }

    /// The threads in use.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
}

impl Backend for CpuBackend {
    type Buffer = Buffer;
    type Weight = PackedWeight;
    type Vector = AlignedVec<f32>;
    type KvCache = KvCache;
    type Adapter = CpuAdapter;

    fn describe(&self) -> String {
        let threads = self.pool.threads();
        format!("cpu ({}, {threads} thread{})", self.level, if threads == 1 { "" } else { "s" })
    }

    fn buffers(&self, rows: usize, widths: &[usize], _kind: BufferKind) -> Result<Vec<Buffer>, KernelError> {
        widths.iter().map(|&width| Buffer::zeroed(rows, width)).collect()
    }

    fn reserve(&self, rows: usize, entries: usize, rank: usize, width: usize) -> Result<(), KernelError> {
        linear::reserve(self, rows, entries, rank, width)
    }

    fn reserved_bytes(&self, rows: usize, entries: usize, rank: usize, width: usize) -> usize {
        linear::scratch_sizes(self.level, rows, entries, rank, width).bytes(self.pool.threads())
    }

    fn attention_bytes(&self, shape: &KvShape, context: usize) -> usize {
        attention_scratch_bytes(self.level, shape, context, self.pool.threads())
    }

    fn pack_weight(&self, what: &str, source: &dyn RowSource, dtype: StorageType) -> Result<PackedWeight, KernelError> {
        computed(dtype)?;
        let format = PanelFormat::of_weight(self.level, dtype);
        PackedWeight::pack(&self.pool, &self.weights, self.level, format, what, source)
    }

    fn weight_bytes(&self, rows: usize, columns: usize, dtype: StorageType) -> usize {
        packed_weight_bytes(self.level, dtype, rows, columns)
    }

    fn adapter_bytes(&self, sites: &[SiteShape], dtype: StorageType) -> usize {
        packed_adapter_bytes(sites, dtype)
    }

    fn vector(&self, values: &[f32]) -> Result<AlignedVec<f32>, KernelError> {
        let mut vector = AlignedVec::zeroed("a vector", values.len())?;
        vector.copy_from_slice(values);
        Ok(vector)
    }

    fn kv_cache(&self, shape: KvShape) -> Result<KvCache, KernelError> {
        computed(shape.dtype)?;
        KvCache::new(self.level, shape, self.pool.threads())
    }

    fn lend_core(&self) -> Option<Box<dyn Send + '_>> {
        Some(Box::new(self.pool.lend_core()))
    }

    fn run_parts(&self, work: &(dyn Fn(usize, usize) + Sync)) {
        self.pool.run(work);
    }

    fn release_blocks(&self, cache: &mut KvCache, blocks: &[u32]) {
        cache.release_blocks(blocks);
    }

    fn pack_adapter(
        &self,
        sites: &[SiteShape],
        dtype: StorageType,
        fill: &mut FillFactors<'_>,
    ) -> Result<CpuAdapter, KernelError> {
        computed(dtype)?;
        CpuAdapter::pack(self.level, sites, dtype, fill)
    }

    fn pack_stored_adapter(
        &self,
        sites: &[SiteShape],
        dtype: StorageType,
        feed: &mut FactorFeed<'_>,
    ) -> Result<CpuAdapter, KernelError> {
        computed(dtype)?;
        CpuAdapter::pack_stored(self.level, sites, dtype, feed)
    }

    fn embed(
        &self,
        batch: &StepBatch,
        adapters: &AdapterTable<CpuAdapter>,
        weight: &PackedWeight,
        site: Site,
        out: &mut Buffer,
    ) {
        embed::gather(self, batch, weight, out);
        linear::embed_deltas(self, batch, adapters, site, out);
    }

    fn rms_norm(
        &self,
        rows: usize,
        input: &Buffer,
        weight: &AlignedVec<f32>,
        epsilon: f32,
        site: Site,
        out: &mut Buffer,
    ) {
        norm::rms_norm(self, rows, input, weight, epsilon, site, out);
    }

    fn linear(
        &self,
        rows: usize,
        plan: &RowAdapterPlan,
        adapters: &AdapterTable<CpuAdapter>,
        input: &Buffer,
        parts: &mut [LinearPart<'_, Self>],
    ) {
        linear::linear(self, rows, plan, adapters, input, parts);
    }

    fn gated_linear(
        &self,
        rows: usize,
        plan: &RowAdapterPlan,
        adapters: &AdapterTable<CpuAdapter>,
        input: &Buffer,
        parts: &mut [LinearPart<'_, Self>; 2],
        out: &mut Buffer,
    ) {
        linear::gated_linear(self, rows, plan, adapters, input, parts, out);
    }

    fn rope_kv_write(
        &self,
        batch: &StepBatch,
        layer: usize,
        shape: &AttentionShape,
        heads: &HeadInputs<'_, Self>,
        cos: &AlignedVec<f32>,
        sin: &AlignedVec<f32>,
        q: &mut Buffer,
        k: &mut Buffer,
        v: &Buffer,
        cache: &mut KvCache,
    ) {
        rope::rope_kv_write(self, batch, layer, shape, heads, cos, sin, q, k, v, cache);
    }

    fn attention(
        &self,
        batch: &StepBatch,
        layer: usize,
        shape: &AttentionShape,
        q: &Buffer,
        cache: &KvCache,
        out: &mut Buffer,
    ) {
        attention::attention(self, batch, layer, shape, q, cache, out);
    }

    fn gated_activation(&self, rows: usize, gate: &Buffer, up: &Buffer, out: &mut Buffer) {
        activation::gated_activation(self, rows, gate, up, out);
    }

    fn gather_rows(&self, rows: &[u32], input: &Buffer, out: &mut Buffer) {
        embed::gather_rows(rows, input, out);
    }

    fn read<'a>(&'a self, buffer: &'a mut Buffer, rows: usize) -> Result<&'a [f32], KernelError> {
        Ok(&buffer.data[..rows * buffer.width])
    }

    fn argmax(&self, rows: usize, logits: &Buffer, out: &mut [u32]) -> Result<(), KernelError> {
        argmax::argmax(self, rows, logits, out);
        Ok(())
    }
}

/// An error for the format that no level computes in.
fn computed(dtype: StorageType) -> Result<(), KernelError> {
    match dtype {
        StorageType::Bf16 | StorageType::F32 => Ok(()),
        StorageType::F16 => {
            Err(KernelError::Format { backend: "CPU", dtype: "float16", choose: "bfloat16 or float32" })
        }
    }
}
