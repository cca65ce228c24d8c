//! The adapter shelf: registrations, the versions they stand for, who holds them and where they are resident.
//!
//! A *registration* is what a name points to; a *version* is content, named by its digest. Registrations of equal
//! content share a version. A version is unknown until its first read, then resident (it has a slot) or evicted; what is
//! evicted is read again when somebody asks, and must then have the same digest.
//!
//! A live request holds one lease per adapter on its version, from the moment the version is known until the request
//! ends, on every path. While the request is admitted (running or preempted) the version is also *active*. Evicted is
//! only what is neither active, pinned nor part of a step in flight; what waiting requests hold goes last.
//!
//! This module keeps the books. Bytes are moved between adapters and KV blocks in [`crate::memory`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};

use crate::eviction::Candidate;
use crate::identity::{AdapterSlot, Digest, RegistrationId};

/// Place of a version on the shelf.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// Adapters of live requests that are bound to it.
    pub(crate) leases: usize,
    /// Those of admitted requests.
    pub(crate) active: usize,
    /// Pinned registrations.
    pub(crate) pins: usize,
    pub(crate) last_used: u64,
    pub(crate) uses: u64,
    /// Last step that was planned with it.
    pub(crate) last_step: u64,
    /// Scan of the queue that found it needed by a request further ahead.
    pub(crate) protected: u64,
}

impl Version {
    pub(crate) fn is_resident(&self) -> bool {
        self.slot.is_some()
    }
}

/// What a name points to.
#[derive(Debug)]
pub(crate) struct Registration {
    /// What its header implies; exact after the first read.
    pub(crate) bytes: u64,
    pub(crate) version: Option<VersionIndex>,
    /// Bytes set aside for the load under way.
    pub(crate) loading: Option<u64>,
    pub(crate) pinned: bool,
    pub(crate) unloading: bool,
    /// Live requests that name it, counted once per adapter entry.
    pub(crate) holders: usize,
}

/// Which versions may be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Victims {
    /// Those that no request holds.
    Idle,
    /// Also those that only requests further back in the queue hold: all that the scan did not mark.
    Queued {
        /// Number of the scan.
        scan: u64,
    },
}

/// The shelf.
#[derive(Debug, Default)]
pub(crate) struct Shelf {
    pub(crate) registrations: BTreeMap<RegistrationId, Registration>,
    /// Highest generation given out per index.
    generations: BTreeMap<u32, u32>,
    vacant_indices: BTreeSet<u32>,
    versions: Vec<Option<Version>>,
    vacant_versions: Vec<u32>,
    by_digest: HashMap<Digest, VersionIndex>,
    /// The backend's table.
    table: Vec<Option<VersionIndex>>,
    vacant_slots: BinaryHeap<Reverse<u32>>,
    /// Registrations that somebody wants resident without a request.
    pub(crate) wanted: BTreeSet<RegistrationId>,
    pub(crate) pinned: BTreeSet<RegistrationId>,
    /// Unloaded, but a load or a step in flight still uses them.
    pub(crate) departing: BTreeSet<RegistrationId>,
    pub(crate) resident_bytes: u64,
    pub(crate) resident_count: usize,
    pub(crate) loading_bytes: u64,
    pub(crate) loading_count: usize,
    /// Distinct versions of admitted requests.
    pub(crate) active_count: usize,
    clock: u64,
}

impl Shelf {
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

    pub(crate) fn register(&mut self, id: RegistrationId, bytes: u64) -> Result<(), String> {
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
        let registration =
            Registration { bytes, version: None, loading: None, pinned: false, unloading: false, holders: 0 };
        self.registrations.insert(id, registration);
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

    /// Resident versions by slot.
    pub(crate) fn residents(&self) -> impl Iterator<Item = &Version> {
        self.table.iter().flatten().map(|&index| self.version(index))
    }

    /// Version behind a registration, if it is known.
    pub(crate) fn version_of(&self, id: RegistrationId) -> Option<VersionIndex> {
        self.registrations.get(&id)?.version
    }

    /// Bytes that a registration takes when it is resident.
    pub(crate) fn bytes_of(&self, id: RegistrationId) -> u64 {
        let Some(registration) = self.registrations.get(&id) else { return 0 };
        registration.version.map_or(registration.bytes, |version| self.version(version).bytes)
    }

    /// Makes `digest` the version of a registration that had none.
    pub(crate) fn bind(&mut self, id: RegistrationId, digest: Digest, bytes: u64) -> Option<VersionIndex> {
        let index = self.by_digest.get(&digest).copied().unwrap_or_else(|| self.add_version(digest, bytes));
        let registration = self.registrations.get_mut(&id)?;
        registration.version = Some(index);
        let pinned = registration.pinned;
        let version = self.version_mut(index);
        version.registrations += 1;
        version.pins += usize::from(pinned);
        Some(index)
    }

    fn add_version(&mut self, digest: Digest, bytes: u64) -> VersionIndex {
        let version = Version {
            digest,
            bytes,
            slot: None,
            loading: false,
            registrations: 0,
            leases: 0,
            active: 0,
            pins: 0,
            last_used: 0,
            uses: 0,
            last_step: 0,
            protected: 0,
        };
        let index = self.vacant_versions.pop().unwrap_or_else(|| {
            self.versions.push(None);
            (self.versions.len() - 1) as u32
        });
        self.versions[index as usize] = Some(version);
        self.by_digest.insert(digest, VersionIndex(index));
        VersionIndex(index)
    }

    /// Gives a version the lowest vacant slot and counts its bytes.
    pub(crate) fn place(&mut self, index: VersionIndex, bytes: u64) -> AdapterSlot {
        let slot = self.vacant_slots.pop().map_or_else(
            || {
                self.table.push(None);
                (self.table.len() - 1) as u32
            },
            |Reverse(slot)| slot,
        );
        self.table[slot as usize] = Some(index);
        self.resident_bytes += bytes;
        self.resident_count += 1;
        self.touch(index);
        let version = self.version_mut(index);
        version.bytes = bytes;
        version.uses = 0;
        version.slot = Some(AdapterSlot(slot));
        AdapterSlot(slot)
    }

    /// Takes a version out of the table.
    pub(crate) fn displace(&mut self, index: VersionIndex) -> Option<AdapterSlot> {
        let version = self.version_mut(index);
        let slot = version.slot.take()?;
        let bytes = version.bytes;
        self.table[slot.0 as usize] = None;
        self.vacant_slots.push(Reverse(slot.0));
        self.resident_bytes -= bytes;
        self.resident_count -= 1;
        Some(slot)
    }

    /// Marks a version as used now.
    pub(crate) fn touch(&mut self, index: VersionIndex) {
        self.clock += 1;
        let now = self.clock;
        self.version_mut(index).last_used = now;
    }

    /// An admitted request starts to use a version.
    pub(crate) fn activate(&mut self, index: VersionIndex) {
        self.touch(index);
        let version = self.version_mut(index);
        version.active += 1;
        version.uses += 1;
        self.active_count += usize::from(self.version(index).active == 1);
    }

    /// An admitted request ends.
    pub(crate) fn deactivate(&mut self, index: VersionIndex) {
        self.touch(index);
        let version = self.version_mut(index);
        version.active -= 1;
        self.active_count -= usize::from(self.version(index).active == 0);
    }

    /// Resident versions that may go; `settled` is the last step whose results are in.
    pub(crate) fn candidates(&self, victims: Victims, settled: u64) -> impl Iterator<Item = Candidate> + '_ {
        self.residents().filter_map(move |version| {
            let held = match victims {
                Victims::Idle => version.leases > 0,
                Victims::Queued { scan } => version.active > 0 || version.protected == scan,
            };
            if held || version.pins > 0 || version.last_step > settled {
                return None;
            }
            let slot = version.slot?;
            Some(Candidate { slot, bytes: version.bytes, last_used: version.last_used, uses: version.uses })
        })
    }

    /// The version in a slot.
    pub(crate) fn in_slot(&self, slot: AdapterSlot) -> Option<VersionIndex> {
        self.table.get(slot.0 as usize).copied().flatten()
    }

    pub(crate) fn set_pinned(&mut self, id: RegistrationId, pinned: bool) {
        let Some(registration) = self.registrations.get_mut(&id) else { return };
        if std::mem::replace(&mut registration.pinned, pinned) == pinned {
            return;
        }
        let version = registration.version;
        if pinned {
            self.pinned.insert(id);
        } else {
            self.pinned.remove(&id);
        }
        if let Some(version) = version {
            let version = self.version_mut(version);
            if pinned {
                version.pins += 1;
            } else {
                version.pins -= 1;
            }
        }
    }

    /// Number and bytes of the distinct contents among `chosen` and the pinned ones together.
    pub(crate) fn with_pinned(&self, chosen: impl Iterator<Item = RegistrationId> + Clone) -> (usize, u64) {
        let same = |a: RegistrationId, b: RegistrationId| {
            a == b || (self.version_of(a).is_some() && self.version_of(a) == self.version_of(b))
        };
        let all = chosen.chain(self.pinned.iter().copied());
        let (mut count, mut bytes) = (0, 0u64);
        for (position, id) in all.clone().enumerate() {
            if !all.clone().take(position).any(|earlier| same(earlier, id)) {
                count += 1;
                bytes = bytes.saturating_add(self.bytes_of(id));
            }
        }
        (count, bytes)
    }

    /// Takes a registration that nobody uses off the shelf, and its version if it was the last.
    pub(crate) fn remove(&mut self, id: RegistrationId) {
        self.set_pinned(id, false);
        self.wanted.remove(&id);
        self.departing.remove(&id);
        let Some(registration) = self.registrations.remove(&id) else { return };
        self.vacant_indices.insert(id.index);
        let Some(index) = registration.version else { return };
        let version = self.version_mut(index);
        version.registrations -= 1;
        if version.registrations == 0 {
            let digest = version.digest;
            self.by_digest.remove(&digest);
            self.versions[index.0 as usize] = None;
            self.vacant_versions.push(index.0);
        }
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let sum: u64 = self.residents().map(|version| version.bytes).sum();
        if (sum, self.residents().count()) != (self.resident_bytes, self.resident_count) {
            return Err(format!("resident bytes `{}` are not the sum `{sum}`", self.resident_bytes));
        }
        let reserved: u64 = self.registrations.values().filter_map(|registration| registration.loading).sum();
        if reserved != self.loading_bytes {
            return Err(format!("loading bytes `{}` are not the sum `{reserved}`", self.loading_bytes));
        }
        for (index, version) in self.versions() {
            let standing = self.registrations.values().filter(|registration| registration.version == Some(index));
            let (all, pinned) = standing.fold((0, 0), |(all, pins), one| (all + 1, pins + usize::from(one.pinned)));
            if (all, pinned) != (version.registrations, version.pins) || all == 0 {
                return Err(format!("version `{}` miscounts its registrations or pins", version.digest));
            }
            if version.slot.is_some_and(|slot| self.in_slot(slot) != Some(index)) {
                return Err(format!("version `{}` is not in its slot", version.digest));
            }
            if version.active > 0 && version.slot.is_none() {
                return Err(format!("version `{}` is active and not resident", version.digest));
            }
        }
        let active = self.versions().filter(|(_, version)| version.active > 0).count();
        if active != self.active_count {
            return Err(format!("`{active}` versions are active and `{}` counted", self.active_count));
        }
        Ok(())
    }
}
