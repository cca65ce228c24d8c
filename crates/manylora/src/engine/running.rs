//! One running sequence on the engine thread: its sampler, its text, and the delta that is being put together.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use manylora_core::sampling::{LogprobCount, LogprobsMode};
use manylora_core::{Digest, FinishReason, RegistrationId};
use manylora_kernels::ListedValues;
use manylora_model::tokenizer::{Detokenizer, StopChecker};

use super::meters::{Course, Meters};
use crate::error::EngineError;
use crate::sampler::{RowNeed, SamplerScratch, SequenceSampler, TokenLogprobs, token_logprobs};
use crate::stream::{Delta, Sleeper, StopReason, StreamSender};
use crate::structure::{Constraint, Fault};

/// Text of a sequence with stop strings. Without these nothing depends on the text, and whoever reads the stream makes it.
pub(crate) struct TextState {
    /// Until it has ended.
    pub(crate) detokenizer: Option<Detokenizer>,
    pub(crate) stops: StopChecker,
}

/// Which tokens end the sequence.
#[derive(Clone, Debug)]
pub(crate) struct StopTokens {
    /// The model's end tokens, the tokenizer's own first; empty under `ignore_eos`.
    pub(crate) end_tokens: Vec<u32>,
    /// The request's own.
    pub(crate) stop_token_ids: Vec<u32>,
    /// None of them ends the sequence before it has this many tokens.
    pub(crate) min_tokens: usize,
    /// Whether the text keeps what ended it.
    pub(crate) include_in_output: bool,
}

impl TextState {
    /// Adds a token's text; the stop string that it completed, if any. With `check` false none can be completed.
    fn push(&mut self, token: u32, check: bool, out: &mut String) -> Result<Option<String>, EngineError> {
        let Some(detokenizer) = &mut self.detokenizer else { return Ok(None) };
        let released = self.stops.push(detokenizer.push(token)?, check);
        out.push_str(released.text);
        let stopped = released.stop.is_some();
        Ok(if stopped { self.stops.matched().map(str::to_owned) } else { None })
    }

    /// Releases what was held back.
    fn finish(&mut self, out: &mut String) -> Result<(), EngineError> {
        if self.stops.matched().is_none()
            && let Some(detokenizer) = self.detokenizer.take()
        {
            let rest = detokenizer.finish()?;
            out.push_str(self.stops.push(&rest, false).text);
            out.push_str(&self.stops.finish());
        }
        Ok(())
    }
}

/// Who gets the logits of every row (`EngineHandle::logits`).
pub(crate) struct Capture {
    pub(crate) values: Vec<f32>,
    pub(crate) reply: SyncSender<Result<Vec<f32>, EngineError>>,
}

pub(crate) struct RunningSequence {
    sampler: SequenceSampler,
    stop_tokens: StopTokens,
    text: Option<TextState>,
    prompt: Arc<[u32]>,
    prompt_logprobs: Option<(LogprobCount, LogprobsMode)>,
    adapters: Vec<RegistrationId>,
    stream: Option<StreamSender>,
    capture: Option<Capture>,
    /// Whether deltas are sent as they come, or one when the sequence has finished.
    streaming: bool,
    max_tokens: usize,
    pub(crate) course: Course,
    generated: usize,
    /// Tokens at the end of `pending` whose text is no part of the output.
    silent: usize,
    seen_prompt_rows: usize,
    pending: Delta,
    /// Text could not be made: the request ends with this error.
    failure: Option<EngineError>,
    /// Whether its caller has been told how it ended.
    ended: bool,
}

/// What a running sequence is made from.
pub(crate) struct SequenceSetup {
    pub(crate) index: usize,
    pub(crate) sampler: SequenceSampler,
    pub(crate) stop_tokens: StopTokens,
    pub(crate) text: Option<TextState>,
    pub(crate) prompt: Arc<[u32]>,
    pub(crate) prompt_logprobs: Option<(LogprobCount, LogprobsMode)>,
    /// Adapters of the request, in its order.
    pub(crate) adapters: Vec<RegistrationId>,
    pub(crate) stream: Option<StreamSender>,
    pub(crate) capture: Option<Capture>,
    pub(crate) streaming: bool,
    pub(crate) max_tokens: usize,
}

impl RunningSequence {
    pub(crate) fn new(setup: SequenceSetup) -> Self {
        let mut pending = Delta { index: setup.index, ..Delta::default() };
        let course = Course::new(setup.prompt.len(), setup.max_tokens);
        pending.prompt_logprobs = setup.prompt_logprobs.map(|_| Vec::new());
        Self {
            sampler: setup.sampler,
            stop_tokens: setup.stop_tokens,
            text: setup.text,
            prompt: setup.prompt,
            prompt_logprobs: setup.prompt_logprobs,
            adapters: setup.adapters,
            stream: setup.stream,
            capture: setup.capture,
            streaming: setup.streaming,
            max_tokens: setup.max_tokens,
            course,
            generated: 0,
            silent: 0,
            seen_prompt_rows: 0,
            pending,
            failure: None,
            ended: false,
        }
    }

    /// Tells the caller which versions its adapters are from now to its end.
    pub(crate) fn bind(&self, version_of: impl Fn(RegistrationId) -> Option<Digest>) {
        if let Some(stream) = self.stream.as_ref().filter(|_| !self.adapters.is_empty()) {
            stream.bind(|| self.adapters.iter().map(|&adapter| version_of(adapter)).collect());
        }
    }

    /// Whether [`Self::see_row`] reads the logits at `position`.
    pub(crate) fn looks_at(&self, position: usize) -> bool {
        position == self.seen_prompt_rows
            && position < self.prompt.len()
            && (self.capture.is_some() || self.prompt_logprobs.is_some())
    }

    /// Takes note of the logits at `position`, if the request wants those of its prompt. Rows that are computed again
    /// after a preemption were seen before.
    pub(crate) fn see_row(&mut self, position: usize, logits: &[f32], scratch: &mut SamplerScratch) {
        if !self.looks_at(position) {
            return;
        }
        if let Some(capture) = &mut self.capture {
            capture.values.extend_from_slice(logits);
            self.seen_prompt_rows += 1;
        } else if let Some((top, mode)) = self.prompt_logprobs {
            if let Some(&next) = self.prompt.get(position + 1) {
                let logprobs = token_logprobs(logits, next, top, mode, scratch);
                self.pending.prompt_logprobs.get_or_insert_default().push(logprobs);
            }
            self.seen_prompt_rows += 1;
        }
    }

    pub(crate) fn set_cached_tokens(&mut self, tokens: usize) {
        if self.generated == 0 {
            self.pending.cached_tokens = tokens;
        }
    }

    /// See [`SequenceSampler::take_unprepared`].
    pub(crate) fn take_unprepared(&mut self) -> Option<Constraint> {
        self.sampler.take_unprepared()
    }

    /// See [`SequenceSampler::put_back`].
    pub(crate) fn put_back(&mut self, constraint: Constraint) {
        self.sampler.put_back(constraint);
    }

    /// What the next token needs of its row.
    pub(crate) fn need(&self) -> RowNeed {
        self.sampler.need()
    }

    pub(crate) fn sample(&mut self, logits: &[f32], scratch: &mut SamplerScratch) -> u32 {
        let sampled = self.sampler.sample(logits, scratch);
        self.pending.logprobs.extend(sampled.logprobs.into_iter().collect::<Vec<TokenLogprobs>>());
        sampled.token
    }

    pub(crate) fn sample_listed(&mut self, listed: ListedValues<'_>, scratch: &mut SamplerScratch) -> u32 {
        self.sampler.sample_listed(listed, scratch)
    }

    pub(crate) fn accept_greedy(&mut self, token: u32) -> u32 {
        self.sampler.accept(token);
        token
    }

    /// Appends a token and its text; true if it ends the sequence.
    pub(crate) fn push_token(&mut self, token: u32) -> bool {
        if let Some(fault) = self.sampler.fault() {
            self.failure = Some(match fault {
                Fault::Grammar(reason) => EngineError::StructuredOutputs(format!(
                    "the structured output cannot go on: {reason}; simplify what it must be"
                )),
                Fault::Machine(reason) => {
                    EngineError::Busy(format!("the structured output cannot go on: {reason}; try again in a moment"))
                }
            });
            return true;
        }
        if self.generated == 0 && !self.streaming {
            // Now that it runs: steps allocate nothing, and nothing is kept for what waits.
            self.pending.token_ids.reserve(self.max_tokens);
        }
        self.generated += 1;
        self.pending.token_ids.push(token);
        if self.capture.is_some() {
            return true;
        }
        let may_stop = self.generated >= self.stop_tokens.min_tokens;
        let StopTokens { end_tokens, stop_token_ids, .. } = &self.stop_tokens;
        let complete = self.sampler.is_complete();
        // What a structured output has no other token for ends it, however few there are.
        let ends = (may_stop || complete) && (end_tokens.contains(&token) || stop_token_ids.contains(&token));
        // As in vLLM, only the first end token ends without naming itself.
        if ends && end_tokens.first() != Some(&token) {
            self.pending.stop_reason = Some(StopReason::Token(token));
        }
        // The text of a token that ends the sequence is part of the output only on request.
        self.silent = usize::from(ends && !self.stop_tokens.include_in_output);
        if let Some(text) = &mut self.text
            && self.silent == 0
        {
            // As in vLLM, stop strings count once there are more than `min_tokens` tokens.
            let check = !ends && self.generated > self.stop_tokens.min_tokens;
            match text.push(token, check, &mut self.pending.text) {
                Ok(None) => {}
                Ok(Some(stop)) => {
                    self.pending.stop_reason = Some(StopReason::Text(stop));
                    return true;
                }
                Err(error) => {
                    self.failure = Some(error);
                    return true;
                }
            }
        }
        ends || complete
    }

    /// Sends what has become certain since the last delta; who is to be woken for it.
    pub(crate) fn flush(&mut self) -> Option<Sleeper> {
        if !self.streaming || (self.pending.token_ids.is_empty() && self.pending.text.is_empty()) {
            return None;
        }
        let stream = self.stream.as_ref()?;
        let pending = &mut self.pending;
        if let ([token], true) = (pending.token_ids.as_slice(), self.silent == 0)
            && pending.text.is_empty()
            && pending.logprobs.is_empty()
            && pending.prompt_logprobs.is_none()
            && pending.stop_reason.is_none()
        {
            let sleeper = stream.send_token(pending.index, *token, std::mem::take(&mut pending.cached_tokens));
            pending.token_ids.clear();
            return sleeper;
        }
        let next = Delta { index: self.pending.index, ..Delta::default() };
        stream.send(std::mem::replace(&mut self.pending, next), std::mem::take(&mut self.silent))
    }

    /// Sends the last delta; who is to be woken for it.
    pub(crate) fn finish(&mut self, reason: FinishReason, meters: &mut Meters) -> Option<Sleeper> {
        self.ended = true;
        if let Some(capture) = self.capture.take() {
            let answer = if reason == FinishReason::Abort {
                Err(EngineError::AdapterOperation {
                    name: "logits".to_owned(),
                    message: "the request was aborted before all logits were computed".to_owned(),
                })
            } else {
                Ok(capture.values)
            };
            // The caller may have given up waiting.
            let _ = capture.reply.send(answer);
            return None;
        }
        if self.failure.is_none()
            && let Some(text) = &mut self.text
            && let Err(error) = text.finish(&mut self.pending.text)
        {
            self.failure = Some(error);
        }
        if let (Some(error), Some(stream)) = (self.failure.take(), &self.stream) {
            meters.ended.error += 1;
            stream.fail(error);
            return None;
        }
        self.course.end(reason, meters);
        self.pending.timing = self.course.timing();
        self.pending.finish_reason = Some(reason);
        self.stream.as_ref()?.send(std::mem::take(&mut self.pending), self.silent)
    }

    /// Ends the request with an error.
    pub(crate) fn fail(&mut self, error: EngineError) {
        self.ended = true;
        if let Some(capture) = self.capture.take() {
            let _ = capture.reply.send(Err(error));
        } else if let Some(stream) = &self.stream {
            stream.fail(error);
        }
    }
}

impl Drop for RunningSequence {
    /// A sequence that is dropped unfinished (a command nobody will handle, an engine thread that failed) must not leave
    /// its caller waiting.
    fn drop(&mut self) {
        if !self.ended {
            self.fail(EngineError::Stopped("it ended before the request did".to_owned()));
        }
    }
}
