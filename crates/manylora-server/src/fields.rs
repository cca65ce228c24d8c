//! The fields of a request's JSON object, taken one by one: an error names the field, what it should be, and what it is.
//!
//! What is left over when all known fields were taken is what the client sent beyond them: servers of this kind let
//! unknown fields pass.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::json::Ids;
use crate::room::Room;

/// An object whose fields are being read.
#[derive(Debug)]
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// Fields that are token ids and nothing else.
    ids: Vec<(String, Ids)>,
    /// The memory that the body was given.
    room: Room,
    /// What errors put before a field's name: where the object is.
    path: String,
}

/// A value as an error shows it: short.
pub(crate) fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 80 { text } else { format!("{}...", text.chars().take(80).collect::<String>()) }
}

impl Drop for Fields {
    /// What is left of a large body takes long to be freed, and keeps its room until it is.
    fn drop(&mut self) {
        if !self.is_large() {
            return;
        }
        let rest = (std::mem::take(&mut self.map), std::mem::take(&mut self.ids), self.take_room());
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(move || drop(rest));
        }
    }
}

fn wrong(name: &str, expected: &str, value: &Value) -> ApiError {
    ApiError::bad_request(format!("`{name}` must be {expected}, got `{}`", shown(value))).about(name)
}

/// Whether a value says nothing: clients send such for what they do not use.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

impl Fields {
    pub(crate) fn new(map: Map<String, Value>) -> Self {
        Self { map, ids: Vec::new(), room: Room::default(), path: String::new() }
    }

    /// Those of a body.
    pub(crate) fn of_body(map: Map<String, Value>, ids: Vec<(String, Ids)>, room: Room) -> Self {
        Self { map, ids, room, path: String::new() }
    }

    /// Whether there is so much that it is not read on the threads that serve.
    pub(crate) fn is_large(&self) -> bool {
        self.room.is_any()
    }

    /// The memory that the body was given: to be kept as long as what is made of it.
    pub(crate) fn take_room(&mut self) -> Room {
        std::mem::take(&mut self.room)
    }

    /// Those of an object that is a field itself.
    pub(crate) fn within(place: &str, map: Map<String, Value>) -> Self {
        Self { map, ids: Vec::new(), room: Room::default(), path: format!("{place}.") }
    }

    /// A value that stays.
    pub(crate) fn peek(&self, name: &str) -> Option<&Value> {
        self.map.get(name)
    }

    /// The value as it is; None where it is absent or null.
    pub(crate) fn value(&mut self, name: &str) -> Option<Value> {
        #[cfg(test)]
        asked::note(name, asked::How::Read);
        self.map.swap_remove(name).filter(|value| !value.is_null())
    }

    /// Token ids of one prompt or of several, if the field is nothing else.
    pub(crate) fn ids(&mut self, name: &str) -> Option<Ids> {
        #[cfg(test)]
        asked::note(name, asked::How::Read);
        let at = self.ids.iter().position(|(field, _)| field == name)?;
        Some(self.ids.swap_remove(at).1)
    }

    fn typed<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(Value) -> Result<T, Value>,
    ) -> Result<Option<T>, ApiError> {
        let value = self.value(name).or_else(|| self.ids(name).map(|ids| ids.beginning()));
        let Some(value) = value else { return Ok(None) };
        read(value).map(Some).map_err(|value| wrong(&format!("{}{name}", self.path), expected, &value))
    }

    /// One that is small, so that looking at it is enough.
    fn seen<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        self.typed(name, expected, |value| read(&value).ok_or(value))
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.typed(name, "a string", |value| match value {
            Value::String(text) => Ok(text),
            other => Err(other),
        })
    }

    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.seen(name, "true or false", Value::as_bool)
    }

    pub(crate) fn number(&mut self, name: &str) -> Result<Option<f64>, ApiError> {
        self.seen(name, "a number", Value::as_f64)
    }

    pub(crate) fn integer(&mut self, name: &str) -> Result<Option<i64>, ApiError> {
        self.seen(name, "an integer", integer)
    }

    /// A number of things.
    pub(crate) fn count(&mut self, name: &str) -> Result<Option<usize>, ApiError> {
        self.seen(name, "an integer of 0 or more", |value| usize::try_from(integer(value)?).ok())
    }

    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        self.typed(name, "an object", |value| match value {
            Value::Object(map) => Ok(map),
            other => Err(other),
        })
    }

    pub(crate) fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        self.typed(name, "an array", |value| match value {
            Value::Array(items) => Ok(items),
            other => Err(other),
        })
    }

    /// One string, or several.
    pub(crate) fn texts(&mut self, name: &str) -> Result<Option<Vec<String>>, ApiError> {
        self.typed(name, "a string or an array of strings", |value| match value {
            Value::String(text) => Ok(vec![text]),
            Value::Array(items) if items.iter().all(Value::is_string) => {
                let text = |item| if let Value::String(text) = item { Some(text) } else { None };
                Ok(items.into_iter().filter_map(text).collect())
            }
            other => Err(other),
        })
    }

    /// Token ids.
    pub(crate) fn tokens(&mut self, name: &str) -> Result<Option<Vec<u32>>, ApiError> {
        match self.ids(name) {
            Some(Ids::One(ids)) => Ok(Some(ids)),
            Some(ids) => Err(wrong(&format!("{}{name}", self.path), "an array of token ids", &ids.beginning())),
            None => self.seen(name, "an array of token ids", tokens),
        }
    }

    /// Numbers by token id, whose JSON keys are strings.
    pub(crate) fn by_token(&mut self, name: &str) -> Result<Option<BTreeMap<u32, f32>>, ApiError> {
        self.seen(name, "an object of token ids and numbers", |value| {
            let pair = |(key, value): (&String, &Value)| Some((key.trim().parse().ok()?, value.as_f64()? as f32));
            value.as_object()?.iter().map(pair).collect()
        })
    }

    /// Refuses what changes results and is not there yet; empty values pass.
    pub(crate) fn refuse(&mut self, name: &str, reason: &str) -> Result<(), ApiError> {
        #[cfg(test)]
        asked::note(name, asked::How::Refused);
        match self.map.swap_remove(name) {
            Some(value) if !is_empty(&value) => {
                let name = format!("{}{name}", self.path);
                Err(ApiError::bad_request(format!("`{name}` is not supported: {reason}")).about(name))
            }
            _ => Ok(()),
        }
    }
}

/// A whole number, also where a client writes it with a fraction of 0.
fn integer(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let number = value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < 9e15)?;
        Some(number as i64)
    })
}

/// Token ids of an array of integers.
pub(crate) fn tokens(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|item| u32::try_from(item.as_u64()?).ok()).collect()
}

/// Names of fields that were asked for on this thread, for comparing them with those that are described.
#[cfg(test)]
pub(crate) mod asked {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    /// What becomes of a field.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum How {
        Read,
        /// Unless it is empty.
        Refused,
    }

    thread_local! {
        static NAMES: RefCell<BTreeMap<String, How>> = const { RefCell::new(BTreeMap::new()) };
    }

    pub(super) fn note(name: &str, how: How) {
        NAMES.with_borrow_mut(|names| names.insert(name.to_owned(), how));
    }

    pub(crate) fn forget() {
        NAMES.take();
    }

    pub(crate) fn names() -> BTreeMap<String, How> {
        NAMES.with_borrow(Clone::clone)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Value) -> Fields {
        match value {
            Value::Object(map) => Fields::new(map),
            other => panic!("{other} is no object"),
        }
    }

    #[test]
    fn null_is_absent_and_wrong_kinds_are_named() {
        let mut all = fields(json!({"a": null, "b": "x", "c": 1.5, "d": 3.0, "e": -1, "f": [1, -2]}));
        assert_eq!(all.text("a").expect("null"), None);
        let error = all.number("b").expect_err("a string").to_json();
        assert_eq!(error["error"]["message"], "`b` must be a number, got `\"x\"`");
        assert_eq!((&error["error"]["param"], &error["error"]["code"]), (&json!("b"), &json!(400)));
        assert!(all.integer("c").is_err());
        assert_eq!(all.integer("d").expect("a whole number"), Some(3));
        assert!(all.count("e").is_err() && all.tokens("f").is_err());
    }

    #[test]
    fn only_what_says_something_is_refused() {
        let mut all = fields(json!({"a": false, "b": [], "c": "", "d": true, "e": {"x": 1}}));
        for name in ["a", "b", "c", "missing"] {
            assert!(all.refuse(name, "no").is_ok(), "{name}");
        }
        for name in ["d", "e"] {
            assert!(all.refuse(name, "no").is_err(), "{name}");
        }
    }

    #[test]
    fn biases_have_token_ids_for_keys() {
        let mut all = fields(json!({"a": {"7": 1, " 8 ": -2.5}, "b": {"x": 1}}));
        assert_eq!(all.by_token("a").expect("good"), Some(BTreeMap::from([(7, 1.0), (8, -2.5)])));
        assert!(all.by_token("b").is_err());
    }
}
