//! `config.json`: every spelling that is understood, and an error that names the value for every one that is not.

#![allow(
    clippy::needless_pass_by_value,
    clippy::unwrap_used,
    reason = "a test: literals are passed, a panic is a failure"
)]

use std::path::Path;

use manylora_model::spec::config_object;
use manylora_model::{Family, ModelError, ModelSpec, RopeScaling};
use proptest::prelude::*;
use serde_json::{Value, json};

fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 288, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"
    })
}

fn with(mut config: Value, changes: Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn parse(config: &Value) -> Result<ModelSpec, ModelError> {
    ModelSpec::parse(&serde_json::to_vec(config).unwrap())
}

fn spec(changes: Value) -> ModelSpec {
    parse(&with(llama(), changes)).unwrap()
}

#[test]
fn defaults_of_a_plain_llama() {
    let spec = spec(json!({}));
    assert_eq!(spec.family, Family::Llama);
    assert_eq!((spec.head_dim, spec.kv_heads, spec.q_width(), spec.kv_width()), (8, 2, 32, 16));
    assert_eq!(spec.rope.theta, 10_000.0);
    assert_eq!(spec.rope.scaling, RopeScaling::Default);
    assert!(!spec.qkv_bias && !spec.o_bias && !spec.mlp_bias && !spec.qk_norm && !spec.tied);
    assert_eq!(spec.windows, [None, None]);
    assert_eq!(spec.checkpoint_dtype, "bfloat16");
    let mut config = llama();
    config.as_object_mut().unwrap().remove("num_key_value_heads");
    assert_eq!(parse(&config).unwrap().kv_heads, 4);
}

#[test]
fn biases_by_family() {
    let biased = spec(json!({"attention_bias": true, "mlp_bias": true}));
    assert!(biased.qkv_bias && biased.o_bias && biased.mlp_bias);
    let qwen2 = spec(json!({"architectures": ["Qwen2ForCausalLM"]}));
    assert!(qwen2.qkv_bias && !qwen2.o_bias && !qwen2.mlp_bias && !qwen2.qk_norm);
    let qwen3 = spec(json!({"architectures": ["Qwen3ForCausalLM"]}));
    assert!(!qwen3.qkv_bias && qwen3.qk_norm);
    assert_eq!(qwen3.head_dim, 128, "transformers' default of this class");
    assert_eq!(spec(json!({"architectures": ["Qwen3ForCausalLM"], "head_dim": 16})).head_dim, 16);
    assert!(!spec(json!({"architectures": ["MistralForCausalLM"], "sliding_window": null})).qkv_bias);
}

#[test]
fn sliding_windows_by_family() {
    let mistral = |window: Value| spec(with(json!({"architectures": ["MistralForCausalLM"]}), window)).windows;
    assert_eq!(mistral(json!({"sliding_window": 8})), [Some(8), Some(8)]);
    assert_eq!(mistral(json!({"sliding_window": null})), [None, None]);
    assert_eq!(mistral(json!({})), [Some(4096), Some(4096)], "transformers' default of this class");
    let qwen = |changes: Value| {
        spec(with(json!({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16}), changes)).windows
    };
    assert_eq!(qwen(json!({"use_sliding_window": false, "max_window_layers": 0})), [None, None]);
    assert_eq!(qwen(json!({"use_sliding_window": true, "max_window_layers": 1})), [None, Some(16)]);
    assert_eq!(qwen(json!({"use_sliding_window": true, "max_window_layers": 2})), [None, None]);
    assert_eq!(
        qwen(json!({"use_sliding_window": true, "layer_types": ["sliding_attention", "full_attention"]})),
        [Some(16), None]
    );
}

#[test]
fn rotary_spellings_old_and_new() {
    let old = spec(json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}));
    let new = spec(json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}}));
    assert_eq!(old, new);
    assert_eq!(old.rope.scaling, RopeScaling::Linear { factor: 4.0 });
    assert_eq!(old.max_position_embeddings, 2048, "the context grows by the factor");
    assert_eq!(spec(json!({"rope_scaling": {}})).rope.scaling, RopeScaling::Default);
    assert_eq!(spec(json!({"rope_scaling": {"rope_type": "default"}})).rope.scaling, RopeScaling::Default);

    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 128});
    assert_eq!(
        spec(json!({"rope_scaling": llama3})).rope.scaling,
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position: 128 }
    );
    assert_eq!(spec(json!({"rope_scaling": llama3})).max_position_embeddings, 512);
}

#[test]
fn yarn_attention_factor_as_transformers_computes_it() {
    let yarn = |changes: Value| {
        let base = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128});
        match spec(json!({"rope_parameters": with(base, changes)})).rope.scaling {
            RopeScaling::Yarn { attention_factor, beta_fast, beta_slow, truncate, original_max_position, .. } => {
                (attention_factor, beta_fast, beta_slow, truncate, original_max_position)
            }
            other => panic!("{other:?}"),
        }
    };
    let natural = 0.1 * 4f64.ln() + 1.0;
    assert_eq!(yarn(json!({})), (natural, 32.0, 1.0, true, 128));
    assert_eq!(yarn(json!({"attention_factor": 1.25, "truncate": false})), (1.25, 32.0, 1.0, false, 128));
    assert_eq!(yarn(json!({"beta_fast": 0, "beta_slow": 2})), (natural, 32.0, 2.0, true, 128));
    let both = (0.1 * 0.707 * 4f64.ln() + 1.0) / (0.1 * 1.5 * 4f64.ln() + 1.0);
    assert_eq!(yarn(json!({"mscale": 0.707, "mscale_all_dim": 1.5})).0, both);
    assert_eq!(yarn(json!({"mscale": 0.707})).0, natural, "mscale alone is not used");
    assert_eq!(yarn(json!({"original_max_position_embeddings": null})).4, 512);
    let parameters = json!({"rope_type": "yarn", "original_max_position_embeddings": 128});
    let spec = spec(json!({"rope_parameters": parameters}));
    assert!(matches!(spec.rope.scaling, RopeScaling::Yarn { factor: 4.0, .. }), "factor from the two contexts");
    assert_eq!(spec.max_position_embeddings, 512);
}

#[test]
fn errors_name_the_key_and_the_value() {
    let cases: Vec<(Value, &str)> = vec![
        (json!({"architectures": ["GPTNeoXForCausalLM"]}), "`GPTNeoXForCausalLM`"),
        (json!({"architectures": ["LlamaForSequenceClassification"]}), "supported are LlamaForCausalLM"),
        (json!({"architectures": [], "model_type": "gemma"}), "`gemma`"),
        (json!({"architectures": null, "model_type": null}), "neither `architectures` nor `model_type`"),
        (json!({"architectures": "LlamaForCausalLM"}), "a list of strings"),
        (json!({"vocab_size": 0}), "`vocab_size` is `0`"),
        (json!({"vocab_size": -3}), "`vocab_size` is `-3`"),
        (json!({"vocab_size": 1e30}), "`vocab_size` is `1e+30`"),
        (json!({"vocab_size": "many"}), "`vocab_size` is `\"many\"`"),
        (json!({"vocab_size": null}), "`vocab_size` is missing"),
        (json!({"hidden_size": 1u64 << 60}), "1152921504606846976"),
        (json!({"num_hidden_layers": 0}), "`num_hidden_layers` is `0`"),
        (json!({"num_hidden_layers": 1_000_000_000}), "`num_hidden_layers` is `1000000000`"),
        (json!({"num_attention_heads": 0}), "`num_attention_heads` is `0`"),
        (json!({"num_key_value_heads": 0}), "`num_key_value_heads` is `0`"),
        (json!({"num_key_value_heads": 3}), "not a multiple of `num_key_value_heads`, `3`"),
        (json!({"num_attention_heads": 6, "num_key_value_heads": 2}), "`hidden_size` is `32`, which is not a multiple"),
        (json!({"head_dim": 7}), "the head dimension is `7`"),
        (json!({"head_dim": 1_000_000}), "`head_dim` is `1000000`"),
        (json!({"hidden_size": 36}), "the head dimension is `9`"),
        (json!({"num_attention_heads": 65536, "num_key_value_heads": 1, "head_dim": 4096}), "their product"),
        (json!({"hidden_act": "gelu"}), "hidden_act `gelu`"),
        (json!({"rms_norm_eps": -1.0}), "`rms_norm_eps` is `-1.0`"),
        (json!({"rms_norm_eps": 1e-300, "rope_theta": 0.5}), "`rope_theta` is `0.5`"),
        (json!({"rope_theta": "big"}), "`rope_theta` is `\"big\"`"),
        (json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}), "rope type `dynamic` is not supported"),
        (json!({"rope_scaling": {"rope_type": "longrope"}}), "supported are default, linear, llama3 and yarn"),
        (json!({"rope_scaling": {"type": "linear"}}), "`rope_scaling.factor` is missing"),
        (json!({"rope_scaling": {"type": "linear", "factor": 0}}), "`rope_scaling.factor` is `0`"),
        (json!({"rope_scaling": [1]}), "`rope_scaling` is `[1]`"),
        (
            json!({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
                                    "original_max_position_embeddings": 64}}),
            "`high_freq_factor` is `4`",
        ),
        (
            json!({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
            "`rope_scaling.original_max_position_embeddings` is missing",
        ),
        (json!({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}), "`rope_parameters.factor` is `0.5`"),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}), "per layer type"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor `0.5`"),
        (json!({"max_position_embeddings": 0}), "`max_position_embeddings` is `0`"),
        (json!({"tie_word_embeddings": "yes"}), "`tie_word_embeddings` is `\"yes\"`"),
        (json!({"torch_dtype": "int8"}), "dtype `int8`"),
        (json!({"architectures": ["MistralForCausalLM"], "sliding_window": 0}), "`sliding_window` is `0`"),
        (
            json!({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}),
            "`layer_types` has `1` entries",
        ),
        (
            json!({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention", "linear_attention"]}),
            "layer type `linear_attention`",
        ),
        (
            json!({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]}),
            "there is no `sliding_window`",
        ),
        (
            json!({"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": null}),
            "`num_key_value_heads` is missing",
        ),
    ];
    for (changes, named) in cases {
        match parse(&with(llama(), changes.clone())) {
            Ok(_) => panic!("{changes} was accepted"),
            Err(error) => {
                let message = error.to_string();
                assert!(message.contains(named), "{changes}: `{message}` does not name {named}");
            }
        }
    }
    for text in ["", "{", "[]", "null", "\"llama\"", "{\"a\": 1}"] {
        assert!(matches!(ModelSpec::parse(text.as_bytes()), Err(ModelError::Malformed { .. })), "{text}");
    }
}

#[test]
fn tensors_of_a_specification() {
    let spec = spec(json!({"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": true}));
    let tensors = spec.tensors();
    let shape = |name: &str| tensors.iter().find(|tensor| tensor.name == name).map(|tensor| tensor.shape.clone());
    assert_eq!(shape("model.embed_tokens.weight"), Some(vec![288, 32]));
    assert_eq!(shape("model.layers.1.self_attn.q_proj.weight"), Some(vec![64, 32]));
    assert_eq!(shape("model.layers.1.self_attn.k_norm.weight"), Some(vec![16]));
    assert_eq!(shape("model.layers.0.mlp.down_proj.weight"), Some(vec![32, 64]));
    assert_eq!(shape("lm_head.weight"), None, "a tied head is the embedding");
    assert_eq!(tensors.len(), 2 + 2 * (2 + 2 + 7));
    assert_eq!(spec.parameters(), 288 * 32 + 32 + 2 * (32 * 2 + 16 * 2 + (64 + 32 + 32 + 64) * 32 + 3 * 64 * 32));
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0u64..5000).prop_map(Value::from),
        "[a-z_]{0,8}".prop_map(Value::from),
        prop::sample::select(vec!["yarn", "linear", "llama3", "default", "silu", "sliding_attention"])
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 8, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::vec((prop::sample::select(KEYS.to_vec()), inner), 0..6).prop_map(|pairs| Value::Object(
                pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
            )),
        ]
    })
}

const KEYS: [&str; 24] = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "type",
    "rope_type",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "sliding_window",
    "layer_types",
    "max_position_embeddings",
    "model_type",
];

proptest! {
    /// Whatever a configuration holds: an error or a specification whose derived numbers can be computed.
    #[test]
    fn no_configuration_panics(
        family in prop::sample::select(vec!["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]),
        changes in prop::collection::vec((prop::sample::select(KEYS.to_vec()), any_json()), 1..4),
    ) {
        let mut config = with(llama(), json!({"architectures": [family], "sliding_window": 8}));
        for (key, value) in changes {
            config[key] = value;
        }
        if let Ok(spec) = parse(&config) {
            prop_assert!(spec.heads.is_multiple_of(spec.kv_heads) && spec.head_dim.is_multiple_of(2));
            prop_assert_eq!(spec.windows.len(), spec.layers);
            prop_assert!(spec.parameters() > 0);
            let frequencies = manylora_model::decoder::rope::frequencies(&spec.rope, spec.head_dim);
            prop_assert!(frequencies.iter().all(|frequency| frequency.is_finite() && *frequency >= 0.0));
        }
    }

    #[test]
    fn no_text_panics(text in ".{0,200}") {
        let is_object = text.trim_start().starts_with(char::from(b'{'));
        prop_assert!(is_object || config_object(Path::new("config.json"), text.as_bytes()).is_err());
        let _ = ModelSpec::parse(text.as_bytes());
    }
}
