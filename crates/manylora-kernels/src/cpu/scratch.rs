//! What `linear` needs beside its arguments: resolved segments, shrink results, and a tile per thread.
//!
//! It grows to what a call asks for and never shrinks, so that a step allocates nothing once the largest step has been
//! seen or announced by [`crate::Backend::reserve`].

use std::ops::Range;

use super::memory::{AlignedVec, Plain};
use crate::backend::StorageType;
use crate::batch::RowAdapterPlan;
use crate::error::KernelError;

/// One adapter segment of the plan that touches one part of a call.
#[derive(Clone, Copy)]
pub(super) struct Segment {
    /// Part of the call.
    pub(super) part: usize,
    /// First entry of the plan, and how many.
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) rank: usize,
    /// The site's scale; an entry's own is multiplied in.
    pub(super) scale: f32,
    pub(super) dtype: StorageType,
    /// A `[rank, input]` and the panels of B.
    pub(super) a: *const u8,
    pub(super) b: *const u8,
    /// Where the shrink results of the first entry start; `rank` values per entry.
    pub(super) shrunk: usize,
}

impl Segment {
    /// Which of the segment's entries (counted from its first) belong to rows `first_row..first_row + rows`.
    #[inline]
    pub(super) fn rows_within(&self, plan: &RowAdapterPlan, first_row: usize, rows: usize) -> Range<usize> {
        // Entries of a segment are in row order.
        let entries = &plan.entries()[self.first..self.first + self.count];
        let row = |index: usize| entries[index].row as usize;
        if self.count == 0 || (row(0) >= first_row && row(self.count - 1) < first_row + rows) {
            return 0..self.count;
        }
        let first = entries.partition_point(|entry| (entry.row as usize) < first_row);
        first..first + entries[first..].partition_point(|entry| (entry.row as usize) < first_row + rows)
    }
}

/// What the working memory is called in errors.
const WHAT: &str = "the working memory of a step";

/// How large the working memory is for the largest step of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScratchSizes {
    /// Segments of all parts of a call.
    pub(super) segments: usize,
    /// Shrink results of all entries and parts.
    pub(super) shrunk: usize,
    /// Values of each thread.
    pub(super) thread_values: usize,
    /// Bytes of all rows, where they are rounded once for all threads.
    pub(super) rows: usize,
}

impl ScratchSizes {
    /// Bytes that [`Scratch::reserve_sizes`] takes with these sizes, where nothing was reserved before.
    pub(super) const fn bytes(&self, threads: usize) -> usize {
        let values = self.shrunk.saturating_add(self.thread_values.saturating_mul(threads));
        self.segments
            .saturating_mul(size_of::<Segment>())
            .saturating_add(values.saturating_mul(size_of::<f32>()))
            .saturating_add(self.rows)
    }
}

/// Working memory of one backend.
pub(super) struct Scratch {
    pub(super) segments: Vec<Segment>,
    pub(super) shrunk: AlignedVec<f32>,
    /// One stretch per thread.
    pub(super) threads: AlignedVec<f32>,
    /// Rows, rounded once for all threads.
    pub(super) rows: AlignedVec<u8>,
}

#[expect(unsafe_code, reason = "holds pointers between the two regions of one call only")]
// SAFETY: the pointers in `segments` are written and read within one call, while the adapters they point to are
// borrowed.
unsafe impl Send for Scratch {}

impl Scratch {
    pub(super) const fn new() -> Self {
        Self {
            segments: Vec::new(),
            shrunk: AlignedVec::empty(),
            threads: AlignedVec::empty(),
            rows: AlignedVec::empty(),
        }
    }

    /// Room for `segments` segments and `shrunk` shrink results.
    pub(super) fn reserve(&mut self, segments: usize, shrunk: usize) -> Result<(), KernelError> {
        self.segments.clear();
        // Exactly, so that what is held is what `ScratchSizes::bytes` says.
        self.segments.try_reserve_exact(segments).map_err(|_| KernelError::OutOfMemory {
            what: WHAT.to_owned(),
            bytes: segments.saturating_mul(size_of::<Segment>()),
        })?;
        grow(&mut self.shrunk, shrunk)
    }

    /// Room for a step of these sizes on `threads` threads.
    pub(super) fn reserve_sizes(&mut self, sizes: &ScratchSizes, threads: usize) -> Result<(), KernelError> {
        self.reserve(sizes.segments, sizes.shrunk)?;
        self.reserve_threads(threads, sizes.thread_values)?;
        self.reserve_rows(sizes.rows)
    }

    /// Room for `bytes` bytes of rounded rows.
    pub(super) fn reserve_rows(&mut self, bytes: usize) -> Result<(), KernelError> {
        grow(&mut self.rows, bytes)
    }

    /// Room for `each` values for each of `threads` threads.
    pub(super) fn reserve_threads(&mut self, threads: usize, each: usize) -> Result<(), KernelError> {
        grow(&mut self.threads, threads * each)
    }
}

fn grow<T: Plain>(memory: &mut AlignedVec<T>, length: usize) -> Result<(), KernelError> {
    if memory.len() < length {
        // The old one first: never both.
        *memory = AlignedVec::empty();
        *memory = AlignedVec::zeroed(WHAT, length)?;
    }
    Ok(())
}
