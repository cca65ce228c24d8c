//! Packed adapters: exact bytes, refusals, the embedding's deltas, and two backends on one pool.

mod linear_cases;

use std::sync::Arc;

use half::bf16;
use linear_cases::{Case, Matrix, Packed, Random, backend, bits, variants};
use manylora_kernels::cpu::{CpuBackend, SimdLevel, packed_adapter_bytes};
use manylora_kernels::{AdapterTable, Backend, PackedAdapter, Site, SiteShape, StepBatch, StorageType};

fn shape(site: Site, rank: u32, input: u32, output: u32) -> SiteShape {
    SiteShape { site, rank, input, output, scale: 1.5 }
}

#[test]
fn bytes_are_those_of_the_true_rank() {
    let backend = CpuBackend::new(manylora_kernels::cpu::CpuOptions::default()).unwrap();
    let shapes = [shape(Site(3), 3, 36, 12), shape(Site(9), 16, 64, 40)];
    // A as it is, B in panels of 16 outputs, each on its own cache lines: (216 -> 256) + (96 -> 128) + 2048 + 3 x 512.
    assert_eq!(packed_adapter_bytes(&shapes, StorageType::Bf16), 256 + 128 + 2048 + 1536);
    for dtype in [StorageType::Bf16, StorageType::F32] {
        let adapter = backend
            .pack_adapter(&shapes, dtype, &mut |index, a, b| {
                let SiteShape { rank, input, output, .. } = shapes[index];
                a.resize((rank * input) as usize, 1.0);
                b.resize((rank * output) as usize, 1.0);
                Ok(())
            })
            .unwrap();
        assert_eq!(adapter.bytes(), packed_adapter_bytes(&shapes, dtype));
    }
}

#[test]
fn factors_of_another_shape_are_refused() {
    let backend = CpuBackend::new(manylora_kernels::cpu::CpuOptions::default()).unwrap();
    let wrong = backend.pack_adapter(&[shape(Site(5), 2, 8, 4)], StorageType::F32, &mut |_, a, b| {
        a.resize(16, 0.0);
        b.resize(7, 0.0);
        Ok(())
    });
    assert!(wrong.unwrap_err().to_string().contains("site `5`"));
    let twice = [shape(Site(5), 1, 2, 2), shape(Site(5), 1, 2, 2)];
    let twice = backend.pack_adapter(&twice, StorageType::F32, &mut |_, a, b| {
        a.resize(2, 0.0);
        b.resize(2, 0.0);
        Ok(())
    });
    assert!(twice.unwrap_err().to_string().contains("twice"));
}

#[test]
fn the_embedding_gathers_a_by_token() {
    let (vocabulary, width, rank) = (50usize, 37usize, 5usize);
    for (level, dtype) in variants() {
        let backend = backend(level, 2);
        let mut random = Random(11);
        let table = Matrix::random(&mut random, vocabulary, width);
        let (a, b) = (random.values(rank * vocabulary), random.values(width * rank));
        let weight = backend.pack_weight("embedding", &table, dtype).unwrap();
        let adapter = backend
            .pack_adapter(
                &[shape(Site::EMBED, rank as u32, vocabulary as u32, width as u32)],
                dtype,
                &mut |_, a_out, b_out| {
                    a_out.extend_from_slice(&a);
                    b_out.extend_from_slice(&b);
                    Ok(())
                },
            )
            .unwrap();
        let mut adapters = AdapterTable::new(3);
        adapters.install(2, Arc::new(adapter));
        let tokens: Vec<u32> = (0..130).map(|_| random.below(vocabulary) as u32).collect();
        let scale_of = |row: usize| [0.0, 1.0, -0.5][row % 3];
        let run = |rows: &[usize]| {
            let mut batch = StepBatch::default();
            for (index, &row) in rows.iter().enumerate() {
                batch.tokens.push(tokens[row]);
                if scale_of(row) != 0.0 {
                    batch.adapters.push(index as u32, 2, scale_of(row));
                }
            }
            batch.adapters.finish(rows.len());
            let mut out = backend.buffer(rows.len(), width).unwrap();
            backend.embed(&batch, &adapters, &weight, Site::EMBED, &mut out);
            backend.read(&mut out, rows.len()).unwrap().to_vec()
        };
        let round = |value: f32| if dtype == StorageType::F32 { value } else { bf16::from_f32(value).to_f32() };
        let all = run(&(0..tokens.len()).collect::<Vec<_>>());
        for (row, &token) in tokens.iter().enumerate() {
            let got = &all[row * width..][..width];
            assert_eq!(bits(&[run(&[row])]), bits(&[got.to_vec()]), "{level} row {row} alone");
            for (column, &got) in got.iter().enumerate() {
                let delta: f64 = (0..rank)
                    .map(|r| {
                        f64::from(round(b[column * rank + r])) * f64::from(round(a[r * vocabulary + token as usize]))
                    })
                    .sum();
                let base = f64::from(round(table.values[token as usize * width + column]));
                let wanted = base + 1.5 * f64::from(scale_of(row)) * delta;
                // With tile registers what A comes to is rounded to bf16 before B.
                let tiles = level == SimdLevel::Amx && dtype == StorageType::Bf16;
                let size: f64 = (0..rank)
                    .map(|r| f64::from(b[column * rank + r] * a[r * vocabulary + token as usize]).abs() * 1.5)
                    .sum();
                let rounding = if tiles { size * f64::powi(2.0, -8) } else { 0.0 };
                assert!(
                    (f64::from(got) - wanted).abs() < 1e-5 + rounding,
                    "{level} {dtype:?} row {row}: {got} is not {wanted}"
                );
            }
        }
    }
}

#[test]
fn two_backends_share_a_pool_and_take_turns() {
    for (level, dtype) in variants() {
        let (one, two) = (backend(level, 2), backend(level, 2));
        assert!(std::ptr::eq(one.pool(), two.pool()));
        let mut case = Case::random(12, 8, 200, &[64, 40], dtype, &[8, 4]);
        for (row, entries) in case.plan.iter_mut().enumerate() {
            entries.push(((row % 2) as u32, 1.0));
        }
        let packed = Packed::new(&case, &one);
        let wanted = bits(&packed.run(&case, &one));
        std::thread::scope(|scope| {
            for backend in [&one, &two] {
                scope.spawn(|| {
                    for _ in 0..100 {
                        assert_eq!(bits(&packed.run(&case, backend)), wanted);
                    }
                });
            }
        });
    }
}
