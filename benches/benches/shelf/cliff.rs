//! Twice as many adapters as there is room for: does the time to the first token fall off a cliff?
//!
//! The shape of SGLang's pull request 13349 (8 and 16 adapters, 8 slots, 100 requests), where the median went from 40 ms to
//! 6.3 s. Poisson arrivals at 0.7 of what 8 adapters serve at full load; the same arrivals for both.

use std::error::Error;
use std::time::{Duration, Instant};

use manylora::{AdapterSource, Engine};

use super::setup::{ALL, Bench, Random, Served, adapter, median, request, serve};

const ROOM: usize = 8;
const RANK: usize = 16;
const REQUESTS: usize = 100;
const INPUT: usize = 64;
const OUTPUT: usize = 32;
const LOAD: f64 = 0.7;
const SEQUENCES: usize = 16;

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    let sources: Vec<AdapterSource> =
        (0..2 * ROOM as u64).map(|index| adapter(index, RANK, &ALL)).collect::<Result<_, _>>()?;
    let bytes = {
        let engine = bench.engine(|_| {})?;
        engine.register_adapter(sources[0].clone())?.report.bytes
    };
    let start = |bench: &Bench, count: usize| -> Result<Engine, Box<dyn Error>> {
        let engine = bench.engine(|config| {
            config.lora_memory_bytes = Some(bytes * ROOM as u64);
            config.max_num_seqs = SEQUENCES;
            config.enable_prefix_caching = false;
        })?;
        for source in &sources[..count] {
            engine.load_adapter(source.clone())?;
        }
        Ok(engine)
    };
    let rate = capacity(&start(bench, ROOM)?, &sources[..ROOM])?;
    bench.result("8 adapters: requests per second at full load", rate);
    let mut medians = Vec::new();
    for count in [ROOM, 2 * ROOM] {
        let engine = start(bench, count)?;
        let before = engine.stats()?;
        let served = serve(&engine, arrivals(&sources[..count], LOAD * rate))?;
        let after = engine.stats()?;
        let mut times: Vec<f64> = served.iter().map(first_token).collect();
        times.sort_by(f64::total_cmp);
        medians.push(median(times.iter().copied()));
        let what = |what: &str| format!("{count} adapters, room for {ROOM}: {what}");
        bench.result(&what("median time to the first token, ms"), medians[medians.len() - 1]);
        bench.result(&what("99th percentile of it, ms"), times[times.len() * 99 / 100]);
        bench.result(&what("adapters read while serving"), (after.adapter_reads - before.adapter_reads) as f64);
    }
    bench.result("median time to the first token, 16 adapters / 8 adapters", medians[1] / medians[0]);
    Ok(())
}

fn first_token(served: &Served) -> f64 {
    1e3 * served.first_token.as_secs_f64()
}

/// Requests per second when they are all there from the start.
fn capacity(engine: &Engine, sources: &[AdapterSource]) -> Result<f64, Box<dyn Error>> {
    let start = Instant::now();
    serve(engine, arrivals(sources, f64::INFINITY))?;
    Ok(REQUESTS as f64 / start.elapsed().as_secs_f64())
}

fn arrivals(sources: &[AdapterSource], rate: f64) -> Vec<(Duration, manylora::GenerateRequest)> {
    let mut random = Random::new(42);
    let mut at = 0.0;
    (0..REQUESTS)
        .map(|number| {
            // Drawn alike for any number of adapters: arrivals and lengths are the same.
            let adapter = (random.uniform() * sources.len() as f64) as usize;
            at += random.exponential() / rate;
            let name = &sources[adapter.min(sources.len() - 1)].name;
            (Duration::from_secs_f64(at), request(number as u64, INPUT, OUTPUT, Some(name)))
        })
        .collect()
}
