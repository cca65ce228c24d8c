//! Panel kernels for AVX2 with FMA: up to six rows by 16 outputs in twelve accumulators, or fewer rows by several
//! panels so that enough chains are in flight to keep memory busy.
//!
//! Every block widens bf16 for itself: a shift and a mask for twelve FMAs find room beside them, while widened weights
//! that the first block leaves for the others cost two stores a step and twice the bytes of the first-level cache.
#![expect(unsafe_code, reason = "SIMD intrinsics over pointers")]
#![expect(clippy::needless_range_loop, reason = "indices name registers; the loops are unrolled")]

use std::arch::x86_64::{
    __m256, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm256_broadcast_ss, _mm256_fmadd_ps, _mm256_load_ps,
    _mm256_load_si256, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_storeu_ps,
};

use super::widen::Widening;
use crate::cpu::kernels::{PanelJob, PanelRow, block_rows};

const WIDTH: usize = 16;
/// Rows of the largest register block: 6 x 2 accumulators, two registers of weights, one of input.
const MOST_ROWS: usize = 6;
/// Steps between two prefetches.
const UNROLL: usize = 4;
/// How far ahead of its use the packed stream is prefetched when it is read once.
const AHEAD: usize = 4096;
/// The same with several panels side by side, each of them a stream: far enough for the memory's latency, and near enough
/// that what all streams ask for at once finds room.
const AHEAD_OF_EACH: usize = 512;
/// Bytes of one step of a panel's stream.
const fn step_bytes(bf16: bool) -> usize {
    if bf16 { 32 } else { 64 }
}

/// Panels of 16 outputs, f32.
///
/// # Safety
/// The processor has AVX2 and FMA; the job's pointers are valid for what it says, panels aligned to 32 bytes.
#[target_feature(enable = "avx2,fma")]
pub(in crate::cpu) unsafe fn panel_f32(job: &PanelJob<'_>) {
    // SAFETY: passed on.
    unsafe { panel::<false>(job) }
}

/// Panels of 16 outputs, bf16.
///
/// # Safety
/// As for [`panel_f32`].
#[target_feature(enable = "avx2,fma")]
pub(in crate::cpu) unsafe fn panel_bf16(job: &PanelJob<'_>) {
    // SAFETY: passed on.
    unsafe { panel::<true>(job) }
}

/// See [`crate::cpu::kernels::blocks_of_rows`].
pub(in crate::cpu) const fn blocks_of_rows(rows: usize, steps: usize, stretch: usize) -> usize {
    steps.div_ceil(stretch) * rows.div_ceil(MOST_ROWS)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn panel<const BF16: bool>(job: &PanelJob<'_>) {
    let fetch = Fetch::ahead::<BF16>(job, AHEAD_OF_EACH);
    // SAFETY: passed on; each arm's ROWS is the length of the rows it gets.
    unsafe {
        match (job.panels, job.rows.len()) {
            (6, 1) => block::<BF16, 1, 6, _MM_HINT_T0>(job, job.rows, fetch),
            (4, 1) => block::<BF16, 1, 4, _MM_HINT_T0>(job, job.rows, fetch),
            (2, 1) => block::<BF16, 1, 2, _MM_HINT_T0>(job, job.rows, fetch),
            (3, 2) => block::<BF16, 2, 3, _MM_HINT_T0>(job, job.rows, fetch),
            (2, 2) => block::<BF16, 2, 2, _MM_HINT_T0>(job, job.rows, fetch),
            (1, _) => return single_panel::<BF16>(job),
            (panels, rows) => unreachable!("no register block of {rows} rows by {panels} panels"),
        }
    }
    job.after_block();
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn single_panel<const BF16: bool>(job: &PanelJob<'_>) {
    let blocks = job.rows.len().div_ceil(MOST_ROWS);
    if blocks == 1 {
        // The only block reads the stream once and runs ahead of itself.
        // SAFETY: passed on.
        unsafe { rows_of_panel::<BF16, _MM_HINT_T0>(job, job.rows, Fetch::ahead::<BF16>(job, AHEAD)) };
        job.after_block();
        return;
    }
    let share = job.steps * step_bytes(BF16) / blocks;
    let mut first = 0;
    for index in 0..blocks {
        let rows = &job.rows[first..first + block_rows(job.rows.len(), MOST_ROWS, index)];
        first += rows.len();
        // Each fetches its share of the next job, to the second-level cache: the first holds what the blocks share.
        let per_unroll = UNROLL * step_bytes(BF16) / blocks;
        let fetch = Fetch { from: job.next.wrapping_add(index * share), per_unroll, turn: usize::MAX };
        // SAFETY: passed on.
        unsafe { rows_of_panel::<BF16, _MM_HINT_T1>(job, rows, fetch) };
        job.after_block();
    }
}

/// Up to [`MOST_ROWS`] rows by one panel.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn rows_of_panel<const BF16: bool, const HINT: i32>(job: &PanelJob<'_>, rows: &[PanelRow], fetch: Fetch) {
    // SAFETY: passed on; each arm's ROWS is the length of the rows it gets.
    unsafe {
        match rows.len() {
            1 => block::<BF16, 1, 1, HINT>(job, rows, fetch),
            2 => block::<BF16, 2, 1, HINT>(job, rows, fetch),
            3 => block::<BF16, 3, 1, HINT>(job, rows, fetch),
            4 => block::<BF16, 4, 1, HINT>(job, rows, fetch),
            5 => block::<BF16, 5, 1, HINT>(job, rows, fetch),
            _ => block::<BF16, 6, 1, HINT>(job, rows, fetch),
        }
    }
}

/// What a block fetches while it runs: `per_unroll` bytes of each panel for every [`UNROLL`] steps.
#[derive(Clone, Copy)]
struct Fetch {
    from: *const u8,
    per_unroll: usize,
    /// The step (a multiple of [`UNROLL`]) from which on it is the next job's bytes.
    turn: usize,
}

impl Fetch {
    /// The job's own bytes, `ahead` of their use, and then those of the next job.
    fn ahead<const BF16: bool>(job: &PanelJob<'_>, ahead: usize) -> Self {
        let turn = job.steps.saturating_sub(ahead / step_bytes(BF16)).next_multiple_of(UNROLL);
        Self { from: job.weights.wrapping_add(ahead), per_unroll: UNROLL * step_bytes(BF16), turn }
    }
}

/// One register block.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn block<const BF16: bool, const ROWS: usize, const PANELS: usize, const HINT: i32>(
    job: &PanelJob<'_>,
    rows: &[PanelRow],
    fetch: Fetch,
) {
    debug_assert_eq!(rows.len(), ROWS);
    let mut sums = [[[_mm256_setzero_ps(); 2]; PANELS]; ROWS];
    let mut inputs = [std::ptr::null::<f32>(); ROWS];
    // SAFETY: the job's pointers are valid for `steps` steps from `first_step` on and for the panels' outputs; a
    // prefetch may point anywhere, and its address is made by wrapping arithmetic.
    unsafe {
        for row in 0..ROWS {
            inputs[row] = rows[row].input.cast::<f32>().add(job.first_step);
            if !job.fresh {
                for panel in 0..PANELS {
                    let tile = rows[row].tile.add(panel * WIDTH);
                    sums[row][panel] = [_mm256_loadu_ps(tile), _mm256_loadu_ps(tile.add(8))];
                }
            }
        }
        let widening = Widening::new();
        let mut prefetch = fetch.from;
        let mut step = 0;
        while step + UNROLL <= job.steps {
            if step == fetch.turn {
                prefetch = job.next;
            }
            for panel in 0..PANELS {
                let line = prefetch.wrapping_add(panel * job.panel_stride).cast::<i8>();
                for offset in 0..UNROLL * step_bytes(BF16) / 64 {
                    // Of several blocks, each fetches a line or two of what follows.
                    if offset == 0 || offset * 64 < fetch.per_unroll {
                        _mm_prefetch::<HINT>(line.wrapping_add(64 * offset));
                    }
                }
            }
            prefetch = prefetch.wrapping_add(fetch.per_unroll);
            for offset in 0..UNROLL {
                one_step::<BF16, ROWS, PANELS>(&mut sums, &inputs, step + offset, job, widening);
            }
            step += UNROLL;
        }
        while step < job.steps {
            one_step::<BF16, ROWS, PANELS>(&mut sums, &inputs, step, job, widening);
            step += 1;
        }
        for row in 0..ROWS {
            for panel in 0..PANELS {
                let tile = rows[row].tile.add(panel * WIDTH);
                _mm256_storeu_ps(tile, sums[row][panel][0]);
                _mm256_storeu_ps(tile.add(8), sums[row][panel][1]);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn one_step<const BF16: bool, const ROWS: usize, const PANELS: usize>(
    sums: &mut [[[__m256; 2]; PANELS]; ROWS],
    inputs: &[*const f32; ROWS],
    step: usize,
    job: &PanelJob<'_>,
    widening: Widening,
) {
    for panel in 0..PANELS {
        // SAFETY: the step's weights of this panel, aligned because panels are and a step is 32 or 64 bytes.
        let (low, high) = unsafe {
            let address = job.weights.add(panel * job.panel_stride + step * step_bytes(BF16));
            if BF16 {
                widening.widen(_mm256_load_si256(address.cast()))
            } else {
                let address: *const f32 = address.cast();
                (_mm256_load_ps(address), _mm256_load_ps(address.add(8)))
            }
        };
        for row in 0..ROWS {
            // SAFETY: the row has an input for this step.
            let input = unsafe { _mm256_broadcast_ss(&*inputs[row].add(step)) };
            sums[row][panel][0] = _mm256_fmadd_ps(input, low, sums[row][panel][0]);
            sums[row][panel][1] = _mm256_fmadd_ps(input, high, sums[row][panel][1]);
        }
    }
}
