//! What the output must be, in all the ways that requests say it: OpenAI's `response_format`, vLLM's `structured_outputs`, and
//! the `guided_*` fields that it had before.

use std::sync::Once;

use manylora::StructuredOutputs;
use serde_json::{Map, Value};

use crate::error::{ApiError, STRUCTURED_OUTPUTS};
use crate::fields::Fields;

/// vLLM's older fields, and what they are called now.
const OLDER: [(&str, &str); 5] = [
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
    ("guided_whitespace_pattern", "whitespace_pattern"),
];

/// Whoever runs the server is told once of requests that use them.
static WARNED: Once = Once::new();

/// The field that says what the output must be, for what is found wrong with it later.
pub(crate) fn field(fields: &Fields) -> &'static str {
    let format = fields.peek("response_format").and_then(|format| format.get("type")?.as_str());
    let says = |name: &str| fields.peek(name).is_some_and(|value| !value.is_null());
    let older = || OLDER.iter().rfind(|(older, name)| *name != "whitespace_pattern" && says(older));
    match format {
        Some(kind) if kind != "text" => "response_format",
        _ => older().map_or(STRUCTURED_OUTPUTS, |(older, _)| older),
    }
}

/// Reads all of them; None where a request says nothing.
pub(crate) fn read(fields: &mut Fields) -> Result<Option<StructuredOutputs>, ApiError> {
    let to_blame = field(fields);
    let mut asked = fields.object(STRUCTURED_OUTPUTS)?.unwrap_or_default();
    let mut place = STRUCTURED_OUTPUTS;
    for (older, name) in OLDER {
        let Some(value) = fields.value(older) else { continue };
        WARNED.call_once(|| tracing::warn!("`{older}` is deprecated; use `structured_outputs.{name}`"));
        if name != "whitespace_pattern" {
            place = older;
        }
        if asked.insert(name.to_owned(), value).is_some_and(|before| !before.is_null()) {
            return Err(ApiError::bad_request(format!(
                "`{older}` and `structured_outputs.{name}` say the same; give one"
            ))
            .about(older));
        }
    }
    // There is one backend, which every request gets.
    fields.value("guided_decoding_backend");
    let mut outputs = parameters(asked, place)?;
    response_format(fields, &mut outputs)?;
    if outputs == StructuredOutputs::default() {
        return Ok(None);
    }
    outputs.constraint().map_err(|error| ApiError::bad_request(error.to_string()).about(to_blame))?;
    Ok(Some(outputs))
}

/// Bytes of what was said of it.
pub(crate) fn bytes(outputs: &StructuredOutputs) -> usize {
    let StructuredOutputs { json, regex, grammar, whitespace_pattern, choice, after, opening, .. } = outputs;
    let texts = [json, regex, grammar, whitespace_pattern, after, opening].into_iter().flatten();
    texts.chain(choice.iter().flatten()).map(|text| size_of::<String>() + text.len()).sum()
}

/// A schema as text; what is no object is told by whoever compiles it.
fn schema(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn parameters(asked: Map<String, Value>, place: &str) -> Result<StructuredOutputs, ApiError> {
    let mut fields = Fields::within(place, asked);
    fields.refuse("structural_tag", "use json or grammar")?;
    Ok(StructuredOutputs {
        json: fields.value("json").as_ref().map(schema),
        regex: fields.text("regex")?,
        choice: fields.array("choice")?.map(|items| choices(&items)).transpose()?,
        grammar: fields.text("grammar")?,
        json_object: fields.flag("json_object")?,
        disable_any_whitespace: fields.flag("disable_any_whitespace")?.unwrap_or(false),
        disable_additional_properties: fields.flag("disable_additional_properties")?.unwrap_or(false),
        whitespace_pattern: fields.text("whitespace_pattern")?,
        after: None,
        opening: None,
    })
}

fn choices(items: &[Value]) -> Result<Vec<String>, ApiError> {
    let choices: Option<Vec<String>> = items.iter().map(|item| item.as_str().map(str::to_owned)).collect();
    choices.ok_or_else(|| ApiError::bad_request("`choice` must be an array of strings").about("choice"))
}

/// Reads `response_format`.
fn response_format(fields: &mut Fields, outputs: &mut StructuredOutputs) -> Result<(), ApiError> {
    let Some(format) = fields.object("response_format")? else { return Ok(()) };
    let refuse = |message: String| Err(ApiError::bad_request(message).about("response_format"));
    match format.get("type").and_then(Value::as_str) {
        Some("text") => {}
        Some("json_object") => outputs.json_object = Some(true),
        Some("json_schema") => {
            let Some(schema) = format.get("json_schema").and_then(|named| named.get("schema")) else {
                return refuse("`response_format` of type `json_schema` needs `json_schema.schema`".to_owned());
            };
            if outputs.json.is_some() {
                return refuse(
                    "`response_format` and `structured_outputs.json` both give a schema; give one".to_owned(),
                );
            }
            outputs.json = Some(self::schema(schema));
        }
        Some(kind) => {
            return refuse(format!(
                "`response_format` of type `{kind}` is not supported; use `text`, `json_object` or `json_schema`"
            ));
        }
        None => return refuse("`response_format` needs a `type`: `text`, `json_object` or `json_schema`".to_owned()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn outputs(body: Value) -> Result<Option<StructuredOutputs>, String> {
        let Value::Object(map) = body else { panic!("no object") };
        read(&mut Fields::new(map)).map_err(|error| error.to_json()["error"].to_string())
    }

    #[test]
    fn every_spelling_says_the_same() {
        let schema = r#"{"type":"integer","minimum":1}"#;
        let as_object: Value = serde_json::from_str(schema).unwrap();
        for body in [
            json!({"structured_outputs": {"json": as_object}}),
            json!({"structured_outputs": {"json": schema}}),
            json!({"guided_json": as_object, "guided_decoding_backend": "auto"}),
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": as_object}}}),
        ] {
            assert_eq!(outputs(body).unwrap().unwrap().json.as_deref(), Some(schema));
        }
        let object = outputs(json!({"response_format": {"type": "json_object"}})).unwrap().unwrap();
        assert_eq!(object.json_object, Some(true));
        let choice = outputs(json!({"guided_choice": ["a", "b"]})).unwrap().unwrap();
        assert_eq!(choice.choice, Some(vec!["a".to_owned(), "b".to_owned()]));
    }

    #[test]
    fn nothing_said_is_nothing() {
        for body in [
            json!({}),
            json!({"response_format": {"type": "text"}, "structured_outputs": null}),
            json!({"structured_outputs": {}, "guided_json": null}),
        ] {
            assert_eq!(outputs(body), Ok(None));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, words) in [
            (json!({"response_format": {"type": "structural_tag"}}), "`structural_tag` is not supported"),
            (json!({"response_format": {}}), "needs a `type`"),
            (json!({"response_format": {"type": "json_schema"}}), "json_schema.schema"),
            (json!({"structured_outputs": {"structural_tag": "x"}}), "structural_tag"),
            (json!({"structured_outputs": {"regex": 1}}), "`structured_outputs.regex` must be a string"),
            (json!({"structured_outputs": {"choice": [1]}}), "array of strings"),
            (json!({"structured_outputs": {"regex": "a", "grammar": "b"}}), "multiple are specified: regex, grammar"),
            (json!({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}), "multiple"),
            (json!({"structured_outputs": {"disable_any_whitespace": true}}), "none are specified"),
            (json!({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}), "say the same"),
        ] {
            let told = outputs(body.clone()).expect_err("refused");
            assert!(told.contains(words), "{body}: {told}");
        }
    }
}
