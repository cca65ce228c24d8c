//! Transposing rows of 32-bit words into a panel with AVX2: f32 values, or pairs of bf16 values.
#![expect(unsafe_code, reason = "vector instructions need the processor's features and raw loads and stores")]

use std::arch::x86_64::{
    __m256i, _mm256_loadu_si256, _mm256_permute2x128_si256, _mm256_storeu_si256, _mm256_unpackhi_epi32,
    _mm256_unpackhi_epi64, _mm256_unpacklo_epi32, _mm256_unpacklo_epi64,
};

/// Words of a vector.
const WORDS: usize = 8;

/// Packs `LANES` rows of `row_bytes` bytes each: word `k` of row `r` becomes word `k LANES + r` of the panel. Eight words of
/// each row at a time; returns how many words of each it packed: fewer than eight whole ones remain.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub(in crate::cpu) unsafe fn transpose<const LANES: usize>(rows: &[u8], row_bytes: usize, panel: &mut [u8]) -> usize {
    const { assert!(LANES.is_multiple_of(WORDS), "whole vectors of outputs") };
    let whole = row_bytes / 4 / WORDS * WORDS;
    assert!(
        rows.len() == LANES * row_bytes && panel.len() >= 4 * LANES * whole,
        "{LANES} rows of `{row_bytes}` bytes for a panel of `{}`",
        panel.len()
    );
    for word in (0..whole).step_by(WORDS) {
        for lane in (0..LANES).step_by(WORDS) {
            // SAFETY: row `r` begins at byte `r row_bytes` and has more than `word + 7` words; `lane + 7 < LANES`. Word `k`
            // of the panel begins at byte `4 k LANES`, and the panel has `whole` of them.
            unsafe {
                let mut block = [_mm256_loadu_si256(rows.as_ptr().add(lane * row_bytes + 4 * word).cast()); WORDS];
                for (row, words) in block.iter_mut().enumerate().skip(1) {
                    *words = _mm256_loadu_si256(rows.as_ptr().add((lane + row) * row_bytes + 4 * word).cast());
                }
                for (step, words) in transposed(block).into_iter().enumerate() {
                    let out = panel.as_mut_ptr().add(4 * ((word + step) * LANES + lane));
                    _mm256_storeu_si256(out.cast(), words);
                }
            }
        }
    }
    whole
}

/// Vector `i` holds word `i` of each of the eight.
#[inline]
#[target_feature(enable = "avx2")]
fn transposed(rows: [__m256i; WORDS]) -> [__m256i; WORDS] {
    let [a, b, c, d, e, f, g, h] = rows;
    // Of each half: words 0, 1 and 2, 3 of two rows, then one word of four rows.
    let pairs = |x, y| (_mm256_unpacklo_epi32(x, y), _mm256_unpackhi_epi32(x, y));
    let fours = |(low, high): (__m256i, __m256i), (low_next, high_next): (__m256i, __m256i)| {
        [
            _mm256_unpacklo_epi64(low, low_next),
            _mm256_unpackhi_epi64(low, low_next),
            _mm256_unpacklo_epi64(high, high_next),
            _mm256_unpackhi_epi64(high, high_next),
        ]
    };
    let (first, second) = (fours(pairs(a, b), pairs(c, d)), fours(pairs(e, f), pairs(g, h)));
    let [a, b, c, d] = first;
    let [e, f, g, h] = second;
    [
        _mm256_permute2x128_si256::<0x20>(a, e),
        _mm256_permute2x128_si256::<0x20>(b, f),
        _mm256_permute2x128_si256::<0x20>(c, g),
        _mm256_permute2x128_si256::<0x20>(d, h),
        _mm256_permute2x128_si256::<0x31>(a, e),
        _mm256_permute2x128_si256::<0x31>(b, f),
        _mm256_permute2x128_si256::<0x31>(c, g),
        _mm256_permute2x128_si256::<0x31>(d, h),
    ]
}
