//! From a request's words to a compiled grammar.

use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::{Matcher, regex_to_lark};
use manylora_core::sampling::{OutputConstraint, StructuredOutputs};
use serde_json::{Map, Value, json};

use super::watch::Watch;
use super::{Tools, ebnf, lark, schema};

/// Characters of a refusal; longer ones are cut: they quote what they refuse.
const LONGEST_REFUSAL: usize = 500;

/// Terminals in a chain: compiling takes the square of their number.
const MOST_CHAINED: usize = 500;

/// A compiled grammar, from which the constraints of sequences are made.
pub(crate) struct Grammar {
    /// At the beginning of the text.
    fresh: Matcher,
    pub(super) watch: Arc<Watch>,
}

impl Grammar {
    /// Compiles what a request asks for; the error quotes the grammar's. `preface` is what goes ahead of it, see [`preface`].
    pub(super) fn compile(tools: &Tools, outputs: &StructuredOutputs, preface: Option<String>) -> Result<Self, String> {
        let constraint = outputs.constraint().map_err(|error| error.to_string())?;
        let name = match constraint {
            OutputConstraint::Json(_) => "json",
            OutputConstraint::Regex(_) => "regex",
            OutputConstraint::Choice(_) => "choice",
            OutputConstraint::Grammar(_) => "grammar",
            OutputConstraint::JsonObject => "json_object",
        };
        let refused = |reason: &str| {
            let reason = reason.replace("<non-verbose/>", "");
            let mut reason = match reason.trim().char_indices().nth(LONGEST_REFUSAL) {
                Some((end, _)) => format!("{} ...", &reason.trim()[..end]),
                None => reason.trim().to_owned(),
            };
            if reason.contains("uniqueItems") {
                reason.push_str("; that items differ cannot be held to: leave uniqueItems out, and check the answer");
            }
            format!("structured_outputs.{name} cannot be used: {reason}")
        };
        let words = top_level(constraint, outputs, preface).map_err(|reason| refused(&reason))?;
        let parser = tools.factory.create_parser(words).map_err(|error| refused(&format!("{error:#}")))?;
        let mut fresh = Matcher::new(Ok(parser));
        for warning in fresh.grammar_warnings() {
            tracing::debug!("structured_outputs.{name}: {warning}");
        }
        // What cannot even begin is found now.
        fresh.deep_clone().compute_mask().map_err(|error| refused(&error.to_string()))?;
        Ok(Self { fresh, watch: Arc::clone(&tools.watch) })
    }

    /// A matcher at the beginning, with nothing shared, so that what other sequences did cannot change what it does.
    pub(super) fn matcher(&self) -> Matcher {
        self.fresh.deep_clone().into_cancellable()
    }
}

/// What goes ahead of the structured part, as rules of Lark after which `@body` is the rest.
pub(super) fn preface(outputs: &StructuredOutputs, is_special: impl Fn(&str) -> bool) -> Option<String> {
    let after = outputs.after.as_ref()?;
    // Text does not have special tokens in it: they are named.
    let thoughts = if is_special(after) {
        format!("thoughts: /(?s:.*)/ {after}")
    } else {
        format!("thoughts[suffix={}]: /(?s:.*)/", lark::text(after))
    };
    let start = match &outputs.opening {
        None => "thoughts gap @body".to_owned(),
        Some(opening) => {
            let opening = if is_special(opening) { opening.clone() } else { lark::text(opening) };
            format!("(gap {opening} thoughts gap)? @body")
        }
    };
    Some(format!("start: {start}\n{thoughts}\ngap: (/[ \\t\\r\\n]{{1,64}}/)?"))
}

fn top_level(
    constraint: OutputConstraint<'_>,
    outputs: &StructuredOutputs,
    preface: Option<String>,
) -> Result<TopLevelGrammar, String> {
    let body = match constraint {
        OutputConstraint::Json(text) => GrammarWithLexer::from_json_schema(schema_of(text, outputs)?),
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
            // One terminal: a parser has a place for each alternative of a rule, and there may be thousands.
            GrammarWithLexer::from_lark(format!("start: CHOICE\nCHOICE: {}", choices.join(" | ")))
        }
        OutputConstraint::Grammar(text) if ebnf::is_ebnf(text) => GrammarWithLexer::from_lark(ebnf::to_lark(text)?),
        OutputConstraint::Grammar(text) => {
            let chained = lark::chained_terminals(text);
            if chained > MOST_CHAINED {
                return Err(format!(
                    "`{chained}` terminals are each part of the one before, and `{MOST_CHAINED}` may be; make rules of some"
                ));
            }
            GrammarWithLexer::from_lark(text.to_owned())
        }
    };
    let Some(preface) = preface else { return Ok(TopLevelGrammar::from_grammar(body)) };
    let body = GrammarWithLexer { name: Some("body".to_owned()), ..body };
    Ok(TopLevelGrammar { grammars: vec![GrammarWithLexer::from_lark(preface), body], max_tokens: None })
}

/// Texts are matched from end to end, so that anchors at the ends say nothing new.
fn without_anchors(expression: &str) -> &str {
    let expression = expression.strip_prefix('^').unwrap_or(expression);
    let Some(rest) = expression.strip_suffix('$') else { return expression };
    let escaped = rest.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 1;
    if escaped { expression } else { rest }
}

fn schema_of(text: &str, outputs: &StructuredOutputs) -> Result<Value, String> {
    let schema = serde_json::from_str(text).map_err(|error| format!("the schema is not JSON: {error}"))?;
    let mut schema = match schema {
        Value::Object(schema) => Value::Object(schema),
        Value::Bool(true) => json!({}),
        other => return Err(format!("a JSON Schema is an object, got `{other}`")),
    };
    if outputs.disable_additional_properties {
        schema::close_objects(&mut schema);
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
}
