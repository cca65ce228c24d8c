//! Replay: the control plane, given what a real engine's was given, must decide what that one decided.
//!
//! A trace that an engine recorded (`--record-trace`) has every input of its control plane in order, and every decision. Here a
//! new control plane with the same settings gets the inputs, and each of its decisions is held against the recorded one: which
//! sequences a step has, with how many rows, in which order; which requests found their adapters resident; what is loaded,
//! installed in which slot and evicted; how requests end. The first difference is an error that shows both. What requests say
//! is not in a trace: [`tokens`] stand in for it, equal where content was equal.

mod lines;
mod tokens;

use std::collections::{HashMap, VecDeque};
use std::io::{BufRead, Seek, SeekFrom};

use manylora_core::trace::{
    Decision, TraceHeader, TraceLine, TracedAdapter, TracedEffect, TracedEnd, TracedLoad, TracedOutcome, TracedReason,
    TracedRequest, TracedSequence, TracedStep,
};
use manylora_core::{
    AdapterSlot, ControlPlane, Digest, Event, LoadedAdapter, NewRequest, RegistrationId, RequestId, SequenceOutcome,
    StepOutcome, StepPlan,
};
use serde::Serialize;

pub(crate) use lines::{Lines, wrong};

use crate::cost::{AdapterShape, StepWork, StepWorker};
use crate::error::SimError;
use crate::run::Watch;
use tokens::{Sequence, Tokens};

/// Sees what is replayed, with the times that were recorded.
pub trait ReplayObserver {
    /// The engine.
    fn engine(&mut self, header: &TraceHeader) {
        let _ = header;
    }

    /// A step was planned at this time, and has been carried out: what it did, and seconds by phase, what was done since the
    /// step before among them.
    fn step(&mut self, time: f64, work: &StepWork, seconds: &[f64]) {
        let _ = (time, work, seconds);
    }

    /// An adapter was read, by one thread in so many seconds; whether that thread's engine had read it before.
    fn load(&mut self, adapter: &AdapterShape, again: bool, seconds: f64) {
        let _ = (adapter, again, seconds);
    }

    /// A request arrived, was in its first step, had its first token, and its last one, and ended well with so many tokens.
    fn request(&mut self, timing: &RecordedTiming) {
        let _ = timing;
    }
}

/// Sees nothing.
impl ReplayObserver for () {}

/// When things happened to a request, in seconds since the engine's start, and how many tokens it generated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RecordedTiming {
    /// Its id.
    pub id: RequestId,
    /// It was submitted.
    pub arrival: f64,
    /// Its first step was planned.
    pub admitted: f64,
    /// Its first token was there.
    pub first_token: f64,
    /// Its last token was there.
    pub last_token: f64,
    /// Tokens.
    pub tokens: u64,
}

/// What was replayed; every number of it was decided the same way twice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Replayed {
    /// Lines.
    pub lines: u64,
    /// Requests.
    pub requests: u64,
    /// Requests in the order of their first step.
    #[serde(skip)]
    pub admissions: Vec<RequestId>,
    /// Steps.
    pub steps: u64,
    /// Adapters that requests named and that were resident.
    pub hits: u64,
    /// Those that were not.
    pub misses: u64,
    /// Loads that were ordered.
    pub loads: u64,
    /// Versions that were installed.
    pub installs: u64,
    /// Versions that went to make room for others.
    pub evictions: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Tokens of prompts that came from the prefix cache.
    pub cached_tokens: u64,
    /// Requests that had not ended.
    pub unfinished: u64,
    /// Lines that the engine could not write, in all; what came after the first of them could not be replayed.
    pub lost: u64,
    /// Places where they are missing.
    pub gap_count: u64,
    /// The first of these places.
    pub gaps: Vec<Gap>,
    /// Whether the engine closed the trace. One that was killed did not.
    pub closed: bool,
}

/// Places of lost lines that are told one by one.
const MOST_GAPS: usize = 8;

/// Where lines are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Gap {
    /// The line that says so.
    pub line: usize,
    /// How many are.
    pub lines: u64,
}

/// A request that has not ended.
struct Live {
    sequence: Sequence,
    arrival: f64,
    admitted: Option<f64>,
    first_token: Option<f64>,
    last_token: f64,
    tokens: u64,
    preemptions: u32,
}

/// A step that was planned.
struct Planned {
    time: f64,
    work: StepWork,
}

struct Player<'a, O> {
    core: ControlPlane,
    observer: &'a mut O,
    header: TraceHeader,
    tokens: Tokens,
    live: HashMap<RequestId, Live>,
    described: HashMap<RegistrationId, TracedAdapter>,
    loaded: HashMap<Digest, AdapterShape>,
    read: HashMap<RegistrationId, Digest>,
    decisions: VecDeque<Decision>,
    plan: StepPlan,
    planned: Option<Planned>,
    worker: StepWorker,
    result: Replayed,
}

/// Replays a trace, until all of it is or `watch` is interrupted. Memory grows with the requests and adapters of the trace, not
/// with its steps.
pub fn replay(
    mut source: impl BufRead + Seek,
    observer: &mut impl ReplayObserver,
    watch: &Watch,
) -> Result<Replayed, SimError> {
    let mut lines = Lines::new(&mut source, watch);
    let header = lines.header()?;
    let core = ControlPlane::new(header.config.clone()).map_err(|error| wrong(1, "config", error.to_string()))?;
    let tokens = Tokens::of_trace(&mut source, header.config.block_size, watch)?;
    rewind(&mut source)?;
    let mut lines = Lines::new(source, watch);
    lines.header()?;
    observer.engine(&header);
    let mut player = Player {
        core,
        observer,
        header,
        tokens,
        live: HashMap::new(),
        described: HashMap::new(),
        loaded: HashMap::new(),
        read: HashMap::new(),
        decisions: VecDeque::new(),
        plan: StepPlan::default(),
        planned: None,
        worker: StepWorker::default(),
        result: Replayed { lines: 1, ..Replayed::default() },
    };
    while let Some((number, line)) = lines.line()? {
        if let TraceLine::Lost { lines: lost } = line {
            player.result.lost_at(number, lost);
            break;
        }
        player.play(number, line)?;
        player.result.lines += 1;
    }
    player.result.look_for_gaps(&mut lines)?;
    player.result.unfinished = player.live.len() as u64;
    player.result.evictions = player.core.stats().evictions;
    Ok(player.result)
}

/// Back to a trace's first line.
pub(crate) fn rewind(source: &mut impl Seek) -> Result<(), SimError> {
    let cannot = |error| wrong(1, "", format!("the trace cannot be read from its start: {error}"));
    source.seek(SeekFrom::Start(0)).map(drop).map_err(cannot)
}

impl Replayed {
    fn lost_at(&mut self, line: usize, lines: u64) {
        self.lost += lines;
        self.gap_count += 1;
        if self.gaps.len() < MOST_GAPS {
            self.gaps.push(Gap { line, lines });
        }
    }

    /// Of what is not replayed, because lines before it are lost: where else lines are, and whether it was closed.
    fn look_for_gaps(&mut self, lines: &mut Lines<'_, impl BufRead>) -> Result<(), SimError> {
        while let Some((number, text)) = lines.text()? {
            if !text.ends_with('\n') || !["lost", "close"].iter().any(|kind| starts(text, kind)) {
                continue;
            }
            match lines::parse(number, text)? {
                TraceLine::Lost { lines } => self.lost_at(number, lines),
                TraceLine::Close { .. } => self.closed = true,
                _ => {}
            }
        }
        Ok(())
    }
}

/// Whether a line is of this kind, without reading all of it.
fn starts(text: &str, kind: &str) -> bool {
    text.strip_prefix("{\"kind\":\"").and_then(|rest| rest.strip_prefix(kind)).is_some_and(|rest| rest.starts_with('"'))
}

/// The bytes of a number, for adapters' parameters.
pub(crate) fn shape(header: &TraceHeader, adapter: &TracedAdapter) -> AdapterShape {
    AdapterShape { bytes: adapter.bytes, parameters: adapter.bytes / header.number.bytes(), rank: adapter.rank }
}

impl<O: ReplayObserver> Player<'_, O> {
    /// Plays one line.
    fn play(&mut self, number: usize, line: TraceLine) -> Result<(), SimError> {
        match line {
            TraceLine::Header(_) => return Err(wrong(number, "header", "a trace has one header")),
            TraceLine::Adapter(adapter) => {
                let next = self.core.next_registration();
                same(number, "the next registration", &adapter.registration, &next)?;
                self.described.insert(next, adapter);
            }
            TraceLine::Submit(request) => self.submit(number, request)?,
            TraceLine::Load(load) => self.load(load),
            TraceLine::Event { time, event } => self.core.handle(time, event),
            TraceLine::ResetPrefixCache { done, .. } => {
                same(number, "whether cached blocks are forgotten", &done, &self.core.reset_prefix_cache())?;
            }
            TraceLine::Idle { time } => {
                let any = self.core.plan(time, &mut self.plan);
                same(number, "whether a step can run", &false, &any)?;
            }
            TraceLine::Step(step) => self.step(number, &step)?,
            TraceLine::Outcome(outcome) => self.outcome(&outcome),
            TraceLine::Effect { effect, .. } => self.decided(number, Decision::Effect(effect))?,
            TraceLine::End(end) => {
                self.decided(number, Decision::End(end.id, end.reason))?;
                self.end(&end);
            }
            // What is lost ends the replay before it comes here.
            TraceLine::Unfinished(_) | TraceLine::Lost { .. } => {}
            TraceLine::Took { seconds, .. } => {
                if let Some(Planned { time, work }) = self.planned.take() {
                    self.observer.step(time, &work, &seconds);
                }
            }
            TraceLine::Close { .. } => self.result.closed = true,
        }
        self.decisions.extend(self.core.drain_effects().map(|effect| Decision::from(&effect)));
        Ok(())
    }

    fn submit(&mut self, number: usize, request: TracedRequest) -> Result<(), SimError> {
        let resident: Vec<bool> =
            request.adapters.iter().map(|adapter| self.core.is_resident(adapter.registration)).collect();
        same(number, "whether its adapters are resident", &request.resident, &resident)?;
        let hits = resident.iter().filter(|&&resident| resident).count() as u64;
        self.result.hits += hits;
        self.result.misses += resident.len() as u64 - hits;
        self.result.requests += 1;
        let (sequence, prompt) = self.tokens.begin(request.id, request.prompt_tokens as usize, &request.blocks);
        self.live.insert(
            request.id,
            Live {
                sequence,
                arrival: request.arrival,
                admitted: None,
                first_token: None,
                last_token: 0.0,
                tokens: 0,
                preemptions: 0,
            },
        );
        self.core.handle(
            request.time,
            Event::Submit(NewRequest {
                id: request.id,
                prompt: prompt.into(),
                max_tokens: request.max_tokens as usize,
                priority: request.priority,
                cache_salt: request.salt.map(|salt| salt.0.to_string()),
                tenant: request.tenant,
                adapters: request.adapters,
                read_prefix_cache: request.read_prefix_cache,
                all_prompt_logits: request.all_prompt_logits,
            }),
        );
        Ok(())
    }

    fn load(&mut self, load: TracedLoad) {
        let TracedLoad { time, registration, result } = load;
        let result = result.result();
        if let Ok(LoadedAdapter { digest, bytes, load_seconds }) = result {
            let described = self.described.get(&registration).map(|adapter| shape(&self.header, adapter));
            let adapter = AdapterShape { bytes, ..described.unwrap_or(AdapterShape { bytes, parameters: 0, rank: 0 }) };
            let again = self.read.insert(registration, digest).is_some();
            if let Some(seconds) = load_seconds {
                self.observer.load(&adapter, again, seconds);
            }
            self.loaded.insert(digest, adapter);
        }
        self.core.handle(time, Event::LoadFinished { registration, result });
    }

    fn step(&mut self, number: usize, step: &TracedStep) -> Result<(), SimError> {
        let planned = self.core.plan(step.time, &mut self.plan);
        same(number, "whether a step can run", &true, &planned)?;
        same(number, "its number", &step.step, &self.plan.step)?;
        let sequences: Vec<TracedSequence> = self.plan.sequences.iter().map(TracedSequence::from).collect();
        same(number, "its sequences", &step.sequences, &sequences)?;
        // Evictions and installs of the plan come before its step.
        self.decisions.extend(self.core.drain_effects().map(|effect| Decision::from(&effect)));
        for &TracedSequence(id, _, _, cached, preemptions) in &step.sequences {
            let Some(live) = self.live.get_mut(&id) else { continue };
            if live.admitted.is_none() {
                live.admitted = Some(step.time.0);
                self.result.admissions.push(id);
                self.result.cached_tokens += u64::from(cached);
            }
            self.result.preemptions += u64::from(preemptions - live.preemptions);
            live.preemptions = preemptions;
        }
        let work = self.worker.work(&self.plan, self.core.loading().len());
        same(number, "its distinct adapters", &step.adapters, &work.adapters)?;
        self.planned = Some(Planned { time: step.time.0, work });
        self.result.steps += 1;
        Ok(())
    }

    fn outcome(&mut self, recorded: &TracedOutcome) {
        let mut outcome = StepOutcome { step: recorded.step, ..StepOutcome::default() };
        for planned in &self.plan.sequences {
            let id = planned.request;
            let other = recorded.others.iter().find(|(other, _)| *other == id).map(|&(_, tokens)| tokens);
            let tokens = other.unwrap_or(u32::from(planned.samples));
            let first_token = outcome.tokens.len() as u32;
            if let Some(live) = self.live.get_mut(&id) {
                for _ in 0..tokens {
                    outcome.tokens.push(self.tokens.push(&mut live.sequence));
                    live.tokens += 1;
                    live.first_token.get_or_insert(recorded.time.0);
                    live.last_token = recorded.time.0;
                }
            }
            let stopped = recorded.stopped.contains(&id);
            outcome.sequences.push(SequenceOutcome { request: Some(id), first_token, tokens, stopped });
        }
        self.core.commit(recorded.time, &outcome);
    }

    /// Holds a recorded decision against the one that was made now.
    fn decided(&mut self, number: usize, recorded: Decision) -> Result<(), SimError> {
        let replayed = self.decisions.pop_front();
        same(number, "what is decided next", &Some(recorded), &replayed)?;
        let Decision::Effect(effect) = recorded else { return Ok(()) };
        let mut put = |AdapterSlot(slot), shape| self.worker.put(slot as usize, shape);
        match effect {
            TracedEffect::Load { .. } => self.result.loads += 1,
            TracedEffect::Install { slot, digest } => {
                self.result.installs += 1;
                put(slot, self.loaded.get(&digest).copied());
            }
            TracedEffect::Evict { slot, .. } => {
                put(slot, None);
            }
            _ => {}
        }
        Ok(())
    }

    fn end(&mut self, end: &TracedEnd) {
        let Some(live) = self.live.remove(&end.id) else { return };
        let well = matches!(end.reason, TracedReason::Stop | TracedReason::Length);
        if let (true, Some(admitted), Some(first_token)) = (well, live.admitted, live.first_token) {
            let Live { arrival, last_token, tokens, .. } = live;
            self.observer.request(&RecordedTiming { id: end.id, arrival, admitted, first_token, last_token, tokens });
        }
    }
}

/// The same was decided, or an error that shows both.
fn same<T: PartialEq + std::fmt::Debug>(
    line: usize,
    what: &'static str,
    recorded: &T,
    replayed: &T,
) -> Result<(), SimError> {
    if recorded == replayed {
        return Ok(());
    }
    Err(SimError::Diverged { line, what, recorded: format!("{recorded:?}"), replayed: format!("{replayed:?}") })
}
