//! Sixteen bf16 of a panel's step as two registers of f32.
#![expect(unsafe_code, reason = "hides a value from the compiler")]

use std::arch::asm;
use std::arch::x86_64::{__m256, __m256i, _mm256_and_si256, _mm256_castsi256_ps, _mm256_set1_epi32, _mm256_slli_epi32};

/// Widens by a shift and a mask.
#[derive(Clone, Copy)]
pub(super) struct Widening {
    high_halves: __m256i,
}

impl Widening {
    /// The mask, in a register. Where its value is known, the compiler blends with zeros instead: one instruction more, on
    /// the ports that multiply.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn new() -> Self {
        let mut high_halves = _mm256_set1_epi32(0xFFFF_0000_u32.cast_signed());
        // SAFETY: no instruction at all; only where the value comes from is hidden.
        unsafe { asm!("/* {0} */", inout(ymm_reg) high_halves, options(pure, nomem, nostack, preserves_flags)) };
        Self { high_halves }
    }

    /// The low halves of all words, and the high ones.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn widen(self, both: __m256i) -> (__m256, __m256) {
        (
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(both)),
            _mm256_castsi256_ps(_mm256_and_si256(both, self.high_halves)),
        )
    }
}
