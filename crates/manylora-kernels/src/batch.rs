//! What one step is: rows of tokens, the sequences they belong to, their KV blocks, and the row-adapter plan.
//!
//! All vectors are reused from step to step; a steady decode step fills them without allocating.

/// One entry of the row-adapter plan: `row` gets `scale` x the delta of the adapter in `slot`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterEntry {
    /// Row of the batch.
    pub row: u32,
    /// Index into the backend's adapter table.
    pub slot: u32,
    /// Strength asked for by the request (1 unless said otherwise); multiplied with the site's own scale.
    pub scale: f32,
    /// Position among the row's own entries (composition sums in the request's order, never in load order).
    pub order: u32,
}

/// A run of entries that share `(order, slot)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterSegment {
    /// Index into the adapter table.
    pub slot: u32,
    /// First entry of the run.
    pub first: u32,
    /// Number of entries.
    pub count: u32,
}

/// The sparse list of (row, adapter, scale), sorted by `(order, slot, row)`, with its CSR index by row.
///
/// Kernels consume this and nothing else: no entry means base. Entries of scale 0 are dropped before they get here.
#[derive(Clone, Debug, Default)]
pub struct RowAdapterPlan {
    entries: Vec<AdapterEntry>,
    segments: Vec<AdapterSegment>,
    row_first: Vec<u32>,
    row_entries: Vec<u32>,
}

impl RowAdapterPlan {
    /// An empty plan with room for `rows` rows and `entries` entries, so that filling it does not allocate.
    pub fn with_capacity(rows: usize, entries: usize) -> Self {
        Self {
            entries: Vec::with_capacity(entries),
            segments: Vec::with_capacity(entries),
            row_first: Vec::with_capacity(rows + 1),
            row_entries: Vec::with_capacity(entries),
        }
    }

    /// Forgets all entries.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.segments.clear();
        self.row_first.clear();
        self.row_entries.clear();
    }

    /// Adds an entry. A row's entries must be pushed in the request's order; `order` is set by [`Self::finish`].
    pub fn push(&mut self, row: u32, slot: u32, scale: f32) {
        self.entries.push(AdapterEntry { row, slot, scale, order: 0 });
    }

    /// Sorts the entries and builds segments and the row index. Rows are `0..rows`.
    pub fn finish(&mut self, rows: usize) {
        // Order within a row = how many entries of that row came before. Entries of one row are pushed together.
        let mut previous: Option<(u32, u32)> = None;
        for entry in &mut self.entries {
            entry.order = match previous {
                Some((row, order)) if row == entry.row => order + 1,
                _ => 0,
            };
            previous = Some((entry.row, entry.order));
        }
        self.entries.sort_unstable_by_key(|entry| (entry.order, entry.slot, entry.row));
        self.segments.clear();
        for (index, entry) in self.entries.iter().enumerate() {
            match self.segments.last_mut() {
                Some(segment)
                    if segment.slot == entry.slot && self.entries[segment.first as usize].order == entry.order =>
                {
                    segment.count += 1;
                }
                _ => self.segments.push(AdapterSegment { slot: entry.slot, first: index as u32, count: 1 }),
            }
        }
        // CSR by row: counting sort; entries are visited by rising order, so each row's list is in request order.
        self.row_first.clear();
        self.row_first.resize(rows + 1, 0);
        for entry in &self.entries {
            self.row_first[entry.row as usize + 1] += 1;
        }
        for row in 0..rows {
            self.row_first[row + 1] += self.row_first[row];
        }
        self.row_entries.clear();
        self.row_entries.resize(self.entries.len(), u32::MAX);
        for (index, entry) in self.entries.iter().enumerate() {
            self.row_entries[(self.row_first[entry.row as usize] + entry.order) as usize] = index as u32;
        }
    }

    /// Whether every row is base.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The entries, sorted by `(order, slot, row)`.
    pub fn entries(&self) -> &[AdapterEntry] {
        &self.entries
    }

    /// Runs of entries that share an adapter. Segments of a later order follow those of an earlier one.
    pub fn segments(&self) -> &[AdapterSegment] {
        &self.segments
    }

    /// Where each row's entries start in the second list (and where the last one's end), and the entries of all rows, by
    /// their index.
    pub fn row_index(&self) -> (&[u32], &[u32]) {
        (&self.row_first, &self.row_entries)
    }

    /// Indices into [`Self::entries`] of one row, in the request's order.
    pub fn row(&self, row: usize) -> &[u32] {
        &self.row_entries[self.row_first[row] as usize..self.row_first[row + 1] as usize]
    }
}

/// The rows of one sequence in a step, and where its KV blocks are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceRows {
    /// First row of the sequence in this batch.
    pub first_row: u32,
    /// Number of rows: 1 when decoding, a chunk of the prompt when prefilling.
    pub rows: u32,
    /// Position in the sequence of the first row (= tokens already in the KV cache).
    pub first_position: u32,
    /// Start of the sequence's block table in [`StepBatch::block_tables`].
    pub table_first: u32,
    /// Length of its block table.
    pub table_len: u32,
}

/// One step, in the form kernels want it.
#[derive(Clone, Debug, Default)]
pub struct StepBatch {
    /// Token id of each row.
    pub tokens: Vec<u32>,
    /// Position of each row in its sequence.
    pub positions: Vec<u32>,
    /// KV slot that each row writes: block id x block size + offset.
    pub slot_mapping: Vec<u32>,
    /// The sequences, in row order; together they cover every row exactly once.
    pub sequences: Vec<SequenceRows>,
    /// Block tables of all sequences, one after the other.
    pub block_tables: Vec<u32>,
    /// Rows whose logits are wanted, rising.
    pub sample_rows: Vec<u32>,
    /// Which adapters each row gets.
    pub adapters: RowAdapterPlan,
}

impl StepBatch {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Empties the batch, keeping its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slot_mapping.clear();
        self.sequences.clear();
        self.block_tables.clear();
        self.sample_rows.clear();
        self.adapters.clear();
    }
}
