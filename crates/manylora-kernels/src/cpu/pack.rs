//! How matrices lie in memory: panels of outputs, each panel's inputs one after the other.
//!
//! One layout serves one row and five hundred: a kernel walks a panel from its first input to its last and keeps one
//! accumulator per (row, output). Matrices are packed once, straight from their source, a panel at a time.
//!
//! | format | layout | read by |
//! |---|---|---|
//! | [`PanelFormat::F32`] | `[N/16][K][16]` f32 | every level |
//! | [`PanelFormat::Bf16`] | `[N/16][K][8][2]`: outputs `j` and `j + 8` share a word, low half first | portable, AVX2 |
//! | [`PanelFormat::Bf16Pairs`] | `[N/32][K/2][32][2]`: inputs `2k` and `2k + 1` share a word | AVX-512 BF16, AMX |

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::level::SimdLevel;
use super::memory::AlignedVec;
use super::panel::{pack_rows, store_values};
use super::pool::Pool;
use super::weight_memory::WeightMemory;
use crate::backend::{RowSource, StorageType, StoredRows};
use crate::error::KernelError;

/// Layout of a packed matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PanelFormat {
    /// Panels of 16 outputs, f32.
    F32,
    /// Panels of 16 outputs, bf16: one 32-byte load is all outputs of one input, eight in low halves, eight in high
    /// ones.
    Bf16,
    /// Panels of 32 outputs, bf16, two inputs side by side, as `vdpbf16ps` and `tdpbf16ps` want them. An odd last input is paired with
    /// 0.
    Bf16Pairs,
}

impl PanelFormat {
    /// The format in which `level` wants base weights of `dtype`.
    pub const fn of_weight(level: SimdLevel, dtype: StorageType) -> Self {
        match (dtype, level) {
            (StorageType::F32, _) => Self::F32,
            // F16 is never packed; its bytes can be asked for.
            (StorageType::Bf16 | StorageType::F16, SimdLevel::Avx512Bf16 | SimdLevel::Amx) => Self::Bf16Pairs,
            (StorageType::Bf16 | StorageType::F16, _) => Self::Bf16,
        }
    }

    /// The format of an adapter's B where its input is the f32 result of the shrink, so that pairs of bf16 are out of the
    /// question: everywhere but in `tiles`.
    pub const fn of_adapter(dtype: StorageType) -> Self {
        match dtype {
            StorageType::F32 => Self::F32,
            StorageType::Bf16 | StorageType::F16 => Self::Bf16,
        }
    }

    /// Type of its numbers.
    pub(super) const fn dtype(self) -> StorageType {
        match self {
            Self::F32 => StorageType::F32,
            Self::Bf16 | Self::Bf16Pairs => StorageType::Bf16,
        }
    }

    /// Outputs of one panel.
    pub const fn width(self) -> usize {
        match self {
            Self::F32 | Self::Bf16 => 16,
            Self::Bf16Pairs => 32,
        }
    }

    /// Inputs that one step of a kernel consumes.
    pub const fn inputs_per_step(self) -> usize {
        match self {
            Self::F32 | Self::Bf16 => 1,
            Self::Bf16Pairs => 2,
        }
    }

    /// Bytes that one step of a kernel reads.
    pub const fn step_bytes(self) -> usize {
        match self {
            Self::F32 => 64,
            Self::Bf16 => 32,
            Self::Bf16Pairs => 128,
        }
    }

    /// Bytes of one panel of `inputs` inputs.
    pub const fn panel_bytes(self, inputs: usize) -> usize {
        inputs.div_ceil(self.inputs_per_step()) * self.step_bytes()
    }

    /// Bytes of a matrix `[outputs, inputs]`, padding included.
    pub const fn bytes(self, outputs: usize, inputs: usize) -> usize {
        outputs.div_ceil(self.width()) * self.panel_bytes(inputs)
    }

    /// Byte offset of an element within its panel.
    pub(super) const fn element_offset(self, output: usize, input: usize) -> usize {
        match self {
            Self::F32 => input * 64 + output * 4,
            Self::Bf16 => input * 32 + (output % 8) * 4 + (output / 8) * 2,
            Self::Bf16Pairs => (input / 2) * 128 + output * 4 + (input % 2) * 2,
        }
    }
}

/// Bytes of a base weight `[outputs, inputs]` packed for `level`, padding included.
pub const fn packed_weight_bytes(level: SimdLevel, dtype: StorageType, outputs: usize, inputs: usize) -> usize {
    PanelFormat::of_weight(level, dtype).bytes(outputs, inputs)
}

/// A packed matrix `[outputs, inputs]`.
#[derive(Debug)]
pub struct PackedWeight {
    outputs: usize,
    inputs: usize,
    format: PanelFormat,
    data: AlignedVec<u8>,
}

impl PackedWeight {
    /// Packs `source` on all threads of `pool`, a batch of panels at a time: each thread holds one batch's rows, no more,
    /// and what it has read is in its cache until it is packed.
    pub(super) fn pack(
        pool: &Pool,
        memory: &WeightMemory,
        level: SimdLevel,
        format: PanelFormat,
        what: &str,
        source: &dyn RowSource,
    ) -> Result<Self, KernelError> {
        let (outputs, inputs) = (source.rows(), source.columns());
        let bytes = outputs
            .div_ceil(format.width())
            .checked_mul(format.panel_bytes(inputs))
            .ok_or_else(|| KernelError::OutOfMemory { what: what.to_owned(), bytes: usize::MAX })?;
        let mut weight = Self { outputs, inputs, format, data: memory.zeroed(what, bytes)? };
        if bytes == 0 {
            return Ok(weight);
        }
        let (panel_bytes, panels, threads) = (format.panel_bytes(inputs), weight.panels(), pool.threads());
        let batch = (BATCH_BYTES / panel_bytes).clamp(1, panels.div_ceil(threads));
        let region = threads * (REGION_BYTES / (batch * panel_bytes)).max(1) * batch;
        let packing = Packing { level, format, source, stored: source.stored(format.dtype()) };
        let scratch: Vec<Mutex<Scratch>> = (0..threads).map(|_| Mutex::default()).collect();
        // Short regions, so that another engine on the same pool gets its turn while this one loads.
        for (index, panels) in weight.data.chunks_mut(region * panel_bytes).enumerate() {
            let batches: Vec<Mutex<(usize, &mut [u8])>> = panels
                .chunks_mut(batch * panel_bytes)
                .enumerate()
                .map(|(at, panels)| Mutex::new((index * region + at * batch, panels)))
                .collect();
            let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
            pool.run(&|part, _| {
                let mut scratch = locked(&scratch[part]);
                while let Some(batch) = batches.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (first, panels) = &mut *locked(batch);
                    if let Err(error) = packing.pack(*first, panels, &mut scratch) {
                        *locked(&failure) = Some(error);
                        return;
                    }
                }
            });
            if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
                return Err(error);
            }
        }
        Ok(weight)
    }

    /// Rows of the matrix.
    pub const fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns of the matrix.
    pub const fn inputs(&self) -> usize {
        self.inputs
    }

    /// How it is packed.
    pub const fn format(&self) -> PanelFormat {
        self.format
    }

    /// Bytes it takes, padding included.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Number of panels.
    pub(super) const fn panels(&self) -> usize {
        self.outputs.div_ceil(self.format.width())
    }

    /// The packed bytes.
    pub(super) fn data(&self) -> &[u8] {
        &self.data
    }

    /// Row `row` as f32: what an embedding gathers. `out` has `inputs` elements.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.outputs && out.len() == self.inputs, "row `{row}` of a matrix of {} rows", self.outputs);
        let (panel, lane) = (row / self.format.width(), row % self.format.width());
        let panel_bytes = self.format.panel_bytes(self.inputs);
        let panel = &self.data[panel * panel_bytes..][..panel_bytes];
        match self.format {
            PanelFormat::F32 => {
                for (value, step) in out.iter_mut().zip(panel.chunks_exact(64)) {
                    let bytes = &step[lane * 4..lane * 4 + 4];
                    *value = f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
            }
            PanelFormat::Bf16 => {
                let offset = PanelFormat::Bf16.element_offset(lane, 0);
                for (value, step) in out.iter_mut().zip(panel.chunks_exact(32)) {
                    *value = bf16_to_f32(u16::from_ne_bytes([step[offset], step[offset + 1]]));
                }
            }
            PanelFormat::Bf16Pairs => {
                for (pair, step) in out.chunks_mut(2).zip(panel.chunks_exact(128)) {
                    for (half, value) in pair.iter_mut().enumerate() {
                        let offset = lane * 4 + half * 2;
                        *value = bf16_to_f32(u16::from_ne_bytes([step[offset], step[offset + 1]]));
                    }
                }
            }
        }
    }
}

/// Bytes that a thread reads at a time, unless one panel has more: less than a second-level cache holds.
const BATCH_BYTES: usize = 256 << 10;
/// Bytes that each thread packs in a region: one or two milliseconds.
const REGION_BYTES: usize = 4 << 20;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a thread packs from.
#[derive(Default)]
struct Scratch {
    /// Rows as the format has their numbers.
    rows: Vec<u8>,
    /// Rows that have yet to be rounded.
    values: Vec<f32>,
}

/// How a matrix is packed.
struct Packing<'a> {
    level: SimdLevel,
    format: PanelFormat,
    source: &'a dyn RowSource,
    /// Its rows, where they need not be converted.
    stored: Option<&'a dyn StoredRows>,
}

impl Packing<'_> {
    /// Packs the panels from `first` on.
    fn pack(&self, first: usize, panels: &mut [u8], scratch: &mut Scratch) -> Result<(), KernelError> {
        let Self { level, format, source, stored } = *self;
        let (outputs, inputs, width, dtype) = (source.rows(), source.columns(), format.width(), format.dtype());
        let panel_bytes = format.panel_bytes(inputs);
        let (first, last) = (first * width, ((first + panels.len() / panel_bytes) * width).min(outputs));
        let panel_rows = width * inputs * dtype.bytes();
        if let Some(stored) = stored {
            scratch.rows.resize((last - first) * inputs * dtype.bytes(), 0);
            stored.read_stored(first, &mut scratch.rows)?;
            for (rows, panel) in scratch.rows.chunks(panel_rows).zip(panels.chunks_exact_mut(panel_bytes)) {
                pack_rows(level, format, rows, inputs, panel);
            }
            return Ok(());
        }
        for (row, panel) in (first..last).step_by(width).zip(panels.chunks_exact_mut(panel_bytes)) {
            let values = (last - row).min(width) * inputs;
            scratch.values.resize(values, 0.0);
            source.read(row, &mut scratch.values)?;
            scratch.rows.resize(values * dtype.bytes(), 0);
            store_values(dtype, &mut scratch.rows, &scratch.values);
            pack_rows(level, format, &scratch.rows, inputs, panel);
        }
        Ok(())
    }
}

/// Rounds to bf16: to nearest, ties to even; NaN stays NaN.
#[inline]
pub(super) const fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // Quiet, and never rounded into an infinity.
        return ((bits >> 16) | 0x40) as u16;
    }
    // Cannot wrap: the largest pattern that is no NaN is 0xFF80_0000.
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// The f32 of the same value.
#[inline]
pub(super) const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::{PackedWeight, PanelFormat, bf16_to_f32, f32_to_bf16};
    use crate::backend::{RowSource, StorageType, StoredRows};
    use crate::cpu::level::SimdLevel;
    use crate::cpu::panel::store_values;
    use crate::cpu::pool::{Pool, PoolOptions};
    use crate::cpu::weight_memory::WeightMemory;
    use crate::error::KernelError;

    struct Numbers {
        rows: usize,
        columns: usize,
        fail_at: Option<usize>,
        /// What its rows are stored as.
        stored: Option<StorageType>,
    }

    impl StoredRows for Numbers {
        fn read_stored(&self, first: usize, out: &mut [u8]) -> Result<(), KernelError> {
            let dtype = self.stored.unwrap();
            let mut values = vec![0.0; out.len() / dtype.bytes()];
            assert!(values.len().is_multiple_of(self.columns));
            self.read(first, &mut values)?;
            store_values(dtype, out, &values);
            Ok(())
        }
    }

    impl RowSource for Numbers {
        fn rows(&self) -> usize {
            self.rows
        }
        fn columns(&self) -> usize {
            self.columns
        }
        fn read(&self, first: usize, out: &mut [f32]) -> Result<(), KernelError> {
            if self.fail_at.is_some_and(|row| row >= first && row < first + out.len() / self.columns) {
                return Err(KernelError::Source("bad row".into()));
            }
            for (index, value) in out.iter_mut().enumerate() {
                *value = (first * self.columns + index) as f32 * 0.37 - 11.0;
            }
            Ok(())
        }
        fn stored(&self, dtype: StorageType) -> Option<&dyn StoredRows> {
            (self.stored == Some(dtype)).then_some(self)
        }
    }

    #[test]
    fn bf16_rounding_is_that_of_half() {
        for step in 0..1_000_003u32 {
            let value = f32::from_bits(step.wrapping_mul(4_294_927));
            assert_eq!(f32_to_bf16(value), bf16::from_f32(value).to_bits(), "{value}");
        }
        for special in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE / 8.0] {
            assert_eq!(f32_to_bf16(special), bf16::from_f32(special).to_bits());
        }
        assert!(bf16_to_f32(f32_to_bf16(f32::NAN)).is_nan());
    }

    #[test]
    fn rows_read_back_as_packed() {
        let pool = Pool::new(PoolOptions { threads: Some(2), ..PoolOptions::default() }).unwrap();
        let levels = SimdLevel::available();
        let formats = [PanelFormat::F32, PanelFormat::Bf16, PanelFormat::Bf16Pairs];
        let stored = [None, Some(StorageType::Bf16), Some(StorageType::F32)];
        for (level, format, stored) in levels
            .iter()
            .flat_map(|level| formats.iter().flat_map(move |format| stored.map(|stored| (*level, *format, stored))))
        {
            for (rows, columns) in [(1, 1), (12, 36), (33, 7), (600, 65), (1100, 3), (64, 9000)] {
                let source = Numbers { rows, columns, fail_at: None, stored };
                let weight = PackedWeight::pack(&pool, &WeightMemory::new(), level, format, "w", &source).unwrap();
                assert_eq!(weight.bytes(), format.bytes(rows, columns));
                let (mut got, mut wanted) = (vec![0.0; columns], vec![0.0; columns]);
                for row in 0..rows {
                    weight.read_row(row, &mut got);
                    source.read(row, &mut wanted).unwrap();
                    if format != PanelFormat::F32 {
                        for value in &mut wanted {
                            *value = bf16_to_f32(f32_to_bf16(*value));
                        }
                    }
                    assert_eq!(got, wanted, "{level} {format:?} {stored:?} {rows}x{columns} row {row}");
                }
            }
        }
    }

    #[test]
    fn a_failing_source_fails_the_pack() {
        let pool = Pool::new(PoolOptions { threads: Some(2), ..PoolOptions::default() }).unwrap();
        for stored in [None, Some(StorageType::Bf16)] {
            let source = Numbers { rows: 600, columns: 8, fail_at: Some(517), stored };
            let level = SimdLevel::Portable;
            let error =
                PackedWeight::pack(&pool, &WeightMemory::new(), level, PanelFormat::Bf16, "w", &source).unwrap_err();
            assert_eq!(error.to_string(), "bad row");
        }
    }
}
