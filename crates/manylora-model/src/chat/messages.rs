//! What a template gets to see of the messages, and what is left of its text when the last message stays open.

use serde_json::{Map, Value, json};

use crate::error::ModelError;

/// Whether message content reaches the template as text or as a list of parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContentFormat {
    /// Text stays text; lists of parts stay lists where the template understands them, otherwise they become text.
    #[default]
    Auto,
    /// Always text, parts joined by newlines.
    String,
    /// Always a list of `{"type": "text", "text": ...}`.
    Parts,
}

fn refused(message: String) -> ModelError {
    ModelError::ChatTemplate(message)
}

/// Whether any content is a list.
pub(super) fn has_parts(messages: &Value) -> bool {
    messages.as_array().is_some_and(|messages| messages.iter().any(|message| message["content"].is_array()))
}

/// Checks the messages and brings their content, and the arguments of earlier tool calls, into the form templates take.
pub(super) fn prepare(messages: &Value, format: ContentFormat, as_parts: bool) -> Result<Value, ModelError> {
    let messages = messages.as_array().filter(|messages| !messages.is_empty());
    let Some(messages) = messages else {
        return Err(refused("a conversation is a non-empty list of messages with `role` and `content`".to_owned()));
    };
    let mut prepared = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        let Some(message) = message.as_object() else {
            return Err(refused(format!("message {index} is `{message}` and not an object with `role` and `content`")));
        };
        if !message.get("role").is_some_and(Value::is_string) {
            return Err(refused(format!("message {index} has no `role`")));
        }
        let mut message = message.clone();
        // What a client fills in with null is not there.
        message.retain(|name, value| name == "content" || !value.is_null());
        let texts = texts(message.get("content").unwrap_or(&Value::Null), index)?;
        let content = match texts {
            Content::Text(text) if format == ContentFormat::Parts => json!([{"type": "text", "text": text}]),
            Content::Text(text) => Value::String(text),
            Content::Parts(texts) if as_parts => {
                texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect()
            }
            Content::Parts(texts) => Value::String(texts.join("\n")),
        };
        message.insert("content".to_owned(), content);
        // Two names of the same, of which templates know the older.
        if let (Some(reasoning), None) = (message.get("reasoning"), message.get("reasoning_content")) {
            let reasoning = reasoning.clone();
            message.insert("reasoning_content".to_owned(), reasoning);
        }
        parse_arguments(&mut message, index)?;
        prepared.push(Value::Object(message));
    }
    Ok(Value::Array(prepared))
}

enum Content {
    Text(String),
    Parts(Vec<String>),
}

fn texts(content: &Value, index: usize) -> Result<Content, ModelError> {
    match content {
        Value::Null => Ok(Content::Text(String::new())),
        Value::String(text) => Ok(Content::Text(text.clone())),
        Value::Array(parts) => {
            let mut texts = Vec::with_capacity(parts.len());
            for part in parts {
                let kind = part["type"].as_str().unwrap_or("text");
                let text = part.as_str().or_else(|| part["text"].as_str());
                match (kind, text) {
                    ("text" | "input_text" | "output_text", Some(text)) => texts.push(text.to_owned()),
                    _ => {
                        return Err(refused(format!(
                            "message {index} has a content part of type `{kind}`; this model takes text parts only"
                        )));
                    }
                }
            }
            Ok(Content::Parts(texts))
        }
        other => {
            Err(refused(format!("the content of message {index} is `{other}` and neither text nor a list of parts")))
        }
    }
}

/// Clients send a tool call's arguments as JSON in a string; templates print the object.
fn parse_arguments(message: &mut Map<String, Value>, index: usize) -> Result<(), ModelError> {
    let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) else {
        return Ok(());
    };
    for call in calls {
        let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments")) else {
            continue;
        };
        if let Value::String(text) = arguments {
            *arguments = if text.trim().is_empty() {
                Value::Object(Map::new())
            } else {
                serde_json::from_str(text).map_err(|error| {
                    refused(format!("the arguments of a tool call in message {index} are not JSON: {error}"))
                })?
            };
        }
    }
    Ok(())
}

/// The text up to the end of the last message's content.
pub(super) fn cut_after_final(text: &str, conversation: &Value) -> Result<String, ModelError> {
    let last =
        conversation.as_array().and_then(|messages| messages.last()).map_or(&Value::Null, |last| &last["content"]);
    let last = match last {
        Value::Array(parts) => parts.last().map_or(&Value::Null, |part| &part["text"]),
        content => content,
    };
    let content = last.as_str().unwrap_or_default();
    let Some(start) = text.rfind(content.trim()) else {
        return Err(refused(
            "`continue_final_message` is set and the template does not print the last message as it is; the model \
             cannot continue it"
                .to_owned(),
        ));
    };
    let unstripped = content.trim_start();
    let end = if text[start..].starts_with(unstripped) { unstripped.len() } else { content.trim().len() };
    Ok(text[..start + end].to_owned())
}
