//! Which KV blocks may stand for which: only equal content, adapters included.

use manylora_core::{AdapterUse, CoreConfig, Event, NewRequest, RegistrationId, RequestId, UnloadMode};

use crate::driver::{BLOCK_SIZE, Driver, config, prompt, whole};

fn cached(driver: &mut Driver, adapters: Vec<AdapterUse>, salt: Option<&str>, prompt: &[u32]) -> u32 {
    let request = driver.submit_request(NewRequest {
        id: RequestId(0),
        prompt: prompt.into(),
        max_tokens: 3,
        priority: 0,
        cache_salt: salt.map(str::to_owned),
        tenant: None,
        adapters,
        read_prefix_cache: true,
        all_prompt_logits: false,
    });
    driver.finish();
    driver.requests[&request].cached_tokens
}

/// Four full blocks and a token: all four can be found.
fn four_blocks() -> Vec<u32> {
    prompt(1, 4 * BLOCK_SIZE + 1)
}

#[test]
fn a_40_blocks_are_found_only_by_the_same_adapter() {
    let mut driver = Driver::new(config(64));
    let (alpha, beta) = (driver.register(2, 50), driver.register(3, 50));
    let tokens = four_blocks();
    assert_eq!(cached(&mut driver, vec![whole(alpha)], None, &tokens), 0);
    assert_eq!(cached(&mut driver, vec![whole(beta)], None, &tokens), 0);
    assert_eq!(cached(&mut driver, vec![], None, &tokens), 0);
    assert_eq!(cached(&mut driver, vec![whole(alpha)], None, &tokens), 16);
    assert_eq!(cached(&mut driver, vec![], None, &tokens), 16);
    assert_eq!(cached(&mut driver, vec![], Some("tenant"), &tokens), 0);
    assert_eq!(cached(&mut driver, vec![], Some("tenant"), &tokens), 16);
    let stats = driver.core.stats();
    assert_eq!((stats.prefix_cache_hits, stats.prefix_cache_queries), (48, 7 * 17));
    // A prompt that is found whole still has one token to compute.
    assert_eq!(cached(&mut driver, vec![], None, &tokens[..16]), 12);
}

#[test]
fn a_40_strength_order_and_start_are_part_of_the_content() {
    let mut driver = Driver::new(config(64));
    let (alpha, beta) = (driver.register(2, 50), driver.register(3, 50));
    let tokens = four_blocks();
    let strength = |registration, scale| AdapterUse { registration, scale, first_active: 0 };
    let late = |registration, first_active| AdapterUse { registration, scale: 1.0, first_active };
    assert_eq!(cached(&mut driver, vec![strength(alpha, 0.5)], None, &tokens), 0);
    assert_eq!(cached(&mut driver, vec![strength(alpha, 1.0)], None, &tokens), 0);
    assert_eq!(cached(&mut driver, vec![strength(alpha, 0.5)], None, &tokens), 16);
    assert_eq!(cached(&mut driver, vec![whole(alpha), whole(beta)], None, &tokens), 0);
    assert_eq!(cached(&mut driver, vec![whole(beta), whole(alpha)], None, &tokens), 0);
    // Strength 0 is the base, and an adapter that starts in the third block shares two blocks with it.
    assert_eq!(cached(&mut driver, vec![strength(alpha, 0.0)], None, &tokens), 0);
    assert_eq!(cached(&mut driver, vec![], None, &tokens), 16);
    assert_eq!(cached(&mut driver, vec![late(alpha, 9)], None, &tokens), 8);
    assert_eq!(cached(&mut driver, vec![late(alpha, 9)], None, &tokens), 16);
    assert_eq!(cached(&mut driver, vec![late(alpha, 10)], None, &tokens), 8);
}

#[test]
fn a_41_a_name_with_new_content_never_finds_the_old_blocks() {
    let mut driver = Driver::new(config(64));
    let tokens = four_blocks();
    let old = driver.register(2, 50);
    assert_eq!(cached(&mut driver, vec![whole(old)], None, &tokens), 0);
    driver.handle(Event::Unload { registration: old, mode: UnloadMode::Drain });
    let new = driver.register(3, 50);
    assert_eq!((new.index, new.generation), (old.index, old.generation + 1));
    assert_eq!(cached(&mut driver, vec![whole(new)], None, &tokens), 0);
    // The same content under another id does.
    let again = driver.register(2, 50);
    assert_eq!(cached(&mut driver, vec![whole(again)], None, &tokens), 16);
}

#[test]
fn a_42_load_order_does_not_matter_and_a_second_request_hits() {
    let tokens = four_blocks();
    let hits = [[2, 3], [3, 2]].map(|order| {
        let mut driver = Driver::new(config(64));
        let mut ids: Vec<(u32, RegistrationId)> =
            order.iter().map(|&content| (content, driver.register(content, 50))).collect();
        for &(_, id) in &ids {
            driver.handle(Event::Prefetch(id));
        }
        ids.sort_unstable();
        ids.iter()
            .flat_map(|&(_, id)| [id, id])
            .map(|id| cached(&mut driver, vec![whole(id)], None, &tokens))
            .collect::<Vec<_>>()
    });
    assert_eq!(hits[0], [0, 16, 0, 16]);
    assert_eq!(hits[0], hits[1]);
}

#[test]
fn blocks_are_shared_while_they_are_in_use() {
    let mut driver = Driver::new(config(64));
    let tokens = four_blocks();
    driver.submit(&tokens, 30, &[]);
    driver.step();
    let free = driver.core.stats().free_blocks;
    driver.submit(&tokens, 30, &[]);
    driver.step();
    // One block for what the second does not share.
    assert_eq!(driver.core.stats().free_blocks, free - 1);
    assert!(!driver.core.reset_prefix_cache());
    driver.finish();
    assert!(driver.core.reset_prefix_cache());
    assert_eq!(cached(&mut driver, vec![], None, &tokens), 0);
}

#[test]
fn prompt_logits_and_the_switch_turn_reading_off() {
    let tokens = four_blocks();
    let mut driver = Driver::new(config(64));
    cached(&mut driver, vec![], None, &tokens);
    let request = driver.submit_request(NewRequest {
        id: RequestId(0),
        prompt: tokens.as_slice().into(),
        max_tokens: 3,
        priority: 0,
        cache_salt: None,
        tenant: None,
        adapters: vec![],
        read_prefix_cache: true,
        all_prompt_logits: true,
    });
    driver.step();
    assert!(driver.plan.sequences[0].all_logits && driver.plan.sequences[0].rows == 17);
    driver.step();
    assert!(!driver.plan.sequences[0].all_logits);
    driver.finish();
    assert_eq!(driver.requests[&request].cached_tokens, 0);
    let mut driver = Driver::new(CoreConfig { enable_prefix_caching: false, ..config(64) });
    assert_eq!([(); 2].map(|()| cached(&mut driver, vec![], None, &tokens)), [0, 0]);
    assert_eq!(driver.core.stats().prefix_cache_queries, 0);
}
