//! Packed words against the packers' own dequantizers, and configurations that are not supported (fixtures:
//! tests/fixtures/int4).

use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::SafeTensors;
use serde_json::json;

use super::super::Checkpoint;
use super::*;

const CASES: [&str; 14] = [
    "awq",
    "ct-8bit",
    "ct-asymmetric",
    "ct-channel",
    "ct-channel-ragged",
    "ct-group",
    "ct-group-bf16",
    "ct-group-order",
    "ct-group-order-asymmetric",
    "ct-tensor",
    "gptq",
    "gptq-8bit",
    "gptq-act-order",
    "gptq-v2",
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/int4").join(name)
}

#[test]
fn values_equal_the_packers_own_dequantizers() {
    for case in CASES {
        let checkpoint = Checkpoint::open(&fixture(case)).unwrap();
        let expected = std::fs::read(fixture(case).join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&expected).unwrap();
        let mut compared = 0;
        for (name, want) in expected.tensors() {
            if name == "logits" {
                continue;
            }
            let rows = checkpoint.matrix(&name).unwrap();
            assert_eq!([rows.rows(), rows.columns()], want.shape(), "{case} {name}");
            let want: Vec<f32> = want.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
            let mut got = vec![f32::NAN; want.len()];
            rows.read(0, &mut got).unwrap();
            for (index, (got, want)) in got.iter().zip(&want).enumerate() {
                // With bf16 scales, compressed-tensors multiplies in bf16: one rounding more than ours.
                let got = if case == "ct-group-bf16" { bf16::from_f32(*got).to_f32() } else { *got };
                assert!(got == *want, "{case} {name}, element {index}: {got} instead of {want}");
            }
            let mut part = vec![0.0; 2 * rows.columns()];
            rows.read(5, &mut part).unwrap();
            if case != "ct-group-bf16" {
                assert_eq!(part, want[5 * rows.columns()..7 * rows.columns()], "{case} {name}: rows 5 and 6");
            }
            assert!(rows.read(rows.rows() - 1, &mut part).is_err());
            compared += 1;
        }
        assert_eq!(compared, 2, "{case}");
        let note = checkpoint.quantization.as_ref().unwrap();
        assert!(note.line(2).contains("-bit, dequantized at load: "), "{}", note.line(2));
        assert_eq!(note.parameters, checkpoint.spec.parameters());
    }
}

fn parse(value: &Value) -> Result<Quantization, ModelError> {
    Quantization::parse(Path::new("config.json"), value)
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let gptq = |key: &str, value: Value| {
        let mut config = json!({"quant_method": "gptq", "bits": 4, "group_size": 128});
        config[key] = value;
        config
    };
    let compressed = |top: Value, weights: Value| {
        let mut config = json!({
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights":
                {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": true}}}
        });
        for (key, value) in top.as_object().unwrap() {
            config[key] = value.clone();
        }
        for (key, value) in weights.as_object().unwrap() {
            config["config_groups"]["group_0"]["weights"][key] = value.clone();
        }
        config
    };
    assert!(parse(&compressed(json!({}), json!({}))).is_ok());
    assert!(parse(&gptq("dynamic", json!({"-:.*lm_head": {}}))).is_ok());
    for (config, named) in [
        (json!([]), "`quantization_config` is not an object"),
        (json!({"bits": 4}), "`quantization_config.quant_method` is missing"),
        (json!({"quant_method": "bitsandbytes"}), "`bitsandbytes` is not supported; supported are awq"),
        (json!({"quant_method": "fp8"}), "`fp8`"),
        (json!({"quant_method": 4}), "`quantization_config.quant_method` is `4`"),
        (json!({"quant_method": "awq", "version": "gemv", "group_size": 128}), "`gemv`"),
        (json!({"quant_method": "awq", "bits": 8, "group_size": 128}), "`quantization_config.bits` = `8`"),
        (json!({"quant_method": "awq", "bits": 4}), "`quantization_config.group_size` is missing"),
        (json!({"quant_method": "awq", "zero_point": false, "group_size": 128}), "zero_point"),
        (gptq("bits", json!(3)), "`quantization_config.bits` = `3`"),
        (gptq("bits", json!("four")), "whole number"),
        (gptq("group_size", json!(0)), "`quantization_config.group_size` is `0`"),
        (gptq("checkpoint_format", json!("marlin")), "`marlin`"),
        (gptq("pack_dtype", json!("int64")), "`int64`"),
        (gptq("dynamic", json!({"+:.*down.*": {"bits": 8}})), "dynamic"),
        (gptq("desc_act", json!("yes")), "true or false"),
        (compressed(json!({"format": "float-quantized"}), json!({})), "`float-quantized`"),
        (compressed(json!({"kv_cache_scheme": {"num_bits": 8}}), json!({})), "kv_cache_scheme"),
        (compressed(json!({"transform_config": {"r1": 1}}), json!({})), "transform_config"),
        (compressed(json!({"sparsity_config": {"format": "sparse-24-bitmask"}}), json!({})), "sparsity_config"),
        (compressed(json!({"quantization_status": "frozen"}), json!({})), "`frozen`"),
        (compressed(json!({"config_groups": {}}), json!({})), "config_groups` is missing"),
        (compressed(json!({}), json!({"num_bits": 3})), "num_bits"),
        (compressed(json!({}), json!({"type": "float"})), "`float`"),
        (compressed(json!({}), json!({"strategy": "block"})), "`block`"),
        (compressed(json!({}), json!({"dynamic": true})), "dynamic"),
        (compressed(json!({}), json!({"group_size": null})), "do not fit together"),
        (
            compressed(
                json!({"config_groups": {"a": {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}}}),
                json!({}),
            ),
            "input_activations",
        ),
    ] {
        // The last case's helper adds a group without weights of its own; the first group is read first.
        let message = parse(&config).expect_err(named).to_string();
        assert!(message.contains(named), "{config}: {message}");
    }
}

/// Rewrites one tensor of a fixture and opens the result.
fn opened_with(
    case: &str,
    change: impl Fn(&mut Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)>),
) -> Result<Checkpoint, ModelError> {
    let folder = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(fixture(case).join("model.safetensors")).unwrap();
    let mut tensors: Vec<_> = SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        .collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.clone(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    std::fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    std::fs::copy(fixture(case).join("config.json"), folder.path().join("config.json")).unwrap();
    Checkpoint::open(folder.path())
}

#[test]
fn modules_whose_tensors_do_not_belong_together_are_refused() {
    const MODULE: &str = "model.layers.0.self_attn.k_proj";
    assert!(opened_with("gptq-act-order", |_| {}).is_ok());
    for (case, part, named) in [
        ("awq", "scales", "`scales` is missing"),
        ("awq", "qzeros", "`qzeros` is missing"),
        ("gptq-act-order", "g_idx", "its group index is missing"),
        ("ct-group-order", "weight_g_idx", "its group index is missing"),
        ("ct-asymmetric", "weight_zero_point", "`weight_zero_point` is missing"),
        ("ct-group", "weight_shape", "`weight_shape` is missing"),
    ] {
        let error = opened_with(case, |tensors| tensors.retain(|(name, ..)| name != &format!("{MODULE}.{part}")));
        let message = error.expect_err(part).to_string();
        assert!(message.contains(named) && message.contains(MODULE), "{case} {part}: {message}");
    }
    let rewrite = |case: &str, part: &str, write: fn(&mut Vec<u8>, &mut Vec<usize>)| {
        opened_with(case, |tensors| {
            for (name, _, shape, data) in tensors.iter_mut() {
                if name == &format!("{MODULE}.{part}") {
                    write(data, shape);
                }
            }
        })
        .expect_err(part)
        .to_string()
    };
    let message = rewrite("gptq-act-order", "g_idx", |data, _| data[..4].copy_from_slice(&99i32.to_le_bytes()));
    assert!(message.contains("names group `99`"), "{message}");
    let message = rewrite("gptq-act-order", "g_idx", |data, _| data[..4].copy_from_slice(&(-1i32).to_le_bytes()));
    assert!(message.contains("names group `-1`"), "{message}");
    let message = rewrite("ct-group", "weight_shape", |data, _| data[..8].copy_from_slice(&7i64.to_le_bytes()));
    assert!(message.contains("`weight_shape` says"), "{message}");
    let message = rewrite("awq", "scales", |_, shape| shape.reverse());
    assert!(message.contains("`scales` has shape"), "{message}");
    let message = rewrite("gptq", "qweight", |_, shape| shape.reverse());
    assert!(message.contains("ask for"), "{message}");
    let both = opened_with("awq", |tensors| {
        tensors.push((format!("{MODULE}.weight"), safetensors::Dtype::F16, vec![1, 1], vec![0, 0]));
    });
    assert!(both.expect_err("both").to_string().contains("only one of them can be the weight"));
}
