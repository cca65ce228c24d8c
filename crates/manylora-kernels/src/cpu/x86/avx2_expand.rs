//! The expand of rows that have an adapter each, for AVX2 with FMA: four (row, panel) pairs side by side.
//!
//! A pair is two chains of additions over the ranks, each of which can take a step only every four cycles. Eight chains
//! keep both multipliers busy, whatever the rows' ranks are: the rows come with falling ranks, and those that are done
//! drop out of the end.
#![expect(unsafe_code, reason = "SIMD intrinsics over pointers")]
#![expect(clippy::needless_range_loop, reason = "indices name registers; the loops are unrolled")]

use std::arch::x86_64::{
    __m256, _mm256_broadcast_ss, _mm256_fmadd_ps, _mm256_load_ps, _mm256_load_si256, _mm256_loadu_ps,
    _mm256_setzero_ps, _mm256_storeu_ps,
};

use super::widen::Widening;
use crate::cpu::kernels::ExpandJob;

const WIDTH: usize = 16;
/// Pairs side by side: 4 x 2 accumulators, two registers of weights, one of input.
const PAIRS: usize = 4;

/// B in f32.
///
/// # Safety
/// The processor has AVX2 and FMA; the job's pointers are valid for what it says, panels aligned to 32 bytes.
#[target_feature(enable = "avx2,fma")]
pub(in crate::cpu) unsafe fn expand_f32(job: &ExpandJob<'_>) {
    // SAFETY: passed on.
    unsafe { expand::<false>(job) }
}

/// B in bf16.
///
/// # Safety
/// As for [`expand_f32`].
#[target_feature(enable = "avx2,fma")]
pub(in crate::cpu) unsafe fn expand_bf16(job: &ExpandJob<'_>) {
    // SAFETY: passed on.
    unsafe { expand::<true>(job) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn expand<const BF16: bool>(job: &ExpandJob<'_>) {
    let pairs = job.rows.len() * job.panels;
    let mut first = 0;
    while first < pairs {
        // SAFETY: passed on; each arm's number of pairs is at most what is left.
        unsafe {
            match pairs - first {
                1 => block::<BF16, 1>(job, first),
                2 => block::<BF16, 2>(job, first),
                3 => block::<BF16, 3>(job, first),
                _ => block::<BF16, PAIRS>(job, first),
            }
        }
        first += PAIRS;
    }
}

/// What a block of pairs works on.
struct Pairs<const N: usize> {
    sums: [[__m256; 2]; N],
    inputs: [*const f32; N],
    weights: [*const u8; N],
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn block<const BF16: bool, const N: usize>(job: &ExpandJob<'_>, first: usize) {
    let mut pairs =
        Pairs { sums: [[_mm256_setzero_ps(); 2]; N], inputs: [std::ptr::null(); N], weights: [std::ptr::null(); N] };
    let mut tiles = [std::ptr::null_mut::<f32>(); N];
    let mut steps = [0; N];
    // SAFETY: the pairs are the job's, whose pointers are valid for the rows' steps and the panels' outputs.
    unsafe {
        for pair in 0..N {
            let (row, panel) = ((first + pair) / job.panels, (first + pair) % job.panels);
            let row = &job.rows[row];
            steps[pair] = row.steps;
            pairs.inputs[pair] = row.input;
            pairs.weights[pair] = row.b.add((job.panel + panel) * row.panel_bytes);
            tiles[pair] = job.tile.add(row.tile_row * job.width + panel * WIDTH);
            pairs.sums[pair] = [_mm256_loadu_ps(tiles[pair]), _mm256_loadu_ps(tiles[pair].add(8))];
        }
        let mut step = 0;
        if N >= 4 {
            run::<BF16, N, 4>(&mut pairs, &mut step, steps[3 % N]);
        }
        if N >= 3 {
            run::<BF16, N, 3>(&mut pairs, &mut step, steps[2 % N]);
        }
        if N >= 2 {
            run::<BF16, N, 2>(&mut pairs, &mut step, steps[1 % N]);
        }
        run::<BF16, N, 1>(&mut pairs, &mut step, steps[0]);
        for pair in 0..N {
            _mm256_storeu_ps(tiles[pair], pairs.sums[pair][0]);
            _mm256_storeu_ps(tiles[pair].add(8), pairs.sums[pair][1]);
        }
    }
}

/// Steps up to `end` of the first `RUNNING` pairs.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn run<const BF16: bool, const N: usize, const RUNNING: usize>(
    pairs: &mut Pairs<N>,
    step: &mut usize,
    end: usize,
) {
    let bytes = if BF16 { 32 } else { 64 };
    let widening = Widening::new();
    while *step < end {
        for pair in 0..RUNNING {
            // SAFETY: the running pairs have `end` steps or more; panels are aligned and a step is 32 or 64 bytes.
            unsafe {
                let address = pairs.weights[pair].add(*step * bytes);
                let (low, high) = if BF16 {
                    widening.widen(_mm256_load_si256(address.cast()))
                } else {
                    let address: *const f32 = address.cast();
                    (_mm256_load_ps(address), _mm256_load_ps(address.add(8)))
                };
                let input = _mm256_broadcast_ss(&*pairs.inputs[pair].add(*step));
                pairs.sums[pair][0] = _mm256_fmadd_ps(input, low, pairs.sums[pair][0]);
                pairs.sums[pair][1] = _mm256_fmadd_ps(input, high, pairs.sums[pair][1]);
            }
        }
        *step += 1;
    }
}
