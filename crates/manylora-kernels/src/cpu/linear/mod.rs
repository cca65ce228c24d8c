//! The driver of `linear`: up to four maps of one input, base and adapters in one pass.
//!
//! A call is one parallel region over the panels of all its parts; with adapters, a first region computes the shrink of
//! all entries for all parts. A thread draws a run of panels, takes a panel, runs all rows through it into a tile in the
//! first-level cache, lets each adapter's B continue the very accumulators (`expand`, in the plan's order), adds the bias
//! and writes the result. Each (row, output) is one chain of additions in a fixed order, so it does not depend on the
//! other rows.
//!
//! `segments` looks the adapters up, `embed` adds the embedding's deltas, `tiled` is what a level with tile registers does
//! instead.
#![expect(unsafe_code, reason = "threads write disjoint columns of shared outputs")]

mod embed;
mod segments;
mod tiled;

use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) use embed::embed_deltas;
use segments::resolve_segments;
pub(super) use tiled::gated_linear;

use super::CpuBackend;
use super::adapter::CpuAdapter;
use super::ahead::{Ahead, prefetch};
use super::expand::Expand;
use super::kernels::{
    MAX_PANELS, PanelJob, PanelRow, ShrinkJob, ShrinkRow, block_rows, blocks_of_rows, panel_kernel, shrink_kernel,
};
use super::level::SimdLevel;
use super::memory::{AlignedVec, Buffer};
use super::pack::PanelFormat;
use super::pool::Pool;
use super::scratch::{ScratchSizes, Segment};
use super::tiles::{self, Registers, RowTiles, TileExpand};
use crate::backend::{AdapterTable, LinearOutput, LinearPart};
use crate::batch::RowAdapterPlan;
use crate::error::KernelError;
use crate::site::Site;

/// Most parts of one call.
const MAX_PARTS: usize = 4;
/// Most rows that pass through a panel together.
pub(super) const MOST_ROWS: usize = 48;
/// Rows that do so however wide they are, so that each read of a panel serves many.
const FEWEST_ROWS: usize = 24;
/// Bytes of activations that should stay in the second-level cache while panels pass by.
const ROWS_BYTES: usize = 768 << 10;
/// Bytes of a panel that several blocks of rows pass by one after the other, before the next bytes: what the caches next
/// to the core hold beside the rows.
const STRETCH_BYTES: usize = 16 << 10;
/// The same where something is fetched in the gaps between blocks: more of them, so that few lines are asked for at once.
const STRETCH_BYTES_WITH_GAPS: usize = 8 << 10;
/// Runs that a thread draws of each block of rows when nobody is late: few enough to read long stretches of memory, many
/// enough to even out.
const RUNS_PER_THREAD: usize = 8;
/// Bytes of weights in a run at most, and the same times the rows that they are multiplied with (ten to thirty
/// microseconds), so that nobody waits long for the last one.
const RUN_BYTES: usize = 512 << 10;
const RUN_WORK: usize = 1 << 20;
/// Outputs of the widest panel, and of a panel of B.
const WIDEST: usize = 32;
pub(super) const B_WIDTH: usize = 16;
/// Values of a thread's tile.
const TILE: usize = MOST_ROWS * WIDEST;
const _: () = assert!(TILE >= MAX_PANELS * WIDEST && TILE >= 3 * 2 * WIDEST);

/// What a region needs to know of one part.
#[derive(Clone, Copy)]
struct Part {
    weights: *const u8,
    format: PanelFormat,
    panels: usize,
    outputs: usize,
    bias: *const f32,
    out: *mut f32,
    out_width: usize,
    mode: LinearOutput,
    /// Range of the part's segments.
    first_segment: usize,
    last_segment: usize,
}

/// One call, as its threads see it.
struct Call<'a> {
    level: SimdLevel,
    rows: usize,
    input: *const f32,
    input_width: usize,
    inputs: usize,
    parts: &'a [Part],
    plan: &'a RowAdapterPlan,
    segments: &'a [Segment],
    shrunk: *mut f32,
    scratch: *mut f32,
    scratch_each: usize,
    /// Rows that pass through a panel together.
    tile_rows: usize,
    /// Panels of all parts, and the number of runs that they are drawn in for each block of rows.
    panels: usize,
    runs: usize,
    /// Panels that a run has a multiple of, where it can: what kernels compute side by side.
    together: usize,
    /// The next ticket: runs of the first block of rows, then of the second, ...
    next: AtomicUsize,
    /// Some part wants its rows as pairs of bf16.
    pairs: bool,
    /// The rows as tiles, where the base or adapters are multiplied so.
    tiles: Option<RowTiles>,
    /// Where the gated activation of the two parts goes, which are not written then, and its width.
    gated: Option<(*mut f32, usize)>,
}

/// A block of rows, as all its runs need it.
struct Prepared<'a> {
    block: usize,
    first_row: usize,
    rows: usize,
    /// For each part.
    deltas: [Option<Deltas<'a>>; MAX_PARTS],
}

/// The adapters of one part for a block of rows.
#[expect(clippy::large_enum_variant, reason = "both are large, and made once per block of rows")]
enum Deltas<'a> {
    Rows(Expand<'a>),
    Tiles(TileExpand<'a>),
}

impl Deltas<'_> {
    const fn is_empty(&self) -> bool {
        match self {
            Self::Rows(expand) => expand.is_empty(),
            Self::Tiles(expand) => expand.is_empty(),
        }
    }

    fn ahead(&self, first_output: usize, width: usize, gaps: usize) -> Option<Ahead<'_>> {
        match self {
            Self::Rows(expand) => expand.ahead(first_output, width, gaps),
            Self::Tiles(expand) => expand.ahead(first_output, width, gaps),
        }
    }
}

/// What a thread works with: its sums (the tile of a block of rows), and behind them what its kernels need; and its tile
/// registers.
struct Bench {
    tile: *mut f32,
    /// A second part's sums, where there are tile registers.
    second_tile: *mut f32,
    spare: *mut f32,
    registers: Registers,
}

// SAFETY: threads read shared inputs, and write disjoint columns of the outputs, disjoint shrink results and their own
// scratch.
unsafe impl Sync for Call<'_> {}

/// Working memory for steps of at most so many rows, entries, ranks and inputs: what [`reserve`] takes.
pub(super) fn scratch_sizes(level: SimdLevel, rows: usize, entries: usize, rank: usize, width: usize) -> ScratchSizes {
    // The largest `scratch_each` of any input up to `width`: narrower inputs let more rows pass together, so that pairs
    // take half of ROWS_BYTES at most, unless the fewest rows take more.
    let words = width.div_ceil(2);
    let pairs = match level {
        SimdLevel::Avx512Bf16 => (MOST_ROWS * words).min((FEWEST_ROWS * words).max(ROWS_BYTES / 8 + MOST_ROWS)),
        SimdLevel::Portable | SimdLevel::Avx2 | SimdLevel::Amx => 0,
    };
    let tiled = level == SimdLevel::Amx;
    let thread_values = if tiled { tiles::thread_values(rows.max(MOST_ROWS)) } else { TILE + pairs };
    ScratchSizes {
        // A segment has an entry at least.
        segments: entries.saturating_mul(MAX_PARTS),
        shrunk: entries.saturating_mul(rank).saturating_mul(MAX_PARTS),
        thread_values: thread_values.next_multiple_of(16) + 16,
        rows: if tiled { RowTiles::bytes(rows, width) } else { 0 },
    }
}

/// See [`crate::Backend::reserve`].
pub(super) fn reserve(
    backend: &CpuBackend,
    rows: usize,
    entries: usize,
    rank: usize,
    width: usize,
) -> Result<(), KernelError> {
    let mut scratch = backend.scratch.lock().unwrap_or_else(PoisonError::into_inner);
    scratch.reserve_sizes(&scratch_sizes(backend.level, rows, entries, rank, width), backend.pool.threads())
}

/// Rows of `inputs` values that pass through a panel together.
fn tile_rows(inputs: usize) -> usize {
    (ROWS_BYTES / (4 * inputs.max(1)) / 6 * 6).clamp(FEWEST_ROWS, MOST_ROWS)
}

/// Values of one thread's scratch: its tile, then rows rounded to pairs, or what tile products need. Whole cache lines, and
/// one between neighbours.
fn scratch_each(level: SimdLevel, rows: usize, inputs: usize, pairs: bool) -> usize {
    let values = match level {
        SimdLevel::Amx => tiles::thread_values(rows.max(MOST_ROWS)),
        _ if pairs => TILE + tile_rows(inputs).min(rows) * inputs.div_ceil(2),
        _ => TILE,
    };
    values.next_multiple_of(16) + 16
}

/// See [`crate::Backend::linear`].
pub(super) fn linear(
    backend: &CpuBackend,
    rows: usize,
    plan: &RowAdapterPlan,
    adapters: &AdapterTable<CpuAdapter>,
    input: &Buffer,
    parts: &mut [LinearPart<'_, CpuBackend>],
) {
    run(backend, rows, plan, adapters, input, parts, None);
}

fn run(
    backend: &CpuBackend,
    rows: usize,
    plan: &RowAdapterPlan,
    adapters: &AdapterTable<CpuAdapter>,
    input: &Buffer,
    parts: &mut [LinearPart<'_, CpuBackend>],
    gated: Option<&mut Buffer>,
) {
    if rows == 0 || parts.is_empty() {
        return;
    }
    assert!(parts.len() <= MAX_PARTS, "`{}` parts in one linear call; at most {MAX_PARTS}", parts.len());
    let inputs = parts[0].weight.inputs();
    assert!(rows <= input.rows && inputs <= input.width, "input of {rows} x {inputs} does not fit its buffer");
    let mut scratch = backend.scratch.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = &mut *scratch;
    let sites: [Option<(Site, usize)>; MAX_PARTS] =
        std::array::from_fn(|index| parts.get(index).map(|part| (part.site, part.weight.outputs())));
    resolve_segments(plan, adapters, inputs, sites.iter().flatten().copied(), scratch);

    let mut pairs = false;
    let views: [Part; MAX_PARTS] = std::array::from_fn(|index| {
        // Slots beyond the call's parts repeat the last one and are cut off below.
        let index = index.min(parts.len() - 1);
        let part = &mut parts[index];
        let weight = part.weight;
        let outputs = weight.outputs();
        assert!(weight.inputs() == inputs, "parts of one linear call share their input");
        assert!(rows <= part.out.rows && outputs <= part.out.width, "result of {rows} x {outputs} does not fit");
        assert!(part.bias.is_none_or(|bias| bias.len() == outputs), "a bias has one value per output");
        pairs |= weight.format() == PanelFormat::Bf16Pairs;
        Part {
            weights: weight.data().as_ptr(),
            format: weight.format(),
            panels: weight.panels(),
            outputs,
            bias: part.bias.map_or(std::ptr::null(), AlignedVec::as_ptr),
            out: part.out.as_mut_ptr(),
            out_width: part.out.width,
            mode: part.mode,
            first_segment: scratch.segments.partition_point(|segment| segment.part < index),
            last_segment: scratch.segments.partition_point(|segment| segment.part <= index),
        }
    });

    let tiled_base = backend.level == SimdLevel::Amx && pairs;
    let tiled_adapters = scratch.segments.first().map(|segment| tiles::tiled(backend.level, segment.dtype));
    let tile_rows = match (tiled_base, tiled_adapters) {
        (true, None | Some(true)) => tiles::rows_together(inputs),
        (true, Some(false)) => MOST_ROWS,
        (false, _) => tile_rows(inputs),
    };
    let scratch_each = scratch_each(backend.level, rows, inputs, pairs);
    let threads = backend.pool.threads();
    scratch.reserve_threads(threads, scratch_each).expect("working memory of a step: reserve it at start");
    let gated = gated.map(|out| {
        assert!(rows <= out.rows && views[0].outputs <= out.width, "the activation's result does not fit");
        (out.as_mut_ptr(), out.width)
    });
    let counted = if gated.is_some() { 1 } else { parts.len() };
    let panels = views[..counted].iter().map(|part| part.panels).sum::<usize>();
    let bytes = views[..parts.len()].iter().map(|part| part.panels * part.format.panel_bytes(inputs)).sum::<usize>();
    let work = bytes * tile_rows.min(rows);
    let runs = (threads * RUNS_PER_THREAD).max(bytes.div_ceil(RUN_BYTES)).max(work.div_ceil(RUN_WORK));
    let together = panels_side_by_side(backend.level, tiled_base, rows.min(tile_rows), usize::MAX);
    let tiles = (tiled_base || tiled_adapters == Some(true)).then(|| {
        scratch.reserve_rows(RowTiles::bytes(rows, inputs)).expect("working memory of a step: reserve it at start");
        RowTiles::new(backend, rows, inputs, input, &mut scratch.rows)
    });
    let call = Call {
        level: backend.level,
        rows,
        input: input.as_ptr(),
        input_width: input.width,
        inputs,
        parts: &views[..parts.len()],
        plan,
        segments: &scratch.segments,
        shrunk: scratch.shrunk.as_mut_ptr(),
        scratch: scratch.threads.as_mut_ptr(),
        scratch_each,
        tile_rows,
        panels,
        together,
        runs: if threads == 1 { 1 } else { panels.div_ceil(together).min(runs).max(1) },
        next: AtomicUsize::new(0),
        pairs: pairs && !tiled_base,
        tiles,
        gated,
    };
    if !call.segments.is_empty() {
        backend.pool.run(&|part, parts| call.shrink(part, parts));
    }
    backend.pool.run(&|part, _| call.panels(part));
}

impl Call<'_> {
    /// A thread's own stretch of the scratch.
    fn bench(&self, thread: usize) -> Bench {
        let tile = self.scratch.wrapping_add(thread * self.scratch_each);
        let registers = Registers::of(self.level);
        let sums = tiles::sums_values(self.rows.max(MOST_ROWS));
        let (second_tile, spare) = (tile.wrapping_add(sums), tile.wrapping_add(2 * sums));
        Bench { tile, second_tile, spare, registers }
    }

    /// Whether adapters of this call are multiplied as tiles.
    fn tiled_adapters(&self) -> bool {
        self.segments.first().is_some_and(|segment| tiles::tiled(self.level, segment.dtype))
    }

    /// A thread's share of the shrink: ranks of segments, split by their number of dot products.
    fn shrink(&self, part: usize, parts: usize) {
        if self.tiled_adapters() {
            self.tiled_shrink(part, parts);
            return;
        }
        let total: usize = self.segments.iter().map(|segment| segment.rank * segment.count).sum();
        let (from, to) = (total * part / parts, total * (part + 1) / parts);
        let mut before = 0;
        for segment in self.segments {
            let cost = segment.rank * segment.count;
            // Where a share's border falls within this segment: between blocks of four ranks, the kernels' block.
            let border = |position: usize| {
                let within = position.saturating_sub(before);
                if within >= cost { segment.rank } else { ((within / segment.count + 2) / 4 * 4).min(segment.rank) }
            };
            let ranks = border(from)..border(to);
            before += cost;
            if ranks.is_empty() {
                continue;
            }
            let kernel = shrink_kernel(self.level, segment.dtype);
            let entries = &self.plan.entries()[segment.first..segment.first + segment.count];
            for (chunk, entries) in entries.chunks(MOST_ROWS).enumerate() {
                let mut list =
                    [ShrinkRow { input: std::ptr::null(), result: std::ptr::null_mut(), scale: 0.0 }; MOST_ROWS];
                for (index, entry) in entries.iter().enumerate() {
                    let row = entry.row as usize;
                    assert!(row < self.rows, "the plan names row `{row}` of a batch of {}", self.rows);
                    let result = segment.shrunk + (chunk * MOST_ROWS + index) * segment.rank;
                    // SAFETY: the row lies in the input, the results in the scratch that was sized for them.
                    list[index] = unsafe {
                        ShrinkRow {
                            input: self.input.add(row * self.input_width),
                            result: self.shrunk.add(result),
                            scale: segment.scale * entry.scale,
                        }
                    };
                }
                let rows = &list[..entries.len()];
                let job = ShrinkJob { rows, a: segment.a, inputs: self.inputs, ranks: ranks.clone() };
                // SAFETY: A is `[rank, inputs]`, the rows are as above, and the backend's level is available.
                unsafe { kernel(&job) };
            }
        }
    }

    /// A thread's work on the panels of all parts: it draws tickets, each of them a run of panels for one block of rows,
    /// until none is left. So a thread that lost its core for a while holds back one ticket, not its share of the call.
    fn panels(&self, thread: usize) {
        let mut bench = self.bench(thread);
        let blocks = self.rows.div_ceil(self.tile_rows);
        let mut prepared: Option<Prepared<'_>> = None;
        loop {
            let ticket = self.next.fetch_add(1, Ordering::Relaxed);
            let (block, run) = (ticket / self.runs, ticket % self.runs);
            if block >= blocks {
                return;
            }
            if prepared.as_ref().is_none_or(|prepared| prepared.block != block) {
                prepared = Some(self.prepare(block, bench.tile));
            }
            let prepared = prepared.as_ref().expect("just made");
            match self.gated {
                Some(out) => self.run_of_gates(self.run(run), prepared, out, &mut bench),
                None => self.run_of_panels(self.run(run), prepared, &mut bench),
            }
        }
    }

    /// What all runs of a block of rows need.
    fn prepare(&self, block: usize, tile: *mut f32) -> Prepared<'_> {
        let (first_row, rows) = if self.tiles.is_some() {
            // Whole groups.
            let rows = Pool::split(self.rows, tiles::TILE_ROWS, block, self.rows.div_ceil(self.tile_rows));
            (rows.start, rows.len())
        } else {
            let first_row = (0..block).map(|before| block_rows(self.rows, self.tile_rows, before)).sum();
            (first_row, block_rows(self.rows, self.tile_rows, block))
        };
        if self.pairs {
            self.round_rows(first_row, rows, tile);
        }
        let deltas = std::array::from_fn(|part| self.parts.get(part).map(|part| self.deltas(part, first_row, rows)));
        Prepared { block, first_row, rows, deltas }
    }

    /// The panels of a run, counted through all parts.
    fn run(&self, run: usize) -> Range<usize> {
        Pool::split(self.panels, self.together, run, self.runs)
    }

    /// Where a panel's weights are.
    fn weights(&self, mut panel: usize) -> *const u8 {
        for part in self.parts {
            if panel < part.panels {
                return part.weights.wrapping_add(panel * part.format.panel_bytes(self.inputs));
            }
            panel -= part.panels;
        }
        unreachable!("no panel `{panel}` behind the last part's")
    }

    /// The weights that a thread will probably read when it is done with the panels before `panel` of a run that ends with
    /// `end`: the run's next ones, or those of the run that it would draw now; where none is left, what it just read.
    fn follows(&self, panel: usize, end: usize) -> *const u8 {
        if panel < end {
            return self.weights(panel);
        }
        let ticket = self.next.load(Ordering::Relaxed);
        let left = ticket < self.runs * self.rows.div_ceil(self.tile_rows);
        self.weights(if left { self.run(ticket % self.runs).start } else { panel - 1 })
    }

    /// Panels (counted through all parts) of one block of rows.
    fn run_of_panels(&self, share: Range<usize>, prepared: &Prepared<'_>, bench: &mut Bench) {
        let (first_row, rows, tile) = (prepared.first_row, prepared.rows, bench.tile);
        let mut before = 0;
        let mut list = [PanelRow { input: std::ptr::null(), tile }; MOST_ROWS];
        for (part, deltas) in self.parts.iter().zip(prepared.deltas.iter().flatten()) {
            let first = share.start.saturating_sub(before).min(part.panels);
            let last = share.end.saturating_sub(before).min(part.panels);
            before += part.panels;
            if first == last {
                continue;
            }
            let pairs = part.format == PanelFormat::Bf16Pairs;
            let tiled = pairs && self.level == SimdLevel::Amx;
            let mut panel = first;
            while panel < last {
                let group = panels_side_by_side(self.level, tiled, rows, last - panel);
                let width = group * part.format.width();
                for (index, row) in list.iter_mut().take(if tiled { 0 } else { rows }).enumerate() {
                    // SAFETY: inputs and tile have room for these rows.
                    unsafe {
                        row.tile = tile.add(index * width);
                        row.input = if pairs {
                            tile.add(TILE + index * self.inputs.div_ceil(2)).cast()
                        } else {
                            self.input.add((first_row + index) * self.input_width).cast()
                        };
                    }
                }
                let first_output = panel * part.format.width();
                // As many as the first-level cache keeps until they are written.
                for index in 0..rows.min(MOST_ROWS) {
                    let out = part.out.wrapping_add((first_row + index) * part.out_width + first_output);
                    for column in (0..width).step_by(16) {
                        prefetch(out.wrapping_add(column).cast());
                    }
                }
                let follows = self.follows(before - part.panels + panel + group, share.end);
                if tiled {
                    self.tiled_base(
                        part,
                        (panel, group),
                        (first_row, rows),
                        deltas,
                        follows,
                        (tile, &mut bench.registers),
                    );
                } else {
                    self.base(part, (panel, group), &list[..rows], deltas, follows);
                }
                let last_output = (first_output + width).min(part.outputs);
                // SAFETY: the tile has these rows; B has panels for all outputs of the part.
                unsafe { Self::add_deltas(deltas, (first_output, last_output), width, tile, bench) };
                if tiled {
                    Self::finish_tiled(part, (first_output, last_output), width, (first_row, rows), tile);
                } else {
                    Self::finish(part, first_output, width, first_row, rows, tile);
                }
                panel += group;
            }
        }
    }

    /// Rounds rows to pairs of bf16, behind the thread's tile.
    fn round_rows(&self, first_row: usize, rows: usize, tile: *mut f32) {
        #[cfg(target_arch = "x86_64")]
        for index in 0..rows {
            let words = self.inputs.div_ceil(2);
            // SAFETY: the row lies in the input; the thread's scratch has room for `words` words per row behind the
            // tile; pairs are packed only where the level is available.
            unsafe {
                let row =
                    std::slice::from_raw_parts(self.input.add((first_row + index) * self.input_width), self.inputs);
                let out = std::slice::from_raw_parts_mut(tile.add(TILE + index * words).cast::<u32>(), words);
                crate::cpu::x86::avx512_gemm::round_to_pairs(row, out);
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("pairs are packed for AVX-512 only: {first_row} {rows} {tile:?}");
    }

    /// The base weights: one chain per (row, output) over all inputs. Meanwhile B of the rows' adapters is fetched.
    /// Behind the last bytes, what `follows` is.
    fn base(
        &self,
        part: &Part,
        (panel, group): (usize, usize),
        rows: &[PanelRow],
        deltas: &Deltas<'_>,
        follows: *const u8,
    ) {
        let kernel = panel_kernel(self.level, part.format);
        let steps = self.inputs.div_ceil(part.format.inputs_per_step());
        let panel_bytes = part.format.panel_bytes(self.inputs);
        let (first_output, width) = (panel * part.format.width(), group * part.format.width());
        // In one go while few rows read the panel once and nothing is to be fetched meanwhile; else in stretches, all of
        // about the same length.
        let most_bytes = if deltas.is_empty() { STRETCH_BYTES } else { STRETCH_BYTES_WITH_GAPS };
        let whole = rows.len() <= 6 && deltas.is_empty();
        let stretches = if whole { 1 } else { (steps * part.format.step_bytes()).div_ceil(most_bytes).max(1) };
        let stretch = steps.div_ceil(stretches).next_multiple_of(16);
        let gaps = blocks_of_rows(self.level, rows.len(), steps, stretch);
        let ahead = deltas.ahead(first_output, width, gaps);
        let mut first_step = 0;
        loop {
            // SAFETY: the panel and the step lie in the packed weight.
            let weights = unsafe { part.weights.add(panel * panel_bytes + first_step * part.format.step_bytes()) };
            let last = first_step + stretch >= steps;
            let job = PanelJob {
                rows,
                weights,
                panel_stride: panel_bytes,
                panels: group,
                steps: stretch.min(steps - first_step),
                first_step,
                fresh: first_step == 0,
                next: if last { follows } else { weights.wrapping_add(stretch * part.format.step_bytes()) },
                ahead: ahead.as_ref(),
            };
            // SAFETY: panels, inputs and tiles are as large as the job says; the backend's level is available.
            unsafe { kernel(&job) };
            first_step += stretch;
            if first_step >= steps {
                break;
            }
        }
    }

    /// The part's adapters for a block of rows.
    fn deltas(&self, part: &Part, first_row: usize, rows: usize) -> Deltas<'_> {
        let segments = &self.segments[part.first_segment..part.last_segment];
        // SAFETY: adapters and shrink results outlive the call.
        unsafe {
            if self.tiled_adapters() {
                Deltas::Tiles(TileExpand::new(self.plan, segments, self.shrunk, (first_row, rows)))
            } else {
                Deltas::Rows(Expand::new(self.level, self.plan, segments, self.shrunk, (first_row, rows)))
            }
        }
    }

    /// Adds the adapters' part of outputs `first_output..last_output` to a tile.
    ///
    /// # Safety
    /// The tile has the block's rows of `width` values; B has panels for all these outputs.
    unsafe fn add_deltas(
        deltas: &Deltas<'_>,
        (first_output, last_output): (usize, usize),
        width: usize,
        tile: *mut f32,
        bench: &mut Bench,
    ) {
        // SAFETY: passed on.
        unsafe {
            match deltas {
                Deltas::Rows(expand) => expand.run(first_output, last_output, width, tile),
                Deltas::Tiles(expand) => {
                    expand.run((first_output, last_output), width, tile, &mut bench.registers, bench.spare);
                }
            }
        }
    }

    /// Bias, and the tile's rows into the result.
    fn finish(part: &Part, first_output: usize, width: usize, first_row: usize, rows: usize, tile: *mut f32) {
        let count = width.min(part.outputs - first_output);
        for index in 0..rows {
            // SAFETY: `count` columns of a row of the tile, the result and the bias; no other thread has these columns.
            unsafe {
                let values = std::slice::from_raw_parts_mut(tile.add(index * width), count);
                let out = part.out.add((first_row + index) * part.out_width + first_output);
                let out = std::slice::from_raw_parts_mut(out, count);
                if !part.bias.is_null() {
                    let bias = std::slice::from_raw_parts(part.bias.add(first_output), count);
                    for (value, bias) in values.iter_mut().zip(bias) {
                        *value += bias;
                    }
                }
                match part.mode {
                    LinearOutput::Store => out.copy_from_slice(values),
                    LinearOutput::Add => {
                        for (out, value) in out.iter_mut().zip(values) {
                            *out += *value;
                        }
                    }
                }
            }
        }
    }
}

/// Panels computed together: with few rows one panel has too few chains to keep memory busy.
const fn panels_side_by_side(level: SimdLevel, tiled: bool, rows: usize, left: usize) -> usize {
    match (level, rows, left) {
        (_, ..=tiles::TILE_ROWS, 2..) if tiled => 2,
        _ if tiled => 1,
        (SimdLevel::Avx2 | SimdLevel::Amx, 1, 6..) => 6,
        (_, 1, 4..) => 4,
        (SimdLevel::Avx2 | SimdLevel::Amx, 2, 3..) => 3,
        (_, 1 | 2, 2..) => 2,
        _ => 1,
    }
}
