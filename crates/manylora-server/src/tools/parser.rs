//! Calls in what a model says: out of text that comes in pieces, the name of each call first, then its arguments as they come.
//!
//! What is told does not depend on where the pieces are cut. White space between text and calls belongs to neither. What
//! begins like a call and is none stays text: with `whole`, also where that is found out late; in a stream, what has been
//! told cannot be taken back, so that arguments which break off stay as they are.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::reasoning::beginning_of;

/// How a model writes its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them among text.
    Hermes,
    /// The whole answer is `{"name": ..., "parameters": {...}}`, or several such with `;` between them.
    LlamaJson,
}

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";
/// What Llama may begin its calls with.
const PYTHON_TAG: &str = "<|python_tag|>";

/// A piece of what a model said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    Text(String),
    /// A call of this function begins.
    Call(String),
    /// More of the last call's arguments, which are JSON.
    Arguments(String),
}

#[derive(Deserialize)]
struct WrittenCall<'a> {
    name: String,
    #[serde(borrow, default, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

/// Finds the end of a JSON object in a text that grows. It looks at each byte once.
#[derive(Clone, Copy, Debug, Default)]
struct ObjectEnd {
    position: usize,
    depth: usize,
    in_string: bool,
    escaped: bool,
    ended: bool,
}

impl ObjectEnd {
    /// Where the object that begins the text ends, once it does.
    fn find(&mut self, text: &str) -> Option<usize> {
        while !self.ended {
            let byte = *text.as_bytes().get(self.position)?;
            self.position += 1;
            if self.escaped {
                self.escaped = false;
                continue;
            }
            match byte {
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                b'{' | b'[' if !self.in_string => self.depth += 1,
                b'}' | b']' if !self.in_string => {
                    self.depth = self.depth.saturating_sub(1);
                    self.ended = self.depth == 0;
                }
                _ => {}
            }
        }
        Some(self.position)
    }
}

/// Arguments that are being told while they come. Places are counted from where the call's object begins.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// Where they begin.
    from: usize,
    /// How far they are told.
    told: usize,
    end: ObjectEnd,
}

/// A call that has begun. Its text is at the front of what is held.
#[derive(Clone, Debug)]
struct Call {
    /// The text before the object, which stays text if this is no call.
    before: String,
    end: ObjectEnd,
    open: Option<Open>,
}

#[derive(Clone, Debug)]
enum State {
    /// At the beginning of an answer that may be calls and nothing else.
    Begins,
    Text,
    Call(Call),
    /// Behind a call's object.
    Behind,
}

/// Finds the calls of one sample.
#[derive(Clone, Debug)]
pub(crate) struct CallParser {
    format: ToolFormat,
    /// The functions there are.
    names: Arc<[String]>,
    /// Whether calls are told when they are complete.
    whole: bool,
    /// Calls that may be told.
    most: usize,
    calls: usize,
    state: State,
    held: String,
}

impl CallParser {
    pub(crate) fn new(format: ToolFormat, names: Arc<[String]>, most: usize, whole: bool) -> Self {
        let state = if format == ToolFormat::LlamaJson { State::Begins } else { State::Text };
        Self { format, names, whole, most, calls: 0, state, held: String::new() }
    }

    /// Takes the next piece.
    pub(crate) fn push(&mut self, text: &str, told: &mut Vec<Piece>) {
        self.held.push_str(text);
        while self.step(told) {}
    }

    /// Ends the text.
    pub(crate) fn finish(&mut self, told: &mut Vec<Piece>) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text if self.calls > 0 && self.held.trim().is_empty() => self.held.clear(),
            State::Begins | State::Text => {}
            State::Behind => self.held.clear(),
            State::Call(Call { open: Some(open), .. }) => {
                self.tell_arguments(open.told, self.held.len(), told);
                self.held.clear();
            }
            State::Call(call) => self.held.insert_str(0, &call.before),
        }
        self.tell_text(self.held.len(), told);
    }

    /// Goes on by one state, if that is possible already.
    fn step(&mut self, told: &mut Vec<Piece>) -> bool {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Begins => self.begin(),
            State::Text => self.text(told),
            State::Call(call) => self.call(call, told),
            State::Behind => self.behind(),
        }
    }

    fn begin(&mut self) -> bool {
        let tagged = self.held.trim_start();
        let object = tagged.strip_prefix(PYTHON_TAG).unwrap_or(tagged).trim_start();
        if object.is_empty() || PYTHON_TAG.starts_with(tagged) {
            self.state = State::Begins;
            return false;
        }
        if object.starts_with('{') {
            self.begin_call(self.held.len() - object.len());
        }
        true
    }

    /// What is held begins with `before` bytes, then the object of a call.
    fn begin_call(&mut self, before: usize) {
        let rest = self.held.split_off(before);
        let before = std::mem::replace(&mut self.held, rest);
        self.state = State::Call(Call { before, end: ObjectEnd::default(), open: None });
    }

    fn text(&mut self, told: &mut Vec<Piece>) -> bool {
        let found = if self.format == ToolFormat::Hermes { self.held.find(OPEN) } else { None };
        let certain = match (found, self.format) {
            (Some(at), _) => at,
            (None, ToolFormat::Hermes) => beginning_of(OPEN, &self.held),
            (None, ToolFormat::LlamaJson) => self.held.len(),
        };
        let certain = if self.format == ToolFormat::Hermes { self.held[..certain].trim_end().len() } else { certain };
        self.tell_text(certain, told);
        if let Some(at) = found {
            self.begin_call(at - certain + OPEN.len());
        }
        found.is_some()
    }

    fn call(&mut self, mut call: Call, told: &mut Vec<Piece>) -> bool {
        let object = self.held.trim_start();
        if object.is_empty() {
            self.state = State::Call(call);
            return false;
        }
        let begins = self.held.len() - object.len();
        if !object.starts_with('{') {
            return self.no_call(&call, told);
        }
        if begins > 0 {
            call.before.push_str(&self.held[..begins]);
            self.held.drain(..begins);
        }
        let end = call.end.find(&self.held);
        if call.open.is_none() && !self.whole {
            call.open = self.open(told);
        }
        if let Some(open) = &mut call.open {
            let to = open.end.find(&self.held[open.from..]).map_or(self.held.len(), |length| open.from + length);
            let from = std::mem::replace(&mut open.told, to);
            self.tell_arguments(from, to, told);
        }
        let Some(end) = end else {
            self.state = State::Call(call);
            return false;
        };
        if call.open.is_none() {
            match self.written(&self.held[..end]) {
                Some((name, arguments)) => {
                    self.tell_call(name, told);
                    if self.calls <= self.most {
                        told.push(Piece::Arguments(arguments));
                    }
                }
                None => return self.no_call(&call, told),
            }
        }
        self.held.drain(..end);
        self.state = State::Behind;
        true
    }

    /// Whether the object's beginning says whose call it is: then its arguments can be told as they come.
    fn open(&mut self, told: &mut Vec<Piece>) -> Option<Open> {
        let (name, from) = head(&self.held)?;
        if !self.may_call(&name) {
            return None;
        }
        self.tell_call(name, told);
        Some(Open { from, told: from, end: ObjectEnd::default() })
    }

    /// Name and arguments of a complete object.
    fn written(&self, object: &str) -> Option<(String, String)> {
        let WrittenCall { name, arguments } = serde_json::from_str(object).ok()?;
        let arguments = arguments.map_or("{}", RawValue::get);
        // Some write the arguments' JSON as text.
        let arguments = serde_json::from_str::<String>(arguments).unwrap_or_else(|_| arguments.to_owned());
        let is_object = serde_json::from_str(&arguments).is_ok_and(|value: Value| value.is_object());
        (is_object && self.may_call(&name)).then_some((name, arguments))
    }

    /// Without tags around it, an object is a call only where there is such a function.
    fn may_call(&self, name: &str) -> bool {
        !name.is_empty() && (self.format == ToolFormat::Hermes || self.names.iter().any(|known| known == name))
    }

    /// What began like a call is text.
    fn no_call(&mut self, call: &Call, told: &mut Vec<Piece>) -> bool {
        told.push(Piece::Text(call.before.clone()));
        self.state = State::Text;
        true
    }

    fn behind(&mut self) -> bool {
        let rest = self.held.trim_start();
        if self.format == ToolFormat::Hermes {
            if CLOSE.starts_with(rest) && rest.len() < CLOSE.len() {
                self.state = State::Behind;
                return false;
            }
            if let Some(rest) = rest.strip_prefix(CLOSE) {
                self.held = rest.to_owned();
            }
            return true;
        }
        let next = rest.trim_start_matches(|character: char| character == ';' || character.is_whitespace());
        if next.is_empty() {
            self.state = State::Behind;
            return false;
        }
        if next.starts_with('{') {
            self.begin_call(self.held.len() - next.len());
        }
        true
    }

    fn tell_text(&mut self, length: usize, told: &mut Vec<Piece>) {
        if length > 0 {
            let rest = self.held.split_off(length);
            told.push(Piece::Text(std::mem::replace(&mut self.held, rest)));
        }
    }

    fn tell_call(&mut self, name: String, told: &mut Vec<Piece>) {
        self.calls += 1;
        if self.calls <= self.most {
            told.push(Piece::Call(name));
        }
    }

    fn tell_arguments(&self, from: usize, to: usize, told: &mut Vec<Piece>) {
        if from < to && self.calls <= self.most {
            told.push(Piece::Arguments(self.held[from..to].to_owned()));
        }
    }
}

/// Name and place of the arguments, where an object begins with `{"name": "...", "arguments": {`.
fn head(object: &str) -> Option<(String, usize)> {
    let after = |rest: &'_ str, sign: &str| -> Option<usize> {
        let trimmed = rest.trim_start();
        trimmed.starts_with(sign).then(|| rest.len() - trimmed.len() + sign.len())
    };
    let mut at = 0;
    for sign in ["{", "\"name\"", ":", "\""] {
        at += after(&object[at..], sign)?;
    }
    // The name as it is written, quotes included.
    let quoted = &object[at - 1..];
    let mut escaped = false;
    let length = quoted.char_indices().skip(1).find_map(|(index, character)| {
        let ends = character == '"' && !escaped;
        escaped = character == '\\' && !escaped;
        ends.then_some(index + 1)
    })?;
    let name = serde_json::from_str(&quoted[..length]).ok()?;
    at += length - 1;
    at += after(&object[at..], ",")?;
    at += after(&object[at..], "\"arguments\"").or_else(|| after(&object[at..], "\"parameters\""))?;
    at += after(&object[at..], ":")?;
    at += after(&object[at..], "{")?;
    Some((name, at - 1))
}

#[cfg(test)]
#[path = "parser_tests.rs"]
mod tests;
