//! Who may start: arrival, the order of loads, the cap on distinct adapters, and the bound on waiting for it.
//!
//! The queue is scanned in its order (preempted requests, then priority, then arrival). Base requests need no adapter and
//! are always admissible. A request whose adapter is not resident, or would make more distinct adapters than
//! `min(max_loras, max_cpu_loras)`, is passed over; those behind it are not held up. A request that lacks KV blocks or
//! rows stops the scan, so that large ones are not overtaken for ever. Adapters of admitted requests count while they
//! prefill and while they are preempted.
//!
//! # The bound (promise P5)
//!
//! Passing over without end would starve. A request is *deferred* from the first step at which its turn comes and the cap,
//! or lack of room for its adapter, keeps it out. Once that is `max_deferred_steps` steps ago, admission is closed to every fresh request
//! of its priority or a lower one that brings adapters other than its own; if its load lacks KV blocks, they are saved for
//! it. What runs drains, at the latest when every sequence that runs now has reached its length, and the request is next.
//! So it waits at most `max_deferred_steps` steps, plus the steps that the running sequences need to end (at most
//! `max_model_len` decode steps), plus its own load; if several are overdue they are served one after the other, oldest
//! first. Base requests and those of running adapters that the overdue request shares keep being admitted. Under
//! [`SchedulingPolicy::Priority`](crate::SchedulingPolicy) higher priorities are never closed: overtaking is their point.

use std::collections::HashSet;
use std::ops::Bound;

use crate::config::SchedulingPolicy;
use crate::event::{Effect, FailureReason, NewRequest};
use crate::identity::RegistrationId;
use crate::memory::{Memory, Shortage};
use crate::plan::StepPlan;
use crate::request::{Phase, QueueKey, Request, RequestAdapter, RequestIndex};
use crate::scheduler::{Flight, Scheduler};
use crate::shelf::Victims;

/// What became of a look at a waiting request.
enum Look {
    Admitted { rows: usize },
    PassedOver,
    NoRoom,
}

impl Scheduler {
    /// A request arrives.
    pub(crate) fn submit(&mut self, new: NewRequest, memory: &mut Memory, effects: &mut Vec<Effect>) {
        if self.requests.find(new.id).is_some() {
            return;
        }
        if let Err(reason) = self.check_request(&new, memory) {
            effects.push(Effect::RequestFailed { request: new.id, reason });
            return;
        }
        let adapters: Vec<_> = new
            .adapters
            .iter()
            .filter(|adapter| adapter.scale != 0.0)
            .map(|adapter| RequestAdapter {
                registration: adapter.registration,
                scale: adapter.scale,
                first_active: adapter.first_active,
                version: None,
            })
            .collect();
        for adapter in &adapters {
            if let Some(registration) = memory.shelf.registrations.get_mut(&adapter.registration) {
                registration.holders += 1;
            }
        }
        let prompt_length = new.prompt.len();
        let room = self.config.max_model_len.saturating_sub(prompt_length).max(1);
        self.arrivals += 1;
        let index = self.requests.insert(Request {
            id: new.id,
            phase: Phase::Waiting,
            tokens: new.prompt,
            prompt_length,
            length_limit: prompt_length + new.max_tokens.min(room),
            priority: if self.config.policy == SchedulingPolicy::Priority { new.priority } else { 0 },
            arrival: self.arrivals,
            cache_salt: new.cache_salt,
            adapters,
            read_prefix_cache: new.read_prefix_cache && !new.all_prompt_logits,
            all_prompt_logits: new.all_prompt_logits,
            announced: false,
            deferred_since: None,
            blocks: Vec::new(),
            hashes: Vec::new(),
            named: 0,
            computed: 0,
            committed: 0,
            placeholders: 0,
            in_flight: 0,
            void_outcomes: 0,
            epoch: 0,
            prefill_end: prompt_length - 1,
            cached_tokens: None,
            prompt_done: false,
            planned_step: 0,
        });
        let key = self.requests[index].key(index);
        self.waiting.insert(key);
        self.bind(index, memory, effects);
        if self.requests[index].announced {
            return;
        }
        self.loads_stale = true;
        if self.deferred.is_empty() {
            // Nobody waits for room: the load need not wait for the next scan.
            for adapter in &self.requests[index].adapters {
                if !memory.is_coming(adapter.registration) {
                    let _ = memory.order_load(adapter.registration, Victims::Idle, effects);
                }
            }
        }
    }

    fn check_request(&self, new: &NewRequest, memory: &Memory) -> Result<(), FailureReason> {
        let known = |id: &RegistrationId| memory.shelf.registrations.get(id).is_some_and(|one| !one.unloading);
        if !new.adapters.iter().all(|adapter| known(&adapter.registration)) {
            return Err(FailureReason::AdapterUnloaded);
        }
        let available = memory.ledger.blocks_beside(0);
        let needed = new.prompt.len().div_ceil(self.config.block_size);
        if needed > available {
            return Err(FailureReason::TooLarge { needed, available });
        }
        if new.prompt.is_empty() || new.prompt.len() > self.config.max_model_len {
            return Err(FailureReason::PromptLength { tokens: new.prompt.len(), limit: self.config.max_model_len });
        }
        let active = new.adapters.iter().filter(|adapter| adapter.scale != 0.0).map(|adapter| adapter.registration);
        let distinct: HashSet<_> = active.clone().collect();
        if distinct.len() > self.adapter_cap {
            return Err(FailureReason::TooManyAdapters { needed: distinct.len(), limit: self.adapter_cap });
        }
        if distinct.is_empty() {
            return Ok(());
        }
        memory.can_ever_fit(active).map_err(FailureReason::AdapterLoad)
    }

    /// Takes leases on the versions that are known by now, and says so once all are resident.
    pub(crate) fn bind(&mut self, index: RequestIndex, memory: &mut Memory, effects: &mut Vec<Effect>) {
        let request = &mut self.requests[index];
        for adapter in &mut request.adapters {
            if adapter.version.is_none() {
                adapter.version = memory.shelf.version_of(adapter.registration);
                if let Some(version) = adapter.version {
                    memory.shelf.version_mut(version).leases += 1;
                }
            }
        }
        if !request.announced && request.is_ready(&memory.shelf) {
            request.announced = true;
            effects.push(Effect::LeaseBound(request.id));
        }
    }

    /// Binds every waiting request, in the queue's order.
    pub(crate) fn bind_all(&mut self, memory: &mut Memory, effects: &mut Vec<Effect>) {
        let mut key = self.waiting.first().copied();
        while let Some(now) = key {
            if !self.requests[now.index].announced {
                self.bind(now.index, memory, effects);
            }
            key = self.after(&now);
        }
    }

    fn after(&self, key: &QueueKey) -> Option<QueueKey> {
        self.waiting.range((Bound::Excluded(*key), Bound::Unbounded)).next().copied()
    }

    /// The request whose bound on waiting has passed and whose turn it therefore is.
    fn overdue(&self) -> Option<RequestIndex> {
        let age = self.config.max_deferred_steps;
        let mut deferred = self.deferred.iter();
        deferred.find(|(_, since, ..)| self.next_step >= since.saturating_add(age)).map(|&(.., index)| index)
    }

    fn defer(&mut self, index: RequestIndex) {
        let step = self.next_step;
        let request = &mut self.requests[index];
        if request.deferred_since.is_none() {
            request.deferred_since = Some(step);
            self.deferred.insert((request.priority, step, request.arrival, index));
        }
    }

    pub(crate) fn stop_deferring(&mut self, index: RequestIndex) {
        let request = &mut self.requests[index];
        if let Some(since) = request.deferred_since.take() {
            self.deferred.remove(&(request.priority, since, request.arrival, index));
        }
    }

    /// Orders the loads that waiting requests need, then those that were asked for ahead of any request.
    ///
    /// A load may evict what nobody holds, then what only requests further back hold. Requests whose adapters can never
    /// fit (any more) fail.
    pub(crate) fn order_loads(&mut self, memory: &mut Memory, effects: &mut Vec<Effect>) {
        let idle = self.waiting.is_empty() && memory.shelf.wanted.is_empty();
        if idle || (!self.loads_stale && self.blocked_loads == 0) {
            self.saving_for = None;
            return;
        }
        self.loads_stale = false;
        self.blocked_loads = 0;
        self.saving_for = None;
        self.scan += 1;
        let overdue = self.overdue();
        let mut lost = Vec::new();
        let mut waits_for_room = false;
        if let Some(index) = overdue {
            waits_for_room = !self.order_loads_of(index, memory, effects, &mut lost, true);
        }
        let mut key = self.waiting.first().copied().filter(|_| !waits_for_room);
        while let Some(now) = key {
            if Some(now.index) != overdue {
                self.order_loads_of(now.index, memory, effects, &mut lost, false);
            }
            key = self.after(&now);
        }
        for (index, message) in lost {
            self.fail(index, FailureReason::AdapterLoad(message), memory, effects);
        }
        if !waits_for_room {
            self.prefetch(memory, effects);
        }
    }

    fn order_loads_of(
        &mut self,
        index: RequestIndex,
        memory: &mut Memory,
        effects: &mut Vec<Effect>,
        lost: &mut Vec<(RequestIndex, String)>,
        overdue: bool,
    ) -> bool {
        let request = &self.requests[index];
        if request.phase == Phase::Preempted {
            return true;
        }
        for version in request.adapters.iter().filter_map(|adapter| adapter.version) {
            memory.shelf.version_mut(version).protected = self.scan;
        }
        let mut shortage = None;
        for adapter in &request.adapters {
            let id = adapter.registration;
            let resident = adapter.version.is_some_and(|version| memory.shelf.version(version).is_resident());
            if resident || memory.is_coming(id) {
                continue;
            }
            if let Err(message) = memory.can_ever_fit(request.adapters.iter().map(|adapter| adapter.registration)) {
                lost.push((index, message));
                return true;
            }
            shortage = shortage.or(memory.order_load(id, Victims::Queued { scan: self.scan }, effects).err());
        }
        let Some(shortage) = shortage else { return true };
        self.blocked_loads += 1;
        self.defer(index);
        if let (Shortage::Blocks(adapter_bytes), true) = (shortage, overdue) {
            self.saving_for = Some(adapter_bytes);
        }
        false
    }

    /// Orders the loads of what is wanted without a request; what nobody holds may go for it.
    fn prefetch(&mut self, memory: &mut Memory, effects: &mut Vec<Effect>) {
        let mut next = memory.shelf.wanted.first().copied();
        while let Some(id) = next {
            if !memory.is_coming(id) {
                if let Err(message) = memory.can_ever_fit(std::iter::once(id)) {
                    memory.shelf.wanted.remove(&id);
                    memory.shelf.set_pinned(id, false);
                    effects.push(Effect::RegistrationFailed { registration: id, message });
                } else if memory.order_load(id, Victims::Idle, effects).is_err() {
                    self.blocked_loads += 1;
                    return;
                }
            }
            next = memory.shelf.wanted.range((Bound::Excluded(id), Bound::Unbounded)).next().copied();
        }
    }

    /// Admits waiting requests into the step, as far as `budget` rows go.
    pub(crate) fn admit(
        &mut self,
        mut budget: usize,
        memory: &mut Memory,
        effects: &mut Vec<Effect>,
        plan: &mut StepPlan,
        flight: &mut Flight,
    ) {
        let overdue = self.overdue();
        let mut key = self.waiting.first().copied();
        while let Some(now) = key {
            if budget == 0 || self.running.len() >= self.config.max_num_seqs {
                return;
            }
            key = self.after(&now);
            match self.look(now, budget, overdue, memory, effects) {
                Look::Admitted { rows } => {
                    budget -= rows;
                    self.put(now.index, rows, memory, plan, flight);
                }
                Look::PassedOver => {}
                Look::NoRoom => return,
            }
        }
    }

    fn look(
        &mut self,
        key: QueueKey,
        budget: usize,
        overdue: Option<RequestIndex>,
        memory: &mut Memory,
        effects: &mut Vec<Effect>,
    ) -> Look {
        let index = key.index;
        let request = &self.requests[index];
        if request.in_flight > 0 || !request.is_ready(&memory.shelf) {
            return Look::PassedOver;
        }
        if request.phase == Phase::Waiting && !request.adapters.is_empty() {
            let closed = overdue.filter(|&overdue| overdue != index).map(|overdue| &self.requests[overdue]);
            let closed =
                closed.is_some_and(|overdue| request.priority >= overdue.priority && !request.adapters_within(overdue));
            if closed || memory.shelf.active_count + self.new_versions(index, memory) > self.adapter_cap {
                self.defer(index);
                return Look::PassedOver;
            }
        }
        match self.take_start(index, budget, memory, effects) {
            0 => Look::NoRoom,
            rows => {
                self.stop_deferring(index);
                self.waiting.remove(&key);
                if key.fresh {
                    for adapter in 0..self.requests[index].adapters.len() {
                        if let Some(version) = self.requests[index].adapters[adapter].version {
                            memory.shelf.activate(version);
                        }
                    }
                }
                self.start(index);
                Look::Admitted { rows }
            }
        }
    }

    /// Distinct versions that the request would add to the active ones.
    fn new_versions(&self, index: RequestIndex, memory: &Memory) -> usize {
        let adapters = &self.requests[index].adapters;
        let versions = || adapters.iter().filter_map(|adapter| adapter.version);
        let new = versions().enumerate().filter(|&(position, version)| {
            memory.shelf.version(version).active == 0 && !versions().take(position).any(|earlier| earlier == version)
        });
        new.count()
    }

    /// Takes the KV blocks that a request starts with, cached ones where there are; returns its rows, 0 if it must wait.
    fn take_start(
        &mut self,
        index: RequestIndex,
        budget: usize,
        memory: &mut Memory,
        effects: &mut Vec<Effect>,
    ) -> usize {
        let block_size = self.config.block_size;
        let alone = self.running.is_empty();
        let request = &mut self.requests[index];
        let length = request.tokens.len();
        // One token at least must be computed: its logits are what the request is there for.
        let mut lookup = 0;
        if self.config.enable_prefix_caching && request.read_prefix_cache {
            lookup = (length - 1) / block_size;
            request.hash_blocks(lookup, block_size, &self.config.base_digest, &memory.shelf);
        }
        for hash in request.hashes.iter().take(lookup) {
            let Some(block) = memory.pool.touch(hash) else { break };
            request.blocks.push(block);
        }
        let cached = request.blocks.len() * block_size;
        let rows = (length - cached).min(budget);
        let whole = self.config.enable_chunked_prefill || rows == length - cached;
        // Beside others a prompt starts only if all of it fits, lest half-done prompts preempt each other.
        let wanted = if alone { cached + rows } else { length };
        let needed = wanted.div_ceil(block_size) - request.blocks.len();
        let allowed = self
            .saving_for
            .is_none_or(|adapter_bytes| memory.pool.held() + needed <= memory.ledger.blocks_beside(adapter_bytes));
        if !whole || !allowed || !memory.free_blocks(needed, effects) {
            let request = &mut self.requests[index];
            while let Some(block) = request.blocks.pop() {
                memory.pool.free(block);
            }
            return 0;
        }
        request.computed = cached;
        request.committed = cached;
        request.named = request.blocks.len();
        request.prefill_end = length - 1;
        if lookup > 0 {
            self.prefix_queries += length as u64;
            self.prefix_hits += cached as u64;
        }
        if request.cached_tokens.is_none() {
            request.cached_tokens = Some(cached as u32);
        }
        self.take_blocks(index, rows, memory)
    }
}
