//! The panel kernel for AVX-512 with BF16: pairs of inputs against 32 outputs, f32 accumulation in `vdpbf16ps`.
//!
//! The instruction adds, in each f32 lane, the products of the lane's two bf16 halves to the accumulator; denormals
//! count as zero. One accumulator per (row, output) runs over the pairs in order.
#![expect(unsafe_code, reason = "SIMD intrinsics over pointers")]
#![expect(clippy::needless_range_loop, reason = "indices name registers; the loops are unrolled")]

use std::arch::x86_64::{
    __m256bh, __m256i, __m512, __m512bh, __m512i, _MM_HINT_T0, _mm_prefetch, _mm256_storeu_si256, _mm512_cvtneps_pbh,
    _mm512_dpbf16_ps, _mm512_load_si512, _mm512_loadu_ps, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
};

use crate::cpu::kernels::{PanelJob, PanelRow, block_rows};
use crate::cpu::pack::f32_to_bf16;

const WIDTH: usize = 32;
const STEP_BYTES: usize = 128;
/// Rows of the largest register block: 12 x 2 accumulators, two registers of weights, one of inputs.
const MOST_ROWS: usize = 12;
/// How far ahead of its use the packed stream is prefetched when it is read once.
const AHEAD: usize = 2048;

/// Rounds a row to bf16 pairs: `out` has half as many words as the row has inputs, rounded up; a missing last one is 0.
///
/// # Safety
/// The processor has AVX-512 F and BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(in crate::cpu) unsafe fn round_to_pairs(row: &[f32], out: &mut [u32]) {
    assert!(out.len() >= row.len().div_ceil(2));
    let blocks = row.chunks_exact(16);
    let tail = blocks.remainder();
    for (index, block) in blocks.enumerate() {
        // SAFETY: a block is 16 values, of which 16 halves (eight words) are stored within `out`; both types are 32
        // bytes.
        unsafe {
            let halves: __m256bh = _mm512_cvtneps_pbh(_mm512_loadu_ps(block.as_ptr()));
            let halves = std::mem::transmute::<__m256bh, __m256i>(halves);
            _mm256_storeu_si256(out.as_mut_ptr().add(index * 8).cast(), halves);
        }
    }
    let first = (row.len() - tail.len()) / 2;
    for (pair, word) in tail.chunks(2).zip(&mut out[first..]) {
        let high = pair.get(1).map_or(0, |&value| f32_to_bf16(value));
        *word = u32::from(f32_to_bf16(pair[0])) | u32::from(high) << 16;
    }
}

/// Panels of 32 outputs, pairs of bf16; the rows' inputs are pairs, too.
///
/// # Safety
/// The processor has AVX-512 F and BF16; the job's pointers are valid for what it says, panels aligned to 64 bytes.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(in crate::cpu) unsafe fn panel_bf16_pairs(job: &PanelJob<'_>) {
    // SAFETY: passed on; each arm's ROWS is the length of the rows it gets.
    unsafe {
        match (job.panels, job.rows.len()) {
            (4, 1) => block::<1, 4>(job, job.rows, job.weights.wrapping_add(AHEAD), STEP_BYTES),
            (2, 1) => block::<1, 2>(job, job.rows, job.weights.wrapping_add(AHEAD), STEP_BYTES),
            (2, 2) => block::<2, 2>(job, job.rows, job.weights.wrapping_add(AHEAD), STEP_BYTES),
            (2, 3) => block::<3, 2>(job, job.rows, job.weights.wrapping_add(AHEAD), STEP_BYTES),
            (1, _) => return single_panel(job),
            (panels, rows) => unreachable!("no register block of {rows} rows by {panels} panels"),
        }
    }
    job.after_block();
}

/// See [`crate::cpu::kernels::blocks_of_rows`].
pub(in crate::cpu) const fn blocks_of_rows(rows: usize, steps: usize, stretch: usize) -> usize {
    steps.div_ceil(stretch) * rows.div_ceil(MOST_ROWS)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn single_panel(job: &PanelJob<'_>) {
    let bytes = job.steps * STEP_BYTES;
    let blocks = job.rows.len().div_ceil(MOST_ROWS);
    let mut first = 0;
    for index in 0..blocks {
        let rows = &job.rows[first..first + block_rows(job.rows.len(), MOST_ROWS, index)];
        first += rows.len();
        // One block reads the stream once and runs ahead of itself; of several, each fetches its share of what follows.
        let (prefetch, per_step) = if blocks == 1 {
            (job.weights.wrapping_add(AHEAD), STEP_BYTES)
        } else {
            (job.next.wrapping_add(index * (bytes / blocks)), STEP_BYTES / blocks)
        };
        // SAFETY: passed on; each arm's ROWS is the length of the rows it gets.
        unsafe {
            match rows.len() {
                1 => block::<1, 1>(job, rows, prefetch, per_step),
                2 => block::<2, 1>(job, rows, prefetch, per_step),
                3 => block::<3, 1>(job, rows, prefetch, per_step),
                4 => block::<4, 1>(job, rows, prefetch, per_step),
                5 => block::<5, 1>(job, rows, prefetch, per_step),
                6 => block::<6, 1>(job, rows, prefetch, per_step),
                7 => block::<7, 1>(job, rows, prefetch, per_step),
                8 => block::<8, 1>(job, rows, prefetch, per_step),
                9 => block::<9, 1>(job, rows, prefetch, per_step),
                10 => block::<10, 1>(job, rows, prefetch, per_step),
                11 => block::<11, 1>(job, rows, prefetch, per_step),
                _ => block::<12, 1>(job, rows, prefetch, per_step),
            }
        }
        job.after_block();
    }
}

/// One register block. Prefetches from `prefetch` on, `per_step` bytes for every step.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn block<const ROWS: usize, const PANELS: usize>(
    job: &PanelJob<'_>,
    rows: &[PanelRow],
    mut prefetch: *const u8,
    per_step: usize,
) {
    debug_assert_eq!(rows.len(), ROWS);
    let mut sums: [[[__m512; 2]; PANELS]; ROWS] = [[[_mm512_setzero_ps(); 2]; PANELS]; ROWS];
    let mut inputs = [std::ptr::null::<u32>(); ROWS];
    // SAFETY: the job's pointers are valid for `steps` steps from `first_step` on and for the panels' outputs; a
    // prefetch may point anywhere, and its address is made by wrapping arithmetic. __m512i and __m512bh are both 64
    // plain bytes.
    unsafe {
        for row in 0..ROWS {
            inputs[row] = rows[row].input.add(job.first_step);
            if !job.fresh {
                for panel in 0..PANELS {
                    let tile = rows[row].tile.add(panel * WIDTH);
                    sums[row][panel] = [_mm512_loadu_ps(tile), _mm512_loadu_ps(tile.add(16))];
                }
            }
        }
        let mut weights = job.weights;
        for step in 0..job.steps {
            for panel in 0..PANELS {
                let line = prefetch.wrapping_add(panel * job.panel_stride).cast::<i8>();
                _mm_prefetch::<_MM_HINT_T0>(line);
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(64));
            }
            prefetch = prefetch.wrapping_add(per_step);
            for panel in 0..PANELS {
                let address = weights.add(panel * job.panel_stride);
                let low = std::mem::transmute::<__m512i, __m512bh>(_mm512_load_si512(address.cast()));
                let high = std::mem::transmute::<__m512i, __m512bh>(_mm512_load_si512(address.add(64).cast()));
                for row in 0..ROWS {
                    let pair = _mm512_set1_epi32((*inputs[row].add(step)).cast_signed());
                    let pair = std::mem::transmute::<__m512i, __m512bh>(pair);
                    sums[row][panel][0] = _mm512_dpbf16_ps(sums[row][panel][0], low, pair);
                    sums[row][panel][1] = _mm512_dpbf16_ps(sums[row][panel][1], high, pair);
                }
            }
            weights = weights.add(STEP_BYTES);
        }
        for row in 0..ROWS {
            for panel in 0..PANELS {
                let tile = rows[row].tile.add(panel * WIDTH);
                _mm512_storeu_ps(tile, sums[row][panel][0]);
                _mm512_storeu_ps(tile.add(16), sums[row][panel][1]);
            }
        }
    }
}
