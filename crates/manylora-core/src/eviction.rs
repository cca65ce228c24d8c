//! Which resident adapter goes when room is needed: a small trait, so that policies can be tried without touching the
//! shelf. What *may* go is not the policy's business; it only sees candidates that nobody holds.

use std::fmt;

use crate::identity::AdapterSlot;

/// A resident version that may be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its place.
    pub slot: AdapterSlot,
    /// Its packed bytes.
    pub bytes: u64,
    /// Logical time of its last use; grows with every use of any version.
    pub last_used: u64,
    /// Requests that were admitted with it since it became resident.
    pub uses: u64,
}

/// Chooses a victim.
pub trait EvictionPolicy: fmt::Debug + Send + Sync {
    /// The candidate to evict first; None only if there are none. Must depend on nothing but the candidates.
    fn choose(&self, candidates: &mut dyn Iterator<Item = Candidate>) -> Option<AdapterSlot>;
}

/// The version that was not used for the longest time.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeastRecentlyUsed;

impl EvictionPolicy for LeastRecentlyUsed {
    fn choose(&self, candidates: &mut dyn Iterator<Item = Candidate>) -> Option<AdapterSlot> {
        candidates.min_by_key(|candidate| (candidate.last_used, candidate.slot)).map(|candidate| candidate.slot)
    }
}
