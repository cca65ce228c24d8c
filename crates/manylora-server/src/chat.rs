//! `/v1/chat/completions`: messages, through the model's chat template.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use manylora::model::chat::RenderOptions;
use manylora::{Delta, FinishReason, GenerateRequest, Prompt, SamplingParams};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::answer::{self, ToldUsage, Usage};
use crate::app::{App, unix_time};
use crate::completions::{cache_salt, stop_reason};
use crate::error::ApiError;
use crate::events::{self, Maker as _, StreamOptions};
use crate::fields::Fields;
use crate::generation::{self, Blame, Extent, Generation, Given};
use crate::identity;
use crate::keys::Caller;
use crate::logprobs::{ChatLogprobs, PromptLogprobs, Speller};
use crate::reasoning::{CLOSE, OPEN, Splitter};
use crate::sampling;
use crate::speech::{Listener, Message};
use crate::structured;
use crate::target::{self, Target};
use crate::tools::{self, CallParser, Tools};

/// A conversation, and how its template renders it.
pub(crate) struct Conversation {
    pub(crate) messages: Value,
    pub(crate) template: Option<String>,
    pub(crate) options: RenderOptions,
    pub(crate) add_special_tokens: bool,
}

impl Conversation {
    /// Reads what chat requests and `/tokenize` have in common; `tools` are those that the template gets.
    pub(crate) fn read(app: &App, fields: &mut Fields, tools: Option<Value>) -> Result<Self, ApiError> {
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
            // Templates tell an empty list from none.
            tools: tools.filter(|tools| tools.as_array().is_none_or(|tools| !tools.is_empty())),
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

    /// The text of the prompt, and `held`, which lasts as long as making it does, whether or not somebody waits for it.
    pub(crate) async fn render<T: Send + 'static>(self, app: &Arc<App>, held: T) -> Result<(String, T), ApiError> {
        app.blocking(move |app| {
            let text = app.engine.render_chat(&self.messages, self.template.as_deref(), &self.options)?;
            Ok((text, held))
        })
        .await
    }
}

struct Asked {
    target: Target,
    conversation: Conversation,
    params: SamplingParams,
    /// Most likely tokens to list; None = no logprobs at all.
    logprobs: Option<usize>,
    stream: Option<StreamOptions>,
    tools: Tools,
    include_reasoning: bool,
    speller: Speller,
    token_ids: bool,
    echo: bool,
    cache_salt: Option<String>,
    priority: i64,
    /// The answer's.
    id: String,
}

impl Asked {
    /// Reads calls out of the answer, unless it is to be JSON of another kind.
    fn parser(&self) -> Option<CallParser> {
        let outputs = self.params.structured_outputs.as_ref();
        let is_json = outputs.is_some_and(|outputs| outputs.json.is_some() || outputs.json_object.is_some());
        self.tools.parser(self.stream.is_none()).filter(|_| !is_json)
    }
}

fn read((app, caller): (&App, &Caller), headers: &HeaderMap, fields: &mut Fields) -> Result<Asked, ApiError> {
    let target = target::read(app, caller, fields)?;
    let stream = StreamOptions::read(fields)?;
    let generation = app.config.use_generation_config.then(|| &app.engine.info().generation);
    let mut params = sampling::read(fields, generation)?;
    let (tools, definitions, demanded) = Tools::read(app, fields)?;
    let engine = &app.engine;
    if let Some(demanded) = demanded {
        if params.structured_outputs.is_some() {
            return Err(ApiError::bad_request(
                "`tool_choice` demands calls and `response_format` or `structured_outputs` demands something else; give one",
            )
            .about("tool_choice"));
        }
        params.structured_outputs = Some(demanded);
    }
    let reasons_by = |mark| app.config.reasoning_format.is_some() && tools::is_special(engine, mark);
    if tools.has_special_marks(engine) || reasons_by(OPEN) || reasons_by(CLOSE) {
        // Their text is what they are found by.
        params.skip_special_tokens = false;
    }
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
        conversation: Conversation::read(app, fields, definitions)?,
        tools,
        include_reasoning: fields.flag("include_reasoning")?.unwrap_or(true),
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
        priority: identity::priority(headers, fields)?,
        id: identity::answer_id("chatcmpl-", headers, fields)?,
    })
}

/// The route.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let answering = app.answering();
    let fields = app.read(&headers, body).await?;
    target::resolve(&app, &caller, &fields).await?;
    let asker = caller.clone();
    let taken = app.take(fields, move |app, fields| {
        let mut blame = Blame { prompt: "messages", structure: structured::field(fields) };
        let asked = read((app, &asker), &headers, fields)?;
        if asked.tools.are_demanded() {
            blame.structure = "tools";
        }
        let echoed = if asked.echo { last_content(&asked.conversation.messages) } else { String::new() };
        let extent = Extent {
            prompts: 1,
            params: &asked.params,
            adapters: &asked.target.adapters,
            cache_salt: asked.cache_salt.as_deref(),
            repeated: echoed.len(),
            needed: asked.tools.bytes(),
        };
        let admitted = generation::admit(app, &asker, &extent)?;
        Ok((asked, echoed, admitted, blame))
    });
    let ((mut asked, echoed, (pending, kept), blame), room) = taken.await?;
    let (add_special_tokens, samples) = (asked.conversation.add_special_tokens, asked.params.n);
    let continues = asked.conversation.options.continue_final_message;
    let parser = asked.parser();
    let called = if asked.tools.is_named() { "stop" } else { "tool_calls" };
    let (text, (pending, mut room)) = asked.conversation.render(&app, (pending, room)).await?;
    room.keep(kept.at_first + text.len());
    let given = Given { pending, room, to_the_end: kept.to_the_end };
    let splitter = app.config.reasoning_format.map(|format| Splitter::after(format, &text, continues));
    if let (Some(splitter), Some(outputs)) = (&splitter, &mut asked.params.structured_outputs) {
        splitter.put_off(outputs);
    }
    let listener = Listener::new(splitter, asked.include_reasoning, parser);
    let prompt_logprobs = asked.params.prompt_logprobs.is_some();
    let request = GenerateRequest {
        prompt: Prompt::Text { text, add_special_tokens },
        params: Arc::new(asked.params),
        adapters: asked.target.adapters,
        priority: asked.priority,
        cache_salt: asked.cache_salt,
        tenant: caller.tenant(),
    };
    let streaming = asked.stream.is_some();
    let generation = Generation::start((&app, &caller, given), vec![request], streaming, blame, &asked.id).await?;
    let version = generation.version.clone();
    let maker = Maker {
        id: asked.id,
        created: unix_time(),
        model: asked.target.name,
        echoed,
        logprobs: asked.logprobs,
        speller: asked.speller,
        token_ids: asked.token_ids,
        prompt_logprobs,
        prompt: generation.prompts.first().map_or_else(|| [].into(), Arc::clone),
        tokens: vec![0; samples],
        listeners: vec![listener; samples],
        called,
        cached: 0,
    };
    let response = match asked.stream {
        Some(options) => events::respond(generation, maker, options, answering),
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
    prompt_logprobs: Option<PromptLogprobs>,
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
    prompt: Arc<[u32]>,
    /// Of each sample, so far.
    tokens: Vec<usize>,
    listeners: Vec<Listener>,
    /// Why an answer with calls has ended.
    called: &'static str,
    cached: usize,
}

impl Maker {
    /// Choices without their messages have all else that there is to tell.
    fn choice(&mut self, delta: Delta) -> Choice {
        self.tokens[delta.index] += delta.token_ids.len();
        self.cached = self.cached.max(delta.cached_tokens);
        let calls = self.listeners[delta.index].has_calls();
        Choice {
            index: delta.index,
            message: None,
            delta: None,
            logprobs: self.logprobs.map(|most| ChatLogprobs {
                positions: delta.logprobs,
                most,
                speller: self.speller.clone(),
            }),
            finish_reason: delta.finish_reason.map(|reason| match reason {
                FinishReason::Stop if calls => self.called,
                other => other.as_str(),
            }),
            stop_reason: stop_reason(delta.stop_reason),
            token_ids: self.token_ids.then_some(delta.token_ids),
        }
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

    async fn whole(mut self, mut generation: Generation, samples: usize) -> Result<Response, ApiError> {
        let all = generation.finish(samples).await?;
        let write = move |mut all: Vec<Vec<Delta>>| {
            let mut all = all.pop().unwrap_or_default();
            let known = all.first_mut().and_then(|first| first.prompt_logprobs.take()).map(Arc::from);
            let choices = all
                .into_iter()
                .map(|mut delta| {
                    let text = std::mem::take(&mut delta.text);
                    let message = self.listeners[delta.index].message(&text, &self.echoed);
                    Choice { message: Some(message), ..self.choice(delta) }
                })
                .collect();
            let mut chat = self.told("chat.completion", choices, ToldUsage::Now(self.usage()));
            chat.prompt_logprobs =
                self.prompt_logprobs.then(|| PromptLogprobs { known, speller: self.speller.clone() });
            chat.prompt_token_ids = self.token_ids.then_some(&self.prompt);
            answer::json_text(&chat)
        };
        generation.answer(all, write).await
    }
}

impl events::Maker for Maker {
    type Choice = Choice;

    fn opening(&self) -> Vec<Choice> {
        let choice = |index| Choice {
            index,
            message: None,
            delta: Some(Message::begun(self.echoed.clone())),
            logprobs: None,
            finish_reason: None,
            stop_reason: Value::Null,
            token_ids: None,
        };
        (0..self.tokens.len()).map(choice).collect()
    }

    /// A choice for each part of what was said.
    fn choices(&mut self, _: usize, mut delta: Delta) -> Vec<Choice> {
        let (index, text) = (delta.index, std::mem::take(&mut delta.text));
        let mut parts = self.listeners[index].parts(&text, delta.finish_reason.is_some());
        let mut all = self.choice(delta);
        if parts.is_empty() {
            if all.finish_reason.is_none() && all.logprobs.is_none() && all.token_ids.is_none() {
                // Half a character, or the beginning of a mark: it comes with the rest.
                return Vec::new();
            }
            parts.push(Message::text(String::new()));
        }
        let last = parts.len() - 1;
        let choice = |(at, part)| Choice {
            index,
            message: None,
            delta: Some(part),
            // Tokens go with the first part, the end with the last.
            logprobs: all.logprobs.take(),
            token_ids: all.token_ids.take(),
            finish_reason: all.finish_reason.take_if(|_| at == last),
            stop_reason: if at == last { all.stop_reason.take() } else { Value::Null },
        };
        parts.into_iter().enumerate().map(choice).collect()
    }

    fn usage(&self) -> Usage {
        Usage::new(self.prompt.len(), self.tokens.iter().sum(), self.cached)
    }

    fn event(&self, choice: Option<Choice>, usage: ToldUsage) -> impl Serialize {
        let begun = choice.as_ref().filter(|choice| choice.index == 0).and_then(|choice| choice.delta.as_ref());
        let opens = begun.is_some_and(Message::begins);
        let chat = self.told("chat.completion.chunk", choice.into_iter().collect(), usage);
        Chat { prompt_token_ids: (self.token_ids && opens).then_some(&self.prompt), ..chat }
    }
}
