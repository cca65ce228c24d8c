//! Who reads, and how: many at once, some of whom go, and text that is the same whoever makes it.

mod common;

use std::path::Path;

use common::{Oracle, engine, greedy, load, request};
use manylora::model::tokenizer::{Detokenizer, Tokenizer};
use manylora::{Delta, Engine, EngineError, EngineHandle, GenerateRequest, SamplingParams};
use tokio_stream::StreamExt;

/// Requests of two samples each, on adapters and the base; every length up to 40.
fn many(oracle: &Oracle) -> Vec<GenerateRequest> {
    let prompts = ["few", "mid", "long"].map(|name| oracle.prompt(name));
    (0..64)
        .map(|row: usize| {
            let sampled = SamplingParams { temperature: 0.8, seed: Some(row as i64), n: 2, ..greedy(1 + row * 7 % 40) };
            request(&prompts[row % 3], [None, Some("alpha"), Some("beta")][row % 3], sampled)
        })
        .collect()
}

/// Token ids of each sample, read on one thread by as many tasks; those of which `patience` knows a number go after so many
/// deltas, and have None.
fn read_all(
    engine: &EngineHandle,
    requests: Vec<GenerateRequest>,
    patience: impl Fn(usize) -> Option<usize>,
    meanwhile: impl FnOnce(),
) -> Vec<Result<Option<Vec<Vec<u32>>>, EngineError>> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let streams = engine.submit_all(requests, true).expect("queued");
    let tasks: Vec<_> = streams
        .into_iter()
        .enumerate()
        .map(|(row, mut stream)| {
            let patience = patience(row);
            runtime.spawn(async move {
                let mut samples = vec![Vec::new(); 2];
                let mut seen = 0;
                while patience.is_none_or(|most| seen < most) {
                    match stream.next().await {
                        Some(Ok(delta)) => samples[delta.index].extend(delta.token_ids),
                        Some(Err(error)) => return Err(error),
                        None => return Ok(Some(samples)),
                    }
                    seen += 1;
                }
                Ok(None)
            })
        })
        .collect();
    runtime.block_on(async {
        // All of them wait before anything is done to the engine.
        tokio::task::yield_now().await;
        meanwhile();
        let mut read = Vec::new();
        for task in tasks {
            read.push(task.await.expect("no panic"));
        }
        read
    })
}

#[test]
fn of_many_readers_some_go_and_the_others_read_all() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    load(&engine, &oracle, &["alpha", "beta"]);
    let whole = |mut stream: manylora::RequestStream| {
        stream.collect_all().expect("it ends").into_iter().map(|sample| sample.token_ids).collect::<Vec<_>>()
    };
    let expected: Vec<_> = engine.submit_all(many(&oracle), false).expect("queued").into_iter().map(whole).collect();
    for round in 0..4 {
        let patience = |row: usize| (row % 5 == round).then_some(row % 11);
        let read = read_all(&engine, many(&oracle), patience, || {});
        for (row, (read, expected)) in read.into_iter().zip(&expected).enumerate() {
            match read.expect("no error") {
                Some(samples) => assert_eq!(&samples, expected, "request {row}"),
                None => assert!(patience(row).is_some(), "request {row}"),
            }
        }
        let idle = || engine.stats().is_ok_and(|stats| stats.running + stats.waiting == 0);
        while !idle() {
            std::thread::yield_now();
        }
        let stats = engine.stats().expect("stats");
        assert_eq!(stats.free_blocks, stats.total_blocks);
    }
}

#[test]
fn readers_of_an_engine_that_ends_are_told() {
    let oracle = Oracle::open("llama");
    let mut all = Vec::new();
    for _ in 0..8 {
        let engine = engine(&oracle, |_| {});
        load(&engine, &oracle, &["alpha", "beta"]);
        let handle = engine.handle();
        let read = read_all(&handle, many(&oracle), |_| None, || drop(engine));
        all.extend(read.into_iter().filter_map(Result::err).map(|error| error.to_string()));
    }
    assert!(!all.is_empty() && all.iter().all(|told| told.contains("shut down")), "{all:?}");
}

/// The base of an oracle with a tokenizer whose decoder is another one.
fn base_that_decodes_by(oracle: &Oracle, decoder: serde_json::Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(oracle.base_folder().join(file), folder.path().join(file)).expect("a copy");
    }
    let place = folder.path().join("tokenizer.json");
    let mut tokenizer: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&place).expect("a tokenizer")).expect("JSON");
    tokenizer["decoder"] = decoder;
    std::fs::write(place, tokenizer.to_string()).expect("a tokenizer");
    folder
}

/// Samples of a request, read delta by delta or whole.
fn samples(engine: &Engine, request: GenerateRequest, streaming: bool) -> Vec<Delta> {
    let mut stream = engine.submit_all(vec![request], streaming).expect("queued").remove(0);
    stream.collect_all().expect("it ends")
}

/// Where there are no stop strings whoever reads makes the text, else the engine does.
fn assert_same_text(base: &Path, is_bytewise: bool) {
    let engine = {
        let mut config = manylora::EngineConfig::new(base);
        config.device = manylora::Device::Cpu;
        config.kv_cache_memory_bytes = Some(4 << 20);
        config.num_threads = Some(1);
        Engine::start(config).expect("the engine starts")
    };
    let tokenizer = Tokenizer::from_directory(base).expect("a tokenizer");
    assert_eq!(tokenizer.is_bytewise(), is_bytewise);
    // Hot enough for any token, special ones and halves of characters among them.
    let hot = |seed: i64| SamplingParams {
        temperature: 2.0,
        seed: Some(seed),
        max_tokens: Some(1 + seed as usize % 24),
        ignore_eos: seed % 3 != 0,
        n: if seed % 4 == 0 { 3 } else { 1 },
        skip_special_tokens: seed % 5 != 0,
        spaces_between_special_tokens: seed % 7 != 0,
        include_stop_str_in_output: seed % 2 == 0,
        stop_token_ids: if seed % 6 < 3 { (100 + seed as u32 % 8..288).step_by(9).collect() } else { Vec::new() },
        ..SamplingParams::default()
    };
    let mut has_halves = false;
    for seed in 0..140_i64 {
        let prompt = ["A text, ", "x", "two words"][seed as usize % 3];
        let by = |stop: &[&str]| {
            let stop = stop.iter().map(|&stop| stop.to_owned()).collect();
            GenerateRequest::text(prompt).params(SamplingParams { stop, ..hot(seed) })
        };
        let never = by(&["this text never comes"]);
        let expected = samples(&engine, never.clone(), false);
        for (request, streaming) in [(by(&[]), true), (by(&[]), false), (never, true)] {
            for (got, expected) in samples(&engine, request, streaming).iter().zip(&expected) {
                assert_eq!((&got.text, &got.token_ids), (&expected.text, &expected.token_ids), "{seed} {streaming}");
                assert_eq!((got.finish_reason, &got.stop_reason), (expected.finish_reason, &expected.stop_reason));
                has_halves |= got.text.ends_with('\u{fffd}');
            }
        }
    }
    assert!(has_halves || !is_bytewise, "some end in the middle of a character");
    // An abort may come anywhere: what is there is the text of the tokens that are there.
    for seed in 0..30_i64 {
        let params = SamplingParams { max_tokens: Some(400), ignore_eos: true, ..hot(seed + 1) };
        let params = SamplingParams { n: 1, stop_token_ids: Vec::new(), ..params };
        let mut stream = engine.submit(GenerateRequest::text("x").params(params.clone())).expect("queued");
        let mut whole = Delta::default();
        for _ in 0..seed {
            whole.append(stream.next_delta().expect("it runs").expect("a delta"));
        }
        stream.abort();
        while let Some(delta) = stream.next_delta() {
            whole.append(delta.expect("a delta"));
        }
        let (skip, spaces) = (params.skip_special_tokens, params.spaces_between_special_tokens);
        let mut text = Detokenizer::after_prompt(&tokenizer, stream.prompt_token_ids(), skip, spaces).expect("one");
        let mut expected = String::new();
        whole.token_ids.iter().for_each(|&id| expected.push_str(text.push(id).expect("text")));
        expected.push_str(&text.finish().expect("text"));
        assert_eq!(whole.text, expected, "{seed}");
    }
}

#[test]
fn text_is_the_same_whoever_makes_it() {
    for name in ["llama", "mistral", "qwen2", "qwen3"] {
        assert_same_text(&Oracle::open(name).base_folder(), true);
    }
}

#[test]
fn text_of_other_decoders_is_the_same_whoever_makes_it() {
    let oracle = Oracle::open("llama");
    let pieces = serde_json::json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    let bytes =
        serde_json::json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let replaced = serde_json::json!({"type": "Replace", "pattern": {"String": "e"}, "content": "eh"});
    let both = serde_json::json!({"type": "Sequence", "decoders": [replaced, bytes]});
    for decoder in [pieces, both] {
        assert_same_text(base_that_decodes_by(&oracle, decoder).path(), false);
    }
}
