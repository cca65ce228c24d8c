//! Adapters from candle tensors: what a Rust service that trains or merges with candle-core hands over without a file.

use std::collections::BTreeMap;

use candle_core::{DType, Result as CandleResult, Tensor, WithDType};
use safetensors::Dtype;

use super::prepared::MemoryTensor;
use crate::error::ModelError;

/// Copies the tensors of a map out of candle, whatever their strides and device; the keys are those of
/// `adapter_model.safetensors`.
///
/// # Errors
/// A tensor that is neither float32, float16 nor bfloat16, or that its device did not give back.
pub fn candle_tensors<'a>(
    tensors: impl IntoIterator<Item = (&'a String, &'a Tensor)>,
) -> Result<BTreeMap<String, MemoryTensor>, ModelError> {
    tensors.into_iter().map(|(key, tensor)| Ok((key.clone(), memory_tensor(key, tensor)?))).collect()
}

fn memory_tensor(key: &str, tensor: &Tensor) -> Result<MemoryTensor, ModelError> {
    let unsupported = |message: String| ModelError::Unsupported { message };
    let copied = match tensor.dtype() {
        DType::F32 => copy(tensor, f32::to_le_bytes).map(|bytes| (Dtype::F32, bytes)),
        DType::F16 => copy(tensor, half::f16::to_le_bytes).map(|bytes| (Dtype::F16, bytes)),
        DType::BF16 => copy(tensor, half::bf16::to_le_bytes).map(|bytes| (Dtype::BF16, bytes)),
        other => {
            let kind = other.as_str();
            return Err(unsupported(format!("tensor `{key}` is {kind}: convert it to f32, f16 or bf16")));
        }
    };
    let (dtype, bytes) = copied.map_err(|error| unsupported(format!("tensor `{key}` cannot be copied: {error}")))?;
    Ok(MemoryTensor { shape: tensor.dims().to_vec(), dtype, bytes })
}

/// The elements in row-major order.
fn copy<T: WithDType, const N: usize>(tensor: &Tensor, to_le_bytes: fn(T) -> [u8; N]) -> CandleResult<Vec<u8>> {
    Ok(tensor.flatten_all()?.to_vec1::<T>()?.into_iter().flat_map(to_le_bytes).collect())
}
