//! Reading the oracle (expected results made with PEFT) and driving a decoder without an engine.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of this module")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use manylora_kernels::cpu::{CpuBackend, CpuOptions, SimdLevel};
use manylora_kernels::{Backend, SequenceRows, StepBatch, StorageType};
use manylora_model::Runner;
use manylora_model::checkpoint::Checkpoint;
use manylora_model::decoder::{Decoder, DecoderLimits};
use safetensors::SafeTensors;
use serde_json::Value;

/// Bases of the oracle.
pub const BASES: [&str; 9] =
    ["llama", "llama-tied", "llama-odd", "llama-deep", "llama-rope3", "qwen2", "qwen2-padded", "qwen3", "mistral"];

/// Logits and log-probabilities in f32, from the oracle's own advice.
pub const TOLERANCE: f32 = 1e-4;
/// Greedy tokens are compared up to the first margin below this in f32.
pub const NEAR_TIE: f64 = 1e-3;

/// The folder of the oracle: that of the sources, unless `MANYLORA_ORACLE_FOLDER` names another.
pub fn oracle_root() -> PathBuf {
    let named = std::env::var_os("MANYLORA_ORACLE_FOLDER").map(PathBuf::from);
    named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle"))
}

/// One base of the oracle with its expectations.
pub struct Oracle {
    pub folder: PathBuf,
    pub manifest: Value,
    arrays: Vec<u8>,
}

impl Oracle {
    pub fn open(base: &str) -> Self {
        Self::open_folder(oracle_root().join(base))
    }

    pub fn open_folder(folder: PathBuf) -> Self {
        let manifest = std::fs::read(folder.join("manifest.json")).unwrap();
        let arrays = std::fs::read(folder.join("expected.safetensors")).unwrap();
        Self { manifest: serde_json::from_slice(&manifest).unwrap(), arrays, folder }
    }

    pub fn base_folder(&self) -> PathBuf {
        self.folder.join("base")
    }

    pub fn prompt(&self, name: &str) -> Vec<u32> {
        self.manifest["prompts"][name]["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    /// Expectations by prompt of the base (None) or an adapter.
    pub fn expectations(&self, adapter: Option<&str>) -> Vec<(String, Value)> {
        let part = match adapter {
            None => &self.manifest["base_expect"],
            Some(name) => &self.manifest["adapters"][name]["expect_by_prompt"],
        };
        part.as_object()
            .map(|map| map.iter().map(|(key, value)| (key.clone(), value.clone())).collect())
            .unwrap_or_default()
    }

    pub fn adapters(&self) -> Vec<(String, Value)> {
        let adapters = self.manifest["adapters"].as_object().unwrap();
        adapters.iter().map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    pub fn array(&self, key: &str) -> Option<Vec<f32>> {
        let arrays = SafeTensors::deserialize(&self.arrays).unwrap();
        let view = arrays.tensor(key).ok()?;
        Some(view.data().chunks_exact(4).map(|it| f32::from_le_bytes([it[0], it[1], it[2], it[3]])).collect())
    }

    /// Largest stored half-precision error of PEFT itself.
    pub fn half_precision_error(&self, what: &str) -> f32 {
        self.manifest["tolerances"]["peft_half_precision_max_logit_error"]["bf16"][what].as_f64().unwrap() as f32
    }
}

pub fn positions(expectation: &Value) -> Vec<usize> {
    expectation["logit_positions"].as_array().unwrap().iter().map(|it| it.as_u64().unwrap() as usize).collect()
}

/// A decoder with room for one sequence of up to `CONTEXT` tokens in scattered blocks.
pub struct Model<B: Backend = CpuBackend> {
    pub decoder: Decoder<B>,
    blocks: usize,
    batch: StepBatch,
}

pub const BLOCK_SIZE: usize = 4;
pub const CONTEXT: usize = 192;

pub fn levels() -> Vec<SimdLevel> {
    SimdLevel::available()
}

pub fn backend(level: SimdLevel) -> Arc<CpuBackend> {
    let options = CpuOptions { num_threads: Some(2), level: Some(level), ..CpuOptions::default() };
    Arc::new(CpuBackend::new(options).unwrap())
}

impl Model {
    pub fn load(folder: &Path, dtype: StorageType, level: SimdLevel) -> Self {
        let checkpoint = Checkpoint::open(folder).unwrap();
        Self::from_checkpoint(&checkpoint, dtype, level)
    }

    pub fn from_checkpoint(checkpoint: &Checkpoint, dtype: StorageType, level: SimdLevel) -> Self {
        Self::on(backend(level), checkpoint, dtype)
    }
}

impl<B: Backend> Model<B> {
    pub fn on(backend: Arc<B>, checkpoint: &Checkpoint, dtype: StorageType) -> Self {
        let weights = Decoder::load(backend, checkpoint, dtype, &mut |_| {}).unwrap();
        let blocks = CONTEXT / BLOCK_SIZE + 3;
        let limits = DecoderLimits {
            max_rows: CONTEXT,
            max_logit_rows: 7,
            max_position: CONTEXT,
            block_size: BLOCK_SIZE,
            blocks,
            max_entries: CONTEXT,
            max_rank: 512,
        };
        Self { decoder: weights.allocate(limits).unwrap(), blocks, batch: StepBatch::default() }
    }

    /// Blocks of its cache.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// One step: rows `first..first + tokens.len()` of a sequence; logits of `wanted` positions (absolute).
    fn step(&mut self, tokens: &[u32], first: usize, wanted: &[usize], adapters: &[(u32, f32)]) {
        let batch = &mut self.batch;
        batch.clear();
        let end = first + tokens.len();
        // Blocks are taken from the back, so that ids and positions do not agree by accident.
        let block = |index: usize| (self.blocks - 1 - index) as u32;
        batch.block_tables.extend((0..end.div_ceil(BLOCK_SIZE)).map(block));
        batch.sequences.push(SequenceRows {
            first_row: 0,
            rows: tokens.len() as u32,
            first_position: first as u32,
            table_first: 0,
            table_len: batch.block_tables.len() as u32,
        });
        for (row, token) in tokens.iter().enumerate() {
            let position = first + row;
            batch.tokens.push(*token);
            batch.positions.push(position as u32);
            let slot = block(position / BLOCK_SIZE) as usize * BLOCK_SIZE + position % BLOCK_SIZE;
            batch.slot_mapping.push(slot as u32);
            if wanted.contains(&position) {
                batch.sample_rows.push(row as u32);
            }
            for (slot, scale) in adapters {
                batch.adapters.push(row as u32, *slot, *scale);
            }
        }
        batch.adapters.finish(tokens.len());
        self.decoder.forward(&self.batch).unwrap();
    }

    /// Logits at the given positions of a prompt, prefilled in chunks of `chunk` rows.
    pub fn logits(&mut self, tokens: &[u32], wanted: &[usize], adapters: &[(u32, f32)], chunk: usize) -> Vec<Vec<f32>> {
        let vocabulary = self.decoder.spec().vocab_size;
        let mut rows = Vec::new();
        for (index, part) in tokens.chunks(chunk).enumerate() {
            self.step(part, index * chunk, wanted, adapters);
            let sampled = self.batch.sample_rows.len();
            let most = self.decoder.max_logit_rows();
            for first in (0..sampled).step_by(most) {
                let count = most.min(sampled - first);
                self.decoder.logits(&self.batch, first, count).unwrap();
                rows.extend(self.decoder.read_logits(count).unwrap().chunks_exact(vocabulary).map(<[f32]>::to_vec));
            }
        }
        rows
    }

    /// Greedy continuation with the KV cache.
    pub fn greedy(&mut self, tokens: &[u32], count: usize, adapters: &[(u32, f32)]) -> Vec<u32> {
        let mut generated = Vec::with_capacity(count);
        let (mut input, mut first) = (tokens.to_vec(), 0);
        for _ in 0..count {
            self.step(&input, first, &[first + input.len() - 1], adapters);
            self.decoder.logits(&self.batch, 0, 1).unwrap();
            let mut best = [0];
            self.decoder.argmax(1, &mut best).unwrap();
            first += input.len();
            input = best.to_vec();
            generated.push(best[0]);
        }
        generated
    }
}

/// Largest absolute difference; infinite when a value is not finite or the lengths differ.
pub fn difference(got: &[f32], want: &[f32]) -> f32 {
    if got.len() != want.len() {
        return f32::INFINITY;
    }
    got.iter().zip(want).fold(0.0, |most, (got, want)| {
        let difference = (got - want).abs();
        if difference.is_nan() { f32::INFINITY } else { most.max(difference) }
    })
}

/// `log softmax(logits)[token]`, in f64.
pub fn logprob(logits: &[f32], token: u32) -> f32 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
    (f64::from(logits[token as usize] - most) - sum.ln()) as f32
}

/// Compares everything that is stored for one prompt; `key` is `<adapter or base>/<prompt>`. Returns the largest
/// difference of logits.
pub fn compare<B: Backend>(
    oracle: &Oracle,
    model: &mut Model<B>,
    label: &str,
    adapter: Option<&str>,
    adapters: &[(u32, f32)],
    tolerance: f32,
    near_tie: f64,
) -> f32 {
    let mut most: f32 = 0.0;
    for (prompt, expectation) in oracle.expectations(adapter) {
        most = most.max(compare_prompt(
            oracle,
            model,
            &format!("{label} {prompt}"),
            &format!("{}/{prompt}", adapter.unwrap_or("base")),
            &oracle.prompt(&prompt),
            &expectation,
            adapters,
            tolerance,
            near_tie,
        ));
    }
    most
}

#[allow(clippy::too_many_arguments)]
pub fn compare_prompt<B: Backend>(
    oracle: &Oracle,
    model: &mut Model<B>,
    label: &str,
    key: &str,
    tokens: &[u32],
    expectation: &Value,
    adapters: &[(u32, f32)],
    tolerance: f32,
    near_tie: f64,
) -> f32 {
    let all: Vec<usize> = (0..tokens.len()).collect();
    let logits = model.logits(tokens, &all, adapters, 13);
    let stored: Vec<f32> = positions(expectation).into_iter().flat_map(|position| logits[position].clone()).collect();
    let want = oracle.array(&format!("{key}/logits")).unwrap_or_else(|| panic!("{label}: no stored logits"));
    let most = difference(&stored, &want);
    assert!(most <= tolerance, "{label}: logits differ by {most}, more than {tolerance}");
    if let Some(want) = oracle.array(&format!("{key}/prompt_logprobs")) {
        let got: Vec<f32> = tokens.iter().skip(1).zip(&logits).map(|(token, logits)| logprob(logits, *token)).collect();
        let most = difference(&got, &want);
        assert!(most <= 2.0 * tolerance, "{label}: prompt logprobs differ by {most}");
    }
    let greedy: Vec<u32> =
        expectation["greedy"].as_array().unwrap().iter().map(|it| it.as_u64().unwrap() as u32).collect();
    let margins = expectation["margins"].as_array().unwrap();
    let got = model.greedy(tokens, greedy.len(), adapters);
    for (step, (got, want)) in got.iter().zip(&greedy).enumerate() {
        let margin = margins[step].as_f64().unwrap();
        if margin < near_tie {
            break;
        }
        assert_eq!(got, want, "{label}: greedy step {step} (margin {margin})");
    }
    most
}
