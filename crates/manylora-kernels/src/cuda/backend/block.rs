//! What a step tells the kernels: one block at a fixed address, in the form that `kernels/ABI.md` describes.
//!
//! Its sections lie in one of two ways: for small steps close together, so that little is sent, and for large ones with
//! room for all that was reserved. Block tables come last, and only as much of them as is used is sent.

use super::super::arena::Arena;
use super::super::arguments::HeaderField;
use super::super::error::CudaError;
use super::super::memory::{DeviceElement, DevicePointer};
use super::super::staging::{Section, StepBlock, StepLayout, StepWriter};
use super::super::stream::Stream;
use super::items::AttentionItems;
use super::kv::Positions;
use crate::batch::{RowAdapterPlan, StepBatch};

/// Entries of a tile.
pub(super) const TILE: usize = 32;

/// How much a block has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Capacity {
    pub(super) rows: usize,
    pub(super) entries: usize,
    /// Partial results of attention.
    pub(super) partials: usize,
    pub(super) tables: usize,
}

impl Capacity {
    pub(super) fn covers(&self, other: &Self) -> bool {
        self.rows >= other.rows
            && self.entries >= other.entries
            && self.partials >= other.partials
            && self.tables >= other.tables
    }

    pub(super) fn largest(self, other: &Self) -> Self {
        Self {
            rows: self.rows.max(other.rows),
            entries: self.entries.max(other.entries),
            partials: self.partials.max(other.partials),
            tables: self.tables.max(other.tables),
        }
    }
}

/// Where everything is in the block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sections {
    pub(super) capacity: Capacity,
    pub(super) header: Section<i32>,
    pub(super) tokens: Section<u32>,
    pub(super) positions: Section<u32>,
    pub(super) slot_mapping: Section<u32>,
    pub(super) tile_slot: Section<i32>,
    pub(super) tile_first: Section<i32>,
    pub(super) tile_count: Section<i32>,
    pub(super) entry_row: Section<i32>,
    pub(super) entry_slot: Section<i32>,
    pub(super) entry_scale: Section<f32>,
    pub(super) row_first: Section<i32>,
    pub(super) row_entries: Section<i32>,
    /// Sequence, first row, rows, first partition, partitions, first partial result.
    pub(super) items: [Section<i32>; 6],
    /// First row, its position, start of the block table.
    pub(super) sequences: [Section<i32>; 3],
    /// Row, first partial result, their number.
    pub(super) reduces: [Section<i32>; 3],
    pub(super) tables: Section<u32>,
}

impl Sections {
    pub(super) fn new(capacity: Capacity) -> (Self, StepLayout) {
        let Capacity { rows, entries, partials, tables } = capacity;
        let items = rows + partials;
        let mut layout = StepLayout::new();
        let sections = Self {
            capacity,
            header: layout.section(HeaderField::COUNT),
            tokens: layout.section(rows),
            positions: layout.section(rows),
            slot_mapping: layout.section(rows),
            tile_slot: layout.section(entries),
            tile_first: layout.section(entries),
            tile_count: layout.section(entries),
            entry_row: layout.section(entries),
            entry_slot: layout.section(entries),
            entry_scale: layout.section(entries),
            row_first: layout.section(rows + 1),
            row_entries: layout.section(entries),
            items: std::array::from_fn(|_| layout.section(items)),
            sequences: std::array::from_fn(|_| layout.section(rows)),
            reduces: std::array::from_fn(|_| layout.section(rows)),
            tables: layout.section(tables),
        };
        (sections, layout)
    }
}

/// Steps of up to so many rows are small.
pub(super) const SMALL_ROWS: usize = 256;
const SMALL_ENTRIES: usize = 2 * SMALL_ROWS;

/// The block of the step's rows, or of the rows whose logits are computed, and what the host has to know of it.
#[derive(Debug)]
pub(super) struct RowBlock {
    block: StepBlock,
    small: Sections,
    large: Sections,
    /// The step's own: one of the two.
    pub(super) sections: Sections,
    pub(super) rows: usize,
    pub(super) tiles: usize,
    pub(super) first_tiles: usize,
    pub(super) items: usize,
    pub(super) reduces: usize,
    /// Kinds of sites that the step's adapters touch.
    pub(super) touched: u16,
}

impl RowBlock {
    pub(super) fn new(arena: &Arena, capacity: Capacity) -> Result<Self, CudaError> {
        let (small, _) = Sections::new(Self::small_capacity(capacity));
        let (large, layout) = Sections::new(capacity);
        let block = StepBlock::new(arena, layout)?;
        Ok(Self {
            block,
            small,
            large,
            sections: large,
            rows: 0,
            tiles: 0,
            first_tiles: 0,
            items: 0,
            reduces: 0,
            touched: 0,
        })
    }

    fn small_capacity(capacity: Capacity) -> Capacity {
        Capacity { rows: capacity.rows.min(SMALL_ROWS), entries: capacity.entries.min(SMALL_ENTRIES), ..capacity }
    }

    /// Bytes of a block on the card.
    pub(super) fn bytes(capacity: Capacity) -> usize {
        super::super::free_list::granules(Sections::new(capacity).1.bytes())
    }

    pub(super) const fn capacity(&self) -> &Capacity {
        &self.large.capacity
    }

    pub(super) fn is_small(&self) -> bool {
        self.sections.capacity == self.small.capacity
    }

    pub(super) fn pointer<T: DeviceElement>(&self, section: Section<T>) -> DevicePointer<T> {
        self.block.pointer(section)
    }

    /// Fills and sends the block of a step. It has the capacity. Without a cache nothing can refer to one.
    pub(super) fn send_step(
        &mut self,
        stream: &Stream,
        batch: &StepBatch,
        items: &AttentionItems,
        (s_stride, places): (usize, &[u32]),
        cache: Option<&Positions>,
    ) -> Result<(), CudaError> {
        let rows = batch.rows();
        self.choose(rows, batch.adapters.entries().len());
        (self.items, self.reduces) = (items.len(), items.reduces());
        let sections = self.sections;
        let mut writer = self.block.begin()?;
        copy(&mut writer, sections.tokens, batch.tokens.iter().copied())?;
        copy(&mut writer, sections.positions, batch.positions.iter().copied())?;
        if let Some(cache) = cache {
            copy(&mut writer, sections.slot_mapping, batch.slot_mapping.iter().map(|&slot| cache.slot(slot)))?;
            copy(&mut writer, sections.tables, batch.block_tables.iter().map(|&block| cache.block(block)))?;
        }
        let sequences = &batch.sequences;
        copy(&mut writer, sections.sequences[0], sequences.iter().map(|sequence| sequence.first_row as i32))?;
        copy(&mut writer, sections.sequences[1], sequences.iter().map(|sequence| sequence.first_position as i32))?;
        copy(&mut writer, sections.sequences[2], sequences.iter().map(|sequence| sequence.table_first as i32))?;
        for (section, column) in sections.items.iter().chain(&sections.reduces).zip(items.columns()) {
            copy(&mut writer, *section, column.iter().copied())?;
        }
        (self.tiles, self.first_tiles) = write_plan(&mut writer, &sections, &batch.adapters, places)?;
        let header = writer.section(sections.header)?;
        header.fill(0);
        header[HeaderField::Rows as usize] = rows as i32;
        header[HeaderField::Entries as usize] = batch.adapters.entries().len() as i32;
        header[HeaderField::Segments as usize] = batch.adapters.segments().len() as i32;
        header[HeaderField::Sequences as usize] = sequences.len() as i32;
        header[HeaderField::SampleRows as usize] = batch.sample_rows.len() as i32;
        header[HeaderField::Tiles as usize] = self.tiles as i32;
        header[HeaderField::FirstTiles as usize] = self.first_tiles as i32;
        header[HeaderField::AttentionItems as usize] = self.items as i32;
        header[HeaderField::ShrinkStride as usize] = s_stride as i32;
        header[HeaderField::ReduceRows as usize] = self.reduces as i32;
        writer.send_used(stream, sections.tables, batch.block_tables.len())
    }

    /// Fills and sends the block of rows whose logits are computed: their numbers stand where tokens would.
    pub(super) fn send_samples(
        &mut self,
        stream: &Stream,
        rows: &[u32],
        plan: &RowAdapterPlan,
        (s_stride, places): (usize, &[u32]),
    ) -> Result<(), CudaError> {
        self.choose(rows.len(), plan.entries().len());
        let sections = self.sections;
        let mut writer = self.block.begin()?;
        copy(&mut writer, sections.tokens, rows.iter().copied())?;
        (self.tiles, self.first_tiles) = write_plan(&mut writer, &sections, plan, places)?;
        let header = writer.section(sections.header)?;
        header.fill(0);
        header[HeaderField::Rows as usize] = rows.len() as i32;
        header[HeaderField::SampleRows as usize] = rows.len() as i32;
        header[HeaderField::Entries as usize] = plan.entries().len() as i32;
        header[HeaderField::Segments as usize] = plan.segments().len() as i32;
        header[HeaderField::Tiles as usize] = self.tiles as i32;
        header[HeaderField::FirstTiles as usize] = self.first_tiles as i32;
        header[HeaderField::ShrinkStride as usize] = s_stride as i32;
        writer.send_used(stream, sections.row_entries, plan.entries().len())
    }

    fn choose(&mut self, rows: usize, entries: usize) {
        let fits = rows <= self.small.capacity.rows && entries <= self.small.capacity.entries;
        self.sections = if fits { self.small } else { self.large };
        self.rows = rows;
    }
}

fn copy<T: DeviceElement>(
    writer: &mut StepWriter<'_>,
    section: Section<T>,
    values: impl ExactSizeIterator<Item = T>,
) -> Result<(), CudaError> {
    let (count, len) = (values.len(), section.len());
    if count > len {
        return Err(CudaError::Range { what: "a section of step data", len, start: 0, end: count });
    }
    for (place, value) in writer.section(section)?.iter_mut().zip(values) {
        *place = value;
    }
    Ok(())
}

/// Returns the number of tiles, and of those of order 0. `places`: the row of the table that each slot's adapter is in.
fn write_plan(
    writer: &mut StepWriter<'_>,
    sections: &Sections,
    plan: &RowAdapterPlan,
    places: &[u32],
) -> Result<(usize, usize), CudaError> {
    if plan.is_empty() {
        return Ok((0, 0));
    }
    let entries = plan.entries();
    copy(writer, sections.entry_row, entries.iter().map(|entry| entry.row as i32))?;
    copy(writer, sections.entry_slot, entries.iter().map(|entry| places[entry.slot as usize] as i32))?;
    copy(writer, sections.entry_scale, entries.iter().map(|entry| entry.scale))?;
    let (row_first, row_entries) = plan.row_index();
    copy(writer, sections.row_first, row_first.iter().map(|&first| first as i32))?;
    copy(writer, sections.row_entries, row_entries.iter().map(|&entry| entry as i32))?;
    // There are never more tiles than entries, which were checked above.
    let (mut tiles, mut first_tiles) = (0, 0);
    for segment in plan.segments() {
        let (first, count) = (segment.first as usize, segment.count as usize);
        for start in (0..count).step_by(TILE) {
            writer.section(sections.tile_slot)?[tiles] = places[segment.slot as usize] as i32;
            writer.section(sections.tile_first)?[tiles] = (first + start) as i32;
            writer.section(sections.tile_count)?[tiles] = (count - start).min(TILE) as i32;
            tiles += 1;
            if entries[first].order == 0 {
                first_tiles = tiles;
            }
        }
    }
    Ok((tiles, first_tiles))
}
