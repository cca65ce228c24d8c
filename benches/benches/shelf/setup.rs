//! What the parts share: the model, adapters with random factors, engines, and the table of results.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use manylora::{AdapterSource, Engine, EngineConfig, GenerateRequest};
use manylora_benches::decode::greedy_request;
use manylora_benches::synthetic::{self, Shape};
use serde_json::{Map, Value};

/// SmolLM2-135M.
pub(crate) const SHAPE: Shape = Shape {
    hidden: 576,
    intermediate: 1536,
    layers: 30,
    heads: 9,
    kv_heads: 3,
    head_dim: 64,
    vocab: 49_152,
    tied: true,
    positions: 8192,
};

pub(crate) struct Options {
    pub(crate) parts: Vec<String>,
    pub(crate) json: Option<PathBuf>,
    pub(crate) model: PathBuf,
    /// Adapters of the part `many`.
    pub(crate) adapters: usize,
}

impl Options {
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut model = std::env::var_os("MANYLORA_SMOLLM2").map(PathBuf::from);
        let (mut parts, mut json, mut adapters) = (Vec::new(), None, 2000);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("`{argument}` needs a value"));
            match argument.as_str() {
                "--json" => json = Some(value()?.into()),
                "--model" => model = Some(value()?.into()),
                "--adapters" => adapters = value()?.parse()?,
                // What cargo passes.
                "--bench" | "--test" => {}
                part => parts.push(part.to_owned()),
            }
        }
        let model = model.ok_or("give `--model`, or set MANYLORA_SMOLLM2 (`make data` prints it)")?;
        Ok(Self { parts, json, model, adapters })
    }
}

pub(crate) struct Bench {
    pub(crate) options: Options,
    results: Map<String, Value>,
}

impl Bench {
    pub(crate) fn new(options: Options) -> Result<Self, Box<dyn Error>> {
        std::fs::create_dir_all(folder())?;
        Ok(Self { options, results: Map::new() })
    }

    /// An engine on the model; prompts are token ids.
    pub(crate) fn engine(&self, configure: impl FnOnce(&mut EngineConfig)) -> Result<Engine, Box<dyn Error>> {
        let mut config = EngineConfig::new(&self.options.model);
        config.skip_tokenizer_init = true;
        config.max_lora_rank = 64;
        config.max_model_len = Some(1024);
        config.kv_cache_memory_bytes = Some(1 << 30);
        configure(&mut config);
        Ok(Engine::start(config)?)
    }

    /// Prints a result and keeps it.
    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    pub(crate) fn result(&mut self, what: &str, value: f64) {
        println!("  {what:<84} {value:>10.4}");
        self.results.insert(what.to_owned(), value.into());
    }

    pub(crate) fn write(&self) -> Result<(), Box<dyn Error>> {
        if let Some(path) = &self.options.json {
            std::fs::write(path, format!("{:#}\n", Value::Object(self.results.clone())))?;
        }
        Ok(())
    }
}

pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench-models/shelf")
}

/// An adapter on some of the linear maps, written if it is not there.
pub(crate) fn adapter(index: u64, rank: usize, maps: &[&str]) -> Result<AdapterSource, Box<dyn Error>> {
    let name = format!("{}-r{rank}-{index}", maps.join("-"));
    let path = folder().join(&name);
    synthetic::adapter_on(&path, &SHAPE, rank, index + 1, maps)?;
    Ok(AdapterSource::directory(name, path))
}

/// All linear maps of a layer.
pub(crate) const ALL: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// A greedy request for `output` tokens after `input` ones, unlike those of other numbers.
pub(crate) fn request(number: u64, input: usize, output: usize, adapter: Option<&str>) -> GenerateRequest {
    let token = |at: usize| (at as u64 * 131 + number * 7919) % 40_000 + 1;
    let prompt: Vec<u32> = (0..input).map(|at| token(at) as u32).collect();
    greedy_request(prompt, output, adapter)
}

/// Pseudo-random numbers, the same on every run.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Uniform in `[0, 1)`.
    pub(crate) fn uniform(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Exponential with mean 1.
    pub(crate) fn exponential(&mut self) -> f64 {
        -(1.0 - self.uniform()).ln()
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        ((self.uniform() * limit as f64) as usize).min(limit - 1)
    }
}

/// What became of one request.
pub(crate) struct Served {
    /// From its arrival to its first token.
    pub(crate) first_token: Duration,
    /// Gaps between its tokens.
    pub(crate) gaps: Vec<Duration>,
}

/// Submits requests at their times (from now on) and waits for all of them, each on a thread of its own.
pub(crate) fn serve(
    engine: &Engine,
    arrivals: Vec<(Duration, GenerateRequest)>,
) -> Result<Vec<Served>, Box<dyn Error>> {
    let start = Instant::now();
    let readers: Vec<_> = arrivals
        .into_iter()
        .map(|(at, request)| {
            std::thread::sleep(at.saturating_sub(start.elapsed()));
            let arrived = Instant::now();
            let mut stream = engine.submit(request)?;
            Ok(std::thread::spawn(move || {
                let mut served = Served { first_token: Duration::ZERO, gaps: Vec::new() };
                let mut last = arrived;
                while let Some(delta) = stream.next_delta() {
                    let delta = delta.map_err(|error| error.to_string())?;
                    if delta.token_ids.is_empty() {
                        continue;
                    }
                    let now = Instant::now();
                    if last == arrived {
                        served.first_token = now - arrived;
                    } else {
                        served.gaps.push(now - last);
                    }
                    last = now;
                }
                Ok::<_, String>(served)
            }))
        })
        .collect::<Result<_, Box<dyn Error>>>()?;
    readers.into_iter().map(|reader| Ok(reader.join().map_err(|_| "a reader failed")??)).collect()
}

pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    manylora_benches::decode::median(&values.into_iter().collect::<Vec<_>>())
}

/// Bytes of this process in memory that no file backs.
pub(crate) fn resident_bytes() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")).and_then(|number| number.parse::<f64>().ok());
    1024.0 * kilobytes.unwrap_or(f64::NAN)
}
