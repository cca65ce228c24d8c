//! The exponential function in sixteen lanes.

use std::arch::x86_64::{
    __m512, _CMP_LT_OQ, _mm512_add_ps, _mm512_cmp_ps_mask, _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_mask_mov_ps,
    _mm512_max_ps, _mm512_min_ps, _mm512_mul_ps, _mm512_roundscale_ps, _mm512_scalef_ps, _mm512_set1_ps,
    _mm512_setzero_ps,
};

use super::super::exp::{COEFFICIENTS, LARGEST, LN2_HIGH, LN2_LOW, SMALLEST};

/// `e^x`, as [`super::super::exp::exp`] computes it.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn exponential(x: __m512) -> __m512 {
    let smallest = _mm512_set1_ps(SMALLEST);
    // Operand order matters: a NaN in `x` must come out of both.
    let clamped = _mm512_min_ps(_mm512_set1_ps(LARGEST), _mm512_max_ps(smallest, x));
    let n = _mm512_roundscale_ps::<0x08>(_mm512_mul_ps(clamped, _mm512_set1_ps(std::f32::consts::LOG2_E)));
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2_HIGH), clamped);
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2_LOW), r);
    let mut polynomial = _mm512_set1_ps(COEFFICIENTS[4]);
    for coefficient in [COEFFICIENTS[3], COEFFICIENTS[2], COEFFICIENTS[1], COEFFICIENTS[0]] {
        polynomial = _mm512_fmadd_ps(polynomial, r, _mm512_set1_ps(coefficient));
    }
    let fraction = _mm512_fmadd_ps(_mm512_mul_ps(r, r), polynomial, r);
    let result = _mm512_scalef_ps(_mm512_add_ps(fraction, _mm512_set1_ps(1.0)), n);
    let small = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, smallest);
    _mm512_mask_mov_ps(result, small, _mm512_setzero_ps())
}
