//! Rows rounded to bf16, as tiles: for each group of 16 rows, for each 32 inputs, 16 lines of 64 bytes.
#![expect(unsafe_code, reason = "SIMD intrinsics over pointers, and threads that write disjoint groups")]

use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_maskz_loadu_ps, _mm512_store_si512,
};
use std::ops::Range;

use super::super::CpuBackend;
use super::super::memory::Buffer;
use super::super::pool::Pool;
use super::amx::{TILE_BYTES, TILE_LINE};
use super::{TILE_INPUTS, TILE_ROWS};

/// Values that the calling thread rounds alone, in less time than others take to join in.
const ALONE: usize = 1 << 15;

/// Rounded rows.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct RowTiles {
    start: *mut u8,
    inputs: usize,
}

// SAFETY: written by threads in disjoint groups before anybody reads them.
unsafe impl Sync for RowTiles {}

impl RowTiles {
    /// Bytes for `rows` rows of `inputs` inputs.
    pub(in crate::cpu) fn bytes(rows: usize, inputs: usize) -> usize {
        rows.div_ceil(TILE_ROWS) * inputs.div_ceil(TILE_INPUTS) * TILE_BYTES
    }

    /// Rounds the first `rows` rows of `input` into `memory`, which outlives what is returned.
    pub(in crate::cpu) fn new(
        backend: &CpuBackend,
        rows: usize,
        inputs: usize,
        input: &Buffer,
        memory: &mut [u8],
    ) -> Self {
        assert!(memory.len() >= Self::bytes(rows, inputs), "tiles of {rows} x {inputs} do not fit");
        assert!(rows <= input.rows && inputs <= input.width, "{rows} x {inputs} of a buffer");
        let tiles = Self { start: memory.as_mut_ptr(), inputs };
        // SAFETY: rows and groups are within input and memory; a level with tiles has these instructions.
        let round = |rows: Range<usize>| unsafe { tiles.round(rows, input.as_ptr(), input.width) };
        if rows * inputs <= ALONE {
            round(0..rows);
        } else {
            backend.pool.run(&|part, parts| round(Pool::split(rows, TILE_ROWS, part, parts)));
        }
        tiles
    }

    /// Bytes of a group of rows.
    pub(in crate::cpu) const fn group_bytes(&self) -> usize {
        self.inputs.div_ceil(TILE_INPUTS) * TILE_BYTES
    }

    /// The line of a row in its group's first tile.
    #[inline]
    pub(in crate::cpu) const fn row(&self, row: usize) -> *const u8 {
        self.start.wrapping_add(row / TILE_ROWS * self.group_bytes() + row % TILE_ROWS * TILE_LINE)
    }

    /// # Safety
    /// Input and tiles have these rows, nobody else touches their groups, and the processor has AVX-512 with BF16.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn round(&self, rows: Range<usize>, input: *const f32, width: usize) {
        for row in rows {
            let line = self.row(row).cast_mut();
            for (tile, first) in (0..self.inputs).step_by(TILE_INPUTS).enumerate() {
                // SAFETY: the row has `inputs` values, of which masks select those that are there; lines are aligned.
                unsafe {
                    let values = input.add(row * width + first);
                    let left = self.inputs - first;
                    let (low, high) = if left >= TILE_INPUTS {
                        (_mm512_loadu_ps(values), _mm512_loadu_ps(values.add(16)))
                    } else {
                        let mask = (1u32 << left) - 1;
                        let high = values.wrapping_add(16);
                        (_mm512_maskz_loadu_ps(mask as u16, values), _mm512_maskz_loadu_ps((mask >> 16) as u16, high))
                    };
                    let pairs = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                    _mm512_store_si512(line.add(tile * TILE_BYTES).cast(), pairs);
                }
            }
        }
    }
}
