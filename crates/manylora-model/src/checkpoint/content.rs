//! Digests of stored tensors, computed while they are read.
//!
//! A tensor is read once, in ranges that suit whoever packs it, by several threads and in no order; its digest is BLAKE3 of
//! all its bytes nevertheless. BLAKE3 is a tree over chunks of 1024 bytes: each range contributes the largest subtrees that
//! lie in it, and at the end they are joined. Chunks that a range has in part are hashed then, with whatever nobody read.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use blake3::CHUNK_LEN;
use blake3::Hasher;
use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, left_subtree_len, max_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};

/// Contents from this size on are hashed on all loading threads.
const PARALLEL_FROM: usize = 1 << 20;

/// Digest of a tensor's stored bytes, every one of them: their BLAKE3.
pub fn content_digest(bytes: &[u8]) -> [u8; 32] {
    hasher_of(0, bytes).finalize().into()
}

fn hasher_of(offset: usize, bytes: &[u8]) -> Hasher {
    let mut hasher = Hasher::new();
    hasher.set_input_offset(offset as u64);
    if bytes.len() < PARALLEL_FROM {
        hasher.update(bytes);
    } else {
        hasher.update_rayon(bytes);
    }
    hasher
}

/// Subtrees of one content by offset and length.
type Subtrees = BTreeMap<(usize, usize), ChainingValue>;

/// The digest of one tensor's content, as far as it is known.
#[derive(Debug, Default)]
pub struct ContentHash {
    subtrees: Mutex<Subtrees>,
    digest: OnceLock<[u8; 32]>,
}

impl ContentHash {
    /// The bytes from `offset` on, of `total` in all, have been read: hashes them while they are in the cache. Ranges may
    /// come in any order, overlap, and leave gaps.
    pub fn add(&self, offset: usize, bytes: &[u8], total: usize) {
        if self.digest.get().is_some() {
            return;
        }
        if bytes.len() == total {
            self.digest.get_or_init(|| content_digest(bytes));
            return;
        }
        let range_end = offset + bytes.len();
        // The last chunk may be a short one.
        let end = if range_end == total { total } else { range_end / CHUNK_LEN * CHUNK_LEN };
        let mut start = offset.next_multiple_of(CHUNK_LEN);
        let mut found = Vec::new();
        while start < end {
            let rest = end - start;
            let most = max_subtree_len(start as u64).map_or(usize::MAX, |most| most as usize);
            let length = if rest <= most && (end == total || rest.is_power_of_two()) {
                rest
            } else {
                // A power of two: whole subtrees.
                most.min(1 << rest.ilog2())
            };
            let part = &bytes[start - offset..][..length];
            // On this thread: whoever reads has others beside it.
            let mut hasher = Hasher::new();
            hasher.set_input_offset(start as u64).update(part);
            found.push(((start, length), hasher.finalize_non_root()));
            start += length;
        }
        self.subtrees().extend(found);
    }

    /// The digest; `content` is read where it was not added.
    pub fn digest(&self, content: &[u8]) -> [u8; 32] {
        *self.digest.get_or_init(|| {
            let subtrees = std::mem::take(&mut *self.subtrees());
            if subtrees.is_empty() || content.len() <= CHUNK_LEN {
                return content_digest(content);
            }
            let left = left_subtree_len(content.len() as u64) as usize;
            let [left, right] = [(0, left), (left, content.len() - left)]
                .map(|(offset, length)| chaining_value(&subtrees, content, offset, length));
            merge_subtrees_root(&left, &right, Mode::Hash).into()
        })
    }

    fn subtrees(&self) -> MutexGuard<'_, Subtrees> {
        self.subtrees.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn chaining_value(subtrees: &Subtrees, content: &[u8], offset: usize, length: usize) -> ChainingValue {
    if let Some(value) = subtrees.get(&(offset, length)) {
        return *value;
    }
    let known = subtrees.range((offset, 0)..(offset + length, 0)).next().is_some();
    if !known || length <= CHUNK_LEN {
        return hasher_of(offset, &content[offset..offset + length]).finalize_non_root();
    }
    let left = left_subtree_len(length as u64) as usize;
    let values = [(offset, left), (offset + left, length - left)]
        .map(|(offset, length)| chaining_value(subtrees, content, offset, length));
    merge_subtrees_non_root(&values[0], &values[1], Mode::Hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(length: usize) -> Vec<u8> {
        (0..length as u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    /// The digest from ranges of bytes, without another look at the bytes that must have been hashed then.
    fn digest_of(content: &[u8], ranges: &[(usize, usize)]) -> [u8; 32] {
        let hash = ContentHash::default();
        let mut rest = content.to_vec();
        for &(start, end) in ranges {
            hash.add(start, &content[start..end], content.len());
            let whole =
                start.next_multiple_of(CHUNK_LEN)..if end == content.len() { end } else { end / CHUNK_LEN * CHUNK_LEN };
            if !whole.is_empty() {
                rest[whole].fill(0xEE);
            }
        }
        hash.digest(&rest)
    }

    #[test]
    fn ranges_make_the_digest_of_the_whole() {
        let mut seed = 7_u64;
        let mut below = |limit: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % limit
        };
        let lengths = [0, 1, 1023, 1024, 1025, 2048, 2049, 3072, 4096, 7168, 8192, 10_752, 65_536, 100_000, 262_145];
        for length in lengths {
            let content = content(length);
            let wanted: [u8; 32] = blake3::hash(&content).into();
            assert_eq!(content_digest(&content), wanted, "{length}");
            for step in [100, 1000, 1024, 1536, 5000, 28_672, 65_536, 1 << 20] {
                let mut ranges: Vec<_> =
                    (0..length).step_by(step).map(|start| (start, (start + step).min(length))).collect();
                assert_eq!(digest_of(&content, &ranges), wanted, "{length} in steps of {step}");
                ranges.reverse();
                assert_eq!(digest_of(&content, &ranges), wanted, "{length} in steps of {step}, backwards");
                // With gaps.
                ranges.retain(|_| below(3) > 0);
                assert_eq!(digest_of(&content, &ranges), wanted, "{length} in some steps of {step}");
            }
            // Ranges that overlap: nothing about them is regular.
            for _ in 0..20 {
                let mut range = || {
                    let (one, other) = (below(length + 1), below(length + 1));
                    (one.min(other), one.max(other))
                };
                let ranges = [range(), range(), range(), range()];
                assert_eq!(digest_of(&content, &ranges), wanted, "{length} by {ranges:?}");
            }
        }
    }

    #[test]
    fn every_byte_that_was_read_counts() {
        let original = content(50_000);
        let wanted = content_digest(&original);
        for changed in [0, 1023, 1024, 20_000, 49_151, 49_999] {
            let mut other = original.clone();
            other[changed] ^= 1;
            let hash = ContentHash::default();
            for (index, range) in other.chunks(12_288).enumerate() {
                hash.add(index * 12_288, range, other.len());
            }
            // What was read counts, even where the file has become another since.
            assert_eq!(hash.digest(&original), content_digest(&other));
            assert_ne!(content_digest(&other), wanted);
        }
    }

    #[test]
    fn what_is_added_late_changes_nothing() {
        let content = content(9000);
        let hash = ContentHash::default();
        let digest = hash.digest(&content);
        hash.add(0, &[0; 4096], content.len());
        assert_eq!((digest, hash.digest(&[])), (content_digest(&content), digest));
    }
}
