//! Where Jinja under Python differs from minijinja: printing, `tojson`, string methods, and the functions that
//! transformers adds.

use std::error::Error as StdError;
use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat;
use serde_json::Value as Json;

use crate::error::ModelError;

use super::clock;

/// An environment that behaves like the one transformers renders chat templates in.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    // Blocks on lines of their own leave no trace. The default syntax with two flags is always valid.
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        environment.set_syntax(syntax);
    }
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_formatter(print);
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: &Value| text_of(value));
    // In Python `None` is not iterable, and text and dicts have a length and items.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
    });
    environment.add_function("raise_exception", raise);
    environment.add_function("strftime_now", now);
    environment
}

/// JSON as a template sees it.
pub(super) fn value(json: &impl serde::Serialize) -> Value {
    Value::from(Serde(json))
}

/// What a template said through `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for Raised {}

fn raise(message: &Value) -> Result<Value, Error> {
    let message = text_of(message);
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

/// A rendering's error for people: the template's own words if it refused the conversation.
pub(super) fn explain(error: &Error) -> ModelError {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref::<Raised>() {
            return ModelError::ChatTemplate(format!("the template refuses the conversation: {message}"));
        }
        cause = current.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return ModelError::ChatTemplate(
            "rendering was stopped because it takes too many steps; the template may loop".to_owned(),
        );
    }
    ModelError::ChatTemplate(format!("could not be rendered: {error}"))
}

fn now(state: &mut State, pattern: &str) -> Result<String, Error> {
    let seconds = state.lookup(clock::VARIABLE).and_then(|now| now.as_i64()).unwrap_or_else(clock::system);
    clock::format(seconds, pattern)
        .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know `{pattern}`")))
}

/// Python methods, beyond those minijinja's own shim has.
fn method(state: &mut State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    if let (Some(text), [argument]) = (value.as_str(), arguments)
        && let Some(affix) = argument.as_str()
    {
        match name {
            "removeprefix" => return Ok(Value::from(text.strip_prefix(affix).unwrap_or(text))),
            "removesuffix" => return Ok(Value::from(text.strip_suffix(affix).unwrap_or(text))),
            _ => {}
        }
    }
    pycompat::unknown_method_callback(state, value, name, arguments)
}

/// `{{ value }}` prints what Python's `str` gives.
fn print(out: &mut Output, _state: &mut State, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&text_of(value)),
    };
    written.map_err(Error::from)
}

fn text_of(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Seq | ValueKind::Map => {
            match serde_json::to_value(value) {
                Ok(json) => {
                    let mut out = String::new();
                    represent(&json, &mut out);
                    out
                }
                Err(_) => value.to_string(),
            }
        }
        _ => value.to_string(),
    }
}

/// Python's `repr` of what JSON can hold.
fn represent(value: &Json, out: &mut String) {
    match value {
        Json::Null => out.push_str("None"),
        Json::Bool(true) => out.push_str("True"),
        Json::Bool(false) => out.push_str("False"),
        Json::Number(number) => out.push_str(&number_text(number)),
        Json::String(text) => {
            let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
            out.push(quote);
            for character in text.chars() {
                match character {
                    '\\' => out.push_str("\\\\"),
                    '\n' => out.push_str("\\n"),
                    '\r' => out.push_str("\\r"),
                    '\t' => out.push_str("\\t"),
                    c if c == quote => out.extend(['\\', c]),
                    c if c.is_control() => out.extend(format!("\\x{:02x}", c as u32).chars()),
                    c => out.push(c),
                }
            }
            out.push(quote);
        }
        Json::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                represent(item, out);
            }
            out.push(']');
        }
        Json::Object(entries) => {
            out.push('{');
            for (index, (key, item)) in entries.iter().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                represent(&Json::String(key.clone()), out);
                out.push_str(": ");
                represent(item, out);
            }
            out.push('}');
        }
    }
}

/// Python writes the shortest digits, with an exponent below 1e-4 and from 1e16 on.
fn number_text(number: &serde_json::Number) -> String {
    let (true, Some(value)) = (number.is_f64(), number.as_f64()) else {
        return number.to_string();
    };
    let scientific = format!("{value:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    match exponent.parse::<i32>() {
        Ok(exponent) if value != 0.0 && !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{mantissa}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{value:?}"),
    }
}

/// `json.dumps` with the defaults of transformers: no HTML escaping, `ensure_ascii=False`.
#[allow(clippy::needless_pass_by_value, reason = "filters take their arguments by value")]
fn to_json(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let invalid = |message: String| Error::new(ErrorKind::InvalidOperation, message);
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    options.assert_all_used()?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent.clone()).ok().filter(|width| *width <= 64).ok_or_else(|| {
                invalid(format!("tojson's indent `{indent}` is neither a small number nor a string"))
            })?),
        }),
    };
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("tojson's separators are two strings".to_owned())),
        None => ((if indent.is_some() { "," } else { ", " }).to_owned(), ": ".to_owned()),
    };
    if value.is_undefined() {
        return Err(invalid("an undefined value has no JSON form".to_owned()));
    }
    let json = serde_json::to_value(value).map_err(|error| invalid(format!("this value has no JSON form: {error}")))?;
    let writer = JsonWriter { indent, item, key, ensure_ascii, sort_keys };
    let mut out = String::new();
    writer.write(&json, 0, &mut out);
    Ok(Value::from(out))
}

struct JsonWriter {
    indent: Option<String>,
    item: String,
    key: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl JsonWriter {
    fn write(&self, value: &Json, depth: usize, out: &mut String) {
        match value {
            Json::Null => out.push_str("null"),
            Json::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
            Json::Number(number) => out.push_str(&number_text(number)),
            Json::String(text) => self.string(text, out),
            Json::Array(items) if items.is_empty() => out.push_str("[]"),
            Json::Object(entries) if entries.is_empty() => out.push_str("{}"),
            Json::Array(items) => {
                out.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.separate(index, depth + 1, out);
                    self.write(item, depth + 1, out);
                }
                self.new_line(depth, out);
                out.push(']');
            }
            Json::Object(entries) => {
                let mut entries: Vec<(&String, &Json)> = entries.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(name, _)| *name);
                }
                out.push('{');
                for (index, (name, item)) in entries.into_iter().enumerate() {
                    self.separate(index, depth + 1, out);
                    self.string(name, out);
                    out.push_str(&self.key);
                    self.write(item, depth + 1, out);
                }
                self.new_line(depth, out);
                out.push('}');
            }
        }
    }

    fn separate(&self, index: usize, depth: usize, out: &mut String) {
        if index > 0 {
            out.push_str(&self.item);
        }
        self.new_line(depth, out);
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.extend(format!("\\u{unit:04x}").chars());
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// transformers marks the assistant's tokens with `{% generation %}` blocks, which print their content as it is; as
/// `with` blocks they parse and scope in the same way.
pub(super) fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else {
            break;
        };
        let tag = &rest[start..start + length + 2];
        let inner = &tag[2..tag.len() - 2];
        let name = inner.trim_matches(['-', '+']).trim();
        out.push_str(&rest[..start]);
        match name {
            "generation" | "endgeneration" => {
                out.push_str(&tag.replacen(name, if name == "generation" { "with" } else { "endwith" }, 1));
            }
            _ => out.push_str(tag),
        }
        rest = &rest[start + length + 2..];
    }
    out.push_str(rest);
    out
}
