//! What this machine can do at most, for benches that hold an engine against it in the same process.

use std::time::Duration;

use manylora_kernels::cpu::{Pool, PoolOptions, limits};

use crate::error::EngineError;

/// Bytes per second at which the threads of an engine with `num_threads` (None = its default) read memory: the best round
/// of those that fit in `budget`, of three at least. A step that computes meanwhile waits for a round, or the round for it.
pub fn read_bandwidth(num_threads: Option<usize>, budget: Duration) -> Result<f64, EngineError> {
    let pool = Pool::shared(PoolOptions { threads: num_threads, ..PoolOptions::default() })?;
    Ok(limits::read_bandwidth(&pool, budget)?)
}
