//! The paged KV cache: `[layers][K, V][blocks][block size][kv_heads][head_dim]`.

use super::super::arena::{Arena, DeviceSlice, Holding};
use super::super::error::CudaError;
use super::super::memory::DevicePointer;
use super::super::stream::Stream;
use crate::backend::KvShape;

/// Keys and values of all layers.
#[derive(Debug)]
pub struct CudaKvCache {
    memory: DeviceSlice<u16>,
    pub(super) shape: KvShape,
}

impl CudaKvCache {
    /// Zeroed, so that what no row has written cannot be a NaN.
    pub(super) fn new(arena: &Arena, stream: &Stream, shape: KvShape) -> Result<Self, CudaError> {
        let elements = 2usize.saturating_mul(shape.layers).saturating_mul(Self::half(&shape));
        let mut memory = arena.allocate(Holding::KvCache, "the KV cache", elements)?;
        memory.fill_zero(stream)?;
        Ok(Self { memory, shape })
    }

    /// Elements of one layer's keys.
    fn half(shape: &KvShape) -> usize {
        [shape.blocks, shape.block_size, shape.kv_heads, shape.head_dim].into_iter().fold(1, usize::saturating_mul)
    }

    /// A layer's keys and values.
    pub(super) fn layer(&self, layer: usize) -> (DevicePointer<u16>, DevicePointer<u16>) {
        assert!(layer < self.shape.layers, "layer {layer} of {}", self.shape.layers);
        let half = Self::half(&self.shape);
        let keys = self.memory.pointer().add(2 * layer * half);
        (keys, keys.add(half))
    }
}
