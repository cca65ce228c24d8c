//! Biases and norms of heads, rotary position embedding, and the write of K and V to the cache, in one pass.
#![expect(clippy::inline_always, reason = "inlined into the function that switches the level's instructions on")]
#![expect(unsafe_code, reason = "threads write disjoint heads of q and k and disjoint slots of the cache")]

use half::bf16;

use super::CpuBackend;
use super::kv_cache::KvCache;
use super::memory::{AlignedVec, Buffer};
use super::norm::normalize;
use super::parallel::{Shared, run_units};
use super::vector::{self, Element, LANES, Vector8, VectorKernel};
use crate::backend::{AttentionShape, HeadInputs, StorageType};
use crate::batch::StepBatch;

/// Values that a thread should have to work on before another one is worth waking.
const GRAIN: usize = 4096;

/// See [`crate::Backend::rope_kv_write`].
#[expect(clippy::too_many_arguments, reason = "the operation's own arguments")]
pub(super) fn rope_kv_write(
    backend: &CpuBackend,
    batch: &StepBatch,
    layer: usize,
    shape: &AttentionShape,
    heads: &HeadInputs<'_, CpuBackend>,
    cos: &AlignedVec<f32>,
    sin: &AlignedVec<f32>,
    q: &mut Buffer,
    k: &mut Buffer,
    v: &Buffer,
    cache: &mut KvCache,
) {
    let rows = batch.rows();
    let kv = *cache.shape();
    let (head_dim, half) = (shape.head_dim, shape.head_dim / 2);
    assert!(layer < kv.layers, "layer {layer} of {}", kv.layers);
    assert!(head_dim.is_multiple_of(2), "pairs need an even head_dim, not {head_dim}");
    assert!(shape.kv_heads == kv.kv_heads && head_dim == kv.head_dim, "{shape:?} is not the cache's {kv:?}");
    assert!(shape.heads.is_multiple_of(shape.kv_heads), "{shape:?}");
    assert!(q.width == shape.heads * head_dim && k.width == shape.kv_heads * head_dim && v.width == k.width);
    assert!(rows <= q.rows && rows <= k.rows && rows <= v.rows, "{rows} rows do not fit");
    assert!(batch.positions.len() == rows && batch.slot_mapping.len() == rows, "{rows} rows need positions and slots");
    let table = cos.len().min(sin.len());
    assert!(batch.positions.iter().all(|&position| (position as usize + 1) * half <= table), "beyond the rotary table");
    assert!(batch.slot_mapping.iter().all(|&slot| (slot as usize) < cache.positions()), "slot outside the cache");

    for (bias, width) in [(heads.q_bias, q.width), (heads.k_bias, k.width), (heads.v_bias, v.width)] {
        assert!(bias.is_none_or(|bias| bias.len() == width), "a bias has one value per output");
    }
    for norm in [heads.q_norm, heads.k_norm].into_iter().flatten() {
        assert!(norm.len() == head_dim, "a norm of heads has one value per column");
    }

    let call = Call {
        batch,
        shape,
        heads,
        cos,
        sin,
        q: Shared::new(q.as_mut_ptr()),
        k: Shared::new(k.as_mut_ptr()),
        v,
        layer: Shared::new(cache.layer_mut(layer)),
        block_stride: cache.block_stride(),
        block_size: kv.block_size,
    };
    let call = &call;
    let level = backend.level;
    let per_unit = (shape.heads / shape.kv_heads + 2) * head_dim;
    run_units(&backend.pool, rows * shape.kv_heads, GRAIN / per_unit, &|units| match kv.dtype {
        StorageType::Bf16 => vector::run(level, Share::<bf16> { call, units, element: std::marker::PhantomData }),
        StorageType::F32 => vector::run(level, Share::<f32> { call, units, element: std::marker::PhantomData }),
        StorageType::F16 => unreachable!("refused where it is asked for"),
    });
}

struct Call<'a> {
    batch: &'a StepBatch,
    shape: &'a AttentionShape,
    heads: &'a HeadInputs<'a, CpuBackend>,
    cos: &'a [f32],
    sin: &'a [f32],
    q: Shared<f32>,
    k: Shared<f32>,
    v: &'a Buffer,
    layer: Shared<u8>,
    block_stride: usize,
    block_size: usize,
}

/// Units of one thread; a unit is a row's key/value head with its query heads.
struct Share<'a, E> {
    call: &'a Call<'a>,
    units: std::ops::Range<usize>,
    element: std::marker::PhantomData<E>,
}

impl<E: Element> VectorKernel for Share<'_, E> {
    #[inline(always)]
    fn run<V: Vector8>(self, vector: V) {
        let call = self.call;
        let AttentionShape { heads, kv_heads, head_dim, .. } = *call.shape;
        let half = head_dim / 2;
        let group = heads / kv_heads;
        let head_len = call.block_size * head_dim;
        for unit in self.units {
            let (row, kv_head) = (unit / kv_heads, unit % kv_heads);
            let table = call.batch.positions[row] as usize * half;
            let (cos, sin) = (&call.cos[table..table + half], &call.sin[table..table + half]);
            for head in kv_head * group..(kv_head + 1) * group {
                // SAFETY: `rope_kv_write` checked the rows; a query head belongs to one unit.
                let q = unsafe {
                    std::slice::from_raw_parts_mut(call.q.get().add((row * heads + head) * head_dim), head_dim)
                };
                prepare(vector, q, head, call.heads.q_bias, call.heads.q_norm, call.heads.epsilon);
                rotate(vector, q, cos, sin);
            }
            // SAFETY: as for q.
            let k = unsafe {
                std::slice::from_raw_parts_mut(call.k.get().add((row * kv_heads + kv_head) * head_dim), head_dim)
            };
            prepare(vector, k, kv_head, call.heads.k_bias, call.heads.k_norm, call.heads.epsilon);
            rotate(vector, k, cos, sin);
            let v_bias = call.heads.v_bias.map(|bias| &bias[kv_head * head_dim..(kv_head + 1) * head_dim]);

            let slot = call.batch.slot_mapping[row] as usize;
            let (block, within) = (slot / call.block_size, slot % call.block_size);
            // SAFETY: the slot is inside the cache, and no two rows write the same one.
            unsafe {
                let start = call.layer.get().add(block * call.block_stride).cast::<E>();
                let keys = start.add(kv_head * head_len + within);
                for (column, &value) in k.iter().enumerate() {
                    keys.add(column * call.block_size).write(E::from_f32(value));
                }
                let values = start.add((kv_heads + kv_head) * head_len + within * head_dim);
                let v = &call.v.row(row)[kv_head * head_dim..(kv_head + 1) * head_dim];
                for (column, &value) in v.iter().enumerate() {
                    let value = v_bias.map_or(value, |bias| value + bias[column]);
                    values.add(column).write(E::from_f32(value));
                }
            }
        }
    }
}

/// Adds a head's part of the bias and normalizes the head.
#[inline(always)]
fn prepare<V: Vector8>(
    vector: V,
    values: &mut [f32],
    head: usize,
    bias: Option<&AlignedVec<f32>>,
    norm: Option<&AlignedVec<f32>>,
    epsilon: f32,
) {
    if let Some(bias) = bias {
        let first = head * values.len();
        for (value, bias) in values.iter_mut().zip(&bias[first..]) {
            *value += bias;
        }
    }
    if let Some(norm) = norm {
        normalize(vector, values, norm, epsilon);
    }
}

/// Rotates the pairs (i, i + half) of one head.
#[inline(always)]
fn rotate<V: Vector8>(vector: V, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (left, right) = head.split_at_mut(cos.len());
    let (left, left_tail) = left.as_chunks_mut::<LANES>();
    let (right, right_tail) = right.as_chunks_mut::<LANES>();
    let (cos, cos_tail) = cos.as_chunks::<LANES>();
    let (sin, sin_tail) = sin.as_chunks::<LANES>();
    for ((left, right), (cos, sin)) in left.iter_mut().zip(right).zip(cos.iter().zip(sin)) {
        let pair = (vector.load(left), vector.load(right));
        let (first, second) = rotate_lanes(vector, pair, vector.load(cos), vector.load(sin));
        vector.store(first, left);
        vector.store(second, right);
    }
    if !left_tail.is_empty() {
        let pair = (vector.load_padded(left_tail), vector.load_padded(right_tail));
        let (cos, sin) = (vector.load_padded(cos_tail), vector.load_padded(sin_tail));
        let (first, second) = rotate_lanes(vector, pair, cos, sin);
        vector.store_prefix(first, left_tail);
        vector.store_prefix(second, right_tail);
    }
}

/// `(a cos - b sin, b cos + a sin)`
#[inline(always)]
fn rotate_lanes<V: Vector8>(
    vector: V,
    (a, b): (V::Lanes, V::Lanes),
    cos: V::Lanes,
    sin: V::Lanes,
) -> (V::Lanes, V::Lanes) {
    let first = vector.sub(vector.mul(a, cos), vector.mul(b, sin));
    let second = vector.add(vector.mul(b, cos), vector.mul(a, sin));
    (first, second)
}
