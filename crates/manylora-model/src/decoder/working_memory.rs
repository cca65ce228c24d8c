//! Working memory of a decoder, sized once from its limits.

use std::sync::atomic::{AtomicU64, Ordering};

use manylora_kernels::{
    AdapterTable, AttentionShape, Backend, BufferKind, KernelError, KvShape, RowAdapterPlan, StorageType,
};

use super::rope;
use super::weights::DecoderWeights;
use crate::error::ModelError;
use crate::spec::ModelSpec;

/// Sizes that a decoder's buffers are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecoderLimits {
    /// Most rows of one step.
    pub max_rows: usize,
    /// Most rows of one call for logits.
    pub max_logit_rows: usize,
    /// Positions are below this (the longest sequence).
    pub max_position: usize,
    /// Tokens per KV block.
    pub block_size: usize,
    /// KV blocks.
    pub blocks: usize,
    /// Most adapter entries of one step that room is made for at the start; 0 where there are no adapters. A step that
    /// composes more adapters than this grows the room once.
    pub max_entries: usize,
    /// Largest rank of an adapter; larger ones are not packed.
    pub max_rank: usize,
}

/// Activations of a step; every buffer is `[max_rows, width]` unless it says otherwise.
pub(super) struct Buffers<B: Backend> {
    /// The residual stream; it stays until the next step, so that logits can be asked for in portions.
    pub(super) hidden: B::Buffer,
    pub(super) normed: B::Buffer,
    pub(super) q: B::Buffer,
    pub(super) k: B::Buffer,
    pub(super) v: B::Buffer,
    pub(super) attended: B::Buffer,
    pub(super) gate: B::Buffer,
    pub(super) up: B::Buffer,
    pub(super) activated: B::Buffer,
    /// `[max_logit_rows, hidden]`
    pub(super) sampled: B::Buffer,
    /// `[max_logit_rows, hidden]`
    pub(super) sampled_normed: B::Buffer,
    /// `[max_logit_rows, vocabulary]`
    pub(super) logits: B::Buffer,
}

/// Rows, widths and kind of buffers that one linear map reads or fills.
pub(super) type BufferGroup = (usize, Vec<usize>, BufferKind);

/// All buffers of a decoder.
pub(super) fn buffer_groups(spec: &ModelSpec, limits: &DecoderLimits) -> [BufferGroup; 9] {
    let (rows, logit_rows, hidden) = (limits.max_rows, limits.max_logit_rows, spec.hidden_size);
    let (q, kv, intermediate) = (spec.q_width(), spec.kv_width(), spec.intermediate_size);
    [
        (rows, vec![hidden], BufferKind::SUMS),
        (rows, vec![hidden], BufferKind::INPUTS),
        (rows, vec![q, kv, kv], BufferKind::SUMS),
        (rows, vec![q], BufferKind::INPUTS),
        (rows, vec![intermediate, intermediate], BufferKind::SUMS),
        (rows, vec![intermediate], BufferKind::INPUTS),
        (logit_rows, vec![hidden], BufferKind::SAMPLE_SUMS),
        (logit_rows, vec![hidden], BufferKind::SAMPLE_INPUTS),
        (logit_rows, vec![spec.vocab_size], BufferKind::SAMPLE_SUMS),
    ]
}

impl<B: Backend> Buffers<B> {
    fn new(backend: &B, spec: &ModelSpec, limits: &DecoderLimits) -> Result<Self, KernelError> {
        let mut made = Vec::with_capacity(12);
        for (rows, widths, kind) in buffer_groups(spec, limits) {
            made.extend(backend.buffers(rows, &widths, kind)?);
        }
        let mut made = made.into_iter();
        let mut next = || made.next().expect("a buffer for every width");
        Ok(Self {
            hidden: next(),
            normed: next(),
            q: next(),
            k: next(),
            v: next(),
            attended: next(),
            gate: next(),
            up: next(),
            activated: next(),
            sampled: next(),
            sampled_normed: next(),
            logits: next(),
        })
    }
}

/// A model with its working memory: runs steps.
pub struct Decoder<B: Backend> {
    /// Tells this decoder's steps from those of others on the same backend.
    pub(super) walk: u64,
    pub(super) weights: DecoderWeights<B>,
    pub(super) limits: DecoderLimits,
    /// Attention as each layer does it; layers differ in their window only.
    pub(super) attention: Vec<AttentionShape>,
    pub(super) buffers: Buffers<B>,
    pub(super) cosines: B::Vector,
    pub(super) sines: B::Vector,
    pub(super) cache: B::KvCache,
    pub(super) adapters: AdapterTable<B::Adapter>,
    /// The row-adapter plan of the rows whose logits are computed.
    pub(super) head_plan: RowAdapterPlan,
}

/// Decoders made so far.
static WALKS: AtomicU64 = AtomicU64::new(0);

/// Adapters per row that the head's plan has room for from the start; more is possible and grows it once.
const ENTRIES_PER_ROW: usize = 4;

/// The KV cache of a decoder.
pub(super) fn kv_shape(spec: &ModelSpec, limits: &DecoderLimits, dtype: StorageType) -> KvShape {
    KvShape {
        layers: spec.layers,
        kv_heads: spec.kv_heads,
        head_dim: spec.head_dim,
        block_size: limits.block_size,
        blocks: limits.blocks,
        dtype,
    }
}

/// Widest input of any linear map.
fn widest_input(spec: &ModelSpec) -> usize {
    spec.hidden_size.max(spec.q_width()).max(spec.intermediate_size)
}

impl<B: Backend> Decoder<B> {
    pub(super) fn new(weights: DecoderWeights<B>, limits: DecoderLimits) -> Result<Self, ModelError> {
        for (name, value) in [
            ("max_rows", limits.max_rows),
            ("max_logit_rows", limits.max_logit_rows),
            ("max_position", limits.max_position),
            ("block_size", limits.block_size),
            ("blocks", limits.blocks),
        ] {
            if value == 0 {
                return Err(ModelError::Unsupported { message: format!("`{name}` is `0`; at least 1 is needed") });
            }
        }
        let spec = &weights.spec;
        let backend = &*weights.backend;
        let rows = limits.max_rows;
        let buffers = Buffers::new(backend, spec, &limits)?;
        let (cosines, sines) = rope::tables(&spec.rope, spec.head_dim, limits.max_position);
        let (cosines, sines) = (backend.vector(&cosines)?, backend.vector(&sines)?);
        backend.reserve(rows, limits.max_entries, limits.max_rank, widest_input(spec))?;
        let cache = backend.kv_cache(kv_shape(spec, &limits, weights.dtype))?;
        let attention = spec
            .windows
            .iter()
            .map(|window| AttentionShape {
                heads: spec.heads,
                kv_heads: spec.kv_heads,
                head_dim: spec.head_dim,
                scale: (1.0 / (spec.head_dim as f64).sqrt()) as f32,
                window: *window,
            })
            .collect();
        let head_plan = RowAdapterPlan::with_capacity(limits.max_logit_rows, limits.max_logit_rows * ENTRIES_PER_ROW);
        let adapters = AdapterTable::new(0);
        let walk = WALKS.fetch_add(1, Ordering::Relaxed);
        Ok(Self { walk, weights, limits, attention, buffers, cosines, sines, cache, adapters, head_plan })
    }

    /// The model.
    pub const fn spec(&self) -> &ModelSpec {
        &self.weights.spec
    }

    /// The limits it was allocated for.
    pub const fn limits(&self) -> &DecoderLimits {
        &self.limits
    }
}
