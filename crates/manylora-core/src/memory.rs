//! Moves bytes of the one ledger between adapters and KV blocks.
//!
//! Adapters take their exact bytes, resident or being loaded; KV blocks get what is left, in whole blocks. Adapters never
//! take the room of one sequence of `max_model_len`: that way the sequence first in line can always run to its end, and
//! nothing can wait in a circle.

use crate::block_pool::BlockPool;
use crate::budget::Ledger;
use crate::config::{CoreConfig, LoraMemory};
use crate::event::{Effect, LoadedAdapter};
use crate::eviction::{EvictionPolicy, LeastRecentlyUsed};
use crate::identity::{AdapterSlot, RegistrationId};
use crate::shelf::{Shelf, VersionIndex, Victims};

/// Why there is no room for a load just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// Adapters that cannot go take the bytes or the places.
    Adapters,
    /// Running sequences hold the KV blocks; these bytes must become free.
    Blocks(u64),
}

/// What a finished load came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoadEnd {
    /// Nobody ordered it.
    Unknown,
    /// Nobody wants it any more.
    Departed,
    Failed(String),
    /// The version is resident.
    Resident,
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
    pub(crate) policy: Box<dyn EvictionPolicy>,
    /// Last step whose results are in.
    pub(crate) settled: u64,
    pub(crate) evictions: u64,
    pub(crate) loads: u64,
    max_model_len: usize,
    victims: Vec<AdapterSlot>,
}

impl Memory {
    pub(crate) fn new(config: &CoreConfig, ledger: Ledger) -> Self {
        let room = ledger.adapter_room(config.max_model_len);
        Self {
            pool: BlockPool::new(ledger.blocks_beside(0)),
            shelf: Shelf::default(),
            ledger,
            adapter_room: match config.lora_memory {
                LoraMemory::Elastic => room,
                LoraMemory::Bytes(bytes) => room.min(bytes),
            },
            max_resident: config.max_cpu_loras,
            policy: Box::new(LeastRecentlyUsed),
            settled: 0,
            evictions: 0,
            loads: 0,
            max_model_len: config.max_model_len,
            victims: Vec::new(),
        }
    }

    fn adapter_bytes(&self) -> u64 {
        self.shelf.resident_bytes + self.shelf.loading_bytes
    }

    /// Whether these registrations fit together, beside those that are pinned, once nothing else is resident.
    pub(crate) fn can_ever_fit(&self, ids: impl Iterator<Item = RegistrationId> + Clone) -> Result<(), String> {
        let (count, bytes) = self.shelf.with_pinned(ids);
        if bytes > self.adapter_room {
            return Err(format!(
                "it takes `{bytes}` bytes, pinned adapters included, and adapters can have `{}` (of `{}`, one sequence of \
                 max_model_len `{}` keeps `{}`); raise kv_cache_memory_bytes or lora_memory_bytes, lower max_model_len, \
                 or unpin",
                self.adapter_room,
                self.ledger.bytes,
                self.max_model_len,
                self.ledger.sequence_bytes(self.max_model_len),
            ));
        }
        match self.max_resident {
            Some(most) if count > most => Err(format!(
                "it makes `{count}` resident adapters, pinned ones included, and max_cpu_loras is `{most}`; raise it or unpin"
            )),
            _ => Ok(()),
        }
    }

    /// Makes room for one more adapter of `bytes`, evicting as little as the policy's order allows; evicts nothing if that
    /// would not be enough.
    fn make_room(&mut self, bytes: u64, victims: Victims, effects: &mut Vec<Effect>) -> Result<(), Shortage> {
        let mut chosen = std::mem::take(&mut self.victims);
        chosen.clear();
        let result = loop {
            let freed: u64 = chosen.iter().map(|&slot| self.bytes_in(slot)).sum();
            let Err(shortage) = self.room_after(bytes, freed, chosen.len()) else { break Ok(()) };
            let mut candidates = self
                .shelf
                .candidates(Victims::Idle, self.settled)
                .filter(|candidate| !chosen.contains(&candidate.slot));
            let mut next = self.policy.choose(&mut candidates);
            if next.is_none() && victims != Victims::Idle {
                let mut candidates =
                    self.shelf.candidates(victims, self.settled).filter(|candidate| !chosen.contains(&candidate.slot));
                next = self.policy.choose(&mut candidates);
            }
            match next {
                Some(slot) => chosen.push(slot),
                None => break Err(shortage),
            }
        };
        if result.is_ok() {
            for &slot in &chosen {
                self.evict_slot(slot, effects);
            }
            self.evictions += chosen.len() as u64;
        }
        self.victims = chosen;
        result
    }

    fn room_after(&self, bytes: u64, freed: u64, evicted: usize) -> Result<(), Shortage> {
        let total = (self.adapter_bytes() - freed).saturating_add(bytes);
        let places = self.shelf.resident_count + self.shelf.loading_count + 1 - evicted;
        if total > self.adapter_room || self.max_resident.is_some_and(|most| places > most) {
            Err(Shortage::Adapters)
        } else if self.ledger.blocks_beside(total) < self.pool.held() {
            Err(Shortage::Blocks(total))
        } else {
            Ok(())
        }
    }

    fn bytes_in(&self, slot: AdapterSlot) -> u64 {
        self.shelf.in_slot(slot).map_or(0, |version| self.shelf.version(version).bytes)
    }

    fn evict_slot(&mut self, slot: AdapterSlot, effects: &mut Vec<Effect>) -> bool {
        self.shelf.in_slot(slot).is_some_and(|version| self.evict(version, effects))
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

    /// Makes at least `blocks` blocks available by evicting adapters that nobody holds.
    pub(crate) fn free_blocks(&mut self, blocks: usize, effects: &mut Vec<Effect>) -> bool {
        while self.pool.available() < blocks {
            let chosen = self.policy.choose(&mut self.shelf.candidates(Victims::Idle, self.settled));
            let Some(slot) = chosen else { return false };
            self.evict_slot(slot, effects);
            self.evictions += 1;
        }
        true
    }

    /// Orders the load of a registration that is neither resident nor loading, setting its bytes aside.
    pub(crate) fn order_load(
        &mut self,
        id: RegistrationId,
        victims: Victims,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Shortage> {
        let bytes = self.shelf.bytes_of(id);
        self.make_room(bytes, victims, effects)?;
        let Some(registration) = self.shelf.registrations.get_mut(&id) else { return Ok(()) };
        registration.loading = Some(bytes);
        let version = registration.version;
        self.shelf.loading_bytes += bytes;
        self.shelf.loading_count += 1;
        let expected = version.map(|version| {
            let version = self.shelf.version_mut(version);
            version.loading = true;
            version.digest
        });
        self.loads += 1;
        effects.push(Effect::Load { registration: id, expected });
        self.balance();
        Ok(())
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
        result: Result<LoadedAdapter, String>,
        scan: u64,
        effects: &mut Vec<Effect>,
    ) -> LoadEnd {
        let Some(registration) = self.shelf.registrations.get_mut(&id) else { return LoadEnd::Unknown };
        let Some(reserved) = registration.loading.take() else { return LoadEnd::Unknown };
        let (known, departed) = (registration.version, registration.unloading && registration.holders == 0);
        self.shelf.loading_bytes -= reserved;
        self.shelf.loading_count -= 1;
        if let Some(version) = known {
            self.shelf.version_mut(version).loading = false;
        }
        let end = if departed { LoadEnd::Departed } else { self.take_load(id, known, result, scan, effects) };
        self.balance();
        end
    }

    fn take_load(
        &mut self,
        id: RegistrationId,
        known: Option<VersionIndex>,
        result: Result<LoadedAdapter, String>,
        scan: u64,
        effects: &mut Vec<Effect>,
    ) -> LoadEnd {
        let loaded = match result {
            Ok(loaded) => loaded,
            Err(message) => return LoadEnd::Failed(message),
        };
        if let Some(version) = known {
            let expected = self.shelf.version(version).digest;
            if expected != loaded.digest {
                return LoadEnd::Failed(format!(
                    "its content changed: version `{expected}` was registered and `{}` was read; register it anew",
                    loaded.digest
                ));
            }
        }
        let resident =
            self.shelf.versions().any(|(_, version)| version.digest == loaded.digest && version.is_resident());
        if !resident && self.make_room(loaded.bytes, Victims::Queued { scan }, effects).is_err() {
            return LoadEnd::Failed(format!(
                "its content takes `{}` bytes, its header implied `{}`, and there is no room for the difference",
                loaded.bytes,
                self.shelf.bytes_of(id)
            ));
        }
        let bound = known.or_else(|| self.shelf.bind(id, loaded.digest, loaded.bytes));
        if let (Some(version), false) = (bound, resident) {
            let slot = self.shelf.place(version, loaded.bytes);
            effects.push(Effect::Install { slot, digest: loaded.digest });
        }
        LoadEnd::Resident
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
        let places = self.shelf.resident_count + self.shelf.loading_count;
        if self.max_resident.is_some_and(|most| places > most) {
            return Err(format!("`{places}` adapters are resident or loading"));
        }
        Ok(())
    }
}
