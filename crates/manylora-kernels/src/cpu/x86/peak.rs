//! Arithmetic in registers only, and reading without arithmetic, to find what this processor yields at most.
#![expect(unsafe_code, reason = "SIMD intrinsics")]

use std::arch::x86_64::{
    __m256, __m256i, __m512, __m512bh, __m512i, _MM_HINT_T0, _mm_prefetch, _mm256_extract_epi32, _mm256_fmadd_ps,
    _mm256_loadu_si256, _mm256_set1_ps, _mm256_setzero_si256, _mm256_storeu_ps, _mm256_xor_si256, _mm512_dpbf16_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_storeu_ps,
};

/// f32 FMA of 256 bits in twelve chains; returns the number of operations.
///
/// # Safety
/// The processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(in crate::cpu) unsafe fn fused_multiply_adds(rounds: usize) -> u64 {
    const CHAINS: usize = 12;
    let factor = _mm256_set1_ps(std::hint::black_box(0.999));
    let mut sums: [__m256; CHAINS] = [factor; CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, factor, factor);
        }
    }
    let mut out = [0.0f32; 8];
    for sum in sums {
        // SAFETY: `out` has eight values.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sum) };
        std::hint::black_box(out);
    }
    (rounds * CHAINS * 8 * 2) as u64
}

/// `vdpbf16ps` of 512 bits in 24 chains; returns the number of operations.
///
/// # Safety
/// The processor has AVX-512 F and BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(in crate::cpu) unsafe fn dot_products(rounds: usize) -> u64 {
    const CHAINS: usize = 24;
    // SAFETY: both are 64 plain bytes. Two bf16 of 0.5.
    let pair =
        unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(std::hint::black_box(0x3F00_3F00))) };
    let mut sums: [__m512; CHAINS] = [_mm512_set1_ps(0.0); CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, pair, pair);
        }
    }
    let mut out = [0.0f32; 16];
    for sum in sums {
        // SAFETY: `out` has sixteen values.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) };
        std::hint::black_box(out);
    }
    (rounds * CHAINS * 16 * 2 * 2) as u64
}

/// Reads four streams side by side, each prefetched ahead, as the kernels for one row do.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub(in crate::cpu) unsafe fn read_streams(values: &[u32]) -> u32 {
    const STREAMS: usize = 4;
    const LINE: usize = 16;
    const AHEAD: usize = 8 * LINE;
    let each = values.len() / STREAMS / LINE * LINE;
    let mut sums: [[__m256i; 2]; STREAMS] = [[_mm256_setzero_si256(); 2]; STREAMS];
    for line in (0..each).step_by(LINE) {
        for (stream, sum) in sums.iter_mut().enumerate() {
            let address = values[stream * each + line..][..LINE].as_ptr();
            // SAFETY: the line has sixteen values; a prefetch may point anywhere.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(address.wrapping_add(AHEAD).cast());
                sum[0] = _mm256_xor_si256(sum[0], _mm256_loadu_si256(address.cast()));
                sum[1] = _mm256_xor_si256(sum[1], _mm256_loadu_si256(address.add(8).cast()));
            }
        }
    }
    let sum = sums.iter().flatten().fold(_mm256_setzero_si256(), |total, &sum| _mm256_xor_si256(total, sum));
    _mm256_extract_epi32::<0>(sum).cast_unsigned()
}
