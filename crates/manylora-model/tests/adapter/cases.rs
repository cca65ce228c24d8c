//! Reported cases, each with the smallest adapter that shows it.

use std::sync::Arc;

use half::{bf16, f16};
use manylora_kernels::{Module, Site, StorageType};
use manylora_model::adapter::combinations::{AdapterFeature, EngineFeature, Verdict, table, verdict};
use manylora_model::adapter::config::AdapterConfig;
use manylora_model::adapter::{AdapterPolicy, MemoryTensor, NoBaseTensors, PreparedAdapter};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::fixtures::{HandMade, load, policy, tensor, values};

fn scales(adapter: &PreparedAdapter) -> Vec<(u32, f32)> {
    adapter.sites.iter().map(|shape| (shape.rank, shape.scale)).collect()
}

#[test]
fn a_01_target_modules_in_every_form() {
    let policy = policy("llama");
    let expected = HandMade::on_llama(4).load(&policy).unwrap();
    for targets in [
        json!(".*layers\\.[01]\\.self_attn\\.(q|v)_proj"),
        json!("all-linear"),
        json!(["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]),
        json!(null),
    ] {
        let adapter = HandMade::on_llama(4).with("target_modules", targets).load(&policy).unwrap();
        assert_eq!(adapter.digest, expected.digest, "the tensors decide");
    }
    for targets in [json!(7), json!(["q_proj", 1]), json!({"q_proj": 1})] {
        let refusal = HandMade::on_llama(4).with("target_modules", targets).refusal(&policy);
        assert_eq!(refusal.keys, ["target_modules"]);
    }
}

#[test]
fn a_02_empty_values_of_any_key_are_inactive_and_active_ones_are_named() {
    let policy = policy("llama");
    let changing = [
        "use_dora",
        "modules_to_save",
        "bias",
        "lora_bias",
        "trainable_token_indices",
        "alora_invocation_tokens",
        "layer_replication",
        "use_qalora",
        "use_bdlora",
        "target_parameters",
        "arrow_config",
        "loftq_config",
        "corda_config",
        "lora_ga_config",
        "megatron_config",
        "kasa_config",
        "velora_config",
        "monteclora_config",
        "enable_lora",
        "use_mora",
    ];
    for key in changing {
        for empty in [json!(null), json!(false), json!({}), json!([]), json!("")] {
            let adapter = HandMade::on_llama(4).with(key, empty.clone()).load(&policy);
            let adapter = adapter.unwrap_or_else(|refusal| panic!("{key}: {empty}: {refusal}"));
            assert!(adapter.report.warnings.is_empty());
        }
        let refusal = HandMade::on_llama(4).with(key, json!(["x"])).refusal(&policy);
        assert_eq!(refusal.keys, [key], "{refusal}");
        let report = refusal.report.unwrap();
        assert!(report["refused"][key].is_string());
    }
    for empty in [json!(null), json!(false), json!({}), json!([]), json!("")] {
        let adapter = HandMade::on_llama(4).with("init_lora_weights", empty.clone()).with("future_mode", empty);
        assert!(adapter.load(&policy).unwrap().report.warnings.is_empty());
    }
}

#[test]
fn a_02_unknown_keys_give_one_warning() {
    let policy = policy("llama");
    let adapter = HandMade::on_llama(4).with("future_mode", json!(true)).with("other", json!(3)).load(&policy).unwrap();
    assert_eq!(adapter.report.warnings.len(), 1);
    assert!(adapter.report.warnings[0].contains("`future_mode`, `other`"), "{:?}", adapter.report.warnings);
    // A key of 2023, of training only.
    let adapter = HandMade::on_llama(4).with("merge_weights", json!(true)).load(&policy).unwrap();
    assert!(adapter.report.warnings.is_empty());
}

#[test]
fn a_03_rank_stabilized_scale_on_every_kind_of_module() {
    let mut adapter = HandMade::new(16).with("lora_alpha", json!(16)).with("use_rslora", json!(true));
    adapter.add("model.layers.0.self_attn.q_proj", 16, 32, 32);
    adapter.add("model.layers.1.mlp.down_proj", 16, 64, 32);
    adapter.add("lm_head", 16, 32, 288);
    adapter.put("base_model.model.model.embed_tokens.lora_embedding_A", &[16, 288]);
    adapter.put("base_model.model.model.embed_tokens.lora_embedding_B", &[32, 16]);
    let adapter = adapter.load(&policy("llama")).unwrap();
    assert_eq!(scales(&adapter), [(16, 4.0); 4]);
    assert_eq!(adapter.sites[0].site, Site::EMBED);
    assert_eq!((adapter.sites[0].input, adapter.sites[0].output), (288, 32));
    assert_eq!(adapter.sites[1].site, Site::HEAD);
}

#[test]
fn a_04_patterns() {
    let policy = policy("llama");
    let patterns = |rank_stabilized: bool| {
        let mut adapter = HandMade::new(4)
            .with("rank_pattern", json!({"layers.1.self_attn.q_proj": 8}))
            .with("alpha_pattern", json!({"v_proj": 32}))
            .with("use_rslora", json!(rank_stabilized));
        for layer in 0..2 {
            let rank = if layer == 1 { 8 } else { 4 };
            adapter.add(&format!("model.layers.{layer}.self_attn.q_proj"), rank, 32, 32);
            adapter.add(&format!("model.layers.{layer}.self_attn.v_proj"), 4, 32, 16);
        }
        adapter.load(&policy).unwrap()
    };
    assert_eq!(scales(&patterns(false)), [(4, 2.0), (4, 8.0), (8, 1.0), (4, 8.0)]);
    let root_of_8 = (8.0_f64 / 8.0_f64.sqrt()) as f32;
    assert_eq!(scales(&patterns(true)), [(4, 4.0), (4, 16.0), (8, root_of_8), (4, 16.0)]);
}

#[test]
fn a_04_patterns_match_at_dot_boundaries_and_the_first_wins() {
    let scaling = |rank_pattern: Value, alpha_pattern: Value, rank_stabilized: bool| {
        let mut adapter = HandMade::new(16)
            .with("lora_alpha", json!(32))
            .with("rank_pattern", rank_pattern.clone())
            .with("alpha_pattern", alpha_pattern)
            .with("use_rslora", json!(rank_stabilized));
        let rank = if rank_pattern.get("q_proj").is_some() { 4 } else { 16 };
        adapter.add("model.layers.0.self_attn.q_proj", rank, 32, 32);
        adapter.add("model.layers.0.self_attn.v_proj", 16, 32, 16);
        let adapter = adapter.load(&policy("llama")).unwrap();
        (adapter.sites[0].scale, adapter.sites[1].scale)
    };
    assert_eq!(scaling(json!({"q_proj": 4}), json!({}), false), (8.0, 2.0));
    assert_eq!(scaling(json!({}), json!({"v_proj": 64}), false), (2.0, 4.0));
    assert_eq!(scaling(json!({}), json!({"proj": 64}), false), (2.0, 2.0));
    assert_eq!(scaling(json!({"q_proj": 4}), json!({}), true), (16.0, 8.0));
    assert_eq!(scaling(json!({}), json!({"(q|v)_proj": 48, "v_proj": 64}), false), (3.0, 3.0));
    assert_eq!(scaling(json!({}), json!({"attn.q_proj": 64}), false), (2.0, 2.0));

    let refusal = HandMade::on_llama(4).with("alpha_pattern", json!({"(?=q)q_proj": 3})).refusal(&policy("llama"));
    assert_eq!(refusal.keys, ["alpha_pattern"]);
    // The largest rank of the patterns is what is compared with the limit.
    let over = HandMade::on_llama(4).with("rank_pattern", json!({"o_proj": 65})).refusal(&policy("llama"));
    assert!(over.reason.contains("LoRA rank 65 is greater than max_lora_rank 64"), "{over}");
    assert_eq!(over.keys, ["rank_pattern"]);
}

#[test]
fn a_05_copies_of_base_matrices() {
    let adapter = load("llama", "embed-head").unwrap();
    let ignored: Vec<&str> = adapter.report.ignored.keys().map(String::as_str).collect();
    assert_eq!(
        ignored,
        ["base_model.model.lm_head.base_layer.weight", "base_model.model.model.embed_tokens.base_layer.weight"]
    );
    assert_eq!(adapter.report.matched.len(), 8);
    // A base that cannot be read back cannot be compared with: refused, not ignored.
    let blind = AdapterPolicy { base_tensors: Arc::new(NoBaseTensors), ..policy("llama") };
    let path = crate::fixtures::oracle().join("llama/adapters/embed-head");
    let refusal = crate::fixtures::load_path(&path, &blind).unwrap_err();
    assert!(refusal.reason.contains("cannot be compared"), "{refusal}");
}

#[test]
fn a_05_one_changed_element_of_a_copy_is_found() {
    let policy = policy("llama");
    let base = policy.base_tensors.matrix("lm_head").unwrap();
    let mut weights = vec![0.0; 288 * 32];
    base.read(0, &mut weights).unwrap();
    drop(base);
    let with_copy = |weights: &[f32]| {
        let mut adapter = HandMade::new(4);
        adapter.add("lm_head", 4, 32, 288);
        adapter.tensors.insert("base_model.model.lm_head.base_layer.weight".to_owned(), tensor(&[288, 32], weights));
        adapter
    };
    assert_eq!(with_copy(&weights).load(&policy).unwrap().report.ignored.len(), 1);
    // The base was rounded when the copy was saved, or the copy when the base was: still the same matrix.
    let mut rounded = with_copy(&weights);
    let copy = MemoryTensor {
        shape: vec![288, 32],
        dtype: Dtype::BF16,
        bytes: weights.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
    };
    rounded.tensors.insert("base_model.model.lm_head.base_layer.weight".to_owned(), copy);
    assert_eq!(rounded.load(&policy).unwrap().report.ignored.len(), 1);

    weights[287 * 32 + 31] += 1e-3;
    let refusal = with_copy(&weights).refusal(&policy);
    assert_eq!(refusal.keys, ["base_model.model.lm_head.base_layer.weight"]);
    assert!(refusal.reason.contains("row 287"), "{refusal}");
}

#[test]
fn a_06_whole_matrices_are_refused_even_if_the_configuration_is_silent() {
    let policy = policy("llama");
    for (key, shape) in [
        ("base_model.model.lm_head.weight", vec![288, 32]),
        ("base_model.model.model.embed_tokens.weight", vec![288, 32]),
        ("base_model.model.model.layers.0.input_layernorm.weight", vec![32]),
        ("base_model.model.model.layers.0.self_attn.q_norm.weight", vec![8]),
        ("base_model.model.score.weight", vec![2, 32]),
        ("base_model.model.lm_head.modules_to_save.default.weight", vec![288, 32]),
    ] {
        let mut adapter = HandMade::on_llama(4);
        adapter.put(key, &shape);
        let refusal = adapter.refusal(&policy);
        assert_eq!(refusal.keys, [key]);
        assert!(refusal.reason.contains("modules_to_save"), "{refusal}");
    }
}

#[test]
fn a_07_tied_ends_are_adapted_apart() {
    assert_eq!(load("llama-tied", "head-only").unwrap().sites[0].site, Site::HEAD);
    assert_eq!(load("llama-tied", "embed-only").unwrap().sites[0].site, Site::EMBED);
    assert_eq!(load("llama-tied", "embed-head-ewt").unwrap().sites.len(), 2);

    let policy = policy("llama-tied");
    let mut one_end = HandMade::new(4).with("ensure_weight_tying", json!(true));
    one_end.put("base_model.model.model.embed_tokens.lora_embedding_A", &[4, 288]);
    one_end.put("base_model.model.model.embed_tokens.lora_embedding_B", &[32, 4]);
    assert_eq!(one_end.refusal(&policy).keys, ["ensure_weight_tying"]);
    let mut not_transposed = one_end.clone();
    not_transposed.add("lm_head", 4, 32, 288);
    assert!(not_transposed.refusal(&policy).reason.contains("transposes"));
    assert!(not_transposed.with("ensure_weight_tying", json!(false)).load(&policy).is_ok());
}

#[test]
fn a_08_a_magnitude_vector_is_never_dropped() {
    let mut adapter = HandMade::on_llama(4);
    adapter.put("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", &[32]);
    let refusal = adapter.refusal(&policy("llama"));
    assert!(refusal.reason.contains("does not yet support DoRA"), "{refusal}");
    assert!(refusal.keys[0].ends_with("lora_magnitude_vector"));
}

#[test]
fn a_09_biases_are_refused_by_key() {
    let policy = policy("llama");
    for key in [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.bias",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias",
        "base_model.model.model.layers.0.self_attn.k_proj.bias",
    ] {
        let mut adapter = HandMade::on_llama(4);
        adapter.put(key, &[32]);
        let refusal = adapter.refusal(&policy);
        assert_eq!(refusal.keys, [key]);
        assert!(refusal.reason.contains("bias"), "{refusal}");
    }
    for bias in ["all", "lora_only"] {
        assert_eq!(HandMade::on_llama(4).with("bias", json!(bias)).refusal(&policy).keys, ["bias"]);
    }
}

#[test]
fn a_10_trainable_rows_are_refused_by_key() {
    let mut adapter = HandMade::on_llama(4);
    adapter.put("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", &[2, 32]);
    assert!(adapter.refusal(&policy("llama")).reason.contains("trainable token rows"));
    let listed = HandMade::on_llama(4).with("trainable_token_indices", json!([1, 5])).refusal(&policy("llama"));
    assert_eq!(listed.keys, ["trainable_token_indices"]);
}

#[test]
fn a_11_initializations() {
    let policy = policy("llama");
    for plain in [json!(true), json!(false), json!("gaussian"), json!("eva"), json!("orthogonal"), json!("mica")] {
        assert!(HandMade::on_llama(4).with("init_lora_weights", plain.clone()).load(&policy).is_ok(), "{plain}");
    }
    for changing in ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "future_init"] {
        let refusal = HandMade::on_llama(4).with("init_lora_weights", json!(changing)).refusal(&policy);
        assert!(refusal.reason.contains(&format!("init_lora_weights='{changing}'")), "{refusal}");
        assert!(refusal.reason.contains("convert"), "{refusal}");
    }
    assert!(HandMade::on_llama(4).with("init_lora_weights", json!(3)).load(&policy).is_err());
}

#[test]
fn a_12_nothing_to_apply() {
    let policy = policy("llama");
    assert!(HandMade::new(4).refusal(&policy).reason.contains("no tensors"));
    let mut zero = HandMade::on_llama(4);
    zero.put("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", &[0]);
    let refusal = zero.refusal(&policy);
    assert!(refusal.reason.contains("zero-size tensor"), "{refusal}");
    assert_eq!(refusal.keys, ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]);
}

#[test]
fn a_13_formats_are_converted_exactly() {
    let policy = policy("llama");
    let mut adapter = HandMade::on_llama(4);
    let key_a = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    let key_b = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight";
    let (a, b) = (values(key_a, 128), values(key_b, 128));
    let set = |adapter: &mut HandMade, key: &str, dtype, bytes| {
        let shape = adapter.tensors[key].shape.clone();
        adapter.tensors.insert(key.to_owned(), MemoryTensor { shape, dtype, bytes });
    };
    set(&mut adapter, key_a, Dtype::BF16, a.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect());
    set(&mut adapter, key_b, Dtype::F16, b.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect());
    let narrow = adapter.load(&policy).unwrap();
    let (mut filled_a, mut filled_b) = (Vec::new(), Vec::new());
    narrow.fill(0, &mut filled_a, &mut filled_b).unwrap();
    let rounded_a: Vec<f32> = a.iter().map(|&v| bf16::from_f32(v).to_f32()).collect();
    let rounded_b: Vec<f32> = b.iter().map(|&v| f16::from_f32(v).to_f32()).collect();
    assert_eq!((&filled_a, &filled_b), (&rounded_a, &rounded_b));
    // The same values stored wide are the same adapter.
    adapter.tensors.insert(key_a.to_owned(), tensor(&[4, 32], &rounded_a));
    adapter.tensors.insert(key_b.to_owned(), tensor(&[32, 4], &rounded_b));
    assert_eq!(adapter.load(&policy).unwrap().digest, narrow.digest);

    for dtype in [Dtype::F64, Dtype::I8, Dtype::F8_E4M3] {
        let bytes = vec![0; 128 * dtype.bitsize() / 8];
        set(&mut adapter, key_a, dtype, bytes);
        let refusal = adapter.refusal(&policy);
        assert_eq!(refusal.keys, [key_a]);
        assert!(refusal.reason.contains(&format!("{dtype:?}")), "{refusal}");
    }
    // The largest f32 values round to infinity in bfloat16.
    let mut huge = HandMade::on_llama(4);
    let mut with_max = a;
    with_max[7] = f32::MAX;
    huge.tensors.insert(key_a.to_owned(), tensor(&[4, 32], &with_max));
    assert!(huge.load(&policy).is_ok());
    let narrow = AdapterPolicy { dtype: StorageType::Bf16, ..policy };
    assert!(huge.refusal(&narrow).reason.contains("beyond bfloat16's range"));
}

#[test]
fn a_15_ambiguous_spellings_are_refused() {
    let policy = policy("llama");
    let mut mixed = HandMade::on_llama(4);
    let key = "base_model.model.language_model.model.layers.0.self_attn.o_proj";
    mixed.put(&format!("{key}.lora_A.weight"), &[4, 32]);
    mixed.put(&format!("{key}.lora_B.weight"), &[32, 4]);
    assert!(mixed.refusal(&policy).reason.contains("inside `language_model`"));

    let mut twice = HandMade::on_llama(4);
    twice.put("model.layers.0.self_attn.q_proj.lora_A.default.weight", &[4, 32]);
    let refusal = twice.refusal(&policy);
    assert_eq!(refusal.keys.len(), 2);
    assert!(refusal.reason.contains("two spellings of the same tensor"), "{refusal}");

    let two_adapters = HandMade::on_llama(4).renamed(|key| {
        let name = if key.contains("layers.0") { "one" } else { "two" };
        key.replace(".weight", &format!(".{name}.weight"))
    });
    assert!(two_adapters.refusal(&policy).reason.contains("tensors of 2 adapters: `one`, `two`"));

    let foreign = HandMade::on_llama(4).renamed(|key| key.replace("model.layers", "wrapper.layers"));
    let refusal = foreign.refusal(&policy);
    assert!(refusal.reason.contains("Please verify that the loaded LoRA module is correct"), "{refusal}");
    assert_eq!(refusal.reason.matches("lora_A.weight").count() + refusal.reason.matches("lora_B.weight").count(), 6);
    assert_eq!(refusal.keys.len(), 8);
}

#[test]
fn a_15_odd_names_are_unsupported_weights() {
    for key in [
        "base_model.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.bias",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight",
        "lora_A.weight",
        "",
        "....",
    ] {
        let mut adapter = HandMade::on_llama(4);
        adapter.put(key, &[4, 32]);
        let refusal = adapter.refusal(&policy("llama"));
        assert_eq!(refusal.keys, [key]);
        assert!(refusal.reason.contains("unsupported LoRA weight") || refusal.reason.contains("bias"), "{refusal}");
    }
    for layer in ["00", "+0", "2", "-1", "18446744073709551616", "x"] {
        let adapter = HandMade::on_llama(4).renamed(|key| key.replace("layers.0.", &format!("layers.{layer}.")));
        assert!(adapter.load(&policy("llama")).is_err(), "{layer}");
    }
}

#[test]
fn a_16_every_subset_of_a_fused_group() {
    let policy = policy("llama");
    let modules =
        [("q_proj", 32, Module::Q), ("k_proj", 16, Module::K), ("v_proj", 16, Module::V), ("o_proj", 32, Module::O)];
    for subset in 1..16_u32 {
        let mut adapter = HandMade::new(4);
        let chosen: Vec<_> = (0..4).filter(|bit| subset & (1 << bit) != 0).map(|bit| modules[bit]).collect();
        for (name, output, _) in &chosen {
            adapter.add(&format!("model.layers.1.self_attn.{name}"), 4, 32, *output);
        }
        let loaded = adapter.load(&policy).unwrap();
        let sites: Vec<_> = loaded.sites.iter().map(|shape| (shape.site, shape.output as usize)).collect();
        let expected: Vec<_> = chosen.iter().map(|&(_, output, module)| (Site::layer(1, module), output)).collect();
        assert_eq!(sites, expected);
    }
}

#[test]
fn a_17_fused_tensors_on_a_split_base() {
    let mut adapter = HandMade::new(4);
    adapter.add("model.layers.0.self_attn.qkv_proj", 4, 32, 64);
    let refusal = adapter.refusal(&policy("llama"));
    for name in ["`q_proj`", "`k_proj`", "`v_proj`", "qkv_proj"] {
        assert!(refusal.reason.contains(name), "{refusal}");
    }
}

#[test]
fn a_18_limits_come_from_configuration_only() {
    let restricted = |names: &[&str]| AdapterPolicy {
        target_modules: Some(names.iter().map(|&name| name.to_owned()).collect()),
        ..policy("llama")
    };
    let adapter = HandMade::on_llama(4);
    for names in [
        vec!["q_proj", "v_proj"],
        vec!["qkv_proj"],
        vec!["self_attn.qkv_proj"],
        vec!["model.layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "v_proj"],
    ] {
        assert!(adapter.load(&restricted(&names)).is_ok(), "{names:?}");
    }
    let refusal = adapter.refusal(&restricted(&["q_proj", "j_proj", "gate_up_proj"]));
    assert!(refusal.reason.contains("`model.layers.0.self_attn.v_proj` is not among the target modules"), "{refusal}");
    assert_eq!(refusal.keys.len(), 2);
    assert!(adapter.load(&restricted(&["proj"])).is_err());
}

#[test]
fn a_19_made_for_another_base() {
    let policy = policy("llama");
    let mut wrong = HandMade::new(4);
    wrong.add("model.layers.0.self_attn.q_proj", 4, 64, 64);
    let refusal = wrong.refusal(&policy);
    assert!(refusal.reason.contains("[4, 64]") && refusal.reason.contains("[4, 32]"), "{refusal}");
    let mut odd = HandMade::on_llama(4);
    odd.put("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", &[4, 32, 1]);
    assert!(odd.load(&policy).is_err());
    let without_type = HandMade { config: json!({"r": 4, "lora_alpha": 8, "target_modules": []}), ..wrong };
    assert_eq!(without_type.refusal(&policy).keys, ["peft_type"]);
}

#[test]
fn a_20_ranks() {
    let policy = AdapterPolicy { max_rank: 512, ..policy("llama") };
    for rank in [1, 2, 3, 5, 12, 24, 48, 64, 65, 511, 512] {
        assert_eq!(HandMade::on_llama(rank).load(&policy).unwrap().sites[0].rank as usize, rank);
    }
    for limit in [1, 4, 12] {
        let limited = AdapterPolicy { max_rank: limit, ..policy.clone() };
        assert!(HandMade::on_llama(limit).load(&limited).is_ok());
        let refusal = HandMade::on_llama(limit + 1).refusal(&limited);
        let numbers = format!("LoRA rank {} is greater than max_lora_rank {limit}", limit + 1);
        assert!(refusal.reason.contains(&numbers), "{refusal}");
    }
    let unlimited = AdapterPolicy { max_rank: 4096, ..policy.clone() };
    assert!(HandMade::on_llama(513).refusal(&unlimited).reason.contains("greater than 512"));
    for rank in [json!(0), json!(-8), json!("4"), json!(4.0), json!(true), json!(null), json!(1e300)] {
        let refusal = HandMade::on_llama(4).with("r", rank).refusal(&policy);
        assert!(refusal.reason.contains("must be a positive integer"), "{refusal}");
    }
    for rank in [json!(0), json!(-4), json!(2.5)] {
        let refusal = HandMade::on_llama(4).with("rank_pattern", json!({"q_proj": rank})).refusal(&policy);
        assert!(refusal.reason.contains("must be a positive integer"), "{refusal}");
    }
    for alpha in [json!("8"), json!(null), json!(1e300), json!([8])] {
        assert_eq!(HandMade::on_llama(4).with("lora_alpha", alpha).refusal(&policy).keys, ["lora_alpha"]);
    }
    for key in ["r", "lora_alpha", "target_modules"] {
        let mut adapter = HandMade::on_llama(4);
        adapter.config.as_object_mut().unwrap().remove(key);
        let refusal = adapter.refusal(&policy);
        assert!(refusal.reason.contains("Missing required configuration fields"), "{refusal}");
        assert_eq!(refusal.keys, [key]);
    }
}

#[test]
fn a_21_shapes_that_are_no_power_of_two() {
    let adapter = load("llama-odd", "rank5").unwrap();
    let shape = adapter.sites.iter().find(|shape| shape.site == Site::layer(0, Module::K)).unwrap();
    assert_eq!((shape.rank, shape.input, shape.output), (5, 36, 12));
}

#[test]
fn a_56_the_table_of_pairs_is_whole_and_kept() {
    assert_eq!(table().len(), AdapterFeature::ALL.len() * EngineFeature::ALL.len());
    // What is refused with every engine feature is refused at load.
    for (key, value, feature) in [
        ("use_dora", json!(true), AdapterFeature::Dora),
        ("modules_to_save", json!(["lm_head"]), AdapterFeature::ModulesToSave),
        ("lora_bias", json!(true), AdapterFeature::Bias),
        ("trainable_token_indices", json!([1]), AdapterFeature::TokenRows),
        ("alora_invocation_tokens", json!([1]), AdapterFeature::Activated),
        ("init_lora_weights", json!("pissa"), AdapterFeature::MutatedBase),
        ("layer_replication", json!([[0, 2]]), AdapterFeature::LayerReplication),
        ("target_parameters", json!(["mlp.experts.gate_up_proj"]), AdapterFeature::Experts),
        ("use_qalora", json!(true), AdapterFeature::OtherArithmetic),
    ] {
        assert!(EngineFeature::ALL.iter().all(|&engine| verdict(feature, engine) == Verdict::Refused), "{feature:?}");
        let adapter = HandMade::on_llama(4).with(key, value);
        let features = AdapterConfig::refused_features(adapter.config.as_object().unwrap());
        assert_eq!(features, [feature]);
        assert_eq!(adapter.refusal(&policy("llama")).keys, [key]);
    }
    // Every pair of what is left is decided by the table.
    let mut head = HandMade::new(4);
    head.add("lm_head", 4, 32, 288);
    let mut embedding = HandMade::new(4);
    embedding.put("base_model.model.model.embed_tokens.lora_embedding_A", &[4, 288]);
    embedding.put("base_model.model.model.embed_tokens.lora_embedding_B", &[32, 4]);
    let adapters = [
        (AdapterFeature::Linear, HandMade::on_llama(4)),
        (AdapterFeature::Head, head),
        (AdapterFeature::Embedding, embedding),
    ];
    for engine in EngineFeature::ALL {
        let policy = AdapterPolicy { features: vec![engine], ..policy("llama") };
        for (feature, adapter) in &adapters {
            let supported = verdict(*feature, engine) == Verdict::Supported;
            assert_eq!(adapter.load(&policy).is_ok(), supported, "{feature:?} and {engine:?}");
        }
    }
    assert_eq!(verdict(AdapterFeature::Linear, EngineFeature::SpeculativeDecoding), Verdict::Refused);
    assert_eq!(verdict(AdapterFeature::Linear, EngineFeature::DequantizedBase), Verdict::Supported);
}

#[test]
fn targets_without_tensors_give_one_warning() {
    let policy = policy("llama");
    let warnings = |adapter: &HandMade| adapter.load(&policy).unwrap().report.warnings;
    let on_llama = || HandMade::on_llama(4);
    for complete in [
        json!(["q_proj", "v_proj"]),
        json!(["self_attn.q_proj", "model.layers.1.self_attn.v_proj"]),
        // Not of this base, a pattern, and what a fused module is called elsewhere.
        json!(["q_proj", "v_proj", "qkv_proj", "vision_tower.q_proj", "proj", "roj"]),
        json!(".*(q|k|v)_proj"),
        json!("all-linear"),
        json!(null),
        json!([]),
    ] {
        assert_eq!(warnings(&on_llama().with("target_modules", complete.clone())), Vec::<String>::new(), "{complete}");
    }
    let one = warnings(&on_llama().with("target_modules", json!(["q_proj", "k_proj", "v_proj", "k_proj"])));
    assert_eq!(one.len(), 1, "{one:?}");
    assert!(one[0].starts_with("`target_modules` lists `k_proj` and the file has no tensors for it:"), "{one:?}");
    let dotted: Vec<String> = ["q_proj", "k_proj", "v_proj", "o_proj"]
        .iter()
        .flat_map(|name| (0..2).map(move |layer| format!("model.layers.{layer}.self_attn.{name}")))
        .chain(["lm_head", "embed_tokens", "model.layers.7.self_attn.q_proj"].map(str::to_owned))
        .collect();
    let many = warnings(&on_llama().with("target_modules", json!(dotted)));
    assert_eq!(many.len(), 1, "{many:?}");
    assert!(many[0].contains("`embed_tokens`, `lm_head`, ") && many[0].contains(" and 1 more and "), "{many:?}");
    assert!(!many[0].contains("layers.7"), "{many:?}");
    // From disk too, and nothing is refused.
    let half = on_llama().with("target_modules", json!(["down_proj", "q_proj"]));
    assert_eq!(half.load_from_disk(&policy).unwrap().report.warnings.len(), 1);
}
