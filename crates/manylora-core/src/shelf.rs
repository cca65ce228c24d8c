//! The adapter shelf: registrations, the versions they stand for, who holds them and where they are resident.
//!
//! A *registration* is what a name points to; a *version* is content, named by its digest. Registrations of equal
//! content share a version. A version is unknown until its first read, then resident (it has a slot) or evicted; what is
//! evicted is read again when somebody asks, and must then have the same digest.
//!
//! A live request holds one lease per adapter on its version, from the moment the version is known until the request
//! ends, on every path. While the request is admitted (running or preempted) the version is also *active*.
//!
//! # What is never evicted
//!
//! What is active, pinned, part of a step in flight, or *anchored*. A version is anchored while any of its registrations
//! is one of these (several registrations of one content: one is enough):
//! - *given from memory*: nobody can read it again. It takes its bytes, and its place under `max_cpu_loras`, until it is
//!   unloaded, exactly as if it were pinned; but it is no pin, so that it does not count against the places that pins must
//!   leave, and no room is kept beside it for the largest adapter. Once the same content is registered from disk as well,
//!   it becomes evictable when the registration from memory is unloaded.
//! - *superseded*: another registration serves in its place ([`crate::Event::Replace`]), so that its path may hold other
//!   content by now. It takes its bytes, but no place under `max_cpu_loras`, until it is unloaded.
//!
//! What waiting requests hold goes last. This module keeps the books; bytes are moved in [`crate::memory`].
//!
//! # Lines
//!
//! Registrations that replaced one another form a *line*, named by its first; its *head* serves. Clients of a fair service
//! are lines, so that a new version of an adapter goes on with the old one's account.

mod check;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};

use crate::eviction::{EvictionPolicy, EvictionPolicyKind, FREQUENCY_HALF_LIFE, Usage};
use crate::identity::{AdapterSlot, Digest, RegistrationId};
use crate::order::Ordered;

/// Place of a version on the shelf.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct VersionIndex(u32);

/// Content that was read at least once and that a registration stands for.
#[derive(Debug)]
pub(crate) struct Version {
    pub(crate) digest: Digest,
    pub(crate) bytes: u64,
    /// Its place in the backend's table while it is resident.
    pub(crate) slot: Option<AdapterSlot>,
    /// Whether a load of a known version is under way.
    pub(crate) loading: bool,
    pub(crate) registrations: usize,
    /// Those that were not superseded.
    pub(crate) live: usize,
    /// Those that are given from memory or superseded.
    pub(crate) anchors: usize,
    /// Those that are given from memory and serve.
    given: usize,
    /// Those that are pinned.
    pub(crate) pins: usize,
    /// Adapters of live requests that are bound to it.
    pub(crate) leases: usize,
    /// Those of admitted requests.
    pub(crate) active: usize,
    /// Last step that was planned with it.
    pub(crate) last_step: u64,
    rank: Ordered,
    /// Whether it is listed under its rank among those that nobody holds.
    listed: bool,
    last_used: u64,
    frequency: f64,
    load_seconds: Option<f64>,
}

impl Version {
    pub(crate) fn is_resident(&self) -> bool {
        self.slot.is_some()
    }

    /// Whether it stays whatever comes.
    pub(crate) fn is_fixed(&self) -> bool {
        self.pins > 0 || self.given > 0
    }

    /// Whether it stays only until a superseded registration is unloaded.
    pub(crate) fn is_outgoing(&self) -> bool {
        self.anchors > self.given
    }

    /// Whether it may go at the cost of requests that wait for it.
    fn may_go(&self) -> bool {
        self.active == 0 && self.pins == 0 && self.anchors == 0
    }
}

/// What a name points to.
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each named where it is set")]
#[derive(Debug)]
pub(crate) struct Registration {
    /// What its header implies; exact after the first read.
    pub(crate) bytes: u64,
    pub(crate) version: Option<VersionIndex>,
    /// What is set aside for the load under way: bytes, and places among the resident.
    pub(crate) loading: Option<(u64, usize)>,
    pub(crate) pinned: bool,
    pub(crate) unloading: bool,
    pub(crate) superseded: bool,
    pub(crate) rereadable: bool,
    /// The first of its line.
    pub(crate) line: RegistrationId,
    /// Live requests that name it, counted once per adapter entry.
    pub(crate) holders: usize,
}

/// Registrations that replaced one another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    pub(crate) members: usize,
    /// The one that serves.
    pub(crate) head: RegistrationId,
}

/// Something that decides whether waiting requests are ready has changed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stale {
    Version(VersionIndex),
    Registration(RegistrationId),
}

/// The shelf.
#[derive(Debug)]
pub(crate) struct Shelf {
    pub(crate) registrations: BTreeMap<RegistrationId, Registration>,
    pub(crate) lines: BTreeMap<RegistrationId, Line>,
    /// Highest generation given out per index.
    generations: BTreeMap<u32, u32>,
    vacant_indices: BTreeSet<u32>,
    versions: Vec<Option<Version>>,
    vacant_versions: Vec<u32>,
    by_digest: HashMap<Digest, VersionIndex>,
    /// The backend's table.
    table: Vec<Option<VersionIndex>>,
    vacant_slots: BinaryHeap<Reverse<u32>>,
    /// Resident versions that nobody holds, by rank.
    idle: BTreeSet<(Ordered, VersionIndex)>,
    policy: Box<dyn EvictionPolicy>,
    /// Unloaded, but a load or a step in flight still uses them.
    pub(crate) departing: BTreeSet<RegistrationId>,
    /// Sizes of the registrations that are not pinned, with how many there are of each.
    sizes: BTreeMap<u64, usize>,
    /// What the queue must look at again.
    pub(crate) stale: Vec<Stale>,
    /// Lines that have no registration any more.
    pub(crate) ended_lines: Vec<RegistrationId>,
    pub(crate) resident_bytes: u64,
    /// Resident versions that take a place under `max_cpu_loras`: those that a name serves.
    pub(crate) places: usize,
    pub(crate) loading_bytes: u64,
    pub(crate) loading_places: usize,
    /// Registrations that are being read: few at a time.
    pub(crate) loading: Vec<RegistrationId>,
    /// Distinct versions of admitted requests.
    pub(crate) active_count: usize,
    /// Distinct contents that are pinned; and that are pinned or given from memory, with their bytes.
    pub(crate) pinned_count: usize,
    pub(crate) fixed_count: usize,
    pub(crate) fixed_bytes: u64,
    clock: u64,
    /// Bytes and seconds of all measured loads.
    measured: (f64, f64),
}

impl Shelf {
    pub(crate) fn new(policy: EvictionPolicyKind) -> Self {
        Self {
            registrations: BTreeMap::new(),
            lines: BTreeMap::new(),
            generations: BTreeMap::new(),
            vacant_indices: BTreeSet::new(),
            versions: Vec::new(),
            vacant_versions: Vec::new(),
            by_digest: HashMap::new(),
            table: Vec::new(),
            vacant_slots: BinaryHeap::new(),
            idle: BTreeSet::new(),
            policy: policy.build(),
            departing: BTreeSet::new(),
            sizes: BTreeMap::new(),
            stale: Vec::new(),
            ended_lines: Vec::new(),
            resident_bytes: 0,
            places: 0,
            loading_bytes: 0,
            loading_places: 0,
            loading: Vec::new(),
            active_count: 0,
            pinned_count: 0,
            fixed_count: 0,
            fixed_bytes: 0,
            clock: 0,
            measured: (0.0, 0.0),
        }
    }

    /// Another policy from now on; what is resident is ranked anew, as if used in the order of slots.
    pub(crate) fn set_policy(&mut self, policy: Box<dyn EvictionPolicy>) {
        self.policy = policy;
        for index in self.table.clone().into_iter().flatten() {
            self.touch(index);
        }
    }

    /// An id that no live registration has. It stays reserved.
    pub(crate) fn next_id(&mut self) -> RegistrationId {
        let index = self
            .vacant_indices
            .pop_first()
            .unwrap_or_else(|| self.generations.last_key_value().map_or(0, |(&index, _)| index.saturating_add(1)));
        let generation = self.generations.get(&index).map_or(0, |generation| generation.wrapping_add(1));
        self.generations.insert(index, generation);
        RegistrationId { index, generation }
    }

    pub(crate) fn register(&mut self, id: RegistrationId, bytes: u64, rereadable: bool) -> Result<(), String> {
        let newest = self.generations.get(&id.index).copied();
        let same_index = RegistrationId { generation: 0, ..id }..=RegistrationId { generation: u32::MAX, ..id };
        if self.registrations.range(same_index).next().is_some() || newest.is_some_and(|newest| newest > id.generation)
        {
            return Err(format!(
                "registration `{}.{}` cannot be made: its index is in use; ask for a new id",
                id.index, id.generation
            ));
        }
        self.generations.insert(id.index, id.generation);
        self.vacant_indices.remove(&id.index);
        let registration = Registration {
            bytes,
            version: None,
            loading: None,
            pinned: false,
            unloading: false,
            superseded: false,
            rereadable,
            line: id,
            holders: 0,
        };
        self.registrations.insert(id, registration);
        self.lines.insert(id, Line { members: 1, head: id });
        *self.sizes.entry(bytes).or_default() += 1;
        Ok(())
    }

    pub(crate) fn version(&self, index: VersionIndex) -> &Version {
        self.versions[index.0 as usize].as_ref().expect("an index is dropped with its version")
    }

    pub(crate) fn version_mut(&mut self, index: VersionIndex) -> &mut Version {
        self.versions[index.0 as usize].as_mut().expect("an index is dropped with its version")
    }

    pub(crate) fn versions(&self) -> impl Iterator<Item = (VersionIndex, &Version)> {
        let numbered = self.versions.iter().enumerate();
        numbered.filter_map(|(index, version)| Some((VersionIndex(index as u32), version.as_ref()?)))
    }

    pub(crate) fn with_digest(&self, digest: Digest) -> Option<VersionIndex> {
        self.by_digest.get(&digest).copied()
    }

    /// Resident versions by slot.
    pub(crate) fn residents(&self) -> impl Iterator<Item = (VersionIndex, &Version)> {
        self.table.iter().flatten().map(|&index| (index, self.version(index)))
    }

    /// Version behind a registration, if it is known.
    pub(crate) fn version_of(&self, id: RegistrationId) -> Option<VersionIndex> {
        self.registrations.get(&id)?.version
    }

    pub(crate) fn is_resident(&self, id: RegistrationId) -> bool {
        self.version_of(id).is_some_and(|version| self.version(version).is_resident())
    }

    /// Bytes that a registration takes when it is resident.
    pub(crate) fn bytes_of(&self, id: RegistrationId) -> u64 {
        self.registrations.get(&id).map_or(0, |registration| registration.bytes)
    }

    /// Makes `digest` the version of a registration that had none.
    pub(crate) fn bind(&mut self, id: RegistrationId, digest: Digest, bytes: u64) -> Option<VersionIndex> {
        let index = self.with_digest(digest).unwrap_or_else(|| self.add_version(digest, bytes));
        let pinned = self.registrations.get(&id)?.pinned;
        // Its pin moves from the registration alone to the content.
        self.set_pinned(id, false);
        self.forget_size(id);
        let registration = self.registrations.get_mut(&id)?;
        registration.version = Some(index);
        registration.bytes = bytes;
        let (superseded, rereadable) = (registration.superseded, registration.rereadable);
        self.note_size(id);
        self.stale.push(Stale::Registration(id));
        self.change(index, |version| {
            version.registrations += 1;
            version.live += usize::from(!superseded);
            version.given += usize::from(!rereadable && !superseded);
            version.anchors += usize::from(superseded || !rereadable);
        });
        self.set_pinned(id, pinned);
        Some(index)
    }

    fn add_version(&mut self, digest: Digest, bytes: u64) -> VersionIndex {
        let version = Version {
            digest,
            bytes,
            slot: None,
            loading: false,
            registrations: 0,
            live: 0,
            anchors: 0,
            given: 0,
            pins: 0,
            leases: 0,
            active: 0,
            last_step: 0,
            rank: Ordered(0.0),
            listed: false,
            last_used: 0,
            frequency: 0.0,
            load_seconds: None,
        };
        let index = self.vacant_versions.pop().unwrap_or_else(|| {
            self.versions.push(None);
            (self.versions.len() - 1) as u32
        });
        self.versions[index as usize] = Some(version);
        self.by_digest.insert(digest, VersionIndex(index));
        VersionIndex(index)
    }

    /// Changes a version and all sums that depend on it.
    fn change(&mut self, index: VersionIndex, change: impl FnOnce(&mut Version)) {
        let version = self.version_mut(index);
        let facts = |version: &Version| {
            (
                version.is_resident() && version.live > 0,
                version.pins > 0,
                version.is_fixed(),
                version.active > 0,
                version.is_resident(),
            )
        };
        let before = facts(version);
        change(version);
        let after = facts(version);
        let bytes = version.bytes;
        let count = |sum: &mut usize, before: bool, after: bool| {
            *sum = *sum + usize::from(after) - usize::from(before);
        };
        count(&mut self.places, before.0, after.0);
        count(&mut self.pinned_count, before.1, after.1);
        count(&mut self.fixed_count, before.2, after.2);
        count(&mut self.active_count, before.3, after.3);
        if before.2 != after.2 {
            self.fixed_bytes = if after.2 { self.fixed_bytes.saturating_add(bytes) } else { self.fixed_bytes - bytes };
        }
        if (before.3, before.4) != (after.3, after.4) {
            self.stale.push(Stale::Version(index));
        }
        self.list(index);
    }

    /// Lists a version among those that nobody holds, or takes it off the list.
    fn list(&mut self, index: VersionIndex) {
        let version = self.version_mut(index);
        let idle = version.is_resident() && version.leases == 0 && version.may_go();
        if idle == version.listed {
            return;
        }
        version.listed = idle;
        let key = (version.rank, index);
        if idle {
            self.idle.insert(key);
        } else {
            self.idle.remove(&key);
        }
    }

    /// Gives a version the lowest vacant slot and counts its bytes.
    pub(crate) fn place(&mut self, index: VersionIndex, load_seconds: Option<f64>) -> AdapterSlot {
        let slot = self.vacant_slots.pop().map_or_else(
            || {
                self.table.push(None);
                (self.table.len() - 1) as u32
            },
            |Reverse(slot)| slot,
        );
        self.table[slot as usize] = Some(index);
        let bytes = self.version(index).bytes;
        self.resident_bytes += bytes;
        if let Some(seconds) = load_seconds.filter(|seconds| seconds.is_finite() && *seconds > 0.0) {
            self.version_mut(index).load_seconds = Some(seconds);
            self.measured.0 += bytes as f64;
            self.measured.1 += seconds;
        }
        self.change(index, |version| version.slot = Some(AdapterSlot(slot)));
        self.touch(index);
        AdapterSlot(slot)
    }

    /// Takes a version out of the table.
    pub(crate) fn displace(&mut self, index: VersionIndex) -> Option<AdapterSlot> {
        let slot = self.version(index).slot?;
        let (bytes, rank) = (self.version(index).bytes, self.version(index).rank);
        self.table[slot.0 as usize] = None;
        self.vacant_slots.push(Reverse(slot.0));
        self.resident_bytes -= bytes;
        self.change(index, |version| version.slot = None);
        self.policy.evicted(rank.0);
        Some(slot)
    }

    /// Marks a version as used now.
    pub(crate) fn touch(&mut self, index: VersionIndex) {
        self.clock += 1;
        let (now, (bytes, seconds)) = (self.clock, self.measured);
        let version = self.version_mut(index);
        let halvings = ((now - version.last_used) / FREQUENCY_HALF_LIFE).min(64);
        version.frequency *= 0.5f64.powi(halvings as i32);
        version.last_used = now;
        let relative_cost = match version.load_seconds {
            Some(mine) => (mine / (version.bytes.max(1) as f64)) / (seconds / bytes.max(1.0)),
            None => 1.0,
        };
        let usage = Usage { bytes: version.bytes, now, frequency: version.frequency, relative_cost };
        let listed = std::mem::take(&mut version.listed);
        let old = (version.rank, index);
        if listed {
            self.idle.remove(&old);
        }
        let rank = self.policy.rank(&usage);
        self.version_mut(index).rank = Ordered(rank);
        self.list(index);
    }

    /// A request is bound to a version.
    pub(crate) fn lease(&mut self, index: VersionIndex) {
        self.change(index, |version| version.leases += 1);
    }

    /// It ended.
    pub(crate) fn end_lease(&mut self, index: VersionIndex) {
        self.change(index, |version| version.leases -= 1);
    }

    /// An admitted request starts to use a version.
    pub(crate) fn activate(&mut self, index: VersionIndex) {
        self.change(index, |version| version.active += 1);
        self.touch(index);
        self.version_mut(index).frequency += 1.0;
    }

    /// An admitted request ends.
    pub(crate) fn deactivate(&mut self, index: VersionIndex) {
        self.change(index, |version| version.active -= 1);
        self.touch(index);
    }

    /// Resident versions that nobody holds, those to evict first before others; `settled` is the last step whose results
    /// are in.
    pub(crate) fn idle(&self, settled: u64) -> impl Iterator<Item = VersionIndex> + '_ {
        self.idle.iter().map(|&(_, index)| index).filter(move |&index| self.version(index).last_step <= settled)
    }

    /// Resident versions that only waiting requests hold, in no order that means anything.
    pub(crate) fn queued(&self, settled: u64) -> impl Iterator<Item = VersionIndex> + '_ {
        self.residents()
            .filter(move |(_, version)| version.may_go() && version.leases > 0 && version.last_step <= settled)
            .map(|(index, _)| index)
    }

    /// The version in a slot.
    fn in_slot(&self, slot: AdapterSlot) -> Option<VersionIndex> {
        self.table.get(slot.0 as usize).copied().flatten()
    }

    pub(crate) fn set_pinned(&mut self, id: RegistrationId, pinned: bool) {
        let Some(registration) = self.registrations.get(&id) else { return };
        if registration.pinned == pinned {
            return;
        }
        let (version, bytes) = (registration.version, registration.bytes);
        if pinned {
            self.forget_size(id);
        }
        if let Some(registration) = self.registrations.get_mut(&id) {
            registration.pinned = pinned;
        }
        if !pinned {
            self.note_size(id);
        }
        match version {
            Some(index) if pinned => self.change(index, |version| version.pins += 1),
            Some(index) => self.change(index, |version| version.pins -= 1),
            None if pinned => {
                self.pinned_count += 1;
                self.fixed_count += 1;
                self.fixed_bytes = self.fixed_bytes.saturating_add(bytes);
            }
            None => {
                self.pinned_count -= 1;
                self.fixed_count -= 1;
                self.fixed_bytes -= bytes;
            }
        }
    }

    /// Counts the size of a registration, unless it is pinned.
    fn note_size(&mut self, id: RegistrationId) {
        if let Some(registration) = self.registrations.get(&id).filter(|registration| !registration.pinned) {
            *self.sizes.entry(registration.bytes).or_default() += 1;
        }
    }

    fn forget_size(&mut self, id: RegistrationId) {
        let Some(registration) = self.registrations.get(&id).filter(|registration| !registration.pinned) else {
            return;
        };
        if let Some(count) = self.sizes.get_mut(&registration.bytes) {
            *count -= 1;
            if *count == 0 {
                self.sizes.remove(&registration.bytes);
            }
        }
    }

    /// Bytes of the largest registration that is not pinned, other than `id`.
    pub(crate) fn largest_other(&self, id: RegistrationId) -> u64 {
        let own = self.registrations.get(&id).filter(|registration| !registration.pinned);
        let own = own.map(|registration| registration.bytes);
        let mut sizes = self.sizes.iter().rev();
        let others = sizes.find(|&(&bytes, &count)| own != Some(bytes) || count > 1);
        others.map_or(0, |(&bytes, _)| bytes)
    }

    fn is_fixed(&self, id: RegistrationId) -> bool {
        self.registrations.get(&id).is_some_and(|registration| match registration.version {
            Some(version) => self.version(version).is_fixed(),
            None => registration.pinned,
        })
    }

    /// Whether its content is pinned, by this registration or another.
    pub(crate) fn has_pin(&self, id: RegistrationId) -> bool {
        self.registrations.get(&id).is_some_and(|registration| match registration.version {
            Some(version) => self.version(version).pins > 0,
            None => registration.pinned,
        })
    }

    /// Number and bytes of the distinct contents among `chosen` and those that stay whatever comes.
    pub(crate) fn with_fixed(&self, chosen: &(impl Iterator<Item = RegistrationId> + Clone)) -> (usize, u64) {
        let same = |a: RegistrationId, b: RegistrationId| {
            a == b || (self.version_of(a).is_some() && self.version_of(a) == self.version_of(b))
        };
        let (mut count, mut bytes) = (self.fixed_count, self.fixed_bytes);
        for (position, id) in chosen.clone().enumerate() {
            if !self.is_fixed(id) && !chosen.clone().take(position).any(|earlier| same(earlier, id)) {
                count += usize::from(self.takes_place(id));
                bytes = bytes.saturating_add(self.bytes_of(id));
            }
        }
        (count, bytes)
    }

    /// Whether a registration takes a place under `max_cpu_loras` when it is resident.
    pub(crate) fn takes_place(&self, id: RegistrationId) -> bool {
        let Some(registration) = self.registrations.get(&id) else { return false };
        !registration.superseded || registration.version.is_some_and(|version| self.version(version).live > 0)
    }

    /// Makes `new` a member of `old`'s line; false if it is not alone in its own.
    pub(crate) fn join_line(&mut self, new: RegistrationId, old: RegistrationId) -> bool {
        let lines = [new, old].map(|id| self.registrations.get(&id).map(|registration| registration.line));
        let [Some(own), Some(line)] = lines else { return false };
        if own == line || self.lines.get(&own).is_none_or(|own| own.members != 1) {
            return false;
        }
        self.lines.remove(&own);
        self.ended_lines.push(own);
        if let Some(line) = self.lines.get_mut(&line) {
            line.members += 1;
        }
        if let Some(registration) = self.registrations.get_mut(&new) {
            registration.line = line;
        }
        true
    }

    /// Lets `new` serve in the place of its line's head, with its pin; returns that.
    pub(crate) fn supersede(&mut self, new: RegistrationId) -> Option<RegistrationId> {
        let line = self.registrations.get(&new)?.line;
        let old = std::mem::replace(&mut self.lines.get_mut(&line)?.head, new);
        if self.registrations.get(&old)?.pinned {
            self.set_pinned(new, true);
            self.set_pinned(old, false);
        }
        self.retire(old);
        Some(old)
    }

    /// From now on no name leads to a registration: it is superseded.
    pub(crate) fn retire(&mut self, id: RegistrationId) {
        let Some(registration) = self.registrations.get_mut(&id) else { return };
        if std::mem::replace(&mut registration.superseded, true) {
            return;
        }
        let (version, rereadable) = (registration.version, registration.rereadable);
        if let Some(index) = version {
            self.change(index, |version| {
                version.live -= 1;
                version.given -= usize::from(!rereadable);
                version.anchors += usize::from(rereadable);
            });
            self.stale.push(Stale::Version(index));
        }
        self.stale.push(Stale::Registration(id));
    }

    /// Takes a registration that nobody uses off the shelf, and its version if it was the last.
    pub(crate) fn remove(&mut self, id: RegistrationId) {
        self.set_pinned(id, false);
        self.forget_size(id);
        self.departing.remove(&id);
        let Some(registration) = self.registrations.remove(&id) else { return };
        self.vacant_indices.insert(id.index);
        if let Some(line) = self.lines.get_mut(&registration.line) {
            line.members -= 1;
            if line.members == 0 {
                self.lines.remove(&registration.line);
                self.ended_lines.push(registration.line);
            }
        }
        let Some(index) = registration.version else { return };
        self.change(index, |version| {
            version.registrations -= 1;
            version.live -= usize::from(!registration.superseded);
            version.given -= usize::from(!registration.rereadable && !registration.superseded);
            version.anchors -= usize::from(registration.superseded || !registration.rereadable);
        });
        let version = self.version(index);
        if version.registrations == 0 {
            let digest = version.digest;
            self.by_digest.remove(&digest);
            self.versions[index.0 as usize] = None;
            self.vacant_versions.push(index.0);
        }
    }
}
