//! Tools of a chat: what a request says of them, the grammar where it demands calls, and the parser of what comes.
//!
//! Calls that are demanded have the form that the model was trained on, held to by a grammar; so one parser reads them all.

mod parser;

use std::sync::Arc;

use manylora::{EngineHandle, StructuredOutputs, lark};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, shown};

pub use parser::ToolFormat;
pub(crate) use parser::{CallParser, Piece};

impl ToolFormat {
    /// By the name of vLLM's `--tool-call-parser`.
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "hermes" | "qwen25" => Some(Self::Hermes),
            "llama3_json" => Some(Self::LlamaJson),
            _ => None,
        }
    }

    /// What the model's chat template says of how it calls tools.
    pub(crate) fn of_template(engine: &EngineHandle) -> Option<Self> {
        let template = engine.chat_template()?;
        if template.mentions(parser::OPEN) {
            return Some(Self::Hermes);
        }
        let is_llama = template.mentions("\"parameters\": dictionary") || template.mentions("<|python_tag|>");
        is_llama.then_some(Self::LlamaJson)
    }
}

/// Whether the model may, must or must not call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    None,
    Auto,
    Required,
    /// This function.
    Named(usize),
}

/// What a request says of tools.
#[derive(Clone, Debug)]
pub(crate) struct Tools {
    choice: Choice,
    names: Arc<[String]>,
    /// Whether there may be more than one call.
    parallel: bool,
    format: ToolFormat,
}

fn wrong<T>(message: impl Into<String>, place: &str) -> Result<T, ApiError> {
    Err(ApiError::bad_request(message).about(place))
}

impl Tools {
    /// Reads them, and gives the definitions that the template gets, and what the output must be where calls are demanded.
    pub(crate) fn read(
        app: &App,
        fields: &mut Fields,
    ) -> Result<(Self, Option<Value>, Option<StructuredOutputs>), ApiError> {
        for older in ["functions", "function_call"] {
            fields.refuse(older, "use `tools` and `tool_choice`")?;
        }
        let definitions = fields.array("tools")?.unwrap_or_default();
        let functions = definitions.iter().enumerate().map(|(index, definition)| Function::read(definition, index));
        let functions = functions.collect::<Result<Vec<_>, _>>()?;
        let names: Vec<String> = functions.iter().map(|function| function.name.to_owned()).collect();
        let choice = choice(fields.value("tool_choice").as_ref(), &names)?;
        let parallel = fields.flag("parallel_tool_calls")?.unwrap_or(true);
        if choice == Choice::Auto && app.tool_format.is_none() {
            return wrong(
                "the model's chat template does not say how it calls tools, so that calls would not be found; start the server \
                 with --tool-call-parser (hermes or llama3_json), or set `tool_choice` to \"none\" or \"required\"",
                "tools",
            );
        }
        let format = app.tool_format.unwrap_or(ToolFormat::LlamaJson);
        let tools = Self { choice, names: names.into(), parallel, format };
        let demanded = tools.demanded(&app.engine, &functions);
        let hidden = choice == Choice::None && app.config.exclude_tools_when_tool_choice_none;
        let told = (!definitions.is_empty() && !hidden).then_some(Value::Array(definitions));
        Ok((tools, told, demanded))
    }

    /// Bytes that it takes, for as long as there may be calls.
    pub(crate) fn bytes(&self) -> usize {
        self.names.iter().map(|name| size_of::<String>() + name.len()).sum()
    }

    /// Whether calls are looked for.
    pub(crate) fn may_call(&self) -> bool {
        self.choice != Choice::None
    }

    /// Whether calls are what the output must be.
    pub(crate) fn are_demanded(&self) -> bool {
        matches!(self.choice, Choice::Required | Choice::Named(_))
    }

    /// Whether one function was named: its call is what was asked for, and no choice of the model's. As OpenAI and vLLM do,
    /// its end is an ordinary one.
    pub(crate) fn is_named(&self) -> bool {
        matches!(self.choice, Choice::Named(_))
    }

    /// Reads calls; `whole` where nothing is told before the end.
    pub(crate) fn parser(&self, whole: bool) -> Option<CallParser> {
        let most = if self.parallel && !matches!(self.choice, Choice::Named(_)) { usize::MAX } else { 1 };
        self.may_call().then(|| CallParser::new(self.format, Arc::clone(&self.names), most, whole))
    }

    /// Whether what marks calls are special tokens, which text leaves out.
    pub(crate) fn has_special_marks(&self, engine: &EngineHandle) -> bool {
        self.may_call() && is_special(engine, parser::OPEN)
    }

    /// What the output must be where calls are demanded.
    fn demanded(&self, engine: &EngineHandle, functions: &[Function<'_>]) -> Option<StructuredOutputs> {
        let demanded = match self.choice {
            Choice::None | Choice::Auto => return None,
            Choice::Required => 0..functions.len(),
            Choice::Named(index) => index..index + 1,
        };
        let mark = |mark: &str| if is_special(engine, mark) { mark.to_owned() } else { lark::text(mark) };
        let (open, close, key, between) = match self.format {
            ToolFormat::Hermes => {
                let (open, close) = (mark(parser::OPEN), mark(parser::CLOSE));
                (format!("{open} \"\\n\""), format!("\"\\n\" {close}"), "arguments", "\n")
            }
            ToolFormat::LlamaJson => (String::new(), String::new(), "parameters", "; "),
        };
        let several = self.parallel && !matches!(self.choice, Choice::Named(_));
        let repeated = if several { format!("({} call)*", lark::text(between)) } else { String::new() };
        let calls: Vec<String> = demanded.clone().map(|index| format!("call-{index}")).collect();
        let mut grammar = format!("start: call {repeated}\ncall: {open} ({}) {close}\n", calls.join(" | "));
        for index in demanded {
            let head = format!("{{\"name\": {}, \"{key}\": ", Value::from(functions[index].name));
            let schema = lark::json(functions[index].schema());
            grammar.push_str(&rule(index, &lark::text(&head), &schema));
        }
        Some(StructuredOutputs { grammar: Some(grammar), ..StructuredOutputs::default() })
    }
}

fn rule(index: usize, head: &str, schema: &str) -> String {
    format!("call-{index}: {head} arguments-{index} \"}}\"\narguments-{index}: {schema}\n")
}

/// Whether text leaves this token out.
pub(crate) fn is_special(engine: &EngineHandle, token: &str) -> bool {
    engine.tokenizer().is_ok_and(|tokenizer| tokenizer.id_of(token).is_some_and(|id| tokenizer.is_special(id)))
}

/// A function that a request defines.
struct Function<'a> {
    name: &'a str,
    parameters: Option<&'a Map<String, Value>>,
}

impl<'a> Function<'a> {
    fn read(definition: &'a Value, index: usize) -> Result<Self, ApiError> {
        let place = format!("tools[{index}]");
        let kind = definition.get("type").and_then(Value::as_str).unwrap_or("function");
        let function = definition.get("function").and_then(Value::as_object).filter(|_| kind == "function");
        let Some(function) = function else {
            return wrong(
                format!(
                    "`{place}` must be {{\"type\": \"function\", \"function\": {{...}}}}, got `{}`",
                    shown(definition)
                ),
                "tools",
            );
        };
        let Some(name) = function.get("name").and_then(Value::as_str).filter(|name| !name.is_empty()) else {
            return wrong(format!("`{place}.function.name` must be a string that is not empty"), "tools");
        };
        match function.get("parameters") {
            None | Some(Value::Null) => Ok(Self { name, parameters: None }),
            Some(Value::Object(schema)) => Ok(Self { name, parameters: Some(schema) }),
            Some(other) => {
                wrong(format!("`{place}.function.parameters` must be an object, got `{}`", shown(other)), "tools")
            }
        }
    }

    /// What its arguments must be: an object, also where that is not said.
    fn schema(&self) -> Map<String, Value> {
        let mut schema = self.parameters.cloned().unwrap_or_default();
        schema.entry("type").or_insert(json!("object"));
        schema
    }
}

/// Names as an error shows them: not too many, and short.
fn shown_names(names: &[String]) -> String {
    let some: Vec<String> = names.iter().take(20).map(|name| name.chars().take(80).collect()).collect();
    some.join(", ") + if names.len() > some.len() { ", ..." } else { "" }
}

fn choice(asked: Option<&Value>, names: &[String]) -> Result<Choice, ApiError> {
    const PLACE: &str = "tool_choice";
    let asked = match asked {
        None if names.is_empty() => return Ok(Choice::None),
        None => return Ok(Choice::Auto),
        Some(Value::String(word)) if word == "none" || (word == "auto" && names.is_empty()) => return Ok(Choice::None),
        Some(_) if names.is_empty() => return wrong("When using `tool_choice`, `tools` must be set.", PLACE),
        Some(asked) => asked,
    };
    let wrong_kind = || {
        wrong(
            format!(
                "`tool_choice` must be \"none\", \"auto\", \"required\" or {{\"type\": \"function\", \"function\": {{\"name\": NAME}}}}, got \
                 `{}`",
                shown(asked)
            ),
            PLACE,
        )
    };
    match asked {
        Value::String(word) if word == "auto" => Ok(Choice::Auto),
        Value::String(word) if word == "required" => Ok(Choice::Required),
        Value::Object(object) => {
            let name = object.get("function").and_then(|function| function.get("name")).and_then(Value::as_str);
            let Some(name) = name.filter(|_| object.get("type").is_none_or(|kind| kind == "function")) else {
                return wrong_kind();
            };
            match names.iter().position(|known| known == name) {
                Some(index) => Ok(Choice::Named(index)),
                None => wrong(
                    format!(
                        "The tool specified in `tool_choice` does not match any of the specified `tools`: `{name}` is none of {}.",
                        shown_names(names)
                    ),
                    PLACE,
                ),
            }
        }
        _ => wrong_kind(),
    }
}
