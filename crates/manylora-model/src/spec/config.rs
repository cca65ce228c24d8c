//! Typed, bounded access to the keys of a configuration file: every refusal names the key, its value and the file.

use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::ModelError;

/// One JSON object of a configuration, with what its keys are called in messages.
#[derive(Clone, Copy)]
pub(super) struct Config<'a> {
    path: &'a Path,
    prefix: &'static str,
    map: &'a Map<String, Value>,
}

impl<'a> Config<'a> {
    /// The whole file.
    pub(super) fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { path, prefix: "", map }
    }

    /// A nested object, if it is there; `null` and `{}` count as absent.
    pub(super) fn object(&self, key: &'static str, prefix: &'static str) -> Result<Option<Self>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(map)) if map.is_empty() => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { path: self.path, prefix, map })),
            Some(value) => Err(self.wrong(key, value, "an object is needed")),
        }
    }

    /// A key's value; `null` counts as absent.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// The names of the keys.
    pub(super) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    /// An error about the file.
    pub(super) fn damaged(&self, message: String) -> ModelError {
        ModelError::Malformed { path: self.path.to_path_buf(), message }
    }

    /// An error about one value.
    pub(super) fn wrong(&self, key: &str, value: &Value, needed: &str) -> ModelError {
        let mut text = value.to_string();
        if text.len() > 200 {
            text = format!("{}...", text.chars().take(200).collect::<String>());
        }
        self.damaged(format!("`{}{key}` is `{text}`; {needed}", self.prefix))
    }

    fn missing(&self, key: &str) -> ModelError {
        self.damaged(format!("`{}{key}` is missing", self.prefix))
    }

    /// A whole number within bounds.
    pub(super) fn optional_size(&self, key: &str, bounds: RangeInclusive<usize>) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let whole = value.as_u64().or_else(|| {
            // Some tools write sizes as floats.
            value.as_f64().filter(|number| number.fract() == 0.0 && (0.0..9e15).contains(number)).map(|it| it as u64)
        });
        match whole.and_then(|size| usize::try_from(size).ok()).filter(|size| bounds.contains(size)) {
            Some(size) => Ok(Some(size)),
            None => Err(self.wrong(
                key,
                value,
                &format!("a whole number from {} to {} is needed", bounds.start(), bounds.end()),
            )),
        }
    }

    /// A whole number within bounds that must be there.
    pub(super) fn size(&self, key: &str, bounds: RangeInclusive<usize>) -> Result<usize, ModelError> {
        self.optional_size(key, bounds)?.ok_or_else(|| self.missing(key))
    }

    /// A finite number for which `holds`; `needed` says what that is.
    pub(super) fn optional_number(
        &self,
        key: &str,
        needed: &str,
        holds: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_f64().filter(|number| number.is_finite() && holds(*number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(key, value, needed)),
        }
    }

    /// A finite number that must be there.
    pub(super) fn number(&self, key: &str, needed: &str, holds: impl Fn(f64) -> bool) -> Result<f64, ModelError> {
        self.optional_number(key, needed, holds)?.ok_or_else(|| self.missing(key))
    }

    /// true or false.
    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.value(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.wrong(key, value, "true or false is needed")),
        }
    }

    /// A string.
    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.wrong(key, value, "a string is needed")),
        }
    }

    /// A list of strings.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        value
            .as_array()
            .and_then(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>())
            .map(Some)
            .ok_or_else(|| self.wrong(key, value, "a list of strings is needed"))
    }
}
