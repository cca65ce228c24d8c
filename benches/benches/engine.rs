//! Decode and prefill of a 0.5B-shaped bf16 model as fractions of what the machine can do, measured around each case, and
//! what adapters, idle adapters and a busy neighbour cost, measured in turns with the case they are compared with.
//!
//! `cargo bench --bench engine -- [--json FILE] [--tokens N] [--rounds N] [--threads N] [--only WORDS]`: `--only prefill`
//! takes the cases whose names contain the words.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use manylora::{AdapterSource, DType, Engine, EngineConfig, EngineError, UnloadMode};
use manylora_benches::decode::{Batch, Turns, interval_of_median, median};
use manylora_benches::roofline::{Limits, Work};
use manylora_benches::synthetic::{self, Shape};
use manylora_kernels::cpu::{CpuBackend, CpuOptions};
use serde_json::{Value, json};

const PROMPT: usize = 16;
const RANK: usize = 16;
const ADAPTERS: u64 = 8;
const SHAPE: Shape = Shape::HALF_BILLION;
/// New tokens of the runs that show what idle adapters cost.
const IDLE_TOKENS: usize = 8;
/// Time for each measurement of the machine's limits.
const LIMIT_TIME: Duration = Duration::from_millis(300);

struct Options {
    json: Option<PathBuf>,
    tokens: usize,
    rounds: usize,
    threads: Option<usize>,
    only: Option<String>,
}

impl Options {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let mut options = Self { json: None, tokens: 24, rounds: 5, threads: None, only: None };
        let mut arguments = std::env::args().skip(1);
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
                other => return Err(format!("unknown argument `{other}`").into()),
            }
        }
        if options.tokens < 2 || options.rounds < 1 {
            return Err("a decode step needs `--tokens` of 2 or more, and a median one round at least".into());
        }
        Ok(options)
    }
}

/// Whether a case is to be measured.
fn wants(only: Option<&String>, what: &str) -> bool {
    only.is_none_or(|only| what.contains(only))
}

/// Another process that keeps a core busy whenever it is told to.
struct Neighbour(Child);

impl Neighbour {
    fn start() -> Result<Self, Box<dyn Error>> {
        let neighbour = Self(Command::new("sh").args(["-c", "while :; do :; done"]).spawn()?);
        neighbour.signal("STOP")?;
        Ok(neighbour)
    }

    fn signal(&self, signal: &str) -> Result<(), Box<dyn Error>> {
        let done = Command::new("kill").args([&format!("-{signal}"), &self.0.id().to_string()]).status()?;
        if done.success() { Ok(()) } else { Err(format!("`kill -{signal}` failed").into()) }
    }

    fn during<T>(&self, what: impl FnOnce() -> T) -> T {
        self.signal("CONT").expect("the neighbour is ours");
        // The scheduler needs a moment to see that there is one more.
        std::thread::sleep(Duration::from_millis(50));
        let result = what();
        self.signal("STOP").expect("the neighbour is ours");
        result
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Bench {
    backend: CpuBackend,
    options: Options,
    cases: Vec<Value>,
    comparisons: Vec<Value>,
}

impl Bench {
    fn engine(enable_lora: bool, threads: Option<usize>) -> Result<Engine, Box<dyn Error>> {
        let mut config = EngineConfig::new(folder().join("half-billion"));
        config.skip_tokenizer_init = true;
        // Long and short runs have the same prompts: what one computed must not be found by the other.
        config.enable_prefix_caching = false;
        config.dtype = DType::BFloat16;
        config.max_num_batched_tokens = Some(4096);
        config.kv_cache_memory_bytes = Some(1 << 29);
        config.num_threads = threads;
        config.enable_lora = enable_lora;
        Ok(Engine::start(config)?)
    }

    /// A figure as a fraction of the roofline: both are measured in turns.
    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    fn fraction(
        &mut self,
        what: &str,
        units: usize,
        work: Work,
        seconds: &dyn Fn(usize) -> f64,
    ) -> Result<(), Box<dyn Error>> {
        if !wants(self.options.only.as_ref(), what) {
            return Ok(());
        }
        let mut fractions = Vec::new();
        let mut rates = Vec::new();
        let mut before = Limits::measure(&self.backend, LIMIT_TIME)?;
        let mut bandwidth = Vec::new();
        for round in 0..self.options.rounds {
            let taken = seconds(round);
            let after = Limits::measure(&self.backend, LIMIT_TIME)?;
            let floor = f64::midpoint(before.floor(work), after.floor(work));
            fractions.push(floor / taken);
            rates.push(units as f64 / taken);
            bandwidth.push(after.bandwidth / 1e9);
            before = after;
        }
        let (rate, fraction) = (median(&rates), median(&fractions));
        println!("{what:<44} {rate:>9.1} tok/s   {fraction:>5.2} of the roofline");
        self.cases.push(json!({
            "case": what, "tokens_per_second": rate, "fraction_of_roofline": fraction, "fractions": fractions,
            "read_gb_per_second": bandwidth,
        }));
        Ok(())
    }

    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    fn compare(&mut self, what: &str, turns: &Turns, way: usize, reference: usize) {
        let ratios = turns.ratios(way, reference);
        let ratio = turns.ratio(way, reference);
        let (low, high) = interval_of_median(&ratios);
        println!("{what:<70} x{ratio:.3}   ({low:.3} to {high:.3})");
        self.comparisons.push(json!({ "what": what, "time_ratio": ratio, "interval": [low, high], "ratios": ratios }));
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench-models")
}

fn adapter_folder(index: u64) -> PathBuf {
    folder().join(format!("adapter-{index}-r{RANK}"))
}

/// Loads all adapters, or unloads all.
fn set_loaded(engine: &Engine, loaded: bool) -> Result<(), EngineError> {
    for index in 0..ADAPTERS {
        let name = format!("adapter-{index}");
        let is_loaded = engine.adapter(&name).is_ok();
        if loaded && !is_loaded {
            engine.load_adapter(AdapterSource::directory(name, adapter_folder(index)))?;
        } else if !loaded && is_loaded {
            engine.unload_adapter(&name, UnloadMode::Drain)?;
        }
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse()?;
    let model = folder().join("half-billion");
    println!("writing random weights to {} if they are not there", model.display());
    synthetic::model(&model, &SHAPE)?;
    let backend = CpuBackend::new(CpuOptions { num_threads: options.threads, ..CpuOptions::default() })?;
    let limits = Limits::measure(&backend, Duration::from_secs(1))?;
    let mut bench = Bench { backend, options, cases: Vec::new(), comparisons: Vec::new() };
    let (tokens, rounds, threads) = (bench.options.tokens, bench.options.rounds, bench.options.threads);
    let only = bench.options.only.clone();
    let wanted = |what: &str| wants(only.as_ref(), what);
    let plain = Bench::engine(false, threads)?;
    let lora = Bench::engine(true, threads)?;
    let machine = format!(
        "{}; read {:.1} GB/s, arithmetic {:.0} GFLOP/s",
        lora.info().backend,
        limits.bandwidth / 1e9,
        limits.peak / 1e9
    );
    println!("{machine}");
    for index in 0..ADAPTERS {
        synthetic::adapter(&adapter_folder(index), &SHAPE, RANK, index + 1)?;
    }
    set_loaded(&lora, true)?;
    let (none, one, eight) = (
        |_: usize| None,
        |_: usize| Some("adapter-0".to_owned()),
        |row: usize| Some(format!("adapter-{}", row as u64 % ADAPTERS)),
    );
    let on = |engine, rows, adapter| Batch { engine, rows, prompt: PROMPT, adapter };
    let context = PROMPT + tokens / 2;

    for rows in [1, 8, 32] {
        let batch: Batch<'_> = on(&plain, rows, &none);
        let work = Work::decode(&SHAPE, rows, context, 0, RANK);
        bench.fraction(&format!("decode, {rows} base rows"), rows, work, &|round| batch.step(round, tokens))?;
    }
    for rows in [8, 32] {
        let batch = on(&lora, rows, &eight);
        let work = Work::decode(&SHAPE, rows, context, ADAPTERS as usize, RANK);
        let what = format!("decode, {rows} rows on {ADAPTERS} adapters");
        bench.fraction(&what, rows, work, &|round| batch.step(round, tokens))?;
    }
    let long = Batch { prompt: 512, ..on(&plain, 1, &none) };
    bench.fraction("prefill, 512 base tokens", 512, Work::prefill(&SHAPE, 512), &|round| long.seconds(round, 1))?;

    // A hundredth is to be seen on a machine that drifts by tens: many short runs in turns, on one engine, so that both
    // read the same pages of memory. Apart from what it lets be loaded, an engine with LoRA is one without.
    for rows in [1, 8].into_iter().filter(|_| wanted("idle adapters")) {
        let batch = on(&lora, rows, &none);
        let with = |loaded: bool, round: usize| {
            set_loaded(&lora, loaded).expect("the adapters are good");
            batch.seconds(round, IDLE_TOKENS)
        };
        let turns = Turns::take(8 * rounds, &mut [&mut |round| with(false, round), &mut |round| with(true, round)]);
        bench.compare(&format!("{rows} base rows: {ADAPTERS} idle adapters / none loaded"), &turns, 1, 0);
    }
    set_loaded(&lora, true)?;
    if wanted("8 rows:") {
        let (base, on_one, on_eight) = (on(&lora, 8, &none), on(&lora, 8, &one), on(&lora, 8, &eight));
        let turns = Turns::take(
            rounds,
            &mut [&mut |round| base.step(round, tokens), &mut |round| on_one.step(round, tokens), &mut |round| {
                on_eight.step(round, tokens)
            }],
        );
        bench.compare("8 rows: one adapter / base", &turns, 1, 0);
        bench.compare("8 rows: 8 adapters / base", &turns, 2, 0);
        bench.compare("8 rows: 8 adapters / one adapter", &turns, 2, 1);
    }

    let single = Bench::engine(false, Some(1))?;
    let neighbour = Neighbour::start()?;
    for rows in [1, 8].into_iter().filter(|_| wanted("another process")) {
        let (team, alone) = (on(&plain, rows, &none), on(&single, rows, &none));
        let turns = Turns::take(
            rounds,
            &mut [
                &mut |round| team.step(round, tokens),
                &mut |round| neighbour.during(|| team.step(round, tokens)),
                &mut |round| alone.step(round, tokens),
            ],
        );
        bench.compare(&format!("{rows} base rows: another process busy on one core / quiet"), &turns, 1, 0);
        bench.compare(&format!("{rows} base rows: one thread / all threads, quiet"), &turns, 2, 0);
        bench.compare(&format!("{rows} base rows: another process busy / one thread less"), &turns, 1, 2);
    }

    if let Some(path) = &bench.options.json {
        let result = json!({
            "machine": machine, "model": "Qwen2.5-0.5B's shape, bf16, random weights", "rank": RANK,
            "prompt": PROMPT, "tokens": tokens, "cases": bench.cases, "comparisons": bench.comparisons,
        });
        std::fs::write(path, format!("{result:#}\n"))?;
    }
    Ok(())
}
