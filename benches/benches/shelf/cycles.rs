//! Loading and unloading 500 adapters one after the other: what it takes, and whether anything is left behind.

use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::time::Instant;

use manylora::{AdapterSource, Engine, UnloadMode};
use manylora_kernels::cpu::AlignedVec;

use super::setup::{ALL, Bench, adapter, median, request, resident_bytes};

const CYCLES: usize = 500;
const DIFFERENT: u64 = 16;
const BURSTS: usize = 9;

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    let sources = (0..DIFFERENT).map(|index| adapter(index, 16, &ALL)).collect::<Result<Vec<_>, _>>()?;
    let engine = bench.engine(|_| {})?;
    let mut seconds = Vec::new();
    let mut copies = Vec::new();
    let mut memory = Vec::new();
    let start = engine.stats()?;
    for cycle in 0..CYCLES + 50 {
        let source = &sources[cycle % sources.len()];
        let begin = Instant::now();
        engine.load_adapter(source.clone())?;
        seconds.push(begin.elapsed().as_secs_f64());
        engine.submit(request(cycle as u64, 8, 2, Some(&source.name)))?.collect_all()?;
        engine.unload_adapter(&source.name, UnloadMode::Drain)?;
        let begin = Instant::now();
        copy(source)?;
        copies.push(begin.elapsed().as_secs_f64());
        memory.push(resident_bytes());
    }
    let end = engine.stats()?;
    let part = |values: &[f64]| median(values.iter().copied());
    // The first cycles warm up: buffers, the page cache, the allocator.
    let (first, last) = (50..100, CYCLES..CYCLES + 50);
    bench.result("median load, ms", 1e3 * part(&seconds[50..]));
    bench.result("median load of one adapter / copying its bytes", part(&seconds[50..]) / part(&copies[50..]));
    bench.result("median load of the last 50 / of the first 50", part(&seconds[last]) / part(&seconds[first]));
    bench.result("memory at the end / after the first 50", memory[CYCLES + 49] / memory[49]);
    bench.result("adapter bytes at the end - at the start", end.adapter_bytes as f64 - start.adapter_bytes as f64);
    let ratios: Vec<f64> = (0..BURSTS).map(|_| burst(&engine, &sources)).collect::<Result<_, _>>()?;
    bench.result("throughput of loading 16 adapters at once / of copying them", median(ratios));
    Ok(())
}

/// What a load cannot do without: its bytes from the file into memory of their own, as the shelf has it.
fn copy(source: &AdapterSource) -> Result<AlignedVec<u8>, Box<dyn Error>> {
    let mut file = File::open(source.origin.path().ok_or("a folder")?.join("adapter_model.safetensors"))?;
    let mut bytes = AlignedVec::zeroed("a copy", file.metadata()?.len() as usize)?;
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Time for copying adapters one after the other, by the time for loading them when all are asked for at once.
fn burst(engine: &Engine, sources: &[AdapterSource]) -> Result<f64, Box<dyn Error>> {
    let begin = Instant::now();
    let copies = sources.iter().map(copy).collect::<Result<Vec<_>, _>>()?;
    let copied = begin.elapsed();
    drop(copies);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let load = |source: &AdapterSource| engine.load_adapter(source.clone()).map(|_| ());
        let loads: Vec<_> = sources.iter().map(|source| scope.spawn(move || load(source))).collect();
        loads.into_iter().try_for_each(|load| load.join().expect("loading does not panic"))
    })?;
    let loaded = begin.elapsed();
    for source in sources {
        engine.unload_adapter(&source.name, UnloadMode::Drain)?;
    }
    Ok(copied.as_secs_f64() / loaded.as_secs_f64())
}
