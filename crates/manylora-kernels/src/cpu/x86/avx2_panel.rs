//! Interleaving of bf16 rows into a panel with AVX2: whole cache lines are read and written, nothing is widened.
#![expect(unsafe_code, reason = "vector instructions need the processor's features and raw loads and stores")]

use std::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm_unpackhi_epi16, _mm_unpacklo_epi16, _mm256_permute2x128_si256, _mm256_set_m128i,
    _mm256_setzero_si256, _mm256_storeu_si256, _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi32,
    _mm256_unpacklo_epi64,
};

/// Inputs that are interleaved at a time.
const INPUTS: usize = 8;

/// Packs 16 rows of `inputs` bf16 values as [`crate::cpu::PanelFormat::Bf16`], eight inputs at a time, and returns how
/// many inputs it packed: those that remain are fewer than eight.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub(in crate::cpu) unsafe fn interleave_bf16(rows: &[u8], inputs: usize, panel: &mut [u8]) -> usize {
    assert!(rows.len() == 32 * inputs && panel.len() >= 32 * inputs, "16 rows of `{inputs}` inputs");
    let whole = inputs / INPUTS * INPUTS;
    for first in (0..whole).step_by(INPUTS) {
        // SAFETY: row `r` begins at byte `2 r inputs`, and `first + 8 <= inputs`; input `k` of the panel begins at byte
        // `32 k`.
        unsafe {
            let row = |row: usize| _mm_loadu_si128(rows.as_ptr().add(2 * (row * inputs + first)).cast());
            // Outputs j and j + 8 side by side: a word for each of the eight inputs.
            let mut words = [_mm256_setzero_si256(); 8];
            for (output, words) in words.iter_mut().enumerate() {
                let (low, high) = (row(output), row(output + 8));
                *words = _mm256_set_m128i(_mm_unpackhi_epi16(low, high), _mm_unpacklo_epi16(low, high));
            }
            let (left, right) = (four_by_eight(words, 0), four_by_eight(words, 4));
            for (input, (left, right)) in left.into_iter().zip(right).enumerate() {
                let out = panel.as_mut_ptr().add(32 * (first + input));
                _mm256_storeu_si256(out.cast(), _mm256_permute2x128_si256::<0x20>(left, right));
                _mm256_storeu_si256(out.add(4 * 32).cast(), _mm256_permute2x128_si256::<0x31>(left, right));
            }
        }
    }
    whole
}

/// Words `first..first + 4` of each input: vector `i` holds those of inputs `i` (low half) and `i + 4` (high half).
#[inline]
#[target_feature(enable = "avx2")]
fn four_by_eight(words: [__m256i; 8], first: usize) -> [__m256i; 4] {
    let [a, b, c, d] = [0, 1, 2, 3].map(|word| words[first + word]);
    let (even, odd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let (even_next, odd_next) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    [
        _mm256_unpacklo_epi64(even, even_next),
        _mm256_unpackhi_epi64(even, even_next),
        _mm256_unpacklo_epi64(odd, odd_next),
        _mm256_unpackhi_epi64(odd, odd_next),
    ]
}
