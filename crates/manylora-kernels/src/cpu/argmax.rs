//! Greedy sampling: the token with the largest logit of each row.
//!
//! Value and token are one key of which the largest wins, so parts of a row can be searched by any thread in any order.
#![expect(clippy::inline_always, reason = "inlined into the function that switches the level's instructions on")]

use std::sync::atomic::{AtomicU64, Ordering};

use super::CpuBackend;
use super::memory::Buffer;
use super::parallel::run_units;
use super::vector::{self, LANES, Vector8, VectorKernel};

/// Columns that are searched as one unit.
const SPAN: usize = 4096;
/// Rows that are searched at a time: their keys live on the stack.
const ROWS: usize = 64;

/// See [`crate::Backend::argmax`].
pub(super) fn argmax(backend: &CpuBackend, rows: usize, logits: &Buffer, out: &mut [u32]) {
    let width = logits.width;
    assert!(rows <= logits.rows && rows <= out.len(), "{rows} rows do not fit");
    let spans = width.div_ceil(SPAN);
    let level = backend.level;
    for first in (0..rows).step_by(ROWS) {
        let count = ROWS.min(rows - first);
        let best = [const { AtomicU64::new(0) }; ROWS];
        run_units(&backend.pool, count * spans, 2, &|units| {
            for unit in units {
                let (row, span) = (unit / spans, unit % spans);
                let start = span * SPAN;
                let values = &logits.row(first + row)[start..width.min(start + SPAN)];
                let mut key = 0;
                vector::run(level, Search { values, start, key: &mut key });
                best[row].fetch_max(key, Ordering::Relaxed);
            }
        });
        for (out, key) in out[first..first + count].iter_mut().zip(&best) {
            *out = token(key.load(Ordering::Relaxed));
        }
    }
}

/// Orders by value, then by the lower token. 0 is below every key.
fn key(value: f32, token: u32) -> u64 {
    // -0 + 0 is 0: the two zeros tie.
    let bits = (value + 0.0).to_bits();
    let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(ordered) << 32 | u64::from(!token)
}

/// The token of a key; 0 where a row held nothing but NaN.
const fn token(key: u64) -> u32 {
    if key == 0 { 0 } else { !(key as u32) }
}

struct Search<'a> {
    values: &'a [f32],
    start: usize,
    key: &'a mut u64,
}

impl VectorKernel for Search<'_> {
    #[inline(always)]
    fn run<V: Vector8>(self, vector: V) {
        let (chunks, tail) = self.values.as_chunks::<LANES>();
        let (fours, rest) = chunks.as_chunks::<4>();
        let mut largest = [vector.splat(f32::NEG_INFINITY); 4];
        for four in fours {
            for (largest, chunk) in largest.iter_mut().zip(four) {
                *largest = vector.max(vector.load(chunk), *largest);
            }
        }
        for chunk in rest {
            largest[0] = vector.max(vector.load(chunk), largest[0]);
        }
        let pairs = (vector.max(largest[0], largest[1]), vector.max(largest[2], largest[3]));
        let mut best = vector.largest(vector.max(pairs.0, pairs.1));
        for &value in tail {
            if value > best {
                best = value;
            }
        }
        if let Some(index) = self.values.iter().position(|&value| value == best) {
            *self.key = key(best, (self.start + index) as u32);
        }
    }
}
