//! What `linear` needs beside its arguments: resolved segments, shrink results, and a tile per thread.
//!
//! It grows to what a call asks for and never shrinks, so that a step allocates nothing once the largest step has been
//! seen or announced by [`crate::Backend::reserve`].

use std::ops::Range;

use super::memory::AlignedVec;
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

/// Working memory of one backend.
pub(super) struct Scratch {
    pub(super) segments: Vec<Segment>,
    pub(super) shrunk: AlignedVec<f32>,
    /// One stretch per thread.
    pub(super) threads: AlignedVec<f32>,
}

#[expect(unsafe_code, reason = "holds pointers between the two regions of one call only")]
// SAFETY: the pointers in `segments` are written and read within one call, while the adapters they point to are
// borrowed.
unsafe impl Send for Scratch {}

impl Scratch {
    pub(super) const fn new() -> Self {
        Self { segments: Vec::new(), shrunk: AlignedVec::empty(), threads: AlignedVec::empty() }
    }

    /// Room for `segments` segments and `shrunk` shrink results.
    pub(super) fn reserve(&mut self, segments: usize, shrunk: usize) -> Result<(), KernelError> {
        self.segments.clear();
        self.segments.reserve(segments);
        grow(&mut self.shrunk, shrunk)
    }

    /// Room for `each` values for each of `threads` threads.
    pub(super) fn reserve_threads(&mut self, threads: usize, each: usize) -> Result<(), KernelError> {
        grow(&mut self.threads, threads * each)
    }
}

fn grow(memory: &mut AlignedVec<f32>, length: usize) -> Result<(), KernelError> {
    if memory.len() < length {
        // The old one first: never both.
        *memory = AlignedVec::empty();
        *memory = AlignedVec::zeroed("the working memory of a step", length)?;
    }
    Ok(())
}
