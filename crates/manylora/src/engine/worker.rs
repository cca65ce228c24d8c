//! The engine thread: events in, one step after the other, deltas out.
//!
//! A steady decode step (plan, forward, greedy sampling, commit) allocates nothing and takes no lock; deltas are
//! delivered after it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use manylora_core::{
    BlockId, ControlPlane, Digest, Effect, Event, LoadedAdapter, RegistrationId, RequestId, SequenceOutcome,
    StepOutcome, StepPlan, Time, UnloadMode,
};
use manylora_model::{PackedHandle, Runner};

use super::command::{Command, ReadAdapter, Reply};
use super::loader::Job;
use super::lower::LoweredStep;
use super::running::RunningSequence;
use crate::error::EngineError;
use crate::registry::{AdapterInfo, AdapterSource, Entry, Registry};
use crate::sampler::SamplerScratch;

/// What a caller waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Awaited {
    Pinned,
    Unloaded,
}

/// A caller that waits for a registration to be pinned or unloaded.
struct Waiter {
    awaited: Awaited,
    name: String,
    reply: Reply<()>,
}

/// How often unloads that wait for holds are looked at when nothing else happens.
const DEPARTING_POLL: Duration = Duration::from_millis(2);

pub(crate) struct Worker {
    core: ControlPlane,
    runner: Box<dyn Runner>,
    registry: Arc<Registry>,
    commands: Receiver<Command>,
    jobs: Sender<Job>,
    clock: Instant,
    running: HashMap<RequestId, RunningSequence>,
    /// Packed adapters in the runner's table, by version.
    packed: HashMap<Digest, PackedHandle>,
    /// Packed adapters that were just read: the effects of their `LoadFinished` install them, or they are dropped.
    arriving: HashMap<Digest, PackedHandle>,
    /// KV blocks whose memory was given back because adapters took their bytes.
    released: HashSet<BlockId>,
    /// Packed by the caller of a load, for the control plane's order that follows at once.
    preloaded: HashMap<RegistrationId, (Digest, PackedHandle)>,
    sources: HashMap<RegistrationId, (AdapterSource, Digest)>,
    waiters: HashMap<RegistrationId, Vec<Waiter>>,
    /// The registration that is being made, and why it failed, if it did.
    registering: Option<(RegistrationId, Option<String>)>,
    /// Entries taken off the table whose unload waits for requests that named them and are still on their way here.
    departing: Vec<(Entry, UnloadMode)>,
    plan: StepPlan,
    step: LoweredStep,
    outcome: StepOutcome,
    greedy: Vec<u32>,
    scratch: SamplerScratch,
    effects: Vec<Effect>,
}

impl Worker {
    pub(crate) fn new(
        core: ControlPlane,
        runner: Box<dyn Runner>,
        registry: Arc<Registry>,
        commands: Receiver<Command>,
        jobs: Sender<Job>,
        step: LoweredStep,
        max_num_seqs: usize,
    ) -> Self {
        let outcome = StepOutcome {
            step: 0,
            sequences: Vec::with_capacity(max_num_seqs),
            tokens: Vec::with_capacity(max_num_seqs),
        };
        let greedy = vec![0; runner.max_logit_rows()];
        Self {
            core,
            runner,
            registry,
            commands,
            jobs,
            clock: Instant::now(),
            running: HashMap::new(),
            packed: HashMap::new(),
            arriving: HashMap::new(),
            released: HashSet::new(),
            preloaded: HashMap::new(),
            sources: HashMap::new(),
            waiters: HashMap::new(),
            registering: None,
            departing: Vec::new(),
            plan: StepPlan::default(),
            step,
            outcome,
            greedy,
            scratch: SamplerScratch::default(),
            effects: Vec::new(),
        }
    }

    /// Runs until told to stop or until every handle is gone.
    pub(crate) fn run(&mut self) {
        while self.take_commands() {
            self.unload_departing();
            let ran = self.step();
            // Effects may have made something runnable that was not when the step was planned.
            let changed = self.carry_out_effects();
            if ran || changed {
                continue;
            }
            let command = if self.departing.is_empty() {
                self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                // Holds are dropped on callers' threads without a word to this one.
                self.commands.recv_timeout(DEPARTING_POLL)
            };
            match command {
                Ok(Command::Shutdown) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(command) => self.handle(command),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Handles all commands that are there; false if one of them, or the lack of anyone to send one, ends the loop.
    pub(crate) fn take_commands(&mut self) -> bool {
        loop {
            match self.commands.try_recv() {
                Ok(Command::Shutdown) | Err(TryRecvError::Disconnected) => return false,
                Ok(command) => self.handle(command),
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    /// Ends everything that still runs, after the loop has ended or failed.
    pub(crate) fn close(&mut self, why: &str) {
        for (_, mut sequence) in self.running.drain() {
            sequence.fail(EngineError::Stopped(why.to_owned()));
        }
    }

    fn now(&self) -> Time {
        Time(self.clock.elapsed().as_secs_f64())
    }

    fn handle(&mut self, command: Command) {
        let now = self.now();
        match command {
            Command::Submit(sequences, holds) => {
                for (request, sequence) in sequences {
                    self.running.insert(request.id, sequence);
                    self.core.handle(now, Event::Submit(request));
                }
                drop(holds);
            }
            Command::Abort(requests) => {
                for request in requests {
                    self.core.handle(now, Event::Abort(request));
                }
            }
            Command::Register(read, reply) => drop(reply.send(self.register_now(*read))),
            Command::Reread { registration, result } => {
                let result = match result {
                    Ok(reread) => {
                        let bytes = reread.packed.bytes;
                        self.arriving.insert(reread.version, reread.packed);
                        Ok(LoadedAdapter { digest: reread.version, bytes })
                    }
                    Err(error) => Err(error.to_string()),
                };
                self.core.handle(now, Event::LoadFinished { registration, result });
            }
            Command::Unload { name, mode, reply } => self.unload(&name, mode, reply),
            Command::Pin { name, pinned, reply } => match self.registry.resolve(&name) {
                Ok(entry) => {
                    let event = if pinned { Event::Pin(entry.registration) } else { Event::Unpin(entry.registration) };
                    if pinned {
                        self.wait(entry.registration, Waiter { awaited: Awaited::Pinned, name, reply });
                    } else {
                        let _ = reply.send(Ok(()));
                    }
                    self.core.handle(now, event);
                }
                Err(error) => drop(reply.send(Err(error))),
            },
            Command::Stats(reply) => drop(reply.send(Ok(self.core.stats()))),
            Command::ResetPrefixCache(reply) => drop(reply.send(Ok(self.core.reset_prefix_cache()))),
            Command::Shutdown => {}
        }
        self.carry_out_effects();
    }

    /// Registers an adapter that was read: makes it resident if there is room, then publishes its name.
    pub(crate) fn register_now(&mut self, read: ReadAdapter) -> Result<AdapterInfo, EngineError> {
        let now = self.now();
        if let Some(existing) = self.registry.check(&read.source, read.version)? {
            if let Some(id) = read.source.int_id {
                self.registry.add_id(&read.source.name, id);
            }
            return Ok(existing);
        }
        let registration = self.core.next_registration();
        let info = AdapterInfo {
            name: read.source.name.clone(),
            int_ids: read.source.int_id.into_iter().collect(),
            path: read.source.path.clone(),
            version: read.version,
            report: read.report,
        };
        let name = read.source.name.clone();
        self.sources.insert(registration, (read.source, read.version));
        let bytes = read.packed.bytes;
        self.preloaded.insert(registration, (read.version, read.packed));
        self.registering = Some((registration, None));
        self.core.handle(now, Event::Register { registration, bytes });
        self.core.handle(now, Event::Prefetch(registration));
        self.carry_out_effects();
        // Not ordered at once = no room now: it is registered, and will be read again when a request asks for it.
        self.preloaded.remove(&registration);
        let old = self.registry.get(&name);
        let moves_pin = old.as_ref().is_some_and(|old| self.is_pinned(old.registration));
        if let (true, Some(old)) = (moves_pin, &old) {
            self.core.handle(now, Event::Unpin(old.registration));
            self.core.handle(now, Event::Pin(registration));
            self.carry_out_effects();
        }
        if let Some((_, Some(message))) = self.registering.take() {
            self.core.handle(now, Event::Unload { registration, mode: UnloadMode::Abort });
            if let (true, Some(old)) = (moves_pin, &old) {
                self.core.handle(now, Event::Pin(old.registration));
            }
            self.carry_out_effects();
            return Err(EngineError::AdapterOperation { name, message });
        }
        drop(old);
        // Published only now: the name led to the old version until here (promise P7).
        if let Some(old) = self.registry.publish(Entry::new(info, registration)) {
            self.departing.push((old, UnloadMode::Drain));
            self.unload_departing();
        }
        self.registry.resolve(&name).map(|entry| entry.info)
    }

    fn is_pinned(&self, registration: RegistrationId) -> bool {
        self.core.registration(registration).is_some_and(|status| status.pinned)
    }

    /// Starts the unloads that no request on its way here holds back any more.
    fn unload_departing(&mut self) {
        let now = self.now();
        let core = &mut self.core;
        self.departing.retain(|(entry, mode)| {
            let waits = !entry.is_free();
            if !waits {
                core.handle(now, Event::Unload { registration: entry.registration, mode: *mode });
            }
            waits
        });
        self.carry_out_effects();
    }

    fn unload(&mut self, name: &str, mode: UnloadMode, reply: Reply<()>) {
        match self.registry.remove(name) {
            Some(entry) => {
                let waiter = Waiter { awaited: Awaited::Unloaded, name: name.to_owned(), reply };
                self.wait(entry.registration, waiter);
                self.departing.push((entry, mode));
                self.unload_departing();
            }
            None => drop(reply.send(self.registry.resolve(name).map(|_| ()))),
        }
    }

    fn wait(&mut self, registration: RegistrationId, waiter: Waiter) {
        self.waiters.entry(registration).or_default().push(waiter);
    }

    /// Answers the callers that wait for `awaited`.
    fn answer(&mut self, registration: RegistrationId, awaited: Awaited, failure: Option<&str>) {
        let Some(waiters) = self.waiters.get_mut(&registration) else { return };
        for waiter in waiters.extract_if(.., |waiter| waiter.awaited == awaited) {
            let answer = match failure {
                None => Ok(()),
                Some(message) => Err(EngineError::AdapterOperation { name: waiter.name, message: message.to_owned() }),
            };
            // The caller may have given up waiting.
            let _ = waiter.reply.send(answer);
        }
        if waiters.is_empty() {
            self.waiters.remove(&registration);
        }
    }

    /// Carries out what the control plane wants; true if there was anything.
    fn carry_out_effects(&mut self) -> bool {
        let mut any = false;
        // Carrying out a load order that is already satisfied brings further effects: repeat until there are none.
        loop {
            self.effects.extend(self.core.drain_effects());
            if self.effects.is_empty() {
                break;
            }
            any = true;
            let mut effects = std::mem::take(&mut self.effects);
            for effect in effects.drain(..) {
                self.carry_out(effect);
            }
            self.effects = effects;
        }
        // What was read for a registration that has gone meanwhile was not installed: drop it.
        self.arriving.clear();
        any
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Load { registration, .. } => self.order_load(registration),
            Effect::Install { slot, digest } => {
                let arrived = self.arriving.remove(&digest).or_else(|| self.packed.get(&digest).cloned());
                if let Some(handle) = arrived {
                    self.runner.install(slot.0, handle.clone());
                    self.packed.insert(digest, handle);
                } else {
                    // The kernels refuse an empty slot, so nothing is ever served without its adapter.
                    tracing::error!(%digest, "an adapter was to be installed that nobody has read");
                }
                self.release_retired_blocks();
            }
            Effect::Evict { slot, digest } => {
                self.runner.remove(slot.0);
                self.packed.remove(&digest);
                self.released.clear();
                self.released.extend(self.core.retired_blocks());
            }
            Effect::LeaseBound(_) => {}
            Effect::RequestFailed { request, reason } => {
                if let Some(mut sequence) = self.running.remove(&request) {
                    sequence.fail(EngineError::RequestFailed(reason));
                }
            }
            Effect::Finished { request, reason } => {
                if let Some(mut sequence) = self.running.remove(&request) {
                    sequence.finish(reason);
                }
            }
            Effect::Unloaded(registration) => {
                self.sources.remove(&registration);
                self.answer(registration, Awaited::Unloaded, None);
                self.answer(registration, Awaited::Pinned, Some("it was unloaded"));
            }
            Effect::Resident(registration) => self.answer(registration, Awaited::Pinned, None),
            Effect::RegistrationFailed { registration, message } => {
                self.answer(registration, Awaited::Pinned, Some(&message));
                match &mut self.registering {
                    Some((registering, failure)) if *registering == registration => *failure = Some(message),
                    _ => {}
                }
            }
        }
    }

    /// Gives back the memory of KV blocks whose bytes adapters have taken (promise P8).
    fn release_retired_blocks(&mut self) {
        let fresh: Vec<u32> =
            self.core.retired_blocks().filter(|block| !self.released.contains(block)).map(|block| block.0).collect();
        self.runner.release_blocks(&fresh);
        self.released.extend(fresh.into_iter().map(BlockId));
    }

    fn order_load(&mut self, registration: RegistrationId) {
        if let Some((digest, handle)) = self.preloaded.remove(&registration) {
            let bytes = handle.bytes;
            self.arriving.insert(digest, handle);
            let result = Ok(LoadedAdapter { digest, bytes });
            self.core.handle(self.now(), Event::LoadFinished { registration, result });
            return;
        }
        let failure = match self.sources.get(&registration) {
            Some((source, version)) => {
                let job = Job { registration, source: source.clone(), expected: *version };
                self.jobs.send(job).is_err().then_some("the loader thread is gone")
            }
            None => Some("the registration is unknown"),
        };
        if let Some(message) = failure {
            let result = Err(message.to_owned());
            self.core.handle(self.now(), Event::LoadFinished { registration, result });
        }
    }

    /// Plans and runs one step; false if nothing can run now.
    pub(crate) fn step(&mut self) -> bool {
        if !self.core.plan(self.now(), &mut self.plan) {
            return false;
        }
        self.run_step();
        self.deliver();
        true
    }

    /// The part of a step that allocates nothing once it is steady: forward, greedy sampling, commit.
    fn run_step(&mut self) {
        self.step.lower(&self.plan);
        self.runner.forward(&self.step.batch);
        self.outcome.step = self.plan.step;
        self.outcome.sequences.clear();
        self.outcome.tokens.clear();
        for planned in &self.plan.sequences {
            self.outcome
                .sequences
                .push(SequenceOutcome { request: Some(planned.request), ..SequenceOutcome::default() });
        }
        let wanted = self.step.sample_rows.len();
        let chunk = self.runner.max_logit_rows();
        for first in (0..wanted).step_by(chunk) {
            self.sample_chunk(first, chunk.min(wanted - first));
        }
        self.core.commit(self.now(), &self.outcome);
    }

    fn sample_chunk(&mut self, first: usize, count: usize) {
        self.runner.logits(&self.step.batch, first, count);
        self.runner.argmax(count, &mut self.greedy[..count]);
        let logits = self.runner.read_logits(count);
        let width = logits.len() / count;
        for (offset, sample) in self.step.sample_rows[first..first + count].iter().enumerate() {
            let planned = &self.plan.sequences[sample.sequence as usize];
            let Some(sequence) = self.running.get_mut(&planned.request) else { continue };
            let row = &logits[offset * width..(offset + 1) * width];
            sequence.see_row(sample.position as usize, row, &mut self.scratch);
            if !sample.samples {
                continue;
            }
            sequence.set_cached_tokens(planned.cached_tokens as usize);
            let token = if sequence.needs_logits() {
                sequence.sample(row, &mut self.scratch)
            } else {
                sequence.accept_greedy(self.greedy[offset])
            };
            let outcome = &mut self.outcome.sequences[sample.sequence as usize];
            outcome.first_token = self.outcome.tokens.len() as u32;
            outcome.tokens = 1;
            outcome.stopped = sequence.push_token(token);
            self.outcome.tokens.push(token);
        }
    }

    /// Sends what became certain. What finished is sent by the `Finished` effects of the commit.
    fn deliver(&mut self) {
        self.carry_out_effects();
        for planned in &self.plan.sequences {
            if let Some(sequence) = self.running.get_mut(&planned.request) {
                sequence.flush();
            }
        }
    }
}
