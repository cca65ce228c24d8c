//! Requests that are wrong are refused with words that name what is wrong, and leave the engine as it was.

mod common;

use common::{Oracle, answers, engine, greedy, load, request};
use manylora::{DType, Engine, EngineConfig, EngineError, FinishReason, GenerateRequest, SamplingParams, StopReason};

type Change<'a> = &'a dyn Fn(&mut EngineConfig);

#[test]
fn bad_requests_are_refused_by_name() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |config| config.max_model_len = Some(64));
    load(&engine, &oracle, &["alpha"]);
    let good = || request(&oracle.prompt("few"), Some("alpha"), greedy(4));
    let before = answers(&engine, vec![good()]);
    let with = |change: &dyn Fn(&mut SamplingParams)| {
        let mut params = greedy(4);
        change(&mut params);
        GenerateRequest::tokens([5, 6]).params(params)
    };
    let bad: Vec<(GenerateRequest, &str)> = vec![
        (GenerateRequest::tokens([]), "empty"),
        (GenerateRequest::tokens([5, 288]), "`288` is out of vocabulary"),
        (GenerateRequest::tokens(vec![5; 64]), "has 64 input tokens"),
        (GenerateRequest::tokens([5]).adapter("nope"), "`nope` is not loaded; loaded: alpha"),
        (GenerateRequest::tokens([5]).adapter_scaled("alpha", f32::NAN), "NaN"),
        (with(&|params| params.temperature = -1.0), "temperature"),
        (with(&|params| params.top_p = 0.0), "top_p"),
        (with(&|params| params.n = 0), "n must be"),
        (with(&|params| params.logprobs = Some(21)), "21"),
        (with(&|params| params.stop_token_ids = vec![999]), "999"),
        (with(&|params| params.allowed_token_ids = Some(vec![])), "allowed_token_ids"),
    ];
    for (request, words) in bad {
        let error = engine.submit(request.clone()).expect_err(words);
        assert!(error.to_string().contains(words), "`{error}` names `{words}`");
        // All or none: a good request beside a bad one is not run.
        engine.submit_all(vec![good(), request], false).expect_err(words);
    }
    assert_eq!(answers(&engine, vec![good()]), before);
    assert_eq!(engine.stats().expect("stats").running, 0);
}

#[test]
fn bad_configurations_are_refused_by_name() {
    let oracle = Oracle::open("llama");
    let start = |change: Change<'_>| {
        let mut config = EngineConfig::new(oracle.base_folder());
        change(&mut config);
        Engine::start(config).map(drop).expect_err("the configuration is refused").to_string()
    };
    let cases: [(Change<'_>, &str); 7] = [
        (&|config| config.model = "no/such/folder".into(), "no/such/folder"),
        (&|config| config.max_num_seqs = 0, "max_num_seqs"),
        (&|config| config.max_model_len = Some(513), "`513`"),
        (&|config| config.kv_cache_memory_bytes = Some(1000), "1000"),
        (&|config| config.kv_cache_memory_bytes = Some(1 << 60), "free"),
        (&|config| config.simd = Some("mmx".to_owned()), "mmx"),
        (&|config| config.max_lora_rank = 0, "max_lora_rank"),
    ];
    for (change, words) in cases {
        let error = start(change);
        assert!(error.contains(words), "`{error}` names `{words}`");
    }
}

/// `max_model_len` is lowered to what fits when it was not asked for, and one line says so.
#[test]
fn the_context_is_lowered_to_what_fits() {
    let oracle = Oracle::open("llama");
    let block = 2 * 2 * 2 * 8 * 4 * 4_u64;
    let engine = engine(&oracle, |config| {
        config.kv_cache_memory_bytes = Some(20 * block);
        config.enable_lora = false;
    });
    let info = engine.info();
    assert_eq!((info.max_model_len, info.kv_blocks), (80, 20));
    assert!(info.notes.iter().any(|note| note.contains("lowered from 512 to 80")), "{:?}", info.notes);
}

#[test]
fn stops_end_a_request_with_their_reason() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |config| config.dtype = DType::Float32);
    let plain = answers(&engine, vec![request(&oracle.prompt("few"), None, greedy(8))]).remove(0).0;
    let run = |change: &dyn Fn(&mut SamplingParams)| {
        let mut params = greedy(8);
        change(&mut params);
        let request = request(&oracle.prompt("few"), None, params);
        engine.submit(request).expect("queued").collect_all().expect("finishes").remove(0)
    };
    let third = plain[2];
    let sample = run(&|params| params.stop_token_ids = vec![third]);
    let stop = plain.iter().position(|&token| token == third).expect("it is there");
    assert_eq!(sample.token_ids, plain[..=stop]);
    assert_eq!(sample.finish_reason, Some(FinishReason::Stop));
    assert_eq!(sample.stop_reason, Some(StopReason::Token(third)));

    let whole = run(&|_| {});
    assert_eq!(whole.finish_reason, Some(FinishReason::Length));
    let text = whole.text;
    let middle = text.char_indices().nth(text.chars().count() / 2).expect("text").0;
    let needle: String = text[middle..].chars().take(2).collect();
    let sample = run(&|params| params.stop = vec![needle.clone()]);
    assert_eq!(sample.text, text[..text.find(&needle).expect("it is there")]);
    assert_eq!(sample.stop_reason, Some(StopReason::Text(needle.clone())));
    // Streamed text is the same text.
    let mut params = greedy(8);
    params.stop = vec![needle];
    let stream = engine.submit(request(&oracle.prompt("few"), None, params)).expect("queued");
    let streamed: String = stream.into_iter().map(|delta| delta.expect("a delta").text).collect();
    assert_eq!(streamed, sample.text);
}

/// `n` samples of one seed differ, and are the same again in another batch.
#[test]
fn samples_are_reproducible() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let sampled = || {
        let params = SamplingParams { temperature: 1.2, seed: Some(5), n: 4, ..greedy(10) };
        request(&oracle.prompt("mid"), None, params)
    };
    let run = |others: usize| {
        let mut requests: Vec<_> = (0..others).map(|_| request(&oracle.prompt("long"), None, greedy(12))).collect();
        requests.push(sampled());
        let mut streams = engine.submit_all(requests, false).expect("queued");
        let samples = streams.pop().expect("a stream").collect_all().expect("finishes");
        samples.into_iter().map(|sample| sample.token_ids).collect::<Vec<_>>()
    };
    let alone = run(0);
    assert_eq!(alone.len(), 4);
    assert!(alone.iter().skip(1).any(|sample| *sample != alone[0]));
    assert_eq!(run(5), alone);
}

#[test]
fn an_engine_that_is_gone_is_an_error_not_a_hang() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let handle = engine.handle();
    drop(engine);
    let error = handle.submit(GenerateRequest::tokens([5])).expect_err("stopped");
    assert!(matches!(error, EngineError::Stopped(_)));
}

/// `dtype=float16` computes in f32, and refuses a base that float16 could not hold.
#[test]
fn float16_refuses_values_beyond_its_range() {
    let oracle = Oracle::open("llama");
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(oracle.base_folder().join(file), folder.path().join(file)).expect("a copy");
    }
    let start = || {
        let mut config = EngineConfig::new(folder.path());
        config.dtype = DType::Float16;
        config.kv_cache_memory_bytes = Some(4 << 20);
        Engine::start(config)
    };
    start().expect("ordinary values are in range");
    let weights = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("read");
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&70_000_f32.to_le_bytes());
    std::fs::write(&weights, bytes).expect("written");
    let error = start().expect_err("70000 is beyond float16").to_string();
    assert!(error.contains("70000") && error.contains("float16"), "{error}");
}
