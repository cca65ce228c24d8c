//! One HTTP request's account: whose it is, and what becomes of its samples.

use std::sync::Arc;

use manylora::{Delta, GenerateRequest};

use super::adapters::Served;
use super::locked;
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

/// Counts what a request's samples bring. What has not ended when it is dropped was aborted.
#[derive(Debug)]
pub(crate) struct Account {
    app: Arc<App>,
    /// The first adapter's, or the base's.
    name: String,
    prompts: Vec<Samples>,
}

impl Account {
    /// Opens the account of requests that are about to be submitted together.
    pub(crate) fn open(app: &Arc<App>, requests: &[GenerateRequest]) -> Self {
        let adapter = requests.first().and_then(|request| request.adapters.first());
        let name = adapter.map_or(app.base_name(), |adapter| adapter.name.as_str()).to_owned();
        let samples = |request: &GenerateRequest| vec![Sample::default(); request.params.n];
        let prompts = requests.iter().map(|request| Samples { prompt_tokens: 0, samples: samples(request) });
        Self { app: Arc::clone(app), name, prompts: prompts.collect() }
    }

    /// They were refused: nothing was asked of the engine.
    pub(crate) fn void(&mut self) {
        self.prompts.clear();
    }

    /// They were submitted; each prompt has so many tokens.
    pub(crate) fn submitted(&mut self, lengths: impl Iterator<Item = usize>) {
        self.prompts.iter_mut().zip(lengths).for_each(|(prompt, length)| prompt.prompt_tokens = length);
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

    fn end(&mut self, prompt: usize, reason: Option<manylora::FinishReason>) {
        let Some(prompt) = self.prompts.get_mut(prompt) else { return };
        let open = prompt.samples.iter_mut().filter(|sample| !sample.ended);
        for sample in open {
            sample.ended = true;
            let served =
                Served { prompt_tokens: prompt.prompt_tokens, generation_tokens: sample.tokens, reason, timing: None };
            add(&self.app, &self.name, served);
        }
    }
}

fn add(app: &App, name: &str, served: Served) {
    locked(&app.metrics.adapters).add(name, served, |name| app.engine.adapter(name).is_ok());
}

impl Drop for Account {
    fn drop(&mut self) {
        for prompt in 0..self.prompts.len() {
            self.end(prompt, Some(manylora::FinishReason::Abort));
        }
    }
}
