//! Continuous batching: which rows of which requests make the next step.
//!
//! A step has a budget of rows (`max_num_batched_tokens`). Sequences that decode come first, then prompts that were begun,
//! then new admissions ([`crate::admission`] says who may be admitted). A prompt larger than the rest of the budget is
//! split, unless chunked prefill is off.
//!
//! When KV blocks run out, first cached content goes, then adapters that nobody holds, then those that only requests in the
//! queue wait for ([`crate::loads`]), then the sequence last in line (admitted last, or of the lowest priority) is preempted: it loses its blocks, keeps its adapters and their version,
//! waits ahead of everyone fresh and computes its tokens again (at nobody's charge). The first in line is never preempted, and one sequence of
//! `max_model_len` always fits beside the adapters, so somebody always advances.
//!
//! The next step can be planned while one is in flight. What the step in flight will bring stands as
//! [`crate::plan::PLACEHOLDER`]; blocks that are freed meanwhile may be handed out again, because steps execute in order.

use std::collections::{BTreeSet, VecDeque};

use crate::config::{CoreConfig, SchedulingPolicy};
use crate::event::Effect;
use crate::memory::Memory;
use crate::order::Order;
use crate::plan::{PLACEHOLDER, PlannedAdapter, PlannedSequence, StepPlan};
use crate::queue::{LaneIndex, Queue};
use crate::request::{Phase, RequestIndex, Requests};

/// Steps that may be planned and not committed: one in flight and one ahead.
const MAX_IN_FLIGHT: usize = 2;

/// One sequence of a step whose results are not in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flying {
    pub(crate) index: RequestIndex,
    pub(crate) request: crate::identity::RequestId,
    pub(crate) rows: usize,
    pub(crate) samples: bool,
    pub(crate) epoch: u32,
}

/// A step whose results are not in.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flight {
    pub(crate) step: u64,
    pub(crate) sequences: Vec<Flying>,
}

/// Queues and steps.
#[derive(Debug)]
pub(crate) struct Scheduler {
    pub(crate) config: CoreConfig,
    pub(crate) requests: Requests,
    /// Admitted requests: in order of admission, or of priority.
    pub(crate) running: Vec<RequestIndex>,
    /// Requests that were never admitted.
    pub(crate) queue: Queue,
    /// Preempted requests: priority and arrival.
    pub(crate) preempted: BTreeSet<(i64, u64, RequestIndex)>,
    pub(crate) flights: VecDeque<Flight>,
    spare_flights: Vec<Flight>,
    /// Number of the step that will be planned next.
    pub(crate) next_step: u64,
    pub(crate) arrivals: u64,
    /// Distinct adapters per step.
    pub(crate) adapter_cap: usize,
    /// Whether something changed that a scan for loads could act on.
    pub(crate) loads_stale: bool,
    /// Lanes whose load could not be ordered at the last scan, the first of them.
    pub(crate) blocked: Vec<LaneIndex>,
    /// Whether a load that nobody waits for could not be ordered at the last scan.
    pub(crate) wanted_blocked: bool,
    /// Whether nobody is kept out for the sake of whoever is overdue.
    pub(crate) suspended: bool,
    /// Adapter bytes that there will be when the load that waited too long has its room: KV blocks are saved for it.
    pub(crate) saving_for: Option<u64>,
    /// Block tables and adapters of all running requests at their longest.
    pub(crate) reserved_blocks: usize,
    pub(crate) reserved_adapters: usize,
    pub(crate) preemptions: u64,
    pub(crate) prefix_queries: u64,
    pub(crate) prefix_hits: u64,
}

impl Scheduler {
    pub(crate) fn new(config: CoreConfig) -> Self {
        let most = |limit: Option<usize>| limit.unwrap_or(usize::MAX);
        let flight = || Flight { step: 0, sequences: Vec::with_capacity(config.max_num_seqs) };
        Self {
            spare_flights: (0..MAX_IN_FLIGHT).map(|_| flight()).collect(),
            adapter_cap: most(config.max_loras).min(most(config.max_cpu_loras)),
            requests: Requests::default(),
            running: Vec::with_capacity(config.max_num_seqs),
            queue: Queue::default(),
            preempted: BTreeSet::new(),
            flights: VecDeque::with_capacity(MAX_IN_FLIGHT),
            next_step: 1,
            arrivals: 0,
            loads_stale: false,
            blocked: Vec::new(),
            wanted_blocked: false,
            suspended: false,
            saving_for: None,
            reserved_blocks: 0,
            reserved_adapters: 0,
            preemptions: 0,
            prefix_queries: 0,
            prefix_hits: 0,
            config,
        }
    }

    /// Fills `plan`; false if nothing can run now.
    pub(crate) fn plan(&mut self, memory: &mut Memory, effects: &mut Vec<Effect>, plan: &mut StepPlan) -> bool {
        plan.clear();
        if self.flights.len() >= MAX_IN_FLIGHT {
            return false;
        }
        self.order_loads(memory, effects);
        let Some(mut flight) = self.spare_flights.pop() else { return false };
        flight.step = self.next_step;
        flight.sequences.clear();
        plan.step = self.next_step;
        self.reserve(plan);

        let mut budget = self.config.max_num_batched_tokens;
        let preemptions = self.preemptions;
        let mut prefilling = false;
        for decoding in [true, false] {
            if !decoding && !prefilling {
                break;
            }
            let mut position = 0;
            while position < self.running.len() && budget > 0 {
                let index = self.running[position];
                let is_decoding = self.requests[index].is_decoding();
                prefilling |= !is_decoding;
                if is_decoding == decoding {
                    let rows = self.rows_with_blocks(position, budget, memory, effects);
                    if rows > 0 {
                        budget -= rows;
                        self.put(index, rows, memory, plan, &mut flight);
                    }
                }
                position += 1;
            }
        }
        if self.preemptions == preemptions {
            self.admit(budget, memory, effects, plan, &mut flight);
        }
        if plan.is_empty() && self.flights.is_empty() && memory.shelf.loading.is_empty() && self.queue.len() > 0 {
            // Nothing runs that could make room: nobody is kept out for the sake of whoever waits for it.
            self.suspended = true;
            self.loads_stale = true;
            self.order_loads(memory, effects);
            self.admit(budget, memory, effects, plan, &mut flight);
            self.suspended = false;
            if plan.is_empty() {
                self.break_circle(memory, effects);
            }
        }
        if plan.is_empty() {
            self.spare_flights.push(flight);
            return false;
        }
        self.next_step += 1;
        self.flights.push_back(flight);
        true
    }

    /// Grows the plan's vectors to what the running requests can need, so that steady steps allocate nothing.
    fn reserve(&self, plan: &mut StepPlan) {
        plan.sequences.reserve(self.config.max_num_seqs);
        plan.tokens.reserve(self.config.max_num_batched_tokens);
        plan.blocks.reserve(self.reserved_blocks);
        plan.adapters.reserve(self.reserved_adapters);
    }

    /// Rows that the running request at `position` can have, after taking the KV blocks for them.
    fn rows_with_blocks(
        &mut self,
        position: usize,
        budget: usize,
        memory: &mut Memory,
        effects: &mut Vec<Effect>,
    ) -> usize {
        let index = self.running[position];
        let request = &self.requests[index];
        let wanted = request.wanted_rows().min(budget);
        if wanted == 0 {
            return 0;
        }
        let block_size = self.config.block_size;
        let (computed, have) = (request.computed, request.blocks.len());
        let needed = (computed + wanted).div_ceil(block_size).saturating_sub(have);
        while !self.free_blocks(needed, Order::FIRST, memory, effects) {
            let room = (have + memory.pool.available()) * block_size - computed;
            if room > 0 || (needed > 1 && self.free_blocks(1, Order::FIRST, memory, effects)) {
                let room = (have + memory.pool.available()) * block_size - computed;
                // Some rows fit: no reason to take anybody's blocks yet.
                return self.take_blocks(index, wanted.min(room), memory);
            }
            let step = self.next_step;
            let later = &self.running[position + 1..];
            let Some(offset) = later.iter().rposition(|&index| self.requests[index].planned_step != step) else {
                return 0;
            };
            self.preempt(position + 1 + offset, memory);
        }
        self.take_blocks(index, wanted, memory)
    }

    /// Takes the blocks for `rows` more positions; there are enough.
    pub(crate) fn take_blocks(&mut self, index: RequestIndex, rows: usize, memory: &mut Memory) -> usize {
        let block_size = self.config.block_size;
        let request = &mut self.requests[index];
        while request.blocks.len() * block_size < request.computed + rows {
            let Some(block) = memory.pool.take() else {
                return (request.blocks.len() * block_size).saturating_sub(request.computed);
            };
            request.blocks.push(block);
        }
        rows
    }

    /// Adds `rows` of a request to the step.
    pub(crate) fn put(
        &mut self,
        index: RequestIndex,
        rows: usize,
        memory: &mut Memory,
        plan: &mut StepPlan,
        flight: &mut Flight,
    ) {
        let step = self.next_step;
        let request = &mut self.requests[index];
        let (first, last) = (request.computed, request.computed + rows);
        let samples = last == request.length();
        let first_token = plan.tokens.len() as u32;
        let known = request.tokens.get(first..last.min(request.tokens.len()));
        plan.tokens.extend_from_slice(known.unwrap_or(&[]));
        plan.tokens.resize(first_token as usize + rows, PLACEHOLDER);
        let (first_block, first_adapter) = (plan.blocks.len() as u32, plan.adapters.len() as u32);
        plan.blocks.extend_from_slice(&request.blocks[..last.div_ceil(self.config.block_size)]);
        for adapter in &request.adapters {
            let Some(version) = adapter.version else { continue };
            let version = memory.shelf.version_mut(version);
            version.last_step = step;
            let Some(slot) = version.slot else { continue };
            let planned = PlannedAdapter { slot, scale: adapter.scale, first_active: adapter.first_active };
            plan.adapters.push(planned);
        }
        plan.sequences.push(PlannedSequence {
            request: request.id,
            first_token,
            rows: rows as u32,
            first_position: first as u32,
            first_block,
            blocks: plan.blocks.len() as u32 - first_block,
            first_adapter,
            adapters: plan.adapters.len() as u32 - first_adapter,
            samples,
            all_logits: request.all_prompt_logits && !request.prompt_done && first < request.prompt_length,
            cached_tokens: request.cached_tokens.unwrap_or(0),
            preemptions: request.epoch,
        });
        flight.sequences.push(Flying { index, request: request.id, rows, samples, epoch: request.epoch });
        request.computed = last;
        request.placeholders += usize::from(samples);
        request.in_flight += 1;
        request.planned_step = step;
    }

    /// Takes the blocks of the running request at `position`; it computes everything again later.
    fn preempt(&mut self, position: usize, memory: &mut Memory) {
        let index = self.running.remove(position);
        let request = &mut self.requests[index];
        while let Some(block) = request.blocks.pop() {
            memory.pool.free(block);
        }
        request.phase = Phase::Preempted;
        request.computed = 0;
        request.committed = 0;
        request.named = 0;
        request.epoch += 1;
        self.preempted.insert((request.priority, request.arrival, index));
        self.unreserve(index);
        self.preemptions += 1;
    }

    /// Puts an admitted request among the running ones.
    pub(crate) fn start(&mut self, index: RequestIndex) {
        let key = |request: &crate::request::Request| (request.priority, request.arrival);
        let at = match self.config.policy {
            SchedulingPolicy::Fair | SchedulingPolicy::Fcfs => self.running.len(),
            SchedulingPolicy::Priority => {
                let new = key(&self.requests[index]);
                self.running.partition_point(|&other| key(&self.requests[other]) <= new)
            }
        };
        self.running.insert(at, index);
        let blocks = self.longest_table(index);
        self.reserved_blocks += blocks;
        self.reserved_adapters += self.requests[index].adapters.len();
        let request = &mut self.requests[index];
        request.phase = Phase::Running;
        // All that it can grow to, so that decoding allocates nothing.
        request.tokens.own(request.length_limit);
        request.blocks.reserve(blocks.saturating_sub(request.blocks.len()));
        request.hashes.reserve(blocks.saturating_sub(request.hashes.len()));
    }

    fn longest_table(&self, index: RequestIndex) -> usize {
        self.requests[index].length_limit.div_ceil(self.config.block_size)
    }

    pub(crate) fn unreserve(&mut self, index: RequestIndex) {
        self.reserved_blocks -= self.longest_table(index);
        self.reserved_adapters -= self.requests[index].adapters.len();
    }

    pub(crate) fn recycle(&mut self, flight: Flight) {
        self.spare_flights.push(flight);
    }

    pub(crate) fn check(&self, memory: &Memory) -> Result<(), String> {
        let mut reserved = (0, 0);
        for (position, &index) in self.running.iter().enumerate() {
            if self.requests[index].phase != Phase::Running || self.running[..position].contains(&index) {
                return Err(format!("request {:?} runs twice or not at all", self.requests[index].id));
            }
            reserved = (reserved.0 + self.longest_table(index), reserved.1 + self.requests[index].adapters.len());
        }
        if reserved != (self.reserved_blocks, self.reserved_adapters) {
            return Err("the reserve for plans is miscounted".to_owned());
        }
        self.queue.check(&memory.shelf)?;
        for (index, request) in self.requests.iter() {
            let queued = request.phase == Phase::Waiting
                && self.queue.lane(request.lane).requests.contains(&(request.arrival, index));
            let preempted = self.preempted.contains(&(request.priority, request.arrival, index));
            let waits = request.phase != Phase::Running;
            if (queued, preempted) != (request.phase == Phase::Waiting, request.phase == Phase::Preempted)
                || (waits && !request.blocks.is_empty())
            {
                return Err(format!("request {:?} is {:?} and queued otherwise", request.id, request.phase));
            }
            let flying = self.flights.iter().flat_map(|flight| &flight.sequences);
            if flying.filter(|flying| flying.request == request.id).count() != request.in_flight {
                return Err(format!("request {:?} miscounts its steps in flight", request.id));
            }
            if request.in_flight == 0 && (request.placeholders > 0 || request.computed != request.committed) {
                return Err(format!("request {:?} expects tokens of no step", request.id));
            }
            if request.blocks.len() * self.config.block_size < request.computed || request.computed > request.length() {
                return Err(format!("request {:?} computed more than it has", request.id));
            }
        }
        if self.running.len() + self.queue.len() + self.preempted.len() != self.requests.len() {
            return Err("a queue holds what is not there".to_owned());
        }
        for (account, one) in self.queue.accounts.iter() {
            let own = || self.requests.iter().filter(|(_, request)| request.account == account);
            let waiting = own().filter(|(_, request)| request.phase == Phase::Waiting).count();
            if (waiting, own().count() - waiting) != (one.waiting, one.admitted) {
                return Err(format!("client {account:?} miscounts its requests"));
            }
        }
        for (version, entry) in memory.shelf.versions() {
            let holders = |admitted: bool| {
                let all = self.requests.iter().filter(|(_, one)| !admitted || one.phase != Phase::Waiting);
                all.flat_map(|(_, one)| &one.adapters).filter(|adapter| adapter.version == Some(version)).count()
            };
            if (holders(false), holders(true)) != (entry.leases, entry.active) {
                return Err(format!("version `{}` miscounts its leases", entry.digest));
            }
        }
        for (&id, registration) in &memory.shelf.registrations {
            let adapters = self.requests.iter().flat_map(|(_, request)| &request.adapters);
            if adapters.filter(|adapter| adapter.registration == id).count() != registration.holders {
                return Err(format!("registration {id:?} miscounts its holders"));
            }
        }
        if memory.shelf.active_count > self.adapter_cap {
            return Err(format!("`{}` adapters are admitted", memory.shelf.active_count));
        }
        Ok(())
    }
}
