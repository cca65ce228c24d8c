//! The one entry point: events in, plans and effects out.
//!
//! No event, in whatever order, makes it panic: what is unknown is ignored or answered by an effect.

use crate::config::CoreConfig;
use crate::error::CoreError;
use crate::event::{
    Client, Effect, Event, FailureReason, FinishReason, LoadFailure, LoadedAdapter, StepOutcome, UnloadMode,
};
use crate::eviction::EvictionPolicy;
use crate::identity::{BlockId, RegistrationId, Time};
use crate::memory::{LoadEnd, Memory, Want};
use crate::plan::StepPlan;
use crate::queue::Lane;
use crate::request::{Phase, Request, RequestIndex};
use crate::scheduler::Scheduler;
use crate::stats::{AdapterUsers, CoreStats, RegistrationStatus, ResidentAdapter, Users};

/// The control plane: scheduler, KV block pool and adapter shelf behind one door.
#[derive(Debug)]
pub struct ControlPlane {
    scheduler: Scheduler,
    pub(crate) memory: Memory,
    pub(crate) effects: Vec<Effect>,
}

impl ControlPlane {
    /// Checks the settings, alone and together, and starts empty.
    pub fn new(config: CoreConfig) -> Result<Self, CoreError> {
        config.validate()?;
        let memory = Memory::new(&config, config.ledger());
        Ok(Self { scheduler: Scheduler::new(config), memory, effects: Vec::new() })
    }

    /// A policy of eviction other than those that [`CoreConfig::eviction`] can name.
    pub fn set_eviction_policy(&mut self, policy: Box<dyn EvictionPolicy>) {
        self.memory.shelf.set_policy(policy);
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
            Event::Register { registration, bytes, rereadable } => {
                if let Err(message) = memory.shelf.register(registration, bytes, rereadable) {
                    effects.push(Effect::RegistrationFailed { registration, message });
                }
                return;
            }
            Event::SetWeight { client, weight } => return self.set_weight(client, weight),
            Event::Prefetch(registration) => return self.prefetch(registration),
            Event::Replace { old, new, expected } => self.replace(old, new, expected),
            Event::Pin(registration) => self.pin(registration),
            Event::Unpin(registration) => memory.shelf.set_pinned(registration, false),
            Event::LoadFinished { registration, result } => self.finish_load(registration, result),
            Event::Unload { registration, mode } => self.unload(registration, mode),
        }
        self.order_loads();
    }

    fn order_loads(&mut self) {
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

    /// KV blocks whose bytes adapters have now.
    pub fn retired_blocks(&self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        self.memory.pool.retired()
    }

    /// Those of them that this has not told of since they were retired: their memory may be given back.
    pub fn take_retired_blocks(&mut self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        self.memory.pool.take_retired()
    }

    /// A look at everything. What it costs depends on what runs, on what is resident and on how many kinds of requests wait,
    /// not on how many wait.
    pub fn stats(&self) -> CoreStats {
        let (scheduler, memory) = (&self.scheduler, &self.memory);
        let residents = memory.shelf.residents().filter_map(|(_, version)| {
            Some(ResidentAdapter {
                digest: version.digest,
                bytes: version.bytes,
                leases: version.leases,
                pinned: version.pins > 0,
                anchored: version.anchors > 0,
                slot: version.slot?,
            })
        });
        let resident = |lane: &Lane| {
            let bound = |version| memory.shelf.version(version).is_resident();
            lane.adapters.iter().all(|adapter| adapter.version.is_some_and(bound))
        };
        let kept_out = scheduler.queue.lanes().filter(|lane| !resident(lane));
        CoreStats {
            running: scheduler.running.len(),
            waiting: scheduler.queue.len() + scheduler.preempted.len(),
            waiting_for_adapters: kept_out.map(|lane| lane.requests.len()).sum(),
            free_blocks: memory.pool.available(),
            total_blocks: memory.pool.capacity(),
            adapters: residents.collect(),
            adapter_bytes: memory.shelf.resident_bytes,
            loading_bytes: memory.shelf.loading_bytes,
            ledger_bytes: memory.ledger.bytes,
            adapter_room: memory.adapter_room,
            prefix_cache_queries: scheduler.prefix_queries,
            prefix_cache_hits: scheduler.prefix_hits,
            preemptions: scheduler.preemptions,
            evictions: memory.evictions,
            loads: memory.loads,
        }
    }

    /// How many requests name the base and each registration. What it costs depends on what [`Self::stats`] depends on.
    pub fn users(&self) -> Users {
        let scheduler = &self.scheduler;
        let mut users = Users::default();
        let mut add = |named: &mut dyn Iterator<Item = RegistrationId>, waits: bool, more: usize| {
            let count =
                |users: &mut AdapterUsers| *(if waits { &mut users.waiting } else { &mut users.running }) += more;
            let mut is_base = true;
            for registration in named {
                is_base = false;
                count(users.adapters.entry(registration).or_default());
            }
            if is_base {
                count(&mut users.base);
            }
        };
        for lane in scheduler.queue.lanes() {
            add(&mut lane.adapters.iter().map(|adapter| adapter.registration), true, lane.requests.len());
        }
        for &index in &scheduler.running {
            add(&mut scheduler.requests[index].registrations(), false, 1);
        }
        for &(.., index) in &scheduler.preempted {
            add(&mut scheduler.requests[index].registrations(), true, 1);
        }
        users
    }

    /// Registrations that are being read.
    pub fn loading(&self) -> impl ExactSizeIterator<Item = RegistrationId> + '_ {
        self.memory.shelf.loading.iter().copied()
    }

    /// Whether requests for a registration need no load.
    pub fn is_resident(&self, registration: RegistrationId) -> bool {
        self.memory.shelf.is_resident(registration)
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
            superseded: one.superseded,
            rereadable: one.rereadable,
            requests: users.filter(|(_, request)| names(request)).count(),
        })
    }

    pub(crate) fn refuse(&mut self, registration: RegistrationId, message: String) {
        self.effects.push(Effect::RegistrationFailed { registration, message });
    }

    /// Whether the registration is there to be used; says so if not.
    pub(crate) fn is_usable(&mut self, registration: RegistrationId) -> bool {
        let found = self.memory.shelf.registrations.get(&registration);
        let problem = match found {
            None => "is not registered",
            Some(found) if found.unloading => "is being unloaded",
            Some(found) if found.superseded => "was replaced",
            Some(_) => return true,
        };
        let RegistrationId { index, generation } = registration;
        self.refuse(registration, format!("adapter `{index}.{generation}` {problem}; register it first"));
        false
    }

    /// Makes a registration resident; false if it is already, or can never be.
    fn want(&mut self, registration: RegistrationId) -> bool {
        let memory = &mut self.memory;
        if let Some(version) = memory.shelf.version_of(registration)
            && memory.shelf.version(version).is_resident()
        {
            memory.shelf.touch(version);
            self.effects.push(Effect::Resident(registration));
            return false;
        }
        if let Err(message) = memory.check_wanted(registration) {
            memory.fail_wanted(registration, message, &mut self.effects);
            return false;
        }
        memory.wanted.entry(registration).or_default().announce = true;
        true
    }

    fn prefetch(&mut self, registration: RegistrationId) {
        if !self.is_usable(registration) || !self.want(registration) {
            return;
        }
        self.order_loads();
        let memory = &mut self.memory;
        let replaces = memory.replacements.iter().any(|replacement| replacement.new == registration);
        let waits = memory.shelf.registrations.get(&registration).is_none_or(|one| one.pinned || !one.rereadable);
        if !waits && !replaces && !memory.is_coming(registration) && memory.wanted.remove(&registration).is_some() {
            self.effects.push(Effect::OnDemand(registration));
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
        let (count, bytes) = shelf.with_fixed(&std::iter::once(registration));
        // What is given from memory takes places in memory, but is no pin.
        let pinned = shelf.pinned_count + usize::from(!shelf.has_pin(registration));
        let limits =
            [("max_loras", self.config().max_loras, pinned), ("max_cpu_loras", self.config().max_cpu_loras, count)];
        for (name, limit, count) in limits {
            if let Some(limit) = limit.filter(|&limit| count >= limit) {
                return Err(format!(
                    "`{count}` adapters would be pinned and {name} is `{limit}`; one place must stay free: unpin one or \
                     raise {name}"
                ));
            }
        }
        self.pins_leave_room(bytes, shelf.largest_other(registration))
    }

    /// Whether `bytes` of adapters that stay leave the room that the largest other one needs.
    pub(crate) fn pins_leave_room(&self, bytes: u64, largest: u64) -> Result<(), String> {
        let room = self.memory.adapter_room;
        if bytes.saturating_add(largest) <= room {
            return Ok(());
        }
        Err(format!(
            "pinned adapters would take `{bytes}` bytes of the `{room}` that adapters can have, and the largest one that \
             is not pinned needs `{largest}`; unpin one, or raise kv_cache_memory_bytes or lora_memory_bytes"
        ))
    }

    fn set_weight(&mut self, client: Client, weight: f64) {
        let client = match client {
            Client::Adapter(registration) => match self.memory.shelf.registrations.get(&registration) {
                Some(found) => Client::Adapter(found.line),
                None => return,
            },
            other => other,
        };
        self.scheduler.queue.accounts.set_weight(client, weight);
    }

    fn finish_load(&mut self, registration: RegistrationId, result: Result<LoadedAdapter, LoadFailure>) {
        let (scheduler, memory, effects) = (&mut self.scheduler, &mut self.memory, &mut self.effects);
        match memory.finish_load(registration, result, &scheduler.queue, effects) {
            LoadEnd::Unknown => {}
            LoadEnd::Departed => memory.depart(registration, effects),
            LoadEnd::Failed(failure) => self.fail_load(registration, failure),
            LoadEnd::Resident => {
                scheduler.sync(memory, effects);
                let resident: Vec<(RegistrationId, Want)> = memory
                    .wanted
                    .iter()
                    .filter(|&(&id, _)| memory.shelf.is_resident(id))
                    .map(|(&id, &want)| (id, want))
                    .collect();
                for (id, want) in resident {
                    memory.wanted.remove(&id);
                    if want.announce {
                        effects.push(Effect::Resident(id));
                    }
                }
                self.swap_ready();
            }
        }
    }

    /// A load failed: only those who wait for it fail.
    fn fail_load(&mut self, registration: RegistrationId, failure: LoadFailure) {
        if !self.memory.shelf.is_resident(registration) {
            let reason = FailureReason::AdapterLoad(failure.clone());
            for index in self.requests_of(registration) {
                self.scheduler.fail(index, reason.clone(), &mut self.memory, &mut self.effects);
            }
        }
        if self.memory.wanted.contains_key(&registration) {
            self.memory.fail_wanted(registration, failure.message, &mut self.effects);
            self.swap_ready();
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
        let (memory, effects) = (&mut self.memory, &mut self.effects);
        for new in memory.replacements_of(registration) {
            memory.fail_wanted(new, "the adapter to replace was unloaded; register it anew".to_owned(), effects);
        }
        let replaces = memory.replacements.iter().any(|replacement| replacement.new == registration);
        if replaces || memory.wanted.contains_key(&registration) {
            memory.fail_wanted(registration, "the adapter was unloaded before it was resident".to_owned(), effects);
            self.swap_ready();
        }
        if mode == UnloadMode::Abort {
            for index in self.requests_of(registration) {
                self.scheduler.finish(index, FinishReason::Abort, &mut self.memory, &mut self.effects);
            }
        }
        self.memory.depart(registration, &mut self.effects);
    }

    /// How many queue entries, victims and classes were looked at so far: what the cost of a step depends on.
    #[doc(hidden)]
    pub fn looks(&self) -> u64 {
        self.memory.looks
    }

    /// Clients whose service is remembered.
    #[doc(hidden)]
    pub fn remembered_clients(&self) -> usize {
        self.scheduler.queue.accounts.len()
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
        memory.pool.check(&owners)?;
        self.check_users()
    }

    /// Whether what is told of requests is what there is, counted one by one.
    fn check_users(&self) -> Result<(), String> {
        let (mut users, mut kept_out) = (Users::default(), 0);
        for (_, request) in self.scheduler.requests.iter() {
            let runs = usize::from(request.phase == Phase::Running);
            let add = |users: &mut AdapterUsers| {
                users.running += runs;
                users.waiting += 1 - runs;
            };
            request.registrations().for_each(|registration| add(users.adapters.entry(registration).or_default()));
            if request.adapters.is_empty() {
                add(&mut users.base);
            }
            let resident = |version| self.memory.shelf.version(version).is_resident();
            let is_ready = request.adapters.iter().all(|adapter| adapter.version.is_some_and(resident));
            kept_out += usize::from(request.phase == Phase::Waiting && !is_ready);
        }
        if (&users, kept_out) == (&self.users(), self.stats().waiting_for_adapters) {
            return Ok(());
        }
        Err(format!("requests are told otherwise than they are: {users:?}, `{kept_out}` kept out"))
    }
}
