//! The configuration keys that change what an adapter means, and what is said when one of them is active.
//!
//! Messages contain the phrases that vLLM uses for the same refusals, because people search for them.

use serde_json::{Map, Value};

use super::combinations::AdapterFeature;

/// Keys that describe training, bookkeeping, or are read elsewhere in this module's neighbours.
pub(super) const NEUTRAL: &[&str] = &[
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "merge_weights",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
];

/// One key that changes the arithmetic.
struct ChangingKey {
    name: &'static str,
    feature: AdapterFeature,
    message: &'static str,
}

const fn changing(name: &'static str, feature: AdapterFeature, message: &'static str) -> ChangingKey {
    ChangingKey { name, feature, message }
}

const CHANGING: &[ChangingKey] = &[
    changing("use_dora", AdapterFeature::Dora, "ManyLoRA does not yet support DoRA; merge it or train it without DoRA"),
    changing("lora_bias", AdapterFeature::Bias, "ManyLoRA does not support LoRA bias (lora_bias)"),
    changing(
        "trainable_token_indices",
        AdapterFeature::TokenRows,
        "ManyLoRA does not support trainable tokens; the listed embedding rows belong to a changed base",
    ),
    changing(
        "alora_invocation_tokens",
        AdapterFeature::Activated,
        "ManyLoRA does not support Activated LoRA (aLoRA) yet",
    ),
    changing(
        "alora_invocation_string",
        AdapterFeature::Activated,
        "ManyLoRA does not support Activated LoRA (aLoRA) yet",
    ),
    changing("invocation_string", AdapterFeature::Activated, "ManyLoRA does not support Activated LoRA (aLoRA) yet"),
    changing("layer_replication", AdapterFeature::LayerReplication, "ManyLoRA does not support layer_replication"),
    changing("use_qalora", AdapterFeature::OtherArithmetic, "ManyLoRA does not support QALoRA"),
    changing("use_bdlora", AdapterFeature::OtherArithmetic, "ManyLoRA does not support block-diagonal LoRA (BD-LoRA)"),
    changing(
        "target_parameters",
        AdapterFeature::Experts,
        "ManyLoRA does not support target_parameters (LoRA on bare parameters such as expert tensors)",
    ),
    changing("arrow_config", AdapterFeature::OtherArithmetic, "ManyLoRA does not support Arrow routing"),
    changing("kasa_config", AdapterFeature::OtherArithmetic, "ManyLoRA does not support KaSA"),
    changing("velora_config", AdapterFeature::OtherArithmetic, "ManyLoRA does not support VeLoRA"),
    changing("monteclora_config", AdapterFeature::OtherArithmetic, "ManyLoRA does not support MonteCLoRA"),
    changing("megatron_config", AdapterFeature::OtherArithmetic, "ManyLoRA does not support Megatron layouts"),
    changing("use_mora", AdapterFeature::OtherArithmetic, "ManyLoRA does not support MoRA"),
    changing(
        "enable_lora",
        AdapterFeature::OtherArithmetic,
        "ManyLoRA does not support enable_lora (LoRA on parts of a merged linear)",
    ),
    changing("loftq_config", AdapterFeature::MutatedBase, "it was trained on a base changed by LoftQ"),
    changing("corda_config", AdapterFeature::MutatedBase, "it was trained on a base changed by CorDA"),
    changing("lora_ga_config", AdapterFeature::MutatedBase, "it was trained on a base changed by LoRA-GA"),
];

/// Initializations that leave the base as it is.
const PLAIN_INITIALIZATIONS: &[&str] = &["gaussian", "eva", "orthogonal", "mica"];

/// One reason to refuse a configuration.
#[derive(Debug)]
pub(super) struct Objection {
    pub(super) key: String,
    pub(super) message: String,
    pub(super) feature: Option<AdapterFeature>,
}

/// Whether a value says anything: null, false and empty values of any key do not.
pub(super) fn is_active(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(map) => !map.is_empty(),
        Value::Bool(true) | Value::Number(_) => true,
    }
}

/// Every active key that changes the arithmetic.
pub(super) fn objections(config: &Map<String, Value>) -> Vec<Objection> {
    let mut found = Vec::new();
    let mut object = |key: &str, message: String, feature: AdapterFeature| {
        found.push(Objection { key: key.to_owned(), message, feature: Some(feature) });
    };
    for key in CHANGING {
        if config.get(key.name).is_some_and(is_active) {
            object(key.name, key.message.to_owned(), key.feature);
        }
    }
    if let Some(value) = config.get("modules_to_save").filter(|value| is_active(value)) {
        let message = format!("Unsupported modules_to_save: {value}; whole matrices cannot be kept per adapter yet");
        object("modules_to_save", message, AdapterFeature::ModulesToSave);
    }
    if let Some(value) = config.get("bias").filter(|value| is_active(value) && value.as_str() != Some("none")) {
        let message = format!("Adapter bias is not supported: bias={}", python(value));
        object("bias", message, AdapterFeature::Bias);
    }
    if let Some(value) = config.get("init_lora_weights").filter(|value| is_active(value)) {
        let plain = match value {
            Value::Bool(_) => true,
            Value::String(text) => PLAIN_INITIALIZATIONS.contains(&text.to_lowercase().as_str()),
            _ => false,
        };
        if !plain {
            let message = format!(
                "ManyLoRA does not support init_lora_weights={}: an adapter that was started so assumes a changed base, \
                 or may; convert it to an ordinary LoRA first (PEFT: save_pretrained with \
                 path_initial_model_for_weight_conversion)",
                python(value)
            );
            object("init_lora_weights", message, AdapterFeature::MutatedBase);
        }
    }
    found
}

/// Active keys that are not known at all.
pub(super) fn unknown_keys(config: &Map<String, Value>) -> Vec<&str> {
    const OTHERS: &[&str] = &["bias", "fan_in_fan_out", "modules_to_save"];
    config
        .iter()
        .filter(|(key, value)| {
            let key = key.as_str();
            is_active(value)
                && !NEUTRAL.contains(&key)
                && !OTHERS.contains(&key)
                && !CHANGING.iter().any(|changing| changing.name == key)
        })
        .map(|(key, _)| key.as_str())
        .collect()
}

/// A value as Python prints it, so that messages read like the ones people know.
pub(super) fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::String(text) => format!("'{text}'"),
        other => other.to_string(),
    }
}
