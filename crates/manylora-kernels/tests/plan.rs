//! The row-adapter plan: sorted, segmented and indexed, whatever was pushed.

use manylora_kernels::RowAdapterPlan;
use proptest::prelude::*;

fn rows() -> impl Strategy<Value = Vec<Vec<(u32, f32)>>> {
    prop::collection::vec(prop::collection::vec((0u32..6, -2.0f32..2.0), 0..4), 0..40)
}

fn fill(plan: &mut RowAdapterPlan, rows: &[Vec<(u32, f32)>]) {
    plan.clear();
    for (row, entries) in rows.iter().enumerate() {
        for &(slot, scale) in entries {
            plan.push(row as u32, slot, scale);
        }
    }
    plan.finish(rows.len());
}

proptest! {
    #[test]
    fn a_row_finds_its_entries_in_request_order(rows in rows()) {
        let mut plan = RowAdapterPlan::default();
        fill(&mut plan, &rows);
        for (row, wanted) in rows.iter().enumerate() {
            let got: Vec<(u32, f32)> = plan.row(row).iter().map(|&index| {
                let entry = plan.entries()[index as usize];
                assert_eq!(entry.row as usize, row);
                (entry.slot, entry.scale)
            }).collect();
            prop_assert_eq!(&got, wanted);
        }
        prop_assert_eq!(plan.is_empty(), rows.iter().all(Vec::is_empty));
    }

    #[test]
    fn segments_cover_the_entries_once_and_in_order(rows in rows()) {
        let mut plan = RowAdapterPlan::default();
        fill(&mut plan, &rows);
        let mut next = 0;
        let mut previous = None;
        for segment in plan.segments() {
            prop_assert_eq!(segment.first, next);
            prop_assert!(segment.count > 0);
            next += segment.count;
            let entries = &plan.entries()[segment.first as usize..next as usize];
            let order = entries[0].order;
            prop_assert!(entries.iter().all(|entry| entry.slot == segment.slot && entry.order == order));
            // Row order, each row once: what lets rows of a segment form one block.
            prop_assert!(entries.windows(2).all(|pair| pair[0].row < pair[1].row));
            prop_assert!(previous < Some((order, segment.slot)));
            previous = Some((order, segment.slot));
        }
        prop_assert_eq!(next as usize, plan.entries().len());
    }

    #[test]
    fn a_reused_plan_equals_a_new_one(first in rows(), second in rows()) {
        let (mut reused, mut new) = (RowAdapterPlan::with_capacity(4, 4), RowAdapterPlan::default());
        fill(&mut reused, &first);
        fill(&mut reused, &second);
        fill(&mut new, &second);
        prop_assert_eq!(reused.entries(), new.entries());
        prop_assert_eq!(reused.segments(), new.segments());
    }
}
