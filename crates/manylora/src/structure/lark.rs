//! Parts of grammars in Lark's syntax, for those who put grammars together.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

/// White space between the parts of JSON, unless a request says otherwise: bounded, because small models can be led to write
/// it without end.
pub(super) const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,40}";

/// A text that is to come as it is.
pub fn text(text: &str) -> String {
    let mut out = String::from("\"");
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            control if control < ' ' || control == '\u{7f}' => out.push_str(&code("\\u", control, "")),
            other => out.push(other),
        }
    }
    out.push('"');
    out
}

/// JSON of a schema; what is alone on its side of a rule.
pub fn json(schema: Map<String, Value>) -> String {
    format!("%json {}", with_options(schema, Some(WHITE_SPACE)))
}

/// A character by its number.
pub(super) fn code(before: &str, character: char, after: &str) -> String {
    format!("{before}{:04x}{after}", character as u32)
}

/// Adds how JSON is written to a schema: the white space between its parts, None = without any. What the schema says of it
/// itself counts more.
pub(super) fn with_options(mut schema: Map<String, Value>, white_space: Option<&str>) -> Value {
    let options = json!({
        "whitespace_flexible": white_space.is_some(), "whitespace_pattern": white_space, "coerce_one_of": true,
    });
    schema.entry("x-guidance").or_insert(options);
    let mut schema = Value::Object(schema);
    super::schema::drop_notes(&mut schema);
    schema
}

/// How many terminals stand in a chain in which each is part of the one before. (Names within texts count as names of
/// terminals that are defined elsewhere, so that it may be fewer.)
pub(super) fn chained_terminals(grammar: &str) -> usize {
    let mut parts: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut defined = None;
    for line in grammar.lines() {
        let mut body = line;
        if let Some((head, rest)) = line.split_once(':') {
            let name = head.split('.').next().unwrap_or_default().trim();
            if is_name(name) {
                defined = is_terminal(name).then_some(name);
                body = rest;
            }
        }
        if let Some(name) = defined {
            let names = body.split(|it: char| !is_of_name(it)).filter(|name| is_terminal(name));
            parts.entry(name).or_default().extend(names);
        }
    }
    // Depth first, by hand: the chains may be as long as the grammar. A terminal that is part of itself counts once.
    let mut depths: HashMap<&str, usize> = HashMap::new();
    for &first in parts.keys() {
        let mut path = vec![first];
        while let Some(&name) = path.last() {
            let within = parts.get(name).map_or(&[][..], Vec::as_slice);
            if depths.insert(name, depths.get(name).copied().unwrap_or(0)).is_none() {
                path.extend(within.iter().filter(|part| parts.contains_key(*part) && !depths.contains_key(*part)));
                continue;
            }
            let deepest = within.iter().filter_map(|part| depths.get(part)).max();
            if depths.get(name) == Some(&0) {
                depths.insert(name, 1 + deepest.copied().unwrap_or(0));
            }
            path.pop();
        }
    }
    depths.into_values().max().unwrap_or(0)
}

fn is_of_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '_'
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(is_of_name)
}

fn is_terminal(name: &str) -> bool {
    name.trim_start_matches('_').starts_with(|first: char| first.is_ascii_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_of_terminals_are_measured() {
        for (grammar, depth) in [
            ("start: a\na: \"A\"", 0),
            ("start: A\nA: \"a\"", 1),
            ("start: A\nA.3: B | C\n  | D\nD: B\nB: C C\nC: \"c\"", 4),
            ("start: A\nA: B\nB: A", 2),
            ("A: A", 1),
        ] {
            assert_eq!(chained_terminals(grammar), depth, "{grammar}");
        }
        let long: Vec<String> = (0..20_000).map(|index| format!("T{index}: T{}\n", index + 1)).collect();
        assert_eq!(chained_terminals(&long.concat()), 20_000);
    }
}
