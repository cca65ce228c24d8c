//! `adapter_config.json`: written by every PEFT since 2023, and by others.

use serde_json::{Map, Value};

use super::combinations::AdapterFeature;
use super::fault::{Fault, listed};
use super::features::{Objection, is_active, objections, python, unknown_keys};
use super::policy::MAX_RANK;
use super::report::LoadReport;
use super::scaling::{Pattern, Scaling};
use crate::error::AdapterRefusal;

/// What of a configuration decides how an adapter is applied.
#[derive(Clone, Debug)]
pub struct AdapterConfig {
    /// Ranks and scales.
    pub scaling: Scaling,
    /// `base_model_name_or_path`.
    pub base_model: Option<String>,
    /// `target_modules` where it is a list. The tensors decide what is adapted; this says what was meant to be.
    pub target_modules: Vec<String>,
    /// `ensure_weight_tying`: the head's delta is the transpose of the embedding's, on a tied base.
    pub ties_head_to_embedding: bool,
    /// Things a user should know.
    pub warnings: Vec<String>,
}

impl AdapterConfig {
    /// The configuration in the text of an `adapter_config.json`, whatever base it is for.
    pub fn from_json(text: &[u8], max_rank: usize) -> Result<Self, AdapterRefusal> {
        Self::parse(text, max_rank).map_err(|fault| fault.into_refusal(LoadReport::default()))
    }

    /// Reads a configuration and refuses what cannot be applied, all objections at once.
    pub(super) fn parse(text: &[u8], max_rank: usize) -> Result<Self, Fault> {
        let (config, fault) = Self::parse_with_fault(text, max_rank)?;
        fault.map_or(Ok(config), Err)
    }

    /// As [`Self::parse`], from JSON in memory.
    pub(super) fn from_value(value: &Value, max_rank: usize) -> Result<Self, Fault> {
        let (config, fault) = Self::read(value, max_rank)?;
        fault.map_or(Ok(config), Err)
    }

    /// As [`Self::parse`], with the fault beside what could be read, where that is enough to look at the tensors.
    pub(super) fn parse_with_fault(text: &[u8], max_rank: usize) -> Result<(Self, Option<Fault>), Fault> {
        let value: Value = serde_json::from_slice(text).map_err(|error| {
            Fault::invalid(format!("`adapter_config.json` is not JSON: {error}")).key("adapter_config.json")
        })?;
        Self::read(&value, max_rank)
    }

    fn read(value: &Value, max_rank: usize) -> Result<(Self, Option<Fault>), Fault> {
        let Value::Object(config) = value else {
            return Err(Fault::invalid("`adapter_config.json` is not a JSON object"));
        };
        check_type(config)?;
        let missing: Vec<&str> =
            ["r", "lora_alpha", "target_modules"].into_iter().filter(|key| !config.contains_key(*key)).collect();
        if !missing.is_empty() {
            let reason = format!("Missing required configuration fields: {}", listed(&missing, missing.len()));
            return Err(Fault::invalid(reason).keys(missing));
        }

        let mut objections = objections(config);
        let scaling = read_scaling(config, max_rank, &mut objections)?;
        check_targets(config, &mut objections);
        let base_model = read_base_model(config, &mut objections);
        let ties_head_to_embedding = read_bool(config, "ensure_weight_tying", &mut objections);
        let fault = (!objections.is_empty())
            .then(|| Fault::several(objections.into_iter().map(|objection| (objection.key, objection.message))));
        let Some(scaling) = scaling else {
            return Err(fault.unwrap_or_else(|| Fault::invalid("`r` and `lora_alpha` could not be read")));
        };
        let target_modules = listed_targets(config);
        let warnings = warnings(config);
        Ok((Self { scaling, base_model, target_modules, ties_head_to_embedding, warnings }, fault))
    }

    /// Features of [`AdapterFeature`] that an active key of this configuration asks for; what [`super::inspect`]
    /// refuses by name is among them.
    pub fn refused_features(config: &Map<String, Value>) -> Vec<AdapterFeature> {
        objections(config).into_iter().filter_map(|objection| objection.feature).collect()
    }
}

/// Only LoRA is LoRA.
fn check_type(config: &Map<String, Value>) -> Result<(), Fault> {
    let refuse = |reason: String| Err(Fault::invalid(reason).key("peft_type"));
    match config.get("peft_type") {
        Some(Value::String(text)) if text.eq_ignore_ascii_case("LORA") => Ok(()),
        None => refuse("`adapter_config.json` has no `peft_type`; a LoRA adapter says \"LORA\" there".to_owned()),
        Some(other) => refuse(format!("`peft_type` is {}; only \"LORA\" adapters can be loaded", python(other))),
    }
}

fn object_to(objections: &mut Vec<Objection>, key: &str, message: String) {
    objections.push(Objection { key: key.to_owned(), message, feature: None });
}

fn read_bool(config: &Map<String, Value>, key: &str, objections: &mut Vec<Objection>) -> bool {
    match config.get(key).filter(|value| is_active(value)) {
        None => false,
        Some(Value::Bool(value)) => *value,
        Some(other) => {
            object_to(objections, key, format!("`{key}` must be true or false, got {}", python(other)));
            false
        }
    }
}

/// A positive integer that fits u32; floats, strings and booleans are not integers.
fn positive(value: &Value) -> Option<u32> {
    value.as_u64().filter(|&rank| rank > 0).map(|rank| u32::try_from(rank).unwrap_or(u32::MAX))
}

fn finite(value: &Value) -> Option<f64> {
    value.as_f64().filter(|alpha| (*alpha as f32).is_finite())
}

fn read_scaling(
    config: &Map<String, Value>,
    max_rank: usize,
    objections: &mut Vec<Objection>,
) -> Result<Option<Scaling>, Fault> {
    let rank = positive(&config["r"]);
    if rank.is_none() {
        let message = format!("LoRA rank `r` must be a positive integer, got {}", python(&config["r"]));
        object_to(objections, "r", message);
    }
    let alpha = finite(&config["lora_alpha"]);
    if alpha.is_none() {
        let message = format!("`lora_alpha` must be a finite number, got {}", python(&config["lora_alpha"]));
        object_to(objections, "lora_alpha", message);
    }
    let ranks = read_pattern(config, "rank_pattern", objections, |key, value| {
        positive(value).ok_or_else(|| {
            format!("LoRA rank for `{key}` in `rank_pattern` must be a positive integer, got {}", python(value))
        })
    });
    let alphas = read_pattern(config, "alpha_pattern", objections, |key, value| {
        finite(value).ok_or_else(|| {
            format!("alpha for `{key}` in `alpha_pattern` must be a finite number, got {}", python(value))
        })
    });
    let rank_stabilized = read_bool(config, "use_rslora", objections);
    let (Some(rank), Some(alpha)) = (rank, alpha) else {
        return Ok(None);
    };
    let scaling = Scaling {
        rank,
        alpha,
        rank_stabilized,
        rank_pattern: Pattern::new("rank_pattern", ranks)?,
        alpha_pattern: Pattern::new("alpha_pattern", alphas)?,
    };
    let largest = scaling.max_rank() as usize;
    let key = if rank as usize == largest { "r" } else { "rank_pattern" };
    if largest > max_rank {
        let message = format!("LoRA rank {largest} is greater than max_lora_rank {max_rank}");
        object_to(objections, key, message);
    } else if largest > MAX_RANK {
        object_to(
            objections,
            key,
            format!("LoRA rank {largest} is greater than {MAX_RANK}, the largest that is computed"),
        );
    }
    Ok(Some(scaling))
}

fn read_pattern<T>(
    config: &Map<String, Value>,
    field: &str,
    objections: &mut Vec<Objection>,
    read: impl Fn(&str, &Value) -> Result<T, String>,
) -> Vec<(String, T)> {
    let mut entries = Vec::new();
    match config.get(field).filter(|value| is_active(value)) {
        None => {}
        Some(Value::Object(map)) => {
            for (key, value) in map {
                match read(key, value) {
                    Ok(value) => entries.push((key.clone(), value)),
                    Err(message) => object_to(objections, field, message),
                }
            }
        }
        Some(other) => object_to(objections, field, format!("`{field}` must be an object, got {}", python(other))),
    }
    entries
}

fn listed_targets(config: &Map<String, Value>) -> Vec<String> {
    let entries = config["target_modules"].as_array().map(Vec::as_slice).unwrap_or_default();
    entries.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// The content of `target_modules` does not decide (the tensors do), but it must be one of the forms there are.
fn check_targets(config: &Map<String, Value>, objections: &mut Vec<Objection>) {
    let fine = match &config["target_modules"] {
        Value::Null | Value::String(_) => true,
        Value::Array(items) => items.iter().all(Value::is_string),
        _ => false,
    };
    if !fine {
        let message = format!(
            "`target_modules` must be a list of names, a regular expression or \"all-linear\", got {}",
            python(&config["target_modules"])
        );
        object_to(objections, "target_modules", message);
    }
}

fn read_base_model(config: &Map<String, Value>, objections: &mut Vec<Objection>) -> Option<String> {
    match config.get("base_model_name_or_path").filter(|value| is_active(value))? {
        Value::String(name) => Some(name.clone()),
        other => {
            let message = format!("`base_model_name_or_path` must be a string, got {}", python(other));
            object_to(objections, "base_model_name_or_path", message);
            None
        }
    }
}

fn warnings(config: &Map<String, Value>) -> Vec<String> {
    let mut warnings = Vec::new();
    let unknown = unknown_keys(config);
    if !unknown.is_empty() {
        warnings.push(format!(
            "unknown configuration keys were ignored: {}; written by a newer PEFT?",
            listed(&unknown, unknown.len())
        ));
    }
    if config.get("fan_in_fan_out").is_some_and(is_active) {
        warnings.push("`fan_in_fan_out` was ignored: this base has ordinary linear layers only".to_owned());
    }
    if config.get("lora_alpha").and_then(Value::as_f64) == Some(0.0) {
        warnings.push("`lora_alpha` is 0: modules without an alpha of their own stay as the base has them".to_owned());
    }
    warnings
}
