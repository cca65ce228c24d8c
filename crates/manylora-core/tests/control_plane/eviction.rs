//! Who goes first.

use manylora_core::eviction::{CostAware, EvictionPolicy, LeastRecentlyUsed, Usage};
use manylora_core::{CoreConfig, Event, EvictionPolicyKind, LoraMemory, RegistrationId};

use crate::driver::{Driver, config, prompt};

fn usage(now: u64, frequency: f64, relative_cost: f64) -> Usage {
    Usage { bytes: 100, now, frequency, relative_cost }
}

#[test]
fn ranks_by_hand() {
    assert!(LeastRecentlyUsed.rank(&usage(3, 9.0, 1.0)) < LeastRecentlyUsed.rank(&usage(4, 1.0, 1.0)));
    let mut policy = CostAware::default();
    assert_eq!(policy.rank(&usage(1, 3.0, 1.0)), 3.0);
    assert_eq!(policy.rank(&usage(2, 3.0, 2.5)), 7.5);
    policy.evicted(3.0);
    policy.evicted(2.0);
    // What comes later is ranked above what was evicted.
    assert_eq!(policy.rank(&usage(3, 1.0, 1.0)), 4.0);
}

fn serve(driver: &mut Driver, adapter: RegistrationId, times: u32) {
    for seed in 0..times {
        driver.submit(&prompt(seed, 4), 2, &[adapter]);
        driver.finish();
    }
}

fn is_resident(driver: &Driver, adapter: RegistrationId) -> bool {
    driver.core.registration(adapter).unwrap().slot.is_some()
}

#[test]
fn frequent_adapters_outlast_a_scan_under_the_cost_aware_policy_only() {
    for (eviction, stays) in [(EvictionPolicyKind::Lru, false), (EvictionPolicyKind::CostAware, true)] {
        let mut driver = Driver::new(CoreConfig { eviction, lora_memory: LoraMemory::Bytes(300), ..config(64) });
        let hot = driver.register(2, 100);
        serve(&mut driver, hot, 30);
        // Ten others pass by once each.
        for content in 3..13 {
            let cold = driver.register(content, 100);
            serve(&mut driver, cold, 1);
        }
        assert_eq!(is_resident(&driver, hot), stays, "{eviction:?}");
        // Once it is not asked for any more it goes, too.
        for content in 13..120 {
            let cold = driver.register(content, 100);
            serve(&mut driver, cold, 1);
        }
        assert!(!is_resident(&driver, hot), "{eviction:?}: popularity of old stays for ever");
    }
}

#[test]
fn what_is_slow_to_read_again_stays_longer() {
    let limits =
        CoreConfig { eviction: EvictionPolicyKind::CostAware, lora_memory: LoraMemory::Bytes(300), ..config(64) };
    let mut driver = Driver::new(limits);
    driver.load_seconds = |content| Some(if content == 2 { 5.0 } else { 0.1 });
    let [slow, fast, other, another] = [2, 3, 4, 5].map(|content| driver.register(content, 100));
    for adapter in [slow, fast, other] {
        serve(&mut driver, adapter, 1);
    }
    serve(&mut driver, another, 1);
    assert!(is_resident(&driver, slow) && !is_resident(&driver, fast));
}

#[test]
fn what_waits_goes_last_and_of_it_what_is_needed_last() {
    // Three places, all held by waiting requests while a long one keeps the only seat.
    let limits = CoreConfig { max_num_seqs: 1, lora_memory: LoraMemory::Bytes(300), ..config(64) };
    let mut driver = Driver::new(limits);
    let [first, second, third, newcomer] = [2, 3, 4, 5].map(|content| driver.register(content, 100));
    for adapter in [first, second, third] {
        serve(&mut driver, adapter, 1);
    }
    let running = driver.submit(&prompt(9, 4), 60, &[]);
    driver.step();
    driver.submit(&prompt(1, 4), 2, &[first]);
    driver.submit(&prompt(2, 4), 2, &[newcomer]);
    driver.submit(&prompt(3, 4), 2, &[second]);
    driver.submit(&prompt(4, 4), 2, &[third]);
    driver.step();
    assert!(is_resident(&driver, first) && is_resident(&driver, second), "needed sooner than the third");
    assert!(!is_resident(&driver, third) && is_resident(&driver, newcomer));
    driver.handle(Event::Abort(running));
    driver.finish();
}
