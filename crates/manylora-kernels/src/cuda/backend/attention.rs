//! Rotation, the write of keys and values, and attention.
#![expect(unsafe_code, reason = "launches kernels over buffers that were checked")]

use super::super::arguments::{PagedAttention, PagedAttentionReduce, RopeKvWrite};
use super::super::error::CudaError;
use super::super::launch::Grid;
use super::CudaBackend;
use super::buffer::{CudaBuffer, CudaVector, optional};
use super::kv::CudaKvCache;
use super::step::{StepState, bucket};
use crate::backend::{AttentionShape, HeadInputs};

const THREADS: u32 = 128;
/// Heads of a block of `rope_kv_write`.
const HEADS_AT_ONCE: usize = 4;

/// What [`rope_kv_write`] works on.
pub(super) struct RopeInputs<'a> {
    pub(super) heads: &'a HeadInputs<'a, CudaBackend>,
    pub(super) cos: &'a CudaVector,
    pub(super) sin: &'a CudaVector,
    pub(super) q: &'a CudaBuffer,
    pub(super) k: &'a CudaBuffer,
    pub(super) v: &'a CudaBuffer,
}

/// See [`crate::Backend::rope_kv_write`].
pub(super) fn rope_kv_write(
    backend: &CudaBackend,
    state: &StepState,
    layer: usize,
    shape: &AttentionShape,
    inputs: &RopeInputs<'_>,
    cache: &CudaKvCache,
) -> Result<(), CudaError> {
    let RopeInputs { heads, cos, sin, q, k, v } = *inputs;
    let AttentionShape { heads: query_heads, kv_heads, head_dim, .. } = *shape;
    let rows = state.batch.rows;
    backend.check_shape(shape);
    assert!(kv_heads == cache.shape.kv_heads && head_dim == cache.shape.head_dim, "{shape:?} is not the cache's");
    assert!(q.width == query_heads * head_dim && k.width == kv_heads * head_dim && v.width == k.width);
    assert!(rows <= q.rows && rows <= k.rows && rows <= v.rows, "{rows} rows do not fit");
    for (bias, width) in [(heads.q_bias, q.width), (heads.k_bias, k.width), (heads.v_bias, v.width)] {
        assert!(bias.is_none_or(|bias| bias.len() == width), "a bias has one value per output");
    }
    for norm in [heads.q_norm, heads.k_norm].into_iter().flatten() {
        assert!(norm.len() == head_dim, "a norm of heads has one value per column");
    }
    let (block, sections) = (&state.batch, &state.batch.sections);
    let (k_cache, v_cache) = cache.layer(layer);
    let arguments = RopeKvWrite {
        header: block.pointer(sections.header),
        positions: block.pointer(sections.positions),
        slot_mapping: block.pointer(sections.slot_mapping),
        cos: cos.pointer(),
        sin: sin.pointer(),
        q: q.sums(),
        q_stride: q.stride as i32,
        k: k.sums(),
        k_stride: k.stride as i32,
        v: v.sums(),
        v_stride: v.stride as i32,
        q_bias: optional(heads.q_bias),
        k_bias: optional(heads.k_bias),
        v_bias: optional(heads.v_bias),
        q_norm: optional(heads.q_norm),
        k_norm: optional(heads.k_norm),
        epsilon: heads.epsilon,
        heads: query_heads as i32,
        kv_heads: kv_heads as i32,
        head_dim: head_dim as i32,
        k_cache,
        v_cache,
    };
    let grid = Grid::new(bucket(rows) as u32, (query_heads + 2 * kv_heads).div_ceil(HEADS_AT_ONCE) as u32, THREADS);
    // SAFETY: widths were checked here; positions and slots of the step when it began.
    unsafe { backend.kernels.rope_kv_write.launch(&state.stream, grid, &arguments) }
}

/// See [`crate::Backend::attention`].
pub(super) fn attention(
    backend: &CudaBackend,
    state: &StepState,
    layer: usize,
    shape: &AttentionShape,
    q: &CudaBuffer,
    cache: &CudaKvCache,
    out: &CudaBuffer,
) -> Result<(), CudaError> {
    let AttentionShape { heads, kv_heads, head_dim, scale, window } = *shape;
    backend.check_shape(shape);
    let rows = state.batch.rows;
    assert!(q.width == heads * head_dim && out.width == q.width, "q and the result are one head after the other");
    assert!(rows <= q.rows && rows <= out.rows, "{rows} rows do not fit");
    let (block, sections) = (&state.batch, &state.batch.sections);
    let (k_cache, v_cache) = cache.layer(layer);
    let [item_sequence, item_first, item_rows, item_partition, item_partitions, item_partial] =
        sections.items.map(|section| block.pointer(section));
    let [sequence_row, sequence_position, sequence_table] = sections.sequences.map(|section| block.pointer(section));
    let arguments = PagedAttention {
        header: block.pointer(sections.header),
        item_sequence,
        item_first,
        item_rows,
        item_partition,
        item_partitions,
        item_partial,
        sequence_row,
        sequence_position,
        sequence_table,
        block_tables: block.pointer(sections.tables),
        q: q.sums(),
        q_stride: q.stride as i32,
        k_cache,
        v_cache,
        out: out.inputs(),
        out_stride: out.stride as i32,
        partials: state.partials.pointer(),
        heads: heads as i32,
        kv_heads: kv_heads as i32,
        head_dim: head_dim as i32,
        block_size: cache.shape.block_size as i32,
        scale,
        window: window.map_or(0, |window| window.min(i32::MAX as usize) as i32),
    };
    let grid = Grid::new(item_grid(block.items) as u32, kv_heads as u32, THREADS);
    // SAFETY: widths were checked here; sequences, their tables and the room for partial results when the step began.
    unsafe { backend.kernels.paged_attention.launch(&state.stream, grid, &arguments) }?;
    if block.reduces == 0 {
        return Ok(());
    }
    let [reduce_row, reduce_first, reduce_count] = sections.reduces.map(|section| block.pointer(section));
    let arguments = PagedAttentionReduce {
        header: block.pointer(sections.header),
        reduce_row,
        reduce_first,
        reduce_count,
        partials: state.partials.pointer(),
        out: out.inputs(),
        out_stride: out.stride as i32,
        heads: heads as i32,
        head_dim: head_dim as i32,
    };
    let grid = Grid::new(bucket(rows) as u32, heads as u32, THREADS);
    // SAFETY: as above.
    unsafe { backend.kernels.paged_attention_reduce.launch(&state.stream, grid, &arguments) }
}

/// Blocks of x of attention: items, rounded up so that recorded steps serve many lists.
pub(super) fn item_grid(items: usize) -> usize {
    items.max(1).next_power_of_two()
}
