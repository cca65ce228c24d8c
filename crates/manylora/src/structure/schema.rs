//! JSON Schemas as they are before they are compiled: what their words mean here, and what they say without meaning anything.

use serde_json::Value;

/// Formats of strings that are held to.
const FORMATS: [&str; 11] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];

/// Does something to a schema and to all within it; what is no schema, such as constants, is not touched.
fn each(schema: &mut Value, change: &mut impl FnMut(&mut serde_json::Map<String, Value>)) {
    let Value::Object(schema) = schema else { return };
    change(schema);
    for (keyword, value) in schema.iter_mut() {
        match (keyword.as_str(), value) {
            (
                "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas",
                Value::Object(named),
            ) => {
                for one in named.values_mut() {
                    each(one, change);
                }
            }
            ("allOf" | "anyOf" | "oneOf" | "prefixItems" | "items", Value::Array(schemas)) => {
                for one in schemas.iter_mut() {
                    each(one, change);
                }
            }
            (
                "items" | "additionalProperties" | "additionalItems" | "not" | "contains" | "if" | "then" | "else",
                one,
            ) => {
                each(one, change);
            }
            _ => {}
        }
    }
}

/// Objects of a schema have only the properties that it names, where it does not say.
pub(super) fn close_objects(schema: &mut Value) {
    each(schema, &mut |schema| {
        if (schema.contains_key("properties") || schema.get("type").is_some_and(|kind| kind == "object"))
            && !schema.contains_key("additionalProperties")
            && !schema.contains_key("patternProperties")
        {
            schema.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
    });
}

/// Leaves out what says nothing: formats that nobody knows, which JSON Schema has as notes to the reader, and that items may
/// be the same.
pub(super) fn drop_notes(schema: &mut Value) {
    each(schema, &mut |schema| {
        if let Some(Value::String(format)) = schema.get("format")
            && !FORMATS.contains(&format.as_str())
        {
            tracing::debug!("the format `{format}` of a JSON Schema is not held to");
            schema.remove("format");
        }
        if schema.get("uniqueItems") == Some(&Value::Bool(false)) {
            schema.remove("uniqueItems");
        }
    });
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_are_closed_where_the_schema_does_not_say() {
        let mut schema = json!({
            "properties": {"type": {"type": "string"}, "a": {"type": "object"}, "b": {"properties": {}, "additionalProperties": true}},
            "anyOf": [{"properties": {}}],
            "items": {"type": "object", "patternProperties": {"^x": {"type": "object"}}},
        });
        close_objects(&mut schema);
        assert_eq!(schema["additionalProperties"], false);
        assert_eq!(schema["properties"]["a"]["additionalProperties"], false);
        assert_eq!(schema["properties"]["b"]["additionalProperties"], true);
        assert!(schema["properties"].get("additionalProperties").is_none());
        assert_eq!(schema["anyOf"][0]["additionalProperties"], false);
        assert!(schema["items"].get("additionalProperties").is_none());
        assert_eq!(schema["items"]["patternProperties"]["^x"]["additionalProperties"], false);
    }

    #[test]
    fn what_says_nothing_is_dropped_where_it_is_a_keyword() {
        let mut schema = json!({
            "properties": {"format": {"format": "binary"}, "a": {"format": "date"}, "b": {"uniqueItems": false}},
            "const": {"format": "binary"},
        });
        drop_notes(&mut schema);
        let properties = json!({"format": {}, "a": {"format": "date"}, "b": {}});
        assert_eq!(schema, json!({"properties": properties, "const": {"format": "binary"}}));
    }
}
