//! The shrink in plain Rust: dot products in eight lanes that are added up pairwise at the end.
#![expect(unsafe_code, reason = "rows and factors come as pointers, as for every level")]

use crate::cpu::kernels::ShrinkJob;
use crate::cpu::pack::bf16_to_f32;

const LANES: usize = 8;

/// A in f32.
///
/// # Safety
/// The job's pointers are valid for what it says.
pub(in crate::cpu) unsafe fn shrink_f32(job: &ShrinkJob<'_>) {
    // SAFETY: passed on.
    unsafe { shrink(job, |value: f32| value) }
}

/// A in bf16.
///
/// # Safety
/// As for [`shrink_f32`].
pub(in crate::cpu) unsafe fn shrink_bf16(job: &ShrinkJob<'_>) {
    // SAFETY: passed on.
    unsafe { shrink(job, bf16_to_f32) }
}

#[inline]
unsafe fn shrink<E: Copy>(job: &ShrinkJob<'_>, to_f32: impl Fn(E) -> f32) {
    for rank in job.ranks.clone() {
        // SAFETY: row `rank` of A has `inputs` elements.
        let a = unsafe { std::slice::from_raw_parts(job.a.cast::<E>().add(rank * job.inputs), job.inputs) };
        for row in job.rows {
            // SAFETY: a row has `inputs` elements.
            let x = unsafe { std::slice::from_raw_parts(row.input, job.inputs) };
            let mut sums = [0.0f32; LANES];
            let (a_blocks, x_blocks) = (a.chunks_exact(LANES), x.chunks_exact(LANES));
            let (a_tail, x_tail) = (a_blocks.remainder(), x_blocks.remainder());
            for (a, x) in a_blocks.zip(x_blocks) {
                for lane in 0..LANES {
                    sums[lane] += to_f32(a[lane]) * x[lane];
                }
            }
            for (lane, (a, x)) in a_tail.iter().zip(x_tail).enumerate() {
                sums[lane] += to_f32(*a) * x;
            }
            let four = [sums[0] + sums[4], sums[1] + sums[5], sums[2] + sums[6], sums[3] + sums[7]];
            let sum = (four[0] + four[2]) + (four[1] + four[3]);
            // SAFETY: results hold `rank` elements at least.
            unsafe { *row.result.add(rank) = row.scale * sum };
        }
    }
}
