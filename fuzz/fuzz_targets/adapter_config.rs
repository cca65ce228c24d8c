//! `adapter_config.json`: whatever it says, a configuration that is accepted gives every module a usable rank and scale.
#![no_main]

use libfuzzer_sys::fuzz_target;
use manylora_model::adapter::config::AdapterConfig;

const MODULES: [&str; 5] = [
    "lm_head",
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.down_proj",
    "model.layers.11.self_attn.v_proj",
];

fuzz_target!(|text: &[u8]| {
    let Ok(config) = AdapterConfig::from_json(text, 64) else { return };
    assert!((1..=64).contains(&config.scaling.max_rank()));
    for module in MODULES {
        assert!((1..=config.scaling.max_rank()).contains(&config.scaling.rank(module)));
        assert!(config.scaling.scale(module).is_finite());
    }
});
