//! KV blocks: reference counts, the prefix cache, and a capacity that adapters shrink and grow.
//!
//! A block is in one of four states: held by requests (`references > 0`), free, *cached* (free, but its content is kept
//! for a request with the same prefix until the room is needed, least recently used first), or retired (its bytes
//! belong to adapters now). Taking, freeing and touching a block is O(1) and allocates nothing: the lists are threaded
//! through the blocks themselves, and so are the chains of the hash table, whose keys are uniform already.
//!
//! What a block holds is named by content (promise P2), see [`block_hash`]: equal in every process, whatever was loaded
//! before, and never shared between adapters, scales, salts or bases.

use sha2::{Digest as _, Sha256};

use crate::identity::{BlockId, Digest};

const NONE: u32 = u32::MAX;

/// An adapter that is active in (part of) a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockAdapter {
    /// Version.
    pub digest: Digest,
    /// Strength.
    pub scale: f32,
    /// First row of the block that it applies to.
    pub first_row: u32,
}

/// Name of a full block's content:
/// `H(parent, tokens, cache salt, base digest, ordered (version digest, scale bits, first active row))`.
///
/// `parent` is the hash of the block before it, None for a sequence's first. Adapters that are not active in the block
/// are left out (`adapter_count` says how many remain), so that a sequence whose adapter starts late shares its beginning
/// with the base.
pub fn block_hash(
    parent: Option<&Digest>,
    tokens: &[u32],
    cache_salt: Option<&str>,
    base: &Digest,
    adapter_count: usize,
    adapters: impl Iterator<Item = BlockAdapter>,
) -> Digest {
    let mut hasher = Sha256::new();
    hasher.update(b"manylora kv block 1\0");
    hasher.update(parent.map_or([0; 32], |parent| parent.0));
    hasher.update(base.0);
    match cache_salt {
        None => hasher.update([0]),
        Some(salt) => {
            hasher.update([1]);
            hasher.update((salt.len() as u64).to_le_bytes());
            hasher.update(salt.as_bytes());
        }
    }
    hasher.update((tokens.len() as u32).to_le_bytes());
    for token in tokens {
        hasher.update(token.to_le_bytes());
    }
    hasher.update((adapter_count as u32).to_le_bytes());
    for adapter in adapters {
        hasher.update(adapter.digest.0);
        hasher.update(adapter.scale.to_bits().to_le_bytes());
        hasher.update(adapter.first_row.to_le_bytes());
    }
    Digest(hasher.finalize().into())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Held,
    Free,
    Cached,
    Retired,
}

#[derive(Clone, Debug)]
struct Block {
    state: State,
    references: u32,
    /// Content, while the block is in the hash table.
    hash: Option<Digest>,
    /// Neighbours in the list of cached free blocks, oldest first.
    older: u32,
    newer: u32,
    /// Next block in the same bucket of the hash table.
    chain: u32,
}

/// The pool.
#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// Free blocks without content; the last is taken first.
    free: Vec<u32>,
    /// Blocks whose bytes adapters have; the last comes back first.
    retired: Vec<u32>,
    /// How many of them, from the first on, [`Self::take_retired`] has told.
    told: usize,
    oldest: u32,
    newest: u32,
    cached: usize,
    buckets: Vec<u32>,
}

impl BlockPool {
    /// A pool of `blocks` free blocks, numbered from 0.
    pub fn new(blocks: usize) -> Self {
        let block = Block { state: State::Free, references: 0, hash: None, older: NONE, newer: NONE, chain: NONE };
        Self {
            blocks: vec![block; blocks],
            free: (0..blocks as u32).rev().collect(),
            retired: Vec::with_capacity(blocks),
            told: 0,
            oldest: NONE,
            newest: NONE,
            cached: 0,
            buckets: vec![NONE; blocks.max(1).next_power_of_two()],
        }
    }

    /// Blocks that exist now: all but the retired ones.
    pub fn capacity(&self) -> usize {
        self.blocks.len() - self.retired.len()
    }

    /// Blocks that can be taken, cached ones included.
    pub fn available(&self) -> usize {
        self.free.len() + self.cached
    }

    /// Blocks that requests hold.
    pub fn held(&self) -> usize {
        self.capacity() - self.available()
    }

    /// Blocks whose bytes were given to adapters.
    pub fn retired(&self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        self.retired.iter().map(|&block| BlockId(block))
    }

    /// Blocks that were retired since the last call, and are: whoever keeps memory for blocks gives up theirs. Costs what they
    /// are, however many others were retired before.
    pub fn take_retired(&mut self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        let first = std::mem::replace(&mut self.told, self.retired.len());
        self.retired[first..].iter().map(|&block| BlockId(block))
    }

    /// How many requests hold a block.
    pub fn references(&self, block: BlockId) -> u32 {
        self.blocks[block.0 as usize].references
    }

    /// Takes a free block; a cached one, the least recently used, only if there is no other. Its content is unspecified.
    pub fn take(&mut self) -> Option<BlockId> {
        let index = self.take_unused()?;
        let block = &mut self.blocks[index as usize];
        block.state = State::Held;
        block.references = 1;
        Some(BlockId(index))
    }

    fn take_unused(&mut self) -> Option<u32> {
        if let Some(index) = self.free.pop() {
            return Some(index);
        }
        if self.oldest == NONE {
            return None;
        }
        let index = self.oldest;
        self.unlink_cached(index);
        self.forget(index);
        Some(index)
    }

    /// Gives one reference back. A cached block becomes the most recently used of the free ones; free the last block
    /// of a sequence first, so that the ends of prefixes go before their beginnings.
    pub fn free(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.0 as usize];
        debug_assert!(block.references > 0, "block `{}` freed twice", id.0);
        block.references -= 1;
        if block.references > 0 {
            return;
        }
        if block.hash.is_none() {
            block.state = State::Free;
            self.free.push(id.0);
        } else {
            block.state = State::Cached;
            block.older = self.newest;
            block.newer = NONE;
            match self.newest {
                NONE => self.oldest = id.0,
                newest => self.blocks[newest as usize].newer = id.0,
            }
            self.newest = id.0;
            self.cached += 1;
        }
    }

    /// Finds the block with this content and takes a reference to it.
    pub fn touch(&mut self, hash: &Digest) -> Option<BlockId> {
        let index = self.find(hash)?;
        if self.blocks[index as usize].references == 0 {
            self.unlink_cached(index);
            self.blocks[index as usize].state = State::Held;
        }
        self.blocks[index as usize].references += 1;
        Some(BlockId(index))
    }

    /// Whether a block with this content exists.
    pub fn contains(&self, hash: &Digest) -> bool {
        self.find(hash).is_some()
    }

    /// Names a held block's content, once it is full and computed. If another block has the same content already, this
    /// one stays nameless.
    pub fn cache(&mut self, id: BlockId, hash: Digest) {
        if self.blocks[id.0 as usize].hash.is_some() || self.find(&hash).is_some() {
            return;
        }
        let bucket = self.bucket(&hash);
        let block = &mut self.blocks[id.0 as usize];
        block.hash = Some(hash);
        block.chain = self.buckets[bucket];
        self.buckets[bucket] = id.0;
    }

    /// Makes the pool `blocks` smaller at the cost of cached content; false, and nothing changed, if so many are not
    /// free.
    pub fn shrink(&mut self, blocks: usize) -> bool {
        if blocks > self.available() {
            return false;
        }
        for _ in 0..blocks {
            if let Some(index) = self.take_unused() {
                self.blocks[index as usize].state = State::Retired;
                self.retired.push(index);
            }
        }
        true
    }

    /// Makes the pool `blocks` larger; false, and nothing changed, if fewer were retired.
    pub fn grow(&mut self, blocks: usize) -> bool {
        if blocks > self.retired.len() {
            return false;
        }
        for index in self.retired.drain(self.retired.len() - blocks..).rev() {
            self.blocks[index as usize].state = State::Free;
            self.free.push(index);
        }
        // A block that is retired again has to be told again.
        self.told = self.told.min(self.retired.len());
        true
    }

    /// Forgets all content; false, and nothing changed, if a block is held.
    pub fn reset(&mut self) -> bool {
        if self.held() > 0 {
            return false;
        }
        while self.oldest != NONE {
            let index = self.oldest;
            self.unlink_cached(index);
            self.forget(index);
            self.blocks[index as usize].state = State::Free;
            self.free.push(index);
        }
        true
    }

    fn bucket(&self, hash: &Digest) -> usize {
        let [a, b, c, d, e, f, g, h, ..] = hash.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h]) as usize & (self.buckets.len() - 1)
    }

    fn find(&self, hash: &Digest) -> Option<u32> {
        let mut index = self.buckets[self.bucket(hash)];
        while index != NONE {
            let block = &self.blocks[index as usize];
            if block.hash.as_ref() == Some(hash) {
                return Some(index);
            }
            index = block.chain;
        }
        None
    }

    /// Takes a block's content out of the hash table.
    fn forget(&mut self, index: u32) {
        let Some(hash) = self.blocks[index as usize].hash.take() else { return };
        let next = std::mem::replace(&mut self.blocks[index as usize].chain, NONE);
        let bucket = self.bucket(&hash);
        if self.buckets[bucket] == index {
            self.buckets[bucket] = next;
            return;
        }
        let mut before = self.buckets[bucket];
        while before != NONE {
            let block = &mut self.blocks[before as usize];
            if block.chain == index {
                block.chain = next;
                return;
            }
            before = block.chain;
        }
    }

    fn unlink_cached(&mut self, index: u32) {
        let block = &mut self.blocks[index as usize];
        let older = std::mem::replace(&mut block.older, NONE);
        let newer = std::mem::replace(&mut block.newer, NONE);
        match older {
            NONE => self.oldest = newer,
            older => self.blocks[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.blocks[newer as usize].older = older,
        }
        self.cached -= 1;
    }

    /// Checks that every block is in exactly one place and that the hash table finds what it should.
    ///
    /// `owners` counts for each block the requests that hold it.
    pub(crate) fn check(&self, owners: &[u32]) -> Result<(), String> {
        let mut place = vec![State::Held; self.blocks.len()];
        let mut put = |index: u32, state: State| {
            let old = std::mem::replace(&mut place[index as usize], state);
            if old == State::Held { Ok(()) } else { Err(format!("block `{index}` is {old:?} and {state:?}")) }
        };
        self.free.iter().try_for_each(|&index| put(index, State::Free))?;
        self.retired.iter().try_for_each(|&index| put(index, State::Retired))?;
        if self.told > self.retired.len() {
            return Err(format!("`{}` retired blocks were told of `{}`", self.told, self.retired.len()));
        }
        let (mut index, mut cached) = (self.oldest, 0);
        while index != NONE {
            put(index, State::Cached)?;
            cached += 1;
            index = self.blocks[index as usize].newer;
        }
        if cached != self.cached {
            return Err(format!("`{cached}` cached blocks in the list and `{}` counted", self.cached));
        }
        for (index, block) in self.blocks.iter().enumerate() {
            let owned = owners.get(index).copied().unwrap_or(0);
            if block.references != owned {
                return Err(format!("block `{index}` has `{}` references and `{owned}` owners", block.references));
            }
            if block.state != place[index] || (block.state == State::Held) != (owned > 0) {
                return Err(format!("block `{index}` says {:?} and is {:?}", block.state, place[index]));
            }
            let content = block.hash.as_ref();
            if content.is_some_and(|hash| self.find(hash) != Some(index as u32)) {
                return Err(format!("block `{index}` is not found by its hash"));
            }
            if content.is_some() != (block.state == State::Cached) && block.state != State::Held {
                return Err(format!("block `{index}` is {:?} with content {content:?}", block.state));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Digest = Digest([7; 32]);

    fn hash(tokens: &[u32], adapters: &[BlockAdapter]) -> Digest {
        block_hash(None, tokens, None, &BASE, adapters.len(), adapters.iter().copied())
    }

    fn adapter(byte: u8, scale: f32, first_row: u32) -> BlockAdapter {
        BlockAdapter { digest: Digest([byte; 32]), scale, first_row }
    }

    #[test]
    fn a_42_hash_is_fixed_across_processes() {
        // The value was computed from the definition with another implementation of SHA-256; it must never change, or
        // replicas of different versions stop sharing.
        let first = hash(&[1, 2, 3, 4], &[adapter(9, 0.5, 1)]);
        assert_eq!(first.to_string(), "969e12ecde39101bdacffa5f281bd6c4dbf05f3b71c8ebbee91e09c46e1d2729");
        let second = block_hash(Some(&first), &[5, 6, 7, 8], Some("tenant"), &BASE, 0, [].into_iter());
        assert_eq!(second.to_string(), "4d8b1e5d6053652b2456fae4e2881176b470611d96cdb0f09bc4287d09b91ae7");
    }

    #[test]
    fn a_40_everything_that_changes_the_content_changes_the_hash() {
        let tokens = [1, 2, 3, 4];
        let (a, b) = (adapter(1, 1.0, 0), adapter(2, 1.0, 0));
        let mut all = vec![
            hash(&tokens, &[]),
            hash(&[1, 2, 3, 5], &[]),
            hash(&tokens, &[a]),
            hash(&tokens, &[b]),
            hash(&tokens, &[a, b]),
            hash(&tokens, &[b, a]),
            hash(&tokens, &[a, a]),
            hash(&tokens, &[adapter(1, 0.5, 0)]),
            hash(&tokens, &[adapter(1, 1.0, 1)]),
            block_hash(Some(&hash(&tokens, &[])), &tokens, None, &BASE, 0, [].into_iter()),
            block_hash(None, &tokens, Some(""), &BASE, 0, [].into_iter()),
            block_hash(None, &tokens, Some("x"), &BASE, 0, [].into_iter()),
            block_hash(None, &tokens, None, &Digest([8; 32]), 0, [].into_iter()),
        ];
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn least_recently_used_content_goes_first_and_free_blocks_before_it() {
        let mut pool = BlockPool::new(4);
        let hashes: Vec<_> = (0..3).map(|token| hash(&[token], &[])).collect();
        let blocks: Vec<_> = hashes.iter().map(|&hash| (pool.take().unwrap(), hash)).collect();
        for &(block, hash) in &blocks {
            pool.cache(block, hash);
            pool.free(block);
        }
        assert_eq!(pool.available(), 4);
        // Used again: now the newest.
        let again = pool.touch(&hashes[0]).unwrap();
        pool.free(again);
        let free = pool.take().unwrap();
        assert_eq!(free, BlockId(3));
        assert!(hashes.iter().all(|hash| pool.contains(hash)));
        pool.take().unwrap();
        assert_eq!(hashes.iter().map(|hash| pool.contains(hash)).collect::<Vec<_>>(), [true, false, true]);
        pool.take().unwrap();
        pool.take().unwrap();
        assert_eq!(pool.take(), None);
        assert!(!hashes.iter().any(|hash| pool.contains(hash)));
    }

    #[test]
    fn shared_blocks_are_freed_by_their_last_owner() {
        let mut pool = BlockPool::new(2);
        let block = pool.take().unwrap();
        pool.cache(block, BASE);
        assert_eq!(pool.touch(&BASE), Some(block));
        pool.free(block);
        assert_eq!((pool.references(block), pool.available()), (1, 1));
        assert!(!pool.reset());
        pool.free(block);
        assert_eq!((pool.references(block), pool.available()), (0, 2));
        assert!(pool.reset());
        assert!(!pool.contains(&BASE));
        pool.check(&[0, 0]).unwrap();
    }

    #[test]
    fn the_second_block_with_the_same_content_stays_nameless() {
        let mut pool = BlockPool::new(2);
        let (first, second) = (pool.take().unwrap(), pool.take().unwrap());
        pool.cache(first, BASE);
        pool.cache(second, BASE);
        pool.check(&[1, 1]).unwrap();
        pool.free(second);
        assert_eq!(pool.take(), Some(second));
        assert_eq!(pool.touch(&BASE), Some(first));
    }

    #[test]
    fn each_retirement_is_told_once() {
        let mut pool = BlockPool::new(6);
        let told = |pool: &mut BlockPool| pool.take_retired().map(|block| block.0).collect::<Vec<u32>>();
        assert!(pool.shrink(2));
        assert_eq!(told(&mut pool), [0, 1]);
        assert!(told(&mut pool).is_empty());
        assert!(pool.shrink(2) && pool.grow(3));
        // What came back and goes again is told again, though nobody asked in between; what stayed is not.
        assert!(pool.shrink(4));
        let again = told(&mut pool);
        assert_eq!(again.len(), 4);
        assert!(!again.contains(&0) && again.contains(&1));
        assert!(told(&mut pool).is_empty());
        pool.check(&[0; 6]).unwrap();
    }

    #[test]
    fn capacity_shrinks_only_by_what_is_free() {
        let mut pool = BlockPool::new(4);
        let held = pool.take().unwrap();
        let cached = pool.take().unwrap();
        pool.cache(cached, BASE);
        pool.free(cached);
        assert!(!pool.shrink(4));
        assert_eq!(pool.capacity(), 4);
        assert!(pool.shrink(3));
        assert_eq!((pool.capacity(), pool.available(), pool.held()), (1, 0, 1));
        assert!(!pool.contains(&BASE));
        assert!(!pool.grow(4));
        assert!(pool.grow(2));
        assert_eq!((pool.capacity(), pool.available(), pool.retired().len()), (3, 2, 1));
        pool.check(&[1, 0, 0, 0]).unwrap();
        pool.free(held);
        pool.check(&[0, 0, 0, 0]).unwrap();
    }
}
