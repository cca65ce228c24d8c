//! Thousands of adapters of mixed rank against five, for the same token work.
//!
//! More adapters mean more bytes: each distinct adapter of a step is read once per step, and one that is not resident is
//! read from its file and packed. What that costs at least is their bytes at the measured bandwidth; what is lost beyond it
//! is the system's own doing. The shape of S-LoRA's second setting (ranks 8 to 64, 5 and 2000 adapters), which keeps 0.90
//! of the throughput on its hardware.

use std::error::Error;
use std::time::{Duration, Instant};

use manylora::AdapterSource;
use manylora_benches::roofline::Limits;
use manylora_kernels::cpu::{CpuBackend, CpuOptions};

use super::setup::{Bench, Random, adapter, request};

const RANKS: [usize; 4] = [64, 32, 16, 8];
const MAPS: [&str; 2] = ["q_proj", "v_proj"];
const REQUESTS: usize = 400;
const FEW: usize = 5;

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    let count = bench.options.adapters;
    let sources = (0..count)
        .map(|index| adapter(index as u64, RANKS[index % RANKS.len()], &MAPS))
        .collect::<Result<Vec<AdapterSource>, _>>()?;
    let backend = CpuBackend::new(CpuOptions::default())?;
    let mut runs = Vec::new();
    for adapters in [FEW, count] {
        let engine = bench.engine(|config| {
            config.max_num_seqs = 32;
            config.enable_prefix_caching = false;
        })?;
        engine.register_adapters(&sources[..adapters]).into_iter().collect::<Result<Vec<_>, _>>()?;
        let bandwidth = Limits::measure(&backend, Duration::from_millis(500))?.bandwidth;
        let mut random = Random::new(7);
        let requests = (0..REQUESTS)
            .map(|number| {
                let (input, output) = (8 + random.below(56), 8 + random.below(56));
                let name = &sources[random.below(adapters)].name;
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
        // Read from the file, and packed: written once.
        let loaded = 2.0 * (after.loaded_bytes - before.loaded_bytes) as f64;
        let streamed = (after.streamed_bytes - before.streamed_bytes) as f64;
        bench.result(&format!("{adapters} adapters: requests per second"), REQUESTS as f64 / seconds);
        bench.result(&format!("{adapters} adapters: gigabytes of adapters read by steps"), streamed / 1e9);
        bench.result(&format!("{adapters} adapters: gigabytes loaded"), loaded / 2e9);
        runs.push((seconds, (streamed + loaded) / bandwidth));
    }
    let [(few, few_bytes), (many, many_bytes)] = runs[..] else { return Err("two runs".into()) };
    let predicted = few + many_bytes - few_bytes;
    bench.result("throughput that the extra bytes alone predict / with 5 adapters", few / predicted);
    bench.result("throughput measured / with 5 adapters", few / many);
    bench.result("measured / predicted", predicted / many);
    Ok(())
}
