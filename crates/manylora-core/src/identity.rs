//! Newtypes for everything that is passed around by number, so that no two of them can be confused.

use std::fmt;

/// A request (one sequence: the engine fans `n` samples out into `n` requests).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct RequestId(pub u64);

/// A KV block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct BlockId(pub u32);

/// Place of a resident adapter in the backend's adapter table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct AdapterSlot(pub u32);

/// A registered adapter: an index with a generation, so that a stale id is recognized as such.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct RegistrationId {
    /// Index in the shelf.
    pub index: u32,
    /// Counts reuses of the index.
    pub generation: u32,
}

/// Seconds on the clock of whoever drives the control plane (wall clock or virtual), from any fixed origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, serde::Serialize, serde::Deserialize)]
pub struct Time(pub f64);

/// SHA-256 of content: of an adapter version, of the base, of a KV block's history.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Digest(pub [u8; 32]);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}
