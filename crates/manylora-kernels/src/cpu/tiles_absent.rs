//! What stands for `tiles` on processors without tile registers: nothing of it can be had, so nothing is ever called.

use super::CpuBackend;
use super::ahead::Ahead;
use super::level::SimdLevel;
use super::memory::Buffer;
use super::scratch::Segment;
use crate::backend::StorageType;
use crate::batch::RowAdapterPlan;

pub(super) const TILE_ROWS: usize = 16;
pub(super) const VECTORS: usize = 1;

pub(super) const fn attention_values(_head_dim: usize) -> usize {
    0
}

pub(super) const fn tiled(_level: SimdLevel, _dtype: StorageType) -> bool {
    false
}

pub(super) const fn rows_together(_inputs: usize) -> usize {
    TILE_ROWS
}

pub(super) const fn sums_values(_rows: usize) -> usize {
    0
}

pub(super) const fn thread_values(_rows: usize) -> usize {
    0
}

pub(super) const fn gaps(_inputs: usize, _rows: usize) -> usize {
    0
}

pub(super) fn pack_pairs(_rows: &[u8], _columns: usize, _width: usize, _out: &mut [u8]) {
    unreachable!("no level here has tiles");
}

pub(super) fn store_pairs(_slot: &mut [f32], _shrunk: impl Fn(usize) -> f32) {
    unreachable!("no level here has tiles");
}

/// No registers.
pub(super) struct Registers;

impl Registers {
    pub(super) const fn of(_level: SimdLevel) -> Self {
        Self
    }
}

/// No rows.
#[derive(Clone, Copy)]
pub(super) enum RowTiles {}

impl RowTiles {
    pub(super) const fn bytes(_rows: usize, _inputs: usize) -> usize {
        0
    }

    pub(super) fn new(
        _backend: &CpuBackend,
        _rows: usize,
        _inputs: usize,
        _input: &Buffer,
        _memory: &mut [u8],
    ) -> Self {
        unreachable!("no level here has tiles");
    }
}

/// No adapters.
pub(super) struct TileExpand<'a> {
    none: RowTiles,
    plan: std::marker::PhantomData<&'a RowAdapterPlan>,
}

#[expect(unsafe_code, reason = "the same signatures as where there are tiles")]
impl<'a> TileExpand<'a> {
    pub(super) unsafe fn new(
        _plan: &'a RowAdapterPlan,
        _segments: &'a [Segment],
        _shrunk: *const f32,
        _rows: (usize, usize),
    ) -> Self {
        unreachable!("no level here has tiles");
    }

    pub(super) const fn is_empty(&self) -> bool {
        match self.none {}
    }

    pub(super) fn ahead(&self, _first_output: usize, _width: usize, _gaps: usize) -> Option<Ahead<'_>> {
        match self.none {}
    }

    pub(super) unsafe fn run(
        &self,
        _outputs: (usize, usize),
        _width: usize,
        _sums: *mut f32,
        _registers: &mut Registers,
        _spare: *mut f32,
    ) {
        match self.none {}
    }
}

/// No shrink.
pub(super) struct ShrinkCall<'a> {
    pub(super) tiles: &'a RowTiles,
    pub(super) inputs: usize,
    pub(super) plan: &'a RowAdapterPlan,
    pub(super) segments: &'a [Segment],
    pub(super) shrunk: *mut f32,
}

#[expect(unsafe_code, reason = "the same signatures as where there are tiles")]
impl ShrinkCall<'_> {
    pub(super) unsafe fn run(&self, _share: (usize, usize), _registers: &mut Registers, _spare: *mut f32) {
        match *self.tiles {}
    }
}

/// No panels.
pub(super) struct Panels<'a> {
    pub(super) tiles: &'a RowTiles,
    pub(super) first_row: usize,
    pub(super) rows: usize,
    pub(super) inputs: usize,
    pub(super) weights: *const u8,
    pub(super) panel_bytes: usize,
    pub(super) count: usize,
    pub(super) sums: *mut f32,
    pub(super) follows: *const u8,
    pub(super) ahead: Option<&'a Ahead<'a>>,
}

#[expect(unsafe_code, reason = "the same signatures as where there are tiles")]
impl Panels<'_> {
    pub(super) unsafe fn run(&self, _registers: &mut Registers) {
        match *self.tiles {}
    }
}

/// No results.
pub(super) struct Finish {
    pub(super) sums: *const f32,
    pub(super) width: usize,
    pub(super) rows: usize,
    pub(super) count: usize,
    pub(super) bias: *const f32,
    pub(super) out: *mut f32,
    pub(super) out_width: usize,
    pub(super) add: bool,
}

#[expect(unsafe_code, reason = "the same signatures as where there are tiles")]
impl Finish {
    pub(super) unsafe fn run(&self) {
        unreachable!("no level here has tiles");
    }
}

/// No attention.
pub(super) struct Attention<'a> {
    pub(super) low: &'a [usize],
    pub(super) high: &'a [usize],
    pub(super) offset: &'a [usize],
    pub(super) q: *const f32,
    pub(super) out: *mut f32,
    pub(super) scale: f32,
    pub(super) keys: *const u16,
    pub(super) values: *const u16,
    pub(super) block_stride: usize,
    pub(super) block_size: usize,
    pub(super) head_dim: usize,
    pub(super) table: &'a [u32],
    pub(super) scratch: *mut f32,
}

#[expect(unsafe_code, reason = "the same signatures as where there are tiles")]
impl Attention<'_> {
    pub(super) unsafe fn run(&self, _registers: &mut Registers) {
        unreachable!("no level here has tiles");
    }
}

/// No results.
pub(super) struct FinishGated {
    pub(super) sums: [*const f32; 2],
    pub(super) width: usize,
    pub(super) rows: usize,
    pub(super) count: usize,
    pub(super) bias: [*const f32; 2],
    pub(super) out: *mut f32,
    pub(super) out_width: usize,
}

#[expect(unsafe_code, reason = "the same signatures as where there are tiles")]
impl FinishGated {
    pub(super) unsafe fn run(&self) {
        unreachable!("no level here has tiles");
    }
}
