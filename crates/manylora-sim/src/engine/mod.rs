//! The virtual engine: the real control plane, with a cost model in place of the forward pass and a clock that jumps.
//!
//! Its loop is the engine thread's: everything that has happened is handled, a step is planned, its results are committed when
//! it is over, and what the control plane wants is carried out in between. What arrives during a step is handled after it, in
//! the order of time. Nothing is random here, so equal settings and requests give equal results. Memory grows with the live
//! requests and the adapters only: results go to an [`Observer`], one by one.

mod config;
mod live;
mod loader;

use manylora_core::{
    AdapterUse, ControlPlane, Digest, Effect, Event, FailureReason, LoadedAdapter, NewRequest, RegistrationId,
    RequestId, SequenceOutcome, StepOutcome, StepPlan, Time,
};

pub use config::EngineSettings;

use crate::cost::{AdapterShape, CostModel, StepWork, StepWorker, Tier};
use crate::error::SimError;
use crate::results::{RequestRecord, ShelfCounts, Totals};
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
    let mut engine = VirtualEngine::new(settings, cost, observer)?;
    engine.run(requests.into_iter())?;
    Ok(engine.totals())
}

struct VirtualEngine<'a, O> {
    core: ControlPlane,
    cost: &'a dyn CostModel,
    observer: &'a mut O,
    adapters: Vec<AdapterShape>,
    registrations: Vec<RegistrationId>,
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
    if let Some(SimRequest { arrival, .. }) = next
        && !(arrival.is_finite() && arrival >= latest)
    {
        let message = format!("requests come by arrival, in seconds from 0 up, and the one before came at {latest}");
        return Err(SimError::field("arrival", arrival, message));
    }
    Ok(next)
}

/// What a cost model says of something, if time can pass so.
fn duration(what: &str, seconds: f64) -> Result<f64, SimError> {
    if seconds.is_finite() && seconds >= 0.0 {
        return Ok(seconds);
    }
    Err(SimError::field("cost model", seconds, format!("{what} takes a finite number of seconds, from 0 up")))
}

impl<'a, O: Observer> VirtualEngine<'a, O> {
    fn new(settings: EngineSettings, cost: &'a dyn CostModel, observer: &'a mut O) -> Result<Self, SimError> {
        settings.validate()?;
        let EngineSettings { core, adapters, loader_threads, host_cache_bytes } = settings;
        let mut core = ControlPlane::new(core)?;
        let registrations = adapters.iter().map(|adapter| {
            let registration = core.next_registration();
            core.handle(Time(0.0), Event::Register { registration, bytes: adapter.bytes, rereadable: true });
            registration
        });
        let registrations: Vec<_> = registrations.collect();
        if let Some(Effect::RegistrationFailed { registration, message }) = core.drain_effects().next() {
            return Err(SimError::field("adapters", registration.index, message));
        }
        Ok(Self {
            core,
            cost,
            observer,
            adapters,
            registrations,
            worker: StepWorker::default(),
            loader: Loader::new(loader_threads),
            host: HostCache::new(host_cache_bytes),
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

    fn run(&mut self, mut requests: impl Iterator<Item = SimRequest>) -> Result<(), SimError> {
        let mut next = after(0.0, requests.next())?;
        loop {
            // Everything that has happened by now, in the order of time; of one moment, loads before requests.
            loop {
                let due = next.filter(|request| request.arrival <= self.now);
                let load = self.loader.next_end().filter(|&end| end <= self.now);
                match (load, due) {
                    (Some(end), request) if request.is_none_or(|request| end <= request.arrival) => {
                        self.finish_load()?;
                    }
                    (_, Some(request)) => {
                        self.submit(&request)?;
                        next = after(request.arrival, requests.next())?;
                    }
                    (_, None) => break,
                }
            }
            if self.step()? || self.carry_out_effects()? {
                continue;
            }
            // Nothing can run: to what happens next.
            let arrival = next.map(|request| request.arrival);
            self.now = match (arrival, self.loader.next_end()) {
                (Some(arrival), Some(end)) => arrival.min(end).max(self.now),
                (Some(next), None) | (None, Some(next)) => next.max(self.now),
                (None, None) if self.core.has_work() => {
                    return Err(SimError::Stuck { now: self.now, live: self.live.len() });
                }
                (None, None) => return Ok(()),
            };
        }
    }

    fn submit(&mut self, request: &SimRequest) -> Result<(), SimError> {
        let known = self.registrations.len();
        let uses = |adapter: u32| {
            let found = self.registrations.get(adapter as usize);
            let found =
                found.ok_or_else(|| SimError::field("adapter", adapter, format!("there are {known} adapters")))?;
            Ok::<_, SimError>(AdapterUse { registration: *found, scale: 1.0, first_active: 0 })
        };
        let adapters: Vec<AdapterUse> = request.adapter.map(uses).transpose()?.into_iter().collect();
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

    /// Plans a step and lets its time pass; false if nothing can run now.
    fn step(&mut self) -> Result<bool, SimError> {
        if !self.core.plan(Time(self.now), &mut self.plan) {
            return Ok(false);
        }
        // Evictions and loads of the plan come before its step.
        self.carry_out_effects()?;
        let work = self.worker.work(&self.plan);
        let seconds = duration("a step", self.cost.step(&work))?;
        self.observer.step(self.now, &self.plan, &work, seconds);
        let begun = self.now;
        self.now += seconds;
        self.busy += seconds;
        self.steps += 1;
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
        self.carry_out_effects()?;
        Ok(true)
    }

    /// Carries out what the control plane wants; true if there was anything.
    fn carry_out_effects(&mut self) -> Result<bool, SimError> {
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
                // Registered in order, and never replaced.
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
            Effect::LeaseBound(_)
            | Effect::Unloaded(_)
            | Effect::RegistrationFailed { .. }
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

    fn totals(&self) -> Totals {
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
