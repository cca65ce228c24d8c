//! What is read when: loads that waiting requests need, in the order in which the requests may start, then those that were
//! asked for ahead of any request.
//!
//! A load is ordered as soon as there is room for it and the loader has a hand free (`max_loading`). It may evict what nobody holds; then what only requests further back
//! in the queue wait for, the last of them first. Reading ahead must not slow down what runs: a load leaves one KV block
//! for every running sequence, and once as many adapters wait for their requests as requests can run together, it leaves
//! all that the running ones can come to need. Should they need more than is left, what was read ahead goes again, for
//! the requests furthest back first ([`Scheduler::free_blocks`]), before anybody is preempted. Never evicted for a load are versions that the overdue lane needs
//! ([`crate::admission`]), and what [`crate::shelf`] says must stay.
//!
//! Should nothing run at all while somebody overdue waits for room, nobody is kept out for its sake in that step, so that
//! nothing waits in a circle; requests that hold superseded versions and want the room of one another's fail, one by one.
//!
//! A load that lacks room is tried again in every step, but only the first [`MOST_BLOCKED`] of them, so that the cost of a
//! step does not grow with what waits. A pin, a replacement, or content from memory waits like a request: once it has
//! waited for `max_deferred_steps` steps it is next, at the cost of whatever is not in use. A prefetch does not wait: if
//! there is no room now, it is over ([`Effect::OnDemand`]).

use crate::event::{Effect, FailureReason, LoadFailure};
use crate::identity::RegistrationId;
use crate::memory::{Memory, Shortage, Victims};
use crate::order::Order;
use crate::queue::{Class, Closing, LaneIndex, Queue};
use crate::scheduler::Scheduler;

/// Lanes without room for their load that are looked at in one step.
const MOST_BLOCKED: usize = 16;

/// Who has waited too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overdue {
    Lane(LaneIndex),
    Wanted(RegistrationId),
}

/// Why a lane's loads were not ordered.
enum Lack {
    /// They can never fit.
    Ever(String),
    Now(Shortage),
}

impl Scheduler {
    /// Who has waited longest, beyond the bound.
    fn overdue(&self, memory: &Memory) -> Option<Overdue> {
        if self.suspended {
            return None;
        }
        let latest = self.next_step.checked_sub(self.config.max_deferred_steps)?;
        let lane = self.queue.overdue(latest);
        let wanted = memory.wanted.iter().filter_map(|(&id, want)| Some((want.since?, id)));
        let wanted = wanted.filter(|&(since, _)| since <= latest).min();
        match (lane, wanted) {
            (Some((since, _)), Some((earlier, id))) if earlier < since => Some(Overdue::Wanted(id)),
            (Some((_, lane)), _) => Some(Overdue::Lane(lane)),
            (None, Some((_, id))) => Some(Overdue::Wanted(id)),
            (None, None) => None,
        }
    }

    /// Who is kept out for the sake of whoever is overdue.
    pub(crate) fn closing(&self, memory: &Memory) -> Option<Closing> {
        match self.overdue(memory)? {
            Overdue::Lane(lane) => {
                let entry = self.queue.lane(lane);
                (entry.class != Class::Coming).then_some(Closing { priority: entry.priority, lane: Some(lane) })
            }
            Overdue::Wanted(id) => (!memory.is_coming(id)).then_some(Closing { priority: i64::MIN, lane: None }),
        }
    }

    /// Orders loads as far as there is room. Requests whose adapters can never fit (any more) fail.
    pub(crate) fn order_loads(&mut self, memory: &mut Memory, effects: &mut Vec<Effect>) {
        self.sync(memory, effects);
        let retry = self.loads_stale || !self.blocked.is_empty() || self.wanted_blocked;
        let mut blocked = std::mem::take(&mut self.blocked);
        blocked.clear();
        self.loads_stale = false;
        self.wanted_blocked = false;
        self.saving_for = None;
        if !retry || (!self.queue.has(Class::Cold) && memory.wanted.is_empty()) {
            self.blocked = blocked;
            return;
        }
        let mut lost = Vec::new();
        let overdue = self.overdue(memory);
        let waits = overdue.and_then(|overdue| self.order_overdue(overdue, memory, effects, &mut lost));
        if let Some(shortage) = waits {
            if let Overdue::Lane(lane) = overdue.unwrap_or(Overdue::Lane(LaneIndex::default())) {
                blocked.push(lane);
            }
            if let Shortage::Blocks(adapter_bytes) = shortage {
                self.saving_for = Some(adapter_bytes);
            }
        } else {
            self.order_in_turn(overdue, memory, effects, &mut lost, &mut blocked);
        }
        self.order_wanted(waits.is_some() || !blocked.is_empty(), memory, effects);
        self.blocked = blocked;
        for (lane, message) in lost {
            let requests: Vec<_> = self.queue.lane(lane).requests.iter().map(|&(_, index)| index).collect();
            for index in requests {
                self.fail(index, FailureReason::AdapterLoad(message.clone().into()), memory, effects);
            }
        }
        self.sync(memory, effects);
    }

    /// Orders the load of whoever is overdue; what it lacks, if it must wait on.
    fn order_overdue(
        &self,
        overdue: Overdue,
        memory: &mut Memory,
        effects: &mut Vec<Effect>,
        lost: &mut Vec<(LaneIndex, String)>,
    ) -> Option<Shortage> {
        let victims = |keep| Victims::Queued { queue: &self.queue, behind: Order::FIRST, keep };
        match overdue {
            Overdue::Lane(lane) if self.queue.is_cold(lane) => {
                match order_lane(lane, &self.queue, (victims(Some(lane)), 0), memory, effects) {
                    Ok(()) => None,
                    Err(Lack::Now(shortage)) => Some(shortage),
                    Err(Lack::Ever(message)) => {
                        lost.push((lane, message));
                        None
                    }
                }
            }
            // Whether it can ever fit is asked in `order_wanted`.
            Overdue::Wanted(id) if !memory.is_coming(id) && memory.check_wanted(id).is_ok() => {
                memory.order_load(id, (victims(None), 0), effects).err()
            }
            _ => None,
        }
    }

    fn order_in_turn(
        &self,
        overdue: Option<Overdue>,
        memory: &mut Memory,
        effects: &mut Vec<Effect>,
        lost: &mut Vec<(LaneIndex, String)>,
        blocked: &mut Vec<LaneIndex>,
    ) {
        let keep = match overdue {
            Some(Overdue::Lane(lane)) => Some(lane),
            _ => None,
        };
        // Whoever comes later may evict less, so what was too large stays too large.
        let mut too_large = u64::MAX;
        let waiting = memory.shelf.queued(memory.settled).count();
        let for_nobody = memory.wanted.keys().filter(|id| memory.is_loading(**id)).count();
        let most = self.config.max_loading.map_or(usize::MAX, |most| most.saturating_add(for_nobody));
        for (order, lane) in self.queue.lanes_in(Class::Cold) {
            if Some(lane) == keep {
                continue;
            }
            if memory.shelf.loading.len() >= most {
                return;
            }
            memory.looks += 1;
            let missing = self.queue.lane(lane).adapters.iter().map(|adapter| adapter.registration);
            let missing = missing.filter(|&id| !memory.is_coming(id));
            let least = missing.map(|id| memory.shelf.bytes_of(id)).min().unwrap_or(0);
            let victims = Victims::Queued { queue: &self.queue, behind: order, keep };
            let lack = if least >= too_large {
                Lack::Now(Shortage::Bytes)
            } else {
                let ahead = waiting + memory.shelf.loading.len();
                match order_lane(lane, &self.queue, (victims, self.kept_blocks(ahead, memory)), memory, effects) {
                    Ok(()) => continue,
                    Err(lack) => lack,
                }
            };
            match lack {
                Lack::Ever(message) => lost.push((lane, message)),
                Lack::Now(shortage) => {
                    too_large = if shortage == Shortage::Places { 0 } else { too_large.min(least) };
                    blocked.push(lane);
                    if blocked.len() >= MOST_BLOCKED {
                        return;
                    }
                }
            }
        }
    }

    /// Orders the loads of what is wanted without a request, unless requests wait for room.
    fn order_wanted(&mut self, must_wait: bool, memory: &mut Memory, effects: &mut Vec<Effect>) {
        let ids: Vec<_> = memory.wanted.keys().copied().collect();
        let kept = self.kept_blocks(0, memory);
        for id in ids {
            if memory.is_coming(id) {
                continue;
            }
            if let Err(message) = memory.check_wanted(id) {
                memory.fail_wanted(id, message, effects);
            } else if must_wait || memory.order_load(id, (Victims::Idle, kept), effects).is_err() {
                self.wanted_blocked = true;
                if let Some(want) = memory.wanted.get_mut(&id) {
                    want.since.get_or_insert(self.next_step);
                }
            }
        }
    }

    /// KV blocks that a load must leave, held ones included, when so many adapters wait or are read for waiting requests.
    fn kept_blocks(&self, ahead: usize, memory: &Memory) -> usize {
        let least = memory.pool.held() + self.running.len();
        if ahead < self.config.max_num_seqs { least } else { least.max(self.reserved_blocks) }
    }

    /// Makes at least `blocks` KV blocks available by evicting adapters that nobody holds, then those that only requests
    /// further back than `behind` wait for, the last of them first, but for what an overdue lane needs. Evicts nothing if
    /// that would not be enough.
    pub(crate) fn free_blocks(
        &self,
        blocks: usize,
        behind: Order,
        memory: &mut Memory,
        effects: &mut Vec<Effect>,
    ) -> bool {
        if memory.pool.available() >= blocks {
            return true;
        }
        let keep = match self.overdue(memory) {
            Some(Overdue::Lane(lane)) => Some(lane),
            _ => None,
        };
        memory.free_blocks(blocks, Victims::Queued { queue: &self.queue, behind, keep }, effects)
    }

    /// Nothing could be planned. If that can never change, because those that wait hold superseded versions and want the
    /// room of one another's, the first of them fails.
    pub(crate) fn break_circle(&mut self, memory: &mut Memory, effects: &mut Vec<Effect>) {
        if !self.queue.has(Class::Cold) {
            return;
        }
        let waits = !self.flights.is_empty() || !self.preempted.is_empty() || !memory.shelf.loading.is_empty();
        let startable = self.queue.next(usize::MAX, None).is_some();
        let outgoing = || memory.shelf.residents().filter(|(_, version)| version.is_outgoing());
        // A superseded version that nobody holds is about to be unloaded.
        if waits || startable || outgoing().any(|(_, version)| version.leases == 0) {
            return;
        }
        let holds = |lane: LaneIndex| outgoing().any(|(index, _)| self.queue.needs(lane, index));
        let Some((_, lane)) = self.queue.lanes_in(Class::Cold).find(|&(_, lane)| holds(lane)) else { return };
        let message = format!(
            "there is no room for its adapters beside `{}` bytes of replaced versions that waiting requests hold; raise \
             kv_cache_memory_bytes or lora_memory_bytes",
            outgoing().map(|(_, version)| version.bytes).sum::<u64>()
        );
        let Some(&(_, index)) = self.queue.lane(lane).requests.first() else { return };
        self.fail(index, FailureReason::AdapterLoad(LoadFailure::temporary(message)), memory, effects);
        self.loads_stale = true;
    }
}

/// Orders what a lane lacks.
fn order_lane(
    lane: LaneIndex,
    queue: &Queue,
    (victims, keep_blocks): (Victims<'_>, usize),
    memory: &mut Memory,
    effects: &mut Vec<Effect>,
) -> Result<(), Lack> {
    let ids = || queue.lane(lane).adapters.iter().map(|adapter| adapter.registration);
    memory.can_ever_fit(&ids()).map_err(Lack::Ever)?;
    let mut lack = Ok(());
    for id in ids() {
        if !memory.is_coming(id) {
            lack = lack.and(memory.order_load(id, (victims, keep_blocks), effects).map_err(Lack::Now));
        }
    }
    lack
}
