//! `generation_config.json`: end tokens and the sampling defaults that a model's authors chose.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::ModelError;

/// Special ids and sampling defaults of a checkpoint; None and empty mean that it does not say.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GenerationDefaults {
    /// Tokens that end a generation.
    pub eos: Vec<u32>,
    /// Token that starts a text.
    pub bos: Option<u32>,
    /// Padding token.
    pub pad: Option<u32>,
    /// Whether the authors sample by default; greedy when it says `false`.
    pub do_sample: Option<bool>,
    /// Sampling temperature.
    pub temperature: Option<f32>,
    /// Nucleus.
    pub top_p: Option<f32>,
    /// Number of candidates.
    pub top_k: Option<u32>,
    /// Least probability relative to the best.
    pub min_p: Option<f32>,
    /// Repetition penalty.
    pub repetition_penalty: Option<f32>,
    /// Most new tokens.
    pub max_new_tokens: Option<u32>,
}

impl GenerationDefaults {
    /// Reads `generation_config.json` of a model folder, if there is one; special ids that it does not give fall back
    /// to `config.json`.
    pub fn read(folder: &Path, config: &Map<String, Value>) -> Result<Self, ModelError> {
        let path = folder.join("generation_config.json");
        let json = match std::fs::read(&path) {
            Ok(json) => json,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => b"{}".to_vec(),
            Err(source) => return Err(ModelError::Io { path, source }),
        };
        Self::parse(&path, &json, config)
    }

    /// The defaults in the text of a `generation_config.json`; `config` is the parsed `config.json`.
    pub fn parse(path: &Path, json: &[u8], config: &Map<String, Value>) -> Result<Self, ModelError> {
        let damaged = |message: String| ModelError::Malformed { path: path.to_path_buf(), message };
        let generation: Map<String, Value> = serde_json::from_slice(json)
            .map_err(|error| damaged(format!("{error}; it should be a JSON object (or be removed)")))?;
        let ids = |key: &str| -> Result<Vec<u32>, ModelError> {
            let from_generation = generation.get(key).filter(|value| !value.is_null());
            let (value, source) = match from_generation {
                Some(value) => (value, "generation_config.json"),
                None => match config.get(key).filter(|value| !value.is_null()) {
                    Some(value) => (value, "config.json"),
                    None => return Ok(Vec::new()),
                },
            };
            let list: &[Value] = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            // -1 is an old spelling of "none".
            list.iter()
                .filter(|id| id.as_i64() != Some(-1))
                .map(|id| {
                    id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
                        damaged(format!("`{key}` of {source} is `{value}`; a token id or a list of them is needed"))
                    })
                })
                .collect()
        };
        let number = |key: &str, holds: fn(f64) -> bool| -> Result<Option<f64>, ModelError> {
            match generation.get(key) {
                None | Some(Value::Null) => Ok(None),
                Some(value) => match value.as_f64().filter(|number| number.is_finite() && holds(*number)) {
                    Some(number) => Ok(Some(number)),
                    None => Err(damaged(format!("`{key}` is `{value}`, which is not a value it can have"))),
                },
            }
        };
        let whole = |key: &str| -> Result<Option<u32>, ModelError> {
            let limit = |number: f64| number >= 0.0 && number <= f64::from(u32::MAX) && number.fract() == 0.0;
            Ok(number(key, limit)?.map(|number| number as u32))
        };
        let do_sample = match generation.get("do_sample") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(value)) => Some(*value),
            Some(value) => return Err(damaged(format!("`do_sample` is `{value}`; true or false is needed"))),
        };
        let single = |key: &str| -> Result<Option<u32>, ModelError> { Ok(ids(key)?.first().copied()) };
        Ok(Self {
            eos: ids("eos_token_id")?,
            bos: single("bos_token_id")?,
            pad: single("pad_token_id")?,
            do_sample,
            temperature: number("temperature", |value| value >= 0.0)?.map(|value| value as f32),
            top_p: number("top_p", |value| value > 0.0 && value <= 1.0)?.map(|value| value as f32),
            top_k: whole("top_k")?,
            min_p: number("min_p", |value| (0.0..=1.0).contains(&value))?.map(|value| value as f32),
            repetition_penalty: number("repetition_penalty", |value| value > 0.0)?.map(|value| value as f32),
            max_new_tokens: whole("max_new_tokens")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(generation: &str, config: &str) -> Result<GenerationDefaults, ModelError> {
        let config: Map<String, Value> = serde_json::from_str(config).unwrap();
        GenerationDefaults::parse(Path::new("generation_config.json"), generation.as_bytes(), &config)
    }

    #[test]
    fn lists_and_single_ids_and_the_fallback_to_config() {
        let both = parse(
            r#"{"eos_token_id": [2, 7], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": true}"#,
            r#"{"eos_token_id": 5, "bos_token_id": 1, "pad_token_id": -1}"#,
        )
        .unwrap();
        assert_eq!(both.eos, [2, 7]);
        assert_eq!((both.bos, both.pad), (Some(1), None));
        assert_eq!((both.temperature, both.top_p, both.top_k), (Some(0.6), Some(0.9), Some(20)));
        assert_eq!(both.do_sample, Some(true));
        assert_eq!(parse("{}", r#"{"eos_token_id": 5}"#).unwrap().eos, [5]);
        assert_eq!(parse(r#"{"eos_token_id": null}"#, "{}").unwrap(), GenerationDefaults::default());
    }

    #[test]
    fn bad_values_are_named() {
        for (json, named) in [
            (r#"{"eos_token_id": "two"}"#, "`eos_token_id` of generation_config.json is `\"two\"`"),
            (r#"{"eos_token_id": [2, -7]}"#, "is `[2,-7]`"),
            (r#"{"eos_token_id": 4294967296}"#, "4294967296"),
            (r#"{"temperature": -1}"#, "`temperature` is `-1`"),
            (r#"{"top_p": 0}"#, "`top_p` is `0`"),
            (r#"{"top_k": 1.5}"#, "`top_k` is `1.5`"),
            (r#"{"do_sample": 1}"#, "`do_sample` is `1`"),
            ("[]", "JSON object"),
            ("{", "JSON object"),
        ] {
            let message = parse(json, "{}").unwrap_err().to_string();
            assert!(message.contains(named), "{json}: {message}");
        }
    }
}
