//! What can be seen of the control plane from outside: honest bytes (promise P8), exact at every moment.

use std::collections::BTreeMap;

use crate::identity::{AdapterSlot, Digest, RegistrationId};

/// A version that is resident in the backend's adapter table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ResidentAdapter {
    /// The version.
    pub digest: Digest,
    /// Its packed bytes.
    pub bytes: u64,
    /// Requests that hold it, running and waiting.
    pub leases: usize,
    /// Whether a registration of it is pinned.
    pub pinned: bool,
    /// Whether it cannot be evicted, pinned or not: given from memory, or replaced and not unloaded yet.
    pub anchored: bool,
    /// Its place in the table.
    pub slot: AdapterSlot,
}

/// A look at one registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RegistrationStatus {
    /// The version, once it was read.
    pub digest: Option<Digest>,
    /// Packed bytes: what the header implies, exact after the first read.
    pub bytes: u64,
    /// Where it is resident.
    pub slot: Option<AdapterSlot>,
    /// Whether a load is under way.
    pub loading: bool,
    /// Whether it is pinned.
    pub pinned: bool,
    /// Whether it is being unloaded.
    pub unloading: bool,
    /// Whether another registration serves in its place.
    pub superseded: bool,
    /// Whether its content can be read again.
    pub rereadable: bool,
    /// Live requests that name it.
    pub requests: usize,
}

/// Live requests that name a registration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct AdapterUsers {
    /// Admitted ones.
    pub running: usize,
    /// Those that wait: for a load, for their turn, or preempted.
    pub waiting: usize,
}

/// Live requests by what they name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Users {
    /// Those that name no adapter.
    pub base: AdapterUsers,
    /// Those that name a registration, with others or alone. None of these is empty.
    pub adapters: BTreeMap<RegistrationId, AdapterUsers>,
}

/// A look at the whole control plane.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct CoreStats {
    /// Admitted requests.
    pub running: usize,
    /// Requests that wait: for a load, for their turn, or preempted.
    pub waiting: usize,
    /// Those of them that were never admitted and whose adapters are not all resident.
    pub waiting_for_adapters: usize,
    /// KV blocks that nobody holds (cached ones included).
    pub free_blocks: usize,
    /// KV blocks there are now: the ledger less the adapters.
    pub total_blocks: usize,
    /// Resident versions, by slot.
    pub adapters: Vec<ResidentAdapter>,
    /// Bytes of the resident versions.
    pub adapter_bytes: u64,
    /// Bytes set aside for loads under way.
    pub loading_bytes: u64,
    /// Bytes that KV blocks and adapters share, or those of KV blocks where adapters have their own.
    pub ledger_bytes: u64,
    /// Bytes that adapters can take.
    pub adapter_room: u64,
    /// Tokens looked up in the prefix cache.
    pub prefix_cache_queries: u64,
    /// Tokens found there.
    pub prefix_cache_hits: u64,
    /// Requests that were preempted.
    pub preemptions: u64,
    /// Versions that were taken out of the table to make room.
    pub evictions: u64,
    /// Loads that were ordered.
    pub loads: u64,
}
