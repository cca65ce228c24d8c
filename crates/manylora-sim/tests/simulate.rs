//! Configurations, runs, sweeps, searches and fleets: errors that name their field, sums that add up, and what must be equal.

use std::io::Write;

use manylora_sim::config::{Described, OneOrMany, WorkloadConfig};
use manylora_sim::engine::{EngineSettings, Observer};
use manylora_sim::fleet::RouterKind;
use manylora_sim::results::{RequestRecord, Summary, SummaryOptions};
use manylora_sim::search::{Condition, Goal, Which, find};
use manylora_sim::sweep::{Axis, sweep};
use manylora_sim::{Config, SimError, Watch, run, run_recorded};
use proptest::prelude::*;
use serde_json::{Value, json};

const ROUTERS: [RouterKind; 4] =
    [RouterKind::RoundRobin, RouterKind::LeastLoaded, RouterKind::RandomTwoChoices, RouterKind::ConsistentHashing];

/// A small model whose steps take milliseconds, with more adapters than places.
fn small() -> Value {
    json!({
        "model": "SmolLM2-135M",
        "gpu": "l4",
        "adapters": 40,
        "rank": [8, 16],
        "engine": {"max_loras": 4, "max_cpu_loras": 6, "max_num_seqs": 16, "kv_cache_memory_bytes": 100_000_000, "max_model_len": 1024},
        "workload": {"synthetic": {"rate": 20.0, "duration": 20.0, "popularity": "zipf:0.9", "input": "16:200", "output": "4:60"}},
        "slo": {"ttft": 0.2, "tpot": 0.05, "e2e": 5.0},
        "seed": 3
    })
}

fn config() -> Config {
    Config::from_value(small()).expect("it can be read")
}

fn error_of(change: impl FnOnce(&mut Value)) -> String {
    let mut value = small();
    change(&mut value);
    let error = Config::from_value(value).and_then(|config| run(&config)).expect_err("it is refused");
    error.to_string()
}

#[test]
fn a_run_adds_up_and_repeats() {
    let watch = Watch::default();
    let (report, records) = run_recorded(&config(), &watch).unwrap();
    let requests = report.requests;
    assert_eq!((report.completed, report.failed, records.arrival.len() as u64), (requests, 0, requests));
    assert_eq!(watch.progress(), (requests, requests));
    assert_eq!(records.output_tokens.iter().sum::<i64>() as u64, report.output_tokens);
    assert_eq!(records.prompt_tokens.iter().sum::<i64>() as u64, report.prompt_tokens);
    assert_eq!(report.ttft.count, requests);
    assert_eq!(report.itl.count, report.output_tokens - requests);
    assert_eq!(report.adapters.iter().map(|one| one.completed).sum::<u64>(), requests);
    assert_eq!(report.shelf.hits + report.shelf.misses, requests);
    assert!(report.shelf.evictions > 0 && report.hit_rate > 0.1 && report.hit_rate < 0.9, "{report:?}");
    // Everything was read from the disk once, and from the host after.
    assert_eq!(report.shelf.disk_loads, report.adapters.len() as u64);
    let place = |number: usize| {
        let times =
            [records.arrival[number], records.admitted[number], records.first_token[number], records.end[number]];
        times.is_sorted()
    };
    assert!((0..records.arrival.len()).all(place));
    // Promises, by the columns.
    let kept = (0..records.arrival.len()).filter(|&one| {
        let (ttft, e2e) = (records.first_token[one] - records.arrival[one], records.end[one] - records.arrival[one]);
        let gaps = (records.output_tokens[one] - 1).max(1) as f64;
        ttft <= 0.2 && e2e <= 5.0 && (records.end[one] - records.first_token[one]) / gaps <= 0.05
    });
    assert_eq!(report.slo_attainment, kept.count() as f64 / requests as f64);
    assert_eq!(run(&config()).unwrap(), report);
    let other = run(&Config { seed: 4, ..config() }).unwrap();
    assert_ne!(other.ttft, report.ttft);
}

/// A snapshot of a small run: what changes here changes what is told to users.
#[test]
fn a_small_run() {
    let mut report = serde_json::to_value(run(&config()).unwrap()).unwrap();
    let told = report.as_object_mut().unwrap();
    told.remove("distributions");
    told.insert("adapters".to_owned(), json!(told["adapters"].as_array().unwrap()[..3]));
    insta::assert_json_snapshot!(report);
}

#[test]
fn every_workload_runs() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for number in 0..40 {
        let adapter = ["sql", "json", "support"][number % 3];
        let arrival = number as f64 / 4.0;
        writeln!(file, r#"{{"arrival": {arrival}, "adapter": "{adapter}", "prompt_tokens": 60, "output_tokens": 8}}"#)
            .unwrap();
    }
    let path = file.path().to_str().unwrap();
    let loads = [
        (json!({"slora": {"rate": 4.0, "duration": 10.0, "alpha": 0.3}}), Some(40), 40),
        (json!({"punica": {"requests": 50, "max_len": 200, "mix": "skewed"}}), None, 50),
        (
            json!({"azure_functions": {"counts": [[3, 4], [1, 0]], "requests": 30, "input": "azure_code", "output": 9}}),
            None,
            30,
        ),
        (
            json!({"synthetic": {"requests": 25, "arrivals": "at_once", "input": "azure_conversation", "output": "azure_conversation"}}),
            Some(3),
            25,
        ),
        (json!({"synthetic": {"rate": 2, "duration": 10, "arrivals": "regular", "base_share": 1}}), Some(0), 20),
        (json!({"trace": {"path": path, "speed": 2}}), None, 40),
    ];
    for (load, adapters, requests) in loads {
        let mut value = small();
        value["workload"] = load.clone();
        value["adapters"] = json!(adapters);
        let report = run(&Config::from_value(value).unwrap()).unwrap();
        assert_eq!((report.requests, report.completed), (requests, requests), "{load}");
    }
    let mut value = small();
    value["adapters"] = Value::Null;
    value["workload"] = json!({"trace": {"path": path}});
    let slow = run(&Config::from_value(value.clone()).unwrap()).unwrap();
    let names: Vec<_> = slow.adapters.iter().filter_map(|one| one.name.clone()).collect();
    assert_eq!(names, ["sql", "json", "support"]);
    value["workload"]["trace"]["speed"] = json!(4.0);
    assert!(run(&Config::from_value(value).unwrap()).unwrap().seconds < slow.seconds / 3.0);
}

#[test]
fn errors_name_the_field_its_value_and_what_is_allowed() {
    type Case = (fn(&mut Value), &'static [&'static str]);
    let cases: [Case; 24] = [
        (|one| one["engine"]["max_lora"] = json!(4), &["max_lora", "unknown field", "max_loras"]),
        (|one| one["engine"]["max_loras"] = json!("four"), &["engine.max_loras `four`", "invalid type"]),
        (|one| one["engine"]["max_loras"] = json!(0), &["max_loras `0`", "between 1 and"]),
        (|one| one["engine"]["max_cpu_loras"] = json!(2), &["max_cpu_loras `2`", "max_loras (4)"]),
        (
            |one| one["engine"]["scheduling_policy"] = json!("lifo"),
            &["engine.scheduling_policy `lifo`", "fair", "fcfs", "priority"],
        ),
        (
            |one| one["engine"]["lora_eviction"] = json!("random"),
            &["engine.lora_eviction `random`", "lru", "cost_aware"],
        ),
        (|one| one["engine"]["dtype"] = json!("int8"), &["engine.dtype `int8`", "bfloat16"]),
        (|one| one["engine"]["max_num_seqs"] = json!(-1), &["engine.max_num_seqs `-1`"]),
        (|one| one["model"] = json!("gpt-5"), &["model `gpt-5`", "qwen2.5-7b"]),
        (|one| one["model"] = json!(7), &["model `7`", "a name, or a table"]),
        (|one| one["gpu"] = json!("gtx9"), &["gpu `gtx9`", "rtx4090"]),
        (|one| one["gpu"] = json!({"name": "x"}), &["gpu", "missing field"]),
        (|one| one["adapters"] = json!(1 << 30), &["adapters `1073741824`", "at most"]),
        (|one| one["rank"] = json!([64]), &["rank `64`", "max_lora_rank"]),
        (|one| one["rank_shares"] = json!([1.0]), &["rank_shares `[1.0]`", "2 ranks"]),
        (|one| one["target_modules"] = json!(["router"]), &["target_modules `router`", "q_proj"]),
        (|one| one["workload"]["synthetic"]["rate"] = json!(-3), &["rate `-3`", "above 0"]),
        (|one| one["workload"]["synthetic"]["input"] = json!("9:3"), &["workload.synthetic.input `9:3`", "64:256"]),
        (|one| one["workload"]["synthetic"]["popularity"] = json!("pareto:1"), &["popularity `pareto:1`", "zipf:S"]),
        (|one| one["workload"] = json!({"vidur": {}}), &["workload", "vidur", "slora"]),
        (
            |one| one["workload"] = json!({"trace": {"path": "/no/such.jsonl"}}),
            &["path `/no/such.jsonl`", "cannot be read"],
        ),
        (|one| one["cost"] = json!({"roofline": {"memory": 1.5}}), &["memory `1.5`", "share"]),
        (|one| one["router"] = json!("dns"), &["router `dns`", "least_loaded"]),
        (|one| one["slo"]["ttft"] = json!(0), &["slo.ttft `0`", "above 0"]),
    ];
    for (change, words) in cases {
        let error = error_of(change);
        assert!(words.iter().all(|word| error.contains(word)), "{error}: {words:?}");
    }
    for (field, value, word) in [
        ("replicas", json!(0), "from 1 to"),
        ("router_load_bound", json!(1.0), "above 1"),
        ("seed", json!("x"), "invalid type"),
        ("rate", json!(1), "unknown field"),
    ] {
        let error = error_of(|one| one[field] = value.clone());
        assert!(error.contains(field) && error.contains(word), "{error}");
    }
    let punica = error_of(|one| one["workload"] = json!({"punica": {"requests": 50, "mix": "distinct"}}));
    assert!(punica.contains("adapters `40`: the load asks for 50"), "{punica}");
}

#[test]
fn parameters_have_names() {
    let config = config();
    let all = config.parameters();
    for path in ["model", "engine.max_loras", "workload.synthetic.rate", "cost.roofline.host_seconds", "slo.tpot"] {
        assert!(all.iter().any(|one| one == path), "{path} in {all:?}");
    }
    assert_eq!(config.with("max_loras", json!(3)).unwrap().engine.max_loras, Some(3));
    assert_eq!(config.with("engine.max_loras", Value::Null).unwrap().engine.max_loras, None);
    assert_eq!(config.with("rank", json!(32)).unwrap().rank, OneOrMany(vec![32]));
    assert_eq!(config.with("gpu", json!("h100")).unwrap().gpu, Described::Name("h100".to_owned()));
    let faster = config.with("rate", json!(30)).unwrap();
    assert!(matches!(faster.workload, WorkloadConfig::Synthetic(one) if one.rate == 30.0));
    let unknown = config.with("slots", json!(3)).unwrap_err().to_string();
    assert!(
        unknown.starts_with("parameter `slots`: there is none") && unknown.contains("engine.max_loras"),
        "{unknown}"
    );
    assert_eq!(Config::from_value(config.to_value()).unwrap(), config);
}

/// Equal shares are in turn, others as near to their shares as whole adapters can be.
#[test]
fn ranks_have_their_shares() {
    let ranks = |rank: Vec<u64>, shares: Option<Vec<f64>>| {
        let own = Config { rank: OneOrMany(rank), rank_shares: shares, adapters: Some(10), ..config() };
        let settings = own.prepare().unwrap().settings;
        settings.adapters.iter().map(|one| one.rank).collect::<Vec<_>>()
    };
    assert_eq!(ranks(vec![16, 8, 4], None), [16, 8, 4, 16, 8, 4, 16, 8, 4, 16]);
    let mixed = ranks(vec![8, 16], Some(vec![0.7, 0.3]));
    assert_eq!(mixed.iter().filter(|&&rank| rank == 8).count(), 7);
    assert_eq!(mixed[..4], [8, 16, 8, 8]);
    assert_eq!(ranks(vec![8, 16], Some(vec![0.0, 2.0])), [16; 10]);
}

/// What the plain engine does, request by request.
#[derive(Default)]
struct Everything(Vec<RequestRecord>);

impl Observer for Everything {
    fn ended(&mut self, record: &RequestRecord) {
        self.0.push(record.clone());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// A fleet of one replica is the plain engine, whoever routes; and everything that arrives ends.
    #[test]
    fn one_replica_is_the_plain_engine(
        router in 0..4_usize,
        seed in any::<u32>(),
        rate in 1.0..60.0_f64,
        cv in 0.5..4.0_f64,
        places in proptest::option::of(1..6_usize),
        base_share in 0.0..0.5_f64,
        policy in prop_oneof![Just("fair"), Just("fcfs"), Just("priority")],
        kind in prop_oneof![Just("gamma"), Just("regular"), Just("at_once")],
    ) {
        let mut value = small();
        value["seed"] = json!(seed);
        value["router"] = serde_json::to_value(ROUTERS[router]).unwrap();
        value["engine"]["max_loras"] = json!(places);
        value["engine"]["scheduling_policy"] = json!(policy);
        let synthetic = &mut value["workload"]["synthetic"];
        synthetic["rate"] = json!(rate);
        synthetic["cv"] = json!(cv);
        synthetic["requests"] = json!(150);
        synthetic["base_share"] = json!(base_share);
        synthetic["arrivals"] = json!(kind);
        let config = Config::from_value(value).unwrap();
        let (report, records) = run_recorded(&config, &Watch::default()).unwrap();
        let prepared = config.prepare().unwrap();
        let mut plain = Everything::default();
        let settings: EngineSettings = prepared.settings;
        let totals = manylora_sim::engine::run(settings, prepared.cost.as_ref(), prepared.load.requests, &mut plain).unwrap();
        plain.0.sort_by_key(|record| record.number);
        prop_assert_eq!(plain.0.len(), records.arrival.len());
        for (place, record) in plain.0.iter().enumerate() {
            prop_assert_eq!(record.arrival, records.arrival[place]);
            prop_assert_eq!(record.admitted.unwrap(), records.admitted[place]);
            prop_assert_eq!(record.first_token.unwrap(), records.first_token[place]);
            prop_assert_eq!(record.end, records.end[place]);
        }
        prop_assert_eq!((report.seconds, report.steps, report.preemptions), (totals.seconds, totals.steps, totals.preemptions));
        prop_assert_eq!(report.shelf, totals.shelf);
    }

    /// Every request of a fleet ends once, on the replica that it was given to.
    #[test]
    fn fleets_conserve_requests(router in 0..4_usize, replicas in 2..9_u32, seed in any::<u32>(), bound in 1.01..3.0_f64) {
        let own = Config { router: ROUTERS[router], replicas, seed, router_load_bound: bound, ..config() };
        let (report, records) = run_recorded(&own, &Watch::default()).unwrap();
        prop_assert_eq!(report.completed, report.requests);
        prop_assert_eq!(report.replicas.iter().map(|one| one.requests).sum::<u64>(), report.requests);
        prop_assert_eq!(report.replicas.iter().map(|one| one.output_tokens).sum::<u64>(), report.output_tokens);
        for (place, one) in report.replicas.iter().enumerate() {
            let own = records.replica.iter().filter(|&&replica| replica == place as i64).count() as u64;
            prop_assert_eq!(own, one.requests);
        }
        prop_assert_eq!(run(&own).unwrap(), report);
    }
}

fn fleet(router: RouterKind) -> Config {
    let base = Config { adapters: Some(64), replicas: 8, router, ..config() };
    let changes = [("rate", json!(200)), ("popularity", json!("uniform")), ("max_cpu_loras", json!(16))];
    changes.into_iter().fold(base, |own, (name, value)| own.with(name, value).expect("it is a parameter"))
}

#[test]
fn affinity_lowers_loads_and_bounds_hold() {
    let spread = |router| run(&fleet(router)).unwrap();
    let [in_turn, least, drawn, hashed] = ROUTERS.map(spread);
    let loads = |report: &manylora_sim::Report| report.shelf.disk_loads + report.shelf.host_loads;
    for blind in [&in_turn, &least, &drawn] {
        assert!(2 * loads(&hashed) < loads(blind), "{} {}", loads(&hashed), loads(blind));
        assert!(hashed.hit_rate > blind.hit_rate + 0.2, "{} {}", hashed.hit_rate, blind.hit_rate);
    }
    // In turn, nobody has more than one request above another.
    let counts: Vec<u64> = in_turn.replicas.iter().map(|one| one.requests).collect();
    assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1);
    let spread = hashed.spread.unwrap();
    assert!(spread.requests > in_turn.spread.unwrap().requests && spread.adapters < 3.0, "{spread:?}");
    // A tighter bound spreads further, at the price of loads.
    let tight = run(&Config { router_load_bound: 1.01, ..fleet(RouterKind::ConsistentHashing) }).unwrap();
    assert!(tight.spread.unwrap().requests < spread.requests && loads(&tight) > loads(&hashed));
}

#[test]
fn a_sweeps_points_are_single_runs() {
    let axes = [
        Axis { parameter: "max_cpu_loras".to_owned(), values: vec![json!(4), json!(8), json!(16), json!(40)] },
        Axis { parameter: "scheduling_policy".to_owned(), values: vec![json!("fair"), json!("fcfs")] },
    ];
    let watch = Watch::default();
    let points = sweep(&config(), &axes, &watch).unwrap();
    assert_eq!(points.len(), 8);
    assert_eq!(points[1].parameters, *json!({"max_cpu_loras": 4, "scheduling_policy": "fcfs"}).as_object().unwrap());
    for point in &points {
        let alone = point.parameters.iter().fold(config(), |own, (name, value)| own.with(name, value.clone()).unwrap());
        let metrics = run(&alone).unwrap().metrics();
        assert_eq!(format!("{metrics:?}"), format!("{:?}", point.metrics));
    }
    let rates: Vec<f64> = points.iter().step_by(2).map(|point| point.metric("hit_rate").unwrap()).collect();
    assert!(rates.is_sorted() && rates[3] > rates[0], "more places, fewer hits: {rates:?}");
    let (done, total) = watch.progress();
    assert_eq!((done, total % 8), (total, 0));
    let refused = |parameter: &str, values: Vec<Value>| {
        let axes = [Axis { parameter: parameter.to_owned(), values }];
        sweep(&config(), &axes, &Watch::default()).unwrap_err().to_string()
    };
    assert!(refused("max_cpu_loras", vec![json!(8), json!(2)]).starts_with("at max_cpu_loras=2: max_cpu_loras `2`"));
    assert!(refused("max_cpu_loras", vec![]).contains("at least one value"));
    assert!(refused("slots", vec![json!(1)]).starts_with("parameter `slots`"));
    let twice = [axes[0].clone(), axes[0].clone()];
    assert!(sweep(&config(), &twice, &watch).unwrap_err().to_string().contains("swept twice"));
    watch.interrupt();
    assert_eq!(sweep(&config(), &axes, &watch).unwrap_err(), SimError::Interrupted);
}

fn goal(which: Which, parameter: &str, low: f64, high: f64) -> Goal {
    Goal { which, parameter: parameter.to_owned(), low, high, tolerance: None }
}

fn conditions(texts: &[&str]) -> Vec<Condition> {
    texts.iter().map(|text| text.parse().expect("it is a condition")).collect()
}

#[test]
fn the_smallest_is_found_and_the_one_below_fails() {
    let wanted = conditions(&["hit_rate >= 0.8", "failed < 1"]);
    let found =
        find(&config(), &goal(Which::Smallest, "max_cpu_loras", 4.0, 40.0), &wanted, &Watch::default()).unwrap();
    let places = found.value.as_ref().and_then(Value::as_u64).expect("it is found");
    assert_eq!(found.beyond, Some(json!(places - 1)));
    let rate = |places: u64| run(&config().with("max_cpu_loras", json!(places)).unwrap()).unwrap().hit_rate;
    assert!(rate(places) >= 0.8 && rate(places - 1) < 0.8);
    assert!(
        found.trials.len() <= 8
            && found.trials.iter().all(|one| one.holds == (one.point.metric("hit_rate") >= Some(0.8)))
    );
    // Everywhere, and nowhere.
    let range = goal(Which::Smallest, "max_cpu_loras", 4.0, 12.0);
    let easy = find(&config(), &range, &conditions(&["hit_rate > 0"]), &Watch::default()).unwrap();
    assert_eq!((easy.value, easy.beyond), (Some(json!(4)), None));
    let never = find(&config(), &range, &conditions(&["hit_rate > 1"]), &Watch::default()).unwrap();
    assert_eq!((never.value, never.beyond, never.trials.len()), (None, Some(json!(12)), 1));
}

#[test]
fn the_knee_is_found() {
    let wanted = conditions(&["slo_attainment >= 0.95"]);
    let found = find(&config(), &goal(Which::Largest, "rate", 1.0, 400.0), &wanted, &Watch::default()).unwrap();
    let (knee, beyond) = (found.value.unwrap().as_f64().unwrap(), found.beyond.unwrap().as_f64().unwrap());
    assert!(knee > 1.0 && beyond < 400.0 && (beyond - knee) / beyond <= 0.01, "{knee} {beyond}");
    let attained = |rate: f64| run(&config().with("rate", json!(rate)).unwrap()).unwrap().slo_attainment;
    assert!(attained(knee) >= 0.95 && attained(beyond) < 0.95);
}

#[test]
fn searches_refuse_what_makes_no_sense() {
    let refused = |goal: Goal, texts: &[&str]| {
        find(&config(), &goal, &conditions(texts), &Watch::default()).unwrap_err().to_string()
    };
    let good = ["ttft_p99 < 1"];
    assert!(refused(goal(Which::Smallest, "max_cpu_loras", 9.0, 4.0), &good).starts_with("range `9:4`"));
    assert!(refused(goal(Which::Smallest, "max_cpu_loras", 4.5, 9.0), &good).contains("whole numbers"));
    assert!(refused(goal(Which::Largest, "speed", 1.0, 9.0), &good).starts_with("parameter `speed`"));
    assert!(refused(goal(Which::Largest, "rate", 1.0, 9.0), &["ttft_p42 < 1"]).contains("ttft_p99"));
    assert!(refused(goal(Which::Largest, "rate", 1.0, 9.0), &[]).starts_with("condition ``"));
    let loose = Goal { tolerance: Some(2.0), ..goal(Which::Largest, "rate", 1.0, 9.0) };
    assert!(refused(loose, &good).starts_with("tolerance `2`"));
    for text in ["ttft_p99", "< 3", "ttft_p99 = 3", "ttft_p99 < x", "ttft_p99 < inf", ""] {
        let error = text.parse::<Condition>().unwrap_err().to_string();
        assert!(error.starts_with(&format!("condition `{text}`: a metric")), "{error}");
    }
    assert_eq!("  ttft_p99<=0.5 ".parse::<Condition>().unwrap().to_string(), "ttft_p99 <= 0.5");
}

/// Larger shelves never lower the hit rate; one report's rate is a summary's.
#[test]
fn reports_agree_with_summaries() {
    let own = config();
    let report = run(&own).unwrap();
    let prepared = own.prepare().unwrap();
    let mut summary = Summary::new(SummaryOptions { adapters: 40, slo_ttft: 0.2 });
    let totals =
        manylora_sim::engine::run(prepared.settings, prepared.cost.as_ref(), prepared.load.requests, &mut summary)
            .unwrap();
    assert_eq!((report.ttft, report.itl, report.e2e), (summary.ttft(), summary.itl(), summary.e2e()));
    assert_eq!(report.jain_index, summary.jain_index());
    assert_eq!(report.request_throughput, summary.request_throughput(&totals));
    let metrics = report.metrics();
    let names: std::collections::BTreeSet<_> = metrics.iter().map(|(name, _)| name).collect();
    assert_eq!(names.len(), metrics.len());
}

/// A measured engine stands for the card, and may be one on processors.
#[test]
fn calibrated_costs_are_used() {
    let dimensions = manylora_sim::model::ModelDescription::named("SmolLM2-135M").unwrap().dimensions;
    let fitted = json!({
        "count": 9, "seconds": 1.0, "fitted_over_measured": 1.0, "median_deviation": 0.0, "p90_deviation": 0.0,
    });
    let mut calibration = json!({
        "format": "manylora-calibration", "version": 1, "model": ["tiny"], "dimensions": dimensions, "device": "cpu",
        "backend": "avx2", "step_seconds": {"step": 0.01}, "first_load": {"each": 0.3, "per_byte": 0},
        "later_load": {"each": 0.02, "per_byte": 0}, "fit": {
            "steps": {"decode, adapters": fitted}, "loads": {},
        },
    });
    let mut file = tempfile::NamedTempFile::new().unwrap();
    write!(file, "{calibration}").unwrap();
    let mut value = small();
    value["gpu"] = json!("cpu");
    value["cost"] = json!({"calibrated": {"path": file.path()}});
    let report = run(&Config::from_value(value.clone()).unwrap()).unwrap();
    assert!((report.itl.p50 / 0.01 - 1.0).abs() < 0.006 && report.completed == report.requests, "{:?}", report.itl);
    assert!(
        report.notes.iter().any(|note| note.starts_with("loads of adapters take no time here")),
        "{:?}",
        report.notes
    );
    // Everybody whose adapter came from the disk waited for that.
    assert!(report.ttft.largest > 0.3 && report.shelf.disk_loads > 0);
    let refused = |path: &str, other: Value| {
        let config = Config::from_value(value.clone()).unwrap().with(path, other);
        config.and_then(|config| run(&config)).unwrap_err().to_string()
    };
    let other = refused("model", json!("SmolLM2-360M"));
    assert!(other.starts_with("cost.calibrated.path `") && other.contains("it is of tiny"), "{other}");
    assert!(
        refused("path", json!("/no/such.json")).starts_with("cost.calibrated.path `/no/such.json`: it cannot be read")
    );
    assert!(refused("kv_cache_memory_bytes", Value::Null).starts_with("engine.kv_cache_memory_bytes `null`"));
    // Adapters would cost nothing: what was measured had none.
    calibration["fit"]["steps"] = json!({"decode, base": fitted});
    let mut base = tempfile::NamedTempFile::new().unwrap();
    write!(base, "{calibration}").unwrap();
    let error = refused("path", json!(base.path()));
    assert!(error.starts_with("calibration `tiny`: no step of its traces had an adapter"), "{error}");
    value["cost"] = json!({"calibrated": {"path": base.path()}});
    value["adapters"] = json!(0);
    assert!(run(&Config::from_value(value.clone()).unwrap()).unwrap().completed > 0);
    value["cost"] = json!({"roofline": {}});
    let blind = Config::from_value(value).and_then(|config| run(&config)).unwrap_err().to_string();
    assert!(blind.starts_with("gpu `cpu`: no figures") && blind.contains("calibrate"), "{blind}");
}
