//! The engine on a card: random weights in Qwen2.5-7B's shape under a budget of memory, with many adapters. Whether what
//! it holds is what formulas say; decode steps with and without adapters, as fractions of what the card's bandwidth allows;
//! prefill; and the gaps between tokens while an adapter is loaded that was never read before.
//!
//! `cargo bench --bench card --features cuda -- --folder DIR [--json FILE] [--shape 7b|tiny] [--budget GB]
//! [--tokens N] [--rounds N] [--streams N]... [--model PATH]`: `--folder` is where 21 GB of weights and adapters go, once; with
//! `--model` nothing but the greedy tokens of that real model is compared with the processor's.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use manylora::sampler::TokenLogprobs;
use manylora::{AdapterSource, DType, Delta, Device, Engine, EngineConfig, SamplingParams};
use manylora_benches::agreement::{Choice, agreement};
use manylora_benches::card::{copied_per_second, describe};
use manylora_benches::decode::{Batch, Turns, greedy_params, greedy_request, median};
use manylora_benches::roofline::{Limits, Work};
use manylora_benches::synthetic::{self, Shape};
use manylora_core::budget::{TargetModule, card::granules};
use manylora_kernels::cuda;
use serde_json::{Value, json};

const RANK: usize = 16;
const PROMPT: usize = 16;
/// Adapters that are resident at first: what a card of 24 GB is to hold beside such a model.
const HELD: usize = 30;
/// Adapters of the decode steps.
const MIXES: [usize; 4] = [0, 1, 8, 64];
/// What decoding with adapters is to reach of the base's speed. A goal, which fails nothing: what a card reaches depends on its
/// clocks, its heat and who shares it, and is no matter of right or wrong.
const GOAL: f64 = 0.85;
const PREFILL: usize = 1024;
/// A real model's prompts.
const TEXTS: [&str; 4] = [
    "The capital of France is",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "Water boils at 100 degrees Celsius, and it freezes at",
    "One, two, three, four, five, six, seven,",
];
/// How far apart logits of a real model may be that are computed in bfloat16 on two devices: some four times as far as those
/// of SmolLM2-135M are on the emulated device.
const BLUR: f32 = 0.15;

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
    /// The budget as a share of the card's memory.
    utilization: f64,
    limits: Limits,
    cases: Vec<Value>,
}

impl Bench {
    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    fn say(&mut self, text: &str, case: Value) {
        println!("{text}");
        self.cases.push(case);
    }

    /// Begins the names of what is written.
    fn shape_name(&self) -> &'static str {
        if self.options.tiny { "tiny" } else { "7b" }
    }

    /// Everything that random weights are for.
    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    fn random_weights(&mut self) -> Result<(), Box<dyn Error>> {
        let folder = self.options.folder.join(self.shape_name());
        println!("writing random weights to {} if they are not there", folder.display());
        synthetic::model(&folder, &self.shape)?;
        let engine = self.engine()?;
        println!("{}", engine.info().backend);
        self.ledger(&engine, 0)?;
        let device = cuda::Device::open(0)?;
        let free = device.context().memory()?.free;
        for index in 0..HELD {
            self.load(&engine, index)?;
        }
        self.ledger(&engine, HELD)?;
        self.decode(&engine)?;
        self.prefill(&engine);
        self.cold_load(&engine)?;
        // The engine takes nothing once it has started: this is the driver's, or others'.
        let taken = free.saturating_sub(device.context().memory()?.free);
        let aside = engine.info().card.map_or(0, |card| card.driver_bytes);
        let text = format!("driver, since the start: {taken} bytes, for all of its own {aside} were set aside");
        self.say(&text, json!({ "case": "driver", "taken_since_start": taken, "set_aside": aside }));
        Ok(())
    }

    fn adapter(&self, index: usize) -> AdapterSource {
        let folder = self.options.folder.join(format!("{}-adapter-{index}-r{RANK}", self.shape_name()));
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

    fn engine(&self) -> Result<Engine, Box<dyn Error>> {
        let most = *self.options.streams.iter().max().unwrap_or(&1);
        let mut config = EngineConfig::new(self.options.folder.join(self.shape_name()));
        config.device = Device::Cuda { ordinal: 0 };
        config.dtype = DType::BFloat16;
        config.skip_tokenizer_init = true;
        // Long and short runs have the same prompts: what one computed must not be found by the other.
        config.enable_prefix_caching = false;
        config.gpu_memory_utilization = self.utilization;
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
        let dimensions = self.shape.dimensions();
        let tables = 2 * granules(4 * (engine.info().max_model_len * self.shape.head_dim / 2) as u64);
        let each = dimensions.card_adapter_bytes(RANK as u64, &TargetModule::ALL);
        let budget = (self.options.budget * 1e9) as u64;
        let pairs = [
            ("reserved", said.reserved_bytes(), held.reserved),
            // By formulas that know nothing of the engine: the weights, with them the rotary tables; and so many adapters.
            ("weights", dimensions.card_weight_bytes(), said.weight_bytes),
            ("weights, tables", dimensions.card_weight_bytes() + tables, held.weights),
            // What steps need is planned with the rotary tables, and held without them.
            ("weights, working", said.weight_bytes + said.working_bytes, held.weights + held.working),
            ("KV blocks, adapters", said.shared_bytes, held.kv_cache + held.adapter_room),
            ("adapters", adapters as u64 * each, held.adapters),
            ("adapters, counted", adapters as u64 * each, stats.core.adapter_bytes),
            ("number of adapters", adapters as u64, stats.core.adapters.len() as u64),
            ("beyond the budget", 0, (said.reserved_bytes() + said.driver_bytes).saturating_sub(budget)),
        ];
        for (what, said, held) in pairs {
            let same = if said == held { "as planned" } else { "NOT as planned" };
            let text = format!("ledger, {adapters} adapters: {what:<19} {held:>14}, planned {said:>14}: {same}");
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
        let (mut mixed, mut reached) = (0, 0);
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
                let judged = (adapters > 0).then_some(of_base >= GOAL);
                mixed += usize::from(judged.is_some());
                reached += usize::from(judged == Some(true));
                let text = format!(
                    "decode, {rows:>3} streams, {adapters:>2} adapters: {:>9.1} tok/s, step {:>8.3} ms, {of_floor:.2} of the \
                     bandwidth's limit, {of_base:.3} of the base's speed{}",
                    rows as f64 / step,
                    step * 1e3,
                    judged.map_or("", |reached| if reached { ": PASS" } else { ": BELOW GOAL" })
                );
                let case = json!({
                    "case": "decode", "streams": rows, "adapters": adapters, "step_seconds": step,
                    "tokens_per_second": rows as f64 / step, "fraction_of_limit": of_floor, "of_base_speed": of_base,
                    "goal": judged.map(|_| GOAL), "reached": judged,
                });
                self.say(&text, case);
            }
        }
        let judged = if reached == mixed { "PASS" } else { "BELOW GOAL" };
        let text = format!("goal, {GOAL} of the base's speed with adapters: {reached} of {mixed} reach it: {judged}");
        self.say(&text, json!({ "case": "goal", "of_base_speed": GOAL, "cases": mixed, "reached": reached }));
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

    /// Greedy tokens of a real model are the processor's, as far as they are certain.
    fn real_model(&mut self, path: &Path) -> Result<(), Box<dyn Error>> {
        let tokens = 32;
        let run = |device: Device| -> Result<Vec<Vec<Choice>>, Box<dyn Error>> {
            let mut config = EngineConfig::new(path);
            config.device = device;
            config.dtype = DType::BFloat16;
            config.enable_lora = false;
            config.gpu_memory_utilization = self.utilization;
            config.kv_cache_memory_bytes = Some(64 << 20);
            config.max_model_len = Some(256);
            config.max_num_batched_tokens = Some(256);
            let engine = Engine::start(config)?;
            let params = SamplingParams { logprobs: Some(2), ..greedy_params(tokens) };
            let request = |text: &&str| manylora::GenerateRequest::text(*text).params(params.clone());
            let streams = engine.submit_all(TEXTS.iter().map(request).collect(), false)?;
            streams.into_iter().map(|mut stream| choices(&stream.collect_all()?)).collect()
        };
        let (card, processor) = (run(Device::Cuda { ordinal: 0 })?, run(Device::Cpu)?);
        let (mut certain, mut wrong) = (0, Vec::new());
        for ((text, card), processor) in TEXTS.iter().zip(&card).zip(&processor) {
            let found = agreement(card, processor, BLUR);
            let told = match &found {
                Ok(found) => found.to_string(),
                Err(why) => format!("NOT the processor's: {why}"),
            };
            let case = json!({
                "case": "real model", "prompt": text, "tokens": tokens, "blur": BLUR, "failure": found.as_ref().err(),
                "equal": found.as_ref().ok().map(|found| found.equal),
                "certain": found.as_ref().ok().map(|found| found.certain),
                "margin_of_another": found.as_ref().ok().and_then(|found| found.near_tie),
                "logprobs_apart": found.as_ref().ok().map(|found| found.furthest),
            });
            self.say(&format!("real model, {tokens} greedy tokens after {text:?}: {told}"), case);
            match found {
                Ok(found) => certain += found.certain,
                Err(why) => wrong.push(why),
            }
        }
        match wrong.first() {
            Some(why) => Err(format!("{}: on the card, {why}", path.display()).into()),
            None if certain == 0 => Err(format!(
                "{}: at no position were the best two candidates {BLUR} or more apart, so that nothing was compared",
                path.display()
            )
            .into()),
            None => Ok(()),
        }
    }
}

/// The choices of a request's only sample, with the margins that its logprobs tell.
fn choices(samples: &[Delta]) -> Result<Vec<Choice>, Box<dyn Error>> {
    let sample = samples.first().ok_or("the request gave nothing")?;
    let choice = |(&token, position): (&u32, &TokenLogprobs)| match position.entries[..] {
        [best, second, ..] => Ok(Choice { token, logprob: best.logprob, margin: best.logprob - second.logprob }),
        _ => Err("a position came without its best two candidates".into()),
    };
    sample.token_ids.iter().zip(&sample.logprobs).map(choice).collect()
}

fn main() -> ExitCode {
    manylora_benches::exit_code(run())
}

#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn run() -> Result<(), Box<dyn Error>> {
    let options = Options::parse()?;
    let device = cuda::Device::open(0)?;
    let bandwidth = copied_per_second(&device)?;
    let card = format!("{}, copies {:.1} GB/s", describe(&device)?, bandwidth / 1e9);
    println!("{card}");
    let utilization = (options.budget * 1e9 / device.context().properties().memory as f64).min(0.95);
    drop(device);
    let shape = if options.tiny { Shape::TINY } else { Shape::SEVEN_BILLION };
    // Bytes are what a decode step is made of: arithmetic has no limit here.
    let limits = Limits { bandwidth, peak: f64::INFINITY };
    let mut bench = Bench { options, shape, utilization, limits, cases: Vec::new() };
    let ran = match bench.options.model.clone() {
        Some(model) => bench.real_model(&model),
        None => bench.random_weights(),
    };
    if let Some(path) = &bench.options.json {
        let shape = bench.shape_name();
        let real = bench.options.model.as_deref().and_then(Path::file_name).map(|name| name.display().to_string());
        let result = json!({
            "card": card, "shape": shape, "real_model": real, "rank": RANK, "prompt": PROMPT,
            "tokens": bench.options.tokens, "rounds": bench.options.rounds, "budget_gb": bench.options.budget,
            "gpu_memory_utilization": utilization, "cases": bench.cases,
        });
        std::fs::write(path, format!("{result:#}\n"))?;
    }
    ran
}
