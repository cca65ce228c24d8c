//! The same adapter from a folder and from candle tensors is the same version.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use manylora_model::adapter::{MemoryTensor, PreparedAdapter, candle_tensors};
use safetensors::Dtype;

use crate::fixtures::{HandMade, load_path, policy};

fn floats(tensor: &MemoryTensor) -> impl Iterator<Item = f32> {
    tensor.bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()))
}

/// The tensors of an adapter in candle's hands; with `strided` as transposes of contiguous tensors.
fn to_candle(adapter: &HandMade, dtype: DType, strided: bool) -> HashMap<String, Tensor> {
    let convert = |tensor: &MemoryTensor| {
        let made = Tensor::from_vec(floats(tensor).collect(), tensor.shape.clone(), &Device::Cpu)
            .unwrap()
            .to_dtype(dtype)
            .unwrap();
        if strided { made.t().unwrap().contiguous().unwrap().t().unwrap() } else { made }
    };
    adapter.tensors.iter().map(|(key, tensor)| (key.clone(), convert(tensor))).collect()
}

/// The same values as a file of `dtype` holds them.
fn rounded(adapter: &HandMade, dtype: Dtype) -> HandMade {
    let mut adapter = adapter.clone();
    for tensor in adapter.tensors.values_mut() {
        let values = floats(tensor);
        tensor.bytes = match dtype {
            Dtype::BF16 => values.flat_map(|value| half::bf16::from_f32(value).to_le_bytes()).collect(),
            Dtype::F16 => values.flat_map(|value| half::f16::from_f32(value).to_le_bytes()).collect(),
            _ => values.flat_map(f32::to_le_bytes).collect(),
        };
        tensor.dtype = dtype;
    }
    adapter
}

#[test]
fn candle_tensors_are_the_adapter_that_a_folder_holds() {
    let policy = policy("llama");
    let mut adapter = HandMade::on_llama(5);
    for tensor in adapter.tensors.values_mut() {
        // Thirds, which no binary format holds.
        tensor.bytes = floats(tensor).flat_map(|value| (value / 3.0).to_le_bytes()).collect();
    }
    let mut digests = Vec::new();
    for (dtype, stored) in [(DType::F32, Dtype::F32), (DType::F16, Dtype::F16), (DType::BF16, Dtype::BF16)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("saved");
        rounded(&adapter, stored).write(&path);
        let saved = load_path(&path, &policy).unwrap();
        for strided in [false, true] {
            let given = to_candle(&adapter, dtype, strided);
            assert!(!strided || given.values().any(|tensor| !tensor.is_contiguous()));
            let tensors = candle_tensors(&given).unwrap();
            assert!(tensors.values().all(|tensor| tensor.dtype == stored));
            let loaded = PreparedAdapter::from_tensors("given", &adapter.config, &tensors, &policy).unwrap();
            assert_eq!(loaded.digest, saved.digest, "{dtype:?}, strided: {strided}");
            assert_eq!(loaded.sites, saved.sites);
        }
        digests.push(saved.digest);
    }
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 3, "rounding to another format is other content");
}

#[test]
fn candle_tensors_of_other_types_are_refused_by_key() {
    let wide = Tensor::zeros((2, 2), DType::F64, &Device::Cpu).unwrap();
    let error = candle_tensors(&HashMap::from([("some.key".to_owned(), wide)])).unwrap_err();
    assert!(error.to_string().contains("`some.key` is f64"), "{error}");
}
