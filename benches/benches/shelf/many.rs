//! Thousands of adapters of mixed rank against five, for the same token work.
//!
//! More adapters mean more bytes: each distinct adapter of a step is read once per step, and one that is not resident is
//! read from its file and packed. What that costs at least is their bytes at the measured bandwidth; what is lost beyond it
//! is the system's own doing. The shape of S-LoRA's second setting (ranks 8 to 64, 5 and 2000 adapters), which keeps 0.90
//! of the throughput on its hardware.

use std::error::Error;
use std::time::{Duration, Instant};

use manylora::{AdapterSource, Engine};
use manylora_benches::roofline::Limits;
use manylora_kernels::cpu::{CpuBackend, CpuOptions};

use super::setup::{Bench, Random, adapter, median, request};

const RANKS: [usize; 4] = [64, 32, 16, 8];
const MAPS: [&str; 2] = ["q_proj", "v_proj"];
const REQUESTS: usize = 300;
const FEW: usize = 5;
/// Runs with few and with many take turns; what is said is of the medians.
const ROUNDS: usize = 3;

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    let count = bench.options.adapters;
    let sources = (0..count)
        .map(|index| adapter(index as u64, RANKS[index % RANKS.len()], &MAPS))
        .collect::<Result<Vec<AdapterSource>, _>>()?;
    let backend = CpuBackend::new(CpuOptions::default())?;
    let mut runs = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (adapters, runs) in [FEW, count].into_iter().zip(&mut runs) {
            let engine = bench.engine(|config| {
                config.max_num_seqs = 32;
                config.enable_prefix_caching = false;
            })?;
            engine.register_adapters(&sources[..adapters]).into_iter().collect::<Result<Vec<_>, _>>()?;
            let bandwidth = Limits::measure(&backend, Duration::from_millis(500))?.bandwidth;
            runs.push(serve(&engine, &sources[..adapters], bandwidth)?);
        }
    }
    let [few, many] = runs.map(|runs| {
        let of = |value: fn(&Run) -> f64| median(runs.iter().map(value));
        Run {
            seconds: of(|run| run.seconds),
            steps: of(|run| run.steps),
            preemptions: of(|run| run.preemptions),
            streamed: of(|run| run.streamed),
            loaded: of(|run| run.loaded),
            bandwidth: of(|run| run.bandwidth),
        }
    });
    for (adapters, run) in [(FEW, &few), (count, &many)] {
        bench.result(&format!("{adapters} adapters: requests per second"), REQUESTS as f64 / run.seconds);
        bench.result(&format!("{adapters} adapters: steps"), run.steps);
        bench.result(&format!("{adapters} adapters: preemptions"), run.preemptions);
        bench.result(&format!("{adapters} adapters: gigabytes of adapters read by steps"), run.streamed / 1e9);
        bench.result(&format!("{adapters} adapters: gigabytes loaded"), run.loaded / 1e9);
    }
    let predicted = few.seconds + many.seconds_for_bytes() - few.seconds_for_bytes();
    bench.result("throughput that the extra bytes alone predict / with 5 adapters", few.seconds / predicted);
    bench.result("throughput measured / with 5 adapters", few.seconds / many.seconds);
    bench.result("measured / predicted", predicted / many.seconds);
    Ok(())
}

/// One run, in seconds, bytes, and bytes per second.
struct Run {
    seconds: f64,
    steps: f64,
    preemptions: f64,
    streamed: f64,
    loaded: f64,
    bandwidth: f64,
}

impl Run {
    /// What its bytes take at least: what was loaded was read from the file, and packed, that is written once.
    fn seconds_for_bytes(&self) -> f64 {
        (self.streamed + 2.0 * self.loaded) / self.bandwidth
    }
}

fn serve(engine: &Engine, sources: &[AdapterSource], bandwidth: f64) -> Result<Run, Box<dyn Error>> {
    let mut random = Random::new(7);
    let requests = (0..REQUESTS)
        .map(|number| {
            let (input, output) = (8 + random.below(56), 8 + random.below(56));
            let name = &sources[random.below(sources.len())].name;
            request(number as u64, input, output, Some(name))
        })
        .collect();
    let before = engine.stats()?;
    let begin = Instant::now();
    for mut stream in engine.submit_all(requests, false)? {
        stream.collect_all()?;
    }
    let seconds = begin.elapsed().as_secs_f64();
    let after = engine.stats()?;
    Ok(Run {
        seconds,
        steps: (after.steps - before.steps) as f64,
        preemptions: (after.core.preemptions - before.core.preemptions) as f64,
        streamed: (after.streamed_bytes - before.streamed_bytes) as f64,
        loaded: (after.loaded_bytes - before.loaded_bytes) as f64,
        bandwidth,
    })
}
