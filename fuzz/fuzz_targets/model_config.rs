//! `config.json` and `generation_config.json`: a specification that is accepted can be computed with.
//!
//! The input is the one file, a zero byte, and the other.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use manylora_model::ModelSpec;
use manylora_model::checkpoint::GenerationDefaults;
use manylora_model::decoder::rope::frequencies;
use manylora_model::spec::config_object;

fuzz_target!(|input: &[u8]| {
    let mut parts = input.splitn(2, |&byte| byte == 0);
    let (config, generation) = (parts.next().unwrap_or_default(), parts.next().unwrap_or(b"{}"));
    let Ok(config) = config_object(Path::new("config.json"), config) else { return };
    if let Ok(defaults) = GenerationDefaults::parse(Path::new("generation_config.json"), generation, &config) {
        assert!(defaults.temperature.is_none_or(|value| value.is_finite() && value >= 0.0));
        assert!(defaults.top_p.is_none_or(|value| (0.0..=1.0).contains(&value)));
        assert!(defaults.repetition_penalty.is_none_or(|value| value.is_finite()));
    }
    let Ok(spec) = ModelSpec::from_config(Path::new("config.json"), &config) else { return };
    assert!(spec.head_dim % 2 == 0 && spec.heads % spec.kv_heads == 0);
    assert_eq!(spec.windows.len(), spec.layers);
    assert!(spec.parameters() > 0);
    let frequencies = frequencies(&spec.rope, spec.head_dim);
    assert_eq!(frequencies.len(), spec.head_dim / 2);
    assert!(frequencies.iter().all(|frequency| frequency.is_finite()));
    // What identifies a base is its specification as JSON.
    assert!(serde_json::to_vec(&spec).is_ok());
});
