//! Chat templates: messages to prompt text, as transformers renders them with Jinja.
//!
//! [`ChatTemplate`] holds a checkpoint's templates compiled once. Reading order: this file, [`messages`] (what the
//! template gets to see), [`python`] (where Jinja in Python and here differ), [`clock`], [`sources`] (where templates
//! are found).

mod clock;
mod messages;
mod python;
mod sources;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use minijinja::{Environment, Value as JinjaValue};
use serde_json::{Map, Value};

use crate::error::ModelError;
use crate::tokenizer::Tokenizer;

pub use messages::ContentFormat;

/// Instructions a rendering may take; a real template takes some thousands per message.
const FUEL: u64 = 10_000_000;

/// The name of a checkpoint's main template.
const DEFAULT: &str = "default";
/// The name of the template that is preferred when tools are given.
const TOOL_USE: &str = "tool_use";

/// The chat templates of a checkpoint, compiled; clones share them.
#[derive(Clone)]
pub struct ChatTemplate {
    inner: Arc<Inner>,
}

struct Inner {
    environment: Environment<'static>,
    names: Vec<String>,
    special_tokens: BTreeMap<String, String>,
    takes_parts: OnceLock<bool>,
}

/// What a rendering is asked for.
#[derive(Clone, Debug)]
pub struct RenderOptions {
    /// Tool definitions, as a JSON array.
    pub tools: Option<Value>,
    /// Documents to answer from, as a JSON array.
    pub documents: Option<Value>,
    /// Whether the prompt ends with the beginning of an assistant's turn.
    pub add_generation_prompt: bool,
    /// Whether the last message is left open for the model to continue.
    pub continue_final_message: bool,
    /// More variables for the template, such as `enable_thinking`.
    pub kwargs: Map<String, Value>,
    /// Whether message content is given as text or as a list of parts.
    pub content_format: ContentFormat,
    /// Seconds since 1970 in local time, for templates that print the date. None is the system's clock, in UTC.
    pub now: Option<i64>,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self {
            tools: None,
            documents: None,
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: Map::new(),
            content_format: ContentFormat::Auto,
            now: None,
        }
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("names", &self.inner.names).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles one template given as text.
    pub fn from_text(template: &str, tokenizer: &Tokenizer) -> Result<Self, ModelError> {
        Self::compile([(DEFAULT.to_owned(), template.to_owned())], tokenizer.named_tokens().clone())
    }

    /// The error for a checkpoint without a template.
    pub fn missing() -> ModelError {
        ModelError::ChatTemplate(
            "this model has no chat template (neither chat_template.jinja nor `chat_template` in tokenizer_config.json \
             nor in the GGUF metadata); give one with `chat_template`, or use `generate` with a plain prompt"
                .to_owned(),
        )
    }

    fn compile(
        templates: impl IntoIterator<Item = (String, String)>,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self, ModelError> {
        let mut environment = python::environment();
        environment.set_fuel(Some(FUEL));
        let mut names = Vec::new();
        for (name, source) in templates {
            environment.add_template_owned(name.clone(), python::without_generation_marks(&source)).map_err(
                |error| ModelError::ChatTemplate(format!("the template `{name}` could not be compiled: {error}")),
            )?;
            names.push(name);
        }
        if names.is_empty() {
            return Err(Self::missing());
        }
        Ok(Self { inner: Arc::new(Inner { environment, names, special_tokens, takes_parts: OnceLock::new() }) })
    }

    /// Whether any of the templates has this text in its source: a sign of what the model was trained to write.
    pub fn mentions(&self, text: &str) -> bool {
        let environment = &self.inner.environment;
        let has = |name: &String| environment.get_template(name).is_ok_and(|template| template.source().contains(text));
        self.inner.names.iter().any(has)
    }

    /// Renders a conversation, a JSON array of messages with `role` and `content`.
    pub fn render(&self, messages: &Value, options: &RenderOptions) -> Result<String, ModelError> {
        if options.add_generation_prompt && options.continue_final_message {
            return Err(ModelError::ChatTemplate(
                "`add_generation_prompt` and `continue_final_message` exclude each other; set one of them to false"
                    .to_owned(),
            ));
        }
        let as_parts = match options.content_format {
            ContentFormat::String => false,
            ContentFormat::Parts => true,
            ContentFormat::Auto => messages::has_parts(messages) && self.takes_parts(),
        };
        let conversation = messages::prepare(messages, options.content_format, as_parts)?;
        let text = self.render_prepared(&conversation, options)?;
        if options.continue_final_message { messages::cut_after_final(&text, &conversation) } else { Ok(text) }
    }

    fn render_prepared(&self, conversation: &Value, options: &RenderOptions) -> Result<String, ModelError> {
        let mut context: BTreeMap<String, JinjaValue> = BTreeMap::new();
        for (role, token) in &self.inner.special_tokens {
            context.insert(role.clone(), JinjaValue::from(token.as_str()));
        }
        context.insert("messages".to_owned(), python::value(conversation));
        context.insert("tools".to_owned(), python::value(&options.tools));
        context.insert("documents".to_owned(), python::value(&options.documents));
        context.insert("add_generation_prompt".to_owned(), JinjaValue::from(options.add_generation_prompt));
        context.insert(clock::VARIABLE.to_owned(), JinjaValue::from(options.now.unwrap_or_else(clock::system)));
        for (name, value) in &options.kwargs {
            if name == "messages" || name == clock::VARIABLE {
                return Err(ModelError::ChatTemplate(format!("`{name}` may not be among the template's kwargs")));
            }
            context.insert(name.clone(), python::value(value));
        }
        let name = self.choose(options.tools.is_some())?;
        let template = self.inner.environment.get_template(name).map_err(|error| python::explain(&error))?;
        template.render(JinjaValue::from_pairs(context)).map_err(|error| python::explain(&error))
    }

    /// The template for a request: `tool_use` when there are tools, otherwise `default` or the only one.
    fn choose(&self, has_tools: bool) -> Result<&str, ModelError> {
        let names = &self.inner.names;
        let find = |wanted: &str| names.iter().find(|name| *name == wanted).map(String::as_str);
        let chosen = if has_tools { find(TOOL_USE).or_else(|| find(DEFAULT)) } else { find(DEFAULT) };
        match (chosen, names.as_slice()) {
            (Some(name), _) => Ok(name),
            (None, [only]) => Ok(only),
            (None, _) => Err(ModelError::ChatTemplate(format!(
                "the model has several templates ({}) and none of them is `{DEFAULT}`; give the one to use",
                names.join(", ")
            ))),
        }
    }

    /// Whether the template understands content that is a list of parts, found out by trying.
    fn takes_parts(&self) -> bool {
        *self.inner.takes_parts.get_or_init(|| {
            const PROBE: &str = "needle7c1f";
            let conversation = serde_json::json!([{"role": "user", "content": [{"type": "text", "text": PROBE}]}]);
            let options = RenderOptions { add_generation_prompt: false, now: Some(0), ..RenderOptions::default() };
            self.render_prepared(&conversation, &options)
                .is_ok_and(|text| text.contains(PROBE) && !text.contains("'text'") && !text.contains("\"text\""))
        })
    }
}

#[cfg(test)]
mod tests;
