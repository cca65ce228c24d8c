//! Every adapter of every oracle manifest: accepted with PEFT's ranks and scales, or refused by name.

use manylora_kernels::{Module, Site};
use manylora_model::RefusalKind;
use manylora_model::adapter::PreparedAdapter;
use manylora_model::adapter::digest::hex;
use serde_json::Value;

use crate::fixtures::{load, load_path, oracle, policy, read_json};

const BASES: [&str; 9] =
    ["llama", "llama-tied", "llama-odd", "llama-deep", "llama-rope3", "qwen2", "qwen2-padded", "qwen3", "mistral"];

/// Names or cases of what is refused for now, with what the refusal must say.
fn refused_for_now(name: &str) -> Option<&'static str> {
    let kinds = [
        ("dora", "does not yet support DoRA"),
        ("mts-", "Unsupported modules_to_save"),
        ("lora-bias", "does not support LoRA bias"),
        ("bias-", "Adapter bias is not supported"),
        ("token-rows", "trainable tokens"),
        ("alora", "Activated LoRA"),
        ("bin", "never opened"),
        ("pissa-converted", ""),
        ("pissa", "init_lora_weights='pissa'"),
    ];
    kinds.into_iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, text)| text).filter(|text| !text.is_empty())
}

fn check_ranks_and_scales(base: &str, name: &str, expected: &Value, adapter: &PreparedAdapter) {
    let modules = &adapter.report.modules;
    let check = |module: &str, rank: &Value, scale: &Value| {
        let found = &modules[module];
        assert_eq!(u64::from(found.rank), rank.as_u64().unwrap(), "{base}/{name} {module}");
        let scale = scale.as_f64().unwrap();
        assert!(
            (f64::from(found.scale) - scale).abs() < 1e-5 * scale,
            "{base}/{name} {module}: {} not {scale}",
            found.scale
        );
        assert!(found.effect.unwrap().is_finite());
    };
    if let Some(each) = expected["rank_and_scale"].as_object() {
        assert_eq!(each.len(), modules.len(), "{base}/{name}");
        for (module, pair) in each {
            check(module, &pair[0], &pair[1]);
        }
    } else {
        assert_eq!(expected["modules"].as_u64().unwrap() as usize, modules.len(), "{base}/{name}");
        for module in modules.keys() {
            check(module, &expected["rank"], &expected["scale"]);
        }
    }
    let moves = modules.values().any(|module| module.effect.unwrap() > 0.0);
    assert_eq!(moves, expected["effect_max_logit"].as_f64().unwrap() > 0.0, "{base}/{name}: a silent no-op");
}

#[test]
fn every_adapter_of_every_manifest() {
    let (mut accepted, mut refused) = (0, 0);
    for base in BASES {
        let policy = policy(base);
        let manifest = read_json(&oracle().join(base).join("manifest.json"));
        for (name, expected) in manifest["adapters"].as_object().unwrap() {
            let path = oracle().join(base).join("adapters").join(name);
            let result = load_path(&path, &policy);
            match (expected["expect"].as_str().unwrap(), refused_for_now(name)) {
                ("load" | "load_or_refuse", None) => {
                    let adapter = result.unwrap_or_else(|refusal| panic!("{base}/{name}: {refusal}"));
                    check_ranks_and_scales(base, name, expected, &adapter);
                    assert!(adapter.sites.is_sorted_by_key(|shape| shape.site), "{base}/{name}");
                    accepted += 1;
                }
                ("refuse" | "load_or_refuse", Some(phrase)) => {
                    let refusal = result.expect_err(name);
                    assert!(refusal.reason.contains(phrase), "{base}/{name}: {refusal}");
                    assert_eq!(refusal.kind, RefusalKind::Invalid);
                    assert_eq!(&refusal.adapter, name);
                    assert!(!refusal.keys.is_empty(), "{base}/{name}: no key is named");
                    refused += 1;
                }
                (expect, phrase) => panic!("{base}/{name}: expectation {expect} and {phrase:?} contradict each other"),
            }
        }
    }
    assert_eq!((accepted, refused), (113, 23));
}

#[test]
fn the_three_adapters_of_smollm2() {
    let mut policy = policy("llama");
    let spec = &mut policy.spec;
    (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.layers) = (49152, 576, 1536, 30);
    (spec.heads, spec.kv_heads, spec.head_dim, spec.tied) = (9, 3, 64, true);
    policy.base_names = vec!["SmolLM2-135M-Instruct.Q4_1.gguf".to_owned()];
    for name in ["sql", "json", "support"] {
        let adapter = load_path(&oracle().join("smollm2/adapters").join(name), &policy).unwrap();
        assert_eq!(adapter.sites.len(), 30 * 4);
        assert!(adapter.sites.iter().all(|shape| shape.rank == 8 && shape.scale == 2.0));
        assert_eq!(adapter.report.warnings.len(), 1, "one warning: the base is a quantized sibling");
        assert_eq!(adapter.host_bytes(), 921_600 * 2);
    }
}

#[test]
fn factors_are_filled_row_major_and_their_effect_is_that_of_the_product() {
    let adapter = load("llama", "alpha").unwrap();
    let index = adapter.sites.iter().position(|shape| shape.site == Site::layer(1, Module::K)).unwrap();
    let shape = adapter.sites[index];
    let (mut a, mut b) = (vec![9.0; 3], Vec::new());
    adapter.fill(index, &mut a, &mut b).unwrap();
    let (rank, input, output) = (shape.rank as usize, shape.input as usize, shape.output as usize);
    assert_eq!((rank, input, output), (4, 32, 16));
    assert_eq!((a.len(), b.len()), (rank * input, output * rank));

    let file = std::fs::read(oracle().join("llama/adapters/alpha/adapter_model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    for (part, filled) in [("lora_A", &a), ("lora_B", &b)] {
        let key = format!("base_model.model.model.layers.1.self_attn.k_proj.{part}.weight");
        let stored = file.tensor(&key).unwrap();
        let bytes: Vec<u8> = filled.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(stored.data(), bytes);
    }

    let mut square = 0.0_f64;
    for row in 0..output {
        for column in 0..input {
            let product: f64 = (0..rank).map(|r| f64::from(b[row * rank + r]) * f64::from(a[r * input + column])).sum();
            square += (product * f64::from(shape.scale)).powi(2);
        }
    }
    let effect = adapter.report.modules["model.layers.1.self_attn.k_proj"].effect.unwrap();
    assert!((effect - square.sqrt()).abs() < 1e-5 * effect, "{effect} is not {}", square.sqrt());
    assert!(adapter.fill(adapter.sites.len(), &mut a, &mut b).is_err());
}

#[test]
fn digests_are_of_content() {
    let digest = |name: &str| load("llama", name).unwrap().digest;
    // The same tensors under another configuration's spelling.
    assert_eq!(digest("qv"), digest("config-2023"));
    assert_eq!(digest("qv"), digest("config-unknown"));
    assert_eq!(digest("qv"), digest("config-4bit-base"));
    // Copies of base matrices are no content.
    assert_eq!(digest("embed-head"), digest("embed-head-nocopy"));
    // Same shapes, other values; same values, rounded.
    let different = ["alpha", "gamma", "bf16", "fp16", "mixed", "beta", "null"].map(digest);
    for (i, one) in different.iter().enumerate() {
        assert!(different[..i].iter().all(|other| other != one));
    }
    let adapter = load("llama", "alpha").unwrap();
    assert_eq!(adapter.report.version, Some(hex(&adapter.digest)));
    assert_eq!(hex(&adapter.digest).len(), 64);
}

#[test]
fn the_digest_does_not_depend_on_anything_but_content() {
    // Written down once, and computed from the definition with another implementation of BLAKE3: caches are keyed by it
    // across processes and releases.
    assert_eq!(
        hex(&load("llama", "small").unwrap().digest),
        "bdb7160d2909c7201727fa33ed8be1dbef98e72962383773c72f4a88a36614a3"
    );
}
