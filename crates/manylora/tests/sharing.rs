//! Who runs when, seen from callers: a full cap, a flood of one adapter, tenants beside each other. Case ids are those of the
//! acceptance list.

mod common;

use std::pin::Pin;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};

use common::{Answer, Oracle, adapter_path, answers, engine, greedy, load, request};
use futures_core::Stream;
use manylora::{AdapterSource, Engine, ReadHook, SchedulingPolicy, Share};

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

/// Takes note of the streams that have news, on the thread that brings it.
struct Ended {
    index: usize,
    order: Arc<Mutex<Vec<usize>>>,
}

impl Wake for Ended {
    fn wake(self: Arc<Self>) {
        self.order.lock().expect("nobody panics").push(self.index);
    }
}

/// A flood of one tenant does not keep another's few requests until its end.
#[test]
fn tenants_share_fairly() {
    let oracle = Oracle::open("llama");
    // All requests are there before any of them can start: their adapter is not read before.
    let (open, gate) = sync_channel::<()>(0);
    let gate = Mutex::new(gate);
    let engine = engine(&oracle, |config| {
        config.max_num_seqs = 2;
        config.enable_prefix_caching = false;
        config.before_read = Some(ReadHook::new(move |_| {
            gate.lock().unwrap().recv().expect("all are queued");
            Ok(())
        }));
    });
    engine.register_adapter(AdapterSource::directory("alpha", adapter_path(&oracle, "alpha"))).expect("registered");
    let tenant = |tenant: &str| {
        let mut request = request(&oracle.prompt("mid"), Some("alpha"), greedy(40));
        request.tenant = Some(tenant.to_owned());
        request
    };
    let tenants: Vec<&str> = [["flood"; 40].as_slice(), ["few"; 2].as_slice()].concat();
    let requests = tenants.iter().map(|name| tenant(name)).collect();
    // Each stream has one piece of news: its end.
    let mut streams = engine.submit_all(requests, false).expect("queued");
    let order = Arc::new(Mutex::new(Vec::new()));
    for (index, stream) in streams.iter_mut().enumerate() {
        let waker = Waker::from(Arc::new(Ended { index, order: Arc::clone(&order) }));
        assert!(Pin::new(stream).poll_next(&mut Context::from_waker(&waker)).is_pending());
    }
    open.send(()).expect("the adapter is waited for");
    for stream in &mut streams {
        stream.collect_all().expect("it finishes");
    }
    // A waker is called when the news can be read already.
    while order.lock().unwrap().len() < tenants.len() {
        std::thread::yield_now();
    }
    let ended: Vec<&str> = order.lock().unwrap().iter().map(|&index| tenants[index]).collect();
    let last = ended.iter().rposition(|&tenant| tenant == "few").expect("they have ended");
    assert!(last < 6, "the few were not served in turns with the flood: {ended:?}");
    engine.set_weight(Share::Tenant("few"), 2.0).expect("a weight");
    engine.set_weight(Share::Tenant("few"), 0.0).expect_err("no weight");
    engine.set_weight(Share::Adapter("nobody"), 1.0).expect_err("no such adapter");
}
