//! Lowers a `core::StepPlan` to a `kernels::StepBatch`: the one place that knows both.

use manylora_core::StepPlan;
use manylora_kernels::{RowAdapterPlan, SequenceRows, StepBatch};

/// A row whose logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SampleRow {
    /// Index of its sequence in the plan.
    pub(crate) sequence: u32,
    /// Position of the row in its sequence.
    pub(crate) position: u32,
    /// Whether the next token is sampled from it.
    pub(crate) samples: bool,
}

/// A batch and what its sample rows mean; reused from step to step.
#[derive(Debug)]
pub(crate) struct LoweredStep {
    pub(crate) batch: StepBatch,
    pub(crate) sample_rows: Vec<SampleRow>,
    block_size: u32,
}

impl LoweredStep {
    pub(crate) fn new(max_rows: usize, max_sequences: usize, max_blocks: usize, block_size: usize) -> Self {
        let batch = StepBatch {
            tokens: Vec::with_capacity(max_rows),
            positions: Vec::with_capacity(max_rows),
            slot_mapping: Vec::with_capacity(max_rows),
            sequences: Vec::with_capacity(max_sequences),
            block_tables: Vec::with_capacity(max_blocks),
            sample_rows: Vec::with_capacity(max_rows),
            adapters: RowAdapterPlan::with_capacity(max_rows, max_rows),
        };
        Self { batch, sample_rows: Vec::with_capacity(max_rows), block_size: block_size as u32 }
    }

    /// Fills the batch from a plan.
    pub(crate) fn lower(&mut self, plan: &StepPlan) {
        let batch = &mut self.batch;
        batch.clear();
        self.sample_rows.clear();
        batch.tokens.extend_from_slice(&plan.tokens);
        for (index, planned) in plan.sequences.iter().enumerate() {
            let first_row = planned.first_token;
            let table = &plan.blocks[planned.first_block as usize..(planned.first_block + planned.blocks) as usize];
            let adapters =
                &plan.adapters[planned.first_adapter as usize..(planned.first_adapter + planned.adapters) as usize];
            batch.sequences.push(SequenceRows {
                first_row,
                rows: planned.rows,
                first_position: planned.first_position,
                table_first: batch.block_tables.len() as u32,
                table_len: planned.blocks,
            });
            batch.block_tables.extend(table.iter().map(|block| block.0));
            for offset in 0..planned.rows {
                let position = planned.first_position + offset;
                let row = first_row + offset;
                batch.positions.push(position);
                let block = table[(position / self.block_size) as usize].0;
                batch.slot_mapping.push(block * self.block_size + position % self.block_size);
                for adapter in adapters.iter().filter(|adapter| position >= adapter.first_active) {
                    batch.adapters.push(row, adapter.slot.0, adapter.scale);
                }
                let last = offset + 1 == planned.rows;
                if planned.all_logits || (last && planned.samples) {
                    batch.sample_rows.push(row);
                    let samples = last && planned.samples;
                    self.sample_rows.push(SampleRow { sequence: index as u32, position, samples });
                }
            }
        }
        batch.adapters.finish(batch.tokens.len());
    }
}

#[cfg(test)]
mod tests {
    use manylora_core::{AdapterSlot, BlockId, PlannedAdapter, PlannedSequence, RequestId};

    use super::*;

    #[test]
    fn rows_slots_and_entries_follow_the_plan() {
        let planned = |first_token, rows, first_position, first_block, blocks, first_adapter, adapters, samples| {
            PlannedSequence {
                request: RequestId(u64::from(first_token)),
                first_token,
                rows,
                first_position,
                first_block,
                blocks,
                first_adapter,
                adapters,
                samples,
                all_logits: false,
                cached_tokens: 0,
                preemptions: 0,
            }
        };
        let plan = StepPlan {
            step: 1,
            // A chunk of a prompt at positions 3..6 that does not sample yet, then a decode row at position 4.
            sequences: vec![planned(0, 3, 3, 0, 2, 0, 1, false), planned(3, 1, 4, 2, 2, 1, 2, true)],
            tokens: vec![10, 11, 12, 13],
            blocks: vec![BlockId(7), BlockId(2), BlockId(9), BlockId(1)],
            adapters: vec![
                PlannedAdapter { slot: AdapterSlot(5), scale: 1.0, first_active: 4 },
                PlannedAdapter { slot: AdapterSlot(6), scale: 0.5, first_active: 0 },
                PlannedAdapter { slot: AdapterSlot(5), scale: 2.0, first_active: 0 },
            ],
        };
        let mut lowered = LoweredStep::new(8, 4, 8, 4);
        lowered.lower(&plan);
        let batch = &lowered.batch;
        assert_eq!(batch.positions, [3, 4, 5, 4]);
        // Positions 3 | 4, 5 in blocks 7 | 2 and position 4 in the second block of the other sequence.
        assert_eq!(batch.slot_mapping, [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 4]);
        assert_eq!(batch.block_tables, [7, 2, 9, 1]);
        assert_eq!(batch.sample_rows, [3]);
        assert_eq!(lowered.sample_rows, [SampleRow { sequence: 1, position: 4, samples: true }]);
        // Row 0 is before the adapter's first active position; row 3 has both, in the request's order.
        assert_eq!(batch.adapters.row(0).len(), 0);
        let order: Vec<(u32, f32)> = batch
            .adapters
            .row(3)
            .iter()
            .map(|&entry| batch.adapters.entries()[entry as usize])
            .map(|entry| (entry.slot, entry.scale))
            .collect();
        assert_eq!(order, [(6, 0.5), (5, 2.0)]);
    }
}
