//! The base's panels for a block of rows, in tile registers.
//!
//! With up to two groups of 16 rows a panel is read once from memory while its sums stay in registers. With more, the
//! panel passes in stretches that stay in the first-level cache while all groups go by, two at a time, and what follows
//! is fetched meanwhile.
#![expect(unsafe_code, reason = "tile products over pointers")]

use super::super::ahead::Ahead;
use super::amx::{
    AHEAD, Product, TILE_BYTES, TILE_COLUMNS, TILE_PAIRS, TileShape, Tiles, one_panel, two_groups_fetching_2,
    two_groups_fetching_8, two_groups_fetching_32, two_panels, two_panels_one_row,
};
use super::rows::RowTiles;
use super::{Registers, TILE_INPUTS, TILE_ROWS};

/// Bytes of a panel's step of 32 inputs.
const STEP_BYTES: usize = 2 * TILE_BYTES;
/// Steps of a stretch that many rows pass by: with the rows' own tiles, what the first-level cache holds.
const STRETCH: usize = 8;
/// Steps whose bytes are prefetched ahead of their use.
const AHEAD_STEPS: usize = AHEAD.div_ceil(STEP_BYTES);
/// Steps between two looks at what else is to be fetched.
const STRETCH_WITH_GAPS: usize = 8;

/// One or two panels of 32 outputs for rows that begin a group.
pub(in crate::cpu) struct Panels<'a> {
    pub(in crate::cpu) tiles: &'a RowTiles,
    pub(in crate::cpu) first_row: usize,
    pub(in crate::cpu) rows: usize,
    pub(in crate::cpu) inputs: usize,
    pub(in crate::cpu) weights: *const u8,
    pub(in crate::cpu) panel_bytes: usize,
    pub(in crate::cpu) count: usize,
    /// `[rows][32 x count]`.
    pub(in crate::cpu) sums: *mut f32,
    /// What this thread will probably read next.
    pub(in crate::cpu) follows: *const u8,
    pub(in crate::cpu) ahead: Option<&'a Ahead<'a>>,
}

/// Gaps that [`Panels::run`] has for fetching.
pub(in crate::cpu) const fn gaps(inputs: usize, rows: usize) -> usize {
    let stretch = if rows > 2 * TILE_ROWS { STRETCH } else { STRETCH_WITH_GAPS };
    (inputs / TILE_INPUTS).div_ceil(stretch) * rows.div_ceil(2 * TILE_ROWS)
}

impl Panels<'_> {
    /// Computes the sums.
    ///
    /// # Safety
    /// Tiles, weights and sums are as large as said, rows fill groups from the first one's beginning, and the processor has
    /// AMX. Two panels are for one group.
    pub(in crate::cpu) unsafe fn run(&self, registers: &mut Registers) {
        let registers = registers.get();
        debug_assert!(self.first_row.is_multiple_of(TILE_ROWS) && (self.count == 1 || self.rows <= TILE_ROWS));
        let (whole, rest) = (self.inputs / TILE_INPUTS, (self.inputs % TILE_INPUTS).div_ceil(2));
        let few = self.rows <= 2 * TILE_ROWS;
        let most = match (few, self.ahead) {
            (true, None) => whole,
            (true, Some(_)) => STRETCH_WITH_GAPS,
            (false, _) => STRETCH,
        };
        let stretches = whole.div_ceil(most.max(1));
        let mut first = 0;
        for left in (1..=stretches).rev() {
            let mut steps = (whole - first).div_ceil(left);
            if few && left == 1 && steps > AHEAD_STEPS {
                // What is prefetched during the last steps belongs to whatever follows.
                // SAFETY: passed on.
                unsafe { self.stretch(registers, first, steps - AHEAD_STEPS, TILE_PAIRS) };
                first += steps - AHEAD_STEPS;
                steps = AHEAD_STEPS;
            }
            // SAFETY: passed on.
            unsafe { self.stretch(registers, first, steps, TILE_PAIRS) };
            first += steps;
        }
        if rest > 0 {
            // SAFETY: passed on; the last step has so many pairs.
            unsafe { self.stretch(registers, whole, 1, rest) };
        }
    }

    /// Steps `first..first + steps` for all rows.
    unsafe fn stretch(&self, registers: &mut Tiles, first: usize, steps: usize, pairs: usize) {
        let weights = self.weights.wrapping_add(first * STEP_BYTES);
        let stride = self.count * 32;
        let passes = self.rows.div_ceil(2 * TILE_ROWS);
        let bytes = steps * STEP_BYTES;
        let last = (first + steps) * TILE_INPUTS >= self.inputs;
        let next = if last { self.follows } else { weights.wrapping_add(bytes) };
        let lines = match passes {
            1 => 32,
            2..16 => 8,
            _ => 2,
        };
        for pass in 0..passes {
            let row = pass * 2 * TILE_ROWS;
            let rows = (self.rows - row).min(2 * TILE_ROWS);
            let (above, below) = (rows.min(TILE_ROWS), rows.saturating_sub(TILE_ROWS));
            let inputs = self.tiles.row(self.first_row + row).wrapping_add(first * TILE_BYTES);
            let sums = self.sums.wrapping_add(row * stride);
            let second = if self.count == 2 { sums.wrapping_add(32) } else { sums.wrapping_add(TILE_ROWS * stride) };
            let prefetch = if passes == 1 {
                if last { self.follows } else { Product::ahead(weights) }
            } else {
                next.wrapping_add(pass * lines * steps * 64 % bytes)
            };
            let job = Product {
                inputs: [inputs, inputs.wrapping_add(self.tiles.group_bytes())],
                weights: [weights, weights.wrapping_add(self.panel_bytes)],
                tiles: steps,
                sums: [sums, second],
                stride: stride * 4,
                fresh: first == 0,
                prefetch: [prefetch, prefetch.wrapping_add(self.panel_bytes)],
            };
            if self.rows == 1 {
                // One panel is computed twice, with sums of its own: it is there, and rare.
                let mut same = [0.0; 32];
                let alone =
                    Product { weights: [weights; 2], sums: [sums, same.as_mut_ptr()], prefetch: [prefetch; 2], ..job };
                // SAFETY: passed on.
                unsafe { two_panels_one_row(if self.count == 2 { &job } else { &alone }, pairs) };
                if let Some(ahead) = self.ahead {
                    ahead.gap();
                }
                continue;
            }
            let shape = TileShape { first: above, second: below.max(1), columns: TILE_COLUMNS, pairs };
            registers.shape(if below == 0 { TileShape { second: above, ..shape } } else { shape });
            // SAFETY: the shape is the job's; passed on.
            unsafe {
                match (self.count, below, lines) {
                    (2, ..) => two_panels(&job),
                    (_, 0, _) => one_panel(&job),
                    (_, _, 32) => two_groups_fetching_32(&job),
                    (_, _, 8) => two_groups_fetching_8(&job),
                    _ => two_groups_fetching_2(&job),
                }
            }
            if let Some(ahead) = self.ahead {
                ahead.gap();
            }
        }
    }
}
