//! Which resident adapter goes when room is needed: a small trait, so that policies can be tried without touching the
//! shelf. What *may* go is not the policy's business.
//!
//! A policy gives a version a *rank* whenever it is used; the lowest rank goes first. Ranks do not change in between, so
//! the shelf keeps what may go sorted and finds a victim in O(log n), however many adapters are resident.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The policies that come with the crate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum EvictionPolicyKind {
    /// [`LeastRecentlyUsed`].
    #[default]
    Lru,
    /// [`CostAware`].
    CostAware,
}

impl EvictionPolicyKind {
    /// Makes the policy.
    pub fn build(self) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(LeastRecentlyUsed),
            Self::CostAware => Box::new(CostAware::default()),
        }
    }
}

/// What is known of a version when it is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Usage {
    /// Its packed bytes.
    pub bytes: u64,
    /// Logical time of this use; grows with every use of any version.
    pub now: u64,
    /// Requests that were admitted with it, older ones counting less: a count halves every [`FREQUENCY_HALF_LIFE`] uses
    /// of any version. It outlasts evictions.
    pub frequency: f64,
    /// What reading a byte of it again costs, relative to the mean over all adapters: from
    /// [`crate::LoadedAdapter::load_seconds`], 1 where that was not measured.
    pub relative_cost: f64,
}

/// Uses of any version after which an earlier use counts half.
pub const FREQUENCY_HALF_LIFE: u64 = 1024;

/// Ranks resident versions; the lowest goes first.
pub trait EvictionPolicy: fmt::Debug + Send + Sync {
    /// Rank of a version that was just used or became resident. Must be finite and depend on nothing but what the policy
    /// was told.
    fn rank(&mut self, usage: &Usage) -> f64;

    /// A version of this rank was evicted.
    fn evicted(&mut self, rank: f64) {
        let _ = rank;
    }
}

/// The version that was not used for the longest time goes first.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeastRecentlyUsed;

impl EvictionPolicy for LeastRecentlyUsed {
    fn rank(&mut self, usage: &Usage) -> f64 {
        usage.now as f64
    }
}

/// Greedy-Dual-Size-Frequency (Cherkasova, HP Labs HPL-98-69R1, 1998, after Cao and Irani's Greedy-Dual-Size, 1997):
/// rank = L + frequency x cost / size, where L is the rank of the last victim.
///
/// What is used often, or is slow to read for its size, stays longer; L grows with every eviction, so that whatever is
/// not used any more goes at last. Without measured load times the cost is the bytes, and the rank L + frequency.
#[derive(Clone, Copy, Debug, Default)]
pub struct CostAware {
    inflation: f64,
}

impl EvictionPolicy for CostAware {
    fn rank(&mut self, usage: &Usage) -> f64 {
        self.inflation + usage.frequency * usage.relative_cost
    }

    fn evicted(&mut self, rank: f64) {
        self.inflation = self.inflation.max(rank);
    }
}
