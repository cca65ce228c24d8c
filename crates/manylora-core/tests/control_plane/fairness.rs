//! Weighted fair service: the bound between two clients, weights, lift, and what is remembered.

use std::collections::BTreeMap;

use manylora_core::{Client, CoreConfig, Event, RequestId, SchedulingPolicy, UnloadMode};

use crate::driver::{Driver, config, prompt};

const LONGEST_PROMPT: usize = 30;

fn limits(policy: SchedulingPolicy) -> CoreConfig {
    CoreConfig { policy, max_num_seqs: 4, max_model_len: 40, enable_prefix_caching: false, ..config(24) }
}

/// Most tokens in a batch: what the KV blocks hold, or all sequences at their longest.
fn batch_tokens(config: &CoreConfig) -> usize {
    (config.ledger_bytes / config.block_bytes) as usize * config.block_size
}

/// Counts what two clients are served, from outside.
struct Meter {
    owners: BTreeMap<RequestId, usize>,
    served: [f64; 2],
    seen: BTreeMap<RequestId, usize>,
}

impl Meter {
    fn read(&mut self, driver: &Driver) {
        for (request, &owner) in &self.owners {
            let progress = &driver.requests[request];
            if progress.first_step.is_none() {
                continue;
            }
            let before = self.seen.insert(*request, progress.output.len());
            if before.is_none() {
                self.served[owner] += progress.request.prompt.len() as f64;
            }
            self.served[owner] += 2.0 * (progress.output.len() - before.unwrap_or(0)) as f64;
        }
        // Ended requests change no more.
        self.owners.retain(|request, _| driver.ending(*request).is_none());
    }
}

/// Widest swing of the difference in weighted service over all intervals, and the total service.
fn swing(policy: SchedulingPolicy, weights: [f64; 2], steps: u32) -> (f64, [f64; 2]) {
    let mut driver = Driver::new(limits(policy));
    let names = ["modest", "flood"];
    for (name, weight) in names.iter().zip(weights) {
        driver.handle(Event::SetWeight { client: Client::Tenant((*name).to_owned()), weight });
    }
    let mut meter = Meter { owners: BTreeMap::new(), served: [0.0; 2], seen: BTreeMap::new() };
    let (mut least, mut most) = (0.0f64, 0.0f64);
    for step in 0..steps {
        // Both always have something waiting; one sends ten times as much, with longer prompts.
        for (owner, count) in [(0, 1), (1, 10)] {
            let waiting = meter
                .owners
                .iter()
                .filter(|&(request, &one)| one == owner && driver.requests[request].first_step.is_none());
            if waiting.count() < 4 * count {
                for sample in 0..count as u32 {
                    let seed = step * 40 + owner as u32 * 20 + sample;
                    let length = if owner == 0 { 3 + seed as usize % 9 } else { 12 + seed as usize % 19 };
                    assert!(length <= LONGEST_PROMPT);
                    let request = driver.submit_for(names[owner], &prompt(seed, length), 2 + seed as usize % 9);
                    meter.owners.insert(request, owner);
                }
            }
        }
        driver.step();
        meter.read(&driver);
        // Nobody idles: whatever fits is admitted.
        let stats = driver.core.stats();
        let rows: u32 = driver.plan.sequences.iter().map(|sequence| sequence.rows).sum();
        let fits = driver.plan.sequences.len() < 4 && stats.free_blocks * 4 >= 2 * LONGEST_PROMPT + 40 && rows < 34;
        assert!(stats.waiting == 0 || !fits, "step {step} could have admitted one of {}", stats.waiting);
        let difference = meter.served[0] / weights[0] - meter.served[1] / weights[1];
        (least, most) = (least.min(difference), most.max(difference));
    }
    driver.core.check_invariants().unwrap();
    (most - least, meter.served)
}

#[test]
fn services_of_two_backlogged_clients_differ_by_no_more_than_the_bound() {
    for weights in [[1.0f64, 1.0], [3.0, 1.0], [0.5, 2.0]] {
        let smaller = weights[0].min(weights[1]);
        let bound =
            2.0 * (LONGEST_PROMPT as f64).max(2.0 * batch_tokens(&limits(SchedulingPolicy::Fair)) as f64) / smaller;
        let (swing, served) = swing(SchedulingPolicy::Fair, weights, 4_000);
        assert!(swing <= bound, "{weights:?}: services differ by {swing}, the bound is {bound}");
        // The bound says something: much more than that was served.
        assert!(served[0] + served[1] > 20.0 * bound, "{served:?}");
        let ratio = (served[0] / served[1]) / (weights[0] / weights[1]);
        assert!((0.9..1.1).contains(&ratio), "{weights:?}: {served:?}");
    }
}

#[test]
fn first_come_first_served_keeps_no_such_bound() {
    let bound = 4.0 * batch_tokens(&limits(SchedulingPolicy::Fcfs)) as f64;
    let (swing, served) = swing(SchedulingPolicy::Fcfs, [1.0, 1.0], 4_000);
    assert!(swing > 10.0 * bound && served[1] > 5.0 * served[0], "{swing} {served:?}");
}

#[test]
fn pausing_saves_nothing_up() {
    let mut driver = Driver::new(limits(SchedulingPolicy::Fair));
    let request = |driver: &mut Driver, tenant: &str, seed: u32| driver.submit_for(tenant, &prompt(seed, 8), 6);
    for seed in 0..60 {
        request(&mut driver, "busy", seed);
    }
    for _ in 0..40 {
        driver.step();
    }
    // The newcomer is served with the busy one in turns, not until it has caught up with all that was before.
    let late: Vec<_> = (100..130).map(|seed| request(&mut driver, "late", seed)).collect();
    let start = driver.steps;
    driver.finish();
    let first_steps = |requests: &[RequestId]| -> Vec<u64> {
        let mut steps: Vec<_> = requests.iter().map(|request| driver.requests[request].first_step.unwrap()).collect();
        steps.sort_unstable();
        steps
    };
    let all: Vec<_> = driver.requests.keys().copied().filter(|request| !late.contains(request)).collect();
    let busy: Vec<_> = first_steps(&all).into_iter().filter(|&step| step > start).collect();
    let late = first_steps(&late);
    assert!(late[0] <= start + 10, "{late:?}");
    let before = busy.iter().filter(|&&step| step < late[10]).count();
    assert!((5..=16).contains(&before), "{before} of the busy client's ran while ten of the newcomer's did");
}

#[test]
fn a_replaced_adapter_goes_on_with_the_old_ones_account() {
    let mut driver = Driver::new(CoreConfig { max_num_seqs: 1, ..limits(SchedulingPolicy::Fair) });
    let (old, other) = (driver.register(2, 50), driver.register(3, 50));
    // The old version was served much, the other adapter keeps waiting beside it.
    for seed in 0..12 {
        driver.submit(&prompt(seed, 20), 10, &[old]);
        driver.submit(&prompt(20 + seed, 4), 2, &[other]);
    }
    for _ in 0..40 {
        driver.step();
    }
    let new = driver.register(4, 50);
    driver.handle(Event::Replace { old, new, expected: None });
    let renamed = driver.submit(&prompt(50, 4), 2, &[new]);
    let stranger = driver.register(5, 50);
    let fresh = driver.submit(&prompt(51, 4), 2, &[stranger]);
    driver.finish();
    let first = |request: RequestId| driver.requests[&request].first_step.unwrap();
    assert!(first(fresh) < first(renamed), "the new version did not pay for the old one");
    assert_eq!(driver.core.stats().waiting, 0);
}

#[test]
fn clients_that_never_come_back_are_forgotten() {
    let mut driver = Driver::new(limits(SchedulingPolicy::Fair));
    let mut most = 0;
    for number in 0..3_000u32 {
        driver.submit_for(&format!("tenant {number}"), &prompt(number, 5), 2);
        driver.step();
        let busy = driver.core.stats();
        most = most.max(driver.core.remembered_clients() - (busy.running + busy.waiting).min(3_000));
    }
    driver.finish();
    assert!(most < 50, "{most} idle clients were remembered");
    let adapter = driver.register(2, 50);
    driver.handle(Event::SetWeight { client: Client::Adapter(adapter), weight: 4.0 });
    driver.submit(&prompt(1, 5), 3, &[adapter]);
    driver.finish();
    let before = driver.core.remembered_clients();
    driver.handle(Event::Unload { registration: adapter, mode: UnloadMode::Drain });
    assert_eq!(driver.core.remembered_clients(), before - 1);
}

#[test]
fn preempted_requests_are_charged_once() {
    // A client whose requests are preempted over and over must not fall behind for it.
    let limits = CoreConfig { max_num_seqs: 3, max_model_len: 36, ..limits(SchedulingPolicy::Fair) };
    let mut driver = Driver::new(CoreConfig { ledger_bytes: 11 * limits.block_bytes, ..limits });
    let mut meter = Meter { owners: BTreeMap::new(), served: [0.0; 2], seen: BTreeMap::new() };
    for round in 0..60u32 {
        for (owner, name) in ["one", "two"].into_iter().enumerate() {
            let request = driver.submit_for(name, &prompt(2 * round + owner as u32, 8), 24);
            meter.owners.insert(request, owner);
        }
    }
    while driver.core.stats().waiting > 8 {
        driver.step();
        meter.read(&driver);
        let difference = (meter.served[0] - meter.served[1]).abs();
        assert!(difference <= 4.0 * 44.0, "{:?}", meter.served);
    }
    assert!(driver.core.stats().preemptions > 20, "{:?}", driver.core.stats());
    driver.finish();
}
