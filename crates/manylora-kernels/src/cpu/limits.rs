//! What this machine can do at most: the yardstick of every benchmark.
//!
//! Both limits are measured on the spot, with the backend's own threads: reading bandwidth from huge pages, and the
//! arithmetic peak of the instruction that the level's GEMM is made of.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::level::SimdLevel;
use super::memory::AlignedVec;
use super::pool::Pool;
use crate::error::KernelError;

/// Bytes that a bandwidth trial reads: far more than caches hold.
const READ_BYTES: usize = 256 << 20;

/// Highest rate in bytes per second at which all threads of `pool` together read memory, best of the rounds that fit in
/// `budget` (at least three).
pub fn read_bandwidth(pool: &Pool, budget: Duration) -> Result<f64, KernelError> {
    let mut block = AlignedVec::<u32>::zeroed("the bandwidth measurement", READ_BYTES / 4)?;
    // Commit every page: untouched ones are all the same page of zeros.
    for (index, page) in block.chunks_mut(1024).enumerate() {
        page[0] = index as u32;
    }
    let sink = AtomicU64::new(0);
    let rate = highest_rate(budget, || {
        pool.run(&|part, parts| {
            let share = &block[Pool::split(block.len(), 1024, part, parts)];
            sink.fetch_add(u64::from(read_all(share)), Ordering::Relaxed);
        });
        READ_BYTES as f64
    });
    std::hint::black_box(sink.into_inner());
    Ok(rate)
}

/// Reads everything once, as fast as this processor can be made to.
#[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "calls code for a level that was asked for"))]
fn read_all(values: &[u32]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if super::x86::has_avx2() {
        // SAFETY: the level is available.
        return unsafe { super::x86::peak::read_streams(values) };
    }
    // Independent sums, so that additions are never what is waited for.
    let mut sums = [0u32; 32];
    for line in values.chunks_exact(32) {
        for (sum, value) in sums.iter_mut().zip(line) {
            *sum ^= value;
        }
    }
    sums.iter().fold(0, |total, sum| total ^ sum)
}

/// Highest rate in floating-point operations per second of all threads of `pool` together, with the instruction that
/// bf16 GEMM uses at `level`: `tdpbf16ps`, `vdpbf16ps`, f32 FMA, or separate multiplications and additions.
pub fn arithmetic_peak(level: SimdLevel, pool: &Pool, budget: Duration) -> f64 {
    const ROUNDS: usize = 1 << 20;
    let operations = AtomicU64::new(0);
    highest_rate(budget, || {
        pool.run(&|_, _| {
            operations.fetch_add(spin_arithmetic(level, ROUNDS), Ordering::Relaxed);
        });
        operations.swap(0, Ordering::Relaxed) as f64
    })
}

/// Does `rounds` rounds of arithmetic in registers and returns the number of operations.
#[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "calls code for a level that was asked for"))]
fn spin_arithmetic(level: SimdLevel, rounds: usize) -> u64 {
    match level.require() {
        // SAFETY: the level is available.
        #[cfg(target_arch = "x86_64")]
        Ok(SimdLevel::Amx) => unsafe { super::x86::amx::tile_products(rounds / 16) },
        // SAFETY: the level is available.
        #[cfg(target_arch = "x86_64")]
        Ok(SimdLevel::Avx512Bf16) => unsafe { super::x86::peak::dot_products(rounds) },
        // SAFETY: the level is available.
        #[cfg(target_arch = "x86_64")]
        Ok(SimdLevel::Avx2) => unsafe { super::x86::peak::fused_multiply_adds(rounds) },
        _ => portable_arithmetic(rounds),
    }
}

fn portable_arithmetic(rounds: usize) -> u64 {
    const LANES: usize = 48;
    let factor = std::hint::black_box(0.999_f32);
    let mut sums = [1.0f32; LANES];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = *sum * factor + factor;
        }
    }
    std::hint::black_box(sums);
    (rounds * LANES * 2) as u64
}

fn highest_rate(budget: Duration, mut round: impl FnMut() -> f64) -> f64 {
    let start = Instant::now();
    let mut highest = 0.0f64;
    let mut rounds = 0;
    while rounds < 3 || start.elapsed() < budget {
        let begin = Instant::now();
        let done = round();
        highest = highest.max(done / begin.elapsed().as_secs_f64());
        rounds += 1;
    }
    highest
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{arithmetic_peak, read_bandwidth};
    use crate::cpu::{Pool, PoolOptions, SimdLevel};

    #[test]
    fn limits_are_plausible() {
        let pool = Pool::new(PoolOptions { threads: Some(1), ..PoolOptions::default() }).unwrap();
        let bandwidth = read_bandwidth(&pool, Duration::ZERO).unwrap();
        assert!((1e8..1e13).contains(&bandwidth), "{bandwidth}");
        for level in SimdLevel::available() {
            let peak = arithmetic_peak(level, &pool, Duration::ZERO);
            assert!((1e8..1e14).contains(&peak), "{level} {peak}");
        }
    }
}
