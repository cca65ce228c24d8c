//! The expand in tile registers: B of each adapter for the rows that have it, on top of the base's sums.
#![expect(unsafe_code, reason = "tile products over pointers")]

use super::super::ahead::{Ahead, Stream};
use super::super::linear::{B_WIDTH, MOST_ROWS};
use super::super::scratch::Segment;
use super::amx::{Expand, TILE_BYTES, TILE_COLUMNS, TILE_LINE, TILE_PAIRS, TileShape, expand_one, expand_two};
use super::factors::last_step;
use super::{Registers, TILE_INPUTS, runs};
use crate::batch::RowAdapterPlan;

/// The adapters of one part for a block of rows.
pub(in crate::cpu) struct TileExpand<'a> {
    plan: &'a RowAdapterPlan,
    segments: &'a [Segment],
    shrunk: *const f32,
    first_row: usize,
    rows: usize,
    /// B of each segment (of the first ones).
    streams: [Stream; MOST_ROWS],
    streams_in_use: usize,
}

impl<'a> TileExpand<'a> {
    /// `segments` are the part's, `shrunk` what their `shrunk` counts from.
    ///
    /// # Safety
    /// The segments' pointers and `shrunk` outlive the value.
    pub(in crate::cpu) unsafe fn new(
        plan: &'a RowAdapterPlan,
        segments: &'a [Segment],
        shrunk: *const f32,
        (first_row, rows): (usize, usize),
    ) -> Self {
        let mut streams = [Stream::NONE; MOST_ROWS];
        let touched = segments.iter().filter(|segment| !segment.rows_within(plan, first_row, rows).is_empty());
        let mut streams_in_use = 0;
        for (stream, segment) in streams.iter_mut().zip(touched) {
            *stream = Stream { address: segment.b, panel_bytes: panel_bytes(segment.rank) };
            streams_in_use += 1;
        }
        Self { plan, segments, shrunk, first_row, rows, streams, streams_in_use }
    }

    /// Whether no row of the block has an adapter for this part.
    pub(in crate::cpu) const fn is_empty(&self) -> bool {
        self.streams_in_use == 0
    }

    /// Fetches B of outputs `first_output..first_output + width`, over `gaps` gaps in the base's work.
    pub(in crate::cpu) fn ahead(&self, first_output: usize, width: usize, gaps: usize) -> Option<Ahead<'_>> {
        let streams = &self.streams[..self.streams_in_use];
        (!streams.is_empty()).then(|| Ahead::new(streams, (first_output / B_WIDTH, width / B_WIDTH), gaps))
    }

    /// Adds to the sums' columns, which are outputs `first_output..last_output`; `width` values lie between their rows. A row's
    /// adapters follow in the plan's order, and each of its chains goes on over the ranks.
    ///
    /// # Safety
    /// The sums have `rows` rows of `width` values, every B has a panel for every 16 outputs up to `last_output`, `spare` has room
    /// for two tiles, and the processor has AMX.
    pub(in crate::cpu) unsafe fn run(
        &self,
        (first_output, last_output): (usize, usize),
        width: usize,
        sums: *mut f32,
        registers: &mut Registers,
        spare: *mut f32,
    ) {
        if self.is_empty() {
            return;
        }
        let registers = registers.get();
        for segment in self.segments {
            let which = segment.rows_within(self.plan, self.first_row, self.rows);
            let entries = &self.plan.entries()[segment.first..][which.clone()];
            for (first, count, row) in runs(entries, usize::MAX) {
                // SAFETY: the entry's slot; the row's sums.
                let (shrunk, sums) = unsafe {
                    (
                        self.shrunk.add(segment.shrunk + (which.start + first) * segment.rank),
                        sums.add((row - self.first_row) * width),
                    )
                };
                let (whole, rest) = (segment.rank / TILE_INPUTS, segment.rank % TILE_INPUTS);
                let shape = TileShape { first: count, second: count, columns: TILE_COLUMNS, pairs: TILE_PAIRS };
                for (pairs, first_step, steps, columns) in
                    [(TILE_PAIRS, 0, whole, TILE_INPUTS), (rest.div_ceil(2), whole, usize::from(rest > 0), rest)]
                {
                    if steps == 0 {
                        continue;
                    }
                    registers.shape(TileShape { pairs, ..shape });
                    for column in (first_output..last_output).step_by(2 * B_WIDTH) {
                        let two = column + B_WIDTH < last_output;
                        let panel = |index: usize| {
                            let panel = column / B_WIDTH + index * usize::from(two);
                            // SAFETY: B has this panel; its last step may have an odd rank.
                            unsafe {
                                let b = segment.b.add(panel * panel_bytes(segment.rank) + first_step * TILE_BYTES);
                                let spare = spare.cast::<u8>().add(index * TILE_BYTES);
                                if columns < TILE_INPUTS { last_step(b, columns, TILE_COLUMNS, spare) } else { b }
                            }
                        };
                        let job = Expand {
                            shrunk: shrunk.cast::<u8>().wrapping_add(first_step * TILE_LINE),
                            shrunk_stride: segment.rank * 4,
                            b: [panel(0), panel(1)],
                            tiles: steps,
                            sums: sums.wrapping_add(column - first_output),
                            stride: width * 4,
                        };
                        // SAFETY: the shape is the job's; passed on.
                        unsafe {
                            if two {
                                expand_two(&job);
                            } else {
                                expand_one(&job);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Bytes of B for 16 outputs.
const fn panel_bytes(rank: usize) -> usize {
    rank * B_WIDTH * 2
}
