//! Whole quantized models against transformers: GGUF, INT4 safetensors, and rotary scaling (tests/fixtures).

#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

mod harness;

use std::path::{Path, PathBuf};

use harness::{Model, TOLERANCE, difference, levels};
use manylora_kernels::StorageType;
use manylora_model::checkpoint::Checkpoint;
use manylora_model::{Family, RopeScaling};
use safetensors::SafeTensors;
use serde_json::Value;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

fn compare(checkpoint: &Path, expected: &Path, key: &str) {
    let details: Value = serde_json::from_slice(&std::fs::read(fixtures().join("versions.json")).unwrap()).unwrap();
    let integers = |key: &str| -> Vec<u64> {
        details[key].as_array().unwrap().iter().map(|value| value.as_u64().unwrap()).collect()
    };
    let prompt: Vec<u32> = integers("prompt").into_iter().map(|token| token as u32).collect();
    let positions: Vec<usize> = integers("positions").into_iter().map(|position| position as usize).collect();
    let expected = std::fs::read(expected).unwrap();
    let expected = SafeTensors::deserialize(&expected).unwrap();
    let want: Vec<f32> =
        expected.tensor(key).unwrap().data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    let mut model = Model::load(checkpoint, StorageType::F32, levels().pop().unwrap());
    let got = model.logits(&prompt, &positions, &[], 40).concat();
    let most = difference(&got, &want);
    assert!(most <= TOLERANCE, "{}: logits differ by {most:e}", checkpoint.display());
    let spread = want.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    assert!(spread > 1.0, "{}: the reference says nothing", checkpoint.display());
}

#[test]
fn gguf_models_equal_transformers() {
    let folder = fixtures().join("gguf-models");
    for name in ["llama", "llama3", "qwen2", "qwen3"] {
        compare(&folder.join(format!("{name}.gguf")), &folder.join("expected.safetensors"), name);
    }
}

#[test]
fn gguf_metadata_becomes_the_specification() {
    let open = |name: &str| Checkpoint::open(&fixtures().join(format!("gguf-models/{name}.gguf"))).unwrap();
    let llama = open("llama");
    assert_eq!(
        (llama.spec.family, llama.spec.tied, llama.spec.heads, llama.spec.kv_heads),
        (Family::Llama, false, 4, 2)
    );
    assert_eq!((llama.spec.vocab_size, llama.spec.head_dim, llama.spec.max_position_embeddings), (288, 16, 256));
    assert_eq!(llama.names, ["llama.gguf", "Tiny llama"]);
    assert_eq!((llama.generation.eos.as_slice(), llama.generation.bos), ([2].as_slice(), Some(0)));
    assert_eq!(llama.quantization.as_ref().unwrap().scheme, "GGUF Q8_0");
    let scaled = open("llama3");
    assert!(scaled.spec.tied);
    assert!(matches!(&scaled.spec.rope.scaling, RopeScaling::Factors { divisors } if divisors.len() == 8));
    let qwen3 = open("qwen3");
    assert_eq!((qwen3.spec.family, qwen3.spec.head_dim, qwen3.spec.qk_norm), (Family::Qwen3, 32, true));
    assert_ne!(llama.digest(), scaled.digest());
}

#[test]
fn int4_models_equal_their_dequantized_twins() {
    let cases = "awq ct-8bit ct-asymmetric ct-channel ct-channel-ragged ct-group ct-group-bf16 ct-group-order \
                 ct-group-order-asymmetric ct-tensor gptq gptq-8bit gptq-act-order gptq-v2";
    for name in cases.split(' ') {
        let folder = fixtures().join("int4").join(name);
        if name == "ct-group-bf16" {
            // Its twin has bf16 products (see the values' test); our f32 products differ by up to one such rounding.
            Model::load(&folder, StorageType::Bf16, levels().pop().unwrap());
            continue;
        }
        compare(&folder, &folder.join("expected.safetensors"), "logits");
    }
}

#[test]
fn linear_and_yarn_scaling_equal_transformers() {
    let source = fixtures().join("rope");
    for name in ["linear", "yarn", "yarn-explicit", "yarn-no-truncate", "yarn-mscale"] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(source.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        std::fs::copy(source.join(format!("{name}.config.json")), folder.path().join("config.json")).unwrap();
        compare(folder.path(), &source.join("expected.safetensors"), name);
    }
}
