//! `linear` of every available level against float64: shapes, ranks, element types and plans.

mod linear_cases;

use linear_cases::{Case, Random, backend, variants};
use manylora_kernels::StorageType;

#[test]
fn base_of_every_row_count_and_odd_shapes() {
    for (level, dtype) in variants() {
        let backend = backend(level, 2);
        for (inputs, outputs) in [(1, 1), (7, 17), (8, 16), (36, 12), (65, 33), (130, 100)] {
            for rows in (1..=14).chain([33]) {
                Case::random((rows * inputs) as u64, rows, inputs, &[outputs], dtype, &[]).check(&backend);
            }
        }
    }
}

#[test]
fn long_inputs_and_many_rows_cross_every_blocking() {
    for (level, dtype) in variants() {
        let backend = backend(level, 2);
        for (rows, inputs) in [(1, 2100), (7, 2100), (13, 1025), (97, 40), (200, 515)] {
            Case::random(7, rows, inputs, &[40, 20], dtype, &[]).check(&backend);
        }
    }
}

#[test]
fn three_parts_of_different_widths() {
    for (level, dtype) in variants() {
        let backend = backend(level, 3);
        for rows in [1, 2, 3, 6, 11] {
            Case::random(rows as u64, rows, 72, &[130, 33, 16], dtype, &[]).check(&backend);
        }
    }
}

#[test]
fn every_kind_of_rank() {
    for (level, dtype) in variants() {
        let backend = backend(level, 2);
        for rank in [1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 32, 63, 64, 100, 255, 512] {
            let mut case = Case::random(rank as u64, 5, 36, &[12, 50], dtype, &[rank]);
            for row in [0, 2, 3] {
                case.plan[row].push((0, 1.0));
            }
            case.check(&backend);
        }
    }
}

#[test]
fn plans_of_every_kind() {
    for (level, dtype) in variants() {
        let backend = backend(level, 2);
        let ranks = [16, 3, 8, 1, 9, 33];
        let case = |rows, seed| Case::random(seed, rows, 67, &[48, 35, 20], dtype, &ranks);
        for rows in [1, 6, 13] {
            let mut one_adapter = case(rows, 1);
            for entries in &mut one_adapter.plan {
                entries.push((0, 1.0));
            }
            one_adapter.check(&backend);

            let mut distinct = case(rows, 2);
            for (row, entries) in distinct.plan.iter_mut().enumerate() {
                entries.push(((row % ranks.len()) as u32, 1.0));
            }
            distinct.check(&backend);

            let mut composed = case(rows, 3);
            for (row, entries) in composed.plan.iter_mut().enumerate() {
                entries.push((1, 0.5));
                if row % 2 == 0 {
                    entries.push((0, -2.0));
                }
                if row % 3 == 0 {
                    entries.push((1, 0.25));
                }
            }
            composed.check(&backend);
        }
        let mut interleaved = case(6, 4);
        for (row, slot) in [0, 1, 0, 1, 1, 0].into_iter().enumerate() {
            interleaved.plan[row].push((slot, 0.5));
        }
        interleaved.check(&backend);
    }
}

#[test]
fn many_rows_of_few_adapters() {
    for (level, dtype) in variants() {
        let mut case = Case::random(5, 230, 24, &[40], dtype, &[4, 6]);
        let mut random = Random(9);
        for entries in &mut case.plan {
            if random.below(4) > 0 {
                entries.push((random.below(2) as u32, 1.0));
            }
        }
        case.check(&backend(level, 2));
    }
}

#[test]
fn adapters_keep_their_own_element_type() {
    for (level, dtype) in variants() {
        let other = if dtype == StorageType::F32 { StorageType::Bf16 } else { StorageType::F32 };
        let mut case = Case::random(6, 4, 50, &[31], dtype, &[12]);
        case.adapter_dtype = other;
        case.plan[1].push((0, 1.0));
        case.plan[3].push((0, 0.5));
        case.check(&backend(level, 2));
    }
}
