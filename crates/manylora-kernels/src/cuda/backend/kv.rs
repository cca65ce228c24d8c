//! The paged KV cache: `[blocks][layers][K, V][block size][kv_heads][head_dim]`, so that a block is one piece of memory.

use super::super::arena::{Arena, DeviceSlice, Holding};
use super::super::error::CudaError;
use super::super::memory::DevicePointer;
use super::super::stream::Stream;
use crate::backend::KvShape;

/// Where positions of blocks lie, as kernels are told it: counted in runs of `kv_heads * head_dim` elements from where the
/// first block has its part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Places {
    block_size: u32,
    /// From one block to the next.
    pitch: u32,
}

impl Places {
    /// Those of a cache; None where kernels could not count them.
    fn of(shape: &KvShape) -> Option<Self> {
        let pitch = shape.layers.checked_mul(2)?.checked_mul(shape.block_size)?;
        let all = pitch.checked_mul(shape.blocks)?;
        (all <= i32::MAX as usize).then_some(Self { block_size: shape.block_size as u32, pitch: pitch as u32 })
    }

    /// Of a block's first position.
    pub(super) const fn block(self, block: u32) -> u32 {
        block * self.pitch
    }

    /// Of a position by its number in the cache.
    pub(super) const fn slot(self, slot: u32) -> u32 {
        self.block(slot / self.block_size) + slot % self.block_size
    }
}

/// Keys and values of all layers.
#[derive(Debug)]
pub struct CudaKvCache {
    memory: DeviceSlice<u16>,
    pub(super) shape: KvShape,
    pub(super) places: Places,
}

impl CudaKvCache {
    /// Zeroed, so that what no row has written cannot be a NaN.
    pub(super) fn new(arena: &Arena, stream: &Stream, shape: KvShape) -> Result<Self, CudaError> {
        let elements = (2 * shape.layers).saturating_mul(Self::part(&shape)).saturating_mul(shape.blocks);
        let Some(places) = Places::of(&shape) else {
            let (free, largest) = (arena.usage().free, arena.usage().largest);
            return Err(CudaError::OutOfMemory { what: "the KV cache".to_owned(), bytes: usize::MAX, free, largest });
        };
        let mut memory = arena.allocate(Holding::KvCache, "the KV cache", elements)?;
        memory.fill_zero(stream)?;
        Ok(Self { memory, shape, places })
    }

    /// Elements of a block's keys in one layer.
    fn part(shape: &KvShape) -> usize {
        [shape.block_size, shape.kv_heads, shape.head_dim].into_iter().fold(1, usize::saturating_mul)
    }

    /// A layer's keys and values in the first block.
    pub(super) fn layer(&self, layer: usize) -> (DevicePointer<u16>, DevicePointer<u16>) {
        assert!(layer < self.shape.layers, "layer {layer} of {}", self.shape.layers);
        let part = Self::part(&self.shape);
        let keys = self.memory.pointer().add(2 * layer * part);
        (keys, keys.add(part))
    }
}
