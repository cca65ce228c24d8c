//! `/v1/chat/completions`: messages, through the model's chat template.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use manylora::model::chat::RenderOptions;
use manylora::{Delta, GenerateRequest, Prompt, SamplingParams};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::answer::{self, ToldUsage, Usage};
use crate::app::{App, unix_time};
use crate::body;
use crate::completions::{cache_salt, stop_reason};
use crate::error::ApiError;
use crate::events::{self, Events, StreamOptions, Writer};
use crate::fields::Fields;
use crate::generation::Generation;
use crate::keys::Caller;
use crate::logprobs::{self, ChatLogprobs, Speller};
use crate::sampling;
use crate::target::{self, Target};

/// A conversation, and how its template renders it.
pub(crate) struct Conversation {
    pub(crate) messages: Value,
    pub(crate) template: Option<String>,
    pub(crate) options: RenderOptions,
    pub(crate) add_special_tokens: bool,
}

impl Conversation {
    /// Reads what chat requests and `/tokenize` have in common.
    pub(crate) fn read(app: &App, fields: &mut Fields) -> Result<Self, ApiError> {
        let messages = fields.array("messages")?.unwrap_or_default();
        if messages.is_empty() {
            return Err(ApiError::bad_request("`messages` is missing or empty; give at least one").about("messages"));
        }
        let template = fields.text("chat_template")?;
        if template.is_some() && !app.config.trust_request_chat_template {
            return Err(ApiError::bad_request(
                "Chat template is passed with request, but --trust-request-chat-template is not set. Refused request with \
                 untrusted chat template.",
            )
            .about("chat_template"));
        }
        let mut kwargs = fields.object("chat_template_kwargs")?.unwrap_or_else(Map::new);
        if let Some(effort) = fields.text("reasoning_effort")? {
            kwargs.entry("reasoning_effort").or_insert(Value::String(effort));
        }
        let continue_final_message = fields.flag("continue_final_message")?.unwrap_or(false);
        let options = RenderOptions {
            documents: fields.array("documents")?.map(Value::Array),
            add_generation_prompt: fields.flag("add_generation_prompt")?.unwrap_or(true),
            continue_final_message,
            kwargs,
            ..RenderOptions::default()
        };
        if options.add_generation_prompt && continue_final_message {
            return Err(ApiError::bad_request(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            )
            .about("continue_final_message"));
        }
        let add_special_tokens = fields.flag("add_special_tokens")?.unwrap_or(false);
        Ok(Self { messages: Value::Array(messages), template, options, add_special_tokens })
    }

    /// The text of the prompt.
    pub(crate) async fn render(self, app: &Arc<App>) -> Result<String, ApiError> {
        app.blocking(move |app| app.engine.render_chat(&self.messages, self.template.as_deref(), &self.options)).await
    }
}

struct Asked {
    target: Target,
    conversation: Conversation,
    params: SamplingParams,
    /// Most likely tokens to list; None = no logprobs at all.
    logprobs: Option<usize>,
    stream: Option<StreamOptions>,
    speller: Speller,
    token_ids: bool,
    echo: bool,
    cache_salt: Option<String>,
    priority: i64,
}

fn read(app: &App, caller: &Caller, fields: &mut Fields) -> Result<Asked, ApiError> {
    let target = target::read(app, caller, fields)?;
    let stream = StreamOptions::read(fields)?;
    let generation = app.config.use_generation_config.then(|| &app.engine.info().generation);
    let mut params = sampling::read(fields, generation)?;
    sampling::refuse_structure(fields)?;
    refuse_tools(fields)?;
    let most = fields.count("max_completion_tokens")?;
    // Older clients say max_tokens; where both are given the newer counts.
    let older = fields.count("max_tokens")?;
    params.max_tokens = most.or(older);
    if params.max_tokens == Some(0) {
        return Err(ApiError::bad_request("max_tokens must be at least 1, got 0.").about("max_tokens"));
    }
    if params.max_tokens.is_none() {
        params.max_tokens = generation.and_then(|it| it.max_new_tokens).map(|most| most as usize);
    }
    let (wanted, top) = (fields.flag("logprobs")?.unwrap_or(false), sampling::logprob_count(fields, "top_logprobs")?);
    if top.is_some_and(|top| top != 0) && !wanted {
        return Err(
            ApiError::bad_request("when using `top_logprobs`, `logprobs` must be set to true.").about("top_logprobs")
        );
    }
    params.logprobs = wanted.then(|| top.unwrap_or(0));
    if stream.is_some() && params.prompt_logprobs.is_some() {
        return Err(
            ApiError::bad_request("`prompt_logprobs` are not available when `stream=True`.").about("prompt_logprobs")
        );
    }
    Ok(Asked {
        target,
        conversation: Conversation::read(app, fields)?,
        logprobs: params.logprobs.map(|count| usize::try_from(count).unwrap_or(usize::MAX)),
        params,
        stream,
        speller: Speller {
            engine: app.engine.clone(),
            as_ids: fields.flag("return_tokens_as_token_ids")?.unwrap_or(false),
        },
        token_ids: fields.flag("return_token_ids")?.unwrap_or(false),
        echo: fields.flag("echo")?.unwrap_or(false),
        cache_salt: cache_salt(fields)?,
        priority: fields.integer("priority")?.unwrap_or(0),
    })
}

fn refuse_tools(fields: &mut Fields) -> Result<(), ApiError> {
    let choice = fields.value("tool_choice");
    let unused = choice.is_none_or(|choice| choice == "none");
    match fields.array("tools")? {
        Some(tools) if !tools.is_empty() && !unused => Err(ApiError::bad_request(
            "`tools` are not supported yet; leave them out, or set `tool_choice` to \"none\"",
        )
        .about("tools")),
        _ => Ok(()),
    }
}

/// The route.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let answering = app.answering();
    let mut fields = body::read(&headers, body, app.config.max_body_bytes).await?;
    target::resolve(&app, &caller, &fields).await?;
    let asked = read(&app, &caller, &mut fields)?;
    let (add_special_tokens, samples) = (asked.conversation.add_special_tokens, asked.params.n);
    let echoed = if asked.echo { last_content(&asked.conversation.messages) } else { String::new() };
    let text = asked.conversation.render(&app).await?;
    let prompt_logprobs = asked.params.prompt_logprobs.is_some();
    let request = GenerateRequest {
        prompt: Prompt::Text { text, add_special_tokens },
        params: asked.params,
        adapters: asked.target.adapters,
        priority: asked.priority,
        cache_salt: asked.cache_salt,
        tenant: caller.tenant(),
    };
    let generation = Generation::start((&app, &caller), vec![request], asked.stream.is_some()).await?;
    let version = generation.version.clone();
    let mut maker = Maker {
        id: answer::fresh_id("chatcmpl-"),
        created: unix_time(),
        model: asked.target.name,
        echoed,
        logprobs: asked.logprobs,
        speller: asked.speller,
        token_ids: asked.token_ids,
        prompt_logprobs,
        prompt: generation.prompts.first().cloned().unwrap_or_default(),
        tokens: vec![0; samples],
        cached: 0,
    };
    let response = match asked.stream {
        Some(options) => events::respond(generation, StreamWriter { maker, options }, answering),
        None => maker.whole(generation, samples).await?,
    };
    Ok(answer::with_version(response, version.as_deref()))
}

/// Text of the last message, for `echo`.
fn last_content(messages: &Value) -> String {
    let last = messages.as_array().and_then(|messages| messages.last());
    last.and_then(|message| message.get("content")?.as_str()).unwrap_or_default().to_owned()
}

#[derive(Serialize)]
struct Message {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Message>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Message>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
struct Chat<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice>,
    #[serde(skip_serializing_if = "ToldUsage::is_absent")]
    usage: ToldUsage,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

/// Makes choices of deltas.
struct Maker {
    id: String,
    created: u64,
    model: String,
    /// What the answer's text begins with.
    echoed: String,
    logprobs: Option<usize>,
    speller: Speller,
    token_ids: bool,
    prompt_logprobs: bool,
    prompt: Vec<u32>,
    /// Of each sample, so far.
    tokens: Vec<usize>,
    cached: usize,
}

impl Maker {
    fn choice(&mut self, delta: Delta, text: String, whole: bool) -> Choice {
        self.tokens[delta.index] += delta.token_ids.len();
        self.cached = self.cached.max(delta.cached_tokens);
        let message = Message { role: whole.then_some("assistant"), content: Some(text) };
        let (message, part) = if whole { (Some(message), None) } else { (None, Some(message)) };
        Choice {
            index: delta.index,
            message,
            delta: part,
            logprobs: self.logprobs.map(|most| ChatLogprobs::new(&delta.logprobs, most, &self.speller)),
            finish_reason: delta.finish_reason.map(manylora::FinishReason::as_str),
            stop_reason: stop_reason(delta.stop_reason),
            token_ids: self.token_ids.then_some(delta.token_ids),
        }
    }

    fn usage(&self) -> Usage {
        Usage::new(self.prompt.len(), self.tokens.iter().sum(), self.cached)
    }

    fn told(&self, object: &'static str, choices: Vec<Choice>, usage: ToldUsage) -> Chat<'_> {
        Chat {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage,
            prompt_logprobs: None,
            prompt_token_ids: None,
        }
    }

    async fn whole(&mut self, mut generation: Generation, samples: usize) -> Result<Response, ApiError> {
        let mut all = generation.finish(samples).await?.pop().unwrap_or_default();
        let known = all.first_mut().and_then(|first| first.prompt_logprobs.take());
        let choices = all
            .into_iter()
            .map(|mut delta| {
                let text = format!("{}{}", self.echoed, std::mem::take(&mut delta.text));
                self.choice(delta, text, true)
            })
            .collect();
        let mut chat = self.told("chat.completion", choices, ToldUsage::Now(self.usage()));
        chat.prompt_logprobs =
            self.prompt_logprobs.then(|| known.map_or(Value::Null, |known| logprobs::of_prompt(&known, &self.speller)));
        chat.prompt_token_ids = self.token_ids.then_some(&self.prompt);
        Ok(answer::json(&chat))
    }
}

struct StreamWriter {
    maker: Maker,
    options: StreamOptions,
}

const CHUNK: &str = "chat.completion.chunk";

impl Writer for StreamWriter {
    fn begin(&mut self, _: &Generation, events: &mut Events) {
        for index in 0..self.maker.tokens.len() {
            let message = Message { role: Some("assistant"), content: Some(self.maker.echoed.clone()) };
            let choice = Choice {
                index,
                message: None,
                delta: Some(message),
                logprobs: None,
                finish_reason: None,
                stop_reason: Value::Null,
                token_ids: None,
            };
            let mut chat = self.maker.told(CHUNK, vec![choice], self.options.usage(|| self.maker.usage()));
            chat.prompt_token_ids = (self.maker.token_ids && index == 0).then_some(&self.maker.prompt);
            events.push(&chat);
        }
    }

    fn delta(&mut self, _: usize, mut delta: Delta, events: &mut Events) {
        let text = std::mem::take(&mut delta.text);
        let empty = text.is_empty() && delta.finish_reason.is_none();
        let choice = self.maker.choice(delta, text, false);
        if empty && choice.logprobs.is_none() && choice.token_ids.is_none() {
            // Half a character: it comes with its other half.
            return;
        }
        events.push(&self.maker.told(CHUNK, vec![choice], self.options.usage(|| self.maker.usage())));
    }

    fn end(&mut self, events: &mut Events) {
        if self.options.include_usage {
            events.push(&self.maker.told(CHUNK, Vec::new(), ToldUsage::Now(self.maker.usage())));
        }
    }
}
