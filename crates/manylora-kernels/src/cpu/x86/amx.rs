//! Tile products: AMX with BF16, sixteen rows by sixteen outputs by 32 inputs an instruction.
//!
//! `tdpbf16ps` adds to each f32 of an accumulator tile the products of a row's pairs of bf16 with an output's, pair by
//! pair in order; denormals count as zero. What a (row, output) comes to does not depend on the other rows and outputs of
//! its tile, nor on how many there are.
//!
//! The shape of the tiles is state of the thread ([`Tiles`]). Every kernel here is one block of assembly that fills its
//! accumulators, runs and stores them, so that nothing has to live in tile registers in between.
#![expect(unsafe_code, reason = "tile instructions have no stable intrinsics")]

use std::arch::asm;

/// Rows of a tile, and its f32 or pairs of bf16 per row.
pub(in crate::cpu) const TILE_ROWS: usize = 16;
pub(in crate::cpu) const TILE_COLUMNS: usize = 16;
/// Pairs of inputs that one instruction consumes.
pub(in crate::cpu) const TILE_PAIRS: usize = 16;
/// Bytes from one row of a tile to the next, where it lies in one piece, and of the whole.
pub(in crate::cpu) const TILE_LINE: usize = 64;
pub(in crate::cpu) const TILE_BYTES: usize = TILE_ROWS * TILE_LINE;
/// How far ahead of its use a stream of weights is prefetched: between loads and products, so that the core's few buffers
/// for lines under way never run empty.
pub(in crate::cpu) const AHEAD: usize = 3072;

/// The shapes of all tile registers, as far as kernels choose them.
///
/// Accumulators 0 and 1 have `first` rows, 2 and 3 `second` rows, all of `columns` f32. 4 and 5 are inputs, `first` and
/// `second` rows of `pairs` pairs. 6 and 7 are weights: `pairs` rows of `columns` pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) struct TileShape {
    pub(in crate::cpu) first: usize,
    pub(in crate::cpu) second: usize,
    pub(in crate::cpu) columns: usize,
    pub(in crate::cpu) pairs: usize,
}

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The tile registers of this thread; given back when it is dropped, so that a switch to another thread need not save
/// them.
pub(in crate::cpu) struct Tiles {
    shape: Option<TileShape>,
    /// Belongs to the thread that made it.
    thread: std::marker::PhantomData<*const ()>,
}

impl Tiles {
    /// # Safety
    /// The processor has AMX with BF16, and the system lets this process use it.
    pub(in crate::cpu) const unsafe fn new() -> Self {
        Self { shape: None, thread: std::marker::PhantomData }
    }

    /// Gives the registers this shape. What was in them is lost when it changes.
    #[inline]
    pub(in crate::cpu) fn shape(&mut self, shape: TileShape) {
        if self.shape != Some(shape) {
            self.load(shape);
        }
    }

    #[cold]
    #[inline(never)]
    fn load(&mut self, shape: TileShape) {
        let TileShape { first, second, columns, pairs } = shape;
        assert!(
            (1..=TILE_ROWS).contains(&first)
                && (1..=TILE_ROWS).contains(&second)
                && (1..=TILE_COLUMNS).contains(&columns)
                && (1..=TILE_PAIRS).contains(&pairs),
            "no tiles of {shape:?}"
        );
        let mut configuration =
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let registers = [
            (first, columns),
            (first, columns),
            (second, columns),
            (second, columns),
            (first, pairs),
            (second, pairs),
            (pairs, columns),
            (pairs, columns),
        ];
        for (register, (rows, words)) in registers.into_iter().enumerate() {
            configuration.rows[register] = rows as u8;
            configuration.row_bytes[register] = 4 * words as u16;
        }
        // SAFETY: the configuration is one that the processor takes (palette 1, 16 rows of 64 bytes at most).
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly, preserves_flags));
        }
        self.shape = Some(shape);
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        if self.shape.is_some() {
            // SAFETY: tiles were configured, so the instruction is there.
            unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
        }
    }
}

/// `sums += inputs x weights` over `tiles` steps of 32 inputs, for one or two groups of rows or panels of outputs.
pub(in crate::cpu) struct Product {
    /// Two groups of up to 16 rows: tiles of 16 lines of 64 bytes, one behind the other.
    pub(in crate::cpu) inputs: [*const u8; 2],
    /// Two panels of 32 outputs, 128 bytes per pair of inputs.
    pub(in crate::cpu) weights: [*const u8; 2],
    /// Steps of 16 pairs (fewer, where the shape says so).
    pub(in crate::cpu) tiles: usize,
    /// The first row's sums, those of the second group or panel, and bytes from one row to the next.
    pub(in crate::cpu) sums: [*mut f32; 2],
    pub(in crate::cpu) stride: usize,
    /// Start from zero instead of from what is there.
    pub(in crate::cpu) fresh: bool,
    /// What to prefetch meanwhile, for each panel.
    pub(in crate::cpu) prefetch: [*const u8; 2],
}

impl Product {
    /// Where weights that are read once, in their order, are prefetched.
    pub(in crate::cpu) const fn ahead(weights: *const u8) -> *const u8 {
        weights.wrapping_add(AHEAD)
    }
}

/// A line to prefetch for each of these numbers, counted from a register, as assembly.
macro_rules! lines {
    ($at:literal, $($line:literal)*) => { concat!($("prefetcht0 [", $at, " + 64*", $line, "]\n"),*) };
}

/// What two groups prefetch at each of four places of a step: as much as the panel has, or a share of it.
macro_rules! share {
    ($at:literal, 0, 32) => { lines!($at, 0 1 2 3 4 5 6 7) };
    ($at:literal, 1, 32) => { lines!($at, 8 9 10 11 12 13 14 15) };
    ($at:literal, 2, 32) => { lines!($at, 16 17 18 19 20 21 22 23) };
    ($at:literal, 3, 32) => { lines!($at, 24 25 26 27 28 29 30 31) };
    ($at:literal, 0, 8) => { lines!($at, 0 1) };
    ($at:literal, 1, 8) => { lines!($at, 2 3) };
    ($at:literal, 2, 8) => { lines!($at, 4 5) };
    ($at:literal, 3, 8) => { lines!($at, 6 7) };
    ($at:literal, 0, 2) => { lines!($at, 0) };
    ($at:literal, 2, 2) => { lines!($at, 1) };
    ($at:literal, $place:tt, 2) => { "" };
}

/// Two groups of rows by one panel of 32 outputs; each step prefetches `$lines` lines.
macro_rules! two_groups {
    ($name:ident, $lines:tt) => {
        /// # Safety
        /// The thread's tiles have the shape of the job, and its pointers are valid for what it says.
        pub(in crate::cpu) unsafe fn $name(job: &Product) {
            if job.tiles == 0 {
                return;
            }
            // SAFETY: passed on. Prefetches may point anywhere.
            unsafe {
                asm!(
                    "test {fresh:e}, {fresh:e}",
                    "jz 2f",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "jmp 3f",
                    "2:",
                    "tileloadd tmm0, [{sums} + {stride}*1]",
                    "tileloadd tmm1, [{sums} + {stride}*1 + 64]",
                    "tileloadd tmm2, [{second_sums} + {stride}*1]",
                    "tileloadd tmm3, [{second_sums} + {stride}*1 + 64]",
                    "3:",
                    "tileloadd tmm6, [{weights} + {pair}*1]",
                    share!("{ahead}", 0, $lines),
                    "tileloadd tmm4, [{inputs} + {line}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    share!("{ahead}", 1, $lines),
                    "tileloadd tmm7, [{weights} + {pair}*1 + 64]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    share!("{ahead}", 2, $lines),
                    "tileloadd tmm5, [{second} + {line}*1]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    share!("{ahead}", 3, $lines),
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {ahead}, 64*{lines}",
                    "add {inputs}, 1024",
                    "add {second}, 1024",
                    "add {weights}, 2048",
                    "dec {tiles}",
                    "jnz 3b",
                    "tilestored [{sums} + {stride}*1], tmm0",
                    "tilestored [{sums} + {stride}*1 + 64], tmm1",
                    "tilestored [{second_sums} + {stride}*1], tmm2",
                    "tilestored [{second_sums} + {stride}*1 + 64], tmm3",
                    fresh = in(reg) u32::from(job.fresh),
                    sums = in(reg) job.sums[0],
                    second_sums = in(reg) job.sums[1],
                    stride = in(reg) job.stride,
                    inputs = inout(reg) job.inputs[0] => _,
                    second = inout(reg) job.inputs[1] => _,
                    weights = inout(reg) job.weights[0] => _,
                    ahead = inout(reg) job.prefetch[0] => _,
                    tiles = inout(reg) job.tiles => _,
                    line = in(reg) TILE_LINE,
                    pair = in(reg) 2 * TILE_LINE,
                    lines = const $lines,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

two_groups!(two_groups_fetching_2, 2);
two_groups!(two_groups_fetching_8, 8);
two_groups!(two_groups_fetching_32, 32);

/// One group of rows by two panels of 32 outputs side by side; each step prefetches as much as it reads.
///
/// # Safety
/// As for [`two_groups_fetching_2`].
pub(in crate::cpu) unsafe fn two_panels(job: &Product) {
    if job.tiles == 0 {
        return;
    }
    // SAFETY: passed on. Prefetches may point anywhere.
    unsafe {
        asm!(
            "test {fresh:e}, {fresh:e}",
            "jz 2f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 3f",
            "2:",
            "tileloadd tmm0, [{sums} + {stride}*1]",
            "tileloadd tmm1, [{sums} + {stride}*1 + 64]",
            "tileloadd tmm2, [{second_sums} + {stride}*1]",
            "tileloadd tmm3, [{second_sums} + {stride}*1 + 64]",
            "3:",
            "tileloadd tmm4, [{inputs} + {line}*1]",
            "tileloadd tmm6, [{weights} + {pair}*1]",
            lines!("{ahead}", 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15),
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{weights} + {pair}*1 + 64]",
            lines!("{ahead}", 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31),
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm6, [{second} + {pair}*1]",
            lines!("{second_ahead}", 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15),
            "tdpbf16ps tmm2, tmm4, tmm6",
            "tileloadd tmm7, [{second} + {pair}*1 + 64]",
            lines!("{second_ahead}", 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31),
            "tdpbf16ps tmm3, tmm4, tmm7",
            "add {ahead}, 2048",
            "add {second_ahead}, 2048",
            "add {inputs}, 1024",
            "add {weights}, 2048",
            "add {second}, 2048",
            "dec {tiles}",
            "jnz 3b",
            "tilestored [{sums} + {stride}*1], tmm0",
            "tilestored [{sums} + {stride}*1 + 64], tmm1",
            "tilestored [{second_sums} + {stride}*1], tmm2",
            "tilestored [{second_sums} + {stride}*1 + 64], tmm3",
            fresh = in(reg) u32::from(job.fresh),
            sums = in(reg) job.sums[0],
            second_sums = in(reg) job.sums[1],
            stride = in(reg) job.stride,
            inputs = inout(reg) job.inputs[0] => _,
            weights = inout(reg) job.weights[0] => _,
            second = inout(reg) job.weights[1] => _,
            ahead = inout(reg) job.prefetch[0] => _,
            second_ahead = inout(reg) job.prefetch[1] => _,
            tiles = inout(reg) job.tiles => _,
            line = in(reg) TILE_LINE,
            pair = in(reg) 2 * TILE_LINE,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// One group of rows by one panel of 32 outputs; each step prefetches as much as it reads.
///
/// # Safety
/// As for [`two_groups_fetching_2`].
pub(in crate::cpu) unsafe fn one_panel(job: &Product) {
    if job.tiles == 0 {
        return;
    }
    // SAFETY: passed on. Prefetches may point anywhere.
    unsafe {
        asm!(
            "test {fresh:e}, {fresh:e}",
            "jz 2f",
            "tilezero tmm0",
            "tilezero tmm1",
            "jmp 3f",
            "2:",
            "tileloadd tmm0, [{sums} + {stride}*1]",
            "tileloadd tmm1, [{sums} + {stride}*1 + 64]",
            "3:",
            "tileloadd tmm4, [{inputs} + {line}*1]",
            "tileloadd tmm6, [{weights} + {pair}*1]",
            lines!("{ahead}", 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15),
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{weights} + {pair}*1 + 64]",
            lines!("{ahead}", 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31),
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {ahead}, 2048",
            "add {inputs}, 1024",
            "add {weights}, 2048",
            "dec {tiles}",
            "jnz 3b",
            "tilestored [{sums} + {stride}*1], tmm0",
            "tilestored [{sums} + {stride}*1 + 64], tmm1",
            fresh = in(reg) u32::from(job.fresh),
            sums = in(reg) job.sums[0],
            stride = in(reg) job.stride,
            inputs = inout(reg) job.inputs[0] => _,
            weights = inout(reg) job.weights[0] => _,
            ahead = inout(reg) job.prefetch[0] => _,
            tiles = inout(reg) job.tiles => _,
            line = in(reg) TILE_LINE,
            pair = in(reg) 2 * TILE_LINE,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// What `tdpbf16ps` does to the first row of its tiles, by vectors, for two panels side by side; each step prefetches as much as
/// it reads. For one row a tile takes as many loads as for sixteen, and vectors read memory faster.
///
/// In each step even inputs and odd inputs are summed apart from zero on, fused, pair by pair, then added up and added to the
/// sums; denormals count as zero. So the instruction is specified, and the bits are the same (the tests of rows that are alone
/// and among others compare them).
///
/// # Safety
/// The job's pointers are valid for what it says, for one row and `pairs` pairs of inputs in each step, and the processor has
/// AVX-512.
pub(in crate::cpu) unsafe fn two_panels_one_row(job: &Product, pairs: usize) {
    /// Exceptions masked, rounded to nearest; denormals are zero as inputs (bit 6) and as results (bit 15).
    const MODE: u32 = 0x1F80 | 1 << 6 | 1 << 15;
    /// Even and odd inputs of a step, and the mode.
    #[repr(C, align(64))]
    struct Spare([f32; 32], u32, u32);
    if job.tiles == 0 {
        return;
    }
    let mut spare = Spare([0.0; 32], MODE, 0);
    // SAFETY: passed on. The mode is the caller's again at the end. Prefetches may point anywhere.
    unsafe {
        asm!(
            "stmxcsr [{spare} + 132]",
            "ldmxcsr [{spare} + 128]",
            "vpternlogd zmm31, zmm31, zmm31, 255",
            "vpslld zmm31, zmm31, 16",
            "vxorps xmm24, xmm24, xmm24",
            "vxorps xmm25, xmm25, xmm25",
            "vxorps xmm26, xmm26, xmm26",
            "vxorps xmm27, xmm27, xmm27",
            "test {fresh:e}, {fresh:e}",
            "jnz 3f",
            "vmovups zmm24, [{sums}]",
            "vmovups zmm25, [{sums} + 64]",
            "vmovups zmm26, [{second_sums}]",
            "vmovups zmm27, [{second_sums} + 64]",
            "3:",
            "vmovdqu64 zmm30, [{inputs}]",
            "vpslld zmm29, zmm30, 16",
            "vpandd zmm30, zmm30, zmm31",
            "vmovaps [{spare}], zmm29",
            "vmovaps [{spare} + 64], zmm30",
            "vpxord zmm16, zmm16, zmm16",
            "vpxord zmm17, zmm17, zmm17",
            "vpxord zmm18, zmm18, zmm18",
            "vpxord zmm19, zmm19, zmm19",
            "vpxord zmm20, zmm20, zmm20",
            "vpxord zmm21, zmm21, zmm21",
            "vpxord zmm22, zmm22, zmm22",
            "vpxord zmm23, zmm23, zmm23",
            "xor {pair:e}, {pair:e}",
            "4:",
            "vmovdqa64 zmm0, [{weights}]",
            "vmovdqa64 zmm1, [{weights} + 64]",
            "vmovdqa64 zmm2, [{second}]",
            "vmovdqa64 zmm3, [{second} + 64]",
            "vbroadcastss zmm8, [{spare} + {pair}*4]",
            "vbroadcastss zmm9, [{spare} + {pair}*4 + 64]",
            "prefetcht0 [{ahead}]",
            "prefetcht0 [{ahead} + 64]",
            "prefetcht0 [{second_ahead}]",
            "prefetcht0 [{second_ahead} + 64]",
            "vpslld zmm4, zmm0, 16",
            "vpslld zmm5, zmm1, 16",
            "vpslld zmm6, zmm2, 16",
            "vpslld zmm7, zmm3, 16",
            "vpandd zmm0, zmm0, zmm31",
            "vpandd zmm1, zmm1, zmm31",
            "vpandd zmm2, zmm2, zmm31",
            "vpandd zmm3, zmm3, zmm31",
            "vfmadd231ps zmm16, zmm4, zmm8",
            "vfmadd231ps zmm17, zmm0, zmm9",
            "vfmadd231ps zmm18, zmm5, zmm8",
            "vfmadd231ps zmm19, zmm1, zmm9",
            "vfmadd231ps zmm20, zmm6, zmm8",
            "vfmadd231ps zmm21, zmm2, zmm9",
            "vfmadd231ps zmm22, zmm7, zmm8",
            "vfmadd231ps zmm23, zmm3, zmm9",
            "add {weights}, 128",
            "add {second}, 128",
            "add {ahead}, 128",
            "add {second_ahead}, 128",
            "inc {pair}",
            "cmp {pair}, {pairs}",
            "jb 4b",
            "vaddps zmm16, zmm16, zmm17",
            "vaddps zmm18, zmm18, zmm19",
            "vaddps zmm20, zmm20, zmm21",
            "vaddps zmm22, zmm22, zmm23",
            "vaddps zmm24, zmm24, zmm16",
            "vaddps zmm25, zmm25, zmm18",
            "vaddps zmm26, zmm26, zmm20",
            "vaddps zmm27, zmm27, zmm22",
            "add {inputs}, 1024",
            "dec {tiles}",
            "jnz 3b",
            "vmovups [{second_sums}], zmm26",
            "vmovups [{second_sums} + 64], zmm27",
            "vmovups [{sums}], zmm24",
            "vmovups [{sums} + 64], zmm25",
            "ldmxcsr [{spare} + 132]",
            fresh = in(reg) u32::from(job.fresh),
            spare = in(reg) &raw mut spare,
            sums = in(reg) job.sums[0],
            second_sums = in(reg) job.sums[1],
            inputs = inout(reg) job.inputs[0] => _,
            weights = inout(reg) job.weights[0] => _,
            second = inout(reg) job.weights[1] => _,
            ahead = inout(reg) job.prefetch[0] => _,
            second_ahead = inout(reg) job.prefetch[1] => _,
            tiles = inout(reg) job.tiles => _,
            pair = out(reg) _,
            pairs = in(reg) pairs,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
            out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm16") _, out("zmm17") _, out("zmm18") _,
            out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _, out("zmm24") _,
            out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm29") _, out("zmm30") _, out("zmm31") _,
            options(nostack),
        );
    }
}

/// Rows of one group by up to 16 ranks of A: `tiles` steps, every fourth one in the same of four accumulators.
pub(in crate::cpu) struct Shrink {
    /// The first row's line of the group's first tile.
    pub(in crate::cpu) inputs: *const u8,
    /// `[pairs][ranks][2]`, and bytes of a pair of inputs.
    pub(in crate::cpu) a: *const u8,
    pub(in crate::cpu) pair_bytes: usize,
    /// Steps of 16 pairs (fewer, where the shape says so).
    pub(in crate::cpu) tiles: usize,
    /// Four tiles of 1 KiB.
    pub(in crate::cpu) sums: *mut f32,
}

/// Fills the four tiles of sums: those that got no step with zeros.
///
/// # Safety
/// As for [`two_groups_fetching_2`].
pub(in crate::cpu) unsafe fn shrink(job: &Shrink) {
    // SAFETY: passed on. Prefetches may point anywhere.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "sub {tiles}, 4",
            "jl 4f",
            "3:",
            "tileloadd tmm4, [{inputs} + {line}*1]",
            "tileloadd tmm6, [{a} + {pair}*1]",
            lines!("{a} + {ahead}", 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15),
            "tdpbf16ps tmm0, tmm4, tmm6",
            "add {a}, {step}",
            "tileloadd tmm4, [{inputs} + {line}*1 + 1024]",
            "tileloadd tmm7, [{a} + {pair}*1]",
            lines!("{a} + {ahead}", 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15),
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {a}, {step}",
            "tileloadd tmm4, [{inputs} + {line}*1 + 2048]",
            "tileloadd tmm6, [{a} + {pair}*1]",
            lines!("{a} + {ahead}", 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15),
            "tdpbf16ps tmm2, tmm4, tmm6",
            "add {a}, {step}",
            "tileloadd tmm4, [{inputs} + {line}*1 + 3072]",
            "tileloadd tmm7, [{a} + {pair}*1]",
            lines!("{a} + {ahead}", 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15),
            "tdpbf16ps tmm3, tmm4, tmm7",
            "add {a}, {step}",
            "add {inputs}, 4096",
            "sub {tiles}, 4",
            "jge 3b",
            "4:",
            "add {tiles}, 4",
            "jz 5f",
            "tileloadd tmm4, [{inputs} + {line}*1]",
            "tileloadd tmm6, [{a} + {pair}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "add {a}, {step}",
            "dec {tiles}",
            "jz 5f",
            "tileloadd tmm4, [{inputs} + {line}*1 + 1024]",
            "tileloadd tmm6, [{a} + {pair}*1]",
            "tdpbf16ps tmm1, tmm4, tmm6",
            "add {a}, {step}",
            "dec {tiles}",
            "jz 5f",
            "tileloadd tmm4, [{inputs} + {line}*1 + 2048]",
            "tileloadd tmm6, [{a} + {pair}*1]",
            "tdpbf16ps tmm2, tmm4, tmm6",
            "5:",
            "tilestored [{sums} + {line}*1], tmm0",
            "tilestored [{sums} + {line}*1 + 1024], tmm1",
            "tilestored [{sums} + {line}*1 + 2048], tmm2",
            "tilestored [{sums} + {line}*1 + 3072], tmm3",
            inputs = inout(reg) job.inputs => _,
            a = inout(reg) job.a => _,
            pair = in(reg) job.pair_bytes,
            step = in(reg) TILE_PAIRS * job.pair_bytes,
            tiles = inout(reg) job.tiles.cast_signed() => _,
            sums = in(reg) job.sums,
            line = in(reg) TILE_LINE,
            ahead = const AHEAD,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// `sums += shrunk x B` for rows that follow each other, one or two panels of 16 outputs.
pub(in crate::cpu) struct Expand {
    /// The first row's pairs of ranks, and bytes from one row to the next.
    pub(in crate::cpu) shrunk: *const u8,
    pub(in crate::cpu) shrunk_stride: usize,
    /// `[pairs][16][2]` of each panel.
    pub(in crate::cpu) b: [*const u8; 2],
    /// Steps of 16 pairs (fewer, where the shape says so).
    pub(in crate::cpu) tiles: usize,
    /// The first row's sums; those of the second panel lie 16 values behind them.
    pub(in crate::cpu) sums: *mut f32,
    pub(in crate::cpu) stride: usize,
}

/// Two panels.
///
/// # Safety
/// As for [`two_groups_fetching_2`].
pub(in crate::cpu) unsafe fn expand_two(job: &Expand) {
    if job.tiles == 0 {
        return;
    }
    // SAFETY: passed on.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {stride}*1]",
            "tileloadd tmm1, [{sums} + {stride}*1 + 64]",
            "3:",
            "tileloadd tmm4, [{shrunk} + {shrunk_stride}*1]",
            "tileloadd tmm6, [{b} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{second} + {line}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {shrunk}, 64",
            "add {b}, 1024",
            "add {second}, 1024",
            "dec {tiles}",
            "jnz 3b",
            "tilestored [{sums} + {stride}*1], tmm0",
            "tilestored [{sums} + {stride}*1 + 64], tmm1",
            shrunk = inout(reg) job.shrunk => _,
            shrunk_stride = in(reg) job.shrunk_stride,
            b = inout(reg) job.b[0] => _,
            second = inout(reg) job.b[1] => _,
            tiles = inout(reg) job.tiles => _,
            sums = in(reg) job.sums,
            stride = in(reg) job.stride,
            line = in(reg) TILE_LINE,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// The first panel only.
///
/// # Safety
/// As for [`two_groups_fetching_2`].
pub(in crate::cpu) unsafe fn expand_one(job: &Expand) {
    if job.tiles == 0 {
        return;
    }
    // SAFETY: passed on.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {stride}*1]",
            "3:",
            "tileloadd tmm4, [{shrunk} + {shrunk_stride}*1]",
            "tileloadd tmm6, [{b} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "add {shrunk}, 64",
            "add {b}, 1024",
            "dec {tiles}",
            "jnz 3b",
            "tilestored [{sums} + {stride}*1], tmm0",
            shrunk = inout(reg) job.shrunk => _,
            shrunk_stride = in(reg) job.shrunk_stride,
            b = inout(reg) job.b[0] => _,
            tiles = inout(reg) job.tiles => _,
            sums = in(reg) job.sums,
            stride = in(reg) job.stride,
            line = in(reg) TILE_LINE,
            out("tmm0") _, out("tmm4") _, out("tmm6") _,
            options(nostack),
        );
    }
}

/// Scores of one or two groups of query vectors, each the sum of three, against two tiles of 16 positions.
pub(in crate::cpu) struct Scores {
    /// For each group `[step][3][16 vectors][16 pairs]`.
    pub(in crate::cpu) queries: [*const u8; 2],
    /// For each 16 positions `[step][16 pairs][16 positions][2]`.
    pub(in crate::cpu) keys: [*const u8; 2],
    /// Steps of 32 columns.
    pub(in crate::cpu) steps: usize,
    /// The first vector's scores of each group, those of the second tile behind those of the first; bytes between vectors.
    pub(in crate::cpu) results: [*mut f32; 2],
    pub(in crate::cpu) stride: usize,
    /// There are two groups.
    pub(in crate::cpu) both: bool,
}

/// # Safety
/// As for [`two_groups_fetching_2`].
pub(in crate::cpu) unsafe fn scores(job: &Scores) {
    if job.steps == 0 {
        return;
    }
    // SAFETY: passed on.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "3:",
            "tileloadd tmm6, [{keys} + {line}*1]",
            "tileloadd tmm7, [{next_keys} + {line}*1]",
            "tileloadd tmm4, [{queries} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm4, [{queries} + {line}*1 + 1024]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm4, [{queries} + {line}*1 + 2048]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "test {both:e}, {both:e}",
            "jz 2f",
            "tileloadd tmm5, [{second} + {line}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloadd tmm5, [{second} + {line}*1 + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloadd tmm5, [{second} + {line}*1 + 2048]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "2:",
            "add {queries}, 3072",
            "add {second}, 3072",
            "add {keys}, 1024",
            "add {next_keys}, 1024",
            "dec {steps}",
            "jnz 3b",
            "tilestored [{scores} + {stride}*1], tmm0",
            "tilestored [{scores} + {stride}*1 + 64], tmm1",
            "test {both:e}, {both:e}",
            "jz 2f",
            "tilestored [{second_scores} + {stride}*1], tmm2",
            "tilestored [{second_scores} + {stride}*1 + 64], tmm3",
            "2:",
            both = in(reg) u32::from(job.both),
            queries = inout(reg) job.queries[0] => _,
            second = inout(reg) job.queries[1] => _,
            keys = inout(reg) job.keys[0] => _,
            next_keys = inout(reg) job.keys[1] => _,
            steps = inout(reg) job.steps => _,
            scores = in(reg) job.results[0],
            second_scores = in(reg) job.results[1],
            stride = in(reg) job.stride,
            line = in(reg) TILE_LINE,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Outputs of a group of query vectors, 64 columns: `outputs += weights x V`, each weight the sum of three.
pub(in crate::cpu) struct Weighted {
    /// `[step][3][16 vectors][16 pairs of positions]`, from the first vector's line on.
    pub(in crate::cpu) weights: *const u8,
    /// `[4][16 pairs of positions][16 columns][2]`, and bytes from one step to the next.
    pub(in crate::cpu) values: *const u8,
    pub(in crate::cpu) values_step: usize,
    /// Steps of 32 positions.
    pub(in crate::cpu) steps: usize,
    /// The first vector's outputs, and bytes from one vector to the next.
    pub(in crate::cpu) outputs: *mut f32,
    pub(in crate::cpu) stride: usize,
}

/// # Safety
/// As for [`two_groups_fetching_2`].
pub(in crate::cpu) unsafe fn weighted(job: &Weighted) {
    if job.steps == 0 {
        return;
    }
    // SAFETY: passed on.
    unsafe {
        asm!(
            "tileloadd tmm0, [{outputs} + {stride}*1]",
            "tileloadd tmm1, [{outputs} + {stride}*1 + 64]",
            "tileloadd tmm2, [{outputs} + {stride}*1 + 128]",
            "tileloadd tmm3, [{outputs} + {stride}*1 + 192]",
            "3:",
            "tileloadd tmm6, [{values} + {line}*1]",
            "tileloadd tmm7, [{values} + {line}*1 + 1024]",
            "tileloadd tmm4, [{weights} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{weights} + {line}*1 + 1024]",
            "tdpbf16ps tmm0, tmm5, tmm6",
            "tdpbf16ps tmm1, tmm5, tmm7",
            "tileloadd tmm4, [{weights} + {line}*1 + 2048]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm6, [{values} + {line}*1 + 2048]",
            "tileloadd tmm7, [{values} + {line}*1 + 3072]",
            "tileloadd tmm4, [{weights} + {line}*1]",
            "tdpbf16ps tmm2, tmm4, tmm6",
            "tdpbf16ps tmm3, tmm4, tmm7",
            "tileloadd tmm5, [{weights} + {line}*1 + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloadd tmm4, [{weights} + {line}*1 + 2048]",
            "tdpbf16ps tmm2, tmm4, tmm6",
            "tdpbf16ps tmm3, tmm4, tmm7",
            "add {weights}, 3072",
            "add {values}, {values_step}",
            "dec {steps}",
            "jnz 3b",
            "tilestored [{outputs} + {stride}*1], tmm0",
            "tilestored [{outputs} + {stride}*1 + 64], tmm1",
            "tilestored [{outputs} + {stride}*1 + 128], tmm2",
            "tilestored [{outputs} + {stride}*1 + 192], tmm3",
            weights = inout(reg) job.weights => _,
            values = inout(reg) job.values => _,
            values_step = in(reg) job.values_step,
            steps = inout(reg) job.steps => _,
            outputs = in(reg) job.outputs,
            stride = in(reg) job.stride,
            line = in(reg) TILE_LINE,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Products in registers only, in four chains; returns the number of operations.
///
/// # Safety
/// The processor has AMX with BF16, and the system lets this process use it.
pub(in crate::cpu) unsafe fn tile_products(rounds: usize) -> u64 {
    // SAFETY: passed on.
    let mut registers = unsafe { Tiles::new() };
    registers.shape(TileShape { first: TILE_ROWS, second: TILE_ROWS, columns: TILE_COLUMNS, pairs: TILE_PAIRS });
    // SAFETY: registers only; there is one round at least.
    unsafe {
        asm!(
            "tilezero tmm4",
            "tilezero tmm5",
            "tilezero tmm6",
            "tilezero tmm7",
            "3:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {rounds}",
            "jnz 3b",
            rounds = inout(reg) rounds.max(1) => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
    (rounds.max(1) * 4 * TILE_ROWS * TILE_COLUMNS * TILE_PAIRS * 2 * 2) as u64
}
