//! Solo equals batched, bit for bit: a row's result depends on nothing but the row, its weights and its own adapters.

mod linear_cases;

use std::panic::{AssertUnwindSafe, catch_unwind};

use linear_cases::{Case, Packed, Random, backend, bits, variants};
use manylora_kernels::cpu::CpuBackend;
use manylora_kernels::{AdapterTable, LinearOutput, StorageType};

/// A case with a random mix of base rows, single adapters and compositions.
fn mixed(seed: u64, rows: usize, inputs: usize, outputs: &[usize], dtype: StorageType) -> Case {
    let ranks = [8, 3, 17, 1, 40];
    let mut case = Case::random(seed, rows, inputs, outputs, dtype, &ranks);
    let mut random = Random(seed ^ 0xABCD);
    for entries in &mut case.plan {
        for _ in 0..random.below(4) {
            entries.push((random.below(ranks.len()) as u32, random.value()));
        }
    }
    case
}

/// Every row of the case alone has the bits that it has among the others.
fn assert_rows_alone(case: &Case, packed: &Packed, backend: &CpuBackend, outputs: &[usize], what: &str) {
    let batch = packed.run(case, backend);
    let rows = batch[0].len() / outputs[0];
    for row in 0..rows {
        let solo = packed.run_rows(case, backend, &[row]);
        for (part, &width) in outputs.iter().enumerate() {
            let wanted = &batch[part][row * width..][..width];
            assert_eq!(bits(&[solo[part].clone()]), bits(&[wanted.to_vec()]), "{what}, row {row}, part {part}");
        }
    }
}

#[test]
fn a_row_alone_has_the_bits_of_the_batch() {
    for (level, dtype) in variants() {
        let backend = backend(level, 2);
        for (rows, inputs, outputs) in
            [(2, 33, [40, 17, 9]), (5, 36, [12, 64, 3]), (13, 1100, [33, 16, 16]), (110, 45, [20, 30, 40])]
        {
            let case = mixed(rows as u64, rows, inputs, &outputs, dtype);
            let packed = Packed::new(&case, &backend);
            let what = format!("{level} {dtype:?}, {rows} rows");
            assert_rows_alone(&case, &packed, &backend, &outputs, &what);
        }
    }
}

/// Rows that share their adapter with nobody go through kernels of their own: ranks of every length side by side, in any
/// number, beside rows that do share and base rows.
#[test]
fn rows_with_an_adapter_each_have_the_bits_of_a_row_alone() {
    let ranks = [16, 1, 64, 3, 8, 17, 40, 2, 5, 16, 33, 12];
    for (level, dtype) in variants() {
        let backend = backend(level, 2);
        for rows in [1, 2, 3, 4, 5, 7, 12, 20] {
            let outputs = [70, 16, 33];
            let mut case = Case::random(50 + rows as u64, rows, 40, &outputs, dtype, &ranks);
            for (row, entries) in case.plan.iter_mut().enumerate() {
                // Beyond the twelfth: base rows, and rows that share the adapters of the first ones.
                match row {
                    0..12 => entries.push((row as u32, 0.5)),
                    12..16 => {}
                    _ => entries.push((row as u32 - 16, 1.5)),
                }
            }
            let packed = Packed::new(&case, &backend);
            let what = format!("{level} {dtype:?}, {rows} rows");
            assert_rows_alone(&case, &packed, &backend, &outputs, &what);
        }
    }
}

#[test]
fn row_order_and_batch_size_do_not_matter() {
    for (level, dtype) in variants() {
        let backend = backend(level, 2);
        let (rows, width) = (23, 50);
        let case = mixed(3, rows, 77, &[width], dtype);
        let packed = Packed::new(&case, &backend);
        let batch = packed.run(&case, &backend);
        let mut random = Random(1);
        for size in [1, 2, 3, 4, 6, 7, 9, 12, 23] {
            let mut selection: Vec<usize> = (0..rows).collect();
            for index in 0..rows {
                selection.swap(index, random.below(rows));
            }
            selection.truncate(size);
            let got = packed.run_rows(&case, &backend, &selection);
            for (index, &row) in selection.iter().enumerate() {
                let (got, wanted) = (&got[0][index * width..][..width], &batch[0][row * width..][..width]);
                assert_eq!(bits(&[got.to_vec()]), bits(&[wanted.to_vec()]), "{level} {dtype:?} {size} rows, row {row}");
            }
        }
    }
}

#[test]
fn threads_do_not_matter() {
    for (level, dtype) in variants() {
        for rows in [1, 3, 10, 60] {
            let case = mixed(4, rows, 90, &[100, 36, 5], dtype);
            let wanted = bits(&case.run(&backend(level, 1)));
            for threads in [2, 3, 7] {
                assert_eq!(
                    bits(&case.run(&backend(level, threads))),
                    wanted,
                    "{level} {dtype:?} {rows} rows, {threads} threads"
                );
            }
        }
    }
}

#[test]
fn idle_adapters_leave_the_base_alone() {
    for (level, dtype) in variants() {
        let backend = backend(level, 2);
        let mut case = mixed(5, 9, 64, &[48, 16], dtype);
        let adapted = case.run(&backend);
        let plan = std::mem::replace(&mut case.plan, vec![Vec::new(); 9]);
        let mut packed = Packed::new(&case, &backend);
        let idle = packed.run(&case, &backend);
        packed.adapters = AdapterTable::new(0);
        let off = packed.run(&case, &backend);
        assert_eq!(bits(&idle), bits(&off));
        for (row, entries) in plan.iter().enumerate() {
            for (part, width) in [48, 16].into_iter().enumerate() {
                let same = adapted[part][row * width..][..width] == off[part][row * width..][..width];
                assert_eq!(same, entries.is_empty(), "{level} {dtype:?} row {row} with {} entries", entries.len());
            }
        }
    }
}

#[test]
fn an_empty_slot_is_never_answered_with_the_base() {
    for (level, dtype) in variants() {
        let backend = backend(level, 2);
        let mut case = Case::random(6, 2, 16, &[16], dtype, &[4]);
        let packed = Packed::new(&case, &backend);
        case.plan[1].push((7, 1.0));
        let outcome = catch_unwind(AssertUnwindSafe(|| packed.run(&case, &backend)));
        let message = *outcome.unwrap_err().downcast::<String>().unwrap();
        assert!(message.contains("slot `7`"), "{message}");
        // The backend works on.
        case.plan[1].clear();
        case.check(&backend);
    }
}

/// Numbers of every size, down to those that count as zero and up to those whose products do not fit: one row alone goes
/// through instructions of its own on some levels.
#[test]
fn numbers_of_any_size_have_the_bits_of_the_batch() {
    for (level, dtype) in variants() {
        let backend = backend(level, 2);
        for (rows, inputs, outputs) in [(5, 896, [70, 40, 64]), (17, 333, [33, 96, 5])] {
            let mut case = mixed(90 + rows as u64, rows, inputs, &outputs, dtype);
            let mut random = Random(inputs as u64);
            let mut stretch = |values: &mut [f32], least: i32, exponents: usize| {
                for value in values {
                    *value *= 2.0f32.powi(least + random.below(exponents) as i32);
                }
            };
            stretch(&mut case.input, -130, 190);
            for part in &mut case.parts {
                stretch(&mut part.weight.values, -100, 160);
            }
            let packed = Packed::new(&case, &backend);
            let batch = packed.run(&case, &backend);
            assert!(batch.iter().flatten().any(|value| value.is_finite() && value.abs() > 1e20), "{level} {dtype:?}");
            assert_rows_alone(&case, &packed, &backend, &outputs, &format!("{level} {dtype:?}, {rows} rows"));
        }
    }
}

/// The activation of gate and up in one call: what it makes of the two linear maps, and the same bits for a row alone.
#[test]
fn gated_maps_are_those_of_their_parts() {
    for (level, dtype) in variants() {
        let backend = backend(level, 2);
        for (rows, inputs, width) in [(1, 64, 70), (5, 33, 40), (23, 70, 96), (110, 45, 31), (600, 40, 64)] {
            let mut case = mixed(70 + rows as u64, rows, inputs, &[width, width], dtype);
            for part in &mut case.parts {
                part.mode = LinearOutput::Store;
            }
            let packed = Packed::new(&case, &backend);
            let parts = packed.run(&case, &backend);
            let together = packed.gated(&case, &backend, &(0..rows).collect::<Vec<_>>());
            for (index, ((&gate, &up), &found)) in parts[0].iter().zip(&parts[1]).zip(&together).enumerate() {
                let wanted = f64::from(gate) / (1.0 + (-f64::from(gate)).exp()) * f64::from(up);
                let off = (f64::from(found) - wanted).abs();
                assert!(
                    off <= 1e-6 * wanted.abs().max(1e-9),
                    "{level} {dtype:?} {rows} {index}: {found}, not {wanted}"
                );
            }
            for row in (0..rows).step_by(1 + rows / 40) {
                let alone = packed.gated(&case, &backend, &[row]);
                let wanted = together[row * width..][..width].to_vec();
                assert_eq!(bits(&[alone]), bits(&[wanted]), "{level} {dtype:?}, row {row} of {rows}");
            }
        }
    }
}
