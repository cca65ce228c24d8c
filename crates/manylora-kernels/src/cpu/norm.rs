//! RMSNorm: each group of columns divided by its root mean square, times a weight.
//!
//! The sum of squares is taken in 4 x 8 lanes over whole groups of 32 columns, then 8 columns at a time in the first
//! of them, then the lanes are added as a fixed tree: an order that depends on the width only.
#![expect(clippy::inline_always, reason = "inlined into the function that switches the level's instructions on")]

use super::CpuBackend;
use super::memory::{AlignedVec, Buffer};
use super::parallel::run_rows;
use super::vector::{self, LANES, Vector8, VectorKernel};
use crate::site::Site;

/// Values that a thread should have to work on before another one is worth waking.
const GRAIN: usize = 8192;

/// See [`crate::Backend::rms_norm`]. No adapter format that is loaded touches a norm.
pub(super) fn rms_norm(
    backend: &CpuBackend,
    rows: usize,
    input: &Buffer,
    weight: &AlignedVec<f32>,
    epsilon: f32,
    _site: Site,
    out: &mut Buffer,
) {
    let group = weight.len();
    assert!(group > 0 && input.width == out.width && input.width.is_multiple_of(group), "{} by {group}", input.width);
    let input = &input.data[..rows * input.width];
    let out = &mut out.data[..input.len()];
    let level = backend.level;
    run_rows(&backend.pool, out, group, GRAIN / group, &|first, out| {
        let input = &input[first * group..first * group + out.len()];
        vector::run(level, Normalize { input, weight, epsilon, out });
    });
}

/// Groups of one thread.
struct Normalize<'a> {
    input: &'a [f32],
    weight: &'a [f32],
    epsilon: f32,
    out: &'a mut [f32],
}

impl VectorKernel for Normalize<'_> {
    #[inline(always)]
    fn run<V: Vector8>(self, vector: V) {
        let group = self.weight.len();
        for (index, out) in self.out.chunks_exact_mut(group).enumerate() {
            out.copy_from_slice(&self.input[index * group..(index + 1) * group]);
            normalize(vector, out, self.weight, self.epsilon);
        }
    }
}

/// Normalizes one group in place.
#[inline(always)]
pub(super) fn normalize<V: Vector8>(vector: V, group: &mut [f32], weight: &[f32], epsilon: f32) {
    let mean = sum_of_squares(vector, group) / group.len() as f32;
    let factor = vector.splat(1.0 / (mean + epsilon).sqrt());
    let (values, values_tail) = group.as_chunks_mut::<LANES>();
    let (weights, weights_tail) = weight.as_chunks::<LANES>();
    for (value, weight) in values.iter_mut().zip(weights) {
        let normal = vector.mul(vector.load(value), factor);
        vector.store(vector.mul(normal, vector.load(weight)), value);
    }
    if !values_tail.is_empty() {
        let normal = vector.mul(vector.load_padded(values_tail), factor);
        vector.store_prefix(vector.mul(normal, vector.load_padded(weights_tail)), values_tail);
    }
}

#[inline(always)]
fn sum_of_squares<V: Vector8>(vector: V, values: &[f32]) -> f32 {
    let mut sums = [vector.splat(0.0); 4];
    let (chunks, tail) = values.as_chunks::<LANES>();
    let (fours, rest) = chunks.as_chunks::<4>();
    for four in fours {
        for (sum, chunk) in sums.iter_mut().zip(four) {
            let value = vector.load(chunk);
            *sum = vector.mul_add(value, value, *sum);
        }
    }
    for chunk in rest {
        let value = vector.load(chunk);
        sums[0] = vector.mul_add(value, value, sums[0]);
    }
    if !tail.is_empty() {
        let value = vector.load_padded(tail);
        sums[0] = vector.mul_add(value, value, sums[0]);
    }
    vector.sum(vector.add(vector.add(sums[0], sums[1]), vector.add(sums[2], sums[3])))
}
