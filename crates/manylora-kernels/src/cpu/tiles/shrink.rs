//! The shrink in tile registers: rows of an adapter against up to 16 of its ranks.
//!
//! Steps of 32 inputs go to four accumulators in turn, an incomplete last one to a fifth; they are added as
//! `((0 + 1) + (2 + 3)) + last`, scaled, and rounded to bf16 pairs of ranks, which the expand reads as tiles.
#![expect(unsafe_code, reason = "tile products and SIMD intrinsics over pointers")]

use std::arch::x86_64::{
    __m256bh, __m256i, _mm256_mask_storeu_epi16, _mm512_add_ps, _mm512_cvtneps_pbh, _mm512_maskz_loadu_ps,
    _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps,
};

use super::super::scratch::Segment;
use super::amx::{Shrink, TILE_BYTES, TILE_COLUMNS, TILE_PAIRS, TileShape, Tiles, shrink};
use super::factors::last_step;
use super::rows::RowTiles;
use super::{Registers, TILE_INPUTS, TILE_ROWS, runs};
use crate::batch::{AdapterEntry, RowAdapterPlan};

/// The shrink of one call.
pub(in crate::cpu) struct ShrinkCall<'a> {
    pub(in crate::cpu) tiles: &'a RowTiles,
    pub(in crate::cpu) inputs: usize,
    pub(in crate::cpu) plan: &'a RowAdapterPlan,
    pub(in crate::cpu) segments: &'a [Segment],
    /// A slot of `rank` f32 for each entry, of which results take half.
    pub(in crate::cpu) shrunk: *mut f32,
}

impl ShrinkCall<'_> {
    fn entries(&self, segment: &Segment) -> &[AdapterEntry] {
        &self.plan.entries()[segment.first..segment.first + segment.count]
    }

    /// A thread's share: rows of a group by ranks of a group, counted through all segments.
    ///
    /// # Safety
    /// Tiles hold the rows of the plan, A is as [`super::factors`] says, `spare` has room for ten tiles, and the processor has
    /// AMX.
    pub(in crate::cpu) unsafe fn run(&self, (part, parts): (usize, usize), registers: &mut Registers, spare: *mut f32) {
        let items =
            |segment: &Segment| runs(self.entries(segment), TILE_ROWS).count() * segment.rank.div_ceil(TILE_COLUMNS);
        let total: usize = self.segments.iter().map(items).sum();
        let (from, to) = (total * part / parts, total * (part + 1) / parts);
        let registers = registers.get();
        let mut item = 0;
        for segment in self.segments {
            for first_rank in (0..segment.rank).step_by(TILE_COLUMNS) {
                for run in runs(self.entries(segment), TILE_ROWS) {
                    if (from..to).contains(&item) {
                        // SAFETY: passed on.
                        unsafe { self.item(segment, first_rank, run, registers, spare) };
                    }
                    item += 1;
                    if item >= to {
                        return;
                    }
                }
            }
        }
    }

    unsafe fn item(
        &self,
        segment: &Segment,
        first_rank: usize,
        (first, count, row): (usize, usize, usize),
        registers: &mut Tiles,
        spare: *mut f32,
    ) {
        let ranks = (segment.rank - first_rank).min(TILE_COLUMNS);
        let (whole, rest) = (self.inputs / TILE_INPUTS, self.inputs % TILE_INPUTS);
        let inputs = self.tiles.row(row);
        let pair_bytes = 4 * ranks;
        // SAFETY: groups before this one are of 16 ranks.
        let a = unsafe { segment.a.add(first_rank * self.inputs * 2) };
        let shape = TileShape { first: count, second: count, columns: ranks, pairs: TILE_PAIRS };
        let tile = TILE_BYTES / 4;
        // SAFETY: the group's tiles begin at its row 0; A has `whole` steps and the rest's pairs; spare has room.
        unsafe {
            registers.shape(shape);
            shrink(&Shrink { inputs, a, pair_bytes, tiles: whole, sums: spare });
            if rest > 0 {
                let start = a.add(whole * TILE_PAIRS * pair_bytes);
                let a = last_step(start, rest, ranks, spare.add(8 * tile).cast());
                registers.shape(TileShape { pairs: rest.div_ceil(2), ..shape });
                let inputs = inputs.wrapping_add(whole * TILE_BYTES);
                shrink(&Shrink { inputs, a, pair_bytes, tiles: 1, sums: spare.add(4 * tile) });
            }
            for (index, entry) in self.entries(segment)[first..first + count].iter().enumerate() {
                let result = self.shrunk.add(segment.shrunk + (first + index) * segment.rank).cast::<u16>();
                let last = (rest > 0).then(|| spare.add(4 * tile + index * TILE_COLUMNS).cast_const());
                store(
                    spare.add(index * TILE_COLUMNS),
                    last,
                    segment.scale * entry.scale,
                    ranks,
                    result.add(first_rank),
                );
            }
        }
    }
}

/// A row's results for `ranks` ranks; an odd last one is paired with zero.
///
/// # Safety
/// Four tiles of sums, and the result's slot; the processor has AVX-512 with BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn store(sums: *const f32, last: Option<*const f32>, scale: f32, ranks: usize, result: *mut u16) {
    let mask = ((1u32 << ranks) - 1) as u16;
    // SAFETY: masks select what is there. Both bf16 vectors are 32 plain bytes.
    unsafe {
        let sum = |tile: usize| _mm512_maskz_loadu_ps(mask, sums.add(tile * TILE_BYTES / 4));
        let whole = _mm512_add_ps(_mm512_add_ps(sum(0), sum(1)), _mm512_add_ps(sum(2), sum(3)));
        let last = last.map_or(_mm512_setzero_ps(), |last| _mm512_maskz_loadu_ps(mask, last));
        let value = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_add_ps(whole, last));
        let value = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(value));
        let ranks = ranks.next_multiple_of(2);
        _mm256_mask_storeu_epi16(result.cast(), ((1u32 << ranks) - 1) as u16, value);
    }
}
