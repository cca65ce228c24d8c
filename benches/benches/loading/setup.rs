//! The model in its two layouts, and the table of results.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use manylora::{DType, EngineConfig};
use manylora_benches::decode::{Turns, interval_of_median};
use manylora_benches::synthetic::{self, Shape};
use manylora_kernels::Backend;
use manylora_kernels::cpu::limits;
use manylora_kernels::cpu::{CpuBackend, CpuOptions};
use serde_json::{Map, Value, json};

pub(crate) const SHAPE: Shape = Shape::HALF_BILLION;

pub(crate) struct Options {
    pub(crate) parts: Vec<String>,
    pub(crate) rounds: usize,
    pub(crate) threads: Option<usize>,
    pub(crate) json: Option<PathBuf>,
    /// The model that a process of its own loads, whose peak of memory is asked for.
    pub(crate) child: Option<PathBuf>,
}

impl Options {
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut options = Self { parts: Vec::new(), rounds: 11, threads: None, json: None, child: None };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("`{argument}` needs a value"));
            match argument.as_str() {
                "--rounds" => options.rounds = value()?.parse()?,
                "--threads" => options.threads = Some(value()?.parse()?),
                "--json" => options.json = Some(value()?.into()),
                "--child" => options.child = Some(value()?.into()),
                // What cargo passes.
                "--bench" | "--test" => {}
                other if other.starts_with('-') => return Err(format!("unknown argument `{other}`").into()),
                part => options.parts.push(part.to_owned()),
            }
        }
        if options.rounds < 1 {
            return Err("a median needs one round at least".into());
        }
        Ok(options)
    }
}

/// One way in which the weights lie on disk.
pub(crate) struct Layout {
    pub(crate) name: &'static str,
    pub(crate) folder: PathBuf,
    /// Files with weights.
    pub(crate) files: Vec<PathBuf>,
}

pub(crate) struct Bench {
    pub(crate) options: Options,
    pub(crate) layouts: Vec<Layout>,
    machine: String,
    results: Map<String, Value>,
}

impl Bench {
    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    pub(crate) fn new(options: Options) -> Result<Self, Box<dyn Error>> {
        let mut layouts = Vec::new();
        println!("writing random weights to {} if they are not there", folder().display());
        for (name, count, folder) in
            [("one file", 1, folder().join("half-billion")), ("two shards", 2, folder().join("half-billion-in-two"))]
        {
            synthetic::model_in_files(&folder, &SHAPE, count)?;
            let mut files = Vec::new();
            for entry in std::fs::read_dir(&folder)? {
                let path = entry?.path();
                if path.extension().is_some_and(|extension| extension == "safetensors") {
                    // From here on it is in the page cache.
                    std::io::copy(&mut std::fs::File::open(&path)?, &mut std::io::sink())?;
                    files.push(path);
                }
            }
            layouts.push(Layout { name, folder, files });
        }
        let backend = backend(options.threads)?;
        let bandwidth = limits::read_bandwidth(backend.pool(), Duration::from_millis(300))?;
        let machine = format!("{}; read {:.1} GB/s", backend.describe(), bandwidth / 1e9);
        println!("{machine}");
        Ok(Self { options, layouts, machine, results: Map::new() })
    }

    /// Prints a figure and keeps it.
    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    pub(crate) fn result(&mut self, what: &str, value: f64) {
        println!("  {what:<84} {value:>10.4}");
        self.results.insert(what.to_owned(), value.into());
    }

    /// Prints and keeps what `way` takes in turns with `reference`.
    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    pub(crate) fn compare(&mut self, what: &str, turns: &Turns, way: usize, reference: usize) {
        let ratios = turns.ratios(way, reference);
        let (low, high) = interval_of_median(&ratios);
        let fastest = |way: usize| turns.values[way].iter().copied().fold(f64::INFINITY, f64::min);
        let (ratio, of_fastest) = (turns.ratio(way, reference), fastest(way) / fastest(reference));
        println!("  {what:<84} x{ratio:.3} ({low:.3} to {high:.3}), of the fastest x{of_fastest:.3}");
        let value = json!({ "time_ratio": ratio, "interval": [low, high], "ratio_of_fastest": of_fastest });
        self.results.insert(what.to_owned(), value);
    }

    pub(crate) fn write(&self) -> Result<(), Box<dyn Error>> {
        if let Some(path) = &self.options.json {
            let result = json!({
                "machine": self.machine, "model": "Qwen2.5-0.5B's shape, bf16, random weights",
                "rounds": self.options.rounds, "results": self.results,
            });
            std::fs::write(path, format!("{result:#}\n"))?;
        }
        Ok(())
    }
}

/// What an engine computes on.
pub(crate) fn backend(threads: Option<usize>) -> Result<CpuBackend, Box<dyn Error>> {
    Ok(CpuBackend::new(CpuOptions { num_threads: threads, ..CpuOptions::default() })?)
}

/// An engine's settings: its defaults, on a model without a tokenizer.
pub(crate) fn config(model: &Path, threads: Option<usize>) -> EngineConfig {
    let mut config = EngineConfig::new(model);
    config.skip_tokenizer_init = true;
    config.dtype = DType::BFloat16;
    config.num_threads = threads;
    config.enable_lora = true;
    config.max_lora_rank = 64;
    config
}

pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench-models")
}
