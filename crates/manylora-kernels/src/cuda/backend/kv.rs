//! The paged KV cache: `[positions][layers][K, V][block size][kv_heads][head_dim]`, so that a block is one piece of memory.
//!
//! Its memory is shared with adapters (see `region`): positions are counted down from the high end, and a block has one from
//! the first step that names it until the engine gives it up for an adapter. The blocks that are left then move together at the
//! high end, so that all below is one piece again, and adapters may have it. A position that a step reaches again is taken
//! back from them, and zeroed.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Weak};

use super::super::arena::Arena;
use super::super::error::CudaError;
use super::super::free_list::GRANULE;
use super::super::memory::DevicePointer;
use super::super::stream::Stream;
use super::room::{kv_cache_bytes, most_kv_blocks};
use crate::backend::KvShape;
use crate::error::KernelError;

/// In place of a number: none.
const NONE: u32 = u32::MAX;

/// Keys and values of all layers.
#[derive(Debug)]
pub struct CudaKvCache {
    /// Of the position furthest down.
    first: DevicePointer<u16>,
    pub(super) shape: KvShape,
    /// As long as it lives there is no other.
    _alive: Arc<()>,
    /// What it lies in.
    _room: Arena,
}

/// Elements of a block's keys in one layer.
fn part(shape: &KvShape) -> usize {
    [shape.block_size, shape.kv_heads, shape.head_dim].into_iter().fold(1, usize::saturating_mul)
}

impl CudaKvCache {
    /// A cache in a room, and where its blocks lie: nowhere yet.
    pub(super) fn new(room: &Arena, shape: KvShape) -> Result<(Self, Positions), KernelError> {
        let most = most_kv_blocks(shape.layers, shape.block_size);
        if shape.blocks > most {
            return Err(KernelError::Device(format!(
                "`{}` KV blocks are more than the {most} that kernels for cards count; give the cache less memory",
                shape.blocks
            )));
        }
        let (what, bytes, extent) = (format!("{} KV blocks", shape.blocks), kv_cache_bytes(&shape), room.extent());
        if bytes > extent {
            return Err(CudaError::OutOfMemory { what, bytes, free: extent, largest: extent }.into());
        }
        let alive = Arc::default();
        let positions = Positions::new(extent, &shape, Arc::downgrade(&alive));
        let first = room.address(positions.below(shape.blocks as u32)).cast();
        Ok((Self { first, shape, _alive: alive, _room: room.clone() }, positions))
    }

    /// A layer's keys and values in the position furthest down.
    pub(super) fn layer(&self, layer: usize) -> (DevicePointer<u16>, DevicePointer<u16>) {
        assert!(layer < self.shape.layers, "layer {layer} of {}", self.shape.layers);
        let part = part(&self.shape);
        let keys = self.first.add(2 * layer * part);
        (keys, keys.add(part))
    }
}

/// Where blocks lie. A position is a number, counted down from the high end of the room.
#[derive(Debug)]
pub(super) struct Positions {
    /// Bytes of the room.
    room: usize,
    block_bytes: usize,
    block_size: u32,
    /// Runs of `kv_heads * head_dim` elements from one position to the next: what kernels count by.
    pitch: u32,
    /// The position of each block, if it has one.
    of_block: Vec<u32>,
    /// The block in each position.
    holders: Vec<u32>,
    /// Positions below this one are the cache's: held, or `vacant`. What lies beyond is, or may have been, adapters'.
    reached: u32,
    vacant: BTreeSet<u32>,
    /// Blocks that were given up for adapters, and not named since.
    given_up: Vec<bool>,
    /// The others.
    left: usize,
    cache: Weak<()>,
}

impl Positions {
    fn new(room: usize, shape: &KvShape, cache: Weak<()>) -> Self {
        let KvShape { layers, block_size, blocks, .. } = *shape;
        Self {
            room,
            block_bytes: 2 * layers * part(shape) * size_of::<u16>(),
            block_size: block_size as u32,
            pitch: (2 * layers * block_size) as u32,
            of_block: vec![NONE; blocks],
            holders: vec![NONE; blocks],
            reached: 0,
            vacant: BTreeSet::new(),
            given_up: vec![false; blocks],
            left: blocks,
            cache,
        }
    }

    /// Whether the cache is still there.
    pub(super) fn in_use(&self) -> bool {
        self.cache.strong_count() > 0
    }

    /// Bytes below so many positions.
    fn below(&self, positions: u32) -> usize {
        self.room - positions as usize * self.block_bytes
    }

    /// What adapters can have beside the positions that were reached.
    pub(super) fn limit(&self) -> usize {
        self.below(self.reached) / GRANULE * GRANULE
    }

    /// What they can have beside all blocks that were not given up.
    pub(super) fn limit_beside_blocks(&self) -> usize {
        self.below(self.left as u32) / GRANULE * GRANULE
    }

    fn bytes(&self, position: u32) -> Range<usize> {
        self.below(position + 1)..self.below(position)
    }

    /// Gives a position to each of these blocks that has none, and says which were reached for that: nobody may work on those
    /// before they are taken from adapters and zeroed. A steady step has none, and this allocates nothing.
    pub(super) fn provide(&mut self, blocks: &[u32]) -> Result<Range<u32>, CudaError> {
        let (before, len) = (self.reached, self.of_block.len());
        // Before anything is changed.
        if let Some(&block) = blocks.iter().find(|&&block| block as usize >= len) {
            let start = block as usize;
            return Err(CudaError::Range { what: "the KV cache's blocks", len, start, end: start + 1 });
        }
        for &block in blocks {
            let of_block = &mut self.of_block[block as usize];
            if *of_block != NONE {
                continue;
            }
            let position = self.vacant.pop_first().unwrap_or_else(|| {
                self.reached += 1;
                self.reached - 1
            });
            *of_block = position;
            self.holders[position as usize] = block;
            if std::mem::take(&mut self.given_up[block as usize]) {
                self.left += 1;
            }
        }
        Ok(before..self.reached)
    }

    /// Undoes what was reached: it could not be had.
    pub(super) fn forget(&mut self, reached: Range<u32>) {
        for position in reached.clone() {
            let holder = std::mem::replace(&mut self.holders[position as usize], NONE);
            self.of_block[holder as usize] = NONE;
        }
        self.reached = self.reached.min(reached.start);
    }

    /// Queues zeroing what was reached, which is the cache's by now.
    pub(super) fn zero(&self, room: &Arena, stream: &Stream, reached: &Range<u32>) -> Result<(), CudaError> {
        room.zero(stream, self.below(reached.end)..self.below(reached.start))
    }

    /// Queues moving what is in one position to another.
    pub(super) fn follow(&self, room: &Arena, stream: &Stream, (from, to): (u32, u32)) -> Result<(), CudaError> {
        room.copy(stream, self.bytes(to).start, self.bytes(from))
    }

    /// Gives blocks up, and moves those together that are left: from which positions to which their content has to follow.
    pub(super) fn give_up(&mut self, blocks: &[u32]) -> Vec<(u32, u32)> {
        for &block in blocks {
            if !std::mem::replace(&mut self.given_up[block as usize], true) {
                self.left -= 1;
            }
            let position = std::mem::replace(&mut self.of_block[block as usize], NONE);
            if position != NONE {
                self.holders[position as usize] = NONE;
                self.vacant.insert(position);
            }
        }
        // No more positions are needed than there are blocks left.
        let needed = self.left as u32;
        self.vacant.split_off(&needed);
        let mut moved = Vec::new();
        for position in needed..self.reached {
            let block = std::mem::replace(&mut self.holders[position as usize], NONE);
            if block == NONE {
                continue;
            }
            let to = self.vacant.pop_first().expect("one of those that are needed is vacant");
            self.holders[to as usize] = block;
            self.of_block[block as usize] = to;
            moved.push((position, to));
        }
        self.reached = self.reached.min(needed);
        moved
    }

    /// As kernels are told it, counted from the position furthest down: where a block starts.
    pub(super) fn block(&self, block: u32) -> u32 {
        (self.of_block.len() as u32 - 1 - self.of_block[block as usize]) * self.pitch
    }

    /// Where a row lies that has this number in the cache.
    pub(super) fn slot(&self, slot: u32) -> u32 {
        self.block(slot / self.block_size) + slot % self.block_size
    }

    /// What is in a block's memory, if it has any.
    pub(super) fn read(&self, room: &Arena, stream: &Stream, block: u32) -> Result<Option<Vec<u8>>, CudaError> {
        let position = self.of_block.get(block as usize).copied().unwrap_or(NONE);
        if position == NONE {
            return Ok(None);
        }
        let mut bytes = vec![0; self.block_bytes];
        room.read(stream, self.bytes(position).start, &mut bytes)?;
        Ok(Some(bytes))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::backend::StorageType;

    const BLOCKS: usize = 12;

    /// What is in each position, written by hand: the block whose content it is.
    fn check(positions: &Positions, content: &[Option<u32>], gone: &BTreeSet<u32>) -> Result<(), TestCaseError> {
        let held: Vec<u32> = (0..BLOCKS as u32).filter(|&block| positions.of_block[block as usize] != NONE).collect();
        for &block in &held {
            let position = positions.of_block[block as usize];
            prop_assert!(position < positions.reached && !gone.contains(&block));
            prop_assert_eq!(positions.holders[position as usize], block);
            prop_assert_eq!(content[position as usize], Some(block), "position {} lost its block", position);
            // Counted from the low end, in steps of two layers of keys and values of 8 positions.
            prop_assert_eq!(positions.block(block), (BLOCKS as u32 - 1 - position) * 32);
            prop_assert_eq!(positions.slot(block * 8 + 5), positions.block(block) + 5);
        }
        prop_assert_eq!(held.len() + positions.vacant.len(), positions.reached as usize);
        prop_assert_eq!(positions.left, BLOCKS - gone.len());
        prop_assert!(positions.limit_beside_blocks() <= positions.limit());
        Ok(())
    }

    proptest! {
        /// Blocks are named and given up in any order: no two share a position, content follows, and what adapters are
        /// given is never more than what the blocks that are left do not need.
        #[test]
        fn blocks_keep_their_content(actions in proptest::collection::vec((any::<bool>(), 0u32..BLOCKS as u32, 1u32..5), 1..60)) {
            let (layers, dtype) = (2, StorageType::Bf16);
            let shape = KvShape { layers, kv_heads: 1, head_dim: 8, block_size: 8, blocks: BLOCKS, dtype };
            let room = BLOCKS * 512 + 300;
            let mut positions = Positions::new(room, &shape, Weak::new());
            let mut content = vec![None; BLOCKS];
            let mut gone = BTreeSet::new();
            for (names, first, count) in actions {
                let blocks: Vec<u32> = (first..(first + count).min(BLOCKS as u32)).collect();
                if names {
                    let before = positions.of_block.clone();
                    let reached = positions.provide(&blocks).unwrap();
                    // Those are adapters' until their limit is lowered, and hold nothing of ours.
                    prop_assert!(reached.clone().all(|position| content[position as usize].is_none()));
                    for block in blocks {
                        gone.remove(&block);
                        if before[block as usize] == NONE {
                            content[positions.of_block[block as usize] as usize] = Some(block);
                        }
                    }
                } else {
                    let moves = positions.give_up(&blocks);
                    gone.extend(blocks);
                    for (from, to) in moves {
                        prop_assert!(from >= positions.left as u32 && to < positions.left as u32);
                        content[to as usize] = content[from as usize].take();
                    }
                    // All below is adapters' now.
                    content[positions.left..].fill(None);
                    prop_assert_eq!(positions.limit_beside_blocks(), (room - positions.left * 512) / 256 * 256);
                }
                check(&positions, &content, &gone)?;
            }
        }
    }

    #[test]
    fn what_cannot_be_had_is_undone() {
        let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 8, block_size: 4, blocks: 4, dtype: StorageType::Bf16 };
        let mut positions = Positions::new(4 * 128, &shape, Weak::new());
        assert_eq!(positions.provide(&[2, 0, 2]).unwrap(), 0..2);
        let reached = positions.provide(&[3, 1]).unwrap();
        assert_eq!(reached, 2..4);
        positions.forget(reached);
        assert_eq!((positions.of_block.as_slice(), positions.reached), (&[1, NONE, 0, NONE][..], 2));
        assert_eq!(positions.provide(&[1]).unwrap(), 2..3);
        // A block that is none is refused, and nothing is left of the call.
        assert!(matches!(positions.provide(&[3, 4]), Err(CudaError::Range { len: 4, start: 4, .. })));
        assert_eq!((positions.of_block[3], positions.reached), (NONE, 3));
    }
}
