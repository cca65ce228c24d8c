//! Rows picked out of a matrix: token embeddings, and the rows whose logits are wanted.

use super::CpuBackend;
use super::memory::Buffer;
use super::pack::PackedWeight;
use super::parallel::run_rows;
use crate::batch::StepBatch;

/// Values that a thread should have to copy before another one is worth waking.
const GRAIN: usize = 16_384;

/// The base part of [`crate::Backend::embed`]; adapters' deltas are added by `linear`.
pub(super) fn gather(backend: &CpuBackend, batch: &StepBatch, weight: &PackedWeight, out: &mut Buffer) {
    let width = out.width;
    let used = batch.rows() * width;
    run_rows(&backend.pool, &mut out.data[..used], width, GRAIN / width.max(1), &|first, out| {
        for (&token, out) in batch.tokens[first..].iter().zip(out.chunks_exact_mut(width)) {
            weight.read_row(token as usize, out);
        }
    });
}

/// See [`crate::Backend::gather_rows`].
pub(super) fn gather_rows(rows: &[u32], input: &Buffer, out: &mut Buffer) {
    assert_eq!(input.width, out.width, "input and output have one width");
    for (index, &row) in rows.iter().enumerate() {
        out.row_mut(index).copy_from_slice(input.row(row as usize));
    }
}
