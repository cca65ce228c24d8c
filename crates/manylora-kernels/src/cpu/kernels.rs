//! The inner kernels of `linear` and their dispatch: a panel of outputs for a list of rows, the expand of rows that have
//! an adapter each, and the shrink.
//!
//! They take rows through a list of pointers, so that any rows of a batch (all of them, or those of one adapter) can
//! form a register block. A (row, output) pair has one accumulator that runs over the inputs in order, whatever rows
//! are computed beside it: results do not depend on how rows are grouped.

use super::ahead::Ahead;
use super::level::SimdLevel;
use super::pack::PanelFormat;
use super::portable;
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::backend::StorageType;

/// Most panels that one call computes side by side.
pub(super) const MAX_PANELS: usize = 6;

/// One row of a [`PanelJob`].
#[derive(Clone, Copy)]
pub(super) struct PanelRow {
    /// The row's inputs: f32, or pairs of bf16 for [`PanelFormat::Bf16Pairs`].
    pub(super) input: *const u32,
    /// Where the row's outputs accumulate: `panels` x the panel's width, f32.
    pub(super) tile: *mut f32,
}

/// `tile[row][output] += sum over steps of input[row][step] x panel[step][output]`, in the order of the steps.
pub(super) struct PanelJob<'a> {
    pub(super) rows: &'a [PanelRow],
    /// First step of the first panel.
    pub(super) weights: *const u8,
    /// Bytes from one panel to the next.
    pub(super) panel_stride: usize,
    /// Panels side by side: as many as the level has a kernel for.
    pub(super) panels: usize,
    /// Steps to run.
    pub(super) steps: usize,
    /// Step that `weights` points to: offset into the rows' inputs.
    pub(super) first_step: usize,
    /// Start from zero instead of from the tile.
    pub(super) fresh: bool,
    /// What this thread will probably read after this job, as much as the job has itself: where kernels that read ahead
    /// go on.
    pub(super) next: *const u8,
    /// Lines to fetch after each block of rows, for whoever comes after the kernel.
    pub(super) ahead: Option<&'a Ahead<'a>>,
}

impl PanelJob<'_> {
    /// What a kernel calls after each block of rows.
    #[inline]
    pub(super) fn after_block(&self) {
        if let Some(ahead) = self.ahead {
            ahead.gap();
        }
    }
}

/// Computes a [`PanelJob`].
///
/// # Safety
/// All pointers of the job are valid for what it says, and the processor has the level that the kernel was written for.
pub(super) type PanelKernel = unsafe fn(&PanelJob<'_>);

/// One row of an [`ExpandJob`], with an adapter of its own.
#[derive(Clone, Copy)]
pub(super) struct LoneRow {
    /// The row's shrink results, `steps` of them.
    pub(super) input: *const f32,
    /// The first panel of B, and bytes from one panel to the next.
    pub(super) b: *const u8,
    pub(super) panel_bytes: usize,
    /// The adapter's rank.
    pub(super) steps: usize,
    /// Row of the tile.
    pub(super) tile_row: usize,
}

impl LoneRow {
    /// No row.
    pub(super) const NONE: Self =
        Self { input: std::ptr::null(), b: std::ptr::null(), panel_bytes: 0, steps: 0, tile_row: 0 };
}

/// `tile[row][output] += sum over ranks of input[row][rank] x b of the row[rank][output]`, in the order of the ranks.
pub(super) struct ExpandJob<'a> {
    /// With falling `steps`.
    pub(super) rows: &'a [LoneRow],
    /// First panel of B (16 outputs each), and how many.
    pub(super) panel: usize,
    pub(super) panels: usize,
    /// The outputs of the first panel, and values from one row to the next.
    pub(super) tile: *mut f32,
    pub(super) width: usize,
}

/// Computes an [`ExpandJob`].
///
/// # Safety
/// As for [`PanelKernel`].
pub(super) type ExpandKernel = unsafe fn(&ExpandJob<'_>);

/// One row of a [`ShrinkJob`].
#[derive(Clone, Copy)]
pub(super) struct ShrinkRow {
    /// The row's inputs.
    pub(super) input: *const f32,
    /// `[rank]` results.
    pub(super) result: *mut f32,
    /// Factor on the results.
    pub(super) scale: f32,
}

/// `result[row][r] = scale[row] x sum over k of a[r][k] x input[row][k]` for `ranks` rows of A.
pub(super) struct ShrinkJob<'a> {
    pub(super) rows: &'a [ShrinkRow],
    /// Row-major A, from its first row.
    pub(super) a: *const u8,
    /// Columns of A.
    pub(super) inputs: usize,
    /// Rows of A to compute.
    pub(super) ranks: std::ops::Range<usize>,
}

/// Computes a [`ShrinkJob`].
///
/// # Safety
/// As for [`PanelKernel`].
pub(super) type ShrinkKernel = unsafe fn(&ShrinkJob<'_>);

/// The panel kernel of a level for a format.
pub(super) fn panel_kernel(level: SimdLevel, format: PanelFormat) -> PanelKernel {
    match (level, format) {
        #[cfg(target_arch = "x86_64")]
        (SimdLevel::Avx512Bf16, PanelFormat::Bf16Pairs) => x86::avx512_gemm::panel_bf16_pairs,
        #[cfg(target_arch = "x86_64")]
        (SimdLevel::Avx2 | SimdLevel::Avx512Bf16 | SimdLevel::Amx, PanelFormat::F32) => x86::avx2_gemm::panel_f32,
        #[cfg(target_arch = "x86_64")]
        (SimdLevel::Avx2 | SimdLevel::Avx512Bf16 | SimdLevel::Amx, PanelFormat::Bf16) => x86::avx2_gemm::panel_bf16,
        (_, PanelFormat::F32) => portable::gemm::panel_f32,
        (_, PanelFormat::Bf16) => portable::gemm::panel_bf16,
        (_, PanelFormat::Bf16Pairs) => unreachable!("`{level}` has no kernel of its own for pairs"),
    }
}

/// The expand kernel of a level for B's element type.
pub(super) fn expand_kernel(level: SimdLevel, dtype: StorageType) -> ExpandKernel {
    match (level, dtype) {
        #[cfg(target_arch = "x86_64")]
        (SimdLevel::Avx2 | SimdLevel::Avx512Bf16 | SimdLevel::Amx, StorageType::F32) => x86::avx2_expand::expand_f32,
        #[cfg(target_arch = "x86_64")]
        (SimdLevel::Avx2 | SimdLevel::Avx512Bf16 | SimdLevel::Amx, StorageType::Bf16) => x86::avx2_expand::expand_bf16,
        (_, StorageType::F32) => portable::gemm::expand_f32,
        (_, StorageType::Bf16) => portable::gemm::expand_bf16,
        (_, StorageType::F16) => unreachable!("refused where it is asked for"),
    }
}

/// The shrink kernel of a level for A's element type.
pub(super) fn shrink_kernel(level: SimdLevel, dtype: StorageType) -> ShrinkKernel {
    match (level, dtype) {
        #[cfg(target_arch = "x86_64")]
        (SimdLevel::Avx2 | SimdLevel::Avx512Bf16 | SimdLevel::Amx, StorageType::F32) => x86::avx2_shrink::shrink_f32,
        #[cfg(target_arch = "x86_64")]
        (SimdLevel::Avx2 | SimdLevel::Avx512Bf16 | SimdLevel::Amx, StorageType::Bf16) => x86::avx2_shrink::shrink_bf16,
        (_, StorageType::F32) => portable::shrink::shrink_f32,
        (_, StorageType::Bf16) => portable::shrink::shrink_bf16,
        (_, StorageType::F16) => unreachable!("refused where it is asked for"),
    }
}

/// About how many blocks of rows a level's panel kernel computes one after the other for `rows` rows and `steps` steps,
/// in jobs of `stretch` steps.
pub(super) const fn blocks_of_rows(level: SimdLevel, rows: usize, steps: usize, stretch: usize) -> usize {
    match level {
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 | SimdLevel::Amx => x86::avx2_gemm::blocks_of_rows(rows, steps, stretch),
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512Bf16 => x86::avx512_gemm::blocks_of_rows(rows, steps, stretch),
        _ => steps.div_ceil(stretch),
    }
}

/// Splits `rows` rows into the fewest blocks of at most `most`, of nearly equal size: seven rows are 4 + 3, not 6 + 1.
/// Returns the size of block `index`.
#[inline]
pub(super) const fn block_rows(rows: usize, most: usize, index: usize) -> usize {
    let blocks = rows.div_ceil(most);
    rows / blocks + (index < rows % blocks) as usize
}
