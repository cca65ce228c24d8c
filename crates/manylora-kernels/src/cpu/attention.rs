//! Paged causal attention: exact softmax over the cached positions of each row's own sequence.
//!
//! One task is a run of query vectors (row by row, and within a row the query heads of one key/value head), so that
//! they share every load of K and V; threads draw tasks from a counter. Whatever the tasks look like, an output
//! element is always computed in the same order:
//!
//! - a score is a chain of multiply-adds over the head's width, then times the scale;
//! - the largest score, and the sum of exponentials, are taken in eight lanes (position modulo 8), then over the lanes;
//! - an output element is a chain of multiply-adds over the positions, divided by the sum at the end.
//!
//! So a row depends on its own context only: not on chunks, block ids, the block size, neighbours or threads.
#![expect(clippy::inline_always, reason = "inlined into the function that switches the level's instructions on")]
#![expect(unsafe_code, reason = "threads write disjoint parts of one buffer; K and V are walked by address")]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::bf16;

use super::CpuBackend;
use super::exp::exp;
use super::kv_cache::{AttentionScratch, KvCache};
use super::level::SimdLevel;
use super::memory::Buffer;
use super::tiles::{self, Registers};
use super::vector::{self, Element, LANES, Vector8, VectorKernel};
use crate::backend::{AttentionShape, StorageType};
use crate::batch::{SequenceRows, StepBatch};

/// Positions that one score kernel takes: two vectors.
const TILE: usize = 2 * LANES;
/// Query vectors that share the loads of one score kernel: with two vectors of positions, 12 of 16 registers.
const CHUNK: usize = 6;
/// Most query vectors of a task.
const TASK: usize = 4 * CHUNK;
/// Scores that a task should not exceed, so that they stay in the second-level cache.
const SCORES: usize = 1 << 16;

/// f32 values that one thread needs for contexts of up to `positions`.
pub(super) fn scratch_len(level: SimdLevel, dtype: StorageType, head_dim: usize, positions: usize) -> usize {
    if tiles::tiled(level, dtype) {
        return tiles::attention_values(head_dim);
    }
    TASK * (positions.next_multiple_of(TILE) + TILE) + TASK * head_dim + TILE * head_dim
}

/// Query vectors per task for a sequence whose last row sees `context` positions.
fn task_vectors(tiled: bool, context: usize) -> usize {
    if tiled {
        return tiles::VECTORS;
    }
    (SCORES / context.max(1) / CHUNK).clamp(1, TASK / CHUNK) * CHUNK
}

/// See [`crate::Backend::attention`].
pub(super) fn attention(
    backend: &CpuBackend,
    batch: &StepBatch,
    layer: usize,
    shape: &AttentionShape,
    q: &Buffer,
    cache: &KvCache,
    out: &mut Buffer,
) {
    check(batch, layer, shape, q, cache, out);
    let block_size = cache.shape().block_size;
    let mut scratch = cache.scratch();
    let AttentionScratch { first_task, values, per_thread, threads } = &mut *scratch;
    first_task.clear();
    let level = backend.level;
    let tiled = tiles::tiled(level, cache.shape().dtype);
    let mut tasks = 0;
    for sequence in &batch.sequences {
        first_task.push(tasks);
        let context = (sequence.first_position + sequence.rows) as usize;
        let vectors = sequence.rows as usize * (shape.heads / shape.kv_heads);
        tasks += vectors.div_ceil(task_vectors(tiled, context)) * shape.kv_heads;
    }
    let next = AtomicUsize::new(0);
    let call = Call {
        batch,
        shape,
        tiled,
        first_task,
        tasks,
        next: &next,
        q: q.as_ptr(),
        width: q.width,
        out: out.as_mut_ptr(),
        layer: cache.layer(layer),
        block_stride: cache.block_stride(),
        block_size,
        scratch: values.as_mut_ptr(),
        per_thread: *per_thread,
    };
    let call = &call;
    let dtype = cache.shape().dtype;
    let allowed = *threads;
    let work = |part: usize, parts: usize| {
        assert!(parts <= allowed, "the cache was made for fewer threads");
        match dtype {
            StorageType::Bf16 if tiled => run_tiled(level, call, part),
            StorageType::Bf16 => vector::run(level, Worker::<bf16> { call, part, element: std::marker::PhantomData }),
            StorageType::F32 => vector::run(level, Worker::<f32> { call, part, element: std::marker::PhantomData }),
            StorageType::F16 => unreachable!("refused where it is asked for"),
        }
    };
    if tasks <= 1 { work(0, 1) } else { backend.pool.run(&work) }
}

/// Everything that keeps the address arithmetic below inside its buffers.
fn check(batch: &StepBatch, layer: usize, shape: &AttentionShape, q: &Buffer, cache: &KvCache, out: &Buffer) {
    let kv = cache.shape();
    assert!(layer < kv.layers, "layer {layer} of {}", kv.layers);
    assert!(shape.kv_heads == kv.kv_heads && shape.head_dim == kv.head_dim, "{shape:?} is not the cache's {kv:?}");
    assert!(shape.heads.is_multiple_of(shape.kv_heads), "{shape:?}");
    assert!(q.width == shape.heads * shape.head_dim && out.width == q.width, "widths {} and {}", q.width, out.width);
    assert!(shape.window != Some(0), "a row sees itself");
    cache.check_blocks(&batch.block_tables);
    let mut first_free = 0;
    for sequence in &batch.sequences {
        let [first_row, rows, first_position, table_first, table_len] =
            [sequence.first_row, sequence.rows, sequence.first_position, sequence.table_first, sequence.table_len]
                .map(|value| value as usize);
        let context = first_position + rows;
        // Rows of two sequences would be written by two threads.
        assert!(first_row >= first_free, "{sequence:?} shares rows with the one before");
        first_free = first_row + rows;
        assert!(first_free <= q.rows && first_free <= out.rows, "{first_free} rows do not fit");
        assert!(table_first + table_len <= batch.block_tables.len(), "{sequence:?}: no such block table");
        assert!(context <= table_len * kv.block_size, "{context} positions need more than {table_len} blocks");
        assert!(context <= cache.positions(), "{context} positions are more than the cache has");
    }
}

/// What all threads of one call share.
struct Call<'a> {
    batch: &'a StepBatch,
    shape: &'a AttentionShape,
    /// By tile products.
    tiled: bool,
    first_task: &'a [usize],
    tasks: usize,
    next: &'a AtomicUsize,
    q: *const f32,
    width: usize,
    out: *mut f32,
    layer: *const u8,
    block_stride: usize,
    block_size: usize,
    scratch: *mut f32,
    per_thread: usize,
}

// SAFETY: the pointers are only read, but for `out`, of which every task owns its own vectors, and `scratch`, of which
// every thread owns its own part.
unsafe impl Sync for Call<'_> {}

/// One part of the call's parallel region: draws tasks until none is left.
struct Worker<'a, E> {
    call: &'a Call<'a>,
    part: usize,
    element: std::marker::PhantomData<E>,
}

impl<E: Element> VectorKernel for Worker<'_, E> {
    #[inline(always)]
    fn run<V: Vector8>(self, vector: V) {
        let call = self.call;
        // SAFETY: `attention` checked that there are as many parts as threads.
        let scratch = unsafe { call.scratch.add(self.part * call.per_thread) };
        loop {
            let index = call.next.fetch_add(1, Ordering::Relaxed);
            if index >= call.tasks {
                return;
            }
            // SAFETY: `check` saw that rows, blocks and positions are inside their buffers; no two tasks share a query
            // vector, and the scratch is this thread's.
            unsafe { run_task::<V, E>(vector, call, &Task::new(call, index), scratch) };
        }
    }
}

/// As [`Worker`] by tile products.
fn run_tiled(level: SimdLevel, call: &Call<'_>, part: usize) {
    let mut registers = Registers::of(level);
    let group = call.shape.heads / call.shape.kv_heads;
    // A layer is K then V, each [kv_head][head]; the strides are in elements.
    let head_len = call.block_size * call.shape.head_dim;
    loop {
        let index = call.next.fetch_add(1, Ordering::Relaxed);
        if index >= call.tasks {
            return;
        }
        let task = Task::new(call, index);
        let vectors: Vectors<{ tiles::VECTORS }> = Vectors::new(call, &task, group);
        let table = task.sequence.table_first as usize;
        let keys: *const u16 = call.layer.cast();
        let keys = keys.wrapping_add(task.kv_head * head_len);
        let attention = tiles::Attention {
            low: &vectors.low[..task.count],
            high: &vectors.high[..task.count],
            offset: &vectors.offset[..task.count],
            q: call.q,
            out: call.out,
            scale: call.shape.scale,
            keys,
            values: keys.wrapping_add(call.shape.kv_heads * head_len),
            block_stride: call.block_stride / size_of::<u16>(),
            block_size: call.block_size,
            head_dim: call.shape.head_dim,
            table: &call.batch.block_tables[table..table + task.sequence.table_len as usize],
            scratch: call.scratch.wrapping_add(part * call.per_thread),
        };
        // SAFETY: `check` saw that rows, blocks and positions are inside their buffers; no two tasks share a query vector, and
        // the scratch is this thread's.
        unsafe { attention.run(&mut registers) };
    }
}

/// A run of query vectors of one sequence and one key/value head.
struct Task<'a> {
    sequence: &'a SequenceRows,
    kv_head: usize,
    first: usize,
    count: usize,
}

impl<'a> Task<'a> {
    fn new(call: &Call<'a>, index: usize) -> Self {
        let which = call.first_task.partition_point(|&first| first <= index) - 1;
        let sequence = &call.batch.sequences[which];
        let local = index - call.first_task[which];
        let size = task_vectors(call.tiled, (sequence.first_position + sequence.rows) as usize);
        let vectors = sequence.rows as usize * (call.shape.heads / call.shape.kv_heads);
        // Later rows see more and go first, so that no thread is left with a long task at the end.
        let run = vectors.div_ceil(size) - 1 - local / call.shape.kv_heads;
        let first = run * size;
        Self { sequence, kv_head: local % call.shape.kv_heads, first, count: size.min(vectors - first) }
    }
}

/// The positions `low..high` that each query vector of a task sees, and where its values are in q and out.
struct Vectors<const MOST: usize> {
    low: [usize; MOST],
    high: [usize; MOST],
    offset: [usize; MOST],
}

impl<const MOST: usize> Vectors<MOST> {
    /// `group` query heads share a key/value head.
    #[inline(always)]
    fn new(call: &Call<'_>, task: &Task<'_>, group: usize) -> Self {
        let mut vectors = Self { low: [0; MOST], high: [0; MOST], offset: [0; MOST] };
        for index in 0..task.count {
            let row = (task.first + index) / group;
            let head = task.kv_head * group + (task.first + index) % group;
            let high = task.sequence.first_position as usize + row + 1;
            vectors.high[index] = high;
            vectors.low[index] = call.shape.window.map_or(0, |window| high.saturating_sub(window));
            vectors.offset[index] = (task.sequence.first_row as usize + row) * call.width + head * call.shape.head_dim;
        }
        vectors
    }
}

/// Where K and V of one sequence and key/value head are.
struct Pages<'a, E> {
    table: &'a [u32],
    keys: *const E,
    values: *const E,
    block_stride: usize,
    block_size: usize,
    head_dim: usize,
}

impl<E: Element> Pages<'_, E> {
    /// K at a position: the head's elements are `block_size` apart.
    ///
    /// # Safety
    /// The block table must cover `position`.
    #[inline(always)]
    unsafe fn key(&self, position: usize) -> *const E {
        let block = self.table[position / self.block_size] as usize;
        // SAFETY: blocks of the table are inside the cache.
        unsafe { self.keys.add(block * self.block_stride + position % self.block_size) }
    }

    /// V at a position, and how many positions follow in the block (this one included).
    ///
    /// # Safety
    /// The block table must cover `position`.
    #[inline(always)]
    unsafe fn value(&self, position: usize) -> (*const E, usize) {
        let block = self.table[position / self.block_size] as usize;
        let within = position % self.block_size;
        // SAFETY: blocks of the table are inside the cache.
        let address = unsafe { self.values.add(block * self.block_stride + within * self.head_dim) };
        (address, self.block_size - within)
    }
}

/// Computes the outputs of a task.
///
/// # Safety
/// All of the call's buffers must hold what the task refers to, and `scratch` must be `scratch_len` values of this
/// thread's own.
#[inline(always)]
unsafe fn run_task<V: Vector8, E: Element>(vector: V, call: &Call<'_>, task: &Task<'_>, scratch: *mut f32) {
    let head_dim = call.shape.head_dim;
    let table_first = task.sequence.table_first as usize;
    // A layer is K then V, each [kv_head][head]; the strides are in elements.
    let head_len = call.block_size * head_dim;
    let keys = call.layer.cast::<E>();
    // SAFETY: inside the first block's part of this layer.
    let (keys, values) =
        unsafe { (keys.add(task.kv_head * head_len), keys.add((call.shape.kv_heads + task.kv_head) * head_len)) };
    let pages = Pages {
        table: &call.batch.block_tables[table_first..table_first + task.sequence.table_len as usize],
        keys,
        values,
        block_stride: call.block_stride / size_of::<E>(),
        block_size: call.block_size,
        head_dim,
    };
    let vectors: Vectors<TASK> = Vectors::new(call, task, call.shape.heads / call.shape.kv_heads);
    let low = vectors.low[0];
    let high = vectors.high[task.count - 1];
    let origin = low / TILE * TILE;
    // Close together, so that a short context touches little memory; the extra tile keeps the rows of a power-of-two
    // context out of each other's cache sets.
    let stride = (high - origin).next_multiple_of(TILE) + TILE;
    // SAFETY: the three parts of the scratch, as `scratch_len` counts them.
    let (scores, packed, tile) =
        unsafe { (scratch, scratch.add(TASK * stride), scratch.add(TASK * (stride + head_dim)).cast::<E>()) };

    // Query vectors of a chunk side by side, so that the score kernel reads them in one stream.
    for first in (0..task.count).step_by(CHUNK) {
        let count = CHUNK.min(task.count - first);
        for index in 0..count {
            for column in 0..head_dim {
                // SAFETY: q has this row; `packed` has `TASK * head_dim` values.
                unsafe {
                    let value = *call.q.add(vectors.offset[first + index] + column);
                    packed.add(first * head_dim + column * count + index).write(value);
                }
            }
        }
    }

    let mut position = origin;
    while position < high {
        // SAFETY: positions below `high` are covered by the table; scores have room for whole tiles from `origin` on.
        unsafe {
            let keys = if pages.block_size.is_multiple_of(LANES) {
                let left = pages.key(position);
                let right = if position + LANES < high { pages.key(position + LANES) } else { left };
                Keys { left, right, stride: pages.block_size, head_dim }
            } else {
                gather_keys(&pages, position, high, tile);
                Keys { left: tile, right: tile.add(LANES), stride: TILE, head_dim }
            };
            score_tile(vector, task.count, packed, &keys, call.shape.scale, scores.add(position - origin), stride);
        }
        position += TILE;
    }

    let mut sums = [0.0; TASK];
    for (index, sum) in sums.iter_mut().enumerate().take(task.count) {
        let (low, high) = (vectors.low[index] - origin, vectors.high[index] - origin);
        // SAFETY: this vector's scores, written above up to the end of the tile that holds `high - 1`.
        let row = unsafe { std::slice::from_raw_parts_mut(scores.add(index * stride), high.next_multiple_of(LANES)) };
        *sum = exponentials(vector, row, low, high);
    }

    for index in 0..task.count {
        // SAFETY: out has this vector, and it is this task's.
        unsafe { std::slice::from_raw_parts_mut(call.out.add(vectors.offset[index]), head_dim) }.fill(0.0);
    }
    // Positions that all vectors see are read once for all; each vector's own ones before and after, alone. Masking
    // them with a weight of 0 instead would let a NaN that this row must not see through.
    let all_low = vectors.low[task.count - 1];
    let all_high = vectors.high[0].max(all_low);
    for part in 0..=2 * task.count {
        let (first, count, start, end) = match part.checked_sub(task.count) {
            None => (part, 1, vectors.low[part], all_low.min(vectors.high[part])),
            Some(0) => (0, task.count, all_low, all_high),
            Some(after) => (after - 1, 1, all_high.max(vectors.low[after - 1]), vectors.high[after - 1]),
        };
        let weights = Weights { scores, stride, origin };
        // SAFETY: the task's own outputs, and positions that its vectors see.
        unsafe { accumulate(vector, &pages, &vectors, first..first + count, start..end, weights, call.out) };
    }
    for (&offset, &sum) in vectors.offset.iter().zip(&sums).take(task.count) {
        // SAFETY: out has this vector, and it is this task's.
        let out = unsafe { std::slice::from_raw_parts_mut(call.out.add(offset), head_dim) };
        let sum = vector.splat(sum);
        vector::for_each_vector!(vector, out, |lanes| vector.div(lanes, sum));
    }
}

/// Two vectors of positions of K: element `d` of the head is `d * stride` further on.
struct Keys<E> {
    left: *const E,
    right: *const E,
    stride: usize,
    head_dim: usize,
}

/// Copies a tile of K out of blocks whose size is not a multiple of a vector.
///
/// # Safety
/// The table must cover positions below `high`; `tile` must have `TILE * head_dim` values.
#[inline(always)]
unsafe fn gather_keys<E: Element>(pages: &Pages<'_, E>, position: usize, high: usize, tile: *mut E) {
    for lane in 0..TILE {
        // Lanes beyond the context repeat the last position; nothing reads their scores.
        // SAFETY: below `high`.
        let key = unsafe { pages.key((position + lane).min(high - 1)) };
        for column in 0..pages.head_dim {
            // SAFETY: K of one position has `head_dim` elements, `block_size` apart.
            unsafe { tile.add(column * TILE + lane).write(*key.add(column * pages.block_size)) };
        }
    }
}

/// Scores of `count` packed query vectors against one tile of K.
///
/// # Safety
/// `packed` holds the chunks of `count` vectors, `keys` a tile, and `out + i * out_stride` has room for a tile.
#[inline(always)]
unsafe fn score_tile<V: Vector8, E: Element>(
    vector: V,
    count: usize,
    packed: *const f32,
    keys: &Keys<E>,
    scale: f32,
    out: *mut f32,
    out_stride: usize,
) {
    let mut first = 0;
    while first < count {
        // SAFETY: the caller's promise, chunk by chunk.
        unsafe {
            let query = packed.add(first * keys.head_dim);
            let out = out.add(first * out_stride);
            match count - first {
                1 => score_chunk::<V, E, 1>(vector, query, keys, scale, out, out_stride),
                2 => score_chunk::<V, E, 2>(vector, query, keys, scale, out, out_stride),
                3 => score_chunk::<V, E, 3>(vector, query, keys, scale, out, out_stride),
                4 => score_chunk::<V, E, 4>(vector, query, keys, scale, out, out_stride),
                5 => score_chunk::<V, E, 5>(vector, query, keys, scale, out, out_stride),
                _ => score_chunk::<V, E, CHUNK>(vector, query, keys, scale, out, out_stride),
            }
        }
        first += CHUNK;
    }
}

/// Scores of `Q` query vectors, packed `[head_dim][Q]`, against sixteen positions.
///
/// # Safety
/// As [`score_tile`].
#[inline(always)]
unsafe fn score_chunk<V: Vector8, E: Element, const Q: usize>(
    vector: V,
    query: *const f32,
    keys: &Keys<E>,
    scale: f32,
    out: *mut f32,
    out_stride: usize,
) {
    let mut sums = [[vector.splat(0.0); 2]; Q];
    for column in 0..keys.head_dim {
        // SAFETY: K has `head_dim` elements per position, the query is packed `[head_dim][Q]`.
        unsafe {
            let left = E::load(vector, &*keys.left.add(column * keys.stride).cast::<[E; LANES]>());
            let right = E::load(vector, &*keys.right.add(column * keys.stride).cast::<[E; LANES]>());
            for (index, sum) in sums.iter_mut().enumerate() {
                let value = vector.splat(*query.add(column * Q + index));
                sum[0] = vector.mul_add(value, left, sum[0]);
                sum[1] = vector.mul_add(value, right, sum[1]);
            }
        }
    }
    let scale = vector.splat(scale);
    for (index, sum) in sums.iter().enumerate() {
        // SAFETY: each row of scores has room for the tile.
        unsafe {
            let out = out.add(index * out_stride);
            vector.store(vector.mul(sum[0], scale), &mut *out.cast::<[f32; LANES]>());
            vector.store(vector.mul(sum[1], scale), &mut *out.add(LANES).cast::<[f32; LANES]>());
        }
    }
}

/// Turns the scores `low..high` of a row into exponentials relative to the largest one, and returns their sum.
/// `scores` is a whole number of vectors, of which everything outside `low..high` is overwritten.
#[inline(always)]
fn exponentials<V: Vector8>(vector: V, scores: &mut [f32], low: usize, high: usize) -> f32 {
    scores[low / LANES * LANES..low].fill(f32::NEG_INFINITY);
    scores[high..].fill(f32::NEG_INFINITY);
    let (chunks, _) = scores[low / LANES * LANES..].as_chunks_mut::<LANES>();
    let mut largest = vector.splat(f32::NEG_INFINITY);
    for chunk in &*chunks {
        largest = vector.max(vector.load(chunk), largest);
    }
    let largest = vector.splat(vector.largest(largest));
    let mut sum = vector.splat(0.0);
    for chunk in chunks {
        let value = exp(vector, vector.sub(vector.load(chunk), largest));
        vector.store(value, chunk);
        sum = vector.add(sum, value);
    }
    vector.sum(sum)
}

/// The weights of a task's query vectors: `stride` apart, the first one of position `origin`.
#[derive(Clone, Copy)]
struct Weights {
    scores: *const f32,
    stride: usize,
    origin: usize,
}

/// Adds weight x V over `positions` to the outputs of the query vectors `which`.
///
/// # Safety
/// As [`run_task`]; the weights of these vectors must be there, and the table must cover the positions.
#[inline(always)]
unsafe fn accumulate<V: Vector8, E: Element>(
    vector: V,
    pages: &Pages<'_, E>,
    vectors: &Vectors<TASK>,
    which: Range<usize>,
    positions: Range<usize>,
    weights: Weights,
    out: *mut f32,
) {
    let mut position = positions.start;
    while position < positions.end {
        // SAFETY: the table covers the positions.
        let (values, left) = unsafe { pages.value(position) };
        let run = left.min(positions.end - position);
        let mut first = which.start;
        while first < which.end {
            let count = (which.end - first).min(4);
            // SAFETY: the caller's promise.
            unsafe {
                let from = weights.scores.add(first * weights.stride + position - weights.origin);
                let run = Run {
                    values,
                    positions: run,
                    weights: from,
                    score_stride: weights.stride,
                    head_dim: pages.head_dim,
                    out,
                };
                let offsets = &vectors.offset[first..];
                match count {
                    1 => run.columns::<V, 1, 8>(vector, offsets),
                    2 => run.columns::<V, 2, 4>(vector, offsets),
                    3 => run.columns::<V, 3, 4>(vector, offsets),
                    _ => run.columns::<V, 4, 2>(vector, offsets),
                }
            }
            first += count;
        }
        position += run;
    }
}

/// Positions of one block, and the weights of a chunk of query vectors on them.
#[derive(Clone, Copy)]
struct Run<E> {
    values: *const E,
    positions: usize,
    weights: *const f32,
    score_stride: usize,
    head_dim: usize,
    out: *mut f32,
}

impl<E: Element> Run<E> {
    /// All columns of `Q` query vectors whose outputs start at `offsets`, `D` vectors of columns at a time.
    ///
    /// # Safety
    /// `values` must be `positions` positions of V, `weights` as many values per vector.
    #[inline(always)]
    unsafe fn columns<V: Vector8, const Q: usize, const D: usize>(self, vector: V, offsets: &[usize]) {
        let mut out = [self.out; Q];
        for (out, &offset) in out.iter_mut().zip(offsets) {
            // SAFETY: the output of a query vector of this task.
            *out = unsafe { self.out.add(offset) };
        }
        let mut column = 0;
        // SAFETY: columns below `head_dim` of V and out.
        unsafe {
            while column + D * LANES <= self.head_dim {
                self.block::<V, Q, D>(vector, column, out);
                column += D * LANES;
            }
            while column + LANES <= self.head_dim {
                self.block::<V, Q, 1>(vector, column, out);
                column += LANES;
            }
            if column < self.head_dim {
                self.tail::<V, Q>(vector, column, out);
            }
        }
    }

    /// `D` vectors of columns.
    ///
    /// # Safety
    /// As [`Self::columns`], and all the columns must exist.
    #[inline(always)]
    unsafe fn block<V: Vector8, const Q: usize, const D: usize>(self, vector: V, column: usize, out: [*mut f32; Q]) {
        let mut sums = [[vector.splat(0.0); D]; Q];
        for (sums, out) in sums.iter_mut().zip(out) {
            for (index, sum) in sums.iter_mut().enumerate() {
                // SAFETY: columns of the output.
                *sum = vector.load(unsafe { &*out.add(column + index * LANES).cast::<[f32; LANES]>() });
            }
        }
        for position in 0..self.positions {
            let mut values = [vector.splat(0.0); D];
            for (index, value) in values.iter_mut().enumerate() {
                // SAFETY: columns of V at this position.
                let address = unsafe { self.values.add(position * self.head_dim + column + index * LANES) };
                // SAFETY: as above.
                *value = E::load(vector, unsafe { &*address.cast::<[E; LANES]>() });
            }
            for (query, sums) in sums.iter_mut().enumerate() {
                // SAFETY: the weight of this position.
                let weight = vector.splat(unsafe { *self.weights.add(query * self.score_stride + position) });
                for (sum, &value) in sums.iter_mut().zip(&values) {
                    *sum = vector.mul_add(weight, value, *sum);
                }
            }
        }
        for (sums, out) in sums.iter().zip(out) {
            for (index, &sum) in sums.iter().enumerate() {
                // SAFETY: columns of the output.
                vector.store(sum, unsafe { &mut *out.add(column + index * LANES).cast::<[f32; LANES]>() });
            }
        }
    }

    /// The columns that do not fill a vector.
    ///
    /// # Safety
    /// As [`Self::columns`].
    #[inline(always)]
    unsafe fn tail<V: Vector8, const Q: usize>(self, vector: V, column: usize, out: [*mut f32; Q]) {
        let columns = self.head_dim - column;
        for (query, out) in out.into_iter().enumerate() {
            // SAFETY: columns of the output.
            let out = unsafe { std::slice::from_raw_parts_mut(out.add(column), columns) };
            let mut sum = vector.load_padded(out);
            for position in 0..self.positions {
                let mut values = [0.0; LANES];
                for (index, value) in values.iter_mut().take(columns).enumerate() {
                    // SAFETY: columns of V at this position.
                    *value = unsafe { *self.values.add(position * self.head_dim + column + index) }.to_f32();
                }
                // SAFETY: the weight of this position.
                let weight = vector.splat(unsafe { *self.weights.add(query * self.score_stride + position) });
                sum = vector.mul_add(weight, vector.load(&values), sum);
            }
            vector.store_prefix(sum, out);
        }
    }
}
