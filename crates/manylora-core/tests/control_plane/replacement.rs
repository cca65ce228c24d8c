//! A new version in an old one's place.

use manylora_core::{CoreConfig, Effect, Event, FinishReason, LoraMemory, RegistrationId, UnloadMode};

use crate::driver::{BLOCK_BYTES, BLOCK_SIZE, Driver, Ending, config, digest, prompt};

fn replace(driver: &mut Driver, old: RegistrationId, new: RegistrationId) {
    driver.handle(Event::Replace { old, new, expected: None });
}

fn is_replaced(driver: &Driver, old: RegistrationId, new: RegistrationId) -> bool {
    driver.effects.contains(&Effect::Replaced { old, new })
}

#[test]
fn a_26_one_load_over_two_hundred_steps_after_a_replacement() {
    let mut driver = Driver::new(CoreConfig { max_model_len: 256, ..config(128) });
    let old = driver.register(2, 50);
    driver.submit(&prompt(1, 4), 4, &[old]);
    driver.finish();
    let new = driver.register(3, 50);
    replace(&mut driver, old, new);
    assert!(is_replaced(&driver, old, new));
    driver.handle(Event::Unload { registration: old, mode: UnloadMode::Drain });
    let start = driver.steps;
    let mut seed = 0;
    while driver.steps < start + 200 {
        seed += 1;
        driver.submit(&prompt(seed, 4), 20, &[new]);
        driver.step();
    }
    assert_eq!(driver.core.stats().loads, 2, "one read of each version");
    driver.finish();
}

#[test]
fn a_27_the_old_version_serves_until_the_swap_and_after_a_failed_one() {
    let mut driver = Driver::new(config(64));
    driver.instant_loads = false;
    let old = driver.register(2, 50);
    let first = driver.submit(&prompt(1, 4), 40, &[old]);
    driver.answer_load(0);
    driver.step();
    // Corrupt.
    let corrupt = driver.register(3, 50);
    driver.contents.insert(corrupt, None);
    replace(&mut driver, old, corrupt);
    let during = driver.submit(&prompt(2, 4), 4, &[old]);
    driver.step();
    assert!(driver.is_running(during));
    driver.answer_load(0);
    assert_eq!(driver.failure(corrupt), "file is gone");
    assert_eq!(driver.effects.last(), Some(&Effect::Unloaded(corrupt)));
    let after = driver.submit(&prompt(3, 4), 4, &[old]);
    driver.step();
    assert!(driver.is_running(after));
    // Slow: the load takes many steps; then the swap is one event.
    let slow = driver.register(4, 50);
    replace(&mut driver, old, slow);
    for seed in 10..40 {
        let request = driver.submit(&prompt(seed, 4), 2, &[old]);
        driver.step();
        assert!(driver.requests[&request].bound && !is_replaced(&driver, old, slow));
    }
    driver.answer_load(0);
    assert!(is_replaced(&driver, old, slow));
    // Whoever resolved the name before the swap is served by the old version still; the driver checks the tokens.
    let late = driver.submit(&prompt(50, 4), 4, &[old]);
    let new = driver.submit(&prompt(50, 4), 4, &[slow]);
    driver.handle(Event::Unload { registration: old, mode: UnloadMode::Drain });
    driver.finish();
    for request in [first, during, after, late, new] {
        assert!(matches!(driver.ending(request), Some(Ending::Finished(_))));
    }
    assert!(driver.effects.contains(&Effect::Unloaded(old)));
    assert_eq!(driver.core.stats().adapters.len(), 1);
}

#[test]
fn a_27_a_swap_waits_for_room_and_fails_with_the_numbers_if_there_can_never_be() {
    let mut driver = Driver::new(CoreConfig { lora_memory: LoraMemory::Bytes(100), ..config(64) });
    let (old, other) = (driver.register(2, 50), driver.register(3, 50));
    let running = driver.submit(&prompt(1, 4), 10, &[other]);
    let held = driver.submit(&prompt(2, 4), 60, &[old]);
    driver.step();
    let new = driver.register(4, 50);
    replace(&mut driver, old, new);
    assert!(!is_replaced(&driver, old, new) && driver.failure(new).is_empty(), "there is no room yet");
    while driver.ending(running).is_none() {
        driver.step();
    }
    driver.step();
    assert!(is_replaced(&driver, old, new), "the other adapter went for it");
    assert_eq!(driver.core.stats().adapter_bytes, 100);
    // Beside the version that requests hold there can be no more than 50 bytes.
    let large = driver.register(5, 60);
    let busy = driver.submit(&prompt(3, 4), 60, &[new]);
    driver.handle(Event::Abort(held));
    driver.handle(Event::Unload { registration: old, mode: UnloadMode::Drain });
    replace(&mut driver, new, large);
    assert!(driver.failure(large).contains("`110`") && driver.failure(large).contains("`100`"));
    assert_eq!(driver.core.registration(large), None);
    driver.handle(Event::Abort(busy));
    // Nobody holds it: it makes room.
    let large = driver.register(5, 60);
    replace(&mut driver, new, large);
    assert!(is_replaced(&driver, new, large));
    driver.finish();
}

#[test]
fn a_27_the_place_that_a_replacement_takes_over_is_nobody_elses() {
    let mut driver = Driver::new(CoreConfig { max_cpu_loras: Some(2), ..config(64) });
    let [old, other, late, last] = [2, 3, 4, 5].map(|content| driver.register(content, 50));
    for adapter in [other, old] {
        driver.submit(&prompt(1, 4), 2, &[adapter]);
        driver.finish();
    }
    // Both places are taken, by adapters that nobody uses. The new version is on its way when others want a place.
    driver.instant_loads = false;
    let new = driver.register(6, 50);
    replace(&mut driver, old, new);
    assert_eq!(driver.loads.len(), 1);
    for (seed, adapter) in [(2, late), (3, last)] {
        driver.submit(&prompt(seed, 4), 2, &[adapter]);
        driver.step();
        driver.core.check_invariants().unwrap();
    }
    assert!(driver.core.registration(old).unwrap().slot.is_some(), "it serves until the new one does");
    assert_eq!(driver.loads.len(), 2, "one of the others has the other place");
    driver.answer_load(0);
    assert!(is_replaced(&driver, old, new), "{}", driver.failure(new));
    driver.core.check_invariants().unwrap();
    driver.instant_loads = true;
    while !driver.loads.is_empty() {
        driver.answer_load(0);
    }
    driver.finish();
}

#[test]
fn a_27_an_overdue_swap_gets_its_room() {
    // Other adapters take all bytes for ever; once the swap has waited too long, they are kept out.
    let limits = CoreConfig { lora_memory: LoraMemory::Bytes(150), max_deferred_steps: 10, ..config(64) };
    let mut driver = Driver::new(limits);
    let (old, rivals) = (driver.register(2, 50), [3, 4].map(|content| driver.register(content, 50)));
    driver.handle(Event::Pin(old));
    let new = driver.register(5, 50);
    let mut swapped = None;
    for seed in 0..60 {
        for rival in rivals {
            driver.submit(&prompt(seed, 4), 3, &[rival]);
        }
        driver.step();
        if seed == 2 {
            replace(&mut driver, old, new);
        }
        if swapped.is_none() && is_replaced(&driver, old, new) {
            swapped = Some(seed);
        }
        driver.core.check_invariants().unwrap();
    }
    assert!((12..30).contains(&swapped.expect("the swap starved")), "{swapped:?}");
    driver.finish();
}

#[test]
fn a_34_a_pinned_adapter_is_refreshed_at_the_limit() {
    let mut driver = Driver::new(CoreConfig { max_loras: Some(2), max_cpu_loras: Some(2), ..config(64) });
    let [alpha, beta, gamma] = [2, 3, 4].map(|content| driver.register(content, 50));
    driver.handle(Event::Pin(alpha));
    driver.handle(Event::Pin(beta));
    assert!(driver.failure(beta).contains("max_loras is `2`"));
    driver.submit(&prompt(1, 4), 30, &[beta]);
    driver.submit(&prompt(2, 4), 30, &[alpha]);
    driver.step();
    // Both places are taken; the refresh takes over the old version's.
    let fresh = driver.register(5, 50);
    driver.handle(Event::Replace { old: alpha, new: fresh, expected: Some(digest(2)) });
    assert!(is_replaced(&driver, alpha, fresh));
    let pinned = |driver: &Driver, id| driver.core.registration(id).unwrap().pinned;
    assert!(pinned(&driver, fresh) && !pinned(&driver, alpha));
    driver.core.check_invariants().unwrap();
    assert_eq!(driver.core.stats().adapters.len(), 3, "the old version finishes beside them");
    driver.handle(Event::Unload { registration: alpha, mode: UnloadMode::Drain });
    for round in 0..4 {
        for adapter in [beta, gamma] {
            driver.submit(&prompt(10 + round, 4), 4, &[adapter]);
            driver.finish();
            assert!(driver.core.registration(fresh).unwrap().slot.is_some(), "a pinned adapter was evicted");
        }
    }
    assert!(driver.core.stats().adapters.len() <= 2);
    // What is pinned must leave room for the largest other one, also when it grows.
    let mut driver = Driver::new(CoreConfig { lora_memory: LoraMemory::Bytes(1000), ..config(64) });
    let (small, _large) = (driver.register(2, 100), driver.register(3, 800));
    driver.handle(Event::Pin(small));
    let grown = driver.register(4, 300);
    replace(&mut driver, small, grown);
    assert!(
        driver.failure(grown).contains("`300`") && driver.failure(grown).contains("`800`"),
        "{}",
        driver.failure(grown)
    );
    assert!(driver.core.registration(small).unwrap().pinned);
}

#[test]
fn a_38_a_preempted_request_resumes_on_its_version_across_a_replacement() {
    let tight = CoreConfig {
        max_model_len: 40,
        max_num_batched_tokens: 5,
        max_num_seqs: 3,
        ledger_bytes: 15 * BLOCK_BYTES,
        ..config(100)
    };
    let mut driver = Driver::new(tight);
    let old = driver.register(2, 60);
    let requests: Vec<_> = (1..6).map(|seed| driver.submit(&prompt(seed, 12), 28, &[old])).collect();
    while driver.core.stats().preemptions == 0 {
        driver.step();
    }
    let new = driver.register(3, 60);
    driver.handle(Event::Replace { old, new, expected: Some(digest(2)) });
    let after = driver.submit(&prompt(1, 12), 28, &[new]);
    // The file of the old version holds the new one's content now (the driver sees to that).
    driver.handle(Event::Unload { registration: old, mode: UnloadMode::Drain });
    driver.finish();
    assert!(driver.core.stats().preemptions > 1);
    for request in requests.iter().chain([&after]) {
        assert!(matches!(driver.ending(*request), Some(Ending::Finished(_))));
    }
    let outputs = [requests[0], after].map(|request| driver.requests[&request].output.clone());
    assert_ne!(outputs[0], outputs[1], "the two versions say different things");
}

#[test]
fn a_41_blocks_of_the_old_version_are_not_found_by_the_new_one() {
    let mut driver = Driver::new(config(64));
    let tokens = prompt(1, 4 * BLOCK_SIZE + 1);
    let cached = |driver: &mut Driver, id| {
        let request = driver.submit(&tokens, 3, &[id]);
        driver.finish();
        driver.requests[&request].cached_tokens
    };
    let old = driver.register(2, 50);
    assert_eq!(cached(&mut driver, old), 0);
    let new = driver.register(3, 50);
    replace(&mut driver, old, new);
    assert_eq!(cached(&mut driver, new), 0);
    assert_eq!(cached(&mut driver, old), 16);
    driver.handle(Event::Unload { registration: old, mode: UnloadMode::Drain });
    // Back to the first content: its blocks are found again, by content.
    let back = driver.register(2, 50);
    replace(&mut driver, new, back);
    assert_eq!(cached(&mut driver, back), 16);
}

#[test]
fn a_25_compare_and_set() {
    let mut driver = Driver::new(config(64));
    let old = driver.register(2, 50);
    let unread = driver.register(7, 50);
    // Nothing was read yet: no version can be expected.
    driver.handle(Event::Replace { old, new: unread, expected: Some(digest(2)) });
    assert!(driver.failure(unread).contains("`unread`"));
    driver.handle(Event::Prefetch(old));
    let stale = driver.register(3, 50);
    driver.handle(Event::Replace { old, new: stale, expected: Some(digest(9)) });
    let message = driver.failure(stale);
    assert!(message.contains(&digest(9).to_string()) && message.contains(&digest(2).to_string()), "{message}");
    assert_eq!(driver.core.registration(stale), None);
    assert!(!driver.core.registration(old).unwrap().superseded);
    // The same content: nothing is read, evicted or lost that was there.
    let same = driver.register(2, 50);
    let running = driver.submit(&prompt(1, 4), 20, &[old]);
    driver.step();
    driver.handle(Event::Replace { old, new: same, expected: Some(digest(2)) });
    assert!(is_replaced(&driver, old, same));
    driver.handle(Event::Unload { registration: old, mode: UnloadMode::Drain });
    driver.finish();
    assert!(matches!(driver.ending(running), Some(Ending::Finished(_))));
    assert!(!driver.effects.iter().any(|effect| matches!(effect, Effect::Evict { .. })));
    assert_eq!(driver.core.stats().adapters.len(), 1);
    // A registration that serves already cannot be put in another's place.
    let other = driver.register(4, 50);
    driver.handle(Event::Replace { old: other, new: same, expected: None });
    driver.handle(Event::Replace { old: same, new: same, expected: None });
    assert!(driver.failure(same).contains("register it anew"));
    assert!(driver.core.registration(same).is_some_and(|status| status.slot.is_some() && !status.superseded));
    let gone = driver.register(5, 50);
    driver.handle(Event::Replace { old, new: gone, expected: None });
    assert!(driver.failure(gone).contains("not registered") && driver.core.registration(gone).is_none());
}

#[test]
fn a_25_of_two_racing_replacements_the_later_one_wins_only_if_its_expectation_holds() {
    for expects in [true, false] {
        let mut driver = Driver::new(config(64));
        let old = driver.register(2, 50);
        driver.handle(Event::Prefetch(old));
        driver.instant_loads = false;
        let [first, second] = [3, 4].map(|content| driver.register(content, 50));
        let expected = expects.then(|| digest(2));
        driver.handle(Event::Replace { old, new: first, expected });
        driver.handle(Event::Replace { old, new: second, expected });
        // The second is read sooner; the order of the events counts all the same.
        driver.answer_load(1);
        assert!(!driver.effects.iter().any(|effect| matches!(effect, Effect::Replaced { .. })));
        driver.answer_load(0);
        assert!(is_replaced(&driver, old, first));
        assert_eq!(is_replaced(&driver, first, second), !expects);
        assert_eq!(driver.core.registration(second).is_none(), expects);
        driver.core.check_invariants().unwrap();
    }
    // If the first fails, the second finds what it expects.
    let mut driver = Driver::new(config(64));
    let old = driver.register(2, 50);
    driver.handle(Event::Prefetch(old));
    driver.instant_loads = false;
    let [first, second] = [3, 4].map(|content| driver.register(content, 50));
    driver.contents.insert(first, None);
    driver.handle(Event::Replace { old, new: first, expected: Some(digest(2)) });
    driver.handle(Event::Replace { old, new: second, expected: Some(digest(2)) });
    driver.answer_load(1);
    driver.answer_load(0);
    assert!(is_replaced(&driver, old, second) && driver.core.registration(first).is_none());
}

#[test]
fn a_51_unloading_while_a_replacement_is_under_way() {
    for unload_old in [true, false] {
        let mut driver = Driver::new(config(64));
        let old = driver.register(2, 50);
        driver.handle(Event::Prefetch(old));
        driver.instant_loads = false;
        let new = driver.register(3, 50);
        replace(&mut driver, old, new);
        let mode = UnloadMode::Abort;
        driver.handle(Event::Unload { registration: if unload_old { old } else { new }, mode });
        assert!(driver.failure(new).contains("unloaded"), "{}", driver.failure(new));
        driver.answer_load(0);
        assert_eq!(driver.core.registration(new), None);
        assert_eq!(driver.core.registration(old).is_none(), unload_old);
        assert_eq!(driver.core.stats().loading_bytes, 0);
        driver.core.check_invariants().unwrap();
    }
}

#[test]
fn a_replaced_version_stays_until_it_is_unloaded_and_counts_in_bytes_only() {
    let mut driver =
        Driver::new(CoreConfig { max_cpu_loras: Some(1), lora_memory: LoraMemory::Bytes(200), ..config(64) });
    let (old, new, other) = (driver.register(2, 50), driver.register(3, 50), driver.register(4, 50));
    driver.handle(Event::Prefetch(old));
    replace(&mut driver, old, new);
    assert_eq!((driver.core.stats().adapters.len(), driver.core.stats().adapter_bytes), (2, 100));
    // Other adapters come and go in the one place.
    for seed in 0..6 {
        driver.submit(&prompt(seed, 4), 4, &[[new, other][seed as usize % 2]]);
        driver.finish();
        assert!(driver.core.registration(old).unwrap().slot.is_some());
        assert_eq!(driver.core.stats().adapters.len(), 2);
    }
    // It takes no pins and no prefetches, but still requests.
    driver.handle(Event::Pin(old));
    assert!(driver.failure(old).contains("was replaced"));
    let late = driver.submit(&prompt(9, 4), 4, &[old]);
    driver.finish();
    assert!(matches!(driver.ending(late), Some(Ending::Finished(FinishReason::Length | FinishReason::Stop))));
    driver.handle(Event::Unload { registration: old, mode: UnloadMode::Drain });
    assert_eq!(driver.core.stats().adapters.len(), 1);
}
