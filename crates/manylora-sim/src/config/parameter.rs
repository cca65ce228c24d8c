//! Parameters by name: where one lies in a configuration, and what else it could be called.

use serde_json::{Map, Value};

use crate::error::SimError;

/// A table whose keys are parameters, and no value of one.
fn table(value: &Value) -> Option<&Map<String, Value>> {
    value.as_object().filter(|map| !map.is_empty())
}

/// Paths of everything that is no table.
pub(super) fn leaves(whole: &Value) -> Vec<String> {
    fn walk(value: &Value, path: &str, found: &mut Vec<String>) {
        let Some(map) = table(value) else { return found.push(path.to_owned()) };
        for (key, inner) in map {
            walk(inner, &if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, found);
        }
    }
    let mut found = Vec::new();
    walk(whole, "", &mut found);
    found
}

/// The path that a name stands for: a whole path, or the end of just one.
pub(super) fn find(whole: &Value, name: &str) -> Result<String, SimError> {
    let all = leaves(whole);
    if at(whole, name).is_some() {
        return Ok(name.to_owned());
    }
    let ending = format!(".{name}");
    let found: Vec<&String> = all.iter().filter(|path| path.ends_with(&ending)).collect();
    match found[..] {
        [one] => Ok(one.clone()),
        [] => {
            let known = all.join(", ");
            Err(SimError::field("parameter", name, format!("there is none of this name here; there are {known}")))
        }
        _ => {
            let found = found.iter().map(|path| path.as_str()).collect::<Vec<_>>().join(" or ");
            Err(SimError::field("parameter", name, format!("it could be {found}; give the whole path")))
        }
    }
}

/// What lies at a path, list places as `[0]` or `.0` included.
pub(super) fn at<'a>(whole: &'a Value, path: &str) -> Option<&'a Value> {
    let path = path.replace('[', ".").replace(']', "");
    path.split('.').filter(|part| !part.is_empty()).try_fold(whole, |value, part| match value {
        Value::Array(list) => list.get(part.parse::<usize>().ok()?),
        value => value.get(part),
    })
}

/// Puts a value at a path that is there.
pub(super) fn put(whole: &mut Value, path: &str, value: Value) {
    let place = path.split('.').try_fold(whole, |value, part| value.get_mut(part));
    if let Some(place) = place {
        *place = value;
    }
}

/// A value for people, not too long.
pub(super) fn shown(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    if text.chars().count() <= 60 { text } else { text.chars().take(57).chain("...".chars()).collect() }
}
