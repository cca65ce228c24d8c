//! How matrices lie in memory: panels of outputs, each panel's inputs one after the other.
//!
//! One layout serves one row and five hundred: a kernel walks a panel from its first input to its last and keeps one
//! accumulator per (row, output). Matrices are packed once, straight from their source, a panel at a time.
//!
//! | format | layout | read by |
//! |---|---|---|
//! | [`PanelFormat::F32`] | `[N/16][K][16]` f32 | every level |
//! | [`PanelFormat::Bf16`] | `[N/16][K][8][2]`: outputs `j` and `j + 8` share a word, low half first | portable, AVX2 |
//! | [`PanelFormat::Bf16Pairs`] | `[N/32][K/2][32][2]`: inputs `2k` and `2k + 1` share a word | AVX-512 BF16 |

use std::sync::Mutex;

use super::level::SimdLevel;
use super::memory::AlignedVec;
use super::pool::Pool;
use crate::backend::{RowSource, StorageType};
use crate::error::KernelError;

/// Layout of a packed matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PanelFormat {
    /// Panels of 16 outputs, f32.
    F32,
    /// Panels of 16 outputs, bf16: one 32-byte load is all outputs of one input, eight in low halves, eight in high
    /// ones.
    Bf16,
    /// Panels of 32 outputs, bf16, two inputs side by side, as `vdpbf16ps` wants them. An odd last input is paired with
    /// 0.
    Bf16Pairs,
}

impl PanelFormat {
    /// The format in which `level` wants base weights of `dtype`.
    pub const fn of_weight(level: SimdLevel, dtype: StorageType) -> Self {
        match (dtype, level) {
            (StorageType::F32, _) => Self::F32,
            // F16 is never packed; its bytes can be asked for.
            (StorageType::Bf16 | StorageType::F16, SimdLevel::Avx512Bf16) => Self::Bf16Pairs,
            (StorageType::Bf16 | StorageType::F16, _) => Self::Bf16,
        }
    }

    /// The format of an adapter's B: its input is the f32 result of the shrink, so pairs of bf16 are out of the
    /// question.
    pub const fn of_adapter(dtype: StorageType) -> Self {
        match dtype {
            StorageType::F32 => Self::F32,
            StorageType::Bf16 | StorageType::F16 => Self::Bf16,
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

    /// Byte offset of an element within its panel, and whether it is stored in two bytes or four.
    const fn element_offset(self, output: usize, input: usize) -> usize {
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
    /// Packs `source` on all threads of `pool`, a panel at a time: each thread holds one panel's rows as f32, no more.
    pub(super) fn pack(
        pool: &Pool,
        format: PanelFormat,
        what: &str,
        source: &dyn RowSource,
    ) -> Result<Self, KernelError> {
        let (outputs, inputs) = (source.rows(), source.columns());
        let bytes = outputs
            .div_ceil(format.width())
            .checked_mul(format.panel_bytes(inputs))
            .ok_or_else(|| KernelError::OutOfMemory { what: what.to_owned(), bytes: usize::MAX })?;
        let mut weight = Self { outputs, inputs, format, data: AlignedVec::zeroed(what, bytes)? };
        if bytes == 0 {
            return Ok(weight);
        }
        let panel_bytes = format.panel_bytes(inputs);
        // Short regions, so that another engine on the same pool gets its turn while this one loads.
        for group in weight.data.chunks_mut(panel_bytes * pool.threads() * PANELS_PER_REGION).enumerate() {
            let (region, panels) = group;
            let first = region * pool.threads() * PANELS_PER_REGION;
            let shares: Vec<Mutex<(usize, &mut [u8])>> = panels
                .chunks_mut(panel_bytes * PANELS_PER_REGION)
                .enumerate()
                .map(|(share, panels)| Mutex::new((first + share * PANELS_PER_REGION, panels)))
                .collect();
            let failure = Mutex::new(None);
            pool.run(&|part, parts| {
                for share in shares.iter().skip(part).step_by(parts) {
                    let mut share = share.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    let first = share.0;
                    if let Err(error) = pack_panels(format, source, first, &mut *share.1) {
                        *failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error);
                    }
                }
            });
            if let Some(error) = failure.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
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

const PANELS_PER_REGION: usize = 16;

fn pack_panels(
    format: PanelFormat,
    source: &dyn RowSource,
    first: usize,
    panels: &mut [u8],
) -> Result<(), KernelError> {
    let (outputs, inputs) = (source.rows(), source.columns());
    let mut values = vec![0.0f32; format.width() * inputs];
    for (index, panel) in panels.chunks_exact_mut(format.panel_bytes(inputs)).enumerate() {
        let row = (first + index) * format.width();
        let count = format.width().min(outputs - row);
        source.read(row, &mut values[..count * inputs])?;
        pack_panel(format, &values[..count * inputs], inputs, panel);
    }
    Ok(())
}

/// Packs up to one panel's rows (row-major `[count, inputs]`) into `panel`, whose padding is left as it is (zero).
fn pack_panel(format: PanelFormat, values: &[f32], inputs: usize, panel: &mut [u8]) {
    // In blocks of inputs, so that the strided writes stay in the first-level cache.
    const BLOCK: usize = 64;
    for first in (0..inputs).step_by(BLOCK) {
        let last = (first + BLOCK).min(inputs);
        for (output, row) in values.chunks_exact(inputs).enumerate() {
            for (input, value) in row[first..last].iter().enumerate() {
                let offset = format.element_offset(output, first + input);
                if matches!(format, PanelFormat::F32) {
                    panel[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
                } else {
                    panel[offset..offset + 2].copy_from_slice(&f32_to_bf16(*value).to_ne_bytes());
                }
            }
        }
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
    use crate::backend::RowSource;
    use crate::cpu::pool::{Pool, PoolOptions};
    use crate::error::KernelError;

    struct Numbers {
        rows: usize,
        columns: usize,
        fail_at: Option<usize>,
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
        for format in [PanelFormat::F32, PanelFormat::Bf16, PanelFormat::Bf16Pairs] {
            for (rows, columns) in [(1, 1), (12, 36), (33, 7), (600, 65), (1100, 3)] {
                let source = Numbers { rows, columns, fail_at: None };
                let weight = PackedWeight::pack(&pool, format, "w", &source).unwrap();
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
                    assert_eq!(got, wanted, "{format:?} {rows}x{columns} row {row}");
                }
            }
        }
    }

    #[test]
    fn a_failing_source_fails_the_pack() {
        let pool = Pool::new(PoolOptions { threads: Some(2), ..PoolOptions::default() }).unwrap();
        let source = Numbers { rows: 600, columns: 8, fail_at: Some(517) };
        let error = PackedWeight::pack(&pool, PanelFormat::Bf16, "w", &source).unwrap_err();
        assert_eq!(error.to_string(), "bad row");
    }
}
