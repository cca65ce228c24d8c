//! Panel kernels for AVX2 with FMA: up to six rows by 16 outputs in twelve accumulators, or fewer rows by several
//! panels so that enough chains are in flight to keep memory busy.
//!
//! Widening bf16 competes with FMA for the same execution ports, so it is done once per panel: of several blocks of rows
//! the first one leaves the widened weights of a stretch in the first-level cache, and the others read them there.
#![expect(unsafe_code, reason = "SIMD intrinsics over pointers")]
#![expect(clippy::needless_range_loop, reason = "indices name registers; the loops are unrolled")]

use std::arch::x86_64::{
    __m256, _MM_HINT_T0, _mm_prefetch, _mm256_and_si256, _mm256_broadcast_ss, _mm256_castsi256_ps, _mm256_fmadd_ps,
    _mm256_load_ps, _mm256_load_si256, _mm256_loadu_ps, _mm256_set1_epi32, _mm256_setzero_ps, _mm256_slli_epi32,
    _mm256_store_ps, _mm256_storeu_ps,
};
use std::mem::MaybeUninit;

use crate::cpu::kernels::{PanelJob, PanelRow, block_rows};

const WIDTH: usize = 16;
/// Rows of the largest register block: 6 x 2 accumulators, two registers of weights, one of input.
const MOST_ROWS: usize = 6;
/// Steps between two prefetches.
const UNROLL: usize = 4;
/// How far ahead of its use the packed stream is prefetched when it is read once.
const AHEAD: usize = 4096;
/// The same with several panels side by side, each of them a stream.
const AHEAD_OF_EACH: usize = 1536;
/// Steps whose widened weights stay in the first-level cache: 8 KiB, beside the rows' inputs and the stream itself.
const STRETCH: usize = 128;

/// Where a block's weights come from.
type Source = u8;
/// A stream of f32.
const F32: Source = 0;
/// A stream of bf16.
const BF16: Source = 1;
/// A stream of bf16 that is left behind widened.
const WIDEN: Source = 2;
/// What [`WIDEN`] left.
const WIDENED: Source = 3;

const fn reads_bf16(source: Source) -> bool {
    source == BF16 || source == WIDEN
}

/// Bytes of one step of a panel's stream.
const fn stream_bytes(source: Source) -> usize {
    if source == F32 { 64 } else { 32 }
}

/// Widened weights of a stretch.
#[repr(align(64))]
struct Widened([MaybeUninit<f32>; STRETCH * WIDTH]);

/// Panels of 16 outputs, f32.
///
/// # Safety
/// The processor has AVX2 and FMA; the job's pointers are valid for what it says, panels aligned to 32 bytes.
#[target_feature(enable = "avx2,fma")]
pub(in crate::cpu) unsafe fn panel_f32(job: &PanelJob<'_>) {
    // SAFETY: passed on.
    unsafe { panel::<F32>(job) }
}

/// Panels of 16 outputs, bf16.
///
/// # Safety
/// As for [`panel_f32`].
#[target_feature(enable = "avx2,fma")]
pub(in crate::cpu) unsafe fn panel_bf16(job: &PanelJob<'_>) {
    // SAFETY: passed on.
    unsafe { panel::<BF16>(job) }
}

/// See [`crate::cpu::kernels::blocks_of_rows`].
pub(in crate::cpu) const fn blocks_of_rows(rows: usize, steps: usize, stretch: usize) -> usize {
    let stretch = if rows > MOST_ROWS && stretch > STRETCH { STRETCH } else { stretch };
    steps.div_ceil(stretch) * rows.div_ceil(MOST_ROWS)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn panel<const STREAM: Source>(job: &PanelJob<'_>) {
    let per_unroll = UNROLL * stream_bytes(STREAM);
    let run = |ahead| Run::whole(job, ahead, per_unroll);
    // SAFETY: passed on; each arm's ROWS is the length of the rows it gets.
    unsafe {
        match (job.panels, job.rows.len()) {
            (4, 1) => block::<STREAM, 1, 4>(job.rows, &run(AHEAD_OF_EACH)),
            (2, 1) => block::<STREAM, 1, 2>(job.rows, &run(AHEAD_OF_EACH)),
            (2, 2) => block::<STREAM, 2, 2>(job.rows, &run(AHEAD_OF_EACH)),
            (2, 3) => block::<STREAM, 3, 2>(job.rows, &run(AHEAD_OF_EACH)),
            (1, 1) => block::<STREAM, 1, 1>(job.rows, &run(AHEAD)),
            (1, 2) => block::<STREAM, 2, 1>(job.rows, &run(AHEAD)),
            (1, 3) => block::<STREAM, 3, 1>(job.rows, &run(AHEAD)),
            (1, 4) => block::<STREAM, 4, 1>(job.rows, &run(AHEAD)),
            (1, 5) => block::<STREAM, 5, 1>(job.rows, &run(AHEAD)),
            (1, 6) => block::<STREAM, 6, 1>(job.rows, &run(AHEAD)),
            (1, _) => return blocks::<STREAM>(job),
            (panels, rows) => unreachable!("no register block of {rows} rows by {panels} panels"),
        }
    }
    job.after_block();
}

/// More rows than one register block has: stretch by stretch, so that all blocks find a stretch in the first-level cache.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn blocks<const STREAM: Source>(job: &PanelJob<'_>) {
    let mut widened = Widened([MaybeUninit::uninit(); STRETCH * WIDTH]);
    let widened: *mut f32 = widened.0.as_mut_ptr().cast();
    let blocks = job.rows.len().div_ceil(MOST_ROWS);
    let mut start = 0;
    while start < job.steps {
        let steps = STRETCH.min(job.steps - start);
        let bytes = steps * stream_bytes(STREAM);
        let mut first = 0;
        for index in 0..blocks {
            let rows = &job.rows[first..first + block_rows(job.rows.len(), MOST_ROWS, index)];
            first += rows.len();
            // Each block fetches its share of the stretch that follows.
            let share = bytes / blocks;
            let run = Run {
                // SAFETY: within the panel.
                weights: unsafe { job.weights.add(start * stream_bytes(STREAM)) },
                widened,
                panel_stride: job.panel_stride,
                steps,
                first_step: job.first_step + start,
                fresh: job.fresh && start == 0,
                ahead: bytes + index * share,
                per_unroll: UNROLL * stream_bytes(STREAM) / blocks,
            };
            // SAFETY: passed on; each arm's ROWS is the length of the rows it gets. Seven rows and more make blocks of
            // three to six, of which the first is the largest; it has written what the others read.
            unsafe {
                match (STREAM == BF16, index == 0, rows.len()) {
                    (true, true, 4) => block::<WIDEN, 4, 1>(rows, &run),
                    (true, true, 5) => block::<WIDEN, 5, 1>(rows, &run),
                    (true, true, _) => block::<WIDEN, 6, 1>(rows, &run),
                    (true, false, 3) => block::<WIDENED, 3, 1>(rows, &run),
                    (true, false, 4) => block::<WIDENED, 4, 1>(rows, &run),
                    (true, false, 5) => block::<WIDENED, 5, 1>(rows, &run),
                    (true, false, _) => block::<WIDENED, 6, 1>(rows, &run),
                    (false, _, 3) => block::<F32, 3, 1>(rows, &run),
                    (false, _, 4) => block::<F32, 4, 1>(rows, &run),
                    (false, _, 5) => block::<F32, 5, 1>(rows, &run),
                    (false, _, _) => block::<F32, 6, 1>(rows, &run),
                }
            }
            job.after_block();
        }
        start += steps;
    }
}

/// The steps of a job that a block takes in one go.
struct Run {
    /// The stream at its first step.
    weights: *const u8,
    widened: *mut f32,
    panel_stride: usize,
    steps: usize,
    first_step: usize,
    fresh: bool,
    /// Prefetches from `ahead` bytes behind the first step on, `per_unroll` bytes for every [`UNROLL`] steps.
    ahead: usize,
    per_unroll: usize,
}

impl Run {
    /// All of a job, reading the stream once and running ahead of itself.
    const fn whole(job: &PanelJob<'_>, ahead: usize, per_unroll: usize) -> Self {
        Self {
            weights: job.weights,
            widened: std::ptr::null_mut(),
            panel_stride: job.panel_stride,
            steps: job.steps,
            first_step: job.first_step,
            fresh: job.fresh,
            ahead,
            per_unroll,
        }
    }
}

/// One register block.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn block<const SOURCE: Source, const ROWS: usize, const PANELS: usize>(rows: &[PanelRow], run: &Run) {
    debug_assert_eq!(rows.len(), ROWS);
    let mut sums = [[[_mm256_setzero_ps(); 2]; PANELS]; ROWS];
    let mut inputs = [std::ptr::null::<f32>(); ROWS];
    // SAFETY: the run's pointers are valid for `steps` steps from `first_step` on and for the panels' outputs; a
    // prefetch may point anywhere, and its address is made by wrapping arithmetic.
    unsafe {
        for row in 0..ROWS {
            inputs[row] = rows[row].input.cast::<f32>().add(run.first_step);
            if !run.fresh {
                for panel in 0..PANELS {
                    let tile = rows[row].tile.add(panel * WIDTH);
                    sums[row][panel] = [_mm256_loadu_ps(tile), _mm256_loadu_ps(tile.add(8))];
                }
            }
        }
        let mut prefetch = run.weights.wrapping_add(run.ahead);
        let mut step = 0;
        while step + UNROLL <= run.steps {
            for panel in 0..PANELS {
                let line = prefetch.wrapping_add(panel * run.panel_stride).cast::<i8>();
                _mm_prefetch::<_MM_HINT_T0>(line);
                if SOURCE != WIDENED {
                    _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(64));
                }
                if SOURCE == F32 {
                    _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(128));
                    _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(192));
                }
            }
            prefetch = prefetch.wrapping_add(run.per_unroll);
            for offset in 0..UNROLL {
                one_step::<SOURCE, ROWS, PANELS>(&mut sums, &inputs, step + offset, run);
            }
            step += UNROLL;
        }
        while step < run.steps {
            one_step::<SOURCE, ROWS, PANELS>(&mut sums, &inputs, step, run);
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
unsafe fn one_step<const SOURCE: Source, const ROWS: usize, const PANELS: usize>(
    sums: &mut [[[__m256; 2]; PANELS]; ROWS],
    inputs: &[*const f32; ROWS],
    step: usize,
    run: &Run,
) {
    for panel in 0..PANELS {
        // SAFETY: the step's weights of this panel, aligned because panels are and a step is 32 or 64 bytes; widened
        // weights have room for a stretch, and are there where they are read.
        let (low, high) = unsafe {
            let address = run.weights.add(panel * run.panel_stride + step * stream_bytes(SOURCE));
            let widened = run.widened.wrapping_add(step * WIDTH);
            if reads_bf16(SOURCE) {
                let both = _mm256_load_si256(address.cast());
                let high_halves = _mm256_set1_epi32(0xFFFF_0000_u32 as i32);
                let low = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(both));
                let high = _mm256_castsi256_ps(_mm256_and_si256(both, high_halves));
                if SOURCE == WIDEN {
                    _mm256_store_ps(widened, low);
                    _mm256_store_ps(widened.add(8), high);
                }
                (low, high)
            } else {
                let from = if SOURCE == WIDENED { widened.cast_const() } else { address.cast() };
                (_mm256_load_ps(from), _mm256_load_ps(from.add(8)))
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
