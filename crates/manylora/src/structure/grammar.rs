//! From a request's words to a compiled grammar.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory, regex_to_lark};
use manylora_core::sampling::{OutputConstraint, StructuredOutputs};
use serde_json::{Map, Value, json};

use super::{ebnf, lark};
use crate::error::EngineError;

/// A compiled grammar, from which the constraints of sequences are made.
pub(crate) struct Grammar {
    /// At the beginning of the text.
    fresh: Matcher,
}

impl Grammar {
    /// Compiles what a request asks for; the error quotes the grammar's.
    pub(super) fn compile(factory: &ParserFactory, outputs: &StructuredOutputs) -> Result<Self, EngineError> {
        let constraint = outputs.constraint()?;
        let name = match constraint {
            OutputConstraint::Json(_) => "json",
            OutputConstraint::Regex(_) => "regex",
            OutputConstraint::Choice(_) => "choice",
            OutputConstraint::Grammar(_) => "grammar",
            OutputConstraint::JsonObject => "json_object",
        };
        let refused = |reason: &str| {
            let reason = reason.replace("<non-verbose/>", "");
            EngineError::InvalidArgument(format!("structured_outputs.{name} cannot be used: {}", reason.trim()))
        };
        let words = top_level(constraint, outputs).map_err(|reason| refused(&reason))?;
        let parser = factory.create_parser(words).map_err(|error| refused(&format!("{error:#}")))?;
        let mut fresh = Matcher::new(Ok(parser));
        for warning in fresh.grammar_warnings() {
            tracing::debug!("structured_outputs.{name}: {warning}");
        }
        // What cannot even begin is found now.
        fresh.deep_clone().compute_mask().map_err(|error| refused(&error.to_string()))?;
        Ok(Self { fresh })
    }

    /// A matcher at the beginning, with nothing shared, so that what other sequences did cannot change what it does.
    pub(super) fn matcher(&self) -> Matcher {
        self.fresh.deep_clone()
    }
}

fn top_level(constraint: OutputConstraint<'_>, outputs: &StructuredOutputs) -> Result<TopLevelGrammar, String> {
    let body = match constraint {
        OutputConstraint::Json(text) => GrammarWithLexer::from_json_schema(schema(text, outputs)?),
        OutputConstraint::JsonObject => GrammarWithLexer::from_json_schema(with_options(
            Map::from_iter([("type".to_owned(), json!("object"))]),
            outputs,
        )),
        OutputConstraint::Regex(expression) => {
            // Digits, letters and white space of ASCII, as JSON Schema has them.
            let expression = regex_to_lark(without_anchors(expression), "dws");
            GrammarWithLexer::from_lark(format!("start: /{expression}/"))
        }
        OutputConstraint::Choice(choices) => {
            let choices: Vec<String> = choices.iter().map(|choice| lark::text(choice)).collect();
            GrammarWithLexer::from_lark(format!("start: {}", choices.join(" | ")))
        }
        OutputConstraint::Grammar(text) if ebnf::is_ebnf(text) => GrammarWithLexer::from_lark(ebnf::to_lark(text)?),
        OutputConstraint::Grammar(text) => GrammarWithLexer::from_lark(text.to_owned()),
    };
    let Some(after) = &outputs.after else { return Ok(TopLevelGrammar::from_grammar(body)) };
    let opening = format!(
        "start: opening gap @body\nopening[suffix={}]: /(?s:.*)/\ngap: (/[ \\t\\r\\n]{{1,64}}/)?",
        lark::text(after)
    );
    let body = GrammarWithLexer { name: Some("body".to_owned()), ..body };
    Ok(TopLevelGrammar { grammars: vec![GrammarWithLexer::from_lark(opening), body], max_tokens: None })
}

/// Texts are matched from end to end, so that anchors at the ends say nothing new.
fn without_anchors(expression: &str) -> &str {
    let expression = expression.strip_prefix('^').unwrap_or(expression);
    let Some(rest) = expression.strip_suffix('$') else { return expression };
    let escaped = rest.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 1;
    if escaped { expression } else { rest }
}

fn schema(text: &str, outputs: &StructuredOutputs) -> Result<Value, String> {
    let schema = serde_json::from_str(text).map_err(|error| format!("the schema is not JSON: {error}"))?;
    let mut schema = match schema {
        Value::Object(schema) => Value::Object(schema),
        Value::Bool(true) => json!({}),
        other => return Err(format!("a JSON Schema is an object, got `{other}`")),
    };
    if outputs.disable_additional_properties {
        close_objects(&mut schema);
    }
    match schema {
        Value::Object(schema) => Ok(with_options(schema, outputs)),
        other => Ok(other),
    }
}

/// Adds how JSON is written.
fn with_options(schema: Map<String, Value>, outputs: &StructuredOutputs) -> Value {
    let white_space = match (&outputs.whitespace_pattern, outputs.disable_any_whitespace) {
        (_, true) => None,
        (Some(pattern), false) => Some(pattern.as_str()),
        (None, false) => Some(lark::WHITE_SPACE),
    };
    lark::with_options(schema, white_space)
}

/// Objects of a schema have only the properties that it names, where it does not say.
fn close_objects(schema: &mut Value) {
    let Value::Object(schema) = schema else { return };
    if (schema.contains_key("properties") || schema.get("type").is_some_and(|kind| kind == "object"))
        && !schema.contains_key("additionalProperties")
        && !schema.contains_key("patternProperties")
    {
        schema.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
    for (keyword, value) in schema.iter_mut() {
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                named.values_mut().for_each(close_objects);
            }
            ("allOf" | "anyOf" | "oneOf" | "prefixItems" | "items", Value::Array(schemas)) => {
                schemas.iter_mut().for_each(close_objects);
            }
            ("items" | "additionalProperties" | "additionalItems", one) => close_objects(one),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_at_the_ends_are_dropped() {
        assert_eq!(without_anchors("^ab$"), "ab");
        assert_eq!(without_anchors(r"ab\$"), r"ab\$");
        assert_eq!(without_anchors(r"ab\\$"), r"ab\\");
        assert_eq!(without_anchors("a^b"), "a^b");
    }

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
}
