//! Structured output: what the text of an answer must be, as plain data. Whoever runs the request compiles it.

use serde::{Deserialize, Serialize};

use super::validation::refuse;
use crate::error::CoreError;

/// What an answer must be: exactly one of the first five. Names and meaning are those of vLLM's
/// `StructuredOutputsParams`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct StructuredOutputs {
    /// JSON that a JSON Schema describes, given as its text.
    pub json: Option<String>,
    /// Text that a regular expression matches from end to end.
    pub regex: Option<String>,
    /// One of these texts.
    pub choice: Option<Vec<String>>,
    /// Text of a language, by its grammar in Lark's syntax or in the EBNF of llama.cpp.
    pub grammar: Option<String>,
    /// Any JSON object; false says nothing.
    pub json_object: Option<bool>,
    /// Whether JSON has no white space but what its strings hold.
    pub disable_any_whitespace: bool,
    /// Whether objects of a schema have only the properties that it names, where it does not say.
    pub disable_additional_properties: bool,
    /// A regular expression for the white space between the parts of JSON.
    pub whitespace_pattern: Option<String>,
    /// Text, and whatever comes before its first occurrence, that goes ahead of the structured part: the closing tag of a
    /// model's reasoning. White space may follow it.
    pub after: Option<String>,
    /// Text that `after` depends on: where the output does not begin with it, white space aside, the structured part comes at
    /// once. The opening tag of a model that need not reason. None = what `after` says goes ahead in any case.
    pub opening: Option<String>,
}

/// The one constraint of a [`StructuredOutputs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputConstraint<'a> {
    /// JSON of a schema.
    Json(&'a str),
    /// A regular expression.
    Regex(&'a str),
    /// One of some texts.
    Choice(&'a [String]),
    /// A grammar.
    Grammar(&'a str),
    /// Any JSON object.
    JsonObject,
}

impl StructuredOutputs {
    /// The constraint, if there is exactly one and it says something.
    pub fn constraint(&self) -> Result<OutputConstraint<'_>, CoreError> {
        let all = [
            ("json", self.json.as_deref().map(OutputConstraint::Json)),
            ("regex", self.regex.as_deref().map(OutputConstraint::Regex)),
            ("choice", self.choice.as_deref().map(OutputConstraint::Choice)),
            ("grammar", self.grammar.as_deref().map(OutputConstraint::Grammar)),
            ("json_object", self.json_object.filter(|&on| on).map(|_| OutputConstraint::JsonObject)),
        ];
        let mut given = all.iter().filter_map(|(name, constraint)| constraint.map(|constraint| (*name, constraint)));
        let Some((name, constraint)) = given.next() else {
            return invalid(
                "You must use one kind of structured outputs constraint but none are specified: give one of json, regex, \
                 choice, grammar and json_object."
                    .to_owned(),
            );
        };
        let others: Vec<&str> = given.map(|(name, _)| name).collect();
        if !others.is_empty() {
            return invalid(format!(
                "You can only use one kind of structured outputs constraint but multiple are specified: {name}, {}.",
                others.join(", ")
            ));
        }
        let empty = match constraint {
            OutputConstraint::Json(text) | OutputConstraint::Regex(text) | OutputConstraint::Grammar(text) => {
                text.trim().is_empty()
            }
            OutputConstraint::Choice(choices) => choices.is_empty() || choices.iter().any(String::is_empty),
            OutputConstraint::JsonObject => false,
        };
        if empty {
            return invalid(format!("structured_outputs.{name} cannot be empty or have empty items."));
        }
        for (name, mark) in [("after", &self.after), ("opening", &self.opening)] {
            if mark.as_deref() == Some("") {
                return invalid(format!("structured_outputs.{name} cannot be empty."));
            }
        }
        Ok(constraint)
    }
}

fn invalid<T>(message: String) -> Result<T, CoreError> {
    refuse("structured_outputs", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(outputs: &StructuredOutputs) -> String {
        outputs.constraint().expect_err("refused").to_string()
    }

    #[test]
    fn exactly_one_constraint_is_given() {
        let json = StructuredOutputs { json: Some("{}".into()), ..StructuredOutputs::default() };
        assert_eq!(json.constraint(), Ok(OutputConstraint::Json("{}")));
        assert!(refusal(&StructuredOutputs::default()).contains("none are specified"));
        let off = StructuredOutputs { json_object: Some(false), ..StructuredOutputs::default() };
        assert!(refusal(&off).contains("none are specified"));
        let two = StructuredOutputs { regex: Some("a".into()), json_object: Some(true), ..json.clone() };
        assert!(refusal(&two).ends_with("multiple are specified: json, regex, json_object."), "{}", refusal(&two));
        let object = StructuredOutputs { json_object: Some(true), ..StructuredOutputs::default() };
        assert_eq!(object.constraint(), Ok(OutputConstraint::JsonObject));
    }

    #[test]
    fn what_says_nothing_is_refused() {
        let choice = |items: &[&str]| StructuredOutputs {
            choice: Some(items.iter().map(ToString::to_string).collect()),
            ..StructuredOutputs::default()
        };
        assert!(choice(&["a", "b"]).constraint().is_ok());
        assert!(refusal(&choice(&[])).contains("choice cannot be empty"));
        assert!(refusal(&choice(&["a", ""])).contains("choice cannot be empty"));
        let regex = StructuredOutputs { regex: Some(" ".into()), ..StructuredOutputs::default() };
        assert!(refusal(&regex).contains("regex cannot be empty"));
        let after = StructuredOutputs { after: Some(String::new()), ..choice(&["a"]) };
        assert!(refusal(&after).contains("after"));
    }
}
