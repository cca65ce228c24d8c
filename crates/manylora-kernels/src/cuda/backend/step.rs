//! What changes from step to step: the step's blocks, the table of adapters, working memory, and which stream operations
//! are queued on.

use std::sync::Arc;

use super::super::arena::{Arena, DeviceSlice, Holding};
use super::super::error::CudaError;
use super::super::stream::Stream;
use super::adapter::{CudaAdapter, DeviceTable};
use super::block::{Capacity, RowBlock, TILE};
use super::items::AttentionItems;
use super::kv::Positions;
use super::largest::{Found, numbers};
use super::product::Products;
use super::room::StepRoom;
use crate::backend::{AdapterTable, RowSet};
use crate::batch::{RowAdapterPlan, StepBatch};

/// Least stride of shrink results: what ranks up to 16 use with all their splits.
const SHRINK_STRIDE: usize = 128;
/// Fused parts of one linear call.
pub(super) const PARTS: usize = 3;
/// Rows that the table of adapters has at first, unless more is asked for.
pub(super) const SLOTS: usize = 64;

/// Partial results of attention that there is room for: enough blocks for the largest cards.
pub(super) const PARTIALS: usize = 1024;

/// Floats of a partial result.
pub(super) const fn partial_floats(heads: usize, head_dim: usize) -> usize {
    heads * (head_dim + 4)
}

/// Rows that products and grids are made for, so that few shapes occur: these, not the step's own, are what a recorded
/// step has frozen.
pub(super) fn bucket(rows: usize) -> usize {
    match rows {
        0..=2 => rows.max(1),
        3..=64 => rows.next_multiple_of(if rows <= 8 {
            4
        } else if rows <= 32 {
            8
        } else {
            16
        }),
        // Eight steps from one power of two to the next.
        _ => rows.next_multiple_of(rows.next_power_of_two() / 16),
    }
}

/// Stride of shrink results where the largest rank is this.
pub(super) fn shrink_stride(rank: usize) -> usize {
    rank.next_multiple_of(16).max(SHRINK_STRIDE)
}

/// See the module.
#[derive(Debug)]
pub(super) struct StepState {
    /// Where operations are queued: the compute stream, or one that records.
    pub(super) stream: Arc<Stream>,
    /// The first failure of an operation since the step began. Operations after it do nothing.
    pub(super) error: Option<CudaError>,
    pub(super) products: Products,
    pub(super) batch: RowBlock,
    pub(super) samples: RowBlock,
    pub(super) table: DeviceTable,
    pub(super) shrunk: DeviceSlice<f32>,
    pub(super) partials: DeviceSlice<f32>,
    pub(super) found: Found,
    /// Why no step can run any more: adapters or KV blocks were lost while they were moved.
    pub(super) broken: Option<CudaError>,
    /// Recorded steps have addresses of memory that was replaced.
    pub(super) moved: bool,
    /// Where the KV cache's blocks lie, once there is one.
    pub(super) positions: Option<Positions>,
    items: AttentionItems,
    pub(super) group: usize,
    sites: usize,
    floats_per_partial: usize,
    /// What was asked for at the start.
    room: Option<StepRoom>,
}

impl StepState {
    pub(super) fn new(
        arena: &Arena,
        stream: &Arc<Stream>,
        products: Products,
        sites: usize,
        (heads, kv_heads, head_dim): (usize, usize, usize),
        wanted: Option<StepRoom>,
    ) -> Result<Self, CudaError> {
        let floats_per_partial = partial_floats(heads, head_dim);
        // Room that is known from the start is made in one go, so that nothing is replaced and no holes are left.
        let room = wanted.unwrap_or_else(|| StepRoom::of_rows(1, 1, 1));
        let batch = if wanted.is_some() { room.batch() } else { Capacity { partials: 0, ..room.batch() } };
        let (shrunk, partials, found) = match wanted {
            Some(room) => (room.shrunk(), PARTIALS * floats_per_partial, numbers(room.rows)),
            None => (1, 1, 1),
        };
        Ok(Self {
            stream: Arc::clone(stream),
            error: None,
            products,
            batch: RowBlock::new(arena, batch)?,
            samples: RowBlock::new(arena, room.samples())?,
            table: DeviceTable::new(arena, stream, sites, room.adapters)?,
            shrunk: arena.allocate(Holding::Buffers, "results of shrinking", shrunk)?,
            partials: arena.allocate(Holding::Buffers, "partial results of attention", partials)?,
            found: Found::new(arena, found)?,
            broken: None,
            moved: false,
            positions: None,
            items: AttentionItems::default(),
            group: heads / kv_heads.max(1),
            sites,
            floats_per_partial,
            room: wanted,
        })
    }

    pub(super) const fn floats_per_partial(&self) -> usize {
        self.floats_per_partial
    }

    /// Makes room for such steps, where there is less.
    pub(super) fn reserve(&mut self, arena: &Arena, room: StepRoom) -> Result<(), CudaError> {
        if self.room.is_some_and(|had| had.covers(&room)) {
            return Ok(());
        }
        self.grow_block(arena, RowSet::Batch, room.batch())?;
        self.grow_block(arena, RowSet::Samples, room.samples())?;
        self.grow_shrunk(arena, room.shrunk())?;
        self.found.grow(arena, &self.stream, numbers(room.rows))
    }

    fn grow_block(&mut self, arena: &Arena, set: RowSet, wanted: Capacity) -> Result<(), CudaError> {
        let block = match set {
            RowSet::Batch => &mut self.batch,
            RowSet::Samples => &mut self.samples,
        };
        if block.capacity().covers(&wanted) {
            return Ok(());
        }
        let capacity = wanted.largest(block.capacity());
        // What is queued may still read the old one.
        self.stream.synchronize()?;
        *block = RowBlock::new(arena, capacity)?;
        self.moved = true;
        let floats = capacity.partials * self.floats_per_partial;
        if set == RowSet::Batch && self.partials.len() < floats {
            self.partials = arena.allocate(Holding::Buffers, "partial results of attention", floats)?;
        }
        Ok(())
    }

    fn grow_shrunk(&mut self, arena: &Arena, floats: usize) -> Result<(), CudaError> {
        if self.shrunk.len() < floats {
            self.stream.synchronize()?;
            self.shrunk = arena.allocate(Holding::Buffers, "results of shrinking", floats)?;
            self.moved = true;
        }
        Ok(())
    }

    /// Whether adapters and KV blocks are where they are said to be: the error, if moving them has failed.
    pub(super) fn whole(&self) -> Result<(), CudaError> {
        self.broken.as_ref().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// See [`crate::Backend::begin_step`].
    pub(super) fn begin_step(
        &mut self,
        arena: &Arena,
        batch: &StepBatch,
        adapters: &AdapterTable<CudaAdapter>,
    ) -> Result<(), CudaError> {
        self.error = None;
        self.whole()?;
        let wanted = Capacity {
            rows: batch.rows(),
            entries: batch.adapters.entries().len(),
            partials: 0,
            tables: batch.block_tables.len(),
        };
        self.grow_block(arena, RowSet::Batch, doubled(wanted, self.batch.capacity()))?;
        let (touched, s_stride) = self.provide(arena, &batch.adapters, adapters)?;
        self.items.list(batch, self.group, self.batch.capacity().partials);
        self.batch.touched = touched;
        self.batch.send_step(&self.stream, batch, &self.items, (s_stride, self.table.places()), self.positions.as_ref())
    }

    /// See [`crate::Backend::begin_samples`].
    pub(super) fn begin_samples(
        &mut self,
        arena: &Arena,
        rows: &[u32],
        plan: &RowAdapterPlan,
        adapters: &AdapterTable<CudaAdapter>,
    ) -> Result<(), CudaError> {
        self.error = None;
        self.whole()?;
        let wanted = Capacity { rows: rows.len(), entries: plan.entries().len(), partials: 0, tables: 0 };
        self.grow_block(arena, RowSet::Samples, doubled(wanted, self.samples.capacity()))?;
        let (touched, s_stride) = self.provide(arena, plan, adapters)?;
        self.samples.touched = touched;
        self.samples.send_samples(&self.stream, rows, plan, (s_stride, self.table.places()))
    }

    /// Puts the plan's adapters into the table, makes room for their shrink results, and says what they touch.
    fn provide(
        &mut self,
        arena: &Arena,
        plan: &RowAdapterPlan,
        adapters: &AdapterTable<CudaAdapter>,
    ) -> Result<(u16, usize), CudaError> {
        let (mut touched, mut rank) = (0, 0);
        let most = plan.segments().len();
        if most > self.table.rows() {
            self.stream.synchronize()?;
            self.table = DeviceTable::new(arena, &self.stream, self.sites, most.next_power_of_two())?;
            self.moved = true;
        }
        self.table.begin();
        for segment in plan.segments() {
            self.table.provide(&self.stream, segment.slot, adapters)?;
            if let Some(adapter) = adapters.get(segment.slot) {
                touched |= adapter.touched;
                rank = rank.max(adapter.largest_rank);
            }
        }
        let s_stride = shrink_stride(rank);
        self.grow_shrunk(arena, plan.entries().len() * PARTS * s_stride)?;
        Ok((touched, s_stride))
    }

    pub(super) const fn rows(&self, set: RowSet) -> &RowBlock {
        match set {
            RowSet::Batch => &self.batch,
            RowSet::Samples => &self.samples,
        }
    }
}

/// Twice of what is too little, so that growing is rare.
fn doubled(wanted: Capacity, has: &Capacity) -> Capacity {
    let double = |wanted: usize, has: usize| if wanted > has { wanted.next_power_of_two() } else { wanted };
    Capacity {
        rows: wanted.rows,
        entries: double(wanted.entries, has.entries),
        partials: wanted.partials,
        tables: double(wanted.tables, has.tables),
    }
}

/// Blocks of y of the LoRA kernels: tiles, rounded up so that recorded steps serve many plans.
pub(super) fn tile_grid(tiles: usize) -> usize {
    let rounded = if tiles <= 2 * TILE { tiles.next_power_of_two() } else { tiles.next_multiple_of(TILE) };
    rounded.clamp(1, 65_535)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_their_rows_and_are_few() {
        let mut distinct = std::collections::BTreeSet::new();
        for rows in 1..=4096 {
            let bucket = bucket(rows);
            assert!(bucket >= rows && bucket <= rows.max(8) * 5 / 4 + 8, "{rows} {bucket}");
            distinct.insert(bucket);
        }
        assert!(distinct.len() < 70, "{}", distinct.len());
        assert_eq!([1, 2, 3, 8, 9, 33, 64, 65].map(bucket), [1, 2, 4, 8, 16, 48, 64, 72]);
    }
}
