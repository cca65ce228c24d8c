//! Parts of grammars in Lark's syntax, for those who put grammars together.

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
