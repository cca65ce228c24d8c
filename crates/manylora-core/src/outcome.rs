//! What comes back from a step, and every way in which a request ends.

use crate::event::{Effect, FailureReason, FinishReason, SequenceOutcome, StepOutcome};
use crate::memory::Memory;
use crate::request::{Phase, RequestIndex};
use crate::scheduler::{Flight, Flying, Scheduler};

impl Scheduler {
    /// Takes the results of a step. Steps that were planned before it and got no results count as lost: their rows are
    /// computed again. Results of unknown steps and of requests that ended meanwhile are ignored.
    pub(crate) fn commit(&mut self, outcome: &StepOutcome, memory: &mut Memory, effects: &mut Vec<Effect>) {
        if !self.flights.iter().any(|flight| flight.step == outcome.step) {
            return;
        }
        while let Some(flight) = self.flights.pop_front() {
            let lost = StepOutcome::default();
            let done = flight.step == outcome.step;
            self.settle(&flight, if done { outcome } else { &lost }, memory, effects);
            memory.settled = flight.step;
            self.recycle(flight);
            if done {
                break;
            }
        }
        if !memory.shelf.departing.is_empty() {
            memory.depart_all(effects);
        }
    }

    fn settle(&mut self, flight: &Flight, outcome: &StepOutcome, memory: &mut Memory, effects: &mut Vec<Effect>) {
        for (position, flying) in flight.sequences.iter().enumerate() {
            if !self.requests.holds(flying.index, flying.request) {
                continue;
            }
            let belongs = |result: &&SequenceOutcome| result.request == Some(flying.request);
            let result = outcome.sequences.get(position).filter(belongs);
            let result = result.or_else(|| outcome.sequences.iter().find(belongs));
            let tokens = result.map_or(&[][..], |result| {
                let first = result.first_token as usize;
                outcome.tokens.get(first..first.saturating_add(result.tokens as usize)).unwrap_or(&[])
            });
            let stopped = result.is_some_and(|result| result.stopped);
            self.settle_sequence(flying, result.is_some(), tokens, stopped, memory, effects);
        }
    }

    fn settle_sequence(
        &mut self,
        flying: &Flying,
        arrived: bool,
        tokens: &[u32],
        stopped: bool,
        memory: &mut Memory,
        effects: &mut Vec<Effect>,
    ) {
        let request = &mut self.requests[flying.index];
        request.in_flight -= 1;
        if request.void_outcomes > 0 {
            request.void_outcomes -= 1;
            return;
        }
        let tokens = if flying.samples { tokens } else { &[] };
        let room = request.length_limit.saturating_sub(request.tokens.len());
        let taken = &tokens[..tokens.len().min(room)];
        request.tokens.own(request.length_limit).extend_from_slice(taken);
        self.queue.accounts.charge_generated(request.account, taken.len());
        let stopped = stopped && tokens.len() <= room;
        request.placeholders = request.placeholders.saturating_sub(usize::from(flying.samples));
        let current = flying.epoch == request.epoch;
        if current && arrived {
            request.committed += flying.rows;
            request.prompt_done |= request.committed >= request.prompt_length;
        }
        if !arrived || (flying.samples && tokens.len() != 1) {
            // Whatever is planned ahead stands on tokens that did not come.
            request.placeholders = 0;
            request.void_outcomes = request.in_flight;
            // The logits of the last token are wanted (again).
            request.committed = request.committed.min(request.tokens.len() - 1);
            if current {
                request.computed = request.committed;
            }
        }
        let sampled = arrived && flying.samples;
        let full = sampled && request.tokens.len() >= request.length_limit;
        if current && self.config.enable_prefix_caching {
            self.name_blocks(flying.index, memory);
        }
        if stopped && sampled {
            self.finish(flying.index, FinishReason::Stop, memory, effects);
        } else if full {
            self.finish(flying.index, FinishReason::Length, memory, effects);
        }
    }

    /// Offers the blocks that are full and computed to the prefix cache.
    fn name_blocks(&mut self, index: RequestIndex, memory: &mut Memory) {
        let request = &mut self.requests[index];
        let full = request.committed / self.config.block_size;
        if full <= request.named {
            return;
        }
        request.hash_blocks(full, self.config.block_size, &self.config.base_digest, &memory.shelf);
        for (&block, &hash) in request.blocks.iter().zip(&request.hashes).take(full).skip(request.named) {
            memory.pool.cache(block, hash);
        }
        request.named = full;
    }

    /// Ends a request that ran, or was aborted.
    pub(crate) fn finish(
        &mut self,
        index: RequestIndex,
        reason: FinishReason,
        memory: &mut Memory,
        effects: &mut Vec<Effect>,
    ) {
        let request = self.requests[index].id;
        effects.push(Effect::Finished { request, reason });
        self.release(index, memory, effects);
    }

    /// Ends a request that cannot go on.
    pub(crate) fn fail(
        &mut self,
        index: RequestIndex,
        reason: FailureReason,
        memory: &mut Memory,
        effects: &mut Vec<Effect>,
    ) {
        let request = self.requests[index].id;
        effects.push(Effect::RequestFailed { request, reason });
        self.release(index, memory, effects);
    }

    /// Gives back all that a request holds: the one place where that happens (promise P6).
    fn release(&mut self, index: RequestIndex, memory: &mut Memory, effects: &mut Vec<Effect>) {
        let request = &self.requests[index];
        let (account, priority, arrival) = (request.account, request.priority, request.arrival);
        match request.phase {
            Phase::Waiting => self.queue.remove(request.lane, (arrival, index), false),
            Phase::Running => {
                self.running.retain(|&other| other != index);
                self.unreserve(index);
                self.queue.accounts.end(account);
            }
            Phase::Preempted => {
                self.preempted.remove(&(priority, arrival, index));
                self.queue.accounts.end(account);
            }
        }
        let Some(mut request) = self.requests.remove(index) else { return };
        while let Some(block) = request.blocks.pop() {
            memory.pool.free(block);
        }
        for adapter in &request.adapters {
            if let Some(version) = adapter.version {
                if request.phase != Phase::Waiting {
                    memory.shelf.deactivate(version);
                }
                memory.shelf.end_lease(version);
            }
            if let Some(registration) = memory.shelf.registrations.get_mut(&adapter.registration) {
                registration.holders -= 1;
            }
        }
        for adapter in &request.adapters {
            memory.depart(adapter.registration, effects);
        }
    }
}
