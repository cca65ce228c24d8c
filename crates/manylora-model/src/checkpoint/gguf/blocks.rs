//! Blocks of GGUF elements to f32, bit for bit as ggml's own reader gives them: quantized ones through candle-core.

use half::{bf16, f16};

use super::header::GgmlType;
#[cfg(feature = "dequantize")]
use super::quantized;

/// Whether this build can dequantize a type: without the feature `dequantize` only floats are read.
pub(super) fn readable(kind: GgmlType) -> bool {
    cfg!(feature = "dequantize") || kind.block_elements() == 1
}

/// Dequantizes whole blocks. `bytes` holds exactly `out.len()` elements, which are whole blocks, at an even address
/// (candle reads blocks in place, and insists); else an error says so.
pub(super) fn dequantize(kind: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<(), String> {
    let blocks = out.len() / kind.block_elements();
    if blocks * kind.block_elements() != out.len() || blocks.checked_mul(kind.block_bytes()) != Some(bytes.len()) {
        return Err(format!("{} bytes of {} do not hold {} elements", bytes.len(), kind.name(), out.len()));
    }
    match kind {
        GgmlType::F32 => convert(bytes, out, f32::from_le_bytes),
        GgmlType::F16 => convert(bytes, out, |element| f16::from_le_bytes(element).to_f32()),
        GgmlType::Bf16 => convert(bytes, out, |element| bf16::from_le_bytes(element).to_f32()),
        #[cfg(feature = "dequantize")]
        _ => return quantized::dequantize(kind, bytes, out),
        #[cfg(not(feature = "dequantize"))]
        _ => return Err(format!("{} needs the feature `dequantize` of manylora-model", kind.name())),
    }
    Ok(())
}

fn convert<const N: usize>(bytes: &[u8], out: &mut [f32], element: fn([u8; N]) -> f32) {
    for (target, &source) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *target = element(source);
    }
}
