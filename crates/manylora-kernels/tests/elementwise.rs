//! Norms, rotary embedding, the gated activation, argmax and row gathering: right against float64, and the same bits
//! whatever the rows around them and the threads.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use manylora_kernels::cpu::{Buffer, CpuBackend, CpuOptions, SimdLevel};
use manylora_kernels::{
    AdapterTable, AttentionShape, Backend, HeadInputs, KernelError, KvShape, RowSource, Site, StepBatch, StorageType,
};

/// Numbers in -1..1 that look random and are always the same.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    fn vector(&mut self, length: usize) -> Vec<f32> {
        (0..length).map(|_| self.next()).collect()
    }
}

fn backends() -> impl Iterator<Item = CpuBackend> {
    SimdLevel::available().into_iter().flat_map(|level| {
        [1, 2, 3].map(|threads| {
            let options = CpuOptions { num_threads: Some(threads), level: Some(level), ..CpuOptions::default() };
            CpuBackend::new(options).unwrap()
        })
    })
}

fn filled(backend: &CpuBackend, rows: usize, width: usize, values: &[f32]) -> Buffer {
    let mut buffer = backend.buffer(rows, width).unwrap();
    buffer.data.copy_from_slice(values);
    buffer
}

fn close(result: f32, expected: f64, tolerance: f64) -> bool {
    (f64::from(result) - expected).abs() <= tolerance * expected.abs().max(1e-3)
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn rms_norm_agrees_with_float64() {
    let mut numbers = Numbers(1);
    for (rows, width, group) in [(1, 576, 576), (3, 7, 7), (5, 33, 33), (2, 96, 12), (70, 320, 80), (40, 4096, 4096)] {
        let values = numbers.vector(rows * width);
        let weight = numbers.vector(group);
        let epsilon = 1e-5_f32;
        for backend in backends() {
            let input = filled(&backend, rows, width, &values);
            let vector = backend.vector(&weight).unwrap();
            let mut out = backend.buffer(rows, width).unwrap();
            backend.rms_norm(rows, &input, &vector, epsilon, Site::FINAL_NORM, &mut out);
            for (index, group_values) in values.chunks(group).enumerate() {
                let squares: f64 = group_values.iter().map(|&value| f64::from(value).powi(2)).sum();
                let root = (squares / group as f64 + f64::from(epsilon)).sqrt();
                for (column, (&value, &weight)) in group_values.iter().zip(&weight).enumerate() {
                    let expected = f64::from(value) / root * f64::from(weight);
                    let result = out.data[index * group + column];
                    assert!(close(result, expected, 2e-6), "{}: {result} for {expected}", backend.describe());
                }
            }
        }
    }
}

#[test]
fn rms_norm_of_a_row_does_not_depend_on_other_rows_or_threads() {
    let values = Numbers(2).vector(100 * 577);
    let weight = Numbers(3).vector(577);
    let mut first: Vec<(SimdLevel, Vec<f32>)> = Vec::new();
    for backend in backends() {
        let vector = backend.vector(&weight).unwrap();
        let input = filled(&backend, 100, 577, &values);
        let mut all = backend.buffer(100, 577).unwrap();
        backend.rms_norm(100, &input, &vector, 1e-6, Site::FINAL_NORM, &mut all);
        let alone = filled(&backend, 1, 577, &values[63 * 577..64 * 577]);
        let mut out = backend.buffer(1, 577).unwrap();
        backend.rms_norm(1, &alone, &vector, 1e-6, Site::FINAL_NORM, &mut out);
        assert!(same_bits(&out.data, all.row(63)), "{}", backend.describe());
        match first.iter().find(|(level, _)| *level == backend.level()) {
            Some((_, expected)) => assert!(same_bits(&all.data, expected), "{}", backend.describe()),
            None => first.push((backend.level(), all.data.to_vec())),
        }
    }
}

#[test]
fn rows_beyond_the_asked_ones_are_left_alone() {
    for backend in backends() {
        let weight = backend.vector(&[1.0; 8]).unwrap();
        let input = filled(&backend, 3, 8, &[1.0; 24]);
        let mut out = filled(&backend, 3, 8, &[7.0; 24]);
        backend.rms_norm(2, &input, &weight, 1e-6, Site::FINAL_NORM, &mut out);
        assert_eq!(out.row(2), [7.0; 8]);
        let mut out = filled(&backend, 3, 8, &[7.0; 24]);
        backend.gated_activation(2, &input, &input, &mut out);
        assert_eq!(out.row(2), [7.0; 8]);
    }
}

#[test]
fn rotary_embedding_rotates_pairs_of_halves() {
    let mut numbers = Numbers(4);
    for (heads, kv_heads, head_dim) in [(9, 3, 64), (2, 2, 8), (7, 1, 12), (4, 2, 80), (8, 2, 128)] {
        let half = head_dim / 2;
        let (rows, positions) = (29, 50_usize);
        let angles: Vec<f64> = (0..positions * half)
            .map(|index| (index / half) as f64 / 10000_f64.powf((index % half) as f64 / half as f64))
            .collect();
        let cos: Vec<f32> = angles.iter().map(|angle| angle.cos() as f32).collect();
        let sin: Vec<f32> = angles.iter().map(|angle| angle.sin() as f32).collect();
        let (q, k) = (numbers.vector(rows * heads * head_dim), numbers.vector(rows * kv_heads * head_dim));
        let v = numbers.vector(rows * kv_heads * head_dim);
        let batch = StepBatch {
            tokens: vec![0; rows],
            positions: (0..rows as u32).map(|row| (row * 7) % 50).collect(),
            slot_mapping: (0..rows as u32).collect(),
            ..StepBatch::default()
        };
        let shape = AttentionShape { heads, kv_heads, head_dim, scale: 1.0, window: None };
        for backend in backends() {
            let kv = KvShape { layers: 1, kv_heads, head_dim, block_size: 16, blocks: 2, dtype: StorageType::F32 };
            let mut cache = backend.kv_cache(kv).unwrap();
            let mut q_out = filled(&backend, rows, heads * head_dim, &q);
            let mut k_out = filled(&backend, rows, kv_heads * head_dim, &k);
            let v_buffer = filled(&backend, rows, kv_heads * head_dim, &v);
            let (cos_vector, sin_vector) = (backend.vector(&cos).unwrap(), backend.vector(&sin).unwrap());
            backend.rope_kv_write(
                &batch,
                0,
                &shape,
                &HeadInputs::NONE,
                &cos_vector,
                &sin_vector,
                &mut q_out,
                &mut k_out,
                &v_buffer,
                &mut cache,
            );
            for (values, out, per_row) in [(&q, &q_out, heads), (&k, &k_out, kv_heads)] {
                for index in 0..rows * per_row {
                    let (input, output) = (&values[index * head_dim..][..head_dim], &out.data[index * head_dim..]);
                    let table = batch.positions[index / per_row] as usize * half;
                    for pair in 0..half {
                        let (a, b) = (f64::from(input[pair]), f64::from(input[pair + half]));
                        let (c, s) = (f64::from(cos[table + pair]), f64::from(sin[table + pair]));
                        for (result, expected) in [(output[pair], a * c - b * s), (output[pair + half], b * c + a * s)]
                        {
                            let off = (f64::from(result) - expected).abs();
                            assert!(off < 3e-7, "{}: {result} for {expected}", backend.describe());
                        }
                    }
                }
            }
            for row in 0..rows {
                let (stored_k, stored_v) = cache.read_position(0, row as u32);
                assert!(same_bits(&stored_k, k_out.row(row)) && same_bits(&stored_v, v_buffer.row(row)));
            }
        }
    }
}

#[test]
fn biases_and_norms_of_heads_are_those_of_the_operations() {
    let mut numbers = Numbers(9);
    for (heads, kv_heads, head_dim) in [(4, 2, 64), (3, 1, 20), (2, 2, 10)] {
        let (rows, half) = (5, head_dim / 2);
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let [q, k, v] = [q_width, kv_width, kv_width].map(|width| numbers.vector(rows * width));
        let [q_bias, k_bias, v_bias] = [q_width, kv_width, kv_width].map(|width| numbers.vector(width));
        let (q_norm, k_norm) = (numbers.vector(head_dim), numbers.vector(head_dim));
        let (cos, sin) = (numbers.vector(rows * half), numbers.vector(rows * half));
        let batch = StepBatch {
            tokens: vec![0; rows],
            positions: (0..rows as u32).collect(),
            slot_mapping: (0..rows as u32).collect(),
            ..StepBatch::default()
        };
        let shape = AttentionShape { heads, kv_heads, head_dim, scale: 1.0, window: None };
        let kv = KvShape { layers: 1, kv_heads, head_dim, block_size: 8, blocks: 1, dtype: StorageType::F32 };
        for backend in backends() {
            let vector = |values: &[f32]| backend.vector(values).unwrap();
            let (cos, sin) = (vector(&cos), vector(&sin));
            let run = |q: &[f32], k: &[f32], v: &[f32], inputs: &HeadInputs<'_, CpuBackend>| {
                let mut cache = backend.kv_cache(kv).unwrap();
                let mut q = filled(&backend, rows, q_width, q);
                let (mut k, v) = (filled(&backend, rows, kv_width, k), filled(&backend, rows, kv_width, v));
                backend.rope_kv_write(&batch, 0, &shape, inputs, &cos, &sin, &mut q, &mut k, &v, &mut cache);
                let stored: Vec<_> = (0..rows as u32).map(|slot| cache.read_position(0, slot)).collect();
                (q.data.to_vec(), stored)
            };
            let biased = |values: &[f32], bias: &[f32]| -> Vec<f32> {
                values.chunks(bias.len()).flat_map(|row| row.iter().zip(bias).map(|(a, b)| a + b)).collect()
            };
            let normed = |values: &[f32], width: usize, norm: &[f32]| -> Vec<f32> {
                let mut out = backend.buffer(rows, width).unwrap();
                let input = filled(&backend, rows, width, values);
                backend.rms_norm(rows, &input, &vector(norm), 1e-6, Site::FINAL_NORM, &mut out);
                out.data.to_vec()
            };
            let q_ready = normed(&biased(&q, &q_bias), q_width, &q_norm);
            let k_ready = normed(&biased(&k, &k_bias), kv_width, &k_norm);
            let expected = run(&q_ready, &k_ready, &biased(&v, &v_bias), &HeadInputs::NONE);
            let [q_bias, k_bias, v_bias] = [&q_bias, &k_bias, &v_bias].map(|bias| vector(bias));
            let (q_norm, k_norm) = (vector(&q_norm), vector(&k_norm));
            let inputs = HeadInputs {
                q_bias: Some(&q_bias),
                k_bias: Some(&k_bias),
                v_bias: Some(&v_bias),
                q_norm: Some(&q_norm),
                k_norm: Some(&k_norm),
                epsilon: 1e-6,
            };
            let got = run(&q, &k, &v, &inputs);
            assert!(same_bits(&got.0, &expected.0), "{}: q", backend.describe());
            for ((k, v), (expected_k, expected_v)) in got.1.iter().zip(&expected.1) {
                assert!(same_bits(k, expected_k) && same_bits(v, expected_v), "{}", backend.describe());
            }
        }
    }
}

#[test]
fn half_precision_is_refused() {
    let matrix = Matrix { columns: 2, values: vec![1.0; 4] };
    for backend in backends() {
        let refused = backend.pack_weight("a weight", &matrix, StorageType::F16);
        assert!(refused.err().is_some_and(|error| error.to_string().contains("float16")));
    }
}

#[test]
fn gated_activation_agrees_with_float64() {
    let mut numbers = Numbers(5);
    for (rows, width) in [(1, 1), (3, 13), (1, 1536), (17, 1001)] {
        let gate: Vec<f32> = numbers.vector(rows * width).iter().map(|value| value * 30.0).collect();
        let up = numbers.vector(rows * width);
        let mut first: Vec<(SimdLevel, Vec<f32>)> = Vec::new();
        for backend in backends() {
            let mut out = backend.buffer(rows, width).unwrap();
            let (gate, up) = (filled(&backend, rows, width, &gate), filled(&backend, rows, width, &up));
            backend.gated_activation(rows, &gate, &up, &mut out);
            for ((&gate, &up), &result) in gate.data.iter().zip(&*up.data).zip(&*out.data) {
                let expected = f64::from(gate) / (1.0 + (-f64::from(gate)).exp()) * f64::from(up);
                let off = (f64::from(result) - expected).abs();
                assert!(off <= 1e-6 * expected.abs().max(1e-9), "{}: {result} for {expected}", backend.describe());
            }
            match first.iter().find(|(level, _)| *level == backend.level()) {
                Some((_, expected)) => assert!(same_bits(&out.data, expected), "{}", backend.describe()),
                None => first.push((backend.level(), out.data.to_vec())),
            }
        }
    }
}

#[test]
fn gated_activation_at_the_ends_of_the_range() {
    for backend in backends() {
        let gate = [-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, f32::NAN, f32::INFINITY];
        let mut out = backend.buffer(1, 9).unwrap();
        let (gate, up) = (filled(&backend, 1, 9, &gate), filled(&backend, 1, 9, &[1.0; 9]));
        backend.gated_activation(1, &gate, &up, &mut out);
        assert!(out.data[..2].iter().all(|&value| value == 0.0), "{}", backend.describe());
        assert!(out.data[2] > -1e-36 && out.data[2] <= 0.0, "{}", backend.describe());
        assert_eq!(out.data[3..7], [0.0, 88.0, 200.0, 1e30], "{}", backend.describe());
        assert!(out.data[7].is_nan() && out.data[8] == f32::INFINITY, "{}", backend.describe());
    }
}

#[test]
fn argmax_takes_the_lowest_of_equals_and_never_nan() {
    let width = 10_007;
    let mut numbers = Numbers(6);
    let mut rows: Vec<(Vec<f32>, u32)> = Vec::new();
    for index in [0, 1, 4095, 4096, 8191, 9999, 10_006] {
        let mut row = numbers.vector(width);
        row[index] = 2.0;
        row[10_006] = 2.0;
        rows.push((row, index as u32));
    }
    let mut row = vec![f32::NAN; width];
    rows.push((row.clone(), 0));
    row[5000] = f32::NEG_INFINITY;
    rows.push((row.clone(), 5000));
    row[7000] = -3.0;
    rows.push((row.clone(), 7000));
    row[9000] = -2.0;
    row[9001] = -2.0;
    rows.push((row, 9000));
    let mut row = vec![-1.0; width];
    row[3] = -0.0;
    row[4] = 0.0;
    rows.push((row, 3));
    rows.push((vec![f32::NEG_INFINITY; width], 0));
    // More rows than are searched at a time.
    let rows: Vec<_> = rows.iter().cycle().take(83).cloned().collect();
    let values: Vec<f32> = rows.iter().flat_map(|(row, _)| row.clone()).collect();
    for backend in backends() {
        let logits = filled(&backend, rows.len(), width, &values);
        let mut out = vec![u32::MAX; rows.len() + 1];
        backend.argmax(rows.len(), &logits, &mut out).unwrap();
        for (index, (_, expected)) in rows.iter().enumerate() {
            assert_eq!(out[index], *expected, "{}: row {index}", backend.describe());
        }
        assert_eq!(out[rows.len()], u32::MAX);
    }
}

#[test]
fn gathered_rows_are_copies() {
    let values = Numbers(7).vector(10 * 33);
    for backend in backends() {
        let input = filled(&backend, 10, 33, &values);
        let mut out = backend.buffer(4, 33).unwrap();
        backend.gather_rows(&[9, 0, 4, 4], &input, &mut out);
        for (index, row) in [9, 0, 4, 4].into_iter().enumerate() {
            assert!(same_bits(out.row(index), input.row(row)));
        }
        let two = out.data[..66].to_vec();
        assert!(same_bits(backend.read(&mut out, 2).unwrap(), &two));
    }
}

struct Matrix {
    columns: usize,
    values: Vec<f32>,
}

impl RowSource for Matrix {
    fn rows(&self) -> usize {
        self.values.len() / self.columns
    }

    fn columns(&self) -> usize {
        self.columns
    }

    fn read(&self, first: usize, out: &mut [f32]) -> Result<(), KernelError> {
        out.copy_from_slice(&self.values[first * self.columns..][..out.len()]);
        Ok(())
    }
}

#[test]
fn embedded_rows_are_the_stored_weights() {
    // Odd sizes: neither rows nor columns fill a panel of any level.
    let (vocabulary, columns) = (131, 77);
    let matrix = Matrix { columns, values: Numbers(8).vector(vocabulary * columns) };
    let tokens: Vec<u32> = (0..600).map(|row| (row * 37) % vocabulary as u32).collect();
    let batch = StepBatch { tokens, ..StepBatch::default() };
    for backend in backends() {
        for dtype in [StorageType::F32, StorageType::Bf16] {
            let weight = backend.pack_weight("the embedding", &matrix, dtype).unwrap();
            let mut out = backend.buffer(601, columns).unwrap();
            backend.embed(&batch, &AdapterTable::new(0), &weight, Site::EMBED, &mut out);
            for (row, &token) in batch.tokens.iter().enumerate() {
                for (column, &value) in matrix.values[token as usize * columns..][..columns].iter().enumerate() {
                    let expected = match dtype {
                        StorageType::Bf16 => half::bf16::from_f32(value).to_f32(),
                        StorageType::F32 => value,
                        StorageType::F16 => half::f16::from_f32(value).to_f32(),
                    };
                    assert_eq!(out.row(row)[column], expected, "{}: row {row} column {column}", backend.describe());
                }
            }
            assert_eq!(out.row(600), vec![0.0; columns], "{}", backend.describe());
        }
    }
}
