//! Attention and the KV cache: right against a float64 reference, and the same bits whatever the chunks, blocks,
//! neighbours and threads.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use half::bf16;
use manylora_kernels::cpu::{CpuBackend, CpuOptions, KvCache, SimdLevel, kv_block_bytes};
use manylora_kernels::{AttentionShape, Backend, HeadInputs, KvShape, SequenceRows, StepBatch, StorageType};

/// Numbers in -1..1 that look random and are always the same.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn vector(&mut self, length: usize) -> Vec<f32> {
        (0..length).map(|_| (self.next() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0).collect()
    }
}

/// q, k and v of one sequence, row by row.
#[derive(Clone)]
struct Sequence {
    length: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Sequence {
    fn new(numbers: &mut Numbers, shape: &AttentionShape, length: usize) -> Self {
        let width = shape.kv_heads * shape.head_dim;
        let mut q = numbers.vector(length * shape.heads * shape.head_dim);
        // Sharper than random: softmax should have something to decide.
        for value in &mut q {
            *value *= 6.0;
        }
        Self { length, q, k: numbers.vector(length * width), v: numbers.vector(length * width) }
    }
}

/// How the rows are fed to the backend.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    chunk: usize,
    block_size: usize,
    /// Seed of the order in which blocks are handed out; 0 = rising.
    shuffle: u64,
    dtype: StorageType,
}

fn shape(heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> AttentionShape {
    AttentionShape { heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt(), window }
}

fn backend(level: SimdLevel, threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { num_threads: Some(threads), level: Some(level), ..CpuOptions::default() }).unwrap()
}

/// Feeds the sequences chunk by chunk, side by side, and returns the outputs of each.
fn run(backend: &CpuBackend, shape: &AttentionShape, sequences: &[Sequence], schedule: Schedule) -> Vec<Vec<f32>> {
    let Schedule { chunk, block_size, shuffle, dtype } = schedule;
    let (q_width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let needed: Vec<usize> = sequences.iter().map(|sequence| sequence.length.div_ceil(block_size)).collect();
    let blocks = needed.iter().sum::<usize>() + 3;
    let mut free: Vec<u32> = (0..blocks as u32).collect();
    if shuffle != 0 {
        let mut numbers = Numbers(shuffle);
        for index in (1..free.len()).rev() {
            free.swap(index, (numbers.next() % (index as u64 + 1)) as usize);
        }
    }
    let mut free = free.into_iter();
    let tables: Vec<Vec<u32>> = needed.iter().map(|&count| free.by_ref().take(count).collect()).collect();

    // Two layers, of which the second is used, so that a mistake in the layer's place shows.
    let kv = KvShape { layers: 2, kv_heads: shape.kv_heads, head_dim: shape.head_dim, block_size, blocks, dtype };
    let mut cache = backend.kv_cache(kv).unwrap();
    let longest = sequences.iter().map(|sequence| sequence.length).max().unwrap_or(0);
    let cos = backend.vector(&vec![1.0; longest * shape.head_dim / 2]).unwrap();
    let sin = backend.vector(&vec![0.0; longest * shape.head_dim / 2]).unwrap();
    let rows = sequences.len() * chunk;
    let mut q = backend.buffer(rows, q_width).unwrap();
    let mut k = backend.buffer(rows, kv_width).unwrap();
    let mut v = backend.buffer(rows, kv_width).unwrap();
    let mut out = backend.buffer(rows, q_width).unwrap();

    let mut done = vec![0; sequences.len()];
    let mut results: Vec<Vec<f32>> = vec![Vec::new(); sequences.len()];
    let mut batch = StepBatch::default();
    while done.iter().zip(sequences).any(|(&done, sequence)| done < sequence.length) {
        batch.clear();
        for (index, sequence) in sequences.iter().enumerate() {
            let count = chunk.min(sequence.length - done[index]);
            if count == 0 {
                continue;
            }
            let first_row = batch.rows();
            let table = &tables[index][..(done[index] + count).div_ceil(block_size)];
            batch.sequences.push(SequenceRows {
                first_row: first_row as u32,
                rows: count as u32,
                first_position: done[index] as u32,
                table_first: batch.block_tables.len() as u32,
                table_len: table.len() as u32,
            });
            batch.block_tables.extend_from_slice(table);
            for offset in 0..count {
                let (row, position) = (first_row + offset, done[index] + offset);
                batch.tokens.push(0);
                batch.positions.push(position as u32);
                batch
                    .slot_mapping
                    .push(table[position / block_size] * block_size as u32 + (position % block_size) as u32);
                q.row_mut(row).copy_from_slice(&sequence.q[position * q_width..(position + 1) * q_width]);
                k.row_mut(row).copy_from_slice(&sequence.k[position * kv_width..(position + 1) * kv_width]);
                v.row_mut(row).copy_from_slice(&sequence.v[position * kv_width..(position + 1) * kv_width]);
            }
        }
        backend.rope_kv_write(&batch, 1, shape, &HeadInputs::NONE, &cos, &sin, &mut q, &mut k, &v, &mut cache);
        backend.attention(&batch, 1, shape, &q, &cache, &mut out);
        let mut next = batch.sequences.iter();
        for (index, sequence) in sequences.iter().enumerate() {
            if done[index] < sequence.length {
                let rows = next.next().unwrap();
                for row in rows.first_row..rows.first_row + rows.rows {
                    results[index].extend_from_slice(out.row(row as usize));
                }
                done[index] += rows.rows as usize;
            }
        }
    }
    results
}

/// Attention in float64 on K and V as they are stored.
fn reference(shape: &AttentionShape, sequence: &Sequence, dtype: StorageType) -> Vec<f64> {
    let stored = |value: f32| match dtype {
        StorageType::Bf16 => f64::from(bf16::from_f32(value).to_f32()),
        StorageType::F32 => f64::from(value),
        StorageType::F16 => half::f16::from_f32(value).to_f64(),
    };
    let head_dim = shape.head_dim;
    let group = shape.heads / shape.kv_heads;
    let mut out = Vec::new();
    for row in 0..sequence.length {
        let low = shape.window.map_or(0, |window| (row + 1).saturating_sub(window));
        for head in 0..shape.heads {
            let q = &sequence.q[(row * shape.heads + head) * head_dim..][..head_dim];
            let at = |position: usize| (position * shape.kv_heads + head / group) * head_dim;
            let scores: Vec<f64> = (low..=row)
                .map(|position| {
                    let k = &sequence.k[at(position)..][..head_dim];
                    let dot: f64 = q.iter().zip(k).map(|(&q, &k)| f64::from(q) * stored(k)).sum();
                    dot * f64::from(shape.scale)
                })
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for column in 0..head_dim {
                let total: f64 = weights
                    .iter()
                    .zip(low..)
                    .map(|(weight, position)| weight * stored(sequence.v[at(position) + column]))
                    .sum();
                out.push(total / sum);
            }
        }
    }
    out
}

fn assert_close(what: &str, result: &[f32], expected: &[f64]) {
    assert_eq!(result.len(), expected.len(), "{what}");
    for (index, (&result, &expected)) in result.iter().zip(expected).enumerate() {
        // Values are averages of numbers below 1; scores reach tens.
        let off = (f64::from(result) - expected).abs();
        assert!(off <= 1e-5, "{what}: element {index} is {result}, not {expected}");
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

const DTYPES: [StorageType; 2] = [StorageType::Bf16, StorageType::F32];

#[test]
fn agrees_with_float64_over_shapes() {
    let mut numbers = Numbers(1);
    for (heads, kv_heads) in [(2, 2), (9, 3), (8, 2), (7, 1), (28, 2)] {
        for head_dim in [8, 12, 64, 80, 128] {
            for (lengths, window) in [([1, 17, 40], None), ([3, 33, 70], Some(1)), ([5, 64, 100], Some(21))] {
                let shape = shape(heads, kv_heads, head_dim, window);
                let sequences = lengths.map(|length| Sequence::new(&mut numbers, &shape, length));
                for dtype in DTYPES {
                    let expected = sequences.clone().map(|sequence| reference(&shape, &sequence, dtype));
                    for level in SimdLevel::available() {
                        let schedule = Schedule { chunk: 23, block_size: 16, shuffle: 7, dtype };
                        let results = run(&backend(level, 2), &shape, &sequences, schedule);
                        for (result, expected) in results.iter().zip(&expected) {
                            assert_close(&format!("{level} {shape:?} {schedule:?}"), result, expected);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn agrees_with_float64_on_long_contexts() {
    let mut numbers = Numbers(2);
    for (heads, kv_heads, head_dim, window) in [(6, 2, 64, None), (4, 1, 80, Some(128)), (3, 3, 12, None)] {
        let shape = shape(heads, kv_heads, head_dim, window);
        let sequences = [300, 257, 8].map(|length| Sequence::new(&mut numbers, &shape, length));
        for dtype in DTYPES {
            let expected = sequences.clone().map(|sequence| reference(&shape, &sequence, dtype));
            for level in SimdLevel::available() {
                for block_size in [1, 8, 16, 32] {
                    let schedule = Schedule { chunk: 111, block_size, shuffle: 3, dtype };
                    let results = run(&backend(level, 2), &shape, &sequences, schedule);
                    for (result, expected) in results.iter().zip(&expected) {
                        assert_close(&format!("{level} {shape:?} {schedule:?}"), result, expected);
                    }
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_chunks_blocks_neighbours_or_threads() {
    let mut numbers = Numbers(3);
    for (heads, kv_heads, head_dim) in [(9, 3, 64), (2, 2, 128), (7, 1, 12), (8, 2, 80), (32, 2, 8)] {
        for window in [None, Some(1), Some(37)] {
            let shape = shape(heads, kv_heads, head_dim, window);
            let sequences = [131, 16, 77].map(|length| Sequence::new(&mut numbers, &shape, length));
            for dtype in DTYPES {
                for level in SimdLevel::available() {
                    let alone: Vec<Vec<f32>> = sequences
                        .iter()
                        .map(|sequence| {
                            let schedule = Schedule { chunk: 131, block_size: 16, shuffle: 0, dtype };
                            run(&backend(level, 1), &shape, std::slice::from_ref(sequence), schedule).remove(0)
                        })
                        .collect();
                    for (chunk, block_size, shuffle, threads) in [
                        (131, 16, 5, 2),
                        (5, 16, 6, 3),
                        (1, 16, 7, 2),
                        (40, 1, 8, 1),
                        (5, 8, 9, 2),
                        (23, 32, 10, 3),
                        (64, 13, 11, 2),
                    ] {
                        let schedule = Schedule { chunk, block_size, shuffle, dtype };
                        let results = run(&backend(level, threads), &shape, &sequences, schedule);
                        for (index, (result, alone)) in results.iter().zip(&alone).enumerate() {
                            assert!(
                                same_bits(result, alone),
                                "{level} {shape:?} {schedule:?} {threads}: sequence {index}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Contexts of several chunks of positions, where running maxima rise from chunk to chunk and windows begin within one.
#[test]
fn long_contexts_have_the_bits_of_single_rows() {
    let mut numbers = Numbers(12);
    for (heads, kv_heads, head_dim, window) in [(7, 1, 64, None), (4, 2, 80, Some(300)), (2, 1, 128, Some(9))] {
        let shape = shape(heads, kv_heads, head_dim, window);
        let mut sequences = [530, 256].map(|length| Sequence::new(&mut numbers, &shape, length));
        for sequence in &mut sequences {
            let width = kv_heads * head_dim;
            for (position, k) in sequence.k.chunks_exact_mut(width).enumerate() {
                for value in k {
                    *value *= 1.0 + position as f32 / 200.0;
                }
            }
        }
        for level in SimdLevel::available() {
            let run = |sequences: &[Sequence], chunk, block_size, threads| {
                let schedule = Schedule { chunk, block_size, shuffle: 4, dtype: StorageType::Bf16 };
                run(&backend(level, threads), &shape, sequences, schedule)
            };
            let together = run(&sequences, 190, 16, 2);
            for (index, sequence) in sequences.iter().enumerate() {
                let expected = reference(&shape, sequence, StorageType::Bf16);
                assert_close(&format!("{level} {shape:?} sequence {index}"), &together[index], &expected);
                for (chunk, block_size) in [(4, 16), (530, 24), (37, 32)] {
                    let alone = run(std::slice::from_ref(sequence), chunk, block_size, 1).remove(0);
                    assert!(same_bits(&alone, &together[index]), "{level} {shape:?} {chunk} {block_size} {index}");
                }
            }
        }
    }
}

#[test]
fn a_row_does_not_see_later_positions_even_if_they_are_not_numbers() {
    let shape = shape(4, 2, 64, None);
    let clean = Sequence::new(&mut Numbers(4), &shape, 50);
    let width = shape.kv_heads * shape.head_dim;
    let mut spoilt = clean.clone();
    spoilt.k[40 * width..].fill(f32::NAN);
    spoilt.v[40 * width..].fill(f32::INFINITY);
    for level in SimdLevel::available() {
        let schedule = Schedule { chunk: 50, block_size: 16, shuffle: 0, dtype: StorageType::Bf16 };
        let expected = run(&backend(level, 2), &shape, std::slice::from_ref(&clean), schedule).remove(0);
        let result = run(&backend(level, 2), &shape, std::slice::from_ref(&spoilt), schedule).remove(0);
        let seen = 40 * shape.heads * shape.head_dim;
        assert!(same_bits(&result[..seen], &expected[..seen]), "{level}");
        assert!(result[seen..].iter().all(|value| value.is_nan()), "{level}: a broken row must not look whole");
    }
}

/// What lies before a window is as invisible as what comes later, whether a row is alone or among others.
#[test]
fn a_row_does_not_see_what_left_its_window() {
    let shape = shape(4, 2, 64, Some(20));
    let clean = Sequence::new(&mut Numbers(14), &shape, 60);
    let width = shape.kv_heads * shape.head_dim;
    let mut spoilt = clean.clone();
    spoilt.k[10 * width..12 * width].fill(f32::NAN);
    spoilt.v[10 * width..12 * width].fill(f32::INFINITY);
    for (level, chunk) in SimdLevel::available().into_iter().flat_map(|level| [(level, 60), (level, 1), (level, 7)]) {
        let schedule = Schedule { chunk, block_size: 16, shuffle: 0, dtype: StorageType::Bf16 };
        let expected = run(&backend(level, 2), &shape, std::slice::from_ref(&clean), schedule).remove(0);
        let result = run(&backend(level, 2), &shape, std::slice::from_ref(&spoilt), schedule).remove(0);
        let row = shape.heads * shape.head_dim;
        assert!(same_bits(&result[..10 * row], &expected[..10 * row]), "{level} {chunk}");
        assert!(result[10 * row..31 * row].iter().all(|value| value.is_nan()), "{level} {chunk}");
        assert!(same_bits(&result[31 * row..], &expected[31 * row..]), "{level} {chunk}");
    }
}

#[test]
fn scores_far_apart_choose_one_position() {
    let shape = shape(1, 1, 8, None);
    let length = 20;
    let mut sequence = Sequence::new(&mut Numbers(5), &shape, length);
    sequence.q.fill(100.0);
    sequence.k.fill(-1.0);
    sequence.k[7 * 8..8 * 8].fill(1.0);
    for level in SimdLevel::available() {
        let schedule = Schedule { chunk: length, block_size: 16, shuffle: 0, dtype: StorageType::F32 };
        let result = run(&backend(level, 1), &shape, std::slice::from_ref(&sequence), schedule).remove(0);
        assert_eq!(result[19 * 8..], sequence.v[7 * 8..8 * 8], "{level}");
    }
}

#[test]
fn cache_rounds_to_nearest_even_and_keeps_layers_and_blocks_apart() {
    let shape = shape(2, 2, 8, None);
    for dtype in DTYPES {
        let backend = backend(SimdLevel::detect(), 1);
        let kv = KvShape { layers: 3, kv_heads: 2, head_dim: 8, block_size: 4, blocks: 5, dtype };
        let mut cache = backend.kv_cache(kv).unwrap();
        let ones = backend.vector(&[1.0; 64]).unwrap();
        let zeros = backend.vector(&[0.0; 64]).unwrap();
        let mut written = Vec::new();
        for layer in 0..3 {
            let mut numbers = Numbers(60 + layer as u64);
            let mut q = backend.buffer(20, 16).unwrap();
            let mut k = backend.buffer(20, 16).unwrap();
            let mut v = backend.buffer(20, 16).unwrap();
            k.data.copy_from_slice(&numbers.vector(20 * 16));
            v.data.copy_from_slice(&numbers.vector(20 * 16));
            // Halfway between two bfloat16 numbers, to either side.
            k.data[0] = f32::from_bits(0x3f80_8000);
            k.data[1] = f32::from_bits(0x3f81_8000);
            k.data[2] = f32::NAN;
            let batch = StepBatch {
                tokens: vec![0; 20],
                positions: (0..16).chain(0..4).collect(),
                slot_mapping: (0..20).rev().collect(),
                ..StepBatch::default()
            };
            backend.rope_kv_write(
                &batch,
                layer,
                &shape,
                &HeadInputs::NONE,
                &ones,
                &zeros,
                &mut q,
                &mut k,
                &v,
                &mut cache,
            );
            written.push((k, v));
        }
        let stored = |value: f32| match dtype {
            StorageType::Bf16 => bf16::from_f32(value).to_f32(),
            StorageType::F32 => value,
            StorageType::F16 => half::f16::from_f32(value).to_f32(),
        };
        for (layer, (k, v)) in written.iter().enumerate() {
            for slot in 0..20 {
                let (stored_k, stored_v) = cache.read_position(layer, slot);
                let row = 19 - slot as usize;
                for column in 0..16 {
                    let (expected, found) = (stored(k.row(row)[column]), stored_k[column]);
                    assert!(expected == found || (expected.is_nan() && found.is_nan()), "{layer} {slot} {column}");
                    assert_eq!(stored(v.row(row)[column]), stored_v[column], "{layer} {slot} {column}");
                }
            }
        }
    }
}

#[test]
fn block_bytes_are_what_the_cache_occupies() {
    for dtype in DTYPES {
        let shape = KvShape { layers: 5, kv_heads: 3, head_dim: 12, block_size: 16, blocks: 7, dtype };
        assert_eq!(kv_block_bytes(&shape), 2 * 5 * 3 * 12 * 16 * dtype.bytes());
        assert_eq!(KvCache::new(SimdLevel::detect(), shape, 2).unwrap().bytes(), 7 * kv_block_bytes(&shape));
    }
}

#[test]
fn an_impossible_cache_is_an_error_with_its_size() {
    let shape = KvShape {
        layers: 1 << 20,
        kv_heads: 1 << 20,
        head_dim: 128,
        block_size: 16,
        blocks: 1 << 40,
        dtype: StorageType::Bf16,
    };
    let message = KvCache::new(SimdLevel::detect(), shape, 1).unwrap_err().to_string();
    assert!(message.contains("KV cache"), "{message}");
}

#[test]
#[should_panic(expected = "block 9 of 4")]
fn a_block_outside_the_cache_is_refused() {
    let backend = backend(SimdLevel::detect(), 1);
    let shape = shape(1, 1, 8, None);
    let kv = KvShape { layers: 1, kv_heads: 1, head_dim: 8, block_size: 16, blocks: 4, dtype: StorageType::F32 };
    let cache = backend.kv_cache(kv).unwrap();
    let q = backend.buffer(1, 8).unwrap();
    let mut out = backend.buffer(1, 8).unwrap();
    let sequence = SequenceRows { first_row: 0, rows: 1, first_position: 0, table_first: 0, table_len: 1 };
    let batch = StepBatch { tokens: vec![0], sequences: vec![sequence], block_tables: vec![9], ..StepBatch::default() };
    backend.attention(&batch, 0, &shape, &q, &cache, &mut out);
}

#[test]
fn released_blocks_lose_their_memory_and_their_neighbours_nothing() {
    let shape = shape(4, 4, 64, None);
    let backend = backend(SimdLevel::detect(), 1);
    // 3 blocks of 40 KiB: neither start nor end of the middle one is on a page of 16 KiB or more.
    let kv = KvShape { layers: 1, kv_heads: 4, head_dim: 64, block_size: 40, blocks: 3, dtype: StorageType::Bf16 };
    let mut cache = backend.kv_cache(kv).unwrap();
    let ones = backend.vector(&[1.0; 40 * 32]).unwrap();
    let zeros = backend.vector(&[0.0; 40 * 32]).unwrap();
    let mut q = backend.buffer(120, 256).unwrap();
    let mut k = backend.buffer(120, 256).unwrap();
    let mut v = backend.buffer(120, 256).unwrap();
    k.data.fill(1.0);
    v.data.fill(2.0);
    let batch = StepBatch {
        tokens: vec![0; 120],
        positions: (0..120).map(|row| row % 40).collect(),
        slot_mapping: (0..120).collect(),
        ..StepBatch::default()
    };
    backend.rope_kv_write(&batch, 0, &shape, &HeadInputs::NONE, &ones, &zeros, &mut q, &mut k, &v, &mut cache);
    cache.release_blocks(&[1]);
    for slot in (0..40).chain(80..120) {
        assert_eq!(cache.read_position(0, slot), (vec![1.0; 256], vec![2.0; 256]), "slot {slot}");
    }
    if cfg!(target_os = "linux") {
        assert_eq!(cache.read_position(0, 60).1[0], 0.0, "the middle of the block was given back");
    }
    // A block that was given back can be used again.
    backend.rope_kv_write(&batch, 0, &shape, &HeadInputs::NONE, &ones, &zeros, &mut q, &mut k, &v, &mut cache);
    assert_eq!(cache.read_position(0, 60), (vec![1.0; 256], vec![2.0; 256]));
}

#[test]
#[should_panic(expected = "shares rows")]
fn sequences_that_share_rows_are_refused() {
    let backend = backend(SimdLevel::detect(), 1);
    let shape = shape(1, 1, 8, None);
    let kv = KvShape { layers: 1, kv_heads: 1, head_dim: 8, block_size: 16, blocks: 4, dtype: StorageType::F32 };
    let cache = backend.kv_cache(kv).unwrap();
    let q = backend.buffer(2, 8).unwrap();
    let mut out = backend.buffer(2, 8).unwrap();
    let first = SequenceRows { first_row: 0, rows: 2, first_position: 0, table_first: 0, table_len: 1 };
    let second = SequenceRows { first_row: 1, rows: 1, first_position: 0, table_first: 1, table_len: 1 };
    let sequences = vec![first, second];
    let batch = StepBatch { tokens: vec![0; 2], sequences, block_tables: vec![0, 1], ..StepBatch::default() };
    backend.attention(&batch, 0, &shape, &q, &cache, &mut out);
}
