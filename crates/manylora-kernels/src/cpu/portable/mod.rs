//! Portable kernels in plain Rust: the readable reference, on any processor.

pub(super) mod gemm;
pub(super) mod shrink;
pub(super) mod vector;
