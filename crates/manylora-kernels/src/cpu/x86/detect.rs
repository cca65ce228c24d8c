//! What this x86 processor offers.

use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

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

/// AMX with BF16 tile products, which the system must allow: tile registers make what it saves of a thread much larger, so
/// a process asks once, for all its threads.
pub(in crate::cpu) fn has_amx_bf16() -> bool {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    *ALLOWED.get_or_init(|| {
        const BF16: u32 = 1 << 22;
        const TILE: u32 = 1 << 24;
        let features = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).edx } else { 0 };
        features & (BF16 | TILE) == BF16 | TILE && ask_for_tiles()
    })
}

#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "a system call without a wrapper")]
fn ask_for_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: two numbers; nothing of this process's memory is touched.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
const fn ask_for_tiles() -> bool {
    false
}
