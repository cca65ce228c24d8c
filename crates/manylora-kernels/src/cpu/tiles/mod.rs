//! `linear` on a processor with tile registers (AMX): what differs from the other levels.
//!
//! A row's inputs are rounded to bf16 once per call, into tiles that all threads, panels and adapters read (`rows`). The
//! base's panels go through the tile registers for up to some hundred rows at a time (`base`), the adapters' A and B lie as
//! pairs, too (`factors`), and both shrink and expand are tile products (`shrink`, `expand`). Each (row, output) still is
//! one chain of additions in a fixed order: a row's bits do not depend on the others. So it is with attention over a bf16 cache
//! (`attention`), which is as exact as on the other levels.

mod attention;
mod base;
mod exp;
mod expand;
mod factors;
mod finish;
mod rows;
mod shrink;

pub(super) use attention::{Attention, VECTORS, attention_values};
pub(super) use base::{Panels, gaps};
pub(super) use expand::TileExpand;
pub(super) use factors::pack_pairs;
pub(super) use finish::{Finish, FinishGated};
pub(super) use rows::RowTiles;
pub(super) use shrink::ShrinkCall;

use super::level::SimdLevel;
use super::pack::f32_to_bf16;
use super::x86::amx;
use crate::backend::StorageType;
use crate::batch::AdapterEntry;

/// Inputs of a tile.
pub(super) const TILE_INPUTS: usize = 32;
pub(super) const TILE_ROWS: usize = 16;
/// Most rows that pass a panel together.
const MOST_ROWS: usize = 512;
const FEWEST_ROWS: usize = 64;
/// Bytes of rounded rows that should stay in the second-level cache while panels pass by.
const ROWS_BYTES: usize = 1280 << 10;
/// Outputs of a thread's sums: a panel, or two of them where rows are few.
const SUMS_WIDTH: usize = 32;
/// Values behind a thread's sums: the accumulators of the shrink, those of its last step, and two tiles of factors.
const SPARE: usize = (4 + 4 + 2) * 256;

/// The tile registers of a thread, on levels that have them.
pub(super) struct Registers(Option<amx::Tiles>);

impl Registers {
    #[expect(unsafe_code, reason = "tile registers are the level's")]
    pub(super) fn of(level: SimdLevel) -> Self {
        // SAFETY: the level is available.
        Self((level == SimdLevel::Amx).then(|| unsafe { amx::Tiles::new() }))
    }

    fn get(&mut self) -> &mut amx::Tiles {
        self.0.as_mut().expect("a level with tile registers")
    }
}

/// Whether adapters of this type lie as pairs, and are multiplied as tiles.
pub(super) const fn tiled(level: SimdLevel, dtype: StorageType) -> bool {
    matches!((level, dtype), (SimdLevel::Amx, StorageType::Bf16))
}

/// Rows of `inputs` values that pass a panel together: whole groups.
pub(super) fn rows_together(inputs: usize) -> usize {
    (ROWS_BYTES / (2 * inputs.max(1)) / TILE_ROWS * TILE_ROWS).clamp(FEWEST_ROWS, MOST_ROWS)
}

/// Values of a thread's sums for blocks of `rows` rows; and of all that it needs: two of these, and what lies behind them.
pub(super) fn sums_values(rows: usize) -> usize {
    rows.next_multiple_of(TILE_ROWS).clamp(2 * TILE_ROWS, MOST_ROWS) * SUMS_WIDTH
}

pub(super) fn thread_values(rows: usize) -> usize {
    2 * sums_values(rows) + SPARE
}

/// A slot of shrink results, `shrunk(rank)` of each rank, as the expand reads them.
pub(super) fn store_pairs(slot: &mut [f32], shrunk: impl Fn(usize) -> f32) {
    let rank = slot.len();
    for (pair, word) in slot.iter_mut().enumerate().take(rank.div_ceil(2)) {
        let half = |rank: usize| u32::from(f32_to_bf16(shrunk(rank)));
        let high = if 2 * pair + 1 < rank { half(2 * pair + 1) } else { 0 };
        *word = f32::from_bits(half(2 * pair) | high << 16);
    }
}

/// Entries of a segment that follow each other in rows, too: `(first entry, entries, first row)`, no more than a tile has
/// rows, and none across a border between groups of rows that are multiples of `within`.
pub(super) fn runs(entries: &[AdapterEntry], within: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let first = next;
        let row = entries.get(first)?.row as usize;
        let most = TILE_ROWS.min(within - row % within);
        let follows = |count: usize| entries.get(first + count).is_some_and(|entry| entry.row as usize == row + count);
        let count = 1 + (1..most).take_while(|&count| follows(count)).count();
        next += count;
        Some((first, count, row))
    })
}

#[cfg(test)]
mod tests {
    use super::runs;
    use crate::batch::AdapterEntry;

    #[test]
    fn runs_end_at_gaps_and_borders() {
        let rows = [1, 2, 5, 14, 15, 16, 17, 40];
        let entries = rows.map(|row| AdapterEntry { row, slot: 0, scale: 1.0, order: 0 });
        let found: Vec<_> = runs(&entries, 16).collect();
        assert_eq!(found, [(0, 2, 1), (2, 1, 5), (3, 2, 14), (5, 2, 16), (7, 1, 40)]);
        let found: Vec<_> = runs(&entries, 1 << 20).collect();
        assert_eq!(found, [(0, 2, 1), (2, 1, 5), (3, 4, 14), (7, 1, 40)]);
        let entries: Vec<_> = (0..40).map(|row| AdapterEntry { row, slot: 0, scale: 1.0, order: 0 }).collect();
        assert_eq!(runs(&entries, 1 << 20).map(|(_, count, _)| count).collect::<Vec<_>>(), [16, 16, 8]);
    }
}
