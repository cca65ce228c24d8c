//! The virtual engine: times by hand, what the scheduler promises, and what must hold for any load.

mod common;

use std::collections::BTreeMap;

use manylora_core::{Effect, EvictionPolicyKind, SchedulingPolicy, StepPlan};
use manylora_sim::cost::{AdapterShape, CostModel, StepWork, Tier};
use manylora_sim::engine::{EngineSettings, Observer, run};
use manylora_sim::results::{RequestRecord, Summary, SummaryOptions, Totals};
use manylora_sim::workload::arrivals::Arrivals;
use manylora_sim::workload::lengths::Lengths;
use manylora_sim::workload::popularity::Popularity;
use manylora_sim::workload::slora::SloraWorkload;
use manylora_sim::workload::synthetic::SyntheticWorkload;
use manylora_sim::workload::{SharedPrefix, SimRequest};
use proptest::prelude::*;

/// A second for each step; loads as given.
struct Seconds {
    step: f64,
    disk: f64,
    host: f64,
}

impl CostModel for Seconds {
    fn step(&self, _: &StepWork) -> f64 {
        self.step
    }

    fn load(&self, _: &AdapterShape, tier: Tier) -> f64 {
        match tier {
            Tier::Disk => self.disk,
            Tier::Host => self.host,
        }
    }
}

const STEPS: Seconds = Seconds { step: 1.0, disk: 0.0, host: 0.0 };

fn settings(adapters: usize) -> EngineSettings {
    EngineSettings {
        core: common::config(),
        adapters: vec![AdapterShape { bytes: 3000, parameters: 1000, rank: 8 }; adapters],
        loader_threads: 2,
        host_cache_bytes: None,
    }
}

/// Keeps everything.
#[derive(Default)]
struct Everything {
    records: Vec<RequestRecord>,
    gaps: Vec<f64>,
    log: Vec<String>,
    works: Vec<StepWork>,
}

impl Observer for Everything {
    fn ended(&mut self, record: &RequestRecord) {
        self.records.push(record.clone());
    }

    fn token_gap(&mut self, seconds: f64) {
        self.gaps.push(seconds);
    }

    fn step(&mut self, now: f64, plan: &StepPlan, work: &StepWork, seconds: f64) {
        self.log.push(format!("{now} {:?} {seconds}", plan.sequences));
        self.works.push(*work);
    }

    fn effect(&mut self, now: f64, effect: &Effect) {
        self.log.push(format!("{now} {effect:?}"));
    }
}

impl Everything {
    /// Records by the order of arrival.
    fn sorted(&self) -> Vec<&RequestRecord> {
        let mut records: Vec<_> = self.records.iter().collect();
        records.sort_by_key(|record| record.number);
        records
    }
}

fn play(settings: EngineSettings, cost: &dyn CostModel, requests: &[SimRequest]) -> (Totals, Everything) {
    let mut seen = Everything::default();
    let totals = run(settings, cost, requests.iter().copied(), &mut seen).expect("it runs");
    (totals, seen)
}

#[test]
fn times_by_hand() {
    // 100 tokens of prompt are two steps of 64 rows; three tokens come at 2, 3 and 4. The second request arrives in the
    // middle of a step, and is in the next.
    let requests = [SimRequest::new(0.0, None, 100, 3), SimRequest::new(2.5, None, 10, 2)];
    let (totals, seen) = play(settings(0), &STEPS, &requests);
    let [first, second] = &seen.sorted()[..] else { panic!("two requests") };
    assert_eq!((first.admitted, first.first_token, first.end, first.tokens), (Some(0.0), Some(2.0), 4.0, 3));
    assert_eq!((second.admitted, second.first_token, second.end), (Some(3.0), Some(4.0), 5.0));
    assert_eq!((second.ttft(), second.e2e(), second.longest_gap), (Some(1.5), 2.5, 1.0));
    assert_eq!(seen.gaps, [1.0, 1.0, 1.0]);
    assert_eq!((totals.seconds, totals.steps, totals.completed, totals.output_tokens), (5.0, 5, 2, 5));
    let rows: Vec<_> = seen.works.iter().map(|work| (work.rows, work.prefill_rows, work.sampled_rows)).collect();
    assert_eq!(rows, [(64, 64, 0), (36, 36, 1), (1, 0, 1), (11, 10, 2), (1, 0, 1)]);
    // Context and pairs: 36 rows after 64 positions.
    assert_eq!((seen.works[1].context, seen.works[1].attention_pairs), (100, 36 * 64 + 36 * 37 / 2));
    // Time without anything to do passes too.
    let late = [SimRequest::new(0.0, None, 1, 1), SimRequest::new(100.0, None, 1, 1)];
    let (totals, _) = play(settings(0), &STEPS, &late);
    assert_eq!((totals.seconds, totals.busy_seconds), (101.0, 2.0));
}

#[test]
fn loads_take_their_time_and_hold_up_nobody_else() {
    let cost = Seconds { step: 1.0, disk: 2.5, host: 0.5 };
    let mut own = settings(3);
    own.core.max_cpu_loras = Some(1);
    own.core.max_loras = Some(1);
    own.loader_threads = 1;
    let requests = [
        SimRequest::new(0.0, Some(0), 4, 1),
        SimRequest::new(0.0, None, 4, 6),
        SimRequest::new(10.0, Some(1), 4, 1),
        SimRequest::new(20.0, Some(0), 4, 1),
        SimRequest::new(30.0, Some(0), 4, 1),
    ];
    let (totals, seen) = play(own, &cost, &requests);
    let records = seen.sorted();
    // The base runs at once; the load of 0 is over at 2.5, in the middle of a step.
    assert_eq!((records[1].first_token, records[1].longest_gap), (Some(1.0), 1.0));
    assert_eq!((records[0].admitted, records[0].first_token), (Some(3.0), Some(4.0)));
    assert_eq!(records[2].ttft(), Some(3.5));
    // 0 was evicted, and is in the host's memory.
    assert_eq!(records[3].ttft(), Some(1.5));
    assert_eq!(records[4].ttft(), Some(1.0));
    let shelf = totals.shelf;
    assert_eq!((shelf.hits, shelf.misses, shelf.disk_loads, shelf.host_loads, shelf.evictions), (1, 3, 2, 1, 2));
    assert_eq!(shelf.hit_rate(), 0.25);
}

#[test]
fn steps_count_their_adapters() {
    let requests: Vec<_> = [None, Some(0), Some(1), Some(0)].map(|one| SimRequest::new(0.0, one, 4, 2)).to_vec();
    let (_, seen) = play(settings(2), &STEPS, &requests);
    let [first, second] = seen.works[..] else { panic!("two steps") };
    assert_eq!((first.adapters, first.adapter_bytes, first.adapter_rows), (2, 6000, 12));
    assert_eq!((second.adapters, second.adapter_rows, second.adapter_row_parameters), (2, 3, 3000));
}

#[test]
fn shared_prefixes_are_computed_once() {
    let mut own = settings(2);
    own.core.enable_prefix_caching = true;
    let with_prefix = |arrival, adapter| SimRequest {
        prefix: Some(SharedPrefix { group: 7, tokens: 32 }),
        ..SimRequest::new(arrival, adapter, 40, 2)
    };
    let requests =
        [with_prefix(0.0, Some(0)), with_prefix(10.0, Some(0)), with_prefix(20.0, Some(1)), with_prefix(30.0, None)];
    let (totals, seen) = play(own, &STEPS, &requests);
    // Cached blocks belong to an adapter: the others compute theirs.
    let cached: Vec<_> = seen.sorted().iter().map(|record| record.cached_tokens).collect();
    assert_eq!(cached, [0, 32, 0, 0]);
    assert_eq!(totals.prefix_cache_hits, 32);
}

/// the first request that would exceed the cap does not hold up the others.
#[test]
fn a_32_only_those_over_the_cap_wait() {
    let mut own = settings(3);
    own.core.max_loras = Some(2);
    let (base, alpha, beta, gamma) = (None, Some(0), Some(1), Some(2));
    let queue = [base, alpha, beta, gamma, gamma, base, alpha];
    let requests: Vec<_> = queue.map(|adapter| SimRequest::new(0.0, adapter, 4, 5)).to_vec();
    let (_, seen) = play(own, &STEPS, &requests);
    let admitted: Vec<_> = seen.sorted().iter().map(|record| record.admitted.unwrap()).collect();
    // The others take five steps; the GAMMAs are in the sixth.
    assert_eq!(admitted, [0.0, 0.0, 0.0, 5.0, 5.0, 0.0, 0.0]);
}

/// BETA has its turn within the bound although ALPHA never stops, and little is lost by that.
#[test]
fn a_33_nobody_starves() {
    for policy in [SchedulingPolicy::Fcfs, SchedulingPolicy::Fair, SchedulingPolicy::Priority] {
        let mut own = settings(2);
        own.core.max_loras = Some(1);
        own.core.max_num_seqs = 4;
        own.core.policy = policy;
        own.core.max_deferred_steps = 64;
        let alpha = |step: u32| SimRequest::new(f64::from(step), Some(0), 4, 4);
        let mut requests: Vec<_> = (0..10_000).map(alpha).collect();
        let (without, _) = play(own.clone(), &STEPS, &requests);
        requests.insert(11, SimRequest::new(10.0, Some(1), 4, 4));
        let (with, seen) = play(own, &STEPS, &requests);
        let beta = seen.records.iter().find(|record| record.adapter == Some(1)).unwrap();
        // Deferred for 64 steps, then what runs drains (4 steps).
        assert!(beta.ttft().unwrap() <= 64.0 + 4.0 + 3.0, "{policy:?}: {:?}", beta.ttft());
        assert_eq!(with.completed, 10_001);
        assert!(with.seconds <= without.seconds * 1.01, "{policy:?}: {} and {}", with.seconds, without.seconds);
    }
}

#[test]
fn a_step_without_blocks_preempts_and_everybody_ends() {
    let mut own = settings(4);
    // 70 blocks of 4 positions: one longest sequence and a little.
    own.core.ledger_bytes = 70_000;
    let requests: Vec<_> = (0..40).map(|number| SimRequest::new(f64::from(number), Some(number % 4), 20, 60)).collect();
    let (totals, seen) = play(own, &STEPS, &requests);
    assert!(totals.preemptions > 0);
    assert_eq!(totals.completed, 40);
    let preempted: u32 = seen.records.iter().map(|record| record.preemptions).sum();
    assert_eq!(u64::from(preempted), totals.preemptions);
    assert!(seen.records.iter().all(|record| record.tokens == 60));
}

#[test]
fn what_cannot_run_fails_by_itself() {
    let requests = [SimRequest::new(0.0, None, 300, 1), SimRequest::new(0.0, None, 3, 2)];
    let (totals, seen) = play(settings(0), &STEPS, &requests);
    assert_eq!((totals.completed, totals.failed), (1, 1));
    let failure = seen.sorted()[0].failure.as_ref().unwrap();
    assert!(failure.contains("`300` tokens") && failure.contains("max_model_len"), "{failure}");
    let unknown = run(settings(2), &STEPS, [SimRequest::new(0.0, Some(2), 1, 1)], &mut ()).unwrap_err().to_string();
    assert_eq!(unknown, "adapter `2`: there are 2 adapters");
    let backwards = [SimRequest::new(5.0, None, 1, 1), SimRequest::new(4.0, None, 1, 1)];
    let error = run(settings(0), &STEPS, backwards, &mut ()).unwrap_err().to_string();
    assert!(error.starts_with("arrival `4`: requests come by arrival"), "{error}");
    let error = run(settings(0), &STEPS, [SimRequest::new(f64::NAN, None, 1, 1)], &mut ()).unwrap_err().to_string();
    assert!(error.starts_with("arrival `NaN`"), "{error}");
    // Not even made, whatever its length.
    let endless = [SimRequest::new(0.0, None, u32::MAX, 1)];
    assert_eq!(run(settings(0), &STEPS, endless, &mut ()).unwrap().failed, 1);
    for seconds in [f64::NAN, f64::INFINITY, -1.0] {
        let cost = Seconds { step: seconds, ..STEPS };
        let error = run(settings(0), &cost, requests, &mut ()).unwrap_err().to_string();
        assert!(error.starts_with("cost model `") && error.contains("a step takes"), "{error}");
        let cost = Seconds { disk: seconds, ..STEPS };
        let error = run(settings(1), &cost, [SimRequest::new(0.0, Some(0), 1, 1)], &mut ()).unwrap_err().to_string();
        assert!(error.contains("a load takes"), "{error}");
    }
    let mut own = settings(1);
    own.loader_threads = 0;
    assert!(run(own, &STEPS, [], &mut ()).unwrap_err().to_string().starts_with("loader_threads `0`"));
    let mut own = settings(1);
    own.core.max_num_seqs = 0;
    assert!(run(own, &STEPS, [], &mut ()).unwrap_err().to_string().contains("max_num_seqs (`0`)"));
}

#[test]
fn summaries_agree_with_the_records() {
    let load = SloraWorkload { alpha: 0.3, input: [8, 60], output: [8, 60], ..SloraWorkload::new(20, 2.0, 200.0) };
    let cost = Seconds { step: 0.05, disk: 0.2, host: 0.02 };
    let requests = load.requests().unwrap();
    let (totals, seen) = play(settings(20), &cost, &requests);
    let mut summary = Summary::new(SummaryOptions { adapters: 20, slo_ttft: 0.3 });
    assert_eq!(run(settings(20), &cost, requests, &mut summary).unwrap(), totals);
    let mut ttft: Vec<f64> = seen.records.iter().filter_map(RequestRecord::ttft).collect();
    ttft.sort_by(f64::total_cmp);
    let count = ttft.len();
    assert_eq!(summary.ttft().count, count as u64);
    for (got, percent) in [(summary.ttft().p50, 50), (summary.ttft().p90, 90), (summary.ttft().p99, 99)] {
        let want = ttft[(percent * count).div_ceil(100) - 1];
        assert!((got / want - 1.0).abs() < 0.006, "p{percent}: {got} for {want}");
    }
    let within = ttft.iter().filter(|&&one| one <= 0.3).count() as f64 / count as f64;
    assert_eq!(summary.slo_attainment(), within);
    assert_eq!(summary.itl().count, seen.gaps.len() as u64);
    let completed: u64 = summary.by_adapter().iter().map(|one| one.completed).sum();
    assert_eq!(completed, totals.completed);
    let jain = summary.jain_index().unwrap();
    assert!(jain > 0.5 && jain <= 1.0 && summary.worst_over_mean_ttft().unwrap() >= 1.0, "{jain}");
    assert!((summary.request_throughput(&totals) - totals.completed as f64 / totals.seconds).abs() < 1e-12);
}

/// A load that overloads the shelf: hit rates of LRU with more and more places.
#[test]
fn more_places_never_lower_the_hit_rate() {
    let load = SloraWorkload { alpha: 0.3, output: [8, 64], input: [8, 128], ..SloraWorkload::new(100, 4.0, 400.0) };
    let requests = load.requests().unwrap();
    let cost = Seconds { step: 0.02, disk: 0.05, host: 0.01 };
    let mut before = -1.0;
    for places in [2, 4, 8, 16, 32, 64, 100] {
        let mut own = settings(100);
        own.core.max_loras = Some(places);
        own.core.max_cpu_loras = Some(places);
        let (totals, _) = play(own, &cost, &requests);
        let rate = totals.shelf.hit_rate();
        assert!(rate >= before, "{places} places: {rate}, and {before} with fewer");
        assert_eq!(totals.completed, requests.len() as u64);
        before = rate;
    }
    assert!(before > 0.9, "{before}");
}

fn any_load() -> impl Strategy<Value = SyntheticWorkload> {
    (1..120_usize, 0.2..20.0_f64, 0.3..4.0_f64, 0..12_u32, 0.0..0.6_f64, 1..90_u32, 1..40_u32, 0..20_u32, any::<u32>())
        .prop_map(|(requests, rate, cv, adapters, base_share, input, output, shared_prefix, seed)| SyntheticWorkload {
            requests,
            arrivals: Arrivals::Gamma { rate, cv },
            adapters,
            popularity: Popularity::Zipf { s: 1.0 },
            base_share,
            input: Lengths::Uniform { low: 1, high: input + 1 },
            output: Lengths::Uniform { low: 1, high: output + 1 },
            shared_prefix,
            seed,
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Every request ends once with its tokens; times are in order; and the same again gives the same again.
    #[test]
    fn requests_are_conserved_and_runs_repeat(
        load in any_load(),
        places in proptest::option::of(1..6_usize),
        blocks in 70..400_u64,
        policy in prop_oneof![Just(SchedulingPolicy::Fair), Just(SchedulingPolicy::Fcfs), Just(SchedulingPolicy::Priority)],
        eviction in prop_oneof![Just(EvictionPolicyKind::Lru), Just(EvictionPolicyKind::CostAware)],
        caching in any::<bool>(),
        disk in 0.0..3.0_f64,
    ) {
        let mut own = settings(12);
        own.core.max_loras = places;
        own.core.max_cpu_loras = places.map(|places| places + 1);
        own.core.ledger_bytes = blocks * 1000;
        own.core.policy = policy;
        own.core.eviction = eviction;
        own.core.enable_prefix_caching = caching;
        let cost = Seconds { step: 0.1, disk, host: disk / 4.0 };
        let requests: Vec<SimRequest> = load.generate().unwrap().collect();
        let (totals, seen) = play(own.clone(), &cost, &requests);
        prop_assert_eq!(totals.completed, requests.len() as u64);
        prop_assert_eq!((totals.failed, seen.records.len()), (0, requests.len()));
        for (record, request) in seen.sorted().iter().zip(&requests) {
            prop_assert_eq!(record.tokens, request.output_tokens);
            let (admitted, first) = (record.admitted.unwrap(), record.first_token.unwrap());
            prop_assert!(request.arrival <= admitted && admitted < first && first <= record.end);
        }
        let with_adapter = requests.iter().filter(|request| request.adapter.is_some()).count() as u64;
        prop_assert_eq!(totals.shelf.hits + totals.shelf.misses, with_adapter);
        prop_assert!(totals.busy_seconds <= totals.seconds + 1e-6);
        let (again, same) = play(own, &cost, &requests);
        prop_assert_eq!(again, totals);
        prop_assert_eq!(same.log, seen.log);
    }

    /// One request after the other is a plain string of references: there LRU's hits grow with the places, always.
    #[test]
    fn lrus_hits_grow_with_the_places(adapters in proptest::collection::vec(0..8_u32, 1..60), tier in 0.0..2.0_f64) {
        let cost = Seconds { step: 0.01, disk: tier, host: tier };
        let requests: Vec<_> = (0..).zip(&adapters).map(|(at, &adapter)| SimRequest::new(f64::from(at) * 100.0, Some(adapter), 4, 2)).collect();
        let mut before = 0;
        for places in 1..=8_usize {
            let mut own = settings(8);
            own.core.max_loras = Some(places);
            own.core.max_cpu_loras = Some(places);
            let (totals, _) = play(own, &cost, &requests);
            // By hand: a reference hits if fewer than `places` others came since the last one to the same adapter.
            let hit = |at: usize| {
                let last = adapters[..at].iter().rposition(|&one| one == adapters[at]);
                last.is_some_and(|last| {
                    let between: std::collections::BTreeSet<_> = adapters[last + 1..at].iter().collect();
                    between.len() < places
                })
            };
            prop_assert_eq!(totals.shelf.hits, (0..adapters.len()).filter(|&at| hit(at)).count() as u64);
            prop_assert!(totals.shelf.hits >= before);
            before = totals.shelf.hits;
        }
    }
}

/// Memory follows the live requests: the longest prompt table of a long run is that of a short one.
#[test]
fn places_of_live_requests_are_used_again() {
    struct Places(BTreeMap<u64, u64>);
    impl Observer for Places {
        fn step(&mut self, _: f64, plan: &StepPlan, _: &StepWork, _: f64) {
            for sequence in &plan.sequences {
                *self.0.entry(sequence.request.0 & 0xFFFF_FFFF).or_default() += 1;
            }
        }
    }
    let requests = (0..5000).map(|number| SimRequest::new(f64::from(number) * 2.0, None, 4, 3));
    let mut places = Places(BTreeMap::new());
    let totals = run(settings(0), &STEPS, requests, &mut places).unwrap();
    assert_eq!(totals.completed, 5000);
    assert!(places.0.len() <= 3, "{:?}", places.0);
}
