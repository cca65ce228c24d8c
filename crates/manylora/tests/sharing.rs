//! Who runs when, seen from callers: a full cap, a flood of one adapter, tenants beside each other. Case ids are those of the
//! acceptance list.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Answer, Oracle, answers, engine, greedy, load, request};
use manylora::{Engine, SchedulingPolicy, Share};

fn answer(engine: &Engine, oracle: &Oracle, adapter: Option<&str>) -> Answer {
    answers(engine, vec![request(&oracle.prompt("mid"), adapter, greedy(6))]).remove(0)
}

/// base rows need no place beside a full cap, a request over the cap holds nobody up, and whatever is
/// cancelled or preempted in a tiny KV cache, everybody else gets the solo answer.
#[test]
fn a_31_a_full_cap_with_cancels_and_preemption() {
    let oracle = Oracle::open("llama");
    let names = [None, Some("alpha"), Some("beta"), Some("gamma"), Some("gamma"), None, Some("alpha")];
    let reference = engine(&oracle, |_| {});
    load(&reference, &oracle, &["alpha", "beta", "gamma"]);
    let alone = names.map(|name| answer(&reference, &oracle, name));
    let probe = reference.stats().expect("stats");
    let adapters: u64 = probe.adapters.iter().map(|adapter| adapter.bytes).sum();
    let engine = engine(&oracle, |config| {
        config.max_loras = Some(2);
        config.max_model_len = Some(64);
        config.kv_cache_memory_bytes = Some(adapters + 24 * reference.info().block_bytes);
    });
    load(&engine, &oracle, &["alpha", "beta", "gamma"]);
    for round in 0..20 {
        let requests: Vec<_> = names.iter().map(|name| request(&oracle.prompt("mid"), *name, greedy(6))).collect();
        let streams = engine.submit_all(requests, true).expect("queued");
        for (row, mut stream) in streams.into_iter().enumerate() {
            if (row + round) % 3 == 0 {
                drop(stream);
            } else {
                let tokens = stream.collect_all().expect("it finishes")[0].token_ids.clone();
                assert_eq!(tokens, alone[row].0, "round {round}, row {row}");
            }
        }
    }
}

/// an adapter that the cap keeps out starts within its bound, however many requests for another keep coming.
#[test]
fn a_33_a_waiting_adapter_is_not_starved() {
    let oracle = Oracle::open("llama");
    for policy in [SchedulingPolicy::Fair, SchedulingPolicy::Fcfs, SchedulingPolicy::Priority] {
        let engine = engine(&oracle, |config| {
            config.max_loras = Some(1);
            config.max_num_seqs = 4;
            config.max_deferred_steps = 20;
            config.scheduling_policy = policy;
        });
        load(&engine, &oracle, &["alpha", "beta"]);
        let submit = |name| engine.submit(request(&oracle.prompt("few"), Some(name), greedy(8))).expect("queued");
        let mut flood: std::collections::VecDeque<_> = (0..8).map(|_| submit("alpha")).collect();
        let mut beta = submit("beta");
        let served = std::thread::scope(|scope| {
            let beta = scope.spawn(move || beta.collect_all().expect("it finishes"));
            let mut served = 0;
            while !beta.is_finished() {
                flood.pop_front().expect("eight are there").collect_all().expect("it finishes");
                flood.push_back(submit("alpha"));
                served += 1;
                assert!(served < 2000, "{policy:?}: the other adapter was served 2000 times meanwhile");
            }
            served
        });
        assert!(served > 0, "{policy:?}");
    }
}

/// A flood of one tenant does not keep another's few requests until its end.
#[test]
fn tenants_share_fairly() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |config| {
        config.max_num_seqs = 2;
        config.enable_prefix_caching = false;
    });
    let order = Arc::new(AtomicUsize::new(0));
    let tenant = |tenant: &str| {
        let mut request = request(&oracle.prompt("mid"), None, greedy(40));
        request.tenant = Some(tenant.to_owned());
        request
    };
    let flood = engine.submit_all((0..40).map(|_| tenant("flood")).collect(), false).expect("queued");
    let few = engine.submit_all((0..2).map(|_| tenant("few")).collect(), false).expect("queued");
    let ends = std::thread::scope(|scope| {
        let wait = |mut stream: manylora::RequestStream| {
            let order = Arc::clone(&order);
            scope.spawn(move || {
                stream.collect_all().expect("it finishes");
                order.fetch_add(1, Ordering::SeqCst)
            })
        };
        let flood: Vec<_> = flood.into_iter().map(wait).collect();
        let few: Vec<_> = few.into_iter().map(wait).collect();
        drop(flood);
        few.into_iter().map(|end| end.join().expect("no panic")).max().expect("two")
    });
    assert!(ends < 20, "the few were served as number {ends} of 42");
    engine.set_weight(Share::Tenant("few"), 2.0).expect("a weight");
    engine.set_weight(Share::Tenant("few"), 0.0).expect_err("no weight");
    engine.set_weight(Share::Adapter("nobody"), 1.0).expect_err("no such adapter");
}
