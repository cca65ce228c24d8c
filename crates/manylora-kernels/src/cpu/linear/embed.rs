//! The embedding's deltas: A is gathered by token, and B goes on from the base's rows.
#![expect(unsafe_code, reason = "threads write disjoint columns of shared outputs")]

use std::sync::PoisonError;
use std::sync::atomic::AtomicUsize;

use super::segments::resolve_segments;
use super::{B_WIDTH, Call, MOST_ROWS, Part, scratch_each};
use crate::backend::{AdapterTable, LinearOutput};
use crate::batch::{RowAdapterPlan, StepBatch};
use crate::cpu::CpuBackend;
use crate::cpu::adapter::CpuAdapter;
use crate::cpu::kernels::block_rows;
use crate::cpu::memory::Buffer;
use crate::cpu::pack::{PanelFormat, bf16_to_f32};
use crate::cpu::pool::Pool;
use crate::cpu::scratch::Segment;
use crate::cpu::tiles;
use crate::site::Site;

/// Adds the deltas of adapters that touch the embedding to `out`, which holds the base rows.
pub(in crate::cpu) fn embed_deltas(
    backend: &CpuBackend,
    batch: &StepBatch,
    adapters: &AdapterTable<CpuAdapter>,
    site: Site,
    out: &mut Buffer,
) {
    let plan = &batch.adapters;
    if plan.is_empty() {
        return;
    }
    assert!(site == Site::EMBED, "site `{}` is not the embedding", site.0);
    let mut scratch = backend.scratch.lock().unwrap_or_else(PoisonError::into_inner);
    let scratch = &mut *scratch;
    let outputs = out.width;
    let vocabulary = embed_inputs(plan, adapters);
    resolve_segments(plan, adapters, vocabulary, std::iter::once((site, outputs)), scratch);
    if scratch.segments.is_empty() {
        return;
    }
    for segment in &scratch.segments {
        for (index, entry) in plan.entries()[segment.first..segment.first + segment.count].iter().enumerate() {
            let token = batch.tokens[entry.row as usize] as usize;
            assert!(token < vocabulary, "token `{token}` is beyond the adapter's vocabulary of {vocabulary}");
            let results = &mut scratch.shrunk[segment.shrunk + index * segment.rank..][..segment.rank];
            let scale = segment.scale * entry.scale;
            // SAFETY: the transposed A is `[vocabulary, rank]`.
            let shrunk = |rank: usize| scale * unsafe { element(segment, token * segment.rank + rank) };
            if tiles::tiled(backend.level, segment.dtype) {
                tiles::store_pairs(results, shrunk);
            } else {
                for (rank, result) in results.iter_mut().enumerate() {
                    *result = shrunk(rank);
                }
            }
        }
    }
    let rows = batch.rows();
    assert!(rows <= out.rows, "result of {rows} rows does not fit");
    let scratch_each = scratch_each(backend.level, rows, 0, false);
    let threads = backend.pool.threads();
    scratch.reserve_threads(threads, scratch_each).expect("working memory of a step: reserve it at start");
    let part = Part {
        weights: std::ptr::null(),
        format: PanelFormat::F32,
        panels: outputs.div_ceil(B_WIDTH),
        outputs,
        bias: std::ptr::null(),
        out: out.as_mut_ptr(),
        out_width: out.width,
        mode: LinearOutput::Store,
        first_segment: 0,
        last_segment: scratch.segments.len(),
    };
    let call = Call {
        level: backend.level,
        rows,
        input: std::ptr::null(),
        input_width: 0,
        inputs: 0,
        parts: std::slice::from_ref(&part),
        plan,
        segments: &scratch.segments,
        shrunk: scratch.shrunk.as_mut_ptr(),
        scratch: scratch.threads.as_mut_ptr(),
        scratch_each,
        tile_rows: MOST_ROWS,
        panels: part.panels,
        together: 1,
        runs: 1,
        next: AtomicUsize::new(0),
        pairs: false,
        tiles: None,
        gated: None,
    };
    backend.pool.run(&|part, parts| call.embed_panels(part, parts));
}

/// Columns of A of the adapters that touch the embedding (they agree, or `resolve_segments` refuses).
fn embed_inputs(plan: &RowAdapterPlan, adapters: &AdapterTable<CpuAdapter>) -> usize {
    let factors = |slot| adapters.get(slot).and_then(|adapter| adapter.factors(Site::EMBED));
    plan.segments().iter().find_map(|segment| factors(segment.slot)).map_or(0, |factors| factors.input)
}

/// One element of A.
unsafe fn element(segment: &Segment, index: usize) -> f32 {
    // SAFETY: the caller stays within A; factors are aligned to a cache line.
    unsafe {
        match segment.dtype {
            crate::StorageType::F32 => {
                let a: *const f32 = segment.a.cast();
                *a.add(index)
            }
            crate::StorageType::Bf16 => {
                let a: *const u16 = segment.a.cast();
                bf16_to_f32(*a.add(index))
            }
            crate::StorageType::F16 => unreachable!("refused where it is asked for"),
        }
    }
}

impl Call<'_> {
    /// As [`Self::panels`] for the embedding: the tile starts from what `out` holds.
    fn embed_panels(&self, thread: usize, threads: usize) {
        let part = &self.parts[0];
        let mut bench = self.bench(thread);
        let tile = bench.tile;
        let blocks = self.rows.div_ceil(self.tile_rows);
        let mut first_row = 0;
        for block in 0..blocks {
            let rows = block_rows(self.rows, self.tile_rows, block);
            let deltas = self.deltas(part, first_row, rows);
            for panel in Pool::split(part.panels, 1, thread, threads) {
                let first = panel * B_WIDTH;
                let count = B_WIDTH.min(part.outputs - first);
                for index in 0..rows {
                    // SAFETY: `count` values of an output row, and room for them in the tile.
                    unsafe {
                        let from = part.out.add((first_row + index) * part.out_width + first);
                        std::ptr::copy_nonoverlapping(from, tile.add(index * B_WIDTH), count);
                    }
                }
                // SAFETY: the tile has these rows; B has panels for all outputs of the part.
                unsafe { Self::add_deltas(&deltas, (first, first + count), B_WIDTH, tile, &mut bench) };
                Self::finish(part, first, B_WIDTH, first_row, rows, tile);
            }
            first_row += rows;
        }
    }
}
