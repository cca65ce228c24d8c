//! The virtual engine: the real control plane, with a cost model in place of the forward pass and a clock that jumps.
//!
//! Its loop is the engine thread's: everything that has happened is handled, a step is planned, its results are committed when
//! it is over, and what the control plane wants is carried out in between. What arrives during a step is handled after it, in
//! the order of time. Nothing is random here, so equal settings and requests give equal results. Memory grows with the live
//! requests and the adapters only: results go to an [`Observer`], one by one.

mod config;
mod live;
mod loader;

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use manylora_core::{
    AdapterUse, ControlPlane, Digest, Effect, Event, FailureReason, LoadedAdapter, NewRequest, RegistrationId,
    RequestId, SequenceOutcome, StepOutcome, StepPlan, Time,
};

pub use config::EngineSettings;

use crate::cost::{AdapterShape, CostModel, StepWork, StepWorker, Tier};
use crate::error::SimError;
use crate::results::{RequestRecord, ShelfCounts, Totals};
use crate::run::Watch;
use crate::workload::SimRequest;
use live::LiveRequests;
use loader::{HostCache, Load, Loader};

/// Sees what happens, as it happens. Nothing is kept but what it keeps.
pub trait Observer {
    /// A request ended.
    fn ended(&mut self, record: &RequestRecord) {
        let _ = record;
    }

    /// A request brought a token that is not its first, so many seconds after the one before.
    fn token_gap(&mut self, seconds: f64) {
        let _ = seconds;
    }

    /// A step was planned at this time, does this, and takes so long.
    fn step(&mut self, now: f64, plan: &StepPlan, work: &StepWork, seconds: f64) {
        let _ = (now, plan, work, seconds);
    }

    /// The control plane wanted this at this time.
    fn effect(&mut self, now: f64, effect: &Effect) {
        let _ = (now, effect);
    }
}

/// Sees nothing.
impl Observer for () {}

/// Runs requests, which come by arrival, until all have ended.
pub fn run(
    settings: EngineSettings,
    cost: &dyn CostModel,
    requests: impl IntoIterator<Item = SimRequest>,
    observer: &mut impl Observer,
) -> Result<Totals, SimError> {
    run_watched(settings, cost, requests, observer, &Watch::default())
}

/// The same, until `watch` is interrupted.
pub(crate) fn run_watched(
    mut settings: EngineSettings,
    cost: &dyn CostModel,
    requests: impl IntoIterator<Item = SimRequest>,
    observer: &mut impl Observer,
    watch: &Watch,
) -> Result<Totals, SimError> {
    settings.validate()?;
    let adapters = std::mem::take(&mut settings.adapters).into();
    let mut engine = VirtualEngine::new(&settings, adapters, cost, observer)?;
    engine.run(Stream::new(requests.into_iter())?, watch)?;
    Ok(engine.totals())
}

/// Requests that will come, by arrival.
pub(crate) trait Inbox {
    /// The next one.
    fn next(&self) -> Option<&SimRequest>;

    /// It was taken.
    fn advance(&mut self) -> Result<(), SimError>;
}

impl Inbox for VecDeque<SimRequest> {
    fn next(&self) -> Option<&SimRequest> {
        self.front()
    }

    fn advance(&mut self) -> Result<(), SimError> {
        self.pop_front();
        Ok(())
    }
}

/// An iterator whose order is checked.
pub(crate) struct Stream<I> {
    next: Option<SimRequest>,
    requests: I,
}

impl<I: Iterator<Item = SimRequest>> Stream<I> {
    pub(crate) fn new(mut requests: I) -> Result<Self, SimError> {
        Ok(Self { next: after(0.0, requests.next())?, requests })
    }
}

impl<I: Iterator<Item = SimRequest>> Inbox for Stream<I> {
    fn next(&self) -> Option<&SimRequest> {
        self.next.as_ref()
    }

    fn advance(&mut self) -> Result<(), SimError> {
        let latest = self.next.map_or(0.0, |request| request.arrival);
        self.next = after(latest, self.requests.next())?;
        Ok(())
    }
}

/// One engine. Adapters are registered with its control plane when the first request for them comes, under the ids that they
/// would have if all had been at the start: nothing depends on those that nobody asks for.
pub(crate) struct VirtualEngine<'a, O> {
    core: ControlPlane,
    cost: &'a dyn CostModel,
    observer: &'a mut O,
    adapters: Arc<[AdapterShape]>,
    registered: HashSet<u32>,
    worker: StepWorker,
    loader: Loader,
    host: HostCache,
    live: LiveRequests,
    now: f64,
    busy: f64,
    plan: StepPlan,
    outcome: StepOutcome,
    effects: Vec<Effect>,
    shelf: ShelfCounts,
    steps: u64,
    ended: u64,
    failed: u64,
    output_tokens: u64,
}

/// The version of an adapter: its number, which is all the content that it has.
fn version(adapter: u32) -> Digest {
    let mut digest = [0xA5; 32];
    digest[..4].copy_from_slice(&adapter.to_be_bytes());
    Digest(digest)
}

fn adapter_of(digest: &Digest) -> u32 {
    u32::from_be_bytes([digest.0[0], digest.0[1], digest.0[2], digest.0[3]])
}

/// The next request, if it comes no sooner than the one before.
fn after(latest: f64, next: Option<SimRequest>) -> Result<Option<SimRequest>, SimError> {
    let Some(request) = next else { return Ok(None) };
    let arrival = request.arrival;
    if !(arrival.is_finite() && arrival >= latest) {
        let message = format!("requests come by arrival, in seconds from 0 up, and the one before came at {latest}");
        return Err(SimError::field("arrival", arrival, message));
    }
    // What is ordered by the bits of its time must have no -0, which has the largest.
    Ok(Some(SimRequest { arrival: arrival + 0.0, ..request }))
}

/// What a cost model says of something, if time can pass so.
fn duration(what: &str, seconds: f64) -> Result<f64, SimError> {
    if seconds.is_finite() && seconds >= 0.0 {
        return Ok(seconds);
    }
    Err(SimError::field("cost model", seconds, format!("{what} takes a finite number of seconds, from 0 up")))
}

impl<'a, O: Observer> VirtualEngine<'a, O> {
    /// Of settings that are valid; `adapters` are theirs, which several engines share.
    pub(crate) fn new(
        settings: &EngineSettings,
        adapters: Arc<[AdapterShape]>,
        cost: &'a dyn CostModel,
        observer: &'a mut O,
    ) -> Result<Self, SimError> {
        Ok(Self {
            core: ControlPlane::new(settings.core.clone())?,
            cost,
            observer,
            adapters,
            registered: HashSet::new(),
            worker: StepWorker::default(),
            loader: Loader::new(settings.loader_threads),
            host: HostCache::new(settings.host_cache_bytes),
            live: LiveRequests::default(),
            now: 0.0,
            busy: 0.0,
            plan: StepPlan::default(),
            outcome: StepOutcome::default(),
            effects: Vec::new(),
            shelf: ShelfCounts::default(),
            steps: 0,
            ended: 0,
            failed: 0,
            output_tokens: 0,
        })
    }

    fn run(&mut self, mut requests: impl Inbox, watch: &Watch) -> Result<(), SimError> {
        for turn in 0_u64.. {
            if turn % 1024 == 0 {
                watch.check()?;
            }
            self.handle_due(&mut requests)?;
            if let Some(end) = self.begin_step()? {
                self.end_step(end)?;
                continue;
            }
            if self.carry_out_effects()? {
                continue;
            }
            // Nothing can run: to what happens next.
            let arrival = requests.next().map(|request| request.arrival);
            match (arrival, self.next_load_end()) {
                (Some(arrival), Some(end)) => self.wake(arrival.min(end)),
                (Some(next), None) | (None, Some(next)) => self.wake(next),
                (None, None) => break,
            }
        }
        self.finished()
    }

    /// The time is now.
    pub(crate) const fn wake(&mut self, now: f64) {
        self.now = self.now.max(now);
    }

    /// When the next load ends.
    pub(crate) fn next_load_end(&self) -> Option<f64> {
        self.loader.next_end()
    }

    /// Nothing will happen any more.
    pub(crate) fn finished(&self) -> Result<(), SimError> {
        if self.core.has_work() {
            return Err(SimError::Stuck { now: self.now, live: self.live.len() });
        }
        Ok(())
    }

    /// Requests that ended, well or not.
    pub(crate) const fn ended(&self) -> u64 {
        self.ended + self.failed
    }

    /// Adapters that were asked for.
    pub(crate) fn adapters_seen(&self) -> usize {
        self.registered.len()
    }

    /// Everything that has happened by now, in the order of time; of one moment, loads before requests.
    pub(crate) fn handle_due(&mut self, requests: &mut impl Inbox) -> Result<(), SimError> {
        loop {
            let due = requests.next().filter(|request| request.arrival <= self.now).copied();
            let load = self.loader.next_end().filter(|&end| end <= self.now);
            match (load, due) {
                (Some(end), request) if request.is_none_or(|request| end <= request.arrival) => {
                    self.finish_load()?;
                }
                (_, Some(request)) => {
                    self.submit(&request)?;
                    requests.advance()?;
                }
                (_, None) => return Ok(()),
            }
        }
    }

    /// The registration of an adapter, which is made if this is the first request for it.
    fn registration(&mut self, adapter: u32) -> Result<RegistrationId, SimError> {
        let known = self.adapters.len();
        let Some(shape) = self.adapters.get(adapter as usize) else {
            return Err(SimError::field("adapter", adapter, format!("there are {known} adapters")));
        };
        let registration = RegistrationId { index: adapter, generation: 0 };
        if self.registered.insert(adapter) {
            let event = Event::Register { registration, bytes: shape.bytes, rereadable: true };
            self.core.handle(Time(self.now), event);
            self.carry_out_effects()?;
        }
        Ok(registration)
    }

    fn submit(&mut self, request: &SimRequest) -> Result<(), SimError> {
        let registration = request.adapter.map(|adapter| self.registration(adapter)).transpose()?;
        let uses = |registration| AdapterUse { registration, scale: 1.0, first_active: 0 };
        let adapters: Vec<AdapterUse> = registration.into_iter().map(uses).collect();
        if let Some(one) = adapters.first() {
            if self.core.is_resident(one.registration) {
                self.shelf.hits += 1;
            } else {
                self.shelf.misses += 1;
            }
        }
        let id = self.live.insert(request);
        let (tokens, limit) = (request.prompt_tokens as usize, self.core.config().max_model_len);
        if tokens > limit {
            // As the control plane would, but without making the prompt, which may be of any length.
            self.fail(id, &FailureReason::PromptLength { tokens, limit });
            return Ok(());
        }
        self.core.handle(
            Time(self.now),
            Event::Submit(NewRequest {
                id,
                prompt: LiveRequests::prompt(id, request).into(),
                max_tokens: request.output_tokens as usize,
                priority: request.priority,
                cache_salt: None,
                tenant: request.tenant.map(|tenant| tenant.to_string()),
                adapters,
                read_prefix_cache: true,
                all_prompt_logits: false,
            }),
        );
        self.carry_out_effects().map(drop)
    }

    fn finish_load(&mut self) -> Result<(), SimError> {
        let Some(Load { registration, adapter, seconds }) = self.loader.take() else { return Ok(()) };
        let loaded = LoadedAdapter {
            digest: version(adapter),
            bytes: self.adapters[adapter as usize].bytes,
            load_seconds: Some(seconds),
        };
        self.core.handle(Time(self.now), Event::LoadFinished { registration, result: Ok(loaded) });
        self.carry_out_effects().map(drop)
    }

    /// Plans a step; when it will be over, or None if nothing can run now.
    pub(crate) fn begin_step(&mut self) -> Result<Option<f64>, SimError> {
        if !self.core.plan(Time(self.now), &mut self.plan) {
            return Ok(None);
        }
        // Evictions and loads of the plan come before its step.
        self.carry_out_effects()?;
        let work = self.worker.work(&self.plan, self.core.loading().len());
        let seconds = duration("a step", self.cost.step(&work))?;
        self.observer.step(self.now, &self.plan, &work, seconds);
        self.busy += seconds;
        self.steps += 1;
        Ok(Some(self.now + seconds))
    }

    /// The step that was begun is over: its results are committed.
    pub(crate) fn end_step(&mut self, end: f64) -> Result<(), SimError> {
        let begun = self.now;
        self.now = end;
        self.outcome.step = self.plan.step;
        self.outcome.sequences.clear();
        self.outcome.tokens.clear();
        for planned in &self.plan.sequences {
            let first_token = self.outcome.tokens.len() as u32;
            let live = self.live.get_mut(planned.request);
            live.planned(begun, planned.cached_tokens, planned.preemptions);
            if planned.samples {
                if let Some(gap) = live.token(self.now) {
                    self.observer.token_gap(gap);
                }
                self.output_tokens += 1;
                // The token's own number does not matter, but must differ from request to request: blocks are known by it.
                self.outcome.tokens.push(live.word());
            }
            self.outcome.sequences.push(SequenceOutcome {
                request: Some(planned.request),
                first_token,
                tokens: u32::from(planned.samples),
                stopped: false,
            });
        }
        self.core.commit(Time(self.now), &self.outcome);
        self.carry_out_effects().map(drop)
    }

    /// Carries out what the control plane wants; true if there was anything.
    pub(crate) fn carry_out_effects(&mut self) -> Result<bool, SimError> {
        let mut any = false;
        loop {
            let mut effects = std::mem::take(&mut self.effects);
            effects.extend(self.core.drain_effects());
            any |= !effects.is_empty();
            let done = effects.is_empty();
            for effect in effects.drain(..) {
                self.observer.effect(self.now, &effect);
                self.carry_out(effect)?;
            }
            self.effects = effects;
            if done {
                return Ok(any);
            }
        }
    }

    fn carry_out(&mut self, effect: Effect) -> Result<(), SimError> {
        match effect {
            Effect::Load { registration, .. } => {
                // Its index is the adapter's number, and nothing is ever replaced.
                let adapter = registration.index;
                let shape = self.adapters[adapter as usize];
                let tier = self.host.read(adapter, shape.bytes);
                match tier {
                    Tier::Disk => self.shelf.disk_loads += 1,
                    Tier::Host => self.shelf.host_loads += 1,
                }
                let seconds = duration("a load", self.cost.load(&shape, tier))?;
                self.loader.order(self.now, Load { registration, adapter, seconds });
            }
            Effect::Install { slot, digest } => {
                let shape = self.adapters[adapter_of(&digest) as usize];
                self.worker.put(slot.0 as usize, Some(shape));
            }
            Effect::Evict { slot, .. } => self.worker.put(slot.0 as usize, None),
            Effect::RequestFailed { request, reason } => self.fail(request, &reason),
            Effect::Finished { request, .. } => {
                self.ended += 1;
                self.end(request, None);
            }
            Effect::RegistrationFailed { registration, message } => {
                return Err(SimError::field("adapters", registration.index, message));
            }
            Effect::LeaseBound(_)
            | Effect::Unloaded(_)
            | Effect::Resident(_)
            | Effect::OnDemand(_)
            | Effect::Replaced { .. } => {}
        }
        Ok(())
    }

    fn fail(&mut self, request: RequestId, reason: &FailureReason) {
        self.failed += 1;
        self.end(request, Some(reason.to_string()));
    }

    fn end(&mut self, request: RequestId, failure: Option<String>) {
        let record = self.live.remove(request, self.now, failure);
        self.observer.ended(&record);
    }

    pub(crate) fn totals(&self) -> Totals {
        let stats = self.core.stats();
        Totals {
            seconds: self.now,
            busy_seconds: self.busy,
            steps: self.steps,
            completed: self.ended,
            failed: self.failed,
            output_tokens: self.output_tokens,
            shelf: ShelfCounts { evictions: stats.evictions, ..self.shelf },
            preemptions: stats.preemptions,
            prefix_cache_queries: stats.prefix_cache_queries,
            prefix_cache_hits: stats.prefix_cache_hits,
        }
    }
}
