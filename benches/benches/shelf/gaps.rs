//! Streams that decode while adapters load: no gap between their tokens may grow because of it.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use manylora::ReadHook;

use super::setup::{ALL, Bench, Served, adapter, median, request, serve};

const STREAMS: u64 = 4;
const TOKENS: usize = 400;
const SLOW: Duration = Duration::from_millis(500);

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    let sources = (0..16).map(|index| adapter(index, 16, &ALL)).collect::<Result<Vec<_>, _>>()?;
    let slowed = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&slowed);
    let engine = bench.engine(|config| {
        config.max_cpu_loras = Some(8);
        config.before_read = Some(ReadHook::new(move |_| {
            if seen.load(Ordering::Relaxed) {
                std::thread::sleep(SLOW);
            }
            Ok(())
        }));
    })?;
    for source in &sources[..STREAMS as usize] {
        engine.load_adapter(source.clone())?;
    }
    let requests = |first: u64| {
        let one = |row: u64| (Duration::ZERO, request(first + row, 32, TOKENS, Some(&sources[row as usize].name)));
        (0..STREAMS).map(one).collect::<Vec<_>>()
    };
    let quiet = serve(&engine, requests(0))?;
    let undisturbed = report(bench, "nothing loads", &quiet, None);
    for (what, slow) in [("adapters load all the time", false), ("adapters load, each read slowed by 500 ms", true)] {
        slowed.store(slow, Ordering::Relaxed);
        let (stop, loads) = (AtomicBool::new(false), AtomicU64::new(0));
        let served = std::thread::scope(|scope| {
            // Loads and unloads the rest of the adapters for as long as the streams run.
            scope.spawn(|| {
                let rest = || sources[STREAMS as usize..].iter().cycle();
                for source in rest().take_while(|_| !stop.load(Ordering::Relaxed)) {
                    engine.load_adapter(source.clone()).expect("the adapter is good");
                    engine.unload_adapter(&source.name, manylora::UnloadMode::Drain).expect("nobody uses it");
                    loads.fetch_add(1, Ordering::Relaxed);
                }
            });
            let served = serve(&engine, requests(100 * (1 + u64::from(slow)))).map_err(|error| error.to_string());
            stop.store(true, Ordering::Relaxed);
            served
        })?;
        report(bench, what, &served, Some(undisturbed));
        bench.result(&format!("{what}: adapters loaded meanwhile"), loads.into_inner() as f64);
    }
    Ok(())
}

/// Prints what the gaps were, and returns their median; `undisturbed` is that of the run without loads.
fn report(bench: &mut Bench, what: &str, served: &[Served], undisturbed: Option<f64>) -> f64 {
    // The first gap may hold the rest of the other prompts: steps with prefill are another class.
    let mut gaps: Vec<f64> =
        served.iter().flat_map(|served| served.gaps.iter().skip(4)).map(|gap| 1e3 * gap.as_secs_f64()).collect();
    gaps.sort_by(f64::total_cmp);
    let middle = median(gaps.iter().copied());
    bench.result(&format!("{what}: median gap between tokens, ms"), middle);
    bench.result(&format!("{what}: 99.9th percentile of the gaps / median"), gaps[gaps.len() * 999 / 1000] / middle);
    let largest = gaps[gaps.len() - 1];
    bench.result(&format!("{what}: largest gap / median"), largest / middle);
    if let Some(undisturbed) = undisturbed {
        bench.result(&format!("{what}: largest gap / median when nothing loads"), largest / undisturbed);
    }
    middle
}
