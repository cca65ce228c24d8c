//! The engine thread: events in, one step after the other, deltas out.
//!
//! A steady decode step (plan, forward, greedy sampling, commit) allocates nothing and takes no lock; deltas are
//! delivered after it.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use manylora_core::{
    AdapterUsers, Effect, Event, RegistrationId, RequestId, SequenceOutcome, StepOutcome, StepPlan, Time,
};
use manylora_kernels::LargestValues;
use manylora_model::{ModelError, Runner};

use super::choice::{Chosen, Draw};
use super::command::Command;
use super::courier::Courier;
use super::library::{Core, Library};
use super::lower::LoweredStep;
use super::meters::{LoadFailureCounts, Meters};
use super::phases::{Phase, PhaseSeconds, Stopwatch};
use super::recorder::Plane;
use super::sequences::{Place, Sequences};
use super::{EngineStats, NamedUsers};
use crate::error::EngineError;
use crate::sampler::SamplerScratch;
use crate::structure::Constraint;

/// How often unloads that wait for holds are looked at when nothing else happens.
const DEPARTING_POLL: Duration = Duration::from_millis(2);

pub(crate) struct Worker {
    core: Plane,
    pub(super) runner: Box<dyn Runner>,
    library: Library,
    commands: Receiver<Command>,
    courier: Courier,
    clock: Instant,
    pub(super) sequences: Sequences,
    /// Steps, and bytes of adapters that they have read.
    steps: u64,
    streamed_bytes: u64,
    pub(super) plan: StepPlan,
    /// Where the sequences of the plan are, in its order, until the next step.
    pub(super) members: Vec<(RequestId, Place)>,
    pub(super) step: LoweredStep,
    pub(super) outcome: StepOutcome,
    pub(super) greedy: Vec<u32>,
    pub(super) largest: LargestValues,
    /// Memory of threads that choose tokens; one at least between steps.
    pub(super) scratches: Mutex<Vec<SamplerScratch>>,
    /// Tokens that the step has chosen, in the order of its sample rows.
    pub(super) chosen: Vec<Chosen>,
    /// Empty between steps, but where one failed.
    pub(super) draws: Vec<Draw>,
    /// Empty between steps.
    pub(super) constraints: Vec<(Place, Mutex<Constraint>)>,
    effects: Vec<Effect>,
    pub(super) meters: Meters,
    phase_seconds: PhaseSeconds,
    watch: Stopwatch,
}

impl Worker {
    pub(crate) fn new(
        core: Plane,
        runner: Box<dyn Runner>,
        library: Library,
        (commands, courier): (Receiver<Command>, Courier),
        step: LoweredStep,
        max_num_seqs: usize,
        meters: Meters,
    ) -> Self {
        let outcome = StepOutcome {
            step: 0,
            sequences: Vec::with_capacity(max_num_seqs),
            tokens: Vec::with_capacity(max_num_seqs),
        };
        let greedy = vec![0; runner.max_logit_rows()];
        Self {
            clock: core.clock(),
            core,
            runner,
            library,
            commands,
            courier,
            sequences: Sequences::default(),
            steps: 0,
            streamed_bytes: 0,
            plan: StepPlan::default(),
            members: Vec::with_capacity(max_num_seqs),
            step,
            outcome,
            greedy,
            largest: LargestValues::default(),
            scratches: Mutex::new(vec![SamplerScratch::default()]),
            chosen: Vec::with_capacity(max_num_seqs),
            draws: Vec::new(),
            constraints: Vec::new(),
            effects: Vec::new(),
            meters,
            phase_seconds: PhaseSeconds::default(),
            watch: Stopwatch::start(),
        }
    }

    /// Books the time since the last call.
    pub(super) fn spent(&mut self, phase: Phase) {
        self.phase_seconds.add(phase, self.watch.lap());
    }

    /// Runs until told to stop, until every handle is gone, or until a step fails: what the device holds is unknown then.
    pub(crate) fn run(&mut self) -> Result<(), ModelError> {
        while self.take_commands() {
            self.with_library(Library::unload_departing);
            self.spent(Phase::Commands);
            let ran = self.step()?;
            // Effects may have made something runnable that was not when the step was planned.
            let changed = self.carry_out_effects();
            self.spent(Phase::Deliver);
            self.core.turned(&self.phase_seconds);
            if ran || changed {
                continue;
            }
            self.core.rests();
            let command = if self.library.has_departing() {
                // Holds are dropped on callers' threads without a word to this one.
                self.commands.recv_timeout(DEPARTING_POLL)
            } else {
                self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
            };
            // Nobody's time.
            self.watch.lap();
            match command {
                Ok(Command::Shutdown) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Ok(command) => self.handle(command),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        Ok(())
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

    /// Ends everything that still runs or was about to, after the loop has ended or failed.
    pub(crate) fn close(&mut self, why: &str) {
        // Where a step ended in a panic, some may have been told and not woken.
        self.courier.wake();
        // Where it ended in the middle of drawing, some are not in the table.
        let drawn = self.draws.drain(..).map(Draw::into_sequence);
        for mut sequence in drawn.chain(self.sequences.drain()) {
            sequence.fail(EngineError::Stopped(why.to_owned()));
        }
        // What else there is has its answer when its sender finds nobody there.
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Submit(sequences, _) = command {
                for (_, mut sequence) in sequences {
                    sequence.fail(EngineError::Stopped(why.to_owned()));
                }
            }
        }
    }

    fn now(&self) -> Time {
        Time(self.clock.elapsed().as_secs_f64())
    }

    /// Lets the library work on the control plane, and carries out what comes of it.
    fn with_library(&mut self, work: impl FnOnce(&mut Library, &mut Core<'_>)) {
        let now = self.now();
        work(&mut self.library, &mut Core { plane: &mut self.core, now });
        self.carry_out_effects();
    }

    pub(crate) fn handle(&mut self, command: Command) {
        let now = self.now();
        match command {
            Command::Submit(sequences, holds) => {
                for (request, mut sequence) in sequences {
                    for adapter in &request.adapters {
                        let resident = self.core.is_resident(adapter.registration);
                        self.meters.look_up(resident);
                        sequence.course.resident &= resident;
                    }
                    let submitted = sequence.course.submitted();
                    self.sequences.insert(request.id, sequence);
                    self.core.submit(now, request, submitted);
                }
                drop(holds);
            }
            Command::Abort(requests) => {
                for request in requests {
                    self.core.handle(now, Event::Abort(request));
                }
            }
            Command::Shelve(orders) => {
                for order in orders {
                    self.with_library(|library, core| library.shelve(order, core));
                }
            }
            Command::Read { registration, result } => {
                if let Ok(read) = &result {
                    self.meters.load_seconds.observe(read.seconds);
                }
                self.with_library(|library, core| library.read(registration, result, core));
            }
            Command::Identified { identify, result } => {
                self.with_library(|library, core| library.identified(identify, result, core));
            }
            Command::Unload { name, mode, reply } => {
                self.with_library(|library, core| library.unload(&name, mode, reply, core));
            }
            Command::Holders { name, reply } => drop(reply.send(Ok(self.library.holders(&name, &self.core)))),
            Command::Pin { name, pinned, reply } => {
                self.with_library(|library, core| library.pin(name, pinned, reply, core));
            }
            Command::SetWeight(client, weight) => self.core.handle(now, Event::SetWeight { client, weight }),
            Command::Stats(reply) => {
                self.spent(Phase::Commands);
                drop(reply.send(Ok(self.stats())));
                // To look is nobody's time, lest looking changed what is seen.
                self.watch.lap();
            }
            Command::ResetPrefixCache(reply) => drop(reply.send(Ok(self.core.reset_prefix_cache(now)))),
            Command::Shutdown => {}
        }
        self.carry_out_effects();
    }

    /// What this thread knows; the handle adds what the others know.
    fn stats(&self) -> EngineStats {
        let users = self.core.users();
        let name = |registration| self.library.name_of(registration).map(str::to_owned);
        let named = |(&id, &users): (&RegistrationId, &AdapterUsers)| Some(NamedUsers { name: name(id)?, users });
        EngineStats {
            base_users: users.base,
            adapter_users: users.adapters.iter().filter_map(named).collect(),
            loading: self.core.loading().filter_map(name).collect(),
            registered: 0,
            residents: Vec::new(),
            load_failures: LoadFailureCounts::default(),
            meters: self.meters.clone(),
            core: self.core.stats(),
            adapter_reads: self.library.reads,
            loaded_bytes: self.library.loaded_bytes,
            streamed_bytes: self.streamed_bytes,
            steps: self.steps,
            phase_seconds: self.phase_seconds,
            device_memory: self.runner.memory_use().map(Into::into),
        }
    }

    /// Carries out what the control plane wants, and wakes who has news of it; true if there was anything.
    fn carry_out_effects(&mut self) -> bool {
        let any = self.drain_effects();
        self.courier.wake();
        any
    }

    fn drain_effects(&mut self) -> bool {
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
        self.library.tidy();
        any
    }

    /// Carries out evictions, before the step that was planned with the KV blocks that they make room for, and orders loads, so that
    /// adapters are read while the step runs and not after it. All else can wait.
    fn make_room(&mut self) {
        self.effects.extend(self.core.drain_effects());
        let mut effects = std::mem::take(&mut self.effects);
        let is_urgent = |effect: &mut Effect| matches!(effect, Effect::Evict { .. } | Effect::Load { .. });
        effects.extract_if(.., is_urgent).for_each(|effect| self.carry_out(effect));
        self.effects = effects;
    }

    fn carry_out(&mut self, effect: Effect) {
        let now = self.now();
        let core = &mut Core { plane: &mut self.core, now };
        match effect {
            Effect::Load { registration, .. } => {
                // Its bytes are needed from now on.
                self.release_retired_blocks();
                self.library.order_load(registration, &mut Core { plane: &mut self.core, now });
            }
            Effect::Install { slot, digest } => {
                self.library.install(slot, digest, self.runner.as_mut());
                self.release_retired_blocks();
            }
            Effect::Evict { slot, digest } => {
                self.library.evict(slot, digest, self.runner.as_mut());
            }
            Effect::LeaseBound(request) => {
                if let Some(sequence) = self.sequences.at(self.sequences.place(request)) {
                    sequence.bind(|registration| self.library.version_of(registration));
                }
            }
            Effect::RequestFailed { request, reason } => {
                if let Some(mut sequence) = self.sequences.remove(request) {
                    self.meters.ended.error += 1;
                    sequence.fail(EngineError::RequestFailed(reason));
                }
            }
            Effect::Finished { request, reason } => {
                if let Some(mut sequence) = self.sequences.remove(request) {
                    self.courier.add(sequence.finish(reason, &mut self.meters));
                }
            }
            Effect::Unloaded(registration) => self.library.unloaded(registration),
            Effect::Resident(registration) => self.library.resident(registration, core),
            Effect::Replaced { old, new } => self.library.replaced(old, new, core),
            Effect::OnDemand(registration) => self.library.on_demand(registration, core),
            Effect::RegistrationFailed { registration, message } => self.library.failed(registration, message, core),
        }
    }

    /// Gives back the memory of KV blocks whose bytes adapters have taken (promise P8).
    fn release_retired_blocks(&mut self) {
        let retired: Vec<u32> = self.core.take_retired_blocks().map(|block| block.0).collect();
        self.runner.release_blocks(&retired);
    }

    /// Plans and runs one step; false if nothing can run now.
    pub(crate) fn step(&mut self) -> Result<bool, ModelError> {
        let now = self.now();
        if !self.core.plan(now, &mut self.plan) {
            return Ok(false);
        }
        self.make_room();
        self.spent(Phase::Plan);
        self.run_step()?;
        self.spent(Phase::Commit);
        self.deliver();
        Ok(true)
    }

    /// The part of a step that allocates nothing once it is steady: forward, greedy sampling, commit.
    fn run_step(&mut self) -> Result<(), ModelError> {
        self.step.lower(&self.plan);
        self.steps += 1;
        let slots = self.step.batch.adapters.segments().iter().map(|adapter| adapter.slot);
        self.streamed_bytes += slots.clone().map(|slot| self.library.bytes_in(slot)).sum::<u64>();
        self.meters.step(self.steps, self.plan.tokens.len(), slots);
        let begun = Instant::now();
        self.members.truncate(self.plan.sequences.len());
        for (position, planned) in self.plan.sequences.iter().enumerate() {
            // Most are where they were in the last step.
            let place = match self.members.get(position) {
                Some(&(request, place)) if request == planned.request => place,
                _ => self.sequences.place(planned.request),
            };
            match self.members.get_mut(position) {
                Some(member) => *member = (planned.request, place),
                None => self.members.push((planned.request, place)),
            }
            if let Some(sequence) = self.sequences.at_mut(place) {
                sequence.course.schedule(begun, planned.cached_tokens as usize, planned.preemptions);
            }
        }
        self.spent(Phase::Lower);
        self.runner.forward(&self.step.batch)?;
        self.spent(Phase::Forward);
        self.choose_tokens()?;
        self.spent(Phase::Sample);
        self.outcome.step = self.plan.step;
        self.outcome.sequences.clear();
        self.outcome.tokens.clear();
        for planned in &self.plan.sequences {
            self.outcome
                .sequences
                .push(SequenceOutcome { request: Some(planned.request), ..SequenceOutcome::default() });
        }
        self.push_tokens();
        self.spent(Phase::Text);
        let now = self.now();
        self.core.commit(now, &self.plan, &self.outcome);
        Ok(())
    }

    /// Sends what became certain. What finished is sent by the `Finished` effects of the commit.
    fn deliver(&mut self) {
        self.drain_effects();
        // Who has ended is gone, and nobody new is there yet.
        for &(_, place) in &self.members {
            if let Some(sequence) = self.sequences.at_mut(place) {
                self.courier.add(sequence.flush());
            }
        }
        self.courier.wake();
    }
}
