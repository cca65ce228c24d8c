//! Engines on the oracle's tiny bases, and reading what PEFT computes for them.

#![allow(
    clippy::unwrap_used,
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "part of several test binaries, each of which uses its own share; a panic is a failed test"
)]

#[path = "../../../manylora-model/tests/harness/mod.rs"]
mod harness;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use manylora::engine::Logits;
use manylora::model::adapter::MemoryTensor;
use manylora::{AdapterSource, DType, Device, Engine, EngineConfig, EngineHandle, GenerateRequest, SamplingParams};
use safetensors::SafeTensors;

pub use harness::{NEAR_TIE, Oracle, TOLERANCE, oracle_root, positions};

/// An engine on a base of the oracle: f32, small steps, a KV cache of 256 blocks unless `configure` says otherwise.
pub fn engine(oracle: &Oracle, configure: impl FnOnce(&mut EngineConfig)) -> Engine {
    let mut config = EngineConfig::new(oracle.base_folder());
    config.device = Device::Cpu;
    config.dtype = DType::Float32;
    config.max_lora_rank = 64;
    config.max_num_seqs = 16;
    config.max_num_batched_tokens = Some(64);
    config.block_size = 4;
    config.num_threads = Some(2);
    config.kv_cache_memory_bytes = Some(4 << 20);
    configure(&mut config);
    Engine::start(config).expect("the engine starts")
}

pub fn adapter_path(oracle: &Oracle, name: &str) -> PathBuf {
    oracle.folder.join("adapters").join(name)
}

pub fn load(engine: &EngineHandle, oracle: &Oracle, names: &[&str]) {
    for name in names {
        engine.load_adapter(AdapterSource::directory(*name, adapter_path(oracle, name))).expect("the adapter loads");
    }
}

/// An adapter of the oracle under a name, read by hand and given in memory.
pub fn in_memory(oracle: &Oracle, name: &str, adapter: &str) -> AdapterSource {
    let folder = adapter_path(oracle, adapter);
    let config = fs::read(folder.join("adapter_config.json")).expect("the configuration");
    let file = fs::read(folder.join("adapter_model.safetensors")).expect("the tensors");
    let tensors: BTreeMap<String, MemoryTensor> = SafeTensors::deserialize(&file)
        .expect("a good file")
        .iter()
        .map(|(key, view)| {
            let (shape, dtype, bytes) = (view.shape().to_vec(), view.dtype(), view.data().to_vec());
            (key.to_owned(), MemoryTensor { shape, dtype, bytes })
        })
        .collect();
    AdapterSource::memory(name, serde_json::from_slice(&config).expect("JSON"), tensors)
}

/// Compares the stored rows of a prompt's logits.
pub fn compare(oracle: &Oracle, key: &str, expectation: &serde_json::Value, logits: &Logits) {
    let wanted = oracle.array(&format!("{key}/logits")).unwrap_or_else(|| panic!("{key} has logits"));
    for (row, position) in positions(expectation).into_iter().enumerate() {
        let got = &logits.values[position * logits.vocab_size..(position + 1) * logits.vocab_size];
        let want = &wanted[row * logits.vocab_size..(row + 1) * logits.vocab_size];
        let worst = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
        assert!(worst <= TOLERANCE, "{key} position {position}: logits differ by {worst}");
    }
}

/// Greedy, `max_tokens` tokens whatever they are, with logprobs: everything that must be equal bit for bit.
pub fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams {
        temperature: 0.0,
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        logprobs: Some(2),
        ..SamplingParams::default()
    }
}

pub fn request(prompt: &[u32], adapter: Option<&str>, params: SamplingParams) -> GenerateRequest {
    let request = GenerateRequest::tokens(prompt).params(params);
    match adapter {
        Some(name) => request.adapter(name),
        None => request,
    }
}

/// Tokens and the bits of all logprobs.
pub type Answer = (Vec<u32>, Vec<(u32, u32)>);

/// Runs requests together and returns their first samples' answers, in order.
pub fn answers(engine: &EngineHandle, requests: Vec<GenerateRequest>) -> Vec<Answer> {
    let streams = engine.submit_all(requests, false).expect("the requests are good");
    streams
        .into_iter()
        .map(|mut stream| {
            let samples = stream.collect_all().expect("the request finishes");
            let sample = &samples[0];
            let bits = sample
                .logprobs
                .iter()
                .flat_map(|position| position.entries.iter().map(|entry| (entry.token, entry.logprob.to_bits())))
                .collect();
            (sample.token_ids.clone(), bits)
        })
        .collect()
}

/// Every ordering of base, ALPHA, BETA, ALPHA in one batch, the same prompt and sampling object: each answer is the one that
/// it is alone.
pub fn assert_every_ordering(engine: &Engine, oracle: &Oracle) {
    let prompt = oracle.prompt("long");
    let solo = |adapter| answers(engine, vec![request(&prompt, adapter, greedy(8))]).remove(0);
    let [base, alpha, beta] = [None, Some("alpha"), Some("beta")].map(solo);
    let all = [(None, &base), (Some("alpha"), &alpha), (Some("beta"), &beta), (Some("alpha"), &alpha)];
    for code in 0..256_usize {
        let order = [code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6];
        if (0..4).any(|index| !order.contains(&index)) {
            continue;
        }
        let requests = order.iter().map(|&index| request(&prompt, all[index].0, greedy(8))).collect();
        for (answer, &index) in answers(engine, requests).iter().zip(&order) {
            assert_eq!(answer, all[index].1, "{order:?}");
        }
    }
}
