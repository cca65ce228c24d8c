//! The most memory that a process has had in RAM when its engine is ready, files' pages included.

use std::error::Error;
use std::path::Path;
use std::process::Command;

use manylora::Engine;
use serde_json::{Value, json};

use super::setup::{Bench, config};

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    let cases: Vec<_> = bench.layouts.iter().map(|layout| (layout.name, layout.folder.clone())).collect();
    for (name, folder) in cases {
        let mut child = Command::new(std::env::current_exe()?);
        child.arg("--child").arg(&folder);
        if let Some(threads) = bench.options.threads {
            child.args(["--threads", &threads.to_string()]);
        }
        let output = child.output()?;
        if !output.status.success() {
            return Err(format!("{name}: {}", String::from_utf8_lossy(&output.stderr)).into());
        }
        let told: Value = serde_json::from_slice(&output.stdout)?;
        let figure = |key: &str| told[key].as_f64().ok_or(format!("no `{key}` in {told}"));
        let (peak, weights) = (figure("peak_bytes")?, figure("weight_bytes")?);
        bench.result(&format!("{name}: peak memory of the process, MB"), peak / 1e6);
        bench.result(&format!("{name}: peak memory of the process / packed weights"), peak / weights);
    }
    Ok(())
}

/// Starts an engine and tells the peak.
#[expect(clippy::print_stdout, reason = "the parent reads it")]
pub(crate) fn child(model: &Path, threads: Option<usize>) -> Result<(), Box<dyn Error>> {
    let engine = Engine::start(config(model, threads))?;
    println!("{}", json!({ "peak_bytes": peak_bytes()?, "weight_bytes": engine.info().weight_bytes }));
    Ok(())
}

fn peak_bytes() -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM in /proc/self/status")?;
    let kilobytes = line.trim().strip_suffix(" kB").ok_or("VmHWM is not in kB")?;
    Ok(1024 * kilobytes.parse::<u64>()?)
}
