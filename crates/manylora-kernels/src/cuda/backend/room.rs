//! What things take on a card, in bytes and before there is one: pure functions of shapes, so that an engine can say what
//! fits, and reserve exactly that.

use super::super::free_list::granules;
use super::adapter;
use super::block::{Capacity, RowBlock, SMALL_ROWS};
use super::buffer;
use super::largest;
use super::region::BETWEEN;
use super::step::{PARTIALS, PARTS, SLOTS, partial_floats, shrink_stride};
use crate::backend::{BufferKind, KvShape};
use crate::site::{Site, SiteShape};

/// What steps have room for from the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRoom {
    /// Most rows.
    pub rows: usize,
    /// Most adapter entries.
    pub entries: usize,
    /// Largest rank of a site.
    pub rank: usize,
    /// Most KV blocks that the sequences of a step refer to, shared ones counted as often.
    pub block_tables: usize,
    /// Most distinct adapters, each counted once for every place that it has in a request's list.
    pub adapters: usize,
}

impl StepRoom {
    /// For contexts of some thousand positions for each row; more is made when it is needed.
    pub(super) fn of_rows(rows: usize, entries: usize, rank: usize) -> Self {
        let block_tables = 64 * rows.min(SMALL_ROWS);
        Self { rows, entries: entries.max(1), rank, block_tables, adapters: SLOTS }
    }

    /// Whether steps of `other` have room here, in all that [`crate::Backend::reserve`] is told.
    pub(super) const fn covers(&self, other: &Self) -> bool {
        self.rows >= other.rows && self.entries >= other.entries && self.rank >= other.rank
    }

    pub(super) const fn batch(&self) -> Capacity {
        Capacity { rows: self.rows, entries: self.entries, partials: PARTIALS, tables: self.block_tables }
    }

    pub(super) const fn samples(&self) -> Capacity {
        Capacity { rows: self.rows, entries: self.entries, partials: 0, tables: 0 }
    }

    /// Floats of the results of shrinking.
    pub(super) fn shrunk(&self) -> usize {
        self.entries * PARTS * shrink_stride(self.rank)
    }

    /// Bytes of all that a backend makes for such steps, the table of adapters apart.
    pub(super) fn bytes(&self, floats_per_partial: usize) -> usize {
        RowBlock::bytes(self.batch())
            + RowBlock::bytes(self.samples())
            + granules(self.shrunk() * size_of::<f32>())
            + granules(PARTIALS * floats_per_partial * size_of::<f32>())
            + granules(largest::numbers(self.rows) * size_of::<u32>())
    }
}

/// Bytes of a backend's working memory for such steps, beside activations and the working memory of matrix products.
pub fn step_bytes(room: &StepRoom, layers: usize, heads: usize, head_dim: usize) -> usize {
    let room = StepRoom { entries: room.entries.max(1), ..*room };
    let table = adapter::device_table_bytes(Site::count(layers as u32), room.adapters);
    room.bytes(partial_floats(heads, head_dim)) + table + granules(BETWEEN)
}

/// Bytes of matrices `[rows, columns]` that are packed together, in bf16 or f16.
pub fn matrices_bytes(shapes: &[(usize, usize)]) -> usize {
    let elements: usize = shapes.iter().map(|(rows, columns)| rows.saturating_mul(*columns)).sum();
    granules(elements.saturating_mul(size_of::<u16>()))
}

/// Bytes of a vector.
pub const fn vector_bytes(len: usize) -> usize {
    granules(len * size_of::<f32>())
}

/// Bytes of activations of these widths side by side.
pub fn activation_bytes(rows: usize, widths: &[usize], kind: BufferKind) -> usize {
    buffer::buffer_bytes(rows, widths, kind)
}

/// Bytes of an adapter of a model with so many layers.
pub fn packed_adapter_bytes(sites: &[SiteShape], layers: usize) -> usize {
    adapter::adapter_bytes(sites, Site::count(layers as u32))
}

/// Most blocks that a KV cache can have: kernels count runs of `kv_heads * head_dim` elements in 31 bits.
pub const fn most_kv_blocks(layers: usize, block_size: usize) -> usize {
    i32::MAX as usize / (2 * layers * block_size)
}

/// Bytes of a KV cache.
pub fn kv_cache_bytes(shape: &KvShape) -> usize {
    let sizes = [2, shape.layers, shape.blocks, shape.block_size, shape.kv_heads, shape.head_dim, size_of::<u16>()];
    granules(sizes.into_iter().fold(1, usize::saturating_mul))
}
