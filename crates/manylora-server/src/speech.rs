//! What a chat model says, taken apart: its reasoning, its answer, and the tools that it calls.

use serde::Serialize;

use crate::answer;
use crate::reasoning::{Part, Splitter};
use crate::tools::{CallParser, Piece};

/// A call as answers have it; in streams, a part of one.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ToolCall {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: Function,
}

#[derive(Clone, Debug, Serialize)]
struct Function {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl ToolCall {
    fn begun(name: String) -> Self {
        Self {
            index: None,
            id: Some(answer::fresh_id("chatcmpl-tool-")),
            kind: Some("function"),
            function: Function { name: Some(name), arguments: String::new() },
        }
    }
}

/// The field `content` of a message.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(untagged)]
enum Content {
    #[default]
    Absent,
    Null,
    Text(String),
}

impl Content {
    const fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

/// A message, or what is new of one.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Message {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Content::is_absent")]
    content: Content,
    /// Two names of the same: clients know the one or the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Vec<ToolCall>>,
}

impl Message {
    /// Whether it begins one, in a stream.
    pub(crate) const fn begins(&self) -> bool {
        self.role.is_some()
    }

    /// Text and nothing else.
    pub(crate) fn text(text: String) -> Self {
        Self { content: Content::Text(text), ..Self::default() }
    }

    /// The beginning of a message in a stream.
    pub(crate) fn begun(text: String) -> Self {
        Self { role: Some("assistant"), ..Self::text(text) }
    }

    fn reasoning(text: String) -> Self {
        Self { reasoning_content: Some(text.clone()), reasoning: Some(text), ..Self::default() }
    }
}

/// What is said of one sample, in its order.
enum Said {
    Reasoning(String),
    Piece(Piece),
}

/// Listens to one sample.
#[derive(Clone, Debug)]
pub(crate) struct Listener {
    reasoning: Option<Splitter>,
    /// Whether reasoning is told.
    tells_reasoning: bool,
    parser: Option<CallParser>,
    calls: usize,
}

impl Listener {
    pub(crate) fn new(reasoning: Option<Splitter>, tells_reasoning: bool, parser: Option<CallParser>) -> Self {
        Self { reasoning, tells_reasoning, parser, calls: 0 }
    }

    /// Whether tools were called.
    pub(crate) fn has_calls(&self) -> bool {
        self.calls > 0
    }

    fn hear(&mut self, text: &str, ends: bool) -> Vec<Said> {
        let mut said = Vec::new();
        let (mut reasons, mut answers) = (String::new(), String::new());
        match &mut self.reasoning {
            None => answers.push_str(text),
            Some(splitter) => {
                let mut told = |part, text: &str| match part {
                    Part::Reasoning => reasons.push_str(text),
                    Part::Answer => answers.push_str(text),
                };
                splitter.push(text, &mut told);
                if ends {
                    splitter.finish(&mut told);
                }
            }
        }
        if self.tells_reasoning && !reasons.is_empty() {
            said.push(Said::Reasoning(reasons));
        }
        let mut pieces = Vec::new();
        match &mut self.parser {
            None if answers.is_empty() => {}
            None => pieces.push(Piece::Text(answers)),
            Some(parser) => {
                parser.push(&answers, &mut pieces);
                if ends {
                    parser.finish(&mut pieces);
                }
            }
        }
        self.calls += pieces.iter().filter(|piece| matches!(piece, Piece::Call(_))).count();
        said.extend(pieces.into_iter().map(Said::Piece));
        said
    }

    /// What is new with a piece of text; with `ends` it is the last.
    pub(crate) fn parts(&mut self, text: &str, ends: bool) -> Vec<Message> {
        let mut index = self.calls;
        let said = self.hear(text, ends);
        let part = |said| match said {
            Said::Reasoning(text) => Message::reasoning(text),
            Said::Piece(Piece::Text(text)) => Message::text(text),
            Said::Piece(Piece::Call(name)) => {
                index += 1;
                let call = ToolCall { index: Some(index - 1), ..ToolCall::begun(name) };
                Message { tool_calls: Some(vec![call]), ..Message::default() }
            }
            Said::Piece(Piece::Arguments(arguments)) => {
                let function = Function { name: None, arguments };
                let call = ToolCall { index: Some(index.saturating_sub(1)), id: None, kind: None, function };
                Message { tool_calls: Some(vec![call]), ..Message::default() }
            }
        };
        said.into_iter().map(part).collect()
    }

    /// The whole message of a whole text.
    pub(crate) fn message(&mut self, text: &str, echoed: &str) -> Message {
        let (mut content, mut reasons, mut calls) = (echoed.to_owned(), None, Vec::<ToolCall>::new());
        for said in self.hear(text, true) {
            match said {
                Said::Reasoning(text) => reasons.get_or_insert_with(String::new).push_str(&text),
                Said::Piece(Piece::Text(text)) => content.push_str(&text),
                Said::Piece(Piece::Call(name)) => calls.push(ToolCall::begun(name)),
                Said::Piece(Piece::Arguments(more)) => {
                    if let Some(call) = calls.last_mut() {
                        call.function.arguments.push_str(&more);
                    }
                }
            }
        }
        let silent = content.is_empty() && (reasons.is_some() || !calls.is_empty());
        Message {
            role: Some("assistant"),
            content: if silent { Content::Null } else { Content::Text(content) },
            reasoning_content: reasons.clone(),
            reasoning: reasons,
            tool_calls: (!calls.is_empty()).then_some(calls),
        }
    }
}
