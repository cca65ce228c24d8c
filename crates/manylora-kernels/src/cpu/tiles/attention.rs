//! Attention by tile products, over a bf16 cache: as exact as the f32 kernels, and many times faster.
//!
//! A query vector is the sum of three bf16 vectors, and so is a row of weights; K and V are bf16 already. So each product is
//! exact, and only the order of additions differs from f32: `tdpbf16ps` adds up what three passes over the same K or V give.
//!
//! Positions are taken in chunks of [`CHUNK`] from position 0 on, with a running maximum: what was summed before is
//! multiplied with e^(old - new) when a chunk raises it. A row that sees nothing of a chunk, or whose maximum stays, is left as
//! it is bit for bit (factor 1, weights 0), so that a row depends on its own context only, whatever shares its task. Zero
//! weights must not meet infinities, though: where a V beyond some row's context is not finite, rows go alone with it masked.
#![expect(unsafe_code, reason = "tile products and SIMD intrinsics over pointers")]

use std::arch::x86_64::{
    __m256bh, __m256i, __m512, __m512i, _mm256_loadu_si256, _mm256_storeu_si256, _mm512_add_ps, _mm512_castsi512_ps,
    _mm512_cvtepu16_epi32, _mm512_cvtneps_pbh, _mm512_div_ps, _mm512_loadu_ps, _mm512_max_ps, _mm512_mul_ps,
    _mm512_or_si512, _mm512_reduce_add_ps, _mm512_reduce_max_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32,
    _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps,
};

use super::amx::{
    Scores, TILE_BYTES, TILE_COLUMNS, TILE_LINE, TILE_PAIRS, TileShape, Tiles, Weighted, scores, weighted,
};
use super::exp::exponential;
use super::{Registers, TILE_INPUTS, TILE_ROWS};

/// Most query vectors of a task.
pub(in crate::cpu) const VECTORS: usize = 8 * TILE_ROWS;
/// Positions that are taken together.
const CHUNK: usize = 256;
/// bf16 vectors that an f32 vector is the sum of.
const PARTS: usize = 3;
/// Values between two rows of scores: the line more keeps them out of each other's cache sets.
const STRIDE: usize = CHUNK + 16;
/// Columns of the outputs that pass together.
const COLUMNS: usize = 4 * TILE_COLUMNS;

const TILE: usize = TILE_BYTES / 4;

/// f32 values that a thread needs.
pub(in crate::cpu) const fn attention_values(head_dim: usize) -> usize {
    Layout::new(head_dim).values
}

/// Where things lie in a thread's scratch, in f32 values.
struct Layout {
    /// Tiles of 32 columns.
    steps: usize,
    /// Columns of V, filled up.
    columns: usize,
    keys: usize,
    values_of: usize,
    scores: usize,
    weights: usize,
    outputs: usize,
    largest: usize,
    sums: usize,
    values: usize,
}

impl Layout {
    const fn new(head_dim: usize) -> Self {
        let steps = head_dim.div_ceil(TILE_INPUTS);
        let columns = head_dim.div_ceil(COLUMNS) * COLUMNS;
        let keys = VECTORS / TILE_ROWS * PARTS * steps * TILE;
        let values_of = keys + CHUNK / TILE_COLUMNS * steps * TILE;
        let scores = values_of + CHUNK / TILE_INPUTS * (columns / TILE_COLUMNS) * TILE;
        let weights = scores + VECTORS * STRIDE;
        let outputs = weights + VECTORS / TILE_ROWS * (CHUNK / TILE_INPUTS) * PARTS * TILE;
        let largest = outputs + VECTORS * columns;
        let sums = largest + VECTORS;
        Self { steps, columns, keys, values_of, scores, weights, outputs, largest, sums, values: sums + VECTORS * 16 }
    }
}

/// Query vectors that see positions of one sequence and key/value head.
pub(in crate::cpu) struct Attention<'a> {
    /// For each vector: the positions that it sees, and where it is in q and out. Neither bound ever falls.
    pub(in crate::cpu) low: &'a [usize],
    pub(in crate::cpu) high: &'a [usize],
    pub(in crate::cpu) offset: &'a [usize],
    pub(in crate::cpu) q: *const f32,
    pub(in crate::cpu) out: *mut f32,
    pub(in crate::cpu) scale: f32,
    /// K and V of the head in block 0, and from a block to the next, in values.
    pub(in crate::cpu) keys: *const u16,
    pub(in crate::cpu) values: *const u16,
    pub(in crate::cpu) block_stride: usize,
    pub(in crate::cpu) block_size: usize,
    pub(in crate::cpu) head_dim: usize,
    pub(in crate::cpu) table: &'a [u32],
    /// [`attention_values`] values.
    pub(in crate::cpu) scratch: *mut f32,
}

impl Attention<'_> {
    /// Computes the outputs.
    ///
    /// # Safety
    /// The pointers are valid for what they are said to be, the table covers all positions, there are no more than [`VECTORS`]
    /// vectors, and the level has tiles.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    pub(in crate::cpu) unsafe fn run(&self, registers: &mut Registers) {
        let registers = registers.get();
        let layout = Layout::new(self.head_dim);
        let count = self.high.len();
        let at = |place: usize| self.scratch.wrapping_add(place);
        // SAFETY: the scratch is as large as the layout says.
        unsafe {
            self.split_queries(&layout);
            std::slice::from_raw_parts_mut(at(layout.outputs), count * layout.columns).fill(0.0);
            std::slice::from_raw_parts_mut(at(layout.largest), count).fill(f32::NEG_INFINITY);
            std::slice::from_raw_parts_mut(at(layout.sums), count * 16).fill(0.0);
        }
        let (low, high) = (self.low[0], self.high[count - 1]);
        for first in (low / CHUNK * CHUNK..high).step_by(CHUNK) {
            let last = (first + CHUNK).min(high);
            // Vectors that see something of the chunk: bounds never fall.
            let from = self.high.partition_point(|&high| high <= first) / TILE_ROWS * TILE_ROWS;
            let to = self.low.partition_point(|&low| low < last);
            // SAFETY: passed on.
            unsafe {
                self.gather_keys(&layout, first, last);
                self.score(&layout, registers, (from, to), last - first);
                for vector in from..to {
                    self.weigh(&layout, vector, first, last - first);
                }
                let finite = self.gather_values(&layout, first, last);
                if finite || (self.high[from] >= last && self.low[to - 1] <= first) {
                    for group in (from..to).step_by(TILE_ROWS) {
                        let rows = (to - group).min(TILE_ROWS);
                        self.add_up(&layout, registers, group, rows, last - first);
                    }
                } else {
                    self.add_up_masked(&layout, registers, (from, to), (first, last));
                }
            }
        }
        for (vector, &offset) in self.offset.iter().enumerate() {
            // SAFETY: the vector's sums and outputs.
            unsafe {
                let sum = _mm512_reduce_add_ps(_mm512_loadu_ps(at(layout.sums + vector * 16)));
                let outputs = at(layout.outputs + vector * layout.columns);
                let mut line = [0.0; 16];
                for column in (0..self.head_dim).step_by(16) {
                    let value = _mm512_div_ps(_mm512_loadu_ps(outputs.add(column)), _mm512_set1_ps(sum));
                    let columns = (self.head_dim - column).min(16);
                    if columns == 16 {
                        _mm512_storeu_ps(self.out.add(offset + column), value);
                    } else {
                        _mm512_storeu_ps(line.as_mut_ptr(), value);
                        std::ptr::copy_nonoverlapping(line.as_ptr(), self.out.add(offset + column), columns);
                    }
                }
            }
        }
    }

    /// Query vectors as tiles: `[group][step][part][16 vectors][32 columns]`, scaled.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn split_queries(&self, layout: &Layout) {
        for (vector, &offset) in self.offset.iter().enumerate() {
            let (group, line) = (vector / TILE_ROWS, vector % TILE_ROWS);
            for step in 0..layout.steps {
                let mut columns = [0.0f32; TILE_INPUTS];
                let first = step * TILE_INPUTS;
                let there = (self.head_dim - first).min(TILE_INPUTS);
                // SAFETY: the vector has `head_dim` values; its tiles are in the scratch.
                unsafe {
                    std::ptr::copy_nonoverlapping(self.q.add(offset + first), columns.as_mut_ptr(), there);
                    for half in 0..2 {
                        let parts = split(_mm512_loadu_ps(columns.as_ptr().add(half * 16)));
                        for (part, &values) in parts.iter().enumerate() {
                            let tile = (group * layout.steps + step) * PARTS + part;
                            let out = self.scratch.cast::<u8>().add(tile * TILE_BYTES + line * TILE_LINE + half * 32);
                            _mm256_storeu_si256(out.cast(), values);
                        }
                    }
                }
            }
        }
    }

    /// K of positions `first..last`: for each 16 of them `[step][16 pairs of columns][16 positions][2]`. What lies beyond is zero.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn gather_keys(&self, layout: &Layout, first: usize, last: usize) {
        let whole_blocks = self.block_size.is_multiple_of(TILE_COLUMNS);
        for (index, position) in (first..last).step_by(TILE_COLUMNS).enumerate() {
            let tiles = self.scratch.wrapping_add(layout.keys + index * layout.steps * TILE).cast::<u32>();
            // SAFETY: positions that the table covers; a block of whole tiles has all 16 positions of one.
            unsafe {
                if whole_blocks {
                    let keys = self.key(position);
                    for pair in 0..layout.steps * TILE_PAIRS {
                        let row = |column: usize| {
                            if column < self.head_dim {
                                _mm512_cvtepu16_epi32(_mm256_loadu_si256(keys.add(column * self.block_size).cast()))
                            } else {
                                _mm512_cvtepu16_epi32(std::mem::zeroed::<__m256i>())
                            }
                        };
                        let (low, high) = (row(2 * pair), row(2 * pair + 1));
                        let pairs = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
                        _mm512_storeu_si512(tiles.add(pair * TILE_COLUMNS).cast(), pairs);
                    }
                } else {
                    for lane in 0..TILE_COLUMNS {
                        let keys = (position + lane < last).then(|| self.key(position + lane));
                        for pair in 0..layout.steps * TILE_PAIRS {
                            let value = |column: usize| match keys {
                                Some(keys) if column < self.head_dim => u32::from(*keys.add(column * self.block_size)),
                                _ => 0,
                            };
                            let pairs = value(2 * pair) | value(2 * pair + 1) << 16;
                            tiles.add(pair * TILE_COLUMNS + lane).write(pairs);
                        }
                    }
                }
            }
        }
    }

    /// K at a position: its columns are `block_size` apart.
    unsafe fn key(&self, position: usize) -> *const u16 {
        let block = self.table[position / self.block_size] as usize;
        // SAFETY: the table covers the position.
        unsafe { self.keys.add(block * self.block_stride + position % self.block_size) }
    }

    /// V at a position.
    unsafe fn value(&self, position: usize) -> *const u16 {
        let block = self.table[position / self.block_size] as usize;
        // SAFETY: the table covers the position.
        unsafe { self.values.add(block * self.block_stride + position % self.block_size * self.head_dim) }
    }

    /// V of positions `first..last`: for each 32 of them `[groups of 16 columns][16 pairs of positions][16 columns][2]`. What lies
    /// beyond is zero. Whether all of it is finite.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn gather_values(&self, layout: &Layout, first: usize, last: usize) -> bool {
        let groups = layout.columns / TILE_COLUMNS;
        let mut exponents = 0u32;
        for (index, position) in (first..last).step_by(2).enumerate() {
            let (step, pair) = (index / TILE_PAIRS, index % TILE_PAIRS);
            // SAFETY: positions that the table covers, and tiles of the scratch.
            unsafe {
                let low = self.value(position);
                let high = (position + 1 < last).then(|| self.value(position + 1));
                for group in 0..groups {
                    let tile = self.scratch.add(layout.values_of + (step * groups + group) * TILE).cast::<u32>();
                    let columns = self.head_dim.saturating_sub(group * TILE_COLUMNS).min(TILE_COLUMNS);
                    let row = |values: *const u16| {
                        let values = values.add(group * TILE_COLUMNS);
                        if columns == TILE_COLUMNS {
                            _mm512_cvtepu16_epi32(_mm256_loadu_si256(values.cast()))
                        } else {
                            let mut line = [0u16; TILE_COLUMNS];
                            std::ptr::copy_nonoverlapping(values, line.as_mut_ptr(), columns);
                            _mm512_cvtepu16_epi32(_mm256_loadu_si256(line.as_ptr().cast()))
                        }
                    };
                    let none = _mm512_cvtepu16_epi32(std::mem::zeroed::<__m256i>());
                    let (low, high) = if columns == 0 { (none, none) } else { (row(low), high.map_or(none, row)) };
                    let pairs = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
                    exponents |= u32::from(not_finite(low) | not_finite(high));
                    _mm512_storeu_si512(tile.add(pair * TILE_COLUMNS).cast(), pairs);
                }
            }
        }
        // The rest of the last step.
        let pairs = (last - first).div_ceil(2);
        for pair in pairs..pairs.next_multiple_of(TILE_PAIRS) {
            let (step, pair) = (pair / TILE_PAIRS, pair % TILE_PAIRS);
            for group in 0..groups {
                // SAFETY: tiles of the scratch.
                unsafe {
                    let tile = self.scratch.add(layout.values_of + (step * groups + group) * TILE);
                    _mm512_storeu_ps(tile.add(pair * TILE_COLUMNS), _mm512_setzero_ps());
                }
            }
        }
        exponents == 0
    }

    /// Scores of the vectors' groups against `count` positions, two groups by two tiles of positions.
    unsafe fn score(&self, layout: &Layout, registers: &mut Tiles, (from, to): (usize, usize), count: usize) {
        let query = PARTS * layout.steps * TILE_BYTES;
        for group in (from..to).step_by(2 * TILE_ROWS) {
            let first = (to - group).min(TILE_ROWS);
            let second = (to - group).saturating_sub(TILE_ROWS).min(TILE_ROWS);
            registers.shape(TileShape { first, second: second.max(1), columns: TILE_COLUMNS, pairs: TILE_PAIRS });
            for tile in (0..count.div_ceil(TILE_COLUMNS)).step_by(2) {
                // The second tile of an odd number is one of whatever is there: its scores are not read.
                let queries = self.scratch.cast::<u8>().wrapping_add(group / TILE_ROWS * query);
                let keys = self.scratch.wrapping_add(layout.keys + tile * layout.steps * TILE).cast::<u8>();
                let scores_of = |group: usize| layout.scores + group * STRIDE + tile * TILE_COLUMNS;
                let job = Scores {
                    queries: [queries, if second > 0 { queries.wrapping_add(query) } else { queries }],
                    keys: [keys, keys.wrapping_add(layout.steps * TILE_BYTES)],
                    steps: layout.steps,
                    results: [scores_of(group), scores_of(group + TILE_ROWS)]
                        .map(|place| self.scratch.wrapping_add(place)),
                    stride: STRIDE * 4,
                    both: second > 0,
                };
                // SAFETY: the shape is the job's; tiles and scores are in the scratch.
                unsafe { scores(&job) };
            }
        }
    }

    /// A vector's scores of positions `first..first + count` to weights, relative to the largest so far; what was summed before
    /// follows.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn weigh(&self, layout: &Layout, vector: usize, first: usize, count: usize) {
        let low = self.low[vector].saturating_sub(first).min(count);
        let high = self.high[vector].saturating_sub(first).min(count).max(low);
        let padded = count.next_multiple_of(TILE_INPUTS);
        // SAFETY: the vector's own rows of the scratch; rows of scores have room for whole steps.
        unsafe {
            let row = std::slice::from_raw_parts_mut(self.scratch.add(layout.scores + vector * STRIDE), padded);
            row[..low].fill(f32::NEG_INFINITY);
            row[high..].fill(f32::NEG_INFINITY);
            let scale = _mm512_set1_ps(self.scale);
            let mut largest = _mm512_set1_ps(f32::NEG_INFINITY);
            for place in (0..padded).step_by(16) {
                let value = _mm512_mul_ps(_mm512_loadu_ps(row.as_ptr().add(place)), scale);
                // A NaN on the left loses.
                largest = _mm512_max_ps(value, largest);
            }
            let old = *self.scratch.add(layout.largest + vector);
            let new = _mm512_reduce_max_ps(largest).max(old);
            self.scratch.add(layout.largest + vector).write(new);
            let shift = if new == f32::NEG_INFINITY { 0.0 } else { new };
            let sums = self.scratch.add(layout.sums + vector * 16);
            let mut sum = _mm512_loadu_ps(sums);
            if new != old {
                let factor = exponential(_mm512_set1_ps(old - shift));
                sum = _mm512_mul_ps(sum, factor);
                let outputs = self.scratch.add(layout.outputs + vector * layout.columns);
                for column in (0..layout.columns).step_by(16) {
                    let value = _mm512_loadu_ps(outputs.add(column));
                    _mm512_storeu_ps(outputs.add(column), _mm512_mul_ps(value, factor));
                }
            }
            let shift = _mm512_set1_ps(shift);
            let (group, line) = (vector / TILE_ROWS, vector % TILE_ROWS);
            for place in (0..padded).step_by(16) {
                let value = _mm512_mul_ps(_mm512_loadu_ps(row.as_ptr().add(place)), scale);
                let weight = exponential(_mm512_sub_ps(value, shift));
                sum = _mm512_add_ps(sum, weight);
                let step = group * (CHUNK / TILE_INPUTS) + place / TILE_INPUTS;
                for (part, &values) in split(weight).iter().enumerate() {
                    let tile = self.scratch.add(layout.weights + (step * PARTS + part) * TILE).cast::<u8>();
                    _mm256_storeu_si256(tile.add(line * TILE_LINE + place % TILE_INPUTS * 2).cast(), values);
                }
            }
            _mm512_storeu_ps(sums, sum);
        }
    }

    /// Weights x V of `count` positions onto the outputs of `rows` vectors from `vector` on, which are in one group.
    unsafe fn add_up(&self, layout: &Layout, registers: &mut Tiles, vector: usize, rows: usize, count: usize) {
        let (group, line) = (vector / TILE_ROWS, vector % TILE_ROWS);
        registers.shape(TileShape { first: rows, second: rows, columns: TILE_COLUMNS, pairs: TILE_PAIRS });
        for column in (0..layout.columns).step_by(COLUMNS) {
            let step = group * (CHUNK / TILE_INPUTS) * PARTS;
            let job = Weighted {
                weights: self
                    .scratch
                    .wrapping_add(layout.weights + step * TILE)
                    .cast::<u8>()
                    .wrapping_add(line * TILE_LINE),
                values: self.scratch.wrapping_add(layout.values_of + column / TILE_COLUMNS * TILE).cast(),
                values_step: layout.columns / TILE_COLUMNS * TILE_BYTES,
                steps: count.div_ceil(TILE_INPUTS),
                outputs: self.scratch.wrapping_add(layout.outputs + vector * layout.columns + column),
                stride: layout.columns * 4,
            };
            // SAFETY: the shape is the job's; tiles and outputs are in the scratch.
            unsafe { weighted(&job) };
        }
    }

    /// As [`Self::add_up`], each vector alone, with V zero where the vector does not see it.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn add_up_masked(
        &self,
        layout: &Layout,
        registers: &mut Tiles,
        (from, to): (usize, usize),
        (first, last): (usize, usize),
    ) {
        for vector in from..to {
            let high = self.high[vector].min(last);
            let low = self.low[vector].clamp(first, high.max(first));
            if low >= high {
                continue;
            }
            // SAFETY: passed on; positions before the first one that is seen are cleared afterwards.
            unsafe {
                self.gather_values(layout, first, high);
                let groups = layout.columns / TILE_COLUMNS;
                for position in first..low {
                    let (step, pair) = ((position - first) / TILE_INPUTS, (position - first) % TILE_INPUTS);
                    for group in 0..groups {
                        let tile = self.scratch.add(layout.values_of + (step * groups + group) * TILE).cast::<u16>();
                        for column in 0..TILE_COLUMNS {
                            tile.add((pair / 2 * TILE_COLUMNS + column) * 2 + pair % 2).write(0);
                        }
                    }
                }
                self.add_up(layout, registers, vector, 1, high - first);
            }
        }
    }
}

/// Which of the 16 bf16 values are infinite or not numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn not_finite(values: __m512i) -> u16 {
    use std::arch::x86_64::{_mm512_and_si512, _mm512_cmpeq_epi32_mask, _mm512_set1_epi32};
    let exponent = _mm512_set1_epi32(0x7F80);
    _mm512_cmpeq_epi32_mask(_mm512_and_si512(values, exponent), exponent)
}

/// Three bf16 vectors whose sum is the vector.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn split(value: __m512) -> [__m256i; PARTS] {
    let mut rest = value;
    let mut parts = [None; PARTS];
    for part in &mut parts {
        // SAFETY: both are 32 plain bytes.
        let rounded = unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(rest)) };
        let wide = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(rounded)));
        rest = _mm512_sub_ps(rest, wide);
        *part = Some(rounded);
    }
    parts.map(|part| part.expect("set above"))
}
