//! Brings an engine into a case's situation and reads its clock.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt as _;
use manylora::{
    AdapterSource, Engine, EngineConfig, EngineStats, GenerateRequest, Phase, PhaseSeconds, SamplingParams,
};
use manylora_benches::decode::median;
use manylora_benches::synthetic::{self, Shape};

use crate::Options;
use crate::cases::{Case, RUNNING};

/// Almost nothing, under a case's vocabulary.
const SHAPE: Shape = Shape {
    hidden: 64,
    intermediate: 96,
    layers: 1,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    vocab: 0,
    tied: true,
    positions: 8192,
};
const PROMPT: usize = 8;
/// Steps before the first window: all have begun and have room for what they become.
const WARM_UP: u64 = 24;
/// Steps of a window, at least: to look costs a walk over all that wait, and must not be what is seen.
const WINDOW: u64 = 16;
const POLL: Duration = Duration::from_millis(10);

/// Microseconds per step of each phase, window by window.
#[derive(Clone, Debug, Default)]
pub(crate) struct Windows([Vec<f64>; Phase::ALL.len()]);

impl Windows {
    fn push(&mut self, steps: u64, before: &PhaseSeconds, after: &PhaseSeconds) {
        for (values, phase) in self.0.iter_mut().zip(Phase::ALL) {
            values.push((after.of(phase) - before.of(phase)) * 1e6 / steps as f64);
        }
    }

    pub(crate) fn extend(&mut self, other: Self) {
        for (values, others) in self.0.iter_mut().zip(other.0) {
            values.extend(others);
        }
    }

    pub(crate) fn median(&self, phase: Phase) -> f64 {
        median(&self.0[phase as usize])
    }

    /// The value below which a tenth of the windows lie: what remains where others take their share of the machine now and
    /// then.
    pub(crate) fn undisturbed(&self, phase: Phase) -> f64 {
        let mut sorted = self.0[phase as usize].clone();
        sorted.sort_by(f64::total_cmp);
        sorted[(sorted.len() - 1) / 10]
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench-models/overhead")
}

fn start(case: &Case, options: &Options) -> Result<Engine, Box<dyn Error>> {
    let model = folder().join(format!("model-{}", case.vocabulary));
    synthetic::model(&model, &Shape { vocab: case.vocabulary, ..SHAPE })?;
    let mut config = EngineConfig::new(model);
    config.tokenizer = Some(options.tokenizer.clone());
    config.max_num_seqs = RUNNING;
    config.kv_cache_memory_bytes = Some(512 << 20);
    // The other cores are left to those who read the streams.
    config.num_threads = Some(1);
    if case.cold {
        config.max_cpu_loras = Some(case.adapters);
    }
    let engine = Engine::start(config)?;
    let sources = (0..case.adapters + case.registered)
        .map(|index| {
            let path = folder().join(name(index));
            synthetic::adapter_on(&path, &SHAPE, 8, index as u64 + 1, &["q_proj"])?;
            Ok(AdapterSource::directory(name(index), path))
        })
        .collect::<Result<Vec<_>, std::io::Error>>()?;
    engine.register_adapters(&sources).into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(engine)
}

fn name(index: usize) -> String {
    format!("adapter-{index}")
}

fn request(case: &Case, number: usize) -> GenerateRequest {
    let prompt: Vec<u32> = (0..PROMPT).map(|at| ((at * 131 + number * 7919) % 1_000) as u32 + 1).collect();
    let (temperature, top_p, seed) = if case.sampled {
        // Logits of random weights are nearly alike: this makes them as uneven as a trained model's.
        (0.05, 0.95, Some(number as i64))
    } else {
        (0.0, 1.0, None)
    };
    let max_tokens = Some(case.tokens + number % case.tokens);
    let params = SamplingParams { temperature, top_p, seed, max_tokens, ignore_eos: true, ..SamplingParams::default() };
    let request = GenerateRequest::tokens(prompt).params(params);
    let adapter = match case.adapters {
        0 => return request,
        adapters if case.cold && number >= RUNNING => adapters + number % case.registered,
        adapters => number % adapters,
    };
    request.adapter(name(adapter))
}

/// The processor, and the windows of one run.
pub(crate) fn run(case: &Case, options: &Options) -> Result<(String, Windows), Box<dyn Error>> {
    let engine = start(case, options)?;
    let readers = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build()?;
    let submit = |numbers: std::ops::Range<usize>| -> Result<(), Box<dyn Error>> {
        for number in numbers {
            let mut stream = engine.submit_all(vec![request(case, number)], true)?.pop().ok_or("one stream")?;
            readers.spawn(async move { while stream.next().await.is_some_and(|delta| delta.is_ok()) {} });
        }
        Ok(())
    };
    // Those that run are there before those that wait.
    submit(0..RUNNING)?;
    wait(&engine, |stats| stats.running == RUNNING || stats.meters.ended.length > 0)?;
    submit(RUNNING..RUNNING + case.waiting)?;
    let begun = engine.stats()?.steps;
    let mut before = wait(&engine, |stats| stats.steps >= begun + WARM_UP)?;
    let mut windows = Windows::default();
    for _ in 0..options.windows {
        let next = wait(&engine, |stats| stats.steps >= before.steps + WINDOW)?;
        // Between two steps the places of those that have ended are empty.
        if next.running + next.waiting < RUNNING {
            return Err(
                format!("`{}` requests are left of `{}`: give fewer `--windows`", next.running, case.name).into()
            );
        }
        windows.push(next.steps - before.steps, &before.phase_seconds, &next.phase_seconds);
        before = next;
    }
    let described = engine.info().backend.clone();
    // The engine first: its streams end, and with them the tasks that read them.
    drop(engine);
    readers.shutdown_background();
    Ok((described, windows))
}

/// Looks at the engine until it is as wanted.
fn wait(engine: &Engine, is_wanted: impl Fn(&EngineStats) -> bool) -> Result<EngineStats, Box<dyn Error>> {
    loop {
        let stats = engine.stats()?;
        if is_wanted(&stats) {
            return Ok(stats);
        }
        if stats.meters.ended.error > 0 {
            return Err("a request failed".into());
        }
        std::thread::sleep(POLL);
    }
}
