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

/// Digest of content: BLAKE3 of an adapter version and of the base, SHA-256 of a KV block's history. Written as 64
/// hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(into = "String", try_from = "String")]
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

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a digest: 64 hexadecimal digits");
        let digits: Vec<u32> = text.chars().map(|digit| digit.to_digit(16)).collect::<Option<_>>().ok_or_else(wrong)?;
        let mut digest = [0; 32];
        if digits.len() != 64 {
            return Err(wrong());
        }
        for (byte, pair) in digest.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (pair[0] * 16 + pair[1]) as u8;
        }
        Ok(Self(digest))
    }
}
