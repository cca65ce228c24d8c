//! The shrink for AVX2 with FMA: dot products in eight lanes, up to three rows by four ranks at a time.
#![expect(unsafe_code, reason = "SIMD intrinsics over pointers")]
#![expect(clippy::needless_range_loop, reason = "indices name registers; the loops are unrolled")]

use std::arch::x86_64::{
    __m256, _MM_HINT_T0, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_loadu_si128, _mm_movehdup_ps, _mm_movehl_ps,
    _mm_prefetch, _mm256_castps256_ps128, _mm256_castsi256_ps, _mm256_cvtepu16_epi32, _mm256_extractf128_ps,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_slli_epi32,
};

use crate::cpu::kernels::{ShrinkJob, ShrinkRow, block_rows};

const LANES: usize = 8;
const MOST_ROWS: usize = 3;
const MOST_RANKS: usize = 4;

/// A in f32.
///
/// # Safety
/// The processor has AVX2 and FMA; the job's pointers are valid for what it says.
#[target_feature(enable = "avx2,fma")]
pub(in crate::cpu) unsafe fn shrink_f32(job: &ShrinkJob<'_>) {
    // SAFETY: passed on.
    unsafe { shrink::<false>(job) }
}

/// A in bf16.
///
/// # Safety
/// As for [`shrink_f32`].
#[target_feature(enable = "avx2,fma")]
pub(in crate::cpu) unsafe fn shrink_bf16(job: &ShrinkJob<'_>) {
    // SAFETY: passed on.
    unsafe { shrink::<true>(job) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn shrink<const BF16: bool>(job: &ShrinkJob<'_>) {
    let mut rank = job.ranks.start;
    while rank < job.ranks.end {
        let ranks = (job.ranks.end - rank).min(MOST_RANKS);
        let blocks = job.rows.len().div_ceil(MOST_ROWS);
        let mut first = 0;
        for index in 0..blocks {
            let rows = &job.rows[first..first + block_rows(job.rows.len(), MOST_ROWS, index)];
            first += rows.len();
            // SAFETY: passed on; each arm's ROWS and RANKS are the sizes that it gets.
            unsafe {
                match rows.len() {
                    1 => block_of_rows::<BF16, 1>(job, rows, rank, ranks),
                    2 => block_of_rows::<BF16, 2>(job, rows, rank, ranks),
                    _ => block_of_rows::<BF16, 3>(job, rows, rank, ranks),
                }
            }
        }
        rank += ranks;
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn block_of_rows<const BF16: bool, const ROWS: usize>(
    job: &ShrinkJob<'_>,
    rows: &[ShrinkRow],
    rank: usize,
    ranks: usize,
) {
    // SAFETY: passed on.
    unsafe {
        match ranks {
            1 => block::<BF16, ROWS, 1>(job, rows, rank),
            2 => block::<BF16, ROWS, 2>(job, rows, rank),
            3 => block::<BF16, ROWS, 3>(job, rows, rank),
            _ => block::<BF16, ROWS, 4>(job, rows, rank),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn block<const BF16: bool, const ROWS: usize, const RANKS: usize>(
    job: &ShrinkJob<'_>,
    rows: &[ShrinkRow],
    rank: usize,
) {
    let element = if BF16 { 2 } else { 4 };
    let mut sums = [[_mm256_setzero_ps(); RANKS]; ROWS];
    let whole = job.inputs / LANES * LANES;
    let tail = job.inputs - whole;
    // SAFETY: every row of A and every row of inputs has `inputs` elements; whole vectors stay below `whole`, and the
    // tail is copied to zeroed arrays first.
    unsafe {
        let mut a = [std::ptr::null::<u8>(); RANKS];
        for (offset, pointer) in a.iter_mut().enumerate() {
            *pointer = job.a.add((rank + offset) * job.inputs * element);
        }
        let mut k = 0;
        while k < whole {
            let mut factors = [_mm256_setzero_ps(); RANKS];
            for index in 0..RANKS {
                let address = a[index].wrapping_add(k * element);
                factors[index] = load::<BF16>(address);
                // The same place of the next block of ranks: its rows are too short for the processor to foresee.
                _mm_prefetch::<_MM_HINT_T0>(address.wrapping_add(RANKS * job.inputs * element).cast());
            }
            for row in 0..ROWS {
                let x = _mm256_loadu_ps(rows[row].input.add(k));
                for index in 0..RANKS {
                    sums[row][index] = _mm256_fmadd_ps(factors[index], x, sums[row][index]);
                }
            }
            k += LANES;
        }
        if tail > 0 {
            let mut factors = [_mm256_setzero_ps(); RANKS];
            for index in 0..RANKS {
                let mut padded = [0u8; 4 * LANES];
                std::ptr::copy_nonoverlapping(a[index].add(whole * element), padded.as_mut_ptr(), tail * element);
                factors[index] = load::<BF16>(padded.as_ptr());
            }
            for row in 0..ROWS {
                let mut padded = [0.0f32; LANES];
                std::ptr::copy_nonoverlapping(rows[row].input.add(whole), padded.as_mut_ptr(), tail);
                let x = _mm256_loadu_ps(padded.as_ptr());
                for index in 0..RANKS {
                    sums[row][index] = _mm256_fmadd_ps(factors[index], x, sums[row][index]);
                }
            }
        }
        for row in 0..ROWS {
            for index in 0..RANKS {
                *rows[row].result.add(rank + index) = rows[row].scale * add_lanes(sums[row][index]);
            }
        }
    }
}

/// Eight elements of A as f32.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn load<const BF16: bool>(address: *const u8) -> __m256 {
    // SAFETY: the caller has eight elements there.
    unsafe {
        if BF16 {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(address.cast()))))
        } else {
            _mm256_loadu_ps(address.cast())
        }
    }
}

/// ((0+4) + (2+6)) + ((1+5) + (3+7))
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add_lanes(sums: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}
