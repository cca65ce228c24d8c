//! Moves bytes of the one ledger between adapters and KV blocks.
//!
//! Adapters take their exact bytes, resident or being loaded; KV blocks get what is left, in whole blocks. Adapters never
//! take the room of one sequence of `max_model_len`: that way the sequence first in line can always run to its end, and
//! nothing can wait in a circle.

use std::collections::BTreeMap;

use crate::block_pool::BlockPool;
use crate::budget::Ledger;
use crate::config::{CoreConfig, LoraMemory};
use crate::event::{Effect, LoadFailure, LoadedAdapter};
use crate::identity::RegistrationId;
use crate::order::Order;
use crate::queue::{LaneIndex, Queue};
use crate::replacement::Replacement;
use crate::shelf::{Shelf, Stale, Version, VersionIndex};

/// Why there is no room for a load just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// Adapters that cannot go take all places.
    Places,
    /// They take the bytes.
    Bytes,
    /// Running sequences hold the KV blocks; these bytes must become free.
    Blocks(u64),
}

/// What may be evicted for a load, or for KV blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Victims<'a> {
    /// What nobody holds.
    Idle,
    /// Then also what requests wait for.
    Queued {
        queue: &'a Queue,
        /// If they stand further back than this.
        behind: Order,
        /// And are not of this lane.
        keep: Option<LaneIndex>,
    },
}

/// What a finished load came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoadEnd {
    /// Nobody ordered it.
    Unknown,
    /// Nobody wants it any more.
    Departed,
    Failed(LoadFailure),
    /// The version is resident.
    Resident,
}

/// Why something is wanted resident without a request, and since when it waits.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Want {
    /// Step since which there is no room.
    pub(crate) since: Option<u64>,
    /// Whether somebody is to be told.
    pub(crate) announce: bool,
}

/// KV blocks, shelf and the ledger between them.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) pool: BlockPool,
    pub(crate) shelf: Shelf,
    pub(crate) ledger: Ledger,
    /// Bytes that adapters can take at most.
    pub(crate) adapter_room: u64,
    pub(crate) max_resident: Option<usize>,
    /// What somebody wants resident without a request.
    pub(crate) wanted: BTreeMap<RegistrationId, Want>,
    /// Replacements under way, in the order of their events.
    pub(crate) replacements: Vec<Replacement>,
    /// Last step whose results are in.
    pub(crate) settled: u64,
    pub(crate) evictions: u64,
    pub(crate) loads: u64,
    /// How much was looked at, to show what the cost of a step depends on.
    pub(crate) looks: u64,
    max_model_len: usize,
    victims: Vec<VersionIndex>,
    queued_victims: Vec<(Order, VersionIndex)>,
}

impl Memory {
    pub(crate) fn new(config: &CoreConfig, ledger: Ledger) -> Self {
        let room = ledger.adapter_room(config.max_model_len);
        Self {
            pool: BlockPool::new(ledger.blocks_beside(0)),
            shelf: Shelf::new(config.eviction),
            ledger,
            adapter_room: match config.lora_memory {
                LoraMemory::Elastic => room,
                LoraMemory::Bytes(bytes) => room.min(bytes),
            },
            max_resident: config.max_cpu_loras,
            wanted: BTreeMap::new(),
            replacements: Vec::new(),
            settled: 0,
            evictions: 0,
            loads: 0,
            looks: 0,
            max_model_len: config.max_model_len,
            victims: Vec::new(),
            queued_victims: Vec::new(),
        }
    }

    pub(crate) fn adapter_bytes(&self) -> u64 {
        self.shelf.resident_bytes + self.shelf.loading_bytes
    }

    /// Whether these registrations fit together, beside those that stay whatever comes (pinned, given from memory), once
    /// nothing else is resident.
    pub(crate) fn can_ever_fit(&self, ids: &(impl Iterator<Item = RegistrationId> + Clone)) -> Result<(), String> {
        if ids.clone().all(|id| self.shelf.is_resident(id)) {
            return Ok(());
        }
        let (count, bytes) = self.shelf.with_fixed(ids);
        self.fits(bytes)?;
        self.has_places(count)
    }

    /// Whether so many adapters can ever be resident.
    pub(crate) fn has_places(&self, count: usize) -> Result<(), String> {
        match self.max_resident {
            Some(most) if count > most => Err(format!(
                "it makes `{count}` resident adapters, those included that are pinned or given from memory, and \
                 max_cpu_loras is `{most}`; raise it or unpin"
            )),
            _ => Ok(()),
        }
    }

    /// Whether adapters can ever take so many bytes.
    pub(crate) fn fits(&self, bytes: u64) -> Result<(), String> {
        if bytes <= self.adapter_room {
            return Ok(());
        }
        Err(format!(
            "it takes `{bytes}` bytes, with what must stay beside it (pinned adapters, those given from memory), and \
             adapters can have `{}` (of `{}`, one sequence of max_model_len `{}` keeps `{}`); raise \
             kv_cache_memory_bytes or lora_memory_bytes, lower max_model_len, or unpin",
            self.adapter_room,
            self.ledger.bytes,
            self.max_model_len,
            self.ledger.sequence_bytes(self.max_model_len),
        ))
    }

    /// Makes room for one more adapter, evicting as little as the order of victims allows; evicts nothing if that would not
    /// be enough. At least `keep_blocks` KV blocks stay, held or free.
    fn make_room(
        &mut self,
        id: RegistrationId,
        (bytes, places): (u64, usize),
        (victims, keep_blocks): (Victims<'_>, usize),
        effects: &mut Vec<Effect>,
    ) -> Result<(), Shortage> {
        let spared = self.spared_for(id);
        let room = |memory: &Self, freed, evicted| memory.room_after((bytes, places), freed, evicted, keep_blocks);
        self.evict_until(victims, spared, effects, room)
    }

    /// Evicts victims in their order until there is `room` with so many bytes freed and adapters evicted; none, if that
    /// would not be enough.
    fn evict_until(
        &mut self,
        victims: Victims<'_>,
        spared: Option<VersionIndex>,
        effects: &mut Vec<Effect>,
        room: impl Fn(&Self, u64, usize) -> Result<(), Shortage>,
    ) -> Result<(), Shortage> {
        let (mut chosen, mut queued) = (std::mem::take(&mut self.victims), std::mem::take(&mut self.queued_victims));
        chosen.clear();
        queued.clear();
        let (mut freed, mut result) = (0, room(self, 0, 0));
        let mut choose = |index| {
            chosen.push(index);
            freed += self.shelf.version(index).bytes;
            room(self, freed, chosen.len())
        };
        let may_go = |index: VersionIndex| Some(index) != spared && !self.is_awaited(index);
        for index in self.shelf.idle(self.settled).filter(|&index| may_go(index)) {
            if result.is_ok() {
                break;
            }
            result = choose(index);
        }
        if let (Err(_), Victims::Queued { queue, behind, keep }) = (result, victims) {
            let needed = |index| keep.is_some_and(|lane| queue.needs(lane, index));
            let others = self.shelf.queued(self.settled).filter(|&index| may_go(index) && !needed(index));
            let ordered = others.filter_map(|index| Some((queue.order_of_version(index)?, index)));
            queued.extend(ordered.filter(|&(order, _)| order > behind));
            queued.sort_unstable();
            for &(_, index) in queued.iter().rev() {
                if result.is_ok() {
                    break;
                }
                result = choose(index);
            }
        }
        self.looks += (queued.len() + chosen.len()) as u64;
        if result.is_ok() {
            self.evict_chosen(&chosen, effects);
        }
        (self.victims, self.queued_victims) = (chosen, queued);
        result
    }

    fn room_after(
        &self,
        (bytes, places): (u64, usize),
        freed: u64,
        evicted: usize,
        keep_blocks: usize,
    ) -> Result<(), Shortage> {
        let total = (self.adapter_bytes() - freed).saturating_add(bytes);
        let taken = self.shelf.places + self.shelf.loading_places + places - evicted;
        if places > 0 && self.max_resident.is_some_and(|most| taken > most) {
            Err(Shortage::Places)
        } else if total > self.adapter_room {
            Err(Shortage::Bytes)
        } else if self.ledger.blocks_beside(total) < keep_blocks.max(self.pool.held()) {
            Err(Shortage::Blocks(total))
        } else {
            Ok(())
        }
    }

    fn evict_chosen(&mut self, chosen: &[VersionIndex], effects: &mut Vec<Effect>) {
        for &index in chosen {
            self.evict(index, effects);
        }
        self.evictions += chosen.len() as u64;
    }

    /// Takes a resident version out of the table; its bytes become KV blocks.
    fn evict(&mut self, index: VersionIndex, effects: &mut Vec<Effect>) -> bool {
        let digest = self.shelf.version(index).digest;
        let Some(slot) = self.shelf.displace(index) else { return false };
        effects.push(Effect::Evict { slot, digest });
        self.balance();
        true
    }

    /// Gives the pool exactly the blocks that the adapters leave.
    fn balance(&mut self) {
        let wanted = self.ledger.blocks_beside(self.adapter_bytes());
        let now = self.pool.capacity();
        let done = if wanted < now { self.pool.shrink(now - wanted) } else { self.pool.grow(wanted - now) };
        debug_assert!(done, "room was made before bytes were taken");
    }

    /// Makes at least `blocks` blocks available by evicting adapters; evicts nothing if that would not be enough.
    pub(crate) fn free_blocks(&mut self, blocks: usize, victims: Victims<'_>, effects: &mut Vec<Effect>) -> bool {
        if self.pool.available() >= blocks {
            return true;
        }
        let (needed, bytes) = (self.pool.held() + blocks, self.adapter_bytes());
        let room = |memory: &Self, freed, _| {
            let enough = memory.ledger.blocks_beside(bytes - freed) >= needed;
            if enough { Ok(()) } else { Err(Shortage::Blocks(bytes)) }
        };
        self.evict_until(victims, None, effects, room).is_ok()
    }

    /// Orders the load of a registration that is neither resident nor loading, setting its bytes and its place aside. At
    /// least `keep_blocks` KV blocks stay, held or free.
    pub(crate) fn order_load(
        &mut self,
        id: RegistrationId,
        (victims, keep_blocks): (Victims<'_>, usize),
        effects: &mut Vec<Effect>,
    ) -> Result<(), Shortage> {
        let bytes = self.shelf.bytes_of(id);
        let places = self.places_for(id, self.shelf.version_of(id));
        self.make_room(id, (bytes, places), (victims, keep_blocks), effects)?;
        // The version whose place it was to take over may have been a victim.
        let places = self.places_for(id, self.shelf.version_of(id));
        let Some(registration) = self.shelf.registrations.get_mut(&id) else { return Ok(()) };
        registration.loading = Some((bytes, places));
        let version = registration.version;
        self.shelf.loading_bytes += bytes;
        self.shelf.loading_places += places;
        self.shelf.loading.push(id);
        self.mark_loading(id, version, true);
        let expected = version.map(|version| self.shelf.version(version).digest);
        self.loads += 1;
        effects.push(Effect::Load { registration: id, expected });
        self.balance();
        Ok(())
    }

    /// A load of a registration begins or ends.
    fn mark_loading(&mut self, id: RegistrationId, version: Option<VersionIndex>, loading: bool) {
        self.shelf.stale.push(Stale::Registration(id));
        if let Some(version) = version {
            self.shelf.version_mut(version).loading = loading;
            self.shelf.stale.push(Stale::Version(version));
        }
    }

    /// Whether a registration is being read.
    pub(crate) fn is_loading(&self, id: RegistrationId) -> bool {
        self.shelf.registrations.get(&id).is_some_and(|registration| registration.loading.is_some())
    }

    /// Whether the content of a registration is resident or on its way.
    pub(crate) fn is_coming(&self, id: RegistrationId) -> bool {
        let Some(registration) = self.shelf.registrations.get(&id) else { return false };
        let version = registration.version.map(|version| self.shelf.version(version));
        registration.loading.is_some() || version.is_some_and(|version| version.loading || version.is_resident())
    }

    /// Takes what a load brought.
    pub(crate) fn finish_load(
        &mut self,
        id: RegistrationId,
        result: Result<LoadedAdapter, LoadFailure>,
        queue: &Queue,
        effects: &mut Vec<Effect>,
    ) -> LoadEnd {
        let Some(registration) = self.shelf.registrations.get_mut(&id) else { return LoadEnd::Unknown };
        let Some((bytes, places)) = registration.loading.take() else { return LoadEnd::Unknown };
        let (known, departed) = (registration.version, registration.unloading && registration.holders == 0);
        self.shelf.loading_bytes -= bytes;
        self.shelf.loading_places -= places;
        self.shelf.loading.retain(|&other| other != id);
        self.mark_loading(id, known, false);
        let end = if departed {
            LoadEnd::Departed
        } else {
            match result.and_then(|loaded| Ok(self.take_load(id, known, &loaded, queue, effects)?)) {
                Ok(()) => LoadEnd::Resident,
                Err(failure) => LoadEnd::Failed(failure),
            }
        };
        self.balance();
        end
    }

    fn take_load(
        &mut self,
        id: RegistrationId,
        known: Option<VersionIndex>,
        loaded: &LoadedAdapter,
        queue: &Queue,
        effects: &mut Vec<Effect>,
    ) -> Result<(), String> {
        if let Some(version) = known {
            let expected = self.shelf.version(version).digest;
            if expected != loaded.digest {
                return Err(format!(
                    "its content changed: version `{expected}` was registered and `{}` was read; register it anew",
                    loaded.digest
                ));
            }
        }
        let index = self.shelf.with_digest(loaded.digest);
        let found = index.map(|version| self.shelf.version(version));
        let resident = found.is_some_and(Version::is_resident);
        // A superseded version that a name serves again takes a place again.
        let revived = resident && found.is_some_and(|version| version.live == 0);
        if let Some(found) = found.filter(|version| version.bytes != loaded.bytes) {
            return Err(format!(
                "version `{}` took `{}` bytes when it was read first and takes `{}` now; the loader is inconsistent",
                found.digest, found.bytes, loaded.bytes
            ));
        }
        // Nothing is protected from a load whose content is larger than announced but what is in use.
        let victims = Victims::Queued { queue, behind: Order::FIRST, keep: None };
        let more = (if resident { 0 } else { loaded.bytes }, self.places_for(id, index));
        if (!resident || revived) && self.make_room(id, more, (victims, 0), effects).is_err() {
            return Err(format!(
                "its content takes `{}` bytes, its header implied `{}`, and there is no room for it now",
                loaded.bytes,
                self.shelf.bytes_of(id)
            ));
        }
        let bound = known.or_else(|| self.shelf.bind(id, loaded.digest, loaded.bytes));
        if let (Some(version), false) = (bound, resident) {
            let slot = self.shelf.place(version, loaded.load_seconds);
            effects.push(Effect::Install { slot, digest: loaded.digest });
        }
        Ok(())
    }

    /// Takes an unloaded registration off the shelf as soon as nothing uses it.
    pub(crate) fn depart(&mut self, id: RegistrationId, effects: &mut Vec<Effect>) {
        let Some(registration) = self.shelf.registrations.get(&id) else { return };
        if !registration.unloading || registration.holders > 0 {
            return;
        }
        let (loading, version) = (registration.loading.is_some(), registration.version);
        let last = version.filter(|&version| self.shelf.version(version).registrations == 1);
        let in_flight = last.is_some_and(|version| self.shelf.version(version).last_step > self.settled);
        if loading || in_flight {
            self.shelf.departing.insert(id);
            return;
        }
        if let Some(version) = last {
            self.evict(version, effects);
        }
        self.wanted.remove(&id);
        self.shelf.remove(id);
        effects.push(Effect::Unloaded(id));
    }

    /// Finishes the departures that waited for steps in flight.
    pub(crate) fn depart_all(&mut self, effects: &mut Vec<Effect>) {
        let mut next = self.shelf.departing.first().copied();
        while let Some(id) = next {
            self.shelf.departing.remove(&id);
            self.depart(id, effects);
            let after = (std::ops::Bound::Excluded(id), std::ops::Bound::Unbounded);
            next = self.shelf.departing.range(after).next().copied();
        }
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        self.shelf.check()?;
        if self.pool.capacity() != self.ledger.blocks_beside(self.adapter_bytes()) {
            return Err(format!(
                "`{}` blocks beside `{}` bytes of adapters",
                self.pool.capacity(),
                self.adapter_bytes()
            ));
        }
        if self.adapter_bytes() > self.adapter_room {
            return Err(format!("adapters take `{}` bytes of `{}`", self.adapter_bytes(), self.adapter_room));
        }
        let places = self.shelf.places + self.shelf.loading_places;
        if self.max_resident.is_some_and(|most| places > most) {
            return Err(format!("`{places}` adapters are resident or loading"));
        }
        Ok(())
    }
}
