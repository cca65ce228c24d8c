//! What this machine can do at most, for benches that hold an engine against it in the same process.

use std::sync::Arc;
use std::time::Duration;

use manylora_kernels::cpu::{Pool, PoolOptions, SimdLevel, limits};

use crate::error::EngineError;

/// Bytes per second at which the threads of an engine with `num_threads` (None = its default) read memory: the best round
/// of those that fit in `budget`, of three at least. A step that computes meanwhile waits for a round, or the round for it.
pub fn read_bandwidth(num_threads: Option<usize>, budget: Duration) -> Result<f64, EngineError> {
    let pool = shared_pool(num_threads)?;
    Ok(limits::read_bandwidth(&pool, budget)?)
}

/// Floating-point operations per second (a fused multiply-add counts two) of the same threads, with the instruction that
/// an engine's bf16 products are made of: `MANYLORA_SIMD`'s, or that of the fastest level of this processor.
pub fn arithmetic_peak(num_threads: Option<usize>, budget: Duration) -> Result<f64, EngineError> {
    let pool = shared_pool(num_threads)?;
    Ok(limits::arithmetic_peak(SimdLevel::from_environment()?, &pool, budget))
}

fn shared_pool(threads: Option<usize>) -> Result<Arc<Pool>, EngineError> {
    Ok(Pool::shared(PoolOptions { threads, ..PoolOptions::default() })?)
}
