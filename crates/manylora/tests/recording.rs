//! Traces of the real engine: what they hold, that replaying them decides the same, and that they say so when they cannot.

mod common;

use std::fs;
use std::io::{BufReader, Cursor};
use std::path::{Path, PathBuf};

use common::{Oracle, adapter_path, engine, greedy, request};
use manylora::{
    AdapterSource, Device, Engine, EngineConfig, EngineHandle, EvictionPolicyKind, GenerateRequest, SchedulingPolicy,
    UnloadMode,
};
use manylora_sim::cost::{AdapterShape, CostModel, StepWork, Tier};
use manylora_sim::engine::run;
use manylora_sim::replay::{ReplayObserver, Replayed, replay};
use manylora_sim::workload::recorded::Recorded;
use manylora_sim::workload::trace::Trace;
use manylora_sim::{SimError, Watch};

fn play(text: &str) -> Result<Replayed, SimError> {
    replay(Cursor::new(text), &mut (), &Watch::default())
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).expect("the trace")
}

/// Copies of adapters of the oracle under other names, with other content, so that each is a version of its own.
fn fleet(oracle: &Oracle, folder: &Path, count: usize) -> Vec<(String, PathBuf)> {
    let made = (0..count).map(|number| {
        let (name, source) =
            (format!("adapter-{number}"), adapter_path(oracle, ["alpha", "beta", "rank5"][number % 3]));
        let path = folder.join(&name);
        fs::create_dir(&path).expect("a folder");
        let config = source.join("adapter_config.json");
        let mut config: serde_json::Value =
            serde_json::from_slice(&fs::read(config).expect("a configuration")).expect("JSON");
        config["lora_alpha"] = serde_json::json!(4 + number);
        fs::write(path.join("adapter_config.json"), config.to_string()).expect("written");
        fs::copy(source.join("adapter_model.safetensors"), path.join("adapter_model.safetensors")).expect("copied");
        (name, path)
    });
    made.collect()
}

fn register(engine: &EngineHandle, fleet: &[(String, PathBuf)]) {
    let sources: Vec<_> = fleet.iter().map(|(name, path)| AdapterSource::directory(name.clone(), path)).collect();
    engine.register_adapters(&sources).into_iter().for_each(|result| drop(result.expect("registered")));
}

/// Requests from several threads at once: adapters in a skewed order, prompts with common beginnings, turns that go on with
/// what was answered before, and some that are cancelled.
fn load(engine: &EngineHandle, fleet: &[(String, PathBuf)], with_priorities: bool) {
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            scope.spawn(move || {
                for turn in 0..12_usize {
                    let number = (turn * turn + 3 * thread) % (fleet.len() + 1);
                    let mut prompt: Vec<u32> = (0..12).map(|place| 3 + (place % 5) as u32).collect();
                    prompt.extend((0..turn).map(|place| 20 + ((place * 7 + thread) % 40) as u32));
                    let make = |prompt: &[u32]| {
                        let adapter = fleet.get(number).map(|(name, _)| name.as_str());
                        let mut made = request(prompt, adapter, greedy(4 + turn % 7 * 5));
                        made.priority = if with_priorities { (turn % 3) as i64 } else { 0 };
                        made.tenant = (thread == 3).then(|| "tenant".to_owned());
                        made
                    };
                    let mut stream = engine.submit(make(&prompt)).expect("queued");
                    if turn % 5 == 4 {
                        drop(stream);
                        continue;
                    }
                    let answer = stream.collect_all().expect("it ends").remove(0);
                    prompt.extend(answer.token_ids);
                    prompt.push(7);
                    let streams: Vec<_> = (0..2).map(|_| engine.submit(make(&prompt)).expect("queued")).collect();
                    for mut stream in streams {
                        stream.collect_all().expect("it ends");
                    }
                }
            });
        }
    });
}

struct Timed {
    steps: u64,
    rows: u64,
    busy: f64,
    requests: u64,
    loads: u64,
}

impl ReplayObserver for Timed {
    fn step(&mut self, time: f64, work: &StepWork, seconds: &[f64]) {
        assert!(time >= 0.0 && seconds.len() == 8 && seconds.iter().all(|&phase| phase >= 0.0));
        self.steps += 1;
        self.rows += work.rows;
        self.busy += seconds.iter().sum::<f64>();
    }

    fn load(&mut self, adapter: &AdapterShape, _: bool, seconds: f64) {
        assert!(adapter.bytes > 0 && adapter.rank > 0 && seconds > 0.0);
        self.loads += 1;
    }

    fn request(&mut self, timing: &manylora_sim::replay::RecordedTiming) {
        assert!(timing.arrival <= timing.admitted && timing.admitted < timing.first_token);
        assert!(timing.first_token <= timing.last_token && timing.tokens > 0);
        self.requests += 1;
    }
}

/// and the first promise of the simulator: more adapters than slots, too few KV blocks, every policy.
#[test]
fn a_replayed_trace_decides_the_same() {
    let oracle = Oracle::open("llama");
    let folder = tempfile::tempdir().expect("a folder");
    let fleet = fleet(&oracle, folder.path(), 7);
    let policies = [
        (SchedulingPolicy::Fair, EvictionPolicyKind::Lru),
        (SchedulingPolicy::Fcfs, EvictionPolicyKind::CostAware),
        (SchedulingPolicy::Priority, EvictionPolicyKind::Lru),
    ];
    let mut all = Replayed::default();
    for (number, (policy, eviction)) in policies.into_iter().enumerate() {
        let path = folder.path().join(format!("{number}.jsonl"));
        let engine = engine(&oracle, |config| {
            config.record_trace = Some(path.clone());
            config.scheduling_policy = policy;
            config.lora_eviction = eviction;
            config.max_loras = Some(2);
            config.max_cpu_loras = Some(3);
            config.max_model_len = Some(96);
            config.max_num_seqs = 8;
            config.max_num_batched_tokens = Some(24);
            config.max_deferred_steps = 16;
            // Blocks for one or two long sequences beside the adapters.
            config.kv_cache_memory_bytes = Some(128 << 10);
        });
        register(&engine, &fleet);
        load(&engine, &fleet, policy == SchedulingPolicy::Priority);
        engine.reset_prefix_cache().expect("an answer");
        engine.pin_adapter(&fleet[0].0).expect("pinned");
        engine.unload_adapter(&fleet[1].0, UnloadMode::Abort).expect("unloaded");
        let name = fleet[2].0.clone();
        let other = AdapterSource { replace: true, ..AdapterSource::directory(name, fleet[1].1.clone()) };
        engine.load_adapter(other).expect("replaced");
        let stats = engine.stats().expect("stats");
        let (info, seconds) = (engine.info().clone(), phase_sum(&stats));
        drop(engine);

        let text = read(&path);
        let mut timed = Timed { steps: 0, rows: 0, busy: 0.0, requests: 0, loads: 0 };
        let file = BufReader::new(fs::File::open(&path).expect("the trace"));
        let replayed = replay(file, &mut timed, &Watch::default()).expect("the same");
        assert!(replayed.closed && replayed.lost == 0 && replayed.unfinished == 0, "{replayed:?}");
        assert_eq!(replayed.lines as usize, text.lines().count());
        // What the engine counted itself.
        assert_eq!((replayed.steps, replayed.evictions), (stats.steps, stats.evictions), "{policy:?}");
        assert_eq!((replayed.loads, replayed.preemptions), (stats.loads, stats.preemptions), "{policy:?}");
        let lookups = (replayed.hits + replayed.misses, replayed.hits);
        assert_eq!(lookups, (stats.meters.adapter_lookups, stats.meters.adapter_hits));
        assert_eq!(timed.steps, replayed.steps);
        assert_eq!(timed.rows as f64, stats.meters.step_tokens.sum());
        assert!(timed.busy <= seconds && timed.busy > 0.5 * seconds, "{} of {seconds}", timed.busy);
        assert!(timed.requests > 80 && timed.loads > 7, "{} {}", timed.requests, timed.loads);
        assert!(replayed.cached_tokens > 0 && replayed.admissions.len() as u64 >= timed.requests);
        assert_eq!(info.block_size, 4);
        all.preemptions += replayed.preemptions;
        all.evictions += replayed.evictions;
        notices_changes(&text);
    }
    assert!(all.preemptions > 0 && all.evictions > 20, "{all:?}");
}

/// Seconds of all phases.
fn phase_sum(stats: &manylora::EngineStats) -> f64 {
    manylora::Phase::ALL.map(|phase| stats.phase_seconds.of(phase)).iter().sum()
}

/// A trace that was tampered with, or an engine with other settings, decides otherwise, and the replay says so.
fn notices_changes(text: &str) {
    let diverged = |text: &str, what: &str| match play(text) {
        Err(SimError::Diverged { .. }) => {}
        other => panic!("{what}: {other:?}"),
    };
    diverged(&text.replacen("\"max_loras\":2", "\"max_loras\":1", 1), "one slot less");
    let lines: Vec<&str> = text.lines().collect();
    let without = |kind: &str, nth: usize| {
        let start = format!("{{\"kind\":\"{kind}\"");
        let place = lines.iter().enumerate().filter(|(_, line)| line.starts_with(&start)).nth(nth).expect("enough").0;
        let mut lines = lines.clone();
        lines.remove(place);
        lines.join("\n") + "\n"
    };
    diverged(&without("step", 20), "a step is missing");
    diverged(&without("load", 3), "a load never ended");
    diverged(&without("submit", 5), "a request is missing");
    diverged(&without("effect", 30), "a decision is missing");
    let flipped = text.replacen("\"resident\":[true]", "\"resident\":[false]", 1);
    diverged(&flipped, "a hit was a miss");
    // One that was cut in the middle of a line is replayed as far as it goes.
    for part in 1..8 {
        let cut = play(&text[..text.len() * part / 8]).expect("the same so far");
        assert!(!cut.closed && cut.steps > 0);
    }
}

/// No token and no text is in a trace, whatever it is about.
#[test]
fn a_trace_has_no_prompts() {
    let oracle = Oracle::open("llama");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.jsonl");
    let engine = engine(&oracle, |config| config.record_trace = Some(path.clone()));
    let prompt: Vec<u32> = (0..32).map(|place| 100 + place % 3).collect();
    let mut salted = request(&prompt, None, greedy(9));
    salted.cache_salt = Some("very secret salt".to_owned());
    for request in [salted, request(&prompt, None, greedy(9)), request(&prompt, None, greedy(9))] {
        engine.submit(request).expect("queued").collect_all().expect("it ends");
    }
    drop(engine);
    let text = read(&path);
    assert!(!text.contains("secret") && !text.contains("100,101,102") && !text.contains("prompt\":"));
    let replayed = play(&text).expect("the same");
    // The third finds what the second left, and the first has another salt.
    assert_eq!((replayed.requests, replayed.cached_tokens), (3, 28));
    let names = |text: &str| -> Vec<String> {
        let submits = text.lines().filter(|line| line.contains("\"kind\":\"submit\""));
        submits.map(|line| line.split("\"blocks\":").nth(1).expect("blocks").to_owned()).collect()
    };
    let first = names(&text);
    assert!(first[0] == first[1] && first[1] == first[2]);
    // The key is another one each time.
    let again = folder.path().join("again.jsonl");
    let engine = common::engine(&oracle, |config| config.record_trace = Some(again.clone()));
    engine.submit(request(&prompt, None, greedy(9))).expect("queued").collect_all().expect("it ends");
    drop(engine);
    assert_ne!(names(&read(&again))[0], first[0]);
}

#[test]
fn paths_are_looked_at_first() {
    let oracle = Oracle::open("llama");
    let folder = tempfile::tempdir().expect("a folder");
    let start = |path: &Path, model: &Path| {
        let mut config = EngineConfig::new(model);
        config.device = Device::Cpu;
        config.record_trace = Some(path.to_owned());
        config.kv_cache_memory_bytes = Some(4 << 20);
        Engine::start(config).expect_err("refused").to_string()
    };
    let base = oracle.base_folder();
    let missing = folder.path().join("nowhere/trace.jsonl");
    assert!(start(&missing, &base).contains("its folder does not exist"), "{}", start(&missing, &base));
    let taken = folder.path().join("taken.jsonl");
    fs::write(&taken, "mine").expect("written");
    let error = start(&taken, &base);
    assert!(error.contains("record_trace `") && error.contains("it is there already"), "{error}");
    assert_eq!(read(&taken), "mine");
    // An engine that does not start leaves no file.
    let fresh = folder.path().join("fresh.jsonl");
    start(&fresh, &folder.path().join("no-model"));
    assert!(!fresh.exists());
}

/// A step and a load take a moment each.
struct Moments;

impl CostModel for Moments {
    fn step(&self, _: &StepWork) -> f64 {
        0.01
    }

    fn load(&self, _: &AdapterShape, _: Tier) -> f64 {
        0.005
    }
}

/// One request after the other, over six adapters in turn: with fewer slots than adapters every request needs a load, in the
/// engine and in the simulation of its own trace, and with as many none does after the first round.
#[test]
fn the_cliff_is_at_the_same_slot_count() {
    let oracle = Oracle::open("llama");
    let folder = tempfile::tempdir().expect("a folder");
    let (adapters, rounds) = (6, 4);
    let fleet = fleet(&oracle, folder.path(), adapters);
    let mut loads = Vec::new();
    for slots in 3..=7 {
        let path = folder.path().join(format!("{slots}.jsonl"));
        let engine = engine(&oracle, |config| {
            config.record_trace = Some(path.clone());
            config.max_loras = Some(2);
            config.max_cpu_loras = Some(slots);
        });
        register(&engine, &fleet);
        for turn in 0..adapters * rounds {
            let prompt: Vec<u32> = (0..6).map(|place| 3 + place + turn as u32).collect();
            let made: GenerateRequest = request(&prompt, Some(&fleet[turn % adapters].0), greedy(3));
            engine.submit(made).expect("queued").collect_all().expect("it ends");
        }
        let real = engine.stats().expect("stats").loads;
        drop(engine);
        let mut recorded = Recorded::read(read(&path).as_bytes()).expect("a trace");
        assert_eq!((recorded.trace.requests.len(), recorded.left_out), (adapters * rounds, 0));
        assert_eq!(recorded.trace.adapters.len(), adapters);
        assert!(recorded.trace.requests.iter().all(|one| (one.prompt_tokens, one.output_tokens) == (6, 3)));
        assert_eq!(Trace::read(read(&path).as_bytes()).expect("a trace"), recorded.trace);
        // Far enough apart for each to be done before the next one comes, as they were.
        for (turn, one) in recorded.trace.requests.iter_mut().enumerate() {
            one.arrival = turn as f64;
        }
        let totals =
            run(recorded.engine(), &Moments, recorded.trace.requests.iter().copied(), &mut ()).expect("it runs");
        let simulated = totals.shelf.disk_loads + totals.shelf.host_loads;
        assert_eq!((simulated, totals.completed), (real, recorded.trace.requests.len() as u64), "{slots} slots");
        loads.push(real);
    }
    let (all, once) = ((adapters * rounds) as u64, adapters as u64);
    assert_eq!(loads, [all, all, all, once, once]);
}
