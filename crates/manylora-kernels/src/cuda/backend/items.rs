//! Work items of attention: who computes which rows over which partitions of the keys.
//!
//! A decode row's partitions go to blocks of their own, as far as there is room for partial results, so that a long
//! context has many readers; a prompt's rows share each read of a key. Whatever is chosen, the bits are the same.

use crate::batch::StepBatch;

/// Positions of a partition: the kernels' own number.
const PARTITION: usize = 256;
/// (row, head) pairs that a block works on at a time.
const PAIRS: usize = 32;

/// Columns of the items, then of the rows that are reduced, as `kernels/ABI.md` lists them.
#[derive(Debug, Default)]
pub(super) struct AttentionItems {
    columns: [Vec<i32>; 9],
}

impl AttentionItems {
    pub(super) fn columns(&self) -> &[Vec<i32>; 9] {
        &self.columns
    }

    /// Number of items.
    pub(super) fn len(&self) -> usize {
        self.columns[0].len()
    }

    /// Number of rows whose partial results are added up.
    pub(super) fn reduces(&self) -> usize {
        self.columns[6].len()
    }

    /// Makes the list of a step, with at most `partials` partial results, for `group` query heads of a KV head.
    pub(super) fn list(&mut self, batch: &StepBatch, group: usize, partials: usize) {
        self.columns.iter_mut().for_each(Vec::clear);
        let rows_at_once = (PAIRS / group.max(1)).max(1);
        let mut used = 0;
        for (index, sequence) in batch.sequences.iter().enumerate() {
            let (rows, position) = (sequence.rows as usize, sequence.first_position as usize);
            let partitions = position / PARTITION + 1;
            if rows == 1 && partitions > 1 && used + partitions <= partials {
                for partition in 0..partitions {
                    self.push(index, 0, 1, partition, 1, (used + partition) as i32);
                }
                let [.., row, first, count] = &mut self.columns;
                row.push(sequence.first_row as i32);
                first.push(used as i32);
                count.push(partitions as i32);
                used += partitions;
                continue;
            }
            for first in (0..rows).step_by(rows_at_once) {
                let count = rows_at_once.min(rows - first);
                let last = position + first + count - 1;
                self.push(index, first, count, 0, last / PARTITION + 1, -1);
            }
        }
    }

    fn push(&mut self, sequence: usize, first: usize, rows: usize, partition: usize, partitions: usize, partial: i32) {
        let values = [sequence as i32, first as i32, rows as i32, partition as i32, partitions as i32, partial];
        for (column, value) in self.columns.iter_mut().zip(values) {
            column.push(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::AttentionItems;
    use crate::batch::{SequenceRows, StepBatch};

    fn batch(sequences: &[(u32, u32)]) -> StepBatch {
        let mut batch = StepBatch::default();
        let mut first_row = 0;
        for &(rows, first_position) in sequences {
            batch.sequences.push(SequenceRows { first_row, rows, first_position, ..SequenceRows::default() });
            first_row += rows;
        }
        batch
    }

    #[test]
    fn every_row_is_in_one_item_or_in_all_its_partitions() {
        let batch = batch(&[(1, 0), (1, 255), (1, 256), (40, 250), (1, 5000), (1, 700)]);
        for (group, partials) in [(1, 0), (4, 3), (7, 64), (64, 1000)] {
            let mut items = AttentionItems::default();
            items.list(&batch, group, partials);
            let [sequence, first, rows, partition, partitions, partial, reduce_row, reduce_first, reduce_count] =
                items.columns();
            assert_eq!(sequence.len(), items.len());
            let mut slots = Vec::new();
            for (index, wanted) in batch.sequences.iter().enumerate() {
                let mine: Vec<usize> = (0..items.len()).filter(|&item| sequence[item] == index as i32).collect();
                if partial[mine[0]] < 0 {
                    let mut next = 0;
                    for item in mine {
                        assert_eq!((first[item], partition[item], partial[item]), (next, 0, -1));
                        assert!(rows[item] >= 1 && rows[item] as usize <= (32 / group).max(1));
                        next += rows[item];
                        let last = wanted.first_position as i32 + next - 1;
                        assert_eq!(partitions[item], last / 256 + 1);
                    }
                    assert_eq!(next, wanted.rows as i32);
                } else {
                    assert_eq!(mine.len() as u32, wanted.first_position / 256 + 1);
                    let at = reduce_row.iter().position(|&row| row == wanted.first_row as i32).unwrap();
                    assert_eq!((reduce_first[at], reduce_count[at]), (partial[mine[0]], mine.len() as i32));
                    for (number, item) in mine.into_iter().enumerate() {
                        assert_eq!((rows[item], partition[item], partitions[item]), (1, number as i32, 1));
                        slots.push(partial[item]);
                    }
                }
            }
            assert!(slots.len() <= partials);
            assert!(slots.iter().enumerate().all(|(index, &slot)| slot == index as i32), "{slots:?}");
        }
    }
}
