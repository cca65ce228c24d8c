//! What adapters cost that are registered and not used: time to register them, and time of a step beside them.

use std::error::Error;
use std::time::Instant;

use manylora::AdapterSource;
use manylora_benches::decode::{Batch, Turns};

use super::setup::{Bench, adapter, request};

const FEW: usize = 2;
const MANY: usize = 10_000;
const MANIFEST: usize = 2000;

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    // What is in an adapter does not matter here, nor that many names stand for the same folder.
    let source = adapter(0, 8, &["q_proj", "v_proj"])?;
    let path = source.origin.path().ok_or("a folder")?.to_owned();
    let named = |index: usize| AdapterSource::directory(format!("tenant-{index}"), &path);
    let engine = |bench: &Bench, count: usize| -> Result<_, Box<dyn Error>> {
        let engine = bench.engine(|config| {
            config.enable_prefix_caching = false;
            config.kv_cache_memory_bytes = Some(256 << 20);
        })?;
        let sources: Vec<AdapterSource> = (0..count).map(named).collect();
        let begin = Instant::now();
        engine.register_adapters(&sources).into_iter().collect::<Result<Vec<_>, _>>()?;
        let seconds = begin.elapsed().as_secs_f64();
        let reads = engine.stats()?.adapter_reads;
        // One is used.
        engine.submit(request(0, 8, 2, Some("tenant-0")))?.collect_all()?;
        Ok((engine, seconds, reads))
    };
    let (_, seconds, reads) = engine(bench, MANIFEST)?;
    bench.result("registering 2000 adapters, s", seconds);
    bench.result("tensors read for it, in adapters", reads as f64);
    let (few, ..) = engine(bench, FEW)?;
    let (many, ..) = engine(bench, MANY)?;
    let adapter = |_: usize| Some("tenant-0".to_owned());
    let on = |engine| Batch { engine, rows: 4, prompt: 8, adapter: &adapter };
    let (on_few, on_many) = (on(&few), on(&many));
    let turns = Turns::take(40, &mut [&mut |round| on_few.step(round, 33), &mut |round| on_many.step(round, 33)]);
    bench.result("step with 10000 registered adapters / with 2", turns.ratio(1, 0));
    Ok(())
}
