//! Eight-lane vectors in AVX2 with FMA.
#![expect(clippy::inline_always, reason = "inlined into the function that switches the level's instructions on")]
#![expect(unsafe_code, reason = "vector instructions need the processor's features and raw loads and stores")]

use std::arch::x86_64::{
    __m128i, __m256, _CMP_LT_OQ, _mm_loadu_si128, _mm256_add_epi32, _mm256_add_ps, _mm256_andnot_ps,
    _mm256_castps_si256, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cvtepu16_epi32, _mm256_div_ps, _mm256_fmadd_ps,
    _mm256_loadu_ps, _mm256_max_ps, _mm256_min_ps, _mm256_mul_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_slli_epi32,
    _mm256_storeu_ps, _mm256_sub_ps,
};

use half::bf16;

use crate::cpu::level::SimdLevel;
use crate::cpu::vector::{LANES, Vector8, VectorKernel};

/// Exists only where the processor has AVX2 and FMA: the private field is set by [`Avx2::run`] alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// Runs `kernel`, compiled for AVX2 and FMA.
    ///
    /// Falls back on nothing: `level` was checked when it was chosen, and is checked again here because the check is
    /// a load and the consequence of a wrong one is undefined.
    #[inline]
    pub(crate) fn run<K: VectorKernel>(level: SimdLevel, kernel: K) {
        assert!(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"), "{level:?} was not checked");
        // SAFETY: the line above saw both features.
        unsafe { enter(kernel) }
    }
}

/// The one place where the features are switched on; all the kernel's code is inlined into it.
///
/// # Safety
/// The processor must have AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
unsafe fn enter<K: VectorKernel>(kernel: K) {
    kernel.run(Avx2(()));
}

impl Vector8 for Avx2 {
    type Lanes = __m256;

    #[inline(always)]
    fn splat(self, value: f32) -> __m256 {
        // SAFETY: `self` proves that AVX2 is there.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m256 {
        // SAFETY: `self` proves that AVX2 is there; the array has eight values.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }

    #[expect(clippy::cast_ptr_alignment, reason = "the load is an unaligned one")]
    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> __m256 {
        // SAFETY: `self` proves that AVX2 is there; the array has sixteen bytes.
        unsafe {
            let narrow = _mm_loadu_si128(from.as_ptr().cast::<__m128i>());
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(narrow)))
        }
    }

    #[inline(always)]
    fn store(self, value: __m256, to: &mut [f32; LANES]) {
        // SAFETY: `self` proves that AVX2 is there; the array has eight values.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), value) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX2 is there.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX2 is there.
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX2 is there.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX2 is there.
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: `self` proves that FMA is there.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX2 is there.
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX2 is there.
        unsafe { _mm256_min_ps(a, b) }
    }

    #[inline(always)]
    fn zero_below(self, x: __m256, bound: __m256, value: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX2 is there.
        unsafe { _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, bound), value) }
    }

    #[inline(always)]
    fn half_power_of_two(self, bits: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX2 is there.
        unsafe {
            let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(bits));
            _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(126 << 23)))
        }
    }
}
