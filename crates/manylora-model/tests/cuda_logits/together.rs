//! Whole steps of a decoder: what a sequence gets is the same bits alone and beside others.

use manylora_kernels::cuda::{CudaBackend, ProductChoice};
use manylora_kernels::{SequenceRows, StepBatch, StorageType};
use manylora_model::Runner;

use crate::cases::{self, Loaded};
use crate::harness::{BLOCK_SIZE, Model, Oracle};

/// Tokens that every sequence generates.
const GENERATED: usize = 5;

/// A sequence that decodes greedily.
struct Sequence {
    prompt: usize,
    /// Its adapters by their place in the list of slots, with factors.
    adapters: &'static [(usize, f32)],
    first_block: usize,
    tokens: Vec<u32>,
    /// Positions whose keys and values are in the cache.
    computed: usize,
    /// Bits of the logits that each generated token was chosen from.
    logits: Vec<Vec<u32>>,
}

impl Sequence {
    fn unfinished(&self) -> bool {
        self.tokens.len() < self.prompt + GENERATED
    }
}

/// One step over all of `sequences`, each with up to `chunk` rows of its own.
fn step(model: &mut Model<CudaBackend>, sequences: &mut [&mut Sequence], chunk: usize, slots: &[u32]) {
    let mut batch = StepBatch::default();
    let mut sampled = Vec::new();
    for (index, sequence) in sequences.iter_mut().enumerate() {
        let rows = chunk.min(sequence.tokens.len() - sequence.computed);
        let end = sequence.computed + rows;
        // Blocks from the back, so that ids and positions do not agree by accident.
        let block = |index: usize| (model.blocks() - 1 - sequence.first_block - index) as u32;
        let table = end.div_ceil(BLOCK_SIZE);
        batch.sequences.push(SequenceRows {
            first_row: batch.rows() as u32,
            rows: rows as u32,
            first_position: sequence.computed as u32,
            table_first: batch.block_tables.len() as u32,
            table_len: table as u32,
        });
        batch.block_tables.extend((0..table).map(block));
        for position in sequence.computed..end {
            let row = batch.rows() as u32;
            batch.tokens.push(sequence.tokens[position]);
            batch.positions.push(position as u32);
            let within = position % BLOCK_SIZE;
            batch.slot_mapping.push(block(position / BLOCK_SIZE) * BLOCK_SIZE as u32 + within as u32);
            for &(adapter, scale) in sequence.adapters {
                batch.adapters.push(row, slots[adapter], scale);
            }
        }
        sequence.computed = end;
        if end == sequence.tokens.len() {
            batch.sample_rows.push(batch.rows() as u32 - 1);
            sampled.push(index);
        }
    }
    batch.adapters.finish(batch.rows());
    let decoder = &mut model.decoder;
    decoder.forward(&batch).unwrap();
    let vocabulary = decoder.spec().vocab_size;
    let mut best = vec![0; sampled.len()];
    decoder.logits(&batch, 0, sampled.len()).unwrap();
    if sampled.is_empty() {
        return;
    }
    decoder.argmax(sampled.len(), &mut best).unwrap();
    let logits = decoder.read_logits(sampled.len()).unwrap();
    for ((index, logits), token) in sampled.into_iter().zip(logits.chunks_exact(vocabulary)).zip(best) {
        sequences[index].logits.push(logits.iter().map(|value| value.to_bits()).collect());
        sequences[index].tokens.push(token);
    }
}

/// Sequences with one adapter, none, several, and several in another order.
fn sequences(oracle: &Oracle) -> Vec<Sequence> {
    let chosen: [(&str, &[(usize, f32)]); 4] =
        [("few", &[(0, 1.0)]), ("chat", &[]), ("mid", &[(1, 0.5), (2, 1.0)]), ("long", &[(2, -0.5), (0, 0.25)])];
    let mut first_block = 0;
    let made = chosen.into_iter().map(|(prompt, adapters)| {
        let tokens = oracle.prompt(prompt);
        let first = first_block;
        first_block += (tokens.len() + GENERATED).div_ceil(BLOCK_SIZE);
        Sequence { prompt: tokens.len(), adapters, first_block: first, tokens, computed: 0, logits: Vec::new() }
    });
    made.collect()
}

/// Installs three adapters: the first two and the last of the base.
fn install(loaded: &mut Loaded, slots: &[u32]) {
    let names: Vec<String> = loaded.oracle.adapters().into_iter().map(|(name, _)| name).collect();
    let adapters: Vec<_> = names.iter().filter_map(|name| loaded.prepare(name).ok()).collect();
    assert!(adapters.len() >= 3);
    for (adapter, slot) in [&adapters[0], &adapters[1], &adapters[adapters.len() - 1]].into_iter().zip(slots) {
        cases::install(&mut loaded.model, *slot, adapter);
    }
}

/// Sequences that decode, prompts in chunks and prompts that start in between share steps that are
/// recorded; alone, each computes its prompt in one step, nothing is recorded, and adapters are in other slots.
pub(crate) fn solo_equals_batched(base: &str, dtype: StorageType, products: ProductChoice) {
    let mut alone = Loaded::open(base, dtype, false, products);
    install(&mut alone, &[0, 1, 2]);
    let mut wanted = sequences(&alone.oracle);
    for sequence in &mut wanted {
        while sequence.unfinished() {
            step(&mut alone.model, &mut [&mut *sequence], usize::MAX, &[0, 1, 2]);
        }
    }
    assert_eq!(alone.backend.recorded_steps(), 0);

    let mut together = Loaded::open(base, dtype, true, products);
    let slots = [9, 4, 70];
    install(&mut together, &slots);
    for (round, chunk) in [5, 5, 16, 1].into_iter().enumerate() {
        let mut got = sequences(&together.oracle);
        let mut steps = 0;
        while got.iter().any(Sequence::unfinished) {
            // They come one after the other.
            let mut present: Vec<&mut Sequence> =
                got.iter_mut().take(1 + steps / 2).filter(|sequence| sequence.unfinished()).collect();
            if present.is_empty() {
                steps += 1;
                continue;
            }
            step(&mut together.model, &mut present, chunk, &slots);
            steps += 1;
        }
        for (number, (got, want)) in got.iter().zip(&wanted).enumerate() {
            assert!(got.tokens == want.tokens, "{base}, round {round}: tokens of sequence {number} differ");
            assert!(got.logits == want.logits, "{base}, round {round}: logits of sequence {number} differ");
        }
    }
    assert!(together.backend.recorded_steps() > 3);
}
