//! What a step looks at does not depend on how many adapters are registered, how many clients there were, or how much
//! waits. Counted, not timed; the example `step_cost` times it.

use manylora_core::{CoreConfig, LoraMemory, SchedulingPolicy};

use crate::driver::{Driver, config, prompt};

/// Entries looked at in each of 50 steady steps, with so many registrations and so many requests that wait for a load.
fn looks(policy: SchedulingPolicy, registered: u32, waiting: u32, max_loras: Option<usize>) -> u64 {
    let mut driver = Driver::new(CoreConfig {
        policy,
        max_loras,
        max_num_seqs: 16,
        max_model_len: 200,
        lora_memory: LoraMemory::Bytes(400),
        enable_prefix_caching: false,
        max_deferred_steps: 10_000,
        ..config(2_000)
    });
    driver.keeps_log = false;
    let adapters: Vec<_> = (0..registered).map(|number| driver.register(number, 100)).collect();
    let warm = [0, 1].map(|number| adapters[number]);
    for seed in 0..8 {
        driver.submit(&prompt(seed, 4), 190, &[warm[seed as usize % 2]]);
        driver.submit(&prompt(seed, 4), 190, &[]);
    }
    driver.step();
    driver.instant_loads = false;
    for number in 0..waiting {
        let adapter = adapters[(2 + number % (registered - 2).max(1)) as usize % adapters.len()];
        driver.submit(&prompt(100 + number, 4), 4, &[adapter]);
    }
    for _ in 0..5 {
        driver.step();
    }
    let before = driver.core.looks();
    for _ in 0..50 {
        driver.step();
    }
    (driver.core.looks() - before) / 50
}

#[test]
fn a_step_looks_at_nothing_that_grows_with_registrations_or_waiting_requests() {
    for policy in [SchedulingPolicy::Fair, SchedulingPolicy::Fcfs, SchedulingPolicy::Priority] {
        let small = looks(policy, 2, 0, None);
        let idle = looks(policy, 10_000, 0, None);
        assert_eq!(small, idle, "{policy:?}");
        let busy = looks(policy, 10_000, 5_000, None);
        let busier = looks(policy, 10_000, 10_000, None);
        assert!(busy <= small + 40, "{policy:?}: {busy} looks in a step, {small} with nothing else there");
        assert_eq!(busy, busier, "{policy:?}");
        let capped = looks(policy, 10_000, 5_000, Some(2));
        assert!(capped <= small + 40, "{policy:?}: {capped} looks in a step");
    }
}

#[test]
fn a_victim_among_two_thousand_residents_is_found_at_once() {
    let looks = [20, 2_000].map(|residents: u64| {
        let mut driver = Driver::new(CoreConfig {
            lora_memory: LoraMemory::Bytes(100 * residents),
            ..config(64 + residents as usize * 2)
        });
        driver.keeps_log = false;
        driver.checks_end = false;
        let mut total = 0;
        for number in 0..residents + 50 {
            let adapter = driver.register(number as u32, 100);
            driver.submit(&prompt(number as u32, 3), 1, &[adapter]);
            let before = driver.core.looks();
            driver.finish();
            if number >= residents {
                total += driver.core.looks() - before;
            }
        }
        assert!(driver.core.stats().evictions >= 50);
        total
    });
    assert_eq!(looks[0], looks[1]);
}
