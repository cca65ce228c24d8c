//! Rotary frequencies and tables against transformers' (rope/frequencies.json, made by rope/make_frequencies.py).

#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

use manylora_model::ModelSpec;
use manylora_model::decoder::rope;
use serde_json::{Value, json};

fn spec(head_dim: u64, parameters: &Value) -> ModelSpec {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 4 * head_dim, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 131_072,
        "rope_parameters": parameters
    });
    ModelSpec::parse(config.to_string().as_bytes()).unwrap()
}

#[test]
fn frequencies_equal_transformers() {
    let cases: Value = serde_json::from_str(include_str!("rope/frequencies.json")).unwrap();
    let cases = cases.as_object().unwrap();
    assert_eq!(cases.len(), 18);
    for (name, case) in cases {
        let head_dim = case["head_dim"].as_u64().unwrap();
        let spec = spec(head_dim, &case["rope_parameters"]);
        let got = rope::frequencies(&spec.rope, head_dim as usize);
        let want: Vec<f64> = case["frequencies"].as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect();
        assert_eq!(got.len(), want.len(), "{name}");
        for (pair, (got, want)) in got.iter().zip(&want).enumerate() {
            // theirs are computed in f32
            assert!((got - want).abs() <= 2e-6 * want, "{name}, pair {pair}: {got} instead of {want}");
        }
        let factor = case["attention_factor"].as_f64().unwrap();
        assert!((rope::magnitude(&spec.rope) - factor).abs() < 1e-12, "{name}: attention factor");
    }
}

#[test]
fn tables_are_scaled_cosines_and_sines() {
    let parameters = json!({"rope_theta": 10_000.0, "rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5});
    let spec = spec(16, &parameters);
    let frequencies = rope::frequencies(&spec.rope, 16);
    let (cosines, sines) = rope::tables(&spec.rope, 16, 50);
    assert_eq!((cosines.len(), sines.len()), (50 * 8, 50 * 8));
    for position in [0, 1, 7, 49] {
        for (pair, frequency) in frequencies.iter().enumerate() {
            let angle = position as f64 * frequency;
            assert_eq!(cosines[position * 8 + pair], (1.5 * angle.cos()) as f32);
            assert_eq!(sines[position * 8 + pair], (1.5 * angle.sin()) as f32);
        }
    }
}
