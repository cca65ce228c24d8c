//! A request's stream of deltas: usable from a plain thread (blocking iteration) and from async code (`Stream`).

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use manylora_core::{Digest, FinishReason};
use manylora_model::tokenizer::Detokenizer;

use crate::engine::Timing;
use crate::error::EngineError;
use crate::monitor::Monitor;
use crate::sampler::TokenLogprobs;

/// What made a request stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// One of `stop_token_ids`.
    Token(u32),
    /// One of the `stop` strings.
    Text(String),
}

/// News of one sample of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Which of the `n` samples.
    pub index: usize,
    /// Text that became certain.
    pub text: String,
    /// New tokens.
    pub token_ids: Vec<u32>,
    /// Logprobs of the new tokens, if asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Logprobs of prompt tokens 1.. (only in the first delta, if asked for).
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: usize,
    /// Set in the sample's last delta.
    pub finish_reason: Option<FinishReason>,
    /// What made it stop, if it was more than an end token.
    pub stop_reason: Option<StopReason>,
    /// In the sample's last delta, if it has tokens: how it went.
    pub timing: Option<Timing>,
}

impl Delta {
    /// Adds what came after it of the same sample.
    pub fn append(&mut self, next: Self) {
        self.text.push_str(&next.text);
        self.token_ids.extend(next.token_ids);
        self.logprobs.extend(next.logprobs);
        self.cached_tokens = self.cached_tokens.max(next.cached_tokens);
        self.prompt_logprobs = next.prompt_logprobs.or(self.prompt_logprobs.take());
        self.finish_reason = next.finish_reason.or(self.finish_reason);
        self.stop_reason = next.stop_reason.or(self.stop_reason.take());
        self.timing = next.timing.or(self.timing);
    }
}

/// What the engine sends. Text is the reader's to make where nothing else depends on it.
#[derive(Debug)]
enum News {
    /// Nothing but one more token of a sample: what there is most of, and takes no memory of its own.
    Token { index: u32, token: u32, cached_tokens: u32 },
    /// A delta, and how many tokens at its end have no text that is part of the output.
    Delta(Box<(Delta, usize)>),
}

impl News {
    fn into_delta(self) -> (Delta, usize) {
        match self {
            Self::Token { index, token, cached_tokens } => {
                let (index, cached_tokens) = (index as usize, cached_tokens as usize);
                (Delta { index, token_ids: vec![token], cached_tokens, ..Delta::default() }, 0)
            }
            Self::Delta(boxed) => *boxed,
        }
    }
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Result<News, Box<EngineError>>>,
    /// Samples that have not ended.
    open: usize,
    /// Whether an error ended the stream: its samples that still run are of no use.
    failed: bool,
    waker: Option<Waker>,
    /// Whether a thread sleeps until there is news. Waking is a system call: it is done for sleepers only.
    is_awaited: bool,
    /// Versions of the adapters that it was submitted with, from the moment that they are bound.
    bound: Option<Vec<Option<Digest>>>,
}

/// Somebody who waits for a stream's news, and has some.
#[derive(Debug)]
pub(crate) struct Sleeper {
    task: Option<Waker>,
    thread: Option<Arc<Monitor<State>>>,
}

impl Sleeper {
    /// Tells it. A waker is its executor's code: one that panics leaves others to be woken.
    pub(crate) fn wake(self) {
        if let Some(task) = self.task
            && catch_unwind(AssertUnwindSafe(|| task.wake())).is_err()
        {
            tracing::warn!(
                "an executor panicked when it was told that a request has news; who waits there may never hear of it"
            );
        }
        if let Some(thread) = self.thread {
            thread.notify_one();
        }
    }
}

/// The engine's end of the stream.
#[derive(Clone, Debug)]
pub(crate) struct StreamSender(Arc<Monitor<State>>);

impl StreamSender {
    /// Delivers a delta, of whose last tokens `silent` have no text; gives who is to be woken. A finish reason closes that
    /// sample.
    #[must_use]
    pub(crate) fn send(&self, delta: Delta, silent: usize) -> Option<Sleeper> {
        let mut state = self.0.lock();
        if state.failed {
            return None;
        }
        if delta.finish_reason.is_some() {
            state.open = state.open.saturating_sub(1);
        }
        state.queue.push_back(Ok(News::Delta(Box::new((delta, silent)))));
        self.sleeper(&mut state)
    }

    /// Delivers one more token of a sample, of whose prompt so many tokens came from the prefix cache, and nothing else; gives
    /// who is to be woken.
    #[must_use]
    pub(crate) fn send_token(&self, index: usize, token: u32, cached_tokens: usize) -> Option<Sleeper> {
        let mut state = self.0.lock();
        if state.failed {
            return None;
        }
        let (index, cached_tokens) = (index as u32, cached_tokens as u32);
        state.queue.push_back(Ok(News::Token { index, token, cached_tokens }));
        self.sleeper(&mut state)
    }

    /// Ends the whole stream with an error.
    pub(crate) fn fail(&self, error: EngineError) {
        let mut state = self.0.lock();
        if state.open > 0 {
            state.open = 0;
            state.failed = true;
            state.queue.push_back(Err(Box::new(error)));
        }
        let sleeper = self.sleeper(&mut state);
        drop(state);
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
    }

    /// Says which versions serve. All samples have the same.
    pub(crate) fn bind(&self, versions: impl FnOnce() -> Vec<Option<Digest>>) {
        self.0.lock().bound.get_or_insert_with(versions);
    }

    /// Who waits, if anybody does.
    fn sleeper(&self, state: &mut State) -> Option<Sleeper> {
        let task = state.waker.take();
        let thread = std::mem::take(&mut state.is_awaited).then(|| Arc::clone(&self.0));
        (task.is_some() || thread.is_some()).then_some(Sleeper { task, thread })
    }
}

/// How long a wait without a limit sleeps before it looks again.
const LONG: Duration = Duration::from_secs(3600);

/// The reader's end: deltas of all samples in the order they were produced. Dropping it aborts what still runs.
pub struct RequestStream {
    shared: Arc<Monitor<State>>,
    /// What makes the samples' text, in their order, until each has ended; empty where the engine does, or nobody.
    texts: Vec<Option<Detokenizer>>,
    prompt_token_ids: Arc<[u32]>,
    adapter_versions: Vec<(String, Option<Digest>)>,
    on_drop: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl std::fmt::Debug for RequestStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequestStream").field("prompt_tokens", &self.prompt_token_ids.len()).finish_non_exhaustive()
    }
}

/// Both ends of a stream of `samples` samples; `texts` make their text, if the engine does not.
pub(crate) fn channel(
    samples: usize,
    texts: Vec<Option<Detokenizer>>,
    prompt_token_ids: Arc<[u32]>,
    adapter_versions: Vec<(String, Option<Digest>)>,
    on_drop: impl FnOnce() + Send + Sync + 'static,
) -> (StreamSender, RequestStream) {
    let shared = Arc::new(Monitor::new(State { open: samples, ..State::default() }));
    let on_drop: Option<Box<dyn FnOnce() + Send + Sync>> = Some(Box::new(on_drop));
    let stream = RequestStream { shared: Arc::clone(&shared), texts, prompt_token_ids, adapter_versions, on_drop };
    (StreamSender(shared), stream)
}

impl RequestStream {
    /// The prompt as token ids.
    pub fn prompt_token_ids(&self) -> &[u32] {
        &self.prompt_token_ids
    }

    /// As [`Self::prompt_token_ids`], to keep: the engine's own, no copy.
    pub fn shared_prompt(&self) -> Arc<[u32]> {
        Arc::clone(&self.prompt_token_ids)
    }

    /// The adapters that it was submitted with, by name, and the versions that serve it, whatever the names stand for by
    /// now. From the first delta on they are known; before, None stands for one whose tensors were never read. It stays
    /// None for one at scale 0, which serves nothing.
    pub fn adapter_versions(&self) -> Vec<(&str, Option<Digest>)> {
        let state = self.shared.lock();
        let bound = state.bound.as_deref().unwrap_or_default();
        let bound = bound.iter().copied().chain(std::iter::repeat(None));
        let submitted = self.adapter_versions.iter();
        submitted.zip(bound).map(|((name, version), bound)| (name.as_str(), bound.or(*version))).collect()
    }

    /// Waits for the next delta; None when all samples have finished.
    pub fn next_delta(&mut self) -> Option<Result<Delta, EngineError>> {
        let mut state = self.shared.lock();
        loop {
            if let Some(news) = state.queue.pop_front() {
                drop(state);
                return Some(self.tell(news));
            }
            if state.open == 0 {
                return None;
            }
            state.is_awaited = true;
            state = self.shared.wait(state);
        }
    }

    /// As [`Self::next_delta`], giving up after `timeout`: `Err(())` means that nothing came in time.
    #[expect(clippy::result_unit_err, reason = "there is nothing to say about a timeout")]
    pub fn next_timeout(&mut self, timeout: Duration) -> Result<Option<Result<Delta, EngineError>>, ()> {
        // A time beyond what the clock can count is no limit.
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.shared.lock();
        loop {
            if let Some(news) = state.queue.pop_front() {
                drop(state);
                return Ok(Some(self.tell(news)));
            }
            if state.open == 0 {
                return Ok(None);
            }
            let left = deadline.map_or(LONG, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(());
            }
            state.is_awaited = true;
            state = self.shared.wait_timeout(state, left);
            state.is_awaited = false;
        }
    }

    /// A delta with its text. If that cannot be made the stream ends with the error, and the request is stopped.
    fn tell(&mut self, news: Result<News, Box<EngineError>>) -> Result<Delta, EngineError> {
        let (mut delta, silent) = news.map_err(|error| *error)?.into_delta();
        if let Err(error) = self.add_text(&mut delta, silent) {
            let mut state = self.shared.lock();
            (state.open, state.failed) = (0, true);
            state.queue.clear();
            drop(state);
            self.abort();
            return Err(error);
        }
        Ok(delta)
    }

    fn add_text(&mut self, delta: &mut Delta, silent: usize) -> Result<(), EngineError> {
        let Some(text) = self.texts.get_mut(delta.index) else { return Ok(()) };
        if let Some(detokenizer) = text {
            for &token in &delta.token_ids[..delta.token_ids.len().saturating_sub(silent)] {
                delta.text.push_str(detokenizer.push(token)?);
            }
        }
        if delta.finish_reason.is_some()
            && let Some(detokenizer) = text.take()
        {
            delta.text.push_str(&detokenizer.finish()?);
        }
        Ok(())
    }

    /// Stops the request now. Samples that still run end with [`FinishReason::Abort`].
    pub fn abort(&mut self) {
        if let Some(on_drop) = self.on_drop.take() {
            on_drop();
        }
    }

    /// Reads to the end and returns the samples, each put together into one delta.
    pub fn collect_all(&mut self) -> Result<Vec<Delta>, EngineError> {
        let mut samples: Vec<Delta> = Vec::new();
        while let Some(delta) = self.next_delta() {
            let delta = delta?;
            while samples.len() <= delta.index {
                samples.push(Delta { index: samples.len(), ..Delta::default() });
            }
            let index = delta.index;
            samples[index].append(delta);
        }
        Ok(samples)
    }
}

/// Blocking iteration over a stream's deltas; what `for delta in stream` uses.
#[derive(Debug)]
pub struct BlockingDeltas(RequestStream);

impl Iterator for BlockingDeltas {
    type Item = Result<Delta, EngineError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next_delta()
    }
}

// Not an iterator itself: async code has `Stream`'s combinators, and their names are the iterator's too.
impl IntoIterator for RequestStream {
    type Item = Result<Delta, EngineError>;
    type IntoIter = BlockingDeltas;

    fn into_iter(self) -> BlockingDeltas {
        BlockingDeltas(self)
    }
}

impl futures_core::Stream for RequestStream {
    type Item = Result<Delta, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut state = self.shared.lock();
        if let Some(news) = state.queue.pop_front() {
            drop(state);
            return Poll::Ready(Some(self.tell(news)));
        }
        if state.open == 0 {
            return Poll::Ready(None);
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        let state = self.shared.lock();
        let running = state.open > 0 || state.failed;
        drop(state);
        if running {
            self.abort();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
