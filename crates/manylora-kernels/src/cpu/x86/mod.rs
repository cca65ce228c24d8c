//! x86-64 kernels. Every function here is `unsafe` to call unless the processor was asked first: the level dispatch
//! does.

pub(super) mod amx;
pub(super) mod avx2_expand;
pub(super) mod avx2_gemm;
pub(super) mod avx2_panel;
pub(super) mod avx2_shrink;
pub(super) mod avx2_words;
pub(super) mod avx512_gemm;
pub(super) mod detect;
pub(super) mod peak;
pub(super) mod vector;
mod widen;

pub(super) use detect::{has_amx_bf16, has_avx2, has_avx512_bf16};
