//! What a step takes on a card: activations in parts of their own, what steps are told ([`step_block_bytes`]), what kernels
//! hand to one another, and the table of adapters.

use super::super::ModelDimensions;
use super::super::working::{ActivationRole, StepLimits};
use super::{GRANULE, SINGLE, granules, sites};

/// Adapters that one request can compose on a card: what a step has working memory for.
pub const MOST_COMPOSED: usize = 8;
/// Columns of activations are padded to this, so that rows start at multiples of 16 bytes.
const COLUMN_PADDING: u64 = 8;
/// Parts of one linear map: q, k and v.
const PARTS: u64 = 3;
/// Partial results of attention that there is room for.
const PARTIALS: u64 = 1024;
/// Numbers in the head of a step's block.
const HEADER: u64 = 16;
/// Boundary on which each section of a step's block starts.
const SECTION_ALIGNMENT: u64 = 16;
/// Numbers that what is found among logits has room for at least.
const LISTED: u64 = 1 << 16;
/// Bytes of a site in each of the four tables of adapters.
const TABLE_COLUMNS: [u64; 4] = [8, 8, 4, 4];
/// Least distance of the rows of shrink results.
const SHRINK_STRIDE: u64 = 128;
/// Between adapters and KV blocks, which grow towards each other: what moving one needs.
const BETWEEN: u64 = 1 << 20;
/// KV blocks are addressed in runs, which kernels count in 31 bits.
const MOST_RUNS: usize = i32::MAX as usize;

/// What steps have room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRoom {
    /// Rows.
    pub rows: usize,
    /// Entries of the row-adapter plan.
    pub entries: usize,
    /// Largest rank.
    pub rank: usize,
    /// KV blocks that the sequences of a step refer to, shared ones counted as often.
    pub block_tables: usize,
    /// Distinct adapters, each counted once for every place that it has in a request's list.
    pub adapters: usize,
}

impl StepRoom {
    /// For steps of these limits with at most so many sequences and, if that is capped, distinct adapters.
    pub fn new(limits: &StepLimits, max_num_seqs: usize, max_loras: Option<usize>) -> Self {
        let sequences = max_num_seqs.min(limits.max_rows);
        let distinct = sequences.min(max_loras.unwrap_or(usize::MAX));
        Self {
            rows: limits.max_rows,
            entries: limits.max_entries,
            rank: limits.max_rank,
            block_tables: sequences * limits.max_position.div_ceil(limits.block_size),
            adapters: if limits.max_entries == 0 { 1 } else { distinct * MOST_COMPOSED },
        }
    }
}

/// Most KV blocks that a card can address.
pub const fn most_kv_blocks(layers: u64, block_size: usize) -> usize {
    MOST_RUNS / (2 * layers as usize * block_size)
}

/// Working memory of matrix products that the maker of cuBLASLt advises, by the card's compute capability.
pub const fn product_workspace_bytes(capability_major: u32) -> u64 {
    if capability_major >= 9 { 32 << 20 } else { 4 << 20 }
}

/// Bytes of the block that tells a step of so many rows and entries what to do.
const fn step_block_bytes(rows: u64, entries: u64, partials: u64, tables: u64) -> u64 {
    const fn sections(count: u64, len: u64) -> u64 {
        count * (4 * len).next_multiple_of(SECTION_ALIGNMENT)
    }
    // Tokens, positions, slots; three of tiles and three of entries; the index by row; work items of attention; sequences
    // and reductions; block tables.
    let bytes = sections(1, HEADER)
        + sections(3, rows)
        + sections(6, entries)
        + sections(1, rows + 1)
        + sections(1, entries)
        + sections(6, rows + partials)
        + sections(6, rows)
        + sections(1, tables);
    granules(bytes)
}

impl ModelDimensions {
    /// Bytes of what kernels need for steps of this room.
    pub fn card_step_bytes(&self, room: &StepRoom) -> u64 {
        let (rows, entries, rank) = (room.rows as u64, room.entries.max(1) as u64, room.rank as u64);
        let shrunk = entries * PARTS * rank.next_multiple_of(16).max(SHRINK_STRIDE);
        let partials = PARTIALS * self.heads * (self.head_dim + 4);
        let sites = sites(self.layers);
        let columns = TABLE_COLUMNS.iter().map(|width| granules(room.adapters as u64 * sites * width));
        let row = granules((sites * super::TABLE_ENTRY).next_multiple_of(super::FACTOR_ALIGNMENT));
        step_block_bytes(rows, entries, PARTIALS, room.block_tables as u64)
            + step_block_bytes(rows, entries, 0, 0)
            + granules(SINGLE * shrunk)
            + granules(SINGLE * partials)
            + granules(SINGLE * rows.max(LISTED))
            + columns.sum::<u64>()
            + row
            + granules(BETWEEN)
    }

    /// Bytes of all working memory: activations, rotary tables, `workspace` of matrix products, and the kernels' own.
    pub fn card_working_bytes(&self, limits: &StepLimits, room: &StepRoom, workspace: Option<u64>) -> u64 {
        let groups = self.activations(limits);
        let activations = groups.iter().map(|(rows, widths, role)| {
            let columns: u64 = widths.iter().map(|width| width.next_multiple_of(COLUMN_PADDING)).sum();
            let number = if *role == ActivationRole::Sums { SINGLE } else { super::HALF };
            granules(rows * columns * number)
        });
        activations.sum::<u64>()
            + 2 * granules(SINGLE * self.rotary_table_len(limits))
            + workspace.map_or(0, granules)
            + self.card_step_bytes(room)
    }
}

/// Whole granules, rounded down.
pub const fn whole_granules(bytes: u64) -> u64 {
    bytes / GRANULE * GRANULE
}
