//! A request's stream of deltas: usable from a plain thread (blocking iteration) and from async code (`Stream`).

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use manylora_core::{Digest, FinishReason};

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

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Result<Delta, EngineError>>,
    /// Samples that have not ended.
    open: usize,
    /// Whether an error ended the stream: its samples that still run are of no use.
    failed: bool,
    waker: Option<Waker>,
    /// Versions of the adapters that it was submitted with, from the moment that they are bound.
    bound: Option<Vec<Option<Digest>>>,
}

/// The engine's end of the stream.
#[derive(Clone, Debug)]
pub(crate) struct StreamSender(Arc<Monitor<State>>);

impl StreamSender {
    /// Delivers a delta. A finish reason closes that sample.
    pub(crate) fn send(&self, delta: Delta) {
        let mut state = self.0.lock();
        if state.failed {
            return;
        }
        if delta.finish_reason.is_some() {
            state.open = state.open.saturating_sub(1);
        }
        state.queue.push_back(Ok(delta));
        self.wake(state);
    }

    /// Ends the whole stream with an error.
    pub(crate) fn fail(&self, error: EngineError) {
        let mut state = self.0.lock();
        if state.open > 0 {
            state.open = 0;
            state.failed = true;
            state.queue.push_back(Err(error));
        }
        self.wake(state);
    }

    /// Says which versions serve. All samples have the same.
    pub(crate) fn bind(&self, versions: impl FnOnce() -> Vec<Option<Digest>>) {
        self.0.lock().bound.get_or_insert_with(versions);
    }

    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let waker = state.waker.take();
        drop(state);
        self.0.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// How long a wait without a limit sleeps before it looks again.
const LONG: Duration = Duration::from_secs(3600);

/// The reader's end: deltas of all samples in the order they were produced. Dropping it aborts what still runs.
pub struct RequestStream {
    shared: Arc<Monitor<State>>,
    prompt_token_ids: Arc<[u32]>,
    adapter_versions: Vec<(String, Option<Digest>)>,
    on_drop: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl std::fmt::Debug for RequestStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequestStream").field("prompt_tokens", &self.prompt_token_ids.len()).finish_non_exhaustive()
    }
}

/// Both ends of a stream of `samples` samples.
pub(crate) fn channel(
    samples: usize,
    prompt_token_ids: Arc<[u32]>,
    adapter_versions: Vec<(String, Option<Digest>)>,
    on_drop: impl FnOnce() + Send + Sync + 'static,
) -> (StreamSender, RequestStream) {
    let shared = Arc::new(Monitor::new(State { open: samples, ..State::default() }));
    let on_drop: Option<Box<dyn FnOnce() + Send + Sync>> = Some(Box::new(on_drop));
    let stream = RequestStream { shared: Arc::clone(&shared), prompt_token_ids, adapter_versions, on_drop };
    (StreamSender(shared), stream)
}

impl RequestStream {
    /// The prompt as token ids.
    pub fn prompt_token_ids(&self) -> &[u32] {
        &self.prompt_token_ids
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
            if let Some(delta) = state.queue.pop_front() {
                return Some(delta);
            }
            if state.open == 0 {
                return None;
            }
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
            if let Some(delta) = state.queue.pop_front() {
                return Ok(Some(delta));
            }
            if state.open == 0 {
                return Ok(None);
            }
            let left = deadline.map_or(LONG, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(());
            }
            state = self.shared.wait_timeout(state, left);
        }
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

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut state = self.shared.lock();
        if let Some(delta) = state.queue.pop_front() {
            return Poll::Ready(Some(delta));
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
