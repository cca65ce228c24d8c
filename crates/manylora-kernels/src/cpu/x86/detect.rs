//! What this x86 processor offers.

/// AVX2 with FMA (and F16C-era friends that every such processor has).
pub(in crate::cpu) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// AVX-512 (F, BW, VL, DQ) with BF16 dot products.
pub(in crate::cpu) fn has_avx512_bf16() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512bf16")
}
