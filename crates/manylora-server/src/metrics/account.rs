//! One HTTP request's account: whose it is, and what becomes of its samples.

use std::sync::Arc;

use axum::http::HeaderValue;
use manylora::{Delta, FinishReason, GenerateRequest, Timing};

use super::adapters::Served;
use super::locked;
use crate::answer::REQUEST_ID;
use crate::app::App;

/// A sample on its way.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    tokens: usize,
    ended: bool,
}

/// A prompt's samples.
#[derive(Debug, Default)]
struct Samples {
    prompt_tokens: usize,
    samples: Vec<Sample>,
}

/// Counts what a request's samples bring. What was submitted and has not ended when it is dropped was aborted.
#[derive(Debug)]
pub(crate) struct Account {
    app: Arc<App>,
    /// The first adapter's, or the base's.
    name: String,
    /// The version of the adapter.
    version: Option<String>,
    /// None where requests have no ids.
    request: Option<HeaderValue>,
    /// The id of the answer, which is the request's own where it has said one.
    answer: String,
    /// Whether the engine was asked for anything.
    is_submitted: bool,
    prompts: Vec<Samples>,
    told: Told,
}

/// What the log tells of a request.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    generation_tokens: usize,
    /// How the last sample ended; None = with an error.
    reason: Option<FinishReason>,
    /// Of the sample that had its first token first, and of the one that had its last one last.
    first_token: Option<f64>,
    last_token: Option<f64>,
}

impl Told {
    fn add(&mut self, served: Served) {
        self.generation_tokens += served.generation_tokens;
        self.reason = served.reason;
        if let Some(Timing { first_token, last_token, .. }) = served.timing {
            self.first_token = Some(self.first_token.map_or(first_token, |first| first.min(first_token)));
            self.last_token = Some(self.last_token.map_or(last_token, |last| last.max(last_token)));
        }
    }
}

impl Account {
    /// Opens the account of requests that are about to be submitted together, and answered under this id.
    pub(crate) fn open(app: &Arc<App>, requests: &[GenerateRequest], answer: &str) -> Self {
        let adapter = requests.first().and_then(|request| request.adapters.first());
        let name = adapter.map_or(app.base_name(), |adapter| adapter.name.as_str()).to_owned();
        let samples = |request: &GenerateRequest| vec![Sample::default(); request.params.n];
        let prompts = requests.iter().map(|request| Samples { prompt_tokens: 0, samples: samples(request) });
        Self {
            app: Arc::clone(app),
            name,
            version: None,
            request: REQUEST_ID.try_with(HeaderValue::clone).ok(),
            answer: answer.to_owned(),
            is_submitted: false,
            prompts: prompts.collect(),
            told: Told::default(),
        }
    }

    /// They were submitted; each prompt has so many tokens.
    pub(crate) fn submitted(&mut self, lengths: impl Iterator<Item = usize>) {
        self.is_submitted = true;
        self.prompts.iter_mut().zip(lengths).for_each(|(prompt, length)| prompt.prompt_tokens = length);
    }

    /// They are bound to this version of their adapter.
    pub(crate) fn bound(&mut self, version: Option<String>) {
        self.version = version;
    }

    /// Takes news of a prompt's sample.
    pub(crate) fn see(&mut self, prompt: usize, delta: &Delta) {
        let Some(prompt) = self.prompts.get_mut(prompt) else { return };
        let Some(sample) = prompt.samples.get_mut(delta.index) else { return };
        sample.tokens += delta.token_ids.len();
        let Some(reason) = delta.finish_reason else { return };
        sample.ended = true;
        let served = Served {
            prompt_tokens: prompt.prompt_tokens,
            generation_tokens: sample.tokens,
            reason: Some(reason),
            timing: delta.timing,
        };
        self.told.add(served);
        add(&self.app, &self.name, served);
        if prompt.samples.iter().all(|sample| sample.ended) {
            let longest = prompt.samples.iter().map(|sample| sample.tokens).max().unwrap_or_default();
            let mut meters = locked(&self.app.metrics.requests);
            meters.samples.observe(prompt.samples.len() as f64);
            meters.longest.observe(longest as f64);
        }
    }

    /// An error ended all samples of a prompt that had not ended.
    pub(crate) fn fail(&mut self, prompt: usize) {
        self.end(prompt, None);
    }

    fn end(&mut self, prompt: usize, reason: Option<FinishReason>) {
        let Some(prompt) = self.prompts.get_mut(prompt) else { return };
        let open = prompt.samples.iter_mut().filter(|sample| !sample.ended);
        for sample in open {
            sample.ended = true;
            let served =
                Served { prompt_tokens: prompt.prompt_tokens, generation_tokens: sample.tokens, reason, timing: None };
            self.told.add(served);
            add(&self.app, &self.name, served);
        }
    }

    /// One line of the log, without a word of the prompt or the answer.
    fn log(&self) {
        let rounded = |seconds: Option<f64>| seconds.map(|seconds| (seconds * 1e4).round() / 1e4);
        tracing::info!(
            request_id = self.request.as_ref().and_then(|id| id.to_str().ok()),
            answer_id = self.answer.as_str(),
            model = self.name.as_str(),
            adapter_version = self.version.as_deref(),
            samples = self.prompts.iter().map(|prompt| prompt.samples.len()).sum::<usize>(),
            prompt_tokens = self.prompts.iter().map(|prompt| prompt.prompt_tokens).sum::<usize>(),
            generation_tokens = self.told.generation_tokens,
            finish_reason = self.told.reason.map_or("error", FinishReason::as_str),
            time_to_first_token = rounded(self.told.first_token),
            seconds = rounded(self.told.last_token),
            "request"
        );
    }
}

fn add(app: &App, name: &str, served: Served) {
    locked(&app.metrics.adapters).add(name, served, |name| app.engine.adapter(name).is_ok());
}

impl Drop for Account {
    fn drop(&mut self) {
        if !self.is_submitted {
            return;
        }
        for prompt in 0..self.prompts.len() {
            self.end(prompt, Some(FinishReason::Abort));
        }
        if self.app.config.log_requests {
            self.log();
        }
    }
}
