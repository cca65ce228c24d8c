//! The expand: B of each row's adapters, added to the accumulators that the base has left in a thread's tile.
//!
//! Rows that share an adapter form a register block of the base's own panel kernel. A row that no other row of the tile
//! shares its adapter with would be one or two chains of additions there, each waiting for itself; such rows are taken
//! together, each with its own B, so that as many chains run side by side as the processor can keep busy.
#![expect(unsafe_code, reason = "rows, shrink results and B come as pointers, as for every kernel")]

use std::ops::Range;

use super::ahead::{Ahead, Stream};
use super::kernels::{ExpandJob, LoneRow, PanelJob, PanelRow, expand_kernel, panel_kernel};
use super::level::SimdLevel;
use super::linear::{B_WIDTH, MOST_ROWS};
use super::pack::PanelFormat;
use super::scratch::Segment;
use crate::backend::StorageType;
use crate::batch::RowAdapterPlan;

/// The adapters of one part for one block of rows: looked up once for a run of panels.
pub(super) struct Expand<'a> {
    level: SimdLevel,
    plan: &'a RowAdapterPlan,
    segments: &'a [Segment],
    shrunk: *const f32,
    first_row: usize,
    rows: usize,
    lone: [LoneRow; MOST_ROWS],
    lone_rows: usize,
    lone_dtype: StorageType,
    /// Some segment is not taken as a lone row.
    shared: bool,
    /// B of each segment (of the first ones, where rows have several adapters).
    streams: [Stream; MOST_ROWS],
    streams_in_use: usize,
}

impl<'a> Expand<'a> {
    /// `segments` are the part's, `shrunk` what their `shrunk` counts from.
    ///
    /// # Safety
    /// The segments' pointers and `shrunk` outlive the value.
    pub(super) unsafe fn new(
        level: SimdLevel,
        plan: &'a RowAdapterPlan,
        segments: &'a [Segment],
        shrunk: *const f32,
        (first_row, rows): (usize, usize),
    ) -> Self {
        let mut expand = Self {
            level,
            plan,
            segments,
            shrunk,
            first_row,
            rows,
            lone: [LoneRow::NONE; MOST_ROWS],
            lone_rows: 0,
            lone_dtype: segments.first().map_or(StorageType::F32, |segment| segment.dtype),
            shared: false,
            streams: [Stream::NONE; MOST_ROWS],
            streams_in_use: 0,
        };
        for segment in segments {
            let which = segment.rows_within(plan, first_row, rows);
            if which.is_empty() {
                continue;
            }
            let panel_bytes = PanelFormat::of_adapter(segment.dtype).panel_bytes(segment.rank);
            if expand.streams_in_use < MOST_ROWS {
                expand.streams[expand.streams_in_use] = Stream { address: segment.b, panel_bytes };
                expand.streams_in_use += 1;
            }
            let Some(index) = expand.lone(segment, &which) else {
                expand.shared = true;
                continue;
            };
            let row = LoneRow {
                // SAFETY: the shrink results of this entry.
                input: unsafe { shrunk.add(segment.shrunk + index * segment.rank) },
                b: segment.b,
                panel_bytes,
                steps: segment.rank,
                tile_row: plan.entries()[segment.first + index].row as usize - first_row,
            };
            expand.insert(row);
        }
        expand
    }

    /// The segment's entry, if it is the only one of the block and of its row.
    fn lone(&self, segment: &Segment, which: &Range<usize>) -> Option<usize> {
        let row = self.plan.entries()[segment.first + which.start..].first()?.row;
        (which.len() == 1 && segment.dtype == self.lone_dtype && self.plan.row(row as usize).len() == 1)
            .then_some(which.start)
    }

    /// Long ones first, so that those computed side by side have about the same number of steps.
    fn insert(&mut self, row: LoneRow) {
        let mut place = self.lone_rows;
        while place > 0 && self.lone[place - 1].steps < row.steps {
            self.lone[place] = self.lone[place - 1];
            place -= 1;
        }
        self.lone[place] = row;
        self.lone_rows += 1;
    }

    /// Whether no row of the block has an adapter for this part.
    pub(super) const fn is_empty(&self) -> bool {
        self.streams_in_use == 0
    }

    /// Fetches B of outputs `first_output..first_output + width`, over `gaps` gaps in the base's work.
    pub(super) fn ahead(&self, first_output: usize, width: usize, gaps: usize) -> Option<Ahead<'_>> {
        let streams = &self.streams[..self.streams_in_use];
        (!streams.is_empty()).then(|| Ahead::new(streams, (first_output / B_WIDTH, width / B_WIDTH), gaps))
    }

    /// Segments that share rows of the block or composed ones, and which of their entries.
    fn shared(&self) -> impl Iterator<Item = (&Segment, Range<usize>)> {
        self.segments.iter().filter_map(|segment| {
            let which = segment.rows_within(self.plan, self.first_row, self.rows);
            (!which.is_empty() && self.lone(segment, &which).is_none()).then_some((segment, which))
        })
    }

    /// Adds to the tile's columns, which are outputs `first_output..last_output`; `width` values lie between its rows.
    /// A row's adapters follow in the plan's order, and each of its chains goes on over the ranks.
    ///
    /// # Safety
    /// The tile has `rows` rows of `width` values, and every B has a panel for every 16 outputs up to `last_output`.
    pub(super) unsafe fn run(&self, first_output: usize, last_output: usize, width: usize, tile: *mut f32) {
        if self.lone_rows > 0 {
            let job = ExpandJob {
                rows: &self.lone[..self.lone_rows],
                panel: first_output / B_WIDTH,
                panels: (last_output - first_output).div_ceil(B_WIDTH),
                tile,
                width,
            };
            // SAFETY: passed on; the backend's level is available.
            unsafe { expand_kernel(self.level, self.lone_dtype)(&job) };
        }
        if !self.shared {
            return;
        }
        let mut list = [PanelRow { input: std::ptr::null(), tile }; MOST_ROWS];
        for (segment, which) in self.shared() {
            let format = PanelFormat::of_adapter(segment.dtype);
            let kernel = panel_kernel(self.level, format);
            let panel_bytes = format.panel_bytes(segment.rank);
            for column in (first_output..last_output).step_by(B_WIDTH) {
                for (row, index) in list.iter_mut().zip(which.clone()) {
                    let tile_row = self.plan.entries()[segment.first + index].row as usize - self.first_row;
                    // SAFETY: the shrink results of this entry, and the row's columns of the tile.
                    unsafe {
                        row.input = self.shrunk.add(segment.shrunk + index * segment.rank).cast();
                        row.tile = tile.add(tile_row * width + (column - first_output));
                    }
                }
                // SAFETY: B has a panel for every 16 outputs.
                let weights = unsafe { segment.b.add(column / B_WIDTH * panel_bytes) };
                let job = PanelJob {
                    rows: &list[..which.len()],
                    weights,
                    next: weights.wrapping_add(panel_bytes),
                    panel_stride: panel_bytes,
                    panels: 1,
                    steps: segment.rank,
                    first_step: 0,
                    fresh: false,
                    ahead: None,
                };
                // SAFETY: the pointers are valid as above; the backend's level is available.
                unsafe { kernel(&job) };
            }
        }
    }
}
