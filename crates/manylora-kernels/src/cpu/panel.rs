//! One panel from rows that lie in memory as its format has their numbers: values are moved, never converted.

use super::level::SimdLevel;
use super::pack::{PanelFormat, f32_to_bf16};
use crate::backend::StorageType;

/// Rounds values to `dtype`, in memory's order of bytes. Written to become vector code.
#[inline]
pub(super) fn store_values(dtype: StorageType, out: &mut [u8], values: &[f32]) {
    match dtype {
        StorageType::F32 => {
            for (four, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *four = value.to_ne_bytes();
            }
        }
        StorageType::Bf16 => {
            for (two, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *two = f32_to_bf16(*value).to_ne_bytes();
            }
        }
        StorageType::F16 => unreachable!("refused where it is asked for"),
    }
}

/// Packs up to a panel's rows, row-major `[count, inputs]`, into `panel`, whose padding is left as it is (zero).
pub(super) fn pack_rows(level: SimdLevel, format: PanelFormat, rows: &[u8], inputs: usize, panel: &mut [u8]) {
    let row_bytes = inputs * format.dtype().bytes();
    let whole = rows.len() == format.width() * row_bytes;
    let packed = if whole { pack_whole(level, format, rows, inputs, panel) } else { 0 };
    if packed < inputs {
        match format {
            PanelFormat::F32 => pack_each::<4>(format, rows, inputs, packed, panel),
            PanelFormat::Bf16 | PanelFormat::Bf16Pairs => pack_each::<2>(format, rows, inputs, packed, panel),
        }
    }
}

/// Packs inputs from `packed` on, one by one, of numbers of `BYTES` bytes.
fn pack_each<const BYTES: usize>(format: PanelFormat, rows: &[u8], inputs: usize, packed: usize, panel: &mut [u8]) {
    // In blocks of inputs, so that the strided writes stay in the first-level cache.
    const BLOCK: usize = 64;
    for first in (packed..inputs).step_by(BLOCK) {
        let last = (first + BLOCK).min(inputs);
        for (output, row) in rows.chunks_exact(inputs * BYTES).enumerate() {
            for (input, value) in (first..last).zip(&row.as_chunks::<BYTES>().0[first..last]) {
                let offset = format.element_offset(output, input);
                panel[offset..offset + BYTES].copy_from_slice(value);
            }
        }
    }
}

/// Packs the first inputs of a panel whose rows are all there, as many as the level's instructions take, and returns how
/// many it packed.
#[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "the level's instructions are the processor's"))]
fn pack_whole(level: SimdLevel, format: PanelFormat, rows: &[u8], inputs: usize, panel: &mut [u8]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if level != SimdLevel::Portable && super::x86::has_avx2() {
        // SAFETY: the processor was asked for AVX2 on the line above.
        return unsafe {
            match format {
                PanelFormat::Bf16 => super::x86::avx2_panel::interleave_bf16(rows, inputs, panel),
                PanelFormat::F32 => super::x86::avx2_words::transpose::<16>(rows, 4 * inputs, panel),
                PanelFormat::Bf16Pairs => 2 * super::x86::avx2_words::transpose::<32>(rows, 2 * inputs, panel),
            }
        };
    }
    let _ = (level, format, rows, inputs, panel);
    0
}
