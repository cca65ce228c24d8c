//! Quantized blocks through candle-core: the one module that needs it.

use std::borrow::Cow;

use candle_core::CpuStorage;
use candle_core::quantized::GgmlDType;

use super::header::GgmlType;

/// Elements that are converted at a time: candle returns an own vector, which stays small this way.
const CHUNK_ELEMENTS: usize = 1 << 14;

/// Dequantizes `bytes`, which hold exactly `out.len()` elements.
pub(super) fn dequantize(kind: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<(), String> {
    let candle_type = match kind {
        GgmlType::F32 => GgmlDType::F32,
        GgmlType::F16 => GgmlDType::F16,
        GgmlType::Bf16 => GgmlDType::BF16,
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
