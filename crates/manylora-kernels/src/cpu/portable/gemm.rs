//! Panel kernels in plain Rust: multiply, then add (no fused operation, which would need the processor's help).
#![expect(unsafe_code, reason = "rows and panels come as pointers, as for every level")]

use crate::cpu::kernels::{ExpandJob, PanelJob, PanelRow};
use crate::cpu::pack::bf16_to_f32;

const WIDTH: usize = 16;

/// Panels of 16 outputs, f32.
///
/// # Safety
/// The job's pointers are valid for what it says.
pub(in crate::cpu) unsafe fn panel_f32(job: &PanelJob<'_>) {
    // SAFETY: passed on.
    unsafe { panel::<f32>(job) }
}

/// Panels of 16 outputs, bf16.
///
/// # Safety
/// As for [`panel_f32`].
pub(in crate::cpu) unsafe fn panel_bf16(job: &PanelJob<'_>) {
    // SAFETY: passed on.
    unsafe { panel::<u16>(job) }
}

/// The expand of rows with an adapter each, f32.
///
/// # Safety
/// As for [`panel_f32`].
pub(in crate::cpu) unsafe fn expand_f32(job: &ExpandJob<'_>) {
    // SAFETY: passed on.
    unsafe { expand::<f32>(job) }
}

/// The expand of rows with an adapter each, bf16.
///
/// # Safety
/// As for [`panel_f32`].
pub(in crate::cpu) unsafe fn expand_bf16(job: &ExpandJob<'_>) {
    // SAFETY: passed on.
    unsafe { expand::<u16>(job) }
}

/// An element type of panels.
trait Element: Copy {
    /// The 16 weights of one input, in the order of the outputs.
    fn unpack(step: &[Self; WIDTH]) -> [f32; WIDTH];
}

impl Element for f32 {
    #[inline]
    fn unpack(step: &[Self; WIDTH]) -> [f32; WIDTH] {
        *step
    }
}

impl Element for u16 {
    #[inline]
    fn unpack(step: &[Self; WIDTH]) -> [f32; WIDTH] {
        let mut weights = [0.0; WIDTH];
        for lane in 0..WIDTH / 2 {
            weights[lane] = bf16_to_f32(step[2 * lane]);
            weights[lane + WIDTH / 2] = bf16_to_f32(step[2 * lane + 1]);
        }
        weights
    }
}

unsafe fn panel<E: Element>(job: &PanelJob<'_>) {
    for panel in 0..job.panels {
        // SAFETY: the panel is one of the job's.
        let weights = unsafe { job.weights.add(panel * job.panel_stride) }.cast::<[E; WIDTH]>();
        for row in job.rows {
            // SAFETY: the job's pointers are valid for `steps` inputs and weights and for the panels' outputs.
            unsafe {
                let tile = row.tile.add(panel * WIDTH).cast::<[f32; WIDTH]>();
                let input = row.input.cast::<f32>().add(job.first_step);
                let mut sums = if job.fresh { [0.0; WIDTH] } else { *tile };
                for step in 0..job.steps {
                    let x = *input.add(step);
                    let w = E::unpack(&*weights.add(step));
                    for lane in 0..WIDTH {
                        sums[lane] += x * w[lane];
                    }
                }
                *tile = sums;
            }
        }
    }
}

unsafe fn expand<E: Element>(job: &ExpandJob<'_>) {
    for row in job.rows {
        // SAFETY: the row and its panels are the job's.
        unsafe {
            let tile = job.tile.add(row.tile_row * job.width);
            let rows = [PanelRow { input: row.input.cast(), tile }];
            let weights = row.b.add(job.panel * row.panel_bytes);
            panel::<E>(&PanelJob {
                rows: &rows,
                weights,
                next: weights,
                panel_stride: row.panel_bytes,
                panels: job.panels,
                steps: row.steps,
                first_step: 0,
                fresh: false,
                ahead: None,
            });
        }
    }
}
