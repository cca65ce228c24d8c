//! The engines, the adapters, and how a case is measured: as a fraction of the machine's limits, or in turns with another.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use manylora::{AdapterSource, DType, Engine, EngineConfig, UnloadMode};
use manylora_benches::decode::{Batch, Turns, interval_of_median, median};
use manylora_benches::roofline::{Limits, Work};
use manylora_benches::synthetic::{self, Shape};
use manylora_kernels::cpu::{CpuBackend, CpuOptions};
use serde_json::{Value, json};

pub(crate) const SHAPE: Shape = Shape::HALF_BILLION;
/// Tokens of a prompt where decoding is measured.
pub(crate) const PROMPT: usize = 16;
/// The adapters' rank where nothing else is said.
pub(crate) const RANK: usize = 16;
pub(crate) const ADAPTERS: usize = 8;
/// Time for each measurement of the machine's limits.
const LIMIT_TIME: Duration = Duration::from_millis(60);
/// Share of the fastest steps (and limits) that say what the machine does while nothing disturbs it.
const UNDISTURBED: f64 = 0.1;

pub(crate) struct Options {
    pub(crate) json: Option<PathBuf>,
    pub(crate) parts: Vec<String>,
    pub(crate) tokens: usize,
    pub(crate) rounds: usize,
    pub(crate) threads: Option<usize>,
    /// Words in the names of the cases to measure.
    pub(crate) only: Option<String>,
}

impl Options {
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut options = Self { json: None, parts: Vec::new(), tokens: 10, rounds: 12, threads: None, only: None };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("`{argument}` needs a value"));
            match argument.as_str() {
                "--json" => options.json = Some(value()?.into()),
                "--tokens" => options.tokens = value()?.parse()?,
                "--rounds" => options.rounds = value()?.parse()?,
                "--threads" => options.threads = Some(value()?.parse()?),
                "--only" => options.only = Some(value()?),
                // What cargo passes.
                "--bench" | "--test" => {}
                other if other.starts_with('-') => return Err(format!("unknown argument `{other}`").into()),
                part => options.parts.push(part.to_owned()),
            }
        }
        if options.tokens < 3 || options.rounds < 1 {
            return Err("decode steps need `--tokens` of 3 or more, and a median one round at least".into());
        }
        Ok(options)
    }

    /// Whether a case is to be measured.
    pub(crate) fn wants(&self, what: &str) -> bool {
        self.only.as_ref().is_none_or(|only| what.contains(only))
    }
}

pub(crate) struct Bench {
    pub(crate) options: Options,
    pub(crate) machine: String,
    /// With LoRA, and nothing loaded until somebody does.
    pub(crate) engine: Engine,
    backend: CpuBackend,
    cases: Vec<Value>,
    comparisons: Vec<Value>,
}

impl Bench {
    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    pub(crate) fn new(options: Options) -> Result<Self, Box<dyn Error>> {
        let model = model_folder();
        println!("writing random weights to {} if they are not there", model.display());
        synthetic::model(&model, &SHAPE)?;
        let backend = CpuBackend::new(CpuOptions { num_threads: options.threads, ..CpuOptions::default() })?;
        let limits = Limits::measure(&backend, Duration::from_secs(1))?;
        let engine = start_engine(true, options.threads)?;
        let machine = format!(
            "{}; read {:.1} GB/s, arithmetic {:.0} GFLOP/s",
            engine.info().backend,
            limits.bandwidth / 1e9,
            limits.peak / 1e9
        );
        println!("{machine}");
        Ok(Self { options, machine, engine, backend, cases: Vec::new(), comparisons: Vec::new() })
    }

    /// Times as fractions of the floor. `seconds(round)` gives the times of some steps; the limits are measured before
    /// and after each round. Two figures: the median over the rounds of (floor / median step), and the floor at the best
    /// limits over the fastest steps, which is what remains where other machines on the same hardware take their share of
    /// it now and then.
    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    pub(crate) fn fraction(
        &mut self,
        what: &str,
        units: usize,
        work: Work,
        seconds: &mut dyn FnMut(&Engine, usize) -> Vec<f64>,
    ) -> Result<(), Box<dyn Error>> {
        if !self.options.wants(what) {
            return Ok(());
        }
        let mut fractions = Vec::new();
        let mut limits = vec![Limits::measure(&self.backend, LIMIT_TIME)?];
        let mut all = Vec::new();
        for round in 0..self.options.rounds {
            let steps = seconds(&self.engine, round);
            limits.push(Limits::measure(&self.backend, LIMIT_TIME)?);
            let floor = f64::midpoint(limits[round].floor(work), limits[round + 1].floor(work));
            fractions.push(floor / median(&steps));
            all.extend(steps);
        }
        let fraction = median(&fractions);
        let rate = units as f64 / median(&all);
        let (bandwidths, peaks): (Vec<f64>, Vec<f64>) =
            limits.iter().map(|limit| (limit.bandwidth, limit.peak)).unzip();
        let best =
            Limits { bandwidth: quantile(&bandwidths, 1.0 - UNDISTURBED), peak: quantile(&peaks, 1.0 - UNDISTURBED) };
        let undisturbed = best.floor(work) / quantile(&all, UNDISTURBED);
        println!("{what:<52} {rate:>8.1} tok/s   {fraction:>5.2} of the roofline, undisturbed {undisturbed:>5.2}");
        self.cases.push(json!({
            "case": what, "tokens_per_second": rate, "fraction_of_roofline": fraction, "undisturbed": undisturbed,
            "fractions": fractions, "read_gb_per_second": bandwidths.iter().map(|rate| rate / 1e9).collect::<Vec<_>>(),
            "gflop_per_second": peaks.iter().map(|rate| rate / 1e9).collect::<Vec<_>>(),
        }));
        Ok(())
    }

    /// A decode step of `rows` rows, of which row `i` has adapter `adapter(i)`; `adapters` of `rank` in all.
    pub(crate) fn decode(
        &mut self,
        what: &str,
        rows: usize,
        (adapters, rank): (usize, usize),
        adapter: &dyn Fn(usize) -> Option<String>,
    ) -> Result<(), Box<dyn Error>> {
        let tokens = self.options.tokens;
        let work = Work::decode(&SHAPE, rows, PROMPT + tokens / 2, adapters, rank);
        self.fraction(what, rows, work, &mut |engine, round| {
            Batch { engine, rows, prompt: PROMPT, adapter }.steps(round, tokens)
        })
    }

    /// What ways of running take, in turns with the first.
    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    pub(crate) fn compare(&mut self, what: &str, turns: &Turns, way: usize, reference: usize) {
        let ratios = turns.ratios(way, reference);
        let ratio = turns.ratio(way, reference);
        let (low, high) = interval_of_median(&ratios);
        println!("{what:<70} x{ratio:.3}   ({low:.3} to {high:.3})");
        self.comparisons.push(json!({ "what": what, "time_ratio": ratio, "interval": [low, high], "ratios": ratios }));
    }

    /// A batch of this bench's prompts on its engine.
    pub(crate) fn batch<'a>(&'a self, rows: usize, adapter: &'a dyn Fn(usize) -> Option<String>) -> Batch<'a> {
        Batch { engine: &self.engine, rows, prompt: PROMPT, adapter }
    }

    /// Loads `count` adapters of `rank` and unloads all others.
    pub(crate) fn load(&self, count: usize, rank: usize) -> Result<(), Box<dyn Error>> {
        set_loaded(&self.engine, count, rank)
    }

    pub(crate) fn write(&self) -> Result<(), Box<dyn Error>> {
        if let Some(path) = &self.options.json {
            let result = json!({
                "machine": self.machine, "model": "Qwen2.5-0.5B's shape, bf16, random weights", "rank": RANK,
                "prompt": PROMPT, "tokens": self.options.tokens, "cases": self.cases, "comparisons": self.comparisons,
            });
            std::fs::write(path, format!("{result:#}\n"))?;
        }
        Ok(())
    }
}

/// An engine on the bench's model.
pub(crate) fn start_engine(enable_lora: bool, threads: Option<usize>) -> Result<Engine, Box<dyn Error>> {
    let mut config = EngineConfig::new(model_folder());
    config.skip_tokenizer_init = true;
    // Long and short runs have the same prompts: what one computed must not be found by the other.
    config.enable_prefix_caching = false;
    config.dtype = DType::BFloat16;
    config.max_num_batched_tokens = Some(4096);
    config.max_model_len = Some(16_384);
    config.kv_cache_memory_bytes = Some(2 << 30);
    config.num_threads = threads;
    config.enable_lora = enable_lora;
    if enable_lora {
        config.max_lora_rank = 128;
    }
    Ok(Engine::start(config)?)
}

/// No adapter for any row.
pub(crate) fn base(_row: usize) -> Option<String> {
    None
}

/// The first of `count` adapters for the first row, the second for the second, and over again.
pub(crate) fn in_turn(count: usize, rank: usize) -> impl Fn(usize) -> Option<String> {
    move |row| Some(name(row % count, rank))
}

pub(crate) fn set_loaded(engine: &Engine, count: usize, rank: usize) -> Result<(), Box<dyn Error>> {
    let wanted: Vec<String> = (0..count).map(|index| name(index, rank)).collect();
    for adapter in engine.list_adapters() {
        if !wanted.contains(&adapter.name) {
            engine.unload_adapter(&adapter.name, UnloadMode::Drain)?;
        }
    }
    for (index, name) in wanted.into_iter().enumerate() {
        if engine.adapter(&name).is_err() {
            let folder = folder().join(&name);
            synthetic::adapter(&folder, &SHAPE, rank, index as u64 + 1)?;
            engine.load_adapter(AdapterSource::directory(name, folder))?;
        }
    }
    Ok(())
}

fn name(index: usize, rank: usize) -> String {
    format!("adapter-{index}-r{rank}")
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench-models")
}

fn model_folder() -> PathBuf {
    folder().join("half-billion")
}

/// The value below which `share` of all values lie.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}
