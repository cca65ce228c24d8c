//! The one entry point: events in, plans and effects out.
//!
//! No event, in whatever order, makes it panic: what is unknown is ignored or answered by an effect.

use crate::budget::Ledger;
use crate::config::CoreConfig;
use crate::error::CoreError;
use crate::event::{Effect, Event, FailureReason, FinishReason, LoadedAdapter, StepOutcome, UnloadMode};
use crate::eviction::EvictionPolicy;
use crate::identity::{BlockId, RegistrationId, Time};
use crate::memory::{LoadEnd, Memory};
use crate::plan::StepPlan;
use crate::request::{Request, RequestIndex};
use crate::scheduler::Scheduler;
use crate::stats::{CoreStats, RegistrationStatus, ResidentAdapter};

/// The control plane: scheduler, KV block pool and adapter shelf behind one door.
#[derive(Debug)]
pub struct ControlPlane {
    scheduler: Scheduler,
    memory: Memory,
    effects: Vec<Effect>,
}

impl ControlPlane {
    /// Checks the settings, alone and together, and starts empty.
    pub fn new(config: CoreConfig) -> Result<Self, CoreError> {
        config.validate()?;
        let ledger =
            Ledger { bytes: config.ledger_bytes, block_bytes: config.block_bytes, block_size: config.block_size };
        let memory = Memory::new(&config, ledger);
        Ok(Self { scheduler: Scheduler::new(config), memory, effects: Vec::new() })
    }

    /// Chooses which adapter goes when room is needed; least recently used unless this is called.
    pub fn set_eviction_policy(&mut self, policy: Box<dyn EvictionPolicy>) {
        self.memory.policy = policy;
    }

    /// The settings.
    pub fn config(&self) -> &CoreConfig {
        &self.scheduler.config
    }

    /// Reserves an id for [`Event::Register`].
    pub fn next_registration(&mut self) -> RegistrationId {
        self.memory.shelf.next_id()
    }

    /// Takes an event. Effects are drained afterwards.
    pub fn handle(&mut self, now: Time, event: Event) {
        let (memory, effects) = (&mut self.memory, &mut self.effects);
        match event {
            Event::Submit(request) => return self.scheduler.submit(request, memory, effects),
            Event::Outcome(outcome) => return self.commit(now, &outcome),
            Event::Abort(request) => {
                if let Some(index) = self.scheduler.requests.find(request) {
                    self.scheduler.finish(index, FinishReason::Abort, memory, effects);
                }
                return;
            }
            Event::Register { registration, bytes } => {
                if let Err(message) = memory.shelf.register(registration, bytes) {
                    effects.push(Effect::RegistrationFailed { registration, message });
                }
                return;
            }
            Event::Prefetch(registration) => self.want(registration),
            Event::Pin(registration) => self.pin(registration),
            Event::Unpin(registration) => memory.shelf.set_pinned(registration, false),
            Event::LoadFinished { registration, result } => self.finish_load(registration, result),
            Event::Unload { registration, mode } => self.unload(registration, mode),
        }
        self.scheduler.loads_stale = true;
        self.scheduler.order_loads(&mut self.memory, &mut self.effects);
    }

    /// Fills the plan of the next step; false if nothing can run now. One step may be in flight meanwhile.
    pub fn plan(&mut self, now: Time, plan: &mut StepPlan) -> bool {
        let _ = now;
        self.scheduler.plan(&mut self.memory, &mut self.effects, plan)
    }

    /// Takes a step's results. A planned sequence that is missing there counts as lost and is computed again.
    pub fn commit(&mut self, now: Time, outcome: &StepOutcome) {
        let _ = now;
        self.scheduler.commit(outcome, &mut self.memory, &mut self.effects);
    }

    /// What is to be done and known, in order.
    pub fn drain_effects(&mut self) -> impl Iterator<Item = Effect> + '_ {
        self.effects.drain(..)
    }

    /// Whether requests run or wait (if only for a load).
    pub fn has_work(&self) -> bool {
        self.scheduler.requests.len() > 0
    }

    /// Whether no live request names this registration.
    pub fn is_idle_for(&self, registration: RegistrationId) -> bool {
        self.memory.shelf.registrations.get(&registration).is_none_or(|one| one.holders == 0)
    }

    /// Forgets all cached KV blocks; false, and nothing happened, if requests hold blocks.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.memory.pool.reset()
    }

    /// KV blocks whose bytes adapters have now: their memory may be given back.
    pub fn retired_blocks(&self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        self.memory.pool.retired()
    }

    /// A look at everything.
    pub fn stats(&self) -> CoreStats {
        let (scheduler, memory) = (&self.scheduler, &self.memory);
        let residents = memory.shelf.residents().filter_map(|version| {
            Some(ResidentAdapter {
                digest: version.digest,
                bytes: version.bytes,
                leases: version.leases,
                pinned: version.pins > 0,
                slot: version.slot?,
            })
        });
        CoreStats {
            running: scheduler.running.len(),
            waiting: scheduler.waiting.len(),
            free_blocks: memory.pool.available(),
            total_blocks: memory.pool.capacity(),
            adapters: residents.collect(),
            adapter_bytes: memory.shelf.resident_bytes,
            loading_bytes: memory.shelf.loading_bytes,
            ledger_bytes: memory.ledger.bytes,
            prefix_cache_queries: scheduler.prefix_queries,
            prefix_cache_hits: scheduler.prefix_hits,
            preemptions: scheduler.preemptions,
            evictions: memory.evictions,
            loads: memory.loads,
        }
    }

    /// A look at one registration; None if the id is stale or unknown.
    pub fn registration(&self, registration: RegistrationId) -> Option<RegistrationStatus> {
        let shelf = &self.memory.shelf;
        let one = shelf.registrations.get(&registration)?;
        let version = one.version.map(|version| shelf.version(version));
        let users = self.scheduler.requests.iter();
        let names = |request: &Request| request.adapters.iter().any(|adapter| adapter.registration == registration);
        Some(RegistrationStatus {
            digest: version.map(|version| version.digest),
            bytes: shelf.bytes_of(registration),
            slot: version.and_then(|version| version.slot),
            loading: one.loading.is_some() || version.is_some_and(|version| version.loading),
            pinned: one.pinned,
            unloading: one.unloading,
            requests: users.filter(|(_, request)| names(request)).count(),
        })
    }

    fn is_resident(&self, registration: RegistrationId) -> bool {
        let shelf = &self.memory.shelf;
        shelf.version_of(registration).is_some_and(|version| shelf.version(version).is_resident())
    }

    fn refuse(&mut self, registration: RegistrationId, message: String) {
        self.effects.push(Effect::RegistrationFailed { registration, message });
    }

    /// Whether the registration is there to be used; says so if not.
    fn is_usable(&mut self, registration: RegistrationId) -> bool {
        let found = self.memory.shelf.registrations.get(&registration);
        let problem = match found {
            None => "is not registered",
            Some(found) if found.unloading => "is being unloaded",
            Some(_) => return true,
        };
        let RegistrationId { index, generation } = registration;
        self.refuse(registration, format!("adapter `{index}.{generation}` {problem}; register it first"));
        false
    }

    fn want(&mut self, registration: RegistrationId) {
        if !self.is_usable(registration) {
            return;
        }
        if self.is_resident(registration) {
            if let Some(version) = self.memory.shelf.version_of(registration) {
                self.memory.shelf.touch(version);
            }
            self.effects.push(Effect::Resident(registration));
        } else if let Err(message) = self.memory.can_ever_fit(std::iter::once(registration)) {
            self.refuse(registration, message);
        } else {
            self.memory.shelf.wanted.insert(registration);
        }
    }

    fn pin(&mut self, registration: RegistrationId) {
        if !self.is_usable(registration) {
            return;
        }
        match self.can_pin(registration) {
            Ok(()) => {
                self.memory.shelf.set_pinned(registration, true);
                self.want(registration);
            }
            Err(message) => self.refuse(registration, message),
        }
    }

    /// Pins must leave a place, and the bytes of the largest adapter that is not pinned.
    fn can_pin(&self, registration: RegistrationId) -> Result<(), String> {
        let shelf = &self.memory.shelf;
        let (count, bytes) = shelf.with_pinned(std::iter::once(registration));
        let limits = [("max_loras", self.config().max_loras), ("max_cpu_loras", self.config().max_cpu_loras)];
        for (name, limit) in limits {
            if let Some(limit) = limit.filter(|&limit| count >= limit) {
                return Err(format!(
                    "`{count}` adapters would be pinned and {name} is `{limit}`; one place must stay free: unpin one or \
                     raise {name}"
                ));
            }
        }
        let others = shelf.registrations.iter().filter(|&(&id, one)| id != registration && !one.pinned);
        let largest = others.map(|(&id, _)| shelf.bytes_of(id)).max().unwrap_or(0);
        let room = self.memory.adapter_room;
        if bytes.saturating_add(largest) > room {
            return Err(format!(
                "pinned adapters would take `{bytes}` bytes of the `{room}` that adapters can have, and the largest one \
                 that is not pinned needs `{largest}`; unpin one, or raise kv_cache_memory_bytes or lora_memory_bytes"
            ));
        }
        Ok(())
    }

    fn finish_load(&mut self, registration: RegistrationId, result: Result<LoadedAdapter, String>) {
        let (scheduler, memory, effects) = (&mut self.scheduler, &mut self.memory, &mut self.effects);
        // Nothing is protected from a load whose content is larger than announced but what is in use.
        scheduler.scan += 1;
        match memory.finish_load(registration, result, scheduler.scan, effects) {
            LoadEnd::Unknown => {}
            LoadEnd::Departed => memory.depart(registration, effects),
            LoadEnd::Failed(message) => self.fail_load(registration, &message),
            LoadEnd::Resident => {
                scheduler.bind_all(memory, effects);
                let wanted: Vec<_> = self.memory.shelf.wanted.iter().copied().collect();
                for registration in wanted {
                    if self.is_resident(registration) {
                        self.memory.shelf.wanted.remove(&registration);
                        self.effects.push(Effect::Resident(registration));
                    }
                }
            }
        }
    }

    /// A load failed: only those who wait for it fail.
    fn fail_load(&mut self, registration: RegistrationId, message: &str) {
        let resident = self.is_resident(registration);
        if self.memory.shelf.wanted.remove(&registration) {
            self.memory.shelf.set_pinned(registration, false);
            self.refuse(registration, message.to_owned());
        }
        if !resident {
            let reason = FailureReason::AdapterLoad(message.to_owned());
            for index in self.requests_of(registration) {
                self.scheduler.fail(index, reason.clone(), &mut self.memory, &mut self.effects);
            }
        }
    }

    /// Live requests that name a registration, by arrival.
    fn requests_of(&self, registration: RegistrationId) -> Vec<RequestIndex> {
        let names = |request: &Request| request.adapters.iter().any(|adapter| adapter.registration == registration);
        let all = self.scheduler.requests.iter().filter(|(_, request)| names(request));
        let mut found: Vec<_> = all.map(|(index, request)| (request.arrival, index)).collect();
        found.sort_unstable();
        found.into_iter().map(|(_, index)| index).collect()
    }

    fn unload(&mut self, registration: RegistrationId, mode: UnloadMode) {
        let Some(found) = self.memory.shelf.registrations.get_mut(&registration) else {
            let RegistrationId { index, generation } = registration;
            return self.refuse(registration, format!("adapter `{index}.{generation}` is not registered"));
        };
        found.unloading = true;
        self.memory.shelf.set_pinned(registration, false);
        if self.memory.shelf.wanted.remove(&registration) {
            self.refuse(registration, "the adapter was unloaded before it was resident".to_owned());
        }
        if mode == UnloadMode::Abort {
            for index in self.requests_of(registration) {
                self.scheduler.finish(index, FinishReason::Abort, &mut self.memory, &mut self.effects);
            }
        }
        self.memory.depart(registration, &mut self.effects);
    }

    /// Checks what must always hold: every block, byte and lease has exactly its owners.
    #[doc(hidden)]
    pub fn check_invariants(&self) -> Result<(), String> {
        let (scheduler, memory) = (&self.scheduler, &self.memory);
        memory.check()?;
        scheduler.check(memory)?;
        let mut owners = vec![0; memory.ledger.blocks_beside(0)];
        for (_, request) in scheduler.requests.iter() {
            request.blocks.iter().for_each(|block| owners[block.0 as usize] += 1);
        }
        memory.pool.check(&owners)
    }
}
