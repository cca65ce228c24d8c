//! Blocks of GGUF elements to f32, bit for bit as ggml's own reader gives them: quantized ones through candle-core.

use std::borrow::Cow;

use candle_core::CpuStorage;
use candle_core::quantized::GgmlDType;
use half::{bf16, f16};

use super::header::GgmlType;

/// Elements that are converted at a time: candle returns an own vector, which stays small this way.
const CHUNK_ELEMENTS: usize = 1 << 14;

/// Dequantizes whole blocks. `bytes` holds exactly `out.len()` elements, which are whole blocks, at an even address
/// (candle reads blocks in place, and insists); else an error says so.
pub(super) fn dequantize(kind: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<(), String> {
    let blocks = out.len() / kind.block_elements();
    if blocks * kind.block_elements() != out.len() || blocks.checked_mul(kind.block_bytes()) != Some(bytes.len()) {
        return Err(format!("{} bytes of {} do not hold {} elements", bytes.len(), kind.name(), out.len()));
    }
    let candle_type = match kind {
        GgmlType::F32 => {
            convert(bytes, out, f32::from_le_bytes);
            return Ok(());
        }
        GgmlType::F16 => {
            convert(bytes, out, |element| f16::from_le_bytes(element).to_f32());
            return Ok(());
        }
        GgmlType::Bf16 => {
            convert(bytes, out, |element| bf16::from_le_bytes(element).to_f32());
            return Ok(());
        }
        GgmlType::Q4_0 => GgmlDType::Q4_0,
        GgmlType::Q4_1 => GgmlDType::Q4_1,
        GgmlType::Q5_0 => GgmlDType::Q5_0,
        GgmlType::Q5_1 => GgmlDType::Q5_1,
        GgmlType::Q8_0 => GgmlDType::Q8_0,
        GgmlType::Q2K => GgmlDType::Q2K,
        GgmlType::Q3K => GgmlDType::Q3K,
        GgmlType::Q4K => GgmlDType::Q4K,
        GgmlType::Q5K => GgmlDType::Q5K,
        GgmlType::Q6K => GgmlDType::Q6K,
    };
    if bytes.as_ptr().align_offset(2) != 0 {
        return Err(format!("{} data is not at an even address", kind.name()));
    }
    let elements = CHUNK_ELEMENTS / kind.block_elements() * kind.block_elements();
    let chunk_bytes = elements / kind.block_elements() * kind.block_bytes();
    for (source, target) in bytes.chunks(chunk_bytes).zip(out.chunks_mut(elements)) {
        let stored = candle_type.from_data(Cow::Borrowed(source));
        match stored.dequantize(target.len()).map_err(|error| error.to_string())? {
            CpuStorage::F32(values) if values.len() == target.len() => target.copy_from_slice(&values),
            _ => return Err(format!("{} did not dequantize to 32-bit floats", kind.name())),
        }
    }
    Ok(())
}

fn convert<const N: usize>(bytes: &[u8], out: &mut [f32], element: fn([u8; N]) -> f32) {
    for (target, &source) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *target = element(source);
    }
}
