//! `quantization_config` of config.json: a setting that is accepted has a width and a group size that exist.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use manylora_model::checkpoint::int4::config::Quantization;

fuzz_target!(|text: &[u8]| {
    let Ok(value) = serde_json::from_slice(text) else { return };
    let Ok(quantization) = Quantization::parse(Path::new("config.json"), &value) else { return };
    assert!(matches!(quantization.bits, 4 | 8));
    assert_ne!(quantization.group_size, Some(0));
    assert!(quantization.scheme().ends_with("-bit"));
});
