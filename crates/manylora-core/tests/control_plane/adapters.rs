//! The life of adapters: loads, failures, eviction, pins, unloading, bytes.

use manylora_core::{
    CoreConfig, CoreStats, Effect, Event, FailureReason, FinishReason, LoraMemory, RequestId, UnloadMode,
};

use crate::driver::{BLOCK_BYTES, Driver, Ending, config, digest, prompt};

fn load_failure(driver: &Driver, request: RequestId) -> String {
    match driver.ending(request) {
        Some(Ending::Failed(FailureReason::AdapterLoad(failure))) => failure.message.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_23_a_broken_adapter_fails_only_its_own_requests() {
    let mut driver = Driver::new(CoreConfig { max_cpu_loras: Some(2), ..config(64) });
    let (alpha, broken) = (driver.register(2, 50), driver.register(3, 50));
    driver.contents.insert(broken, None);
    let streams: Vec<_> = (1..7).map(|seed| driver.submit(&prompt(seed, 5), 12, &[alpha])).collect();
    driver.step();
    let victims = [1, 2].map(|seed| driver.submit(&prompt(seed, 5), 12, &[broken]));
    driver.step();
    assert!(victims.iter().all(|&request| load_failure(&driver, request) == "file is gone"));
    // The failure is not remembered: the file comes back.
    driver.contents.insert(broken, Some((3, 50)));
    let late = driver.submit(&prompt(8, 5), 12, &[broken]);
    driver.finish();
    for request in streams.into_iter().chain([late]) {
        assert!(matches!(driver.ending(request), Some(Ending::Finished(_))));
    }
    // Evicted, then deleted: whoever asks fails, by name, and nobody else.
    let [gamma, delta] = [4, 5].map(|content| driver.register(content, 50));
    for id in [gamma, delta] {
        driver.submit(&prompt(9, 5), 2, &[id]);
        driver.finish();
    }
    assert_eq!(driver.core.registration(broken).unwrap().slot, None);
    driver.contents.insert(broken, None);
    let orphan = driver.submit(&prompt(8, 5), 12, &[broken]);
    let other = driver.submit(&prompt(8, 5), 12, &[delta]);
    driver.finish();
    assert_eq!(load_failure(&driver, orphan), "file is gone");
    assert!(matches!(driver.ending(other), Some(Ending::Finished(_))));
}

#[test]
fn a_reread_with_other_content_fails_those_who_wait() {
    let mut driver = Driver::new(CoreConfig { max_cpu_loras: Some(1), ..config(64) });
    let (alpha, beta) = (driver.register(2, 50), driver.register(3, 50));
    for adapter in [alpha, beta] {
        driver.submit(&prompt(1, 5), 2, &[adapter]);
        driver.finish();
    }
    driver.contents.insert(alpha, Some((9, 50)));
    let request = driver.submit(&prompt(1, 5), 2, &[alpha]);
    driver.finish();
    let message = load_failure(&driver, request);
    assert!(message.contains(&digest(2).to_string()) && message.contains(&digest(9).to_string()), "{message}");
    assert_eq!(driver.core.stats().loading_bytes, 0);
}

#[test]
fn a_24_a_hundred_first_uses_cause_one_load() {
    let mut driver = Driver::new(config(64));
    driver.instant_loads = false;
    let adapter = driver.register(2, 50);
    driver.handle(Event::Prefetch(adapter));
    let requests: Vec<_> = (0..100).map(|seed| driver.submit(&prompt(seed, 3), 2, &[adapter])).collect();
    assert!(!driver.plan());
    assert_eq!((driver.loads.len(), driver.core.stats().loads), (1, 1));
    assert!(requests.iter().all(|request| !driver.requests[request].bound));
    driver.answer_load(0);
    assert!(requests.iter().all(|request| driver.requests[request].bound));
    assert!(driver.effects.contains(&Effect::Resident(adapter)));
    driver.finish();
    assert_eq!(driver.core.stats().loads, 1);
}

#[test]
fn equal_content_is_resident_once() {
    let mut driver = Driver::new(config(64));
    let ids = [(); 3].map(|()| driver.register(2, 50));
    for id in ids {
        driver.handle(Event::Prefetch(id));
    }
    let stats = driver.core.stats();
    assert_eq!((stats.adapters.len(), stats.adapter_bytes, stats.loads), (1, 50, 3));
    driver.handle(Event::Unload { registration: ids[0], mode: UnloadMode::Drain });
    driver.handle(Event::Unload { registration: ids[1], mode: UnloadMode::Drain });
    assert_eq!(driver.core.stats().adapters.len(), 1);
    driver.submit(&prompt(1, 5), 2, &[ids[2]]);
    driver.finish();
    driver.handle(Event::Unload { registration: ids[2], mode: UnloadMode::Drain });
    assert_eq!(driver.core.stats().adapter_bytes, 0);
}

#[test]
fn a_29_a_slot_is_reused_by_other_content_without_confusion() {
    let mut driver = Driver::new(CoreConfig { max_loras: Some(1), max_cpu_loras: Some(1), ..config(64) });
    let adapters: Vec<_> = (2..6).map(|content| driver.register(content, 10 * u64::from(content))).collect();
    for swap in 0..200u32 {
        let adapter = adapters[(swap * 7 % 4) as usize];
        // The driver checks every answer against the adapter's own content.
        driver.submit(&prompt(swap % 5, 7), 5, &[adapter]);
        driver.submit(&prompt(swap % 5, 7), 5, &[]);
        driver.finish();
        let stats = driver.core.stats();
        assert_eq!(stats.adapters.len(), 1);
        assert_eq!(stats.adapters[0].slot.0, 0);
    }
    assert!(driver.core.stats().evictions >= 150);
}

#[test]
fn a_30_more_adapters_than_places_all_answer() {
    let mut driver = Driver::new(CoreConfig { max_loras: Some(1), max_cpu_loras: Some(2), ..config(64) });
    let adapters: Vec<_> = (2..8).map(|content| driver.register(content, 50)).collect();
    let requests: Vec<_> =
        (0..30).map(|turn| driver.submit(&prompt(turn, 6), 6, &[adapters[turn as usize % 6]])).collect();
    driver.finish();
    assert!(requests.iter().all(|&request| matches!(driver.ending(request), Some(Ending::Finished(_)))));
    let stats = driver.core.stats();
    assert_eq!(stats.adapters.len(), 2);
    assert_eq!(stats.loads, stats.evictions + 2);
    assert!(stats.loads >= 6);
}

#[test]
fn slow_loads_hold_nobody_else_up() {
    let mut driver = Driver::new(config(64));
    driver.instant_loads = false;
    let adapter = driver.register(2, 50);
    let cold = driver.submit(&prompt(1, 4), 4, &[adapter]);
    let base = driver.submit(&prompt(2, 4), 4, &[]);
    driver.step();
    assert!(driver.is_running(base) && !driver.is_running(cold));
    while driver.ending(base).is_none() {
        driver.step();
    }
    assert!(driver.core.has_work());
    // The client goes while the load runs; the load still ends well.
    driver.handle(Event::Abort(cold));
    driver.answer_load(0);
    driver.finish();
    assert_eq!(driver.core.stats().adapters[0].leases, 0);
}

#[test]
fn a_34_the_last_place_cannot_be_pinned_and_pins_stay() {
    let mut driver = Driver::new(CoreConfig { max_loras: Some(2), max_cpu_loras: Some(2), ..config(64) });
    let [alpha, beta, gamma] = [2, 3, 4].map(|content| driver.register(content, 50));
    driver.handle(Event::Pin(alpha));
    assert!(driver.effects.contains(&Effect::Resident(alpha)));
    driver.handle(Event::Pin(beta));
    assert!(driver.failure(beta).contains("max_loras is `2`"), "{}", driver.failure(beta));
    for round in 0..4 {
        for adapter in [beta, gamma] {
            driver.submit(&prompt(round, 4), 4, &[adapter]);
            driver.finish();
            assert!(driver.core.registration(alpha).unwrap().slot.is_some());
        }
    }
    driver.handle(Event::Unpin(alpha));
    driver.handle(Event::Pin(beta));
    assert!(driver.core.registration(beta).unwrap().pinned);
}

#[test]
fn pins_leave_room_for_the_largest_adapter() {
    let mut driver = Driver::new(CoreConfig { lora_memory: LoraMemory::Bytes(1000), ..config(64) });
    let [large, medium, small] = [(2, 600), (3, 500), (4, 300)].map(|(content, bytes)| driver.register(content, bytes));
    driver.handle(Event::Pin(medium));
    let message = driver.failure(medium);
    assert!(message.contains("`500`") && message.contains("`600`") && message.contains("`1000`"), "{message}");
    driver.handle(Event::Pin(small));
    assert!(driver.core.registration(small).unwrap().pinned);
    driver.submit(&prompt(1, 4), 2, &[large]);
    driver.finish();
    assert_eq!(driver.core.stats().adapter_bytes, 900);
}

#[test]
fn an_adapter_that_cannot_fit_is_refused_with_the_numbers() {
    let mut driver = Driver::new(CoreConfig { lora_memory: LoraMemory::Bytes(1000), ..config(64) });
    let adapter = driver.register(2, 1001);
    driver.handle(Event::Prefetch(adapter));
    assert!(driver.failure(adapter).contains("`1001`") && driver.failure(adapter).contains("`1000`"));
    let request = driver.submit(&prompt(1, 4), 2, &[adapter]);
    assert!(load_failure(&driver, request).contains("`1001`"));
    // The header said less than there is.
    let [liar, held] = [driver.register(3, 10), driver.register(4, 900)];
    driver.contents.insert(liar, Some((3, 200)));
    driver.submit(&prompt(2, 4), 20, &[held]);
    driver.step();
    let request = driver.submit(&prompt(1, 4), 2, &[liar]);
    driver.step();
    assert!(load_failure(&driver, request).contains("`200`") && load_failure(&driver, request).contains("`10`"));
    driver.finish();
}

#[test]
fn a_50_bytes_and_slots_return_after_unloading() {
    let mut driver = Driver::new(config(64));
    let start = driver.core.stats();
    for round in 0..500u32 {
        let adapter = driver.register(round % 250, 37 + u64::from(round));
        assert_eq!(adapter.index, 0, "the table of registrations does not grow");
        driver.submit(&prompt(round, 4), 3, &[adapter]);
        driver.finish();
        assert_eq!(driver.core.stats().adapter_bytes, 37 + u64::from(round));
        driver.handle(Event::Unload { registration: adapter, mode: UnloadMode::Drain });
        assert_eq!(driver.effects.last(), Some(&Effect::Unloaded(adapter)));
        driver.core.check_invariants().unwrap();
    }
    let end = CoreStats { loads: 0, prefix_cache_queries: 0, prefix_cache_hits: 0, ..driver.core.stats() };
    assert_eq!(end, start);
}

#[test]
fn a_51_unloading_under_traffic() {
    for (mode, endings) in [(UnloadMode::Drain, "finish"), (UnloadMode::Abort, "abort")] {
        let mut driver = Driver::new(CoreConfig { max_num_seqs: 3, ..config(64) });
        let (alpha, beta) = (driver.register(2, 50), driver.register(3, 70));
        let requests: Vec<_> = (1..6).map(|seed| driver.submit(&prompt(seed, 4), 9, &[alpha])).collect();
        driver.step();
        driver.plan();
        driver.handle(Event::Unload { registration: alpha, mode });
        let refused = driver.submit(&prompt(9, 4), 9, &[alpha]);
        assert_eq!(driver.ending(refused), Some(&Ending::Failed(FailureReason::AdapterUnloaded)));
        let unloaded = Effect::Unloaded(alpha);
        assert!(!driver.effects.contains(&unloaded), "a step in flight still uses it");
        driver.submit(&prompt(7, 4), 9, &[beta]);
        driver.finish();
        let aborted = |request: &RequestId| driver.ending(*request) == Some(&Ending::Finished(FinishReason::Abort));
        assert!(requests.iter().all(|request| aborted(request) == (endings == "abort")));
        assert!(driver.effects.contains(&unloaded));
        assert_eq!(driver.core.registration(alpha), None);
        assert_eq!(driver.core.stats().adapter_bytes, 70);
    }
}

#[test]
fn a_51_draining_can_turn_into_aborting_and_a_load_is_waited_for() {
    let mut driver = Driver::new(config(64));
    let adapter = driver.register(2, 50);
    let request = driver.submit(&prompt(1, 4), 60, &[adapter]);
    driver.step();
    driver.handle(Event::Unload { registration: adapter, mode: UnloadMode::Drain });
    assert!(driver.core.registration(adapter).unwrap().unloading && !driver.core.is_idle_for(adapter));
    driver.handle(Event::Unload { registration: adapter, mode: UnloadMode::Abort });
    assert_eq!(driver.ending(request), Some(&Ending::Finished(FinishReason::Abort)));
    assert_eq!(driver.core.registration(adapter), None);
    driver.instant_loads = false;
    let slow = driver.register(3, 50);
    driver.handle(Event::Prefetch(slow));
    driver.handle(Event::Unload { registration: slow, mode: UnloadMode::Drain });
    assert!(driver.failure(slow).contains("unloaded before it was resident"));
    assert_eq!(driver.core.stats().loading_bytes, 50);
    driver.answer_load(0);
    assert_eq!(driver.effects.last(), Some(&Effect::Unloaded(slow)));
    assert_eq!((driver.core.stats().loading_bytes, driver.core.stats().adapter_bytes), (0, 0));
}

#[test]
fn a_52_adapters_do_not_touch_each_other() {
    let mut driver = Driver::new(config(64));
    let [alpha, beta] = [2, 3].map(|content| driver.register(content, 50));
    for id in [alpha, beta] {
        driver.handle(Event::Prefetch(id));
    }
    driver.handle(Event::Unload { registration: alpha, mode: UnloadMode::Drain });
    let base = driver.submit(&prompt(1, 4), 5, &[]);
    let other = driver.submit(&prompt(1, 4), 5, &[beta]);
    let gamma = driver.register(4, 50);
    let new = driver.submit(&prompt(1, 4), 5, &[gamma]);
    driver.finish();
    for request in [base, other, new] {
        assert!(matches!(driver.ending(request), Some(Ending::Finished(_))));
    }
}

#[test]
fn a_54_kv_blocks_fall_by_the_bytes_of_resident_adapters_and_nothing_else() {
    for max_loras in [1, 8, 64] {
        let mut driver = Driver::new(CoreConfig { max_loras: Some(max_loras), ..config(200) });
        assert_eq!(driver.core.stats().total_blocks, 200);
        let mut bytes = 0;
        // One of rank 64 among 63 of rank 8: each takes its own size.
        for content in 0..64u32 {
            let size = if content == 17 { 8 * 61 } else { 61 };
            let adapter = driver.register(content + 2, size);
            assert_eq!(driver.core.stats().adapter_bytes, bytes);
            driver.handle(Event::Prefetch(adapter));
            bytes += size;
            let stats = driver.core.stats();
            assert_eq!(stats.adapter_bytes, bytes);
            assert_eq!(stats.total_blocks as u64, (200 * BLOCK_BYTES - bytes) / BLOCK_BYTES);
            assert_eq!(stats.total_blocks + driver.core.retired_blocks().len(), 200);
        }
        driver.core.check_invariants().unwrap();
    }
}

#[test]
fn kv_blocks_and_adapters_give_way_to_each_other() {
    // 16 blocks; a sequence can take 8 of them; two adapters of 4 blocks each.
    let limits = CoreConfig { max_model_len: 32, ..config(16) };
    let mut driver = Driver::new(limits);
    let adapters = [2, 3].map(|content| driver.register(content, 4 * BLOCK_BYTES));
    for id in adapters {
        driver.handle(Event::Prefetch(id));
    }
    assert_eq!(driver.core.stats().total_blocks, 8);
    // Base traffic for twice as many blocks: nobody holds the adapters, so they go.
    let requests = [1, 2].map(|seed| driver.submit(&prompt(seed, 28), 4, &[]));
    driver.step();
    assert!(requests.iter().all(|&request| driver.is_running(request)));
    assert!(driver.core.stats().adapters.is_empty() || driver.core.stats().adapters.len() == 1);
    // A load waits until blocks are free; base traffic goes on meanwhile.
    let late = driver.submit(&prompt(3, 4), 4, &adapters);
    driver.step();
    assert!(!driver.is_running(late));
    driver.finish();
    assert!(matches!(driver.ending(late), Some(Ending::Finished(_))));
    assert_eq!(driver.core.stats().total_blocks, 8);
}
