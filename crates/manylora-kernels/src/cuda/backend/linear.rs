//! Linear maps: one product for all parts that lie side by side, then one shrink and one expand for all adapters.
#![expect(unsafe_code, reason = "launches kernels and products over buffers that were checked")]

use super::super::arguments::{BiasAdd, HeaderField, LoraEmbed, LoraExpand, LoraShrink};
use super::super::error::CudaError;
use super::super::launch::Grid;
use super::super::matmul::MatmulShape;
use super::super::memory::DevicePointer;
use super::CudaBackend;
use super::adapter::touched;
use super::buffer::{self, CudaBuffer, CudaWeight, optional};
use super::product::Operands;
use super::step::{PARTS, StepState, bucket, tile_grid};
use crate::backend::{LinearOutput, LinearPart, RowSet};
use crate::site::Site;

/// Threads of a block of all kernels here.
const THREADS: u32 = 128;
/// Columns of a block of `lora_expand`, and of `bias_add`.
const EXPAND_COLUMNS: usize = 256;
const BIAS_COLUMNS: usize = 512;

/// A result as kernels take it: address, stride, width.
type Out = (DevicePointer<f32>, i32, i32);
const NO_OUT: Out = (DevicePointer::NULL, 0, 0);

fn out_of(part: &LinearPart<'_, CudaBackend>) -> Out {
    (part.out.sums(), part.out.stride as i32, part.weight.outputs as i32)
}

/// See [`crate::Backend::linear`].
pub(super) fn linear(
    backend: &CudaBackend,
    state: &mut StepState,
    rows: usize,
    input: &CudaBuffer,
    parts: &mut [LinearPart<'_, CudaBackend>],
) -> Result<(), CudaError> {
    if rows == 0 || parts.is_empty() {
        return Ok(());
    }
    for part in parts.iter() {
        let CudaWeight { outputs, inputs, .. } = *part.weight;
        assert!(rows <= input.rows && inputs <= input.width, "input of {rows} x {inputs} does not fit its buffer");
        assert!(rows <= part.out.rows && outputs <= part.out.width, "result of {rows} x {outputs} does not fit");
        assert!(part.out.set == input.set, "input and result are of the same rows");
        assert!(part.bias.is_none_or(|bias| bias.len() == outputs), "a bias has one value per output");
    }
    assert_eq!(rows, state.rows(input.set).rows, "the step began with other rows");
    let mut first = 0;
    while first < parts.len() {
        let mut end = first + 1;
        while end < parts.len() && side_by_side(&parts[end - 1], &parts[end]) {
            end += 1;
        }
        product(backend, state, rows, input, &parts[first..end])?;
        first = end;
    }
    let mut first = 0;
    while first < parts.len() {
        let site = parts[first].site.0;
        let follows = |(index, part): &(usize, &LinearPart<'_, CudaBackend>)| part.site.0 == site + *index as u32;
        let count = parts[first..].iter().enumerate().take(PARTS).take_while(follows).count();
        deltas(backend, state, input, &parts[first..first + count])?;
        first += count;
    }
    for parts in parts.chunks(PARTS) {
        biases(backend, state, rows, parts)?;
    }
    Ok(())
}

/// Whether one product can compute both: the weights follow each other, and so do the columns of the results.
fn side_by_side(left: &LinearPart<'_, CudaBackend>, right: &LinearPart<'_, CudaBackend>) -> bool {
    left.mode == right.mode
        && left.weight.inputs == right.weight.inputs
        && left.weight.pointer.add(left.weight.outputs * left.weight.inputs) == right.weight.pointer
        && left.out.stride == right.out.stride
        && left.out.sums().add(left.weight.outputs) == right.out.sums()
}

fn product(
    backend: &CudaBackend,
    state: &mut StepState,
    rows: usize,
    input: &CudaBuffer,
    parts: &[LinearPart<'_, CudaBackend>],
) -> Result<(), CudaError> {
    let (first, out) = (&parts[0], &parts[0].out);
    let shape = MatmulShape {
        // Rows between are of other steps; nobody reads their results.
        rows: bucket(rows).min(input.rows).min(out.rows),
        output: parts.iter().map(|part| part.weight.outputs).sum(),
        input: first.weight.inputs,
        x_stride: input.stride,
        out_stride: out.stride,
        operands: buffer::operands(backend.dtype),
        add: first.mode == LinearOutput::Add,
    };
    let block = state.rows(input.set);
    let operands = Operands {
        header: block.pointer(block.sections.header),
        count: count_of(input.set),
        x: input.inputs(),
        weight: first.weight.pointer,
        out: out.sums(),
    };
    let StepState { products, stream, .. } = state;
    // SAFETY: rows and columns were checked to lie in the buffers, and the parts lie side by side; all start at granules
    // plus multiples of 8 elements.
    unsafe { products.run(stream, shape, &operands) }
}

/// Adds the deltas of the step's adapters to parts whose sites follow each other.
fn deltas(
    backend: &CudaBackend,
    state: &StepState,
    input: &CudaBuffer,
    parts: &[LinearPart<'_, CudaBackend>],
) -> Result<(), CudaError> {
    let block = state.rows(input.set);
    if parts.iter().all(|part| touched(part.site) & block.touched == 0) {
        return Ok(());
    }
    let (sections, table) = (&block.sections, &state.table);
    let inputs = parts[0].weight.inputs;
    let shrink = LoraShrink {
        header: block.pointer(sections.header),
        tile_slot: block.pointer(sections.tile_slot),
        tile_first: block.pointer(sections.tile_first),
        tile_count: block.pointer(sections.tile_count),
        entry_row: block.pointer(sections.entry_row),
        a_pointers: table.a_pointers(),
        ranks: table.ranks(),
        sites: backend.sites as i32,
        site: parts[0].site.0 as i32,
        parts: parts.len() as i32,
        x: input.inputs(),
        x_stride: input.stride as i32,
        input: inputs as i32,
        s: state.shrunk.pointer(),
    };
    let grid = Grid::new(8 * parts.len() as u32, tile_grid(block.tiles) as u32, THREADS);
    // SAFETY: the plan's rows are the step's, its slots are in the table, and there is room for its results.
    unsafe { backend.kernels.lora_shrink.launch(&state.stream, grid, &shrink) }?;
    let outs = std::array::from_fn(|index| parts.get(index).map_or(NO_OUT, out_of));
    expand(backend, state, input.set, parts[0].site, parts.len(), inputs, outs)
}

fn expand(
    backend: &CudaBackend,
    state: &StepState,
    set: RowSet,
    site: Site,
    parts: usize,
    input: usize,
    outs: [Out; PARTS],
) -> Result<(), CudaError> {
    let block = state.rows(set);
    let (sections, table) = (&block.sections, &state.table);
    let arguments = LoraExpand {
        header: block.pointer(sections.header),
        tile_slot: block.pointer(sections.tile_slot),
        tile_first: block.pointer(sections.tile_first),
        tile_count: block.pointer(sections.tile_count),
        entry_row: block.pointer(sections.entry_row),
        entry_slot: block.pointer(sections.entry_slot),
        entry_scale: block.pointer(sections.entry_scale),
        row_first: block.pointer(sections.row_first),
        row_entries: block.pointer(sections.row_entries),
        b_pointers: table.b_pointers(),
        ranks: table.ranks(),
        scales: table.scales(),
        sites: backend.sites as i32,
        site: site.0 as i32,
        parts: parts as i32,
        input: input as i32,
        s: state.shrunk.pointer(),
        out_0: outs[0].0,
        stride_0: outs[0].1,
        width_0: outs[0].2,
        out_1: outs[1].0,
        stride_1: outs[1].1,
        width_1: outs[1].2,
        out_2: outs[2].0,
        stride_2: outs[2].1,
        width_2: outs[2].2,
    };
    let columns: usize = outs.iter().map(|out| (out.2 as usize).div_ceil(EXPAND_COLUMNS)).sum();
    let grid = Grid::new(columns as u32, tile_grid(block.first_tiles) as u32, THREADS);
    // SAFETY: as for the shrink; the results were checked to have these rows and columns.
    unsafe { backend.kernels.lora_expand.launch(&state.stream, grid, &arguments) }
}

/// The deltas of adapters that touch the embedding.
pub(super) fn embed_deltas(
    backend: &CudaBackend,
    state: &StepState,
    site: Site,
    out: &CudaBuffer,
) -> Result<(), CudaError> {
    let block = &state.batch;
    if touched(site) & block.touched == 0 {
        return Ok(());
    }
    let (sections, table) = (&block.sections, &state.table);
    let arguments = LoraEmbed {
        header: block.pointer(sections.header),
        tile_slot: block.pointer(sections.tile_slot),
        tile_first: block.pointer(sections.tile_first),
        tile_count: block.pointer(sections.tile_count),
        entry_row: block.pointer(sections.entry_row),
        tokens: block.pointer(sections.tokens),
        a_pointers: table.a_pointers(),
        ranks: table.ranks(),
        sites: backend.sites as i32,
        site: site.0 as i32,
        s: state.shrunk.pointer(),
    };
    let grid = Grid::new(tile_grid(block.tiles) as u32, 1, THREADS);
    // SAFETY: as for the shrink.
    unsafe { backend.kernels.lora_embed.launch(&state.stream, grid, &arguments) }?;
    let out = (out.sums(), out.stride as i32, out.width as i32);
    expand(backend, state, RowSet::Batch, site, 1, 0, [out, NO_OUT, NO_OUT])
}

fn biases(
    backend: &CudaBackend,
    state: &StepState,
    rows: usize,
    parts: &[LinearPart<'_, CudaBackend>],
) -> Result<(), CudaError> {
    if parts.iter().all(|part| part.bias.is_none()) {
        return Ok(());
    }
    let set = parts[0].out.set;
    let block = state.rows(set);
    let outs: [Out; PARTS] = std::array::from_fn(|index| parts.get(index).map_or(NO_OUT, out_of));
    let bias = |index: usize| optional(parts.get(index).and_then(|part| part.bias));
    let arguments = BiasAdd {
        header: block.pointer(block.sections.header),
        count: count_of(set),
        parts: parts.len() as i32,
        out_0: outs[0].0,
        stride_0: outs[0].1,
        width_0: outs[0].2,
        bias_0: bias(0),
        out_1: outs[1].0,
        stride_1: outs[1].1,
        width_1: outs[1].2,
        bias_1: bias(1),
        out_2: outs[2].0,
        stride_2: outs[2].1,
        width_2: outs[2].2,
        bias_2: bias(2),
    };
    let widest = outs.iter().map(|out| out.2 as usize).max().unwrap_or(0);
    let blocks = [widest.div_ceil(BIAS_COLUMNS) as u32, bucket(rows) as u32, parts.len() as u32];
    let grid = Grid { blocks, threads: THREADS, shared: 0 };
    // SAFETY: results and biases were checked; rows beyond the header's are left alone.
    unsafe { backend.kernels.bias_add.launch(&state.stream, grid, &arguments) }
}

/// Where in the header the number of these rows is.
pub(super) const fn count_of(set: RowSet) -> i32 {
    match set {
        RowSet::Batch => HeaderField::Rows as i32,
        RowSet::Samples => HeaderField::SampleRows as i32,
    }
}
