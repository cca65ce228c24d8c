//! A whole adapter against a tiny base: refused, or applied completely, and the same by both ways of reading it.
//!
//! The input is `adapter_config.json`, a zero byte, the JSON header of the tensor file, a zero byte, and its data: the
//! fuzzer need not keep the header's length right.
#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use manylora_kernels::StorageType;
use manylora_model::ModelSpec;
use manylora_model::adapter::{AdapterPolicy, MemoryTensor, NoBaseTensors, PreparedAdapter};
use safetensors::SafeTensors;

static POLICY: LazyLock<AdapterPolicy> = LazyLock::new(|| {
    let spec = ModelSpec::parse(include_bytes!("../../tests/oracle/llama/base/config.json")).unwrap();
    AdapterPolicy { max_rank: 64, dtype: StorageType::F32, ..AdapterPolicy::new(spec, Arc::new(NoBaseTensors)) }
});

fuzz_target!(|input: &[u8]| {
    let mut parts = input.splitn(3, |&byte| byte == 0);
    let (Some(config), Some(header), Some(data)) = (parts.next(), parts.next(), parts.next()) else { return };
    let file = [&(header.len() as u64).to_le_bytes(), header, data].concat();
    let Ok(adapter) = PreparedAdapter::from_bytes("fuzz", config, &file, &POLICY) else { return };

    let tensors = SafeTensors::deserialize(&file).expect("an accepted file is one that safetensors reads");
    assert!(!adapter.sites.is_empty() && adapter.report.refused.is_empty());
    assert_eq!(adapter.report.matched.len() + adapter.report.ignored.len(), tensors.len());
    assert_eq!(adapter.report.matched.len(), 2 * adapter.sites.len());
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for (index, shape) in adapter.sites.iter().enumerate() {
        adapter.fill(index, &mut a, &mut b).unwrap();
        assert_eq!(a.len(), (shape.rank * shape.input) as usize);
        assert_eq!(b.len(), (shape.rank * shape.output) as usize);
        assert!(shape.scale.is_finite() && a.iter().chain(&b).all(|value| value.is_finite()));
    }
    let tensors = tensors
        .iter()
        .map(|(name, view)| {
            let (shape, dtype, bytes) = (view.shape().to_vec(), view.dtype(), view.data().to_vec());
            (name.to_owned(), MemoryTensor { shape, dtype, bytes })
        })
        .collect();
    let config = serde_json::from_slice(config).unwrap();
    let again = PreparedAdapter::from_tensors("fuzz", &config, &tensors, &POLICY).unwrap();
    assert_eq!(again.digest, adapter.digest);
});
