//! Who may start: arrival, the cap on distinct adapters, and the bound on waiting for it.
//!
//! Preempted requests come first, then the queue in its order (`queue`). Base requests need no adapter and are always
//! admissible. A request whose adapter is not resident, or would make more distinct adapters than
//! `min(max_loras, max_cpu_loras)`, is passed over; those behind it are not held up. A request that lacks KV blocks or
//! rows stops the scan, so that large ones are not overtaken for ever. Adapters of admitted requests count while they
//! prefill and while they are preempted.
//!
//! # The bound (promise P5)
//!
//! Passing over without end would starve. A lane (requests of one client with the same adapters) is *deferred* from the
//! first step in which a request behind its first one is admitted, or the queue is worked off, while the cap, or lack of
//! room for its adapter, keeps it out. Once that is `max_deferred_steps` steps ago it is *overdue*: admission is closed to
//! every fresh request with adapters of its priority or a lower one, but for its own lane, and its load is the next to get
//! room; if that lacks KV blocks, they are saved for it. What runs drains, at the latest when every sequence that runs now
//! has reached its length, and the lane's first request is next. So it waits, from its turn on, at most
//! `max_deferred_steps` steps, plus the steps that the running sequences need to end (at most `max_model_len` decode
//! steps), plus its own load. If several are overdue they are served one after the other, the longest deferred first.
//! This holds under every policy. Base requests keep being admitted, as do requests of superseded versions (there are
//! finitely many, and only they make room by ending). Admission is not closed while an overdue lane's load is under way.
//! Under [`SchedulingPolicy::Priority`](crate::SchedulingPolicy) higher priorities are never closed: overtaking is their
//! point. Loads that lack room are tried in the queue's order, the first sixteen in each step: a lane's clock can start
//! once fewer than that are ahead of it.

use std::collections::HashSet;
use std::ops::Bound;

use crate::config::SchedulingPolicy;
use crate::event::{Client, Effect, FailureReason, NewRequest};
use crate::fairness::AccountIndex;
use crate::identity::RegistrationId;
use crate::memory::Memory;
use crate::order::Order;
use crate::plan::StepPlan;
use crate::queue::{Class, LaneAdapter, LaneIndex};
use crate::request::{Phase, Request, RequestAdapter, RequestIndex, Tokens};
use crate::scheduler::{Flight, Scheduler};
use crate::shelf::Stale;

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
        self.sync(memory, effects);
        let adapters: Vec<_> = new
            .adapters
            .iter()
            .filter(|adapter| adapter.scale != 0.0)
            .map(|adapter| RequestAdapter {
                registration: adapter.registration,
                scale: adapter.scale,
                first_active: adapter.first_active,
                version: memory.shelf.version_of(adapter.registration),
            })
            .collect();
        for adapter in &adapters {
            if let Some(version) = adapter.version {
                memory.shelf.lease(version);
            }
            if let Some(registration) = memory.shelf.registrations.get_mut(&adapter.registration) {
                registration.holders += 1;
            }
        }
        let priority = if self.config.policy == SchedulingPolicy::Priority { new.priority } else { 0 };
        let client = self.client(new.tenant, adapters.first(), memory);
        let lane_adapters = adapters
            .iter()
            .map(|adapter| LaneAdapter { registration: adapter.registration, version: adapter.version })
            .collect();
        let prompt_length = new.prompt.len();
        let room = self.config.max_model_len.saturating_sub(prompt_length).max(1);
        self.arrivals += 1;
        let id = new.id;
        let index = self.requests.insert(Request {
            id,
            phase: Phase::Waiting,
            tokens: Tokens::of_prompt(new.prompt),
            prompt_length,
            length_limit: prompt_length + new.max_tokens.min(room),
            priority,
            arrival: self.arrivals,
            account: AccountIndex::default(),
            lane: LaneIndex::default(),
            cache_salt: new.cache_salt,
            adapters,
            read_prefix_cache: new.read_prefix_cache && !new.all_prompt_logits,
            all_prompt_logits: new.all_prompt_logits,
            announced: false,
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
        let lane = self.queue.push((self.arrivals, index), priority, client, lane_adapters, &memory.shelf);
        let request = &mut self.requests[index];
        request.lane = lane;
        request.account = self.queue.lane(lane).account;
        match self.queue.lane(lane).class {
            Class::Base | Class::Ready { .. } => {
                request.announced = true;
                effects.push(Effect::LeaseBound(id));
            }
            Class::Coming => {}
            Class::Cold => {
                self.loads_stale = true;
                // Unless others wait for room, the load need not wait for the next step.
                if self.blocked.is_empty() {
                    self.order_loads(memory, effects);
                }
            }
        }
    }

    /// Who is charged for a request.
    fn client(&self, tenant: Option<String>, adapter: Option<&RequestAdapter>, memory: &Memory) -> Option<Client> {
        if self.config.policy != SchedulingPolicy::Fair {
            return None;
        }
        let line = adapter.and_then(|adapter| memory.shelf.registrations.get(&adapter.registration));
        Some(match (tenant, line) {
            (Some(tenant), _) => Client::Tenant(tenant),
            (None, Some(registration)) => Client::Adapter(registration.line),
            (None, None) => Client::Base,
        })
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
        memory.can_ever_fit(&active).map_err(|message| FailureReason::AdapterLoad(message.into()))
    }

    /// Brings the queue up to date with the shelf: takes leases on versions that were read, sorts lanes into the classes
    /// where they belong now, says which requests are bound, and forgets the accounts of lines that ended.
    pub(crate) fn sync(&mut self, memory: &mut Memory, effects: &mut Vec<Effect>) {
        let mut ready: Vec<LaneIndex> = Vec::new();
        while !memory.shelf.stale.is_empty() {
            for stale in std::mem::take(&mut memory.shelf.stale) {
                let lanes: Vec<_> = match stale {
                    Stale::Version(version) => self.queue.lanes_of_version(version).collect(),
                    Stale::Registration(id) => self.bind_lanes(id, memory),
                };
                memory.looks += lanes.len() as u64;
                ready.extend(lanes.into_iter().filter(|&lane| self.queue.refresh(lane, &memory.shelf)));
            }
        }
        for line in memory.shelf.ended_lines.drain(..) {
            self.queue.accounts.forget_line(line);
        }
        if ready.is_empty() {
            return;
        }
        let waiting = ready.iter().flat_map(|&lane| self.queue.lane(lane).requests.iter().copied());
        let mut bound: Vec<_> = waiting.filter(|&(_, index)| !self.requests[index].announced).collect();
        bound.sort_unstable();
        bound.dedup();
        for (_, index) in bound {
            let request = &mut self.requests[index];
            request.announced = true;
            effects.push(Effect::LeaseBound(request.id));
        }
    }

    /// Lanes that name a registration; those that waited for its first read are bound to what was found.
    fn bind_lanes(&mut self, id: RegistrationId, memory: &mut Memory) -> Vec<LaneIndex> {
        let mut lanes: Vec<_> = self.queue.lanes_of_registration(id).collect();
        let Some(version) = memory.shelf.version_of(id) else { return lanes };
        for &lane in &lanes {
            self.queue.bind(lane, id, version);
            for &(_, index) in &self.queue.lane(lane).requests {
                for adapter in self.requests[index].adapters.iter_mut().filter(|one| one.registration == id) {
                    adapter.version = Some(version);
                    memory.shelf.lease(version);
                }
            }
        }
        lanes.extend(self.queue.lanes_of_version(version));
        lanes.sort_unstable();
        lanes.dedup();
        lanes
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
        let has_room =
            |scheduler: &Self, budget: usize| budget > 0 && scheduler.running.len() < scheduler.config.max_num_seqs;
        if !has_room(self, budget) || (self.queue.len() == 0 && self.preempted.is_empty()) {
            return;
        }
        self.sync(memory, effects);
        let mut seen = None;
        let mut end = Order::FIRST;
        loop {
            if !has_room(self, budget) {
                break;
            }
            memory.looks += 1;
            self.queue.settle();
            let free = self.adapter_cap.saturating_sub(memory.shelf.active_count);
            let fresh = self.queue.next(free, self.closing(memory));
            let after = seen.map_or(Bound::Unbounded, Bound::Excluded);
            let preempted = self.preempted.range((after, Bound::Unbounded)).next().copied();
            let preempted = preempted.filter(|&(priority, arrival, _)| {
                fresh.is_none_or(|(order, _)| Order::preempted(priority, arrival) < order)
            });
            let (order, index, lane) = match (preempted, fresh) {
                (Some(key @ (priority, arrival, index)), _) => {
                    seen = Some(key);
                    if self.requests[index].in_flight > 0 {
                        continue;
                    }
                    (Order::preempted(priority, arrival), index, None)
                }
                (None, Some((order, lane))) => {
                    let Some(&(_, index)) = self.queue.lane(lane).requests.first() else { break };
                    (order, index, Some(lane))
                }
                (None, None) => {
                    end = Order::LAST;
                    break;
                }
            };
            end = order;
            let rows = self.take_start(index, (order, budget), memory, effects);
            if rows == 0 {
                break;
            }
            budget -= rows;
            if let Some(lane) = lane {
                self.leave_queue(index, lane, memory);
            } else {
                let request = &self.requests[index];
                self.preempted.remove(&(request.priority, request.arrival, index));
            }
            self.start(index);
            self.put(index, rows, memory, plan, flight);
            self.sync(memory, effects);
        }
        self.defer_passed(end, memory);
    }

    /// A fresh request is admitted: its adapters become active and its client pays for the prompt.
    fn leave_queue(&mut self, index: RequestIndex, lane: LaneIndex, memory: &mut Memory) {
        let request = &self.requests[index];
        self.queue.remove(lane, (request.arrival, index), true);
        self.queue.accounts.charge_prompt(request.account, request.prompt_length);
        for version in request.adapters.iter().filter_map(|adapter| adapter.version) {
            memory.shelf.activate(version);
        }
    }

    /// Starts the clocks of those ahead of `end` that were kept out.
    fn defer_passed(&mut self, end: Order, memory: &Memory) {
        let free = self.adapter_cap.saturating_sub(memory.shelf.active_count);
        let closing = self.closing(memory);
        let step = self.next_step;
        self.queue.defer_passed(end, free, closing, step);
        for position in 0..self.blocked.len() {
            let lane = self.blocked[position];
            if self.queue.is_cold(lane) && self.queue.order_of(lane) < end {
                self.queue.defer(lane, step);
            }
        }
    }

    /// Takes the KV blocks that a request starts with, cached ones where there are; returns its rows, 0 if it must wait.
    /// Adapters of requests further back than `order` may go for it.
    fn take_start(
        &mut self,
        index: RequestIndex,
        (order, budget): (Order, usize),
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
        if !whole || !allowed || !self.free_blocks(needed, order, memory, effects) {
            let request = &mut self.requests[index];
            while let Some(block) = request.blocks.pop() {
                memory.pool.free(block);
            }
            return 0;
        }
        let request = &mut self.requests[index];
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
