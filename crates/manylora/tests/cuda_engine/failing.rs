//! What becomes of failures of the device, of aborts and of the end.

use std::collections::BTreeSet;

use manylora::{AdapterSource, EngineError, SamplingParams};

use crate::common::{Oracle, adapter_path, greedy, request};
use crate::serving::on_card;
use crate::stand_in::StandIn;
use crate::stand_in::sweep::sweep;

/// Starts, loads two adapters one of which takes the other's place, generates in a batch, greedily and drawing from whole rows,
/// and ends. Requests of a step that failed are told so, all of them.
fn session(oracle: &Oracle) -> Result<(), EngineError> {
    let mut config = manylora::EngineConfig::new(oracle.base_folder());
    config.device = manylora::Device::Cuda { ordinal: 0 };
    config.max_num_seqs = 4;
    config.max_num_batched_tokens = Some(8);
    config.block_size = 4;
    config.max_model_len = Some(32);
    config.kv_cache_memory_bytes = Some(1 << 20);
    config.max_cpu_loras = Some(1);
    config.loader_threads = Some(1);
    let engine = manylora::Engine::start(config)?;
    for name in ["alpha", "beta"] {
        engine.load_adapter(AdapterSource::directory(name, adapter_path(oracle, name)))?;
        let drawn = |seed| SamplingParams { temperature: 1.0, seed: Some(seed), ..greedy(5) };
        let all = [(None, greedy(5)), (Some(name), greedy(5)), (None, drawn(1)), (Some(name), drawn(2))];
        let requests = all.map(|(adapter, params)| request(&[5, 6, 7, 8], adapter, params));
        let streams = engine.submit_all(requests.into(), false)?;
        // All of them are waited for: one that failed must not leave another without an end.
        let results: Vec<_> = streams.into_iter().map(|mut stream| stream.collect_all().map(drop)).collect();
        for error in results.iter().filter_map(|result| result.as_ref().err()) {
            let told = error.to_string();
            assert!(!told.contains("it ended before"), "{told}");
        }
        results.into_iter().collect::<Result<(), _>>()?;
    }
    Ok(())
}

/// Calls of a function that are made to fail: the first few, some in the middle, the last few.
fn chosen(count: u64) -> Vec<u64> {
    let middle = [count / 4, count / 2, 3 * count / 4];
    let all = [1, 2, count.saturating_sub(1), count].into_iter().chain(middle);
    // Each once.
    all.filter(|&nth| nth >= 1 && nth <= count).collect::<BTreeSet<u64>>().into_iter().collect()
}

/// One function of the driver or of cuBLASLt fails, each in turn: a clean error, no panic, no hang, nothing left behind.
pub(crate) fn every_function_in_turn() {
    let oracle = Oracle::open("llama");
    // Codes that both libraries know: what is left when nothing else fits.
    let codes = |function: &str| -> &'static [i32] { if function.starts_with("cublas") { &[14] } else { &[999] } };
    let clean = |what: &str, text: &str| assert!(!text.contains("its thread failed"), "{what}: {text}");
    let swept = sweep(|| session(&oracle), chosen, codes, clean);
    let (functions, runs, noticed) = (swept.functions, swept.runs, swept.noticed);
    assert!(functions > 40 && runs > 100 && noticed > runs / 2, "{functions} {runs} {noticed}");
}

/// Requests are aborted while they run, and the engine is dropped while they run: everything ends, nothing is held.
pub(crate) fn aborts_and_shutdown() {
    let oracle = Oracle::open("llama");
    let stand_in = StandIn::get();
    let engine = on_card(&oracle, |_| {});
    for name in ["alpha", "beta"] {
        engine.load_adapter(AdapterSource::directory(name, adapter_path(&oracle, name))).unwrap();
    }
    let prompt = oracle.prompt("few");
    let many =
        || (0..6).map(|row| request(&prompt, [None, Some("alpha"), Some("beta")][row % 3], greedy(300))).collect();
    let mut streams = engine.submit_all(many(), true).unwrap();
    for stream in &mut streams {
        stream.next_delta().unwrap().unwrap();
    }
    // Dropping a stream aborts its request.
    streams.truncate(2);
    for stream in &mut streams {
        stream.next_delta().unwrap().unwrap();
    }
    drop(streams);
    let idle = || engine.stats().is_ok_and(|stats| stats.running + stats.waiting == 0);
    while !idle() {
        std::thread::yield_now();
    }
    assert_eq!(engine.stats().unwrap().free_blocks, engine.stats().unwrap().total_blocks);
    let mut streams = engine.submit_all(many(), true).unwrap();
    streams[0].next_delta().unwrap().unwrap();
    // Handles that stay behind hold nothing of the device.
    let handle = engine.handle();
    drop(engine);
    for mut stream in streams {
        let error = stream.collect_all().expect_err("the engine is gone").to_string();
        assert!(error.contains("shut down"), "{error}");
    }
    stand_in.assert_nothing_held();
    let source = AdapterSource::directory("gamma", adapter_path(&oracle, "gamma"));
    let error = handle.load_adapter(source).expect_err("the engine is gone").to_string();
    assert!(error.contains("shut down"), "{error}");
}
