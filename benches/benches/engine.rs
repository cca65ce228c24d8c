//! Decode and prefill of a 0.5B-shaped bf16 model as fractions of what the machine can do, measured in the same run.
//!
//! A decode figure is `rows * (n - 1) / (t(n tokens) - t(1 token))`: prefill and start-up cancel out. The roofline of
//! a step is the longer of its bytes at the measured bandwidth and its arithmetic at the measured peak.
//!
//! `cargo bench --bench engine -- [--json FILE] [--tokens N] [--rounds N] [--threads N]`

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use manylora::{AdapterSource, DType, Engine, EngineConfig, GenerateRequest, SamplingParams};
use manylora_benches::roofline::{Limits, Work};
use manylora_benches::synthetic::{self, Shape};
use manylora_kernels::cpu::{CpuBackend, CpuOptions};

const PROMPT: usize = 64;
const RANK: usize = 16;

struct Options {
    json: Option<PathBuf>,
    tokens: usize,
    rounds: usize,
    threads: Option<usize>,
}

impl Options {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let mut options = Self { json: None, tokens: 32, rounds: 3, threads: None };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("`{argument}` needs a value"));
            match argument.as_str() {
                "--json" => options.json = Some(value()?.into()),
                "--tokens" => options.tokens = value()?.parse()?,
                "--rounds" => options.rounds = value()?.parse()?,
                "--threads" => options.threads = Some(value()?.parse()?),
                // What cargo passes.
                "--bench" | "--test" => {}
                other => return Err(format!("unknown argument `{other}`").into()),
            }
        }
        Ok(options)
    }
}

struct Bench {
    engine: Engine,
    options: Options,
    lines: Vec<serde_json::Value>,
}

impl Bench {
    /// Seconds to run `rows` prompts of `length` tokens to `tokens` new ones; the best of the rounds.
    fn seconds(&self, rows: usize, length: usize, tokens: usize, adapter: &dyn Fn(usize) -> Option<String>) -> f64 {
        let once = |round: usize| {
            let requests = (0..rows)
                .map(|row| {
                    // Prompts differ from each other and from round to round, so that no prefix is found in the cache.
                    let prompt: Vec<u32> = (0..length)
                        .map(|at| ((at * 131 + row * 7919 + round * 104_729) % 150_000) as u32 + 1)
                        .collect();
                    let params = SamplingParams {
                        temperature: 0.0,
                        max_tokens: Some(tokens),
                        ignore_eos: true,
                        detokenize: false,
                        ..SamplingParams::default()
                    };
                    let request = GenerateRequest::tokens(prompt).params(params);
                    match adapter(row) {
                        Some(name) => request.adapter(name),
                        None => request,
                    }
                })
                .collect();
            let start = Instant::now();
            let streams = self.engine.submit_all(requests, false).expect("the requests are good");
            for mut stream in streams {
                stream.collect_all().expect("the request finishes");
            }
            start.elapsed().as_secs_f64()
        };
        (0..self.options.rounds).map(once).fold(f64::INFINITY, f64::min)
    }

    fn decode(
        &mut self,
        limits: &Limits,
        what: &str,
        rows: usize,
        adapters: usize,
        adapter: &dyn Fn(usize) -> Option<String>,
    ) -> f64 {
        let tokens = self.options.tokens;
        let long = self.seconds(rows, PROMPT, tokens, adapter);
        let short = self.seconds(rows, PROMPT, 1, adapter);
        let step = (long - short) / (tokens - 1) as f64;
        let work = Work::decode(&Shape::HALF_BILLION, rows, PROMPT + tokens / 2, adapters, RANK);
        self.line(what, rows as f64 / step, limits.floor(work) / step);
        step
    }

    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    fn line(&mut self, what: &str, rate: f64, fraction: f64) {
        println!("{what:<44} {rate:>9.1} tok/s   {fraction:>5.2} of the roofline");
        self.lines
            .push(serde_json::json!({ "case": what, "tokens_per_second": rate, "fraction_of_roofline": fraction }));
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench-models")
}

#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse()?;
    let shape = Shape::HALF_BILLION;
    let model = folder().join("half-billion");
    println!("writing random weights to {} if they are not there", model.display());
    synthetic::model(&model, &shape)?;
    let backend = CpuBackend::new(CpuOptions { num_threads: options.threads, ..CpuOptions::default() })?;
    let budget = Duration::from_secs(1);
    let limits = Limits::measure(&backend, budget)?;
    let mut config = EngineConfig::new(&model);
    config.skip_tokenizer_init = true;
    // Long and short runs have the same prompts: what one computed must not be found by the other.
    config.enable_prefix_caching = false;
    config.dtype = DType::BFloat16;
    config.max_num_batched_tokens = Some(4096);
    config.kv_cache_memory_bytes = Some(1 << 30);
    config.num_threads = options.threads;
    let engine = Engine::start(config)?;
    let mut machine = String::new();
    write!(
        machine,
        "{}; read {:.1} GB/s, arithmetic {:.0} GFLOP/s",
        engine.info().backend,
        limits.bandwidth / 1e9,
        limits.peak / 1e9
    )?;
    println!("{machine}");
    let mut bench = Bench { engine, options, lines: Vec::new() };

    let mut without = f64::NAN;
    for rows in [1, 32, 8] {
        without = bench.decode(&limits, &format!("decode, {rows} base rows"), rows, 0, &|_| None);
    }
    let mut neighbour = Command::new("sh").args(["-c", "while :; do :; done"]).spawn()?;
    let disturbed = bench.decode(&limits, "decode, 8 base rows, another process busy", 8, 0, &|_| None);
    neighbour.kill()?;
    neighbour.wait()?;
    println!("a busy neighbour costs {:.2} of the undisturbed time", disturbed / without);
    for index in 0..8 {
        let name = format!("adapter-{index}");
        let path = folder().join(format!("{name}-r{RANK}"));
        synthetic::adapter(&path, &shape, RANK, index + 1)?;
        bench.engine.load_adapter(AdapterSource::directory(name, path))?;
    }
    let base = bench.decode(&limits, "decode, 8 base rows, 8 idle adapters", 8, 0, &|_| None);
    println!("8 idle adapters cost {:.3} of the time without them", base / without);
    let one = bench.decode(&limits, "decode, 8 rows on one adapter", 8, 1, &|_| Some("adapter-0".to_owned()));
    bench.decode(&limits, "decode, 8 rows on 8 adapters", 8, 8, &|row| Some(format!("adapter-{row}")));
    bench.decode(&limits, "decode, 32 rows on 8 adapters", 32, 8, &|row| Some(format!("adapter-{}", row % 8)));
    println!("one adapter costs {:.3} of the base's time at 8 rows", one / base);
    let seconds = bench.seconds(1, 512, 1, &|_| None);
    let floor = limits.floor(Work::prefill(&shape, 512));
    bench.line("prefill, 512 base tokens", 512.0 / seconds, floor / seconds);
    let seconds = bench.seconds(1, 512, 1, &|_| Some("adapter-0".to_owned()));
    bench.line("prefill, 512 tokens on one adapter", 512.0 / seconds, floor / seconds);

    // The limits again: on a shared machine they show how far to trust the run.
    let after = Limits::measure(&backend, budget)?;
    println!("limits afterwards: read {:.1} GB/s, arithmetic {:.0} GFLOP/s", after.bandwidth / 1e9, after.peak / 1e9);
    if let Some(path) = &bench.options.json {
        let result = serde_json::json!({
            "machine": machine, "model": "Qwen2.5-0.5B's shape, bf16, random weights", "rank": RANK, "cases": bench.lines,
        });
        std::fs::write(path, serde_json::to_vec_pretty(&result)?)?;
    }
    Ok(())
}
