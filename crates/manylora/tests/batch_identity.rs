//! Promise P3: the tokens and logprobs of a request do not depend on its neighbours, its row, chunking, preemption,
//! prefix-cache hits, eviction, load order or thread count, bit for bit.

mod common;

use common::{Answer, Oracle, answers, assert_every_ordering, engine, greedy, load, request};
use manylora::{Delta, Engine, EngineConfig, GenerateRequest, RequestStream, SamplingParams, StructuredOutputs};
use proptest::prelude::*;

const ADAPTERS: [Option<&str>; 7] =
    [None, Some("alpha"), Some("beta"), Some("gamma"), Some("rank5"), Some("embed-head-nocopy"), Some("layers-0")];

fn with_adapters(oracle: &Oracle, configure: impl FnOnce(&mut EngineConfig)) -> Engine {
    let engine = engine(oracle, configure);
    let names: Vec<&str> = ADAPTERS.iter().flatten().copied().collect();
    load(&engine, oracle, &names);
    engine
}

/// A request by numbers, so that proptest can shrink it.
#[derive(Clone, Debug)]
struct Row {
    adapter: usize,
    prompt: Vec<u32>,
    max_tokens: usize,
    sampled: bool,
}

impl Row {
    fn request(&self) -> GenerateRequest {
        let greedy = greedy(self.max_tokens);
        let params = if self.sampled {
            SamplingParams { temperature: 0.9, top_p: 0.9, seed: Some(11), repetition_penalty: 1.1, ..greedy }
        } else {
            greedy
        };
        request(&self.prompt, ADAPTERS[self.adapter], params)
    }
}

fn rows() -> impl Strategy<Value = Vec<Row>> {
    // Few distinct prompts of several blocks, so that prefixes are shared across adapters.
    let prompt = (0_u32..3, 1_usize..40)
        .prop_map(|(kind, length)| (0..length as u32).map(|index| 3 + (index * 7 + kind * 31) % 250).collect());
    let row = (0..ADAPTERS.len(), prompt, 1_usize..12, any::<bool>())
        .prop_map(|(adapter, prompt, max_tokens, sampled)| Row { adapter, prompt, max_tokens, sampled });
    prop::collection::vec(row, 1..12)
}

fn solo(engine: &Engine, rows: &[Row]) -> Vec<Answer> {
    rows.iter().flat_map(|row| answers(engine, vec![row.request()])).collect()
}

#[test]
fn solo_equals_batched_bit_for_bit() {
    let oracle = Oracle::open("llama");
    let reference = with_adapters(&oracle, |config| config.enable_prefix_caching = false);
    let adapter_bytes = reference.stats().expect("stats").adapter_bytes;
    let variants: Vec<(&str, Engine)> = vec![
        ("batched", with_adapters(&oracle, |_| {})),
        (
            "chunks of 5",
            with_adapters(&oracle, |config| {
                config.max_num_batched_tokens = Some(5);
                config.max_num_seqs = 4;
            }),
        ),
        // 20 blocks of 1 KiB beside all adapters, where one sequence takes up to 13: requests are preempted all the time.
        (
            "tiny KV pool",
            with_adapters(&oracle, |config| {
                config.max_model_len = Some(52);
                config.kv_cache_memory_bytes = Some(adapter_bytes + 20 * 1024);
            }),
        ),
        ("one thread", with_adapters(&oracle, |config| config.num_threads = Some(1))),
        ("blocks of 16", with_adapters(&oracle, |config| config.block_size = 16)),
        ("one adapter a step", with_adapters(&oracle, |config| config.max_loras = Some(1))),
        (
            "two resident adapters",
            with_adapters(&oracle, |config| {
                config.max_loras = Some(2);
                config.max_cpu_loras = Some(2);
            }),
        ),
    ];
    let config = ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    runner
        .run(&rows(), |rows| {
            let expected = solo(&reference, &rows);
            for (name, engine) in &variants {
                let got = answers(engine, rows.iter().map(Row::request).collect());
                prop_assert_eq!(&got, &expected, "{}", name);
            }
            Ok(())
        })
        .expect("every variant gives the solo answers");
    // The variants did what they are there for.
    let stats = |name: &str| {
        let (_, engine) = variants.iter().find(|(variant, _)| *variant == name).expect("a variant");
        engine.stats().expect("stats")
    };
    assert!(stats("batched").prefix_cache_hits > 1000);
    assert!(stats("tiny KV pool").preemptions > 0);
    assert!(stats("two resident adapters").evictions > 100);
}

/// A-37, promise P4: LoRA off, on with nothing loaded, and on with idle adapters give identical base results.
#[test]
fn a_37_base_is_neutral() {
    let oracle = Oracle::open("llama");
    let prompts = ["few", "mid", "long"].map(|name| oracle.prompt(name));
    let run =
        |engine: &Engine| answers(engine, prompts.iter().map(|prompt| request(prompt, None, greedy(8))).collect());
    let off = run(&engine(&oracle, |config| config.enable_lora = false));
    assert_eq!(run(&engine(&oracle, |_| {})), off);
    assert_eq!(run(&with_adapters(&oracle, |_| {})), off);
}

/// every ordering of base, ALPHA, BETA, ALPHA in one batch, the same prompt and sampling object.
#[test]
fn a_36_every_ordering_of_one_batch() {
    let oracle = Oracle::open("llama");
    let engine = with_adapters(&oracle, |_| {});
    assert_every_ordering(&engine, &oracle);
}

/// the same greedy request 50 times, alone and among 16 others.
#[test]
fn a_43_repeats_are_bit_equal() {
    let oracle = Oracle::open("llama");
    let engine = with_adapters(&oracle, |_| {});
    let one = || request(&oracle.prompt("mid"), Some("alpha"), greedy(6));
    let first = answers(&engine, vec![one()]).remove(0);
    for _ in 0..50 {
        assert_eq!(answers(&engine, vec![one()]).remove(0), first);
    }
    for answer in answers(&engine, (0..17).map(|_| one()).collect()) {
        assert_eq!(answer, first);
    }
}

/// Tokens are drawn in chunks of rows, by as many threads as there are: each is the one that it is alone.
#[test]
fn draws_are_bit_equal_in_chunks_and_on_any_number_of_threads() {
    let oracle = Oracle::open("llama");
    let requests = || -> Vec<GenerateRequest> {
        let one = |row: usize| {
            let base = SamplingParams { temperature: 0.9, seed: Some(row as i64), ..greedy(3 + row % 9) };
            let params = match row % 8 {
                0 => SamplingParams { temperature: 0.0, ..base },
                1 => SamplingParams { top_k: 5, logprobs: None, ..base },
                2 => SamplingParams { top_p: 0.9, ..base },
                3 => SamplingParams { min_p: 0.05, ..base },
                4 => SamplingParams { logprobs: Some(20), ..base },
                5 => SamplingParams {
                    structured_outputs: Some(StructuredOutputs {
                        regex: Some("[a-z]{2,12}".to_owned()),
                        ..StructuredOutputs::default()
                    }),
                    ignore_eos: false,
                    ..base
                },
                6 => SamplingParams { prompt_logprobs: Some(3), logprobs: None, ..base },
                _ => SamplingParams { prompt_logprobs: Some(0), top_p: 0.8, repetition_penalty: 1.2, ..base },
            };
            let prompt: Vec<u32> = (0..6 + row as u32 % 13).map(|index| 3 + (index * 7 + row as u32) % 250).collect();
            request(&prompt, ADAPTERS[row % ADAPTERS.len()], params)
        };
        (0..40).map(one).collect()
    };
    let all = |engine: &Engine, requests: Vec<GenerateRequest>| -> Vec<Delta> {
        let streams = engine.submit_all(requests, false).expect("queued");
        let first = |mut stream: RequestStream| stream.collect_all().expect("it ends").remove(0);
        streams.into_iter().map(first).map(|delta| Delta { timing: None, cached_tokens: 0, ..delta }).collect()
    };
    let reference = with_adapters(&oracle, |config| {
        config.enable_prefix_caching = false;
        config.num_threads = Some(1);
    });
    let alone: Vec<Delta> = requests().into_iter().flat_map(|request| all(&reference, vec![request])).collect();
    for threads in 1..=3 {
        // Logits of six rows at a time, where a step has up to 64.
        let engine = with_adapters(&oracle, |config| {
            config.max_num_seqs = 6;
            config.num_threads = Some(threads);
        });
        assert_eq!(all(&engine, requests()), alone, "{threads} threads");
    }
}
