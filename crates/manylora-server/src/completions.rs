//! `/v1/completions`: prompts as text or token ids, any number of them in one request.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use manylora::{Delta, GenerateRequest, Prompt, SamplingParams, StopReason};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::answer::{self, ToldUsage, Usage};
use crate::app::{App, unix_time};
use crate::error::ApiError;
use crate::events::{self, Maker as _, StreamOptions};
use crate::fields::{Fields, tokens};
use crate::generation::{self, Blame, Extent, Generation, Given};
use crate::identity;
use crate::json::Ids;
use crate::keys::Caller;
use crate::logprobs::{CompletionLogprobs, OfPrompt, PromptLogprobs, Speller};
use crate::sampling;
use crate::structured;
use crate::target::{self, Target};

/// Tokens that a completion has when nothing is said.
const DEFAULT_MAX_TOKENS: usize = 16;
/// Characters of a salt, which each sequence has for itself.
const LONGEST_SALT: usize = 1024;
/// Bytes that a token of a prompt may take where an answer repeats it.
const REPEATED_TOKEN: usize = 8;

/// What a request asks for.
struct Asked {
    target: Target,
    prompts: Vec<Prompt>,
    params: SamplingParams,
    echo: Echo,
    /// Most likely tokens to list.
    logprobs: Option<usize>,
    stream: Option<StreamOptions>,
    shape: Shape,
    cache_salt: Option<String>,
    priority: i64,
    /// The answer's.
    id: String,
}

impl Asked {
    fn extent(&self) -> Extent<'_> {
        let length = |prompt: &Prompt| match prompt {
            Prompt::Text { text, .. } => text.len(),
            Prompt::Tokens(tokens) => tokens.len(),
        };
        let times = usize::from(self.echo.prompt) + usize::from(self.shape.token_ids);
        Extent {
            prompts: self.prompts.len(),
            params: &self.params,
            adapters: &self.target.adapters,
            cache_salt: self.cache_salt.as_deref(),
            repeated: times * REPEATED_TOKEN * self.prompts.iter().map(length).sum::<usize>(),
            needed: 0,
        }
    }
}

/// What of the prompt an answer begins with.
#[derive(Clone, Copy, Debug, Default)]
struct Echo {
    prompt: bool,
    /// Nothing is to be generated.
    only: bool,
}

/// How an answer looks.
#[derive(Clone, Debug)]
struct Shape {
    speller: Speller,
    token_ids: bool,
    prompt_logprobs: bool,
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Shared>,
}

/// Token ids that are the engine's, too.
struct Shared(Arc<[u32]>);

impl Serialize for Shared {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (*self.0).serialize(serializer)
    }
}

#[derive(Serialize)]
struct Completion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice>,
    #[serde(skip_serializing_if = "ToldUsage::is_absent")]
    usage: ToldUsage,
}

/// What made a sample stop, as vLLM tells it.
pub(crate) fn stop_reason(reason: Option<StopReason>) -> Value {
    match reason {
        None => Value::Null,
        Some(StopReason::Token(token)) => Value::from(token),
        Some(StopReason::Text(text)) => Value::from(text),
    }
}

/// Bytes of a prompt.
fn bytes(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Text { text, .. } => text.len(),
        Prompt::Tokens(tokens) => size_of_val(tokens.as_slice()),
    }
}

/// Reads the prompts, of each of which there are to be so many samples.
fn prompts(fields: &mut Fields, samples: usize) -> Result<Vec<Prompt>, ApiError> {
    let add_special_tokens = fields.flag("add_special_tokens")?.unwrap_or(true);
    match fields.ids("prompt") {
        Some(Ids::One(ids)) => return Ok(vec![Prompt::Tokens(ids)]),
        Some(Ids::Many(all)) => {
            generation::sequences(all.len(), samples)?;
            return Ok(all.into_iter().map(Prompt::Tokens).collect());
        }
        None => {}
    }
    let Some(value) = fields.value("prompt") else {
        return Err(
            ApiError::bad_request("`prompt` is missing; give text, token ids, or an array of them").about("prompt")
        );
    };
    let wrong = || {
        ApiError::bad_request(
            "`prompt` must be text, an array of texts, an array of token ids, or an array of such arrays",
        )
        .about("prompt")
    };
    let text = |text: String| Prompt::Text { text, add_special_tokens };
    if let Value::Array(items) = &value
        && items.first().is_some_and(|item| item.is_string() || item.is_array())
    {
        generation::sequences(items.len(), samples)?;
    }
    match value {
        Value::String(prompt) => Ok(vec![text(prompt)]),
        Value::Array(items) if items.is_empty() => {
            Err(ApiError::bad_request("`prompt` is an empty array; give at least one prompt").about("prompt"))
        }
        Value::Array(items) if items[0].is_string() => {
            let prompt = |item| if let Value::String(prompt) = item { Ok(text(prompt)) } else { Err(wrong()) };
            items.into_iter().map(prompt).collect()
        }
        Value::Array(items) if items[0].is_array() => {
            items.iter().map(|item| tokens(item).map(Prompt::Tokens).ok_or_else(wrong)).collect()
        }
        value @ Value::Array(_) => tokens(&value).map(|tokens| vec![Prompt::Tokens(tokens)]).ok_or_else(wrong),
        _ => Err(wrong()),
    }
}

/// A salt that keeps KV blocks apart.
pub(crate) fn cache_salt(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    match fields.text("cache_salt")? {
        Some(salt) if salt.is_empty() => {
            Err(ApiError::bad_request("`cache_salt` must be a non-empty string if provided").about("cache_salt"))
        }
        Some(salt) if salt.chars().count() > LONGEST_SALT => Err(ApiError::bad_request(format!(
            "`cache_salt` has `{}` characters, and may have {LONGEST_SALT}: send a digest of it",
            salt.chars().count()
        ))
        .about("cache_salt")),
        salt => Ok(salt),
    }
}

fn read((app, caller): (&App, &Caller), headers: &HeaderMap, fields: &mut Fields) -> Result<Asked, ApiError> {
    // First, so that a wrong name is what a request with a wrong name is told.
    let target = target::read(app, caller, fields)?;
    let stream = StreamOptions::read(fields)?;
    let generation = app.config.use_generation_config.then(|| &app.engine.info().generation);
    let mut params = sampling::read(fields, generation)?;
    params.max_tokens = Some(fields.count("max_tokens")?.unwrap_or(DEFAULT_MAX_TOKENS));
    let wanted = sampling::logprob_count(fields, "logprobs")?;
    params.logprobs = wanted;
    let mut echo = Echo { prompt: fields.flag("echo")?.unwrap_or(false), only: false };
    if params.max_tokens == Some(0) {
        if !echo.prompt {
            return Err(ApiError::bad_request("max_tokens must be at least 1, got 0 (only `echo` goes with 0).")
                .about("max_tokens"));
        }
        // Something has to run for the prompt's logprobs; what comes out of it is not told.
        echo.only = true;
        params.max_tokens = Some(1);
    }
    let asked_for = params.prompt_logprobs.is_some();
    if echo.prompt && params.logprobs.is_some() && params.prompt_logprobs.is_none() {
        params.prompt_logprobs = params.logprobs;
    }
    if stream.is_some() && asked_for {
        return Err(
            ApiError::bad_request("`prompt_logprobs` are not available when `stream=True`.").about("prompt_logprobs")
        );
    }
    let shape = Shape {
        speller: Speller {
            engine: app.engine.clone(),
            as_ids: fields.flag("return_tokens_as_token_ids")?.unwrap_or(false),
        },
        token_ids: fields.flag("return_token_ids")?.unwrap_or(false),
        prompt_logprobs: asked_for,
    };
    Ok(Asked {
        target,
        prompts: prompts(fields, params.n)?,
        params,
        echo,
        logprobs: wanted.map(|count| usize::try_from(count).unwrap_or(usize::MAX)),
        stream,
        shape,
        cache_salt: cache_salt(fields)?,
        priority: identity::priority(headers, fields)?,
        id: identity::answer_id("cmpl-", headers, fields)?,
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
        let blame = Blame { prompt: "prompt", structure: structured::field(fields) };
        let asked = read((app, &asker), &headers, fields)?;
        let admitted = generation::admit(app, &asker, &asked.extent())?;
        Ok((asked, admitted, blame))
    });
    let ((asked, (pending, kept), blame), mut room) = taken.await?;
    room.keep(kept.at_first + asked.prompts.iter().map(bytes).sum::<usize>());
    let given = Given { pending, room, to_the_end: kept.to_the_end };
    let Asked { target, prompts, params, echo, logprobs, stream, shape, cache_salt, priority, id } = asked;
    let samples = params.n;
    let texts = prompts.iter().map(|prompt| match prompt {
        Prompt::Text { text, .. } if echo.prompt => Some(text.clone()),
        _ => None,
    });
    let texts = texts.collect();
    let requests = {
        let params = Arc::new(params);
        let request = |prompt| GenerateRequest {
            prompt,
            params: Arc::clone(&params),
            adapters: target.adapters.clone(),
            priority,
            cache_salt: cache_salt.clone(),
            tenant: caller.tenant(),
        };
        prompts.into_iter().map(request).collect()
    };
    let generation = Generation::start((&app, &caller, given), requests, stream.is_some(), blame, &id).await?;
    let version = generation.version.clone();
    let maker = Maker {
        id,
        created: unix_time(),
        model: target.name,
        samples,
        echo,
        logprobs,
        shape,
        prompts: generation.prompts.clone(),
        texts,
        progress: vec![Progress::default(); generation.prompts.len() * samples],
        cached: vec![0; generation.prompts.len()],
    };
    let response = match stream {
        Some(options) => events::respond(generation, maker, options, answering),
        None => maker.whole(generation).await?,
    };
    Ok(answer::with_version(response, version.as_deref()))
}

/// How far a sample is.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    begun: bool,
    tokens: usize,
    /// Characters of text so far, as logprobs count them.
    offset: usize,
}

/// Makes choices of deltas.
struct Maker {
    id: String,
    created: u64,
    model: String,
    samples: usize,
    echo: Echo,
    logprobs: Option<usize>,
    shape: Shape,
    prompts: Vec<Arc<[u32]>>,
    /// What was given as text, where it is echoed.
    texts: Vec<Option<String>>,
    progress: Vec<Progress>,
    /// Cached tokens of each prompt.
    cached: Vec<usize>,
}

impl Maker {
    fn choice(&mut self, prompt: usize, mut delta: Delta) -> Choice {
        let index = prompt * self.samples + delta.index;
        let mut progress = self.progress[index];
        let first = !std::mem::replace(&mut progress.begun, true);
        self.cached[prompt] = self.cached[prompt].max(delta.cached_tokens);
        let speller = &self.shape.speller;
        let mut text = String::new();
        let new = |most| CompletionLogprobs::new(progress.offset, most, speller.clone());
        let mut logprobs = self.logprobs.map(new);
        let prompt_tokens = &self.prompts[prompt];
        let known: Option<OfPrompt> = delta.prompt_logprobs.take().map(Arc::from);
        if first && self.echo.prompt {
            text = match (&self.texts[prompt], speller.engine.tokenizer()) {
                (Some(text), _) => text.clone(),
                (None, Ok(tokenizer)) => tokenizer.decode(prompt_tokens, true, true).unwrap_or_default(),
                (None, Err(_)) => String::new(),
            };
            if let (Some(logprobs), Some(known)) = (&mut logprobs, &known) {
                logprobs.echo(Arc::clone(prompt_tokens), Arc::clone(known));
            }
        }
        let token_ids = if self.echo.only { Vec::new() } else { delta.token_ids };
        if !self.echo.only {
            text.push_str(&delta.text);
            if let Some(logprobs) = &mut logprobs {
                logprobs.extend(&token_ids, delta.logprobs);
            }
        }
        progress.offset = logprobs.as_ref().map_or(progress.offset, CompletionLogprobs::end);
        progress.tokens += token_ids.len();
        self.progress[index] = progress;
        Choice {
            index,
            text,
            logprobs,
            finish_reason: delta.finish_reason.map(|reason| if self.echo.only { "length" } else { reason.as_str() }),
            stop_reason: stop_reason(delta.stop_reason),
            prompt_logprobs: self.shape.prompt_logprobs.then(|| PromptLogprobs { known, speller: speller.clone() }),
            token_ids: self.shape.token_ids.then_some(token_ids),
            prompt_token_ids: (self.shape.token_ids && first).then(|| Shared(Arc::clone(prompt_tokens))),
        }
    }

    fn told(&self, choices: Vec<Choice>, usage: ToldUsage) -> Completion<'_> {
        Completion {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.model,
            choices,
            usage,
        }
    }

    async fn whole(mut self, mut generation: Generation) -> Result<Response, ApiError> {
        let all = generation.finish(self.samples).await?;
        let write = move |all: Vec<Vec<Delta>>| {
            let numbered = all.into_iter().enumerate();
            let deltas = numbered.flat_map(|(prompt, samples)| samples.into_iter().map(move |delta| (prompt, delta)));
            let choices = deltas.map(|(prompt, delta)| self.choice(prompt, delta)).collect();
            answer::json_text(&self.told(choices, ToldUsage::Now(self.usage())))
        };
        generation.answer(all, write).await
    }
}

impl events::Maker for Maker {
    type Choice = Choice;

    fn choices(&mut self, prompt: usize, delta: Delta) -> Vec<Choice> {
        let choice = self.choice(prompt, delta);
        let has_tokens = choice.token_ids.as_ref().is_some_and(|tokens| !tokens.is_empty());
        if choice.text.is_empty() && choice.finish_reason.is_none() && choice.logprobs.is_none() && !has_tokens {
            // Half a character: it comes with its other half.
            return Vec::new();
        }
        vec![choice]
    }

    fn usage(&self) -> Usage {
        let prompts = self.prompts.iter().map(|prompt| prompt.len()).sum();
        Usage::new(prompts, self.progress.iter().map(|it| it.tokens).sum(), self.cached.iter().sum())
    }

    fn event(&self, choice: Option<Choice>, usage: ToldUsage) -> impl Serialize {
        self.told(choice.into_iter().collect(), usage)
    }
}
