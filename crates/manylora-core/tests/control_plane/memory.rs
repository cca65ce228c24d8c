//! Adapters given from memory, and what happens where there is no room.

use std::collections::BTreeSet;

use manylora_core::{CoreConfig, Effect, Event, FailureReason, LoraMemory, SchedulingPolicy, UnloadMode};

use crate::driver::{BLOCK_BYTES, Driver, Ending, config, prompt};

#[test]
fn what_is_given_from_memory_stays_until_it_is_unloaded() {
    let mut driver = Driver::new(CoreConfig { lora_memory: LoraMemory::Bytes(200), ..config(64) });
    let given = driver.give(2, 100);
    driver.handle(Event::Prefetch(given));
    assert!(driver.effects.contains(&Effect::Resident(given)));
    let others = [3, 4].map(|content| driver.register(content, 100));
    for seed in 0..8 {
        // The driver refuses an eviction of what cannot be read again.
        driver.submit(&prompt(seed, 4), 4, &[others[seed as usize % 2]]);
        driver.finish();
        assert!(driver.core.registration(given).unwrap().slot.is_some());
    }
    // What does not fit beside it can never be loaded, and says so with the numbers.
    let large = driver.register(5, 101);
    let request = driver.submit(&prompt(1, 4), 4, &[large]);
    match driver.ending(request) {
        Some(Ending::Failed(FailureReason::AdapterLoad(failure))) => {
            let message = failure.message.as_str();
            assert!(message.contains("`201`") && message.contains("`200`"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    let more = driver.give(6, 150);
    driver.handle(Event::Prefetch(more));
    assert!(driver.failure(more).contains("`250`"));
    driver.handle(Event::Unload { registration: given, mode: UnloadMode::Drain });
    driver.submit(&prompt(1, 4), 4, &[large]);
    driver.finish();
    assert_eq!(driver.core.stats().adapter_bytes, 101);
}

#[test]
fn the_same_content_from_disk_is_evictable_once_the_given_one_is_unloaded() {
    let mut driver = Driver::new(CoreConfig { max_cpu_loras: Some(2), ..config(64) });
    let disk = driver.register(2, 100);
    driver.handle(Event::Prefetch(disk));
    let given = driver.give(2, 100);
    driver.handle(Event::Prefetch(given));
    assert_eq!(driver.core.stats().adapters.len(), 1);
    assert!(driver.core.stats().adapters[0].anchored);
    let others = [3, 4].map(|content| driver.register(content, 100));
    let round = |driver: &mut Driver| {
        for (seed, other) in (0..).zip(others) {
            driver.submit(&prompt(seed, 4), 4, &[other]);
            driver.finish();
        }
        driver.core.registration(disk).unwrap().slot.is_some()
    };
    assert!(round(&mut driver));
    driver.handle(Event::Unload { registration: given, mode: UnloadMode::Drain });
    assert!(!round(&mut driver), "nothing keeps it any more");
}

#[test]
fn given_adapters_are_no_pins_but_take_places() {
    let mut driver = Driver::new(CoreConfig { max_loras: Some(2), max_cpu_loras: Some(3), ..config(64) });
    let given = [2, 3].map(|content| driver.give(content, 50));
    for id in given {
        driver.handle(Event::Prefetch(id));
    }
    let disk = driver.register(4, 50);
    // max_loras would allow the pin: nothing is pinned. max_cpu_loras does not: no place would be left.
    driver.handle(Event::Pin(disk));
    assert!(driver.failure(disk).contains("max_cpu_loras is `3`"), "{}", driver.failure(disk));
    // A given one may be pinned: it takes no further place, and it is the one pin that max_loras 2 allows.
    driver.handle(Event::Pin(given[0]));
    assert!(driver.core.registration(given[0]).unwrap().pinned);
    driver.handle(Event::Pin(given[1]));
    assert!(driver.failure(given[1]).contains("max_loras is `2`"));
    driver.submit(&prompt(1, 4), 4, &[disk]);
    driver.finish();
}

#[test]
fn a_prefetch_without_room_is_over_and_said_so() {
    let mut driver = Driver::new(CoreConfig { lora_memory: LoraMemory::Bytes(100), ..config(64) });
    let (held, cold) = (driver.register(2, 100), driver.register(3, 100));
    let running = driver.submit(&prompt(1, 4), 60, &[held]);
    driver.step();
    driver.handle(Event::Prefetch(cold));
    assert_eq!(driver.effects.last(), Some(&Effect::OnDemand(cold)));
    driver.handle(Event::Abort(running));
    driver.step();
    driver.step();
    assert_eq!(driver.core.stats().loads, 1, "nobody asked for it again");
    driver.submit(&prompt(2, 4), 4, &[cold]);
    driver.finish();
    assert_eq!(driver.core.stats().loads, 2);
    // Content from memory cannot be read on demand: it waits, and is told when it is resident.
    let given = driver.give(4, 100);
    let running = driver.submit(&prompt(1, 4), 60, &[cold]);
    driver.step();
    driver.handle(Event::Prefetch(given));
    assert!(!driver.effects.contains(&Effect::OnDemand(given)) && !driver.effects.contains(&Effect::Resident(given)));
    driver.handle(Event::Abort(running));
    driver.step();
    assert!(driver.effects.contains(&Effect::Resident(given)));
}

#[test]
fn idle_adapters_are_not_evicted_for_blocks_that_would_not_suffice() {
    let mut driver = Driver::new(CoreConfig { max_model_len: 40, max_num_seqs: 4, ..config(16) });
    let adapter = driver.register(2, 100);
    driver.submit(&prompt(1, 4), 1, &[adapter]);
    driver.finish();
    driver.submit(&prompt(2, 30), 10, &[]);
    driver.step();
    // It lacks three blocks and the adapter's bytes are one.
    let second = driver.submit(&prompt(3, 38), 2, &[]);
    driver.step();
    assert!(!driver.is_running(second));
    assert!(driver.core.registration(adapter).unwrap().slot.is_some());
    driver.finish();
}

/// Steps that 400 requests take, each for one of `adapters` adapters of 10 to 80 KV blocks, with 11648 blocks of memory;
/// then how many adapters they name, how many loads there were, and how many preemptions. Loads that were ordered before a
/// step, eight at a time, are there before the next.
fn fleet(adapters: u32, policy: SchedulingPolicy) -> (u64, u64, u64, u64) {
    let limits = CoreConfig { max_num_seqs: 32, max_num_batched_tokens: 512, max_model_len: 256, ..config(11_648) };
    let mut driver = Driver::new(CoreConfig { policy, max_loading: Some(8), ..limits });
    driver.instant_loads = false;
    let bytes = |content: u32| [80, 40, 20, 10][content as usize % 4] * BLOCK_BYTES;
    let ids: Vec<_> = (0..adapters).map(|content| driver.register(content, bytes(content))).collect();
    let mut state = 7_u64;
    let mut below = |limit: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit
    };
    let mut named = BTreeSet::new();
    for seed in 0..400 {
        let (input, output, which) = (8 + below(56), 8 + below(56), below(ids.len()));
        named.insert(which);
        driver.submit(&prompt(seed, input), output, &[ids[which]]);
    }
    let mut steps = 0;
    while driver.core.has_work() {
        for _ in 0..driver.loads.len() {
            driver.answer_load(0);
        }
        driver.step();
        steps += 1;
        assert!(steps < 10_000, "{:?}", driver.core.stats());
    }
    let stats = driver.core.stats();
    (steps, named.len() as u64, stats.loads, stats.preemptions)
}

#[test]
fn reading_ahead_for_many_adapters_takes_no_room_from_what_runs() {
    for policy in [SchedulingPolicy::Fair, SchedulingPolicy::Fcfs] {
        let (few, ..) = fleet(5, policy);
        let (many, named, loads, preemptions) = fleet(2000, policy);
        // The first 32 come in four steps.
        assert!(many <= few + few / 30, "{many} steps with many adapters, {few} with few");
        // What is read too early when nothing runs yet is read once more.
        assert!(loads <= named + named / 10, "{loads} loads of {named} adapters");
        assert_eq!(preemptions, 0);
    }
}
