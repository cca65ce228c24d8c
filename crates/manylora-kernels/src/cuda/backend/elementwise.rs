//! The smaller operations: embedding, norms, the gated activation, gathering rows.
#![expect(unsafe_code, reason = "launches kernels over buffers that were checked")]

use super::super::arguments::{Embed, GatedActivation, GatherRows, RmsNorm};
use super::super::error::CudaError;
use super::super::launch::Grid;
use super::super::memory::DevicePointer;
use super::CudaBackend;
use super::buffer::{CudaBuffer, CudaVector, CudaWeight};
use super::linear::count_of;
use super::step::{StepState, bucket};

const THREADS: u32 = 128;
const NORM_THREADS: u32 = 256;
/// Columns of a block of the gated activation.
const ACTIVATION_COLUMNS: usize = 1024;

/// See [`crate::Backend::embed`]; deltas are `linear`'s.
pub(super) fn embed(
    backend: &CudaBackend,
    state: &StepState,
    weight: &CudaWeight,
    out: &CudaBuffer,
) -> Result<(), CudaError> {
    let (block, rows) = (&state.batch, state.batch.rows);
    assert!(rows <= out.rows && out.width == weight.inputs, "{rows} rows of {} do not fit", weight.inputs);
    let arguments = Embed {
        header: block.pointer(block.sections.header),
        tokens: block.pointer(block.sections.tokens),
        weight: weight.pointer,
        width: weight.inputs as i32,
        out: out.sums(),
        out_stride: out.stride as i32,
    };
    // SAFETY: the result was checked; tokens are checked at the border of the engine.
    unsafe { backend.kernels.embed.launch(&state.stream, Grid::new(bucket(rows) as u32, 1, THREADS), &arguments) }
}

/// See [`crate::Backend::rms_norm`].
pub(super) fn rms_norm(
    backend: &CudaBackend,
    state: &StepState,
    rows: usize,
    input: &CudaBuffer,
    weight: &CudaVector,
    epsilon: f32,
    out: &CudaBuffer,
) -> Result<(), CudaError> {
    let width = weight.len();
    assert!(width == input.width && width == out.width, "a norm of {width} columns of {}", input.width);
    assert!(rows <= input.rows && rows <= out.rows && input.set == out.set, "{rows} rows do not fit");
    let block = state.rows(input.set);
    assert_eq!(rows, block.rows, "the step began with other rows");
    let grid = Grid::new(bucket(rows) as u32, 1, NORM_THREADS);
    let header = block.pointer(block.sections.header);
    let (count, row_index, add) = (count_of(input.set), DevicePointer::NULL, DevicePointer::NULL);
    let (input_stride, out_stride) = (input.stride as i32, out.stride as i32);
    let (input, weight, width) = (input.sums(), weight.pointer(), width as i32);
    if out.is_sums() {
        let out = out.sums();
        let arguments =
            RmsNorm { header, count, row_index, input, input_stride, add, weight, epsilon, width, out, out_stride };
        // SAFETY: rows and columns were checked.
        return unsafe { backend.kernels.rms_norm_sums.launch(&state.stream, grid, &arguments) };
    }
    let out = out.inputs();
    let arguments =
        RmsNorm { header, count, row_index, input, input_stride, add, weight, epsilon, width, out, out_stride };
    // SAFETY: as above.
    unsafe { backend.kernels.rms_norm.launch(&state.stream, grid, &arguments) }
}

/// See [`crate::Backend::gated_activation`].
pub(super) fn gated_activation(
    backend: &CudaBackend,
    state: &StepState,
    rows: usize,
    gate: &CudaBuffer,
    up: &CudaBuffer,
    out: &CudaBuffer,
) -> Result<(), CudaError> {
    let width = gate.width;
    assert!(width == up.width && width == out.width, "gate, up and the result have one width");
    assert!(rows <= gate.rows && rows <= up.rows && rows <= out.rows, "{rows} rows do not fit");
    assert_eq!(rows, state.batch.rows, "the step began with other rows");
    let arguments = GatedActivation {
        header: state.batch.pointer(state.batch.sections.header),
        gate: gate.sums(),
        gate_stride: gate.stride as i32,
        up: up.sums(),
        up_stride: up.stride as i32,
        width: width as i32,
        out: out.inputs(),
        out_stride: out.stride as i32,
    };
    let grid = Grid::new(width.div_ceil(ACTIVATION_COLUMNS) as u32, bucket(rows) as u32, THREADS);
    // SAFETY: rows and columns were checked.
    unsafe { backend.kernels.gated_activation.launch(&state.stream, grid, &arguments) }
}

/// See [`crate::Backend::gather_rows`]: the rows that the samples began with.
pub(super) fn gather_rows(
    backend: &CudaBackend,
    state: &StepState,
    rows: &[u32],
    input: &CudaBuffer,
    out: &CudaBuffer,
) -> Result<(), CudaError> {
    let block = &state.samples;
    assert!(rows.len() == block.rows && rows.len() <= out.rows, "the samples began with other rows");
    assert!(rows.iter().all(|&row| (row as usize) < input.rows) && input.width == out.width, "rows do not fit");
    let arguments = GatherRows {
        header: block.pointer(block.sections.header),
        row_index: block.pointer(block.sections.tokens),
        input: input.sums(),
        input_stride: input.stride as i32,
        width: input.width as i32,
        out: out.sums(),
        out_stride: out.stride as i32,
    };
    // SAFETY: rows and columns were checked.
    unsafe { backend.kernels.gather_rows.launch(&state.stream, Grid::new(rows.len() as u32, 1, THREADS), &arguments) }
}
