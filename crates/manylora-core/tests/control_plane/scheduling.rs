//! Batching, the cap on adapters, fairness, preemption, plan-ahead.

use manylora_core::plan::PLACEHOLDER;
use manylora_core::{
    CoreConfig, CoreError, Event, FailureReason, FinishReason, NewRequest, RequestId, SchedulingPolicy, UnloadMode,
    Users,
};

use crate::driver::{BLOCK_BYTES, Driver, Ending, config, prompt, request};

const POLICIES: [SchedulingPolicy; 3] = [SchedulingPolicy::Fair, SchedulingPolicy::Fcfs, SchedulingPolicy::Priority];

#[test]
fn settings_that_cannot_work_are_refused() {
    let refused = |change: fn(&mut CoreConfig)| {
        let mut config = config(16);
        change(&mut config);
        manylora_core::ControlPlane::new(config).unwrap_err()
    };
    let message = refused(|config| (config.max_loras, config.max_cpu_loras) = (Some(3), Some(2))).to_string();
    assert_eq!(message, "max_cpu_loras (2) must be >= max_loras (3).");
    let error = refused(|config| config.max_model_len = 65);
    let (needed_bytes, ledger_bytes) = (17 * BLOCK_BYTES, 16 * BLOCK_BYTES);
    assert_eq!(error, CoreError::LedgerTooSmall { max_model_len: 65, needed_bytes, ledger_bytes, fits: 64 });
    assert!(error.to_string().contains("`65`") && error.to_string().contains("`1700`"));
    let message = refused(|config| {
        config.enable_chunked_prefill = false;
        config.max_num_batched_tokens = 32;
    });
    assert!(message.to_string().contains("max_num_batched_tokens (32)"));
    let zeros: [fn(&mut CoreConfig); 4] = [
        |config| config.max_loras = Some(0),
        |config| config.block_size = 0,
        |config| config.block_bytes = 0,
        |config| config.max_num_seqs = 65,
    ];
    for change in zeros {
        refused(change);
    }
}

#[test]
fn decodes_come_before_prompts_and_prompts_are_split() {
    let mut driver = Driver::new(CoreConfig { max_num_batched_tokens: 10, ..config(64) });
    let first = driver.submit(&prompt(1, 3), 30, &[]);
    driver.step();
    let second = driver.submit(&prompt(2, 25), 4, &[]);
    let rows = |driver: &Driver| -> Vec<(RequestId, u32, u32, bool)> {
        let sequences = driver.plan.sequences.iter();
        sequences.map(|one| (one.request, one.first_position, one.rows, one.samples)).collect()
    };
    driver.step();
    assert_eq!(rows(&driver), [(first, 3, 1, true), (second, 0, 9, false)]);
    driver.step();
    assert_eq!(rows(&driver), [(first, 4, 1, true), (second, 9, 9, false)]);
    driver.step();
    assert_eq!(rows(&driver), [(first, 5, 1, true), (second, 18, 7, true)]);
    driver.finish();
}

#[test]
fn without_chunked_prefill_a_prompt_is_scheduled_whole() {
    let chunks = CoreConfig { enable_chunked_prefill: false, max_num_batched_tokens: 64, ..config(64) };
    let mut driver = Driver::new(chunks);
    let first = driver.submit(&prompt(1, 40), 8, &[]);
    let second = driver.submit(&prompt(2, 40), 8, &[]);
    driver.step();
    assert!(driver.is_running(first) && !driver.is_running(second));
    driver.step();
    assert!(driver.is_running(second));
    driver.finish();
    for plan in &driver.plans {
        assert!(plan.sequences.iter().all(|sequence| sequence.rows == 1 || sequence.rows == 40));
    }
}

#[test]
fn a_31_base_needs_no_place_and_the_cap_holds_under_retraction_and_cancelling() {
    POLICIES.into_iter().for_each(base_needs_no_place);
}

fn base_needs_no_place(policy: SchedulingPolicy) {
    let mut driver = Driver::new(CoreConfig { max_loras: Some(2), max_num_seqs: 6, policy, ..config(20) });
    let adapters: Vec<_> = (2..4).map(|content| driver.register(content, 50)).collect();
    let base = driver.submit(&prompt(1, 4), 4, &[]);
    let alpha = driver.submit(&prompt(2, 4), 4, &adapters[..1]);
    let beta = driver.submit(&prompt(3, 4), 4, &adapters[1..]);
    driver.step();
    assert!([base, alpha, beta].iter().all(|&request| driver.is_running(request)));
    let gamma = driver.register(4, 50);
    for round in 0..300u32 {
        let adapter = [None, Some(adapters[0]), Some(adapters[1]), Some(gamma)][round as usize % 4];
        let adapters: Vec<_> = adapter.into_iter().collect();
        let request = driver.submit(&prompt(10 + round, 8), 30, &adapters);
        driver.step();
        if round % 10 < 3 {
            driver.handle(Event::Abort(RequestId(request.0.saturating_sub(2))));
        }
        driver.core.check_invariants().unwrap();
    }
    assert!(driver.core.stats().preemptions > 0);
    driver.finish();
}

#[test]
fn a_32_a_request_over_the_cap_holds_nobody_up() {
    POLICIES.into_iter().for_each(over_the_cap);
}

fn over_the_cap(policy: SchedulingPolicy) {
    let mut driver = Driver::new(CoreConfig { max_loras: Some(2), policy, ..config(64) });
    let adapters: Vec<_> = (2..5).map(|content| driver.register(content, 50)).collect();
    let [alpha, beta, gamma] = adapters[..] else { unreachable!() };
    let queue = [None, Some(alpha), Some(beta), Some(gamma), Some(gamma), None, Some(alpha)];
    let requests: Vec<_> = (1..)
        .zip(queue)
        .map(|(seed, adapter)| driver.submit(&prompt(seed, 4), 6, &adapter.into_iter().collect::<Vec<_>>()))
        .collect();
    driver.step();
    let running: Vec<_> = requests.iter().map(|&request| driver.is_running(request)).collect();
    assert_eq!(running, [true, true, true, false, false, true, true]);
    // BETA's only request ends: its place is free, and both GAMMAs start in the very next step.
    while driver.ending(requests[2]).is_none() && driver.ending(requests[1]).is_none() {
        assert!(!driver.is_running(requests[3]));
        driver.step();
        if driver.ending(requests[2]).is_none() {
            driver.handle(Event::Abort(requests[2]));
        }
    }
    driver.step();
    assert!(driver.is_running(requests[3]) && driver.is_running(requests[4]));
    driver.finish();
}

#[test]
fn a_33_a_waiting_adapter_starts_within_the_bound() {
    POLICIES.into_iter().for_each(starts_within_the_bound);
}

fn starts_within_the_bound(policy: SchedulingPolicy) {
    const DEFERRED: u64 = 20;
    let limits = CoreConfig {
        max_loras: Some(1),
        max_num_seqs: 4,
        max_deferred_steps: DEFERRED,
        enable_prefix_caching: false,
        policy,
        ..config(64)
    };
    // The other adapter resident beside it, or room for one only; ALPHA at 3/4 of what the engine can do, or at 3 times that.
    for (max_cpu_loras, max_tokens) in [(None, 3), (Some(1), 3), (None, 12), (Some(1), 12)] {
        let overload = max_tokens == 12;
        let mut driver = Driver::new(CoreConfig { max_cpu_loras, ..limits.clone() });
        let (alpha, beta) = (driver.register(2, 50), driver.register(3, 50));
        let mut betas = Vec::new();
        for step in 0..10_000u32 {
            driver.submit(&prompt(step % 7, 2), max_tokens, &[alpha]);
            if step == 10 || (step % 1000 == 500 && !overload) {
                betas.push((driver.steps, driver.submit(&prompt(3, 2), max_tokens, &[beta])));
            }
            driver.step();
            if step % 100 == 0 {
                driver.core.check_invariants().unwrap();
            }
        }
        // The age, then what runs then ends (at most `max_tokens` steps), then its load.
        let bound = DEFERRED + max_tokens as u64 + 2;
        for (submitted, request) in betas {
            let started = driver.requests[&request].first_step.expect("started");
            if policy == SchedulingPolicy::Fair {
                // A client that was served nothing yet has its turn as soon as another one was admitted.
                assert!(started - submitted <= bound + 2, "BETA waited {} steps", started - submitted);
                continue;
            }
            // From when its turn came: those who arrived before it go first in any case.
            let before = driver.requests.range(..request).filter_map(|(_, earlier)| earlier.first_step).max();
            let waited = started - before.unwrap_or(0).max(submitted);
            assert!(waited <= bound, "{policy:?}: BETA waited {waited} steps of {bound}");
            assert!(waited >= DEFERRED / 2, "{policy:?}: ALPHA was closed too early: after {waited} steps");
        }
        // What closing costs in all: under overload every row that is missing, else a backlog that is worked off.
        let rows: usize = driver.plans.iter().map(|plan| plan.sequences.len()).sum();
        if overload {
            assert!(rows as f64 >= 0.99 * 4.0 * driver.plans.len() as f64, "{rows} rows");
        } else {
            assert!(driver.core.stats().waiting < 40, "{:?}", driver.core.stats());
        }
        for request in driver.requests.keys().copied().collect::<Vec<_>>() {
            driver.handle(Event::Abort(request));
        }
        driver.finish();
    }
}

#[test]
fn an_overdue_adapter_gets_the_blocks_that_its_load_needs() {
    // Base traffic holds nearly all blocks for ever; the adapter's bytes are saved up for it once it is overdue.
    let limits = CoreConfig { max_model_len: 16, max_num_seqs: 4, max_deferred_steps: 5, ..config(16) };
    let mut driver = Driver::new(limits);
    let adapter = driver.register(2, 10 * BLOCK_BYTES);
    for seed in 0..4 {
        driver.submit(&prompt(seed, 13), 3, &[]);
    }
    driver.step();
    let request = driver.submit(&prompt(9, 4), 2, &[adapter]);
    let mut waited = 0;
    while !driver.is_running(request) {
        driver.submit(&prompt(20 + waited, 13), 3, &[]);
        driver.step();
        driver.core.check_invariants().unwrap();
        waited += 1;
        assert!(waited < 20, "starved by base traffic");
    }
    driver.finish();
}

#[test]
fn a_38_chunks_and_preemption_change_nothing_and_keep_the_version() {
    let ample = CoreConfig { max_model_len: 40, ..config(100) };
    let tight =
        CoreConfig { max_num_batched_tokens: 5, max_num_seqs: 3, ledger_bytes: 15 * BLOCK_BYTES, ..ample.clone() };
    let outputs = [ample, tight].map(|config| {
        let mut driver = Driver::new(config);
        let adapters = [driver.register(2, 60), driver.register(3, 60)];
        let requests: Vec<_> =
            (1..6).map(|seed| driver.submit(&prompt(seed, 12), 28, &[adapters[seed as usize % 2]])).collect();
        while driver.core.has_work() {
            driver.step();
            driver.core.check_invariants().unwrap();
            // The file changes on disk: whoever runs, or was preempted, keeps its version.
            driver.contents.insert(adapters[0], Some((99, 60)));
        }
        let outputs: Vec<_> = requests.iter().map(|request| driver.requests[request].output.clone()).collect();
        (outputs, driver.core.stats().preemptions)
    });
    assert_eq!(outputs[0].1, 0);
    assert!(outputs[1].1 > 0, "nothing was preempted");
    assert_eq!(outputs[0].0, outputs[1].0);
}

#[test]
fn the_last_admitted_or_least_important_is_preempted_first() {
    for (policy, victim) in [(SchedulingPolicy::Fcfs, 2), (SchedulingPolicy::Priority, 1)] {
        let limits = CoreConfig { policy, max_model_len: 24, enable_prefix_caching: false, ..config(7) };
        let mut driver = Driver::new(limits);
        let requests: Vec<_> = [(1, 1), (2, 5), (3, 0)]
            .map(|(seed, priority)| driver.submit_request(important(&prompt(seed, 8), 16, priority)))
            .to_vec();
        while driver.core.stats().preemptions == 0 {
            driver.step();
        }
        let running: Vec<_> = requests.iter().map(|&request| driver.is_running(request)).collect();
        assert!(!running[victim], "{policy:?}: {running:?}");
        assert_eq!(running.iter().filter(|&&runs| runs).count(), 2);
        driver.finish();
    }
}

fn important(prompt: &[u32], max_tokens: usize, priority: i64) -> NewRequest {
    NewRequest { priority, ..request(prompt, max_tokens) }
}

#[test]
fn priority_admits_the_important_first() {
    let mut driver = Driver::new(CoreConfig { policy: SchedulingPolicy::Priority, max_num_seqs: 1, ..config(16) });
    let low = driver.submit_request(important(&prompt(1, 4), 2, 7));
    let high = driver.submit_request(important(&prompt(2, 4), 2, -7));
    driver.step();
    assert!(driver.is_running(high) && !driver.is_running(low));
    driver.finish();
}

#[test]
fn the_next_step_is_planned_while_one_is_in_flight() {
    let mut driver = Driver::new(config(64));
    let adapter = driver.register(2, 50);
    let requests: Vec<_> = (1..4).map(|seed| driver.submit(&prompt(seed, 6), 9, &[adapter])).collect();
    assert!(driver.plan());
    assert!(driver.plan());
    assert!(driver.plan.tokens.iter().all(|&token| token == PLACEHOLDER));
    assert!(!driver.plan(), "two steps are planned already");
    let mut aborted = false;
    while driver.core.has_work() {
        driver.commit();
        if !aborted {
            driver.handle(Event::Abort(requests[1]));
            aborted = true;
        }
        driver.plan();
        driver.core.check_invariants().unwrap();
    }
    driver.finish();
    assert_eq!(driver.ending(requests[1]), Some(&Ending::Finished(FinishReason::Abort)));
    assert_eq!(driver.core.stats().free_blocks, driver.core.stats().total_blocks);
}

#[test]
fn outcomes_bring_none_or_several_tokens_and_steps_get_lost() {
    let mut driver = Driver::new(config(64));
    driver.token_count = |step, request| ((step + request.0) % 3) as u32;
    let requests: Vec<_> = (1..7).map(|seed| driver.submit(&prompt(seed, 9), 20, &[])).collect();
    let mut turn = 0;
    while driver.core.has_work() {
        driver.plan();
        if turn % 2 == 0 {
            driver.plan();
        }
        if turn % 7 == 3 {
            driver.lose();
        } else {
            driver.commit();
        }
        driver.core.check_invariants().unwrap();
        turn += 1;
    }
    driver.finish();
    assert!(requests.iter().all(|&request| matches!(driver.ending(request), Some(Ending::Finished(_)))));
}

#[test]
fn requests_that_can_never_run_fail_at_once() {
    let mut driver = Driver::new(CoreConfig { max_loras: Some(1), max_model_len: 32, ..config(16) });
    let adapters: Vec<_> = (2..4).map(|content| driver.register(content, 50)).collect();
    let large = driver.submit(&prompt(1, 65), 1, &[]);
    let long = driver.submit(&prompt(1, 33), 1, &[]);
    let empty = driver.submit(&[], 1, &[]);
    let both = driver.submit(&prompt(1, 4), 1, &adapters);
    let failed = |request| match driver.ending(request) {
        Some(Ending::Failed(reason)) => reason.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(failed(large), FailureReason::TooLarge { needed: 17, available: 16 });
    assert_eq!(failed(long), FailureReason::PromptLength { tokens: 33, limit: 32 });
    assert_eq!(failed(empty), FailureReason::PromptLength { tokens: 0, limit: 32 });
    assert_eq!(failed(both), FailureReason::TooManyAdapters { needed: 2, limit: 1 });
    assert!(!driver.core.has_work());
}

#[test]
fn lengths_end_requests() {
    let mut driver = Driver::new(CoreConfig { max_model_len: 16, ..config(16) });
    let none = driver.submit(&prompt(1, 4), 0, &[]);
    let one = driver.submit(&prompt(2, 4), 1, &[]);
    let context = driver.submit(&prompt(3, 12), 1000, &[]);
    let full = driver.submit(&prompt(4, 16), 1000, &[]);
    driver.finish();
    let length = |request: RequestId| driver.requests[&request].output.len();
    assert_eq!((length(none), length(one), length(full)), (0, 1, 1));
    let stopped = driver.ending(context) == Some(&Ending::Finished(FinishReason::Stop));
    assert!(length(context) == 4 || stopped);
}

#[test]
fn events_about_the_unknown_are_harmless() {
    let mut driver = Driver::new(config(64));
    let adapter = driver.register(2, 50);
    let request = driver.submit(&prompt(1, 4), 4, &[adapter]);
    let stale = manylora_core::RegistrationId { index: adapter.index, generation: adapter.generation + 5 };
    let far = manylora_core::RegistrationId { index: u32::MAX, generation: u32::MAX };
    for registration in [stale, far] {
        driver.handle(Event::Prefetch(registration));
        driver.handle(Event::Pin(registration));
        driver.handle(Event::Unpin(registration));
        driver.handle(Event::Unload { registration, mode: UnloadMode::Abort });
        driver.handle(Event::LoadFinished { registration, result: Err("no".to_owned().into()) });
        let lost = driver.submit(&prompt(1, 4), 4, &[registration]);
        assert_eq!(driver.ending(lost), Some(&Ending::Failed(FailureReason::AdapterUnloaded)));
    }
    driver.handle(Event::LoadFinished { registration: adapter, result: Err("not ordered".to_owned().into()) });
    driver.handle(Event::Register { registration: adapter, bytes: 1, rereadable: true });
    driver.handle(Event::Register { registration: far, bytes: 1, rereadable: true });
    let _ = driver.core.next_registration();
    driver.handle(Event::Abort(RequestId(1 << 40)));
    driver.handle(Event::Outcome(manylora_core::StepOutcome { step: 77, ..Default::default() }));
    driver.core.check_invariants().unwrap();
    driver.finish();
    assert!(matches!(driver.ending(request), Some(Ending::Finished(_))), "{:?}", driver.ending(request));
}

#[test]
fn events_of_a_trace_are_read_back_with_their_defaults() {
    let text = r#"{"Register":{"registration":{"index":0,"generation":0},"bytes":5}}"#;
    let event: Event = serde_json::from_str(text).unwrap();
    assert!(matches!(event, Event::Register { rereadable: true, bytes: 5, .. }));
    let mut driver = Driver::new(config(16));
    let old = driver.register(2, 50);
    let events = [
        Event::Submit(NewRequest { tenant: Some("tenant".to_owned()), ..request(&prompt(1, 4), 3) }),
        Event::Replace { old, new: old, expected: Some(manylora_core::Digest([3; 32])) },
        Event::SetWeight { client: manylora_core::Client::Adapter(old), weight: 0.5 },
    ];
    for event in events {
        let text = serde_json::to_string(&event).unwrap();
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), event);
        let without = text.replace(r#""tenant":"tenant","#, "");
        assert!(serde_json::from_str::<Event>(&without).is_ok(), "{without}");
    }
}

#[test]
fn users_are_told_by_whether_they_run() {
    let mut driver = Driver::new(CoreConfig { max_num_seqs: 2, ..config(64) });
    let (alpha, beta, cold) = (driver.register(2, 50), driver.register(3, 70), driver.register(4, 10));
    driver.submit(&prompt(1, 4), 9, &[alpha]);
    driver.submit(&prompt(2, 4), 9, &[alpha, beta]);
    driver.step();
    driver.instant_loads = false;
    driver.submit(&prompt(3, 4), 9, &[beta]);
    driver.submit(&prompt(4, 4), 9, &[cold, cold]);
    driver.submit(&prompt(5, 4), 9, &[]);
    let users = driver.core.users();
    let told = |id| users.adapters.get(&id).map(|users| (users.running, users.waiting));
    assert_eq!((told(alpha), told(beta), told(cold)), (Some((2, 0)), Some((1, 1)), Some((0, 1))));
    assert_eq!((users.base.running, users.base.waiting), (0, 1));
    let stats = driver.core.stats();
    assert_eq!((stats.running, stats.waiting, stats.waiting_for_adapters), (2, 3, 1));
    assert_eq!(driver.core.loading().collect::<Vec<_>>(), [cold]);
    assert!(driver.core.is_resident(alpha) && !driver.core.is_resident(cold));
    driver.finish();
    assert_eq!(driver.core.users(), Users::default());
    assert_eq!(driver.core.loading().len(), 0);
}
