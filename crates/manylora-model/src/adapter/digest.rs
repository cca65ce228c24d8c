//! An adapter version's identity: a digest of what it does, not of how it is spelled.
//!
//! SHA-256 over a tag, the number of sites, and per site in order of its index: index, rank, columns of A, rows of B,
//! the bits of the f32 scale, and the SHA-256 of A's and then B's values as little-endian f32, row-major. Widening
//! float16 and bfloat16 to f32 is exact, so the same values have one digest however they were stored, under whatever
//! key spelling, file layout, name or path; and any other value, rank, scale or module gives another one. Keys of the
//! configuration that do not change the result do not enter.

use manylora_kernels::SiteShape;
use sha2::{Digest, Sha256};

const TAG: &[u8] = b"manylora adapter 1\n";

/// Digest of one site's factors.
pub fn factors_digest(a: &[f32], b: &[f32]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    let mut block = Vec::with_capacity(4096);
    for values in [a, b] {
        for chunk in values.chunks(1024) {
            block.clear();
            block.extend(chunk.iter().flat_map(|value| value.to_le_bytes()));
            hasher.update(&block);
        }
    }
    hasher.finalize().into()
}

/// Digest of an adapter: its sites, sorted by index, and the digests of their factors.
pub fn adapter_digest(sites: &[SiteShape], factors: &[[u8; 32]]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    hasher.update(TAG);
    hasher.update((sites.len() as u64).to_le_bytes());
    for (shape, factors) in sites.iter().zip(factors) {
        for number in [shape.site.0, shape.rank, shape.input, shape.output, shape.scale.to_bits()] {
            hasher.update(number.to_le_bytes());
        }
        hasher.update(factors);
    }
    hasher.finalize().into()
}

/// A digest as 64 lower-case hex digits.
pub fn hex(digest: &[u8; 32]) -> String {
    digest
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .filter_map(|nibble| char::from_digit(nibble.into(), 16))
        .collect()
}
