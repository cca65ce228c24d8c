//! The engine on a card: random weights in Qwen2.5-7B's shape under a budget of memory, with many adapters. Whether what
//! it holds is what it said; decode steps with and without adapters, as fractions of what the card's bandwidth allows;
//! prefill; and the gaps between tokens while an adapter is loaded that was never read before.
//!
//! `cargo bench --bench card --features cuda -- --folder DIR [--json FILE] [--shape 7b|tiny] [--budget GB]
//! [--tokens N] [--rounds N] [--streams N]... [--model PATH]`: `--folder` is where 20 GB of weights and adapters go, once; `--model` is
//! a real model, whose greedy tokens are compared with the processor's.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use manylora::{AdapterSource, DType, Device, Engine, EngineConfig, SamplingParams};
use manylora_benches::card::{copied_per_second, describe};
use manylora_benches::decode::{Batch, Turns, greedy_request, median};
use manylora_benches::roofline::{Limits, Work};
use manylora_benches::synthetic::{self, Shape};
use manylora_kernels::cuda;
use serde_json::{Value, json};

const RANK: usize = 16;
const PROMPT: usize = 16;
/// Adapters that are resident at first: what a card of 24 GB is to hold beside such a model.
const HELD: usize = 30;
/// Adapters of the decode steps.
const MIXES: [usize; 4] = [0, 1, 8, 64];
const PREFILL: usize = 1024;

struct Options {
    folder: PathBuf,
    json: Option<PathBuf>,
    tiny: bool,
    budget: f64,
    tokens: usize,
    rounds: usize,
    streams: Vec<usize>,
    model: Option<PathBuf>,
}

impl Options {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let mut folder = None;
        let mut options = Self {
            folder: PathBuf::new(),
            json: None,
            tiny: false,
            budget: 24.0,
            tokens: 48,
            rounds: 3,
            streams: Vec::new(),
            model: None,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("`{argument}` needs a value"));
            match argument.as_str() {
                "--folder" => folder = Some(value()?.into()),
                "--json" => options.json = Some(value()?.into()),
                "--shape" => {
                    options.tiny = match value()?.as_str() {
                        "7b" => false,
                        "tiny" => true,
                        other => return Err(format!("`{other}` is neither `7b` nor `tiny`").into()),
                    }
                }
                "--budget" => options.budget = value()?.parse()?,
                "--tokens" => options.tokens = value()?.parse()?,
                "--rounds" => options.rounds = value()?.parse()?,
                "--streams" => options.streams.push(value()?.parse()?),
                "--model" => options.model = Some(value()?.into()),
                // What cargo passes.
                "--bench" | "--test" => {}
                other => return Err(format!("unknown argument `{other}`").into()),
            }
        }
        // Under the target folder, as the engine's bench has its models, unless a folder was named.
        options.folder = folder.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench-models"));
        if options.tokens < 2 || options.rounds < 1 {
            return Err("a decode step needs `--tokens` of 2 or more, and a median one round at least".into());
        }
        if options.streams.is_empty() {
            options.streams = vec![1, 8, 32, 128];
        }
        Ok(options)
    }
}

struct Bench {
    options: Options,
    shape: Shape,
    limits: Limits,
    cases: Vec<Value>,
}

impl Bench {
    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    fn say(&mut self, text: &str, case: Value) {
        println!("{text}");
        self.cases.push(case);
    }

    fn adapter(&self, index: usize) -> AdapterSource {
        let shape = if self.options.tiny { "tiny" } else { "7b" };
        let folder = self.options.folder.join(format!("{shape}-adapter-{index}-r{RANK}"));
        AdapterSource::directory(format!("adapter-{index}"), folder)
    }

    /// The adapter's files, if they are not there, and the adapter, if it is not resident.
    fn load(&self, engine: &Engine, index: usize) -> Result<(), Box<dyn Error>> {
        if engine.adapter(&format!("adapter-{index}")).is_ok() {
            return Ok(());
        }
        let source = self.write(index)?;
        engine.load_adapter(source)?;
        Ok(())
    }

    fn write(&self, index: usize) -> Result<AdapterSource, Box<dyn Error>> {
        let source = self.adapter(index);
        let manylora::AdapterOrigin::Directory(folder) = &source.origin else { unreachable!("a folder") };
        synthetic::adapter(folder, &self.shape, RANK, index as u64 + 1)?;
        Ok(source)
    }

    fn engine(&self, total: u64) -> Result<Engine, Box<dyn Error>> {
        let most = *self.options.streams.iter().max().unwrap_or(&1);
        let mut config = EngineConfig::new(self.options.folder.join(if self.options.tiny { "tiny" } else { "7b" }));
        config.device = Device::Cuda { ordinal: 0 };
        config.dtype = DType::BFloat16;
        config.skip_tokenizer_init = true;
        // Long and short runs have the same prompts: what one computed must not be found by the other.
        config.enable_prefix_caching = false;
        config.gpu_memory_utilization = (self.options.budget * 1e9 / total as f64).min(0.95);
        config.max_num_seqs = most.max(8);
        config.max_lora_rank = RANK;
        // One more than the mixes need: the one that is loaded in mid-decode.
        let adapters = (MIXES[3] + 1) as u64;
        let each = 2 * self.shape.adapter_parameters(RANK) as u64;
        config.lora_memory_bytes = Some(adapters * (each + each / 16 + (1 << 16)));
        if self.options.tiny {
            config.kv_cache_memory_bytes = Some(4 << 20);
            config.max_model_len = Some(128);
            config.max_num_batched_tokens = Some(128);
        }
        Ok(Engine::start(config)?)
    }

    /// What the engine holds is what it said it would.
    fn ledger(&mut self, engine: &Engine, adapters: usize) -> Result<(), Box<dyn Error>> {
        let stats = engine.stats()?;
        let (said, held) = (engine.info().card, stats.device_memory);
        let (Some(said), Some(held)) = (said, held) else { return Err("the engine is not on a card".into()) };
        let pairs = [
            ("reserved", said.reserved_bytes(), held.reserved),
            // What steps need is planned with the rotary tables, and held without them.
            ("weights, working", said.weight_bytes + said.working_bytes, held.weights + held.working),
            ("KV blocks, adapters", said.shared_bytes, held.kv_cache + held.adapter_room),
            ("adapters", stats.core.adapter_bytes, held.adapters),
        ];
        for (what, said, held) in pairs {
            let same = if said == held { "as planned" } else { "NOT as planned" };
            let text = format!("ledger, {adapters} adapters: {what:<19} {held:>14} bytes, planned {said:>14}: {same}");
            self.say(
                &text,
                json!({ "case": "ledger", "adapters": adapters, "what": what, "planned": said, "held": held }),
            );
        }
        let wrong: Vec<_> = pairs.iter().filter(|(_, said, held)| said != held).map(|(what, ..)| *what).collect();
        if wrong.is_empty() { Ok(()) } else { Err(format!("held is not what was planned: {wrong:?}").into()) }
    }

    fn decode(&mut self, engine: &Engine) -> Result<(), Box<dyn Error>> {
        let (tokens, rounds) = (self.options.tokens, self.options.rounds);
        for rows in self.options.streams.clone() {
            let mixes: Vec<usize> = MIXES.into_iter().filter(|&adapters| adapters <= rows).collect();
            for index in 0..*mixes.last().unwrap_or(&0) {
                self.load(engine, index)?;
            }
            let names: Vec<_> = mixes
                .iter()
                .map(|&count| move |row: usize| (count > 0).then(|| format!("adapter-{}", row % count.max(1))))
                .collect();
            let batches: Vec<Batch<'_>> =
                names.iter().map(|adapter| Batch { engine, rows, prompt: PROMPT, adapter }).collect();
            // Steps are recorded when they come the second time.
            for batch in &batches {
                batch.seconds(0, tokens);
            }
            let mut ways: Vec<_> = batches.iter().map(|batch| |round: usize| batch.step(round, tokens)).collect();
            let mut ways: Vec<&mut dyn FnMut(usize) -> f64> = ways.iter_mut().map(|way| way as _).collect();
            let turns = Turns::take(rounds, &mut ways);
            for (way, &adapters) in mixes.iter().enumerate() {
                let step = turns.median(way);
                let floor = self.limits.floor(Work::decode(&self.shape, rows, PROMPT + tokens / 2, adapters, RANK));
                let (of_floor, of_base) = (floor / step, 1.0 / turns.ratio(way, 0));
                let text = format!(
                    "decode, {rows:>3} streams, {adapters:>2} adapters: {:>9.1} tok/s, step {:>8.3} ms, {of_floor:.2} of the \
                     bandwidth's limit, {of_base:.3} of the base's speed",
                    rows as f64 / step,
                    step * 1e3
                );
                let case = json!({
                    "case": "decode", "streams": rows, "adapters": adapters, "step_seconds": step,
                    "tokens_per_second": rows as f64 / step, "fraction_of_limit": of_floor, "of_base_speed": of_base,
                });
                self.say(&text, case);
            }
        }
        Ok(())
    }

    fn prefill(&mut self, engine: &Engine) {
        let prompt = if self.options.tiny { 64 } else { PREFILL };
        for (name, adapter) in [("base", None), ("one adapter", Some("adapter-0"))] {
            let adapter = |_: usize| adapter.map(str::to_owned);
            let batch = Batch { engine, rows: 1, prompt, adapter: &adapter };
            batch.seconds(100, 1);
            let taken: Vec<f64> = (0..self.options.rounds).map(|round| batch.seconds(round, 1)).collect();
            let seconds = median(&taken);
            let text = format!(
                "prefill, {prompt} tokens, {name}: {:.0} tok/s, {:.1} ms",
                prompt as f64 / seconds,
                seconds * 1e3
            );
            self.say(&text, json!({ "case": "prefill", "tokens": prompt, "adapter": name, "seconds": seconds }));
        }
    }

    /// Gaps between the tokens of one of eight streams before and while an adapter is loaded that was never read before.
    fn cold_load(&mut self, engine: &Engine) -> Result<(), Box<dyn Error>> {
        let source = self.write(MIXES[3])?;
        let (quiet, tokens) = if self.options.tiny { (5, 20) } else { (60, 200) };
        let requests = (0..8).map(|row: usize| {
            let prompt = (1..=PROMPT as u32).map(|at| at * 31 + row as u32 * 977).collect();
            greedy_request(prompt, tokens, Some(&format!("adapter-{}", row % 8)))
        });
        for index in 0..8 {
            self.load(engine, index)?;
        }
        let mut streams = engine.submit_all(requests.collect(), true)?;
        let (mut arrivals, mut loader) = (Vec::new(), None);
        while let Some(delta) = streams[0].next_delta() {
            delta?;
            arrivals.push(Instant::now());
            if arrivals.len() == quiet {
                let (handle, source) = (engine.handle(), source.clone());
                loader = Some((
                    Instant::now(),
                    std::thread::spawn(move || handle.load_adapter(source).map(|_| Instant::now())),
                ));
            }
        }
        for stream in &mut streams[1..] {
            stream.collect_all()?;
        }
        let (start, loader) = loader.ok_or("the streams ended before the load began")?;
        let end = loader.join().map_err(|_| "the loading thread panicked")??;
        let gaps =
            |from: &[Instant]| -> Vec<f64> { from.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect() };
        let before = gaps(&arrivals[..quiet]);
        // With the first one after the load: a gap that lasts until then counts.
        let meanwhile = arrivals[quiet..].iter().take_while(|at| **at <= end).count();
        let during = arrivals[quiet - 1..].iter().copied().take(meanwhile + 2).collect::<Vec<Instant>>();
        let (usual, during) = (median(&before), gaps(&during));
        let longest = during.iter().copied().fold(0.0, f64::max);
        let text = format!(
            "cold load in mid-decode: {:.1} ms to load, {} tokens meanwhile, longest gap {:.2} ms, usual gap {:.2} ms",
            (end - start).as_secs_f64() * 1e3,
            meanwhile,
            longest * 1e3,
            usual * 1e3
        );
        let case = json!({
            "case": "cold load", "load_seconds": (end - start).as_secs_f64(), "tokens_meanwhile": meanwhile,
            "longest_gap": longest, "usual_gap": usual,
        });
        self.say(&text, case);
        Ok(())
    }

    /// Greedy tokens of a real model on the card and on the processor.
    fn real_model(&mut self, path: &Path) -> Result<(), Box<dyn Error>> {
        let tokens = 32;
        let run = |device: Device| -> Result<Vec<u32>, Box<dyn Error>> {
            let mut config = EngineConfig::new(path);
            config.device = device;
            config.dtype = DType::BFloat16;
            config.kv_cache_memory_bytes = Some(1 << 28);
            let engine = Engine::start(config)?;
            let params = SamplingParams {
                temperature: 0.0,
                max_tokens: Some(tokens),
                ignore_eos: true,
                ..SamplingParams::default()
            };
            let request = manylora::GenerateRequest::text("The capital of France is").params(params);
            let mut stream = engine.submit(request)?;
            let mut made = Vec::new();
            for delta in stream.collect_all()? {
                made.extend(delta.token_ids);
            }
            Ok(made)
        };
        let (card, processor) = (run(Device::Cuda { ordinal: 0 })?, run(Device::Cpu)?);
        let equal = card.iter().zip(&processor).take_while(|(card, processor)| card == processor).count();
        let text = format!(
            "{}: {equal} of {tokens} greedy tokens as on the processor before the first other one",
            path.display()
        );
        self.say(&text, json!({ "case": "real model", "equal_tokens": equal, "tokens": tokens }));
        if equal == 0 { Err("not one token is the processor's".into()) } else { Ok(()) }
    }
}

fn main() -> ExitCode {
    manylora_benches::exit_code(run())
}

#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn run() -> Result<(), Box<dyn Error>> {
    let options = Options::parse()?;
    let device = match cuda::Device::open(0) {
        Ok(device) => device,
        Err(error) => {
            println!("no card, all of this is skipped: {error}");
            return Ok(());
        }
    };
    let bandwidth = copied_per_second(&device)?;
    let card = format!("{}, copies {:.1} GB/s", describe(&device), bandwidth / 1e9);
    println!("{card}");
    let total = device.context().properties().memory as u64;
    drop(device);
    let shape = if options.tiny { Shape::TINY } else { Shape::SEVEN_BILLION };
    // Bytes are what a decode step is made of: arithmetic has no limit here.
    let limits = Limits { bandwidth, peak: f64::INFINITY };
    let mut bench = Bench { options, shape, limits, cases: Vec::new() };
    let folder = bench.options.folder.join(if bench.options.tiny { "tiny" } else { "7b" });
    println!("writing random weights to {} if they are not there", folder.display());
    synthetic::model(&folder, &shape)?;
    let ran = (|| -> Result<(), Box<dyn Error>> {
        let engine = bench.engine(total)?;
        println!("{}", engine.info().backend);
        bench.ledger(&engine, 0)?;
        for index in 0..HELD {
            bench.load(&engine, index)?;
        }
        bench.ledger(&engine, HELD)?;
        bench.decode(&engine)?;
        bench.prefill(&engine);
        bench.cold_load(&engine)?;
        drop(engine);
        if let Some(model) = bench.options.model.clone() {
            bench.real_model(&model)?;
        }
        Ok(())
    })();
    if let Some(path) = &bench.options.json {
        let model = if bench.options.tiny { "tiny" } else { "Qwen2.5-7B's shape" };
        let result = json!({
            "card": card, "model": format!("{model}, bf16, random weights"), "rank": RANK, "prompt": PROMPT,
            "tokens": bench.options.tokens, "budget_gb": bench.options.budget, "cases": bench.cases,
        });
        std::fs::write(path, format!("{result:#}\n"))?;
    }
    ran
}
