//! The shelf under callers who do not wait for each other: many at once, cold adapters, slow and failing reads,
//! replacement and unloading under traffic, adapters that only memory holds. Case ids are those of the acceptance list.

mod common;

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use common::{Answer, Oracle, adapter_path, answers, engine, greedy, in_memory, load, oracle_root, request};
use manylora::{AdapterSelection, AdapterSource, Digest, Engine, EngineError, FinishReason, ReadHook, UnloadMode};

fn answer(engine: &Engine, oracle: &Oracle, adapter: Option<&str>) -> Answer {
    answers(engine, vec![request(&oracle.prompt("mid"), adapter, greedy(6))]).remove(0)
}

fn source(oracle: &Oracle, name: &str, adapter: &str) -> AdapterSource {
    AdapterSource::directory(name, adapter_path(oracle, adapter))
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(from.join(file), to.join(file)).expect("a copy");
    }
}

/// Reads that wait until they are let go, and say when they begin.
struct Gate {
    begun: Mutex<Receiver<String>>,
    go: Sender<()>,
}

impl Gate {
    /// A gate for the reads of one adapter name; others pass.
    fn hook(name: &'static str) -> (ReadHook, Self) {
        let (begin, begun) = channel();
        let (go, wait) = channel();
        let wait = Mutex::new(wait);
        let hook = ReadHook::new(move |source| {
            if source.name == name {
                begin.send(source.name.clone()).map_err(|error| error.to_string())?;
                wait.lock().expect("a lock").recv().map_err(|error| error.to_string())?;
            }
            Ok(())
        });
        (hook, Self { begun: Mutex::new(begun), go })
    }

    fn wait_for_a_read(&self) {
        self.begun.lock().expect("a lock").recv_timeout(Duration::from_secs(60)).expect("a read begins");
    }

    fn let_go(&self) {
        self.go.send(()).expect("a read waits");
    }
}

/// a hundred loads of one name at once are one read and one id; a hundred first requests for an adapter that was
/// only registered are one read too.
#[test]
fn a_24_a_hundred_at_once_are_one_read() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |config| {
        config.max_num_seqs = 128;
        config.max_num_batched_tokens = Some(256);
    });
    let barrier = Barrier::new(100);
    let versions: HashSet<Option<Digest>> = std::thread::scope(|scope| {
        let loads: Vec<_> = (0..100)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    engine.load_adapter(source(&oracle, "x", "alpha")).expect("it loads").version
                })
            })
            .collect();
        loads.into_iter().map(|load| load.join().expect("no panic")).collect()
    });
    assert_eq!(versions.len(), 1);
    assert_eq!(engine.stats().expect("stats").adapter_reads, 1);
    assert_eq!(engine.list_adapters().len(), 1);

    engine.register_adapter(source(&oracle, "y", "beta")).expect("registered");
    assert_eq!(engine.adapter("y").expect("known").version, None);
    let before = engine.stats().expect("stats").adapter_reads;
    let all = (0..100).map(|_| request(&oracle.prompt("mid"), Some("y"), greedy(6))).collect();
    let all: HashSet<Answer> = answers(&engine, all).into_iter().collect();
    assert_eq!(all.len(), 1, "all answers are the same");
    assert_eq!(engine.stats().expect("stats").adapter_reads, before + 1);
    let info = engine.adapter("y").expect("known");
    assert!(info.version.is_some(), "the first read told what it is");
    assert!(info.report.modules.values().all(|module| module.effect.is_some()));
}

/// loads and unloads at once end as some order of them would; names that differ in one character stay apart.
#[test]
fn a_24_loads_and_unloads_at_once() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let barrier = Barrier::new(100);
    std::thread::scope(|scope| {
        for number in 0..100 {
            let (engine, oracle, barrier) = (&engine, &oracle, &barrier);
            scope.spawn(move || {
                barrier.wait();
                let name = ["a/b", "a_b", "a-b"][number % 3];
                if number % 2 == 0 {
                    engine
                        .load_adapter(source(oracle, name, ["alpha", "beta", "gamma"][number % 3]))
                        .expect("it loads");
                } else {
                    match engine.unload_adapter(name, UnloadMode::Drain) {
                        Ok(()) | Err(EngineError::UnknownAdapter { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    let listed = engine.list_adapters();
    let stats = engine.stats().expect("stats");
    assert!(stats.adapters.len() <= 3);
    let reference = common::engine(&oracle, |_| {});
    load(&reference, &oracle, &["alpha", "beta", "gamma"]);
    for (name, adapter) in [("a/b", "alpha"), ("a_b", "beta"), ("a-b", "gamma")] {
        engine.load_adapter(source(&oracle, name, adapter)).expect("it loads whatever went before");
        assert_eq!(answer(&engine, &oracle, Some(name)), answer(&reference, &oracle, Some(adapter)));
        engine.unload_adapter(name, UnloadMode::Drain).expect("unloads");
    }
    assert!(listed.len() <= 3);
    let end = engine.stats().expect("stats");
    assert_eq!((end.adapter_bytes, end.loading_bytes), (0, 0));
    assert!(engine.list_adapters().is_empty());
}

/// replacing compares with the version that the caller knows.
#[test]
fn a_25_compare_and_set() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let alpha = engine.load_adapter(source(&oracle, "x", "alpha")).expect("loads").version.expect("read");
    let wrong = Digest([7; 32]);
    let error =
        engine.replace_adapter(source(&oracle, "x", "beta"), Some(wrong)).expect_err("another version").to_string();
    assert!(error.contains(&alpha.to_string()), "{error}");
    assert_eq!(engine.adapter("x").expect("known").version, Some(alpha));
    let beta = engine.replace_adapter(source(&oracle, "x", "beta"), Some(alpha)).expect("replaced").version;
    assert_ne!(beta, Some(alpha));
    engine.replace_adapter(source(&oracle, "x", "gamma"), Some(alpha)).expect_err("it is beta now");
    assert_eq!(engine.adapter("x").expect("known").version, beta);
    let same = engine.replace_adapter(source(&oracle, "x", "beta"), beta).expect("the same content");
    assert_eq!(same.version, beta);
    let unknown = engine.replace_adapter(source(&oracle, "nobody", "beta"), beta).expect_err("there is no such name");
    assert!(matches!(unknown, EngineError::UnknownAdapter { .. }), "{unknown}");
    // What went wrong left nothing behind.
    assert_eq!(engine.stats().expect("stats").adapters.len(), 1);
}

/// a replacement is read once, however many steps follow.
#[test]
fn a_26_one_read_after_a_replacement() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    load(&engine, &oracle, &["alpha"]);
    let before = engine.stats().expect("stats");
    engine.replace_adapter(source(&oracle, "alpha", "beta"), None).expect("replaced");
    let after = loop {
        let mut stream = engine.submit(request(&oracle.prompt("mid"), Some("alpha"), greedy(400))).expect("queued");
        stream.collect_all().expect("finishes");
        let now = engine.stats().expect("stats");
        if now.steps >= before.steps + 200 {
            break now;
        }
    };
    assert_eq!(after.adapter_reads, before.adapter_reads + 1);
}

/// while a replacement is read for a long time, the old version serves, streams that run get their tokens and
/// nobody finds the name unknown; afterwards the new one does.
#[test]
fn a_27_a_slow_replacement_leaves_no_gap() {
    let oracle = Oracle::open("llama");
    let (hook, gate) = Gate::hook("slow");
    let engine = engine(&oracle, |config| config.before_read = Some(hook));
    load(&engine, &oracle, &["alpha", "beta"]);
    let [alpha, beta] = ["alpha", "beta"].map(|name| answer(&engine, &oracle, Some(name)));
    engine.register_adapter(source(&oracle, "slow", "alpha")).expect("registered");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| answer(&engine, &oracle, Some("slow")));
        gate.wait_for_a_read();
        // the request waits for its adapter, and others do not wait for it.
        for _ in 0..3 {
            assert_eq!(answer(&engine, &oracle, Some("beta")), beta);
        }
        assert!(!first.is_finished());
        gate.let_go();
        assert_eq!(first.join().expect("no panic"), alpha);

        let mut running = engine.submit(request(&oracle.prompt("mid"), Some("slow"), greedy(400))).expect("queued");
        running.next_delta().expect("a delta").expect("a token");
        let replaced = scope.spawn(|| engine.replace_adapter(source(&oracle, "slow", "beta"), None));
        gate.wait_for_a_read();
        for _ in 0..5 {
            assert_eq!(answer(&engine, &oracle, Some("slow")), alpha, "the old version serves until the swap");
            running.next_delta().expect("a delta").expect("tokens come while the replacement is read");
        }
        assert!(!replaced.is_finished());
        gate.let_go();
        replaced.join().expect("no panic").expect("replaced");
        assert_eq!(answer(&engine, &oracle, Some("slow")), beta, "requests after the reply use the new version");
        running.abort();
    });
}

/// P2: a request that waits for its adapter's first read is told the version that serves it, whatever its name stands for
/// by then.
#[test]
fn a_27_who_waited_is_told_which_version_serves() {
    let oracle = Oracle::open("llama");
    let (hook, gate) = Gate::hook("slow");
    let engine = engine(&oracle, |config| config.before_read = Some(hook));
    load(&engine, &oracle, &["alpha", "beta"]);
    let version = |name| engine.adapter(name).expect("known").version;
    let [alpha, beta] = ["alpha", "beta"].map(version);
    engine.register_adapter(source(&oracle, "slow", "alpha")).expect("registered");
    let mut asked = request(&oracle.prompt("mid"), Some("slow"), greedy(6));
    asked.adapters.push(AdapterSelection { name: "beta".to_owned(), scale: 1.0 });
    asked.adapters.push(AdapterSelection { name: "gamma".to_owned(), scale: 0.0 });
    engine.register_adapter(source(&oracle, "gamma", "gamma")).expect("registered");
    let mut waiting = engine.submit(asked).expect("queued");
    assert_eq!(waiting.adapter_versions(), [("slow", None), ("beta", beta), ("gamma", None)]);
    gate.wait_for_a_read();
    std::thread::scope(|scope| {
        // Another version takes the name; its read comes second, and ends second.
        let replaced = scope.spawn(|| engine.replace_adapter(source(&oracle, "slow", "beta"), None));
        gate.wait_for_a_read();
        gate.let_go();
        gate.let_go();
        replaced.join().expect("no panic").expect("replaced");
    });
    assert_eq!(version("slow"), beta);
    waiting.next_delta().expect("a delta").expect("a token");
    assert_eq!(waiting.adapter_versions(), [("slow", alpha), ("beta", beta), ("gamma", None)]);
}

/// what is broken is refused with a reason and not remembered: it can be registered once it is whole.
#[test]
fn a_28_half_written_folders() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    load(&engine, &oracle, &["alpha"]);
    let root = tempfile::tempdir().expect("a folder");
    let folder = root.path().join("growing");
    fs::create_dir(&folder).expect("a folder");
    let register = || engine.register_adapter(AdapterSource::directory("growing", &folder));
    for stage in ["empty", "configuration only", "half a file"] {
        let error = register().expect_err(stage).to_string();
        assert!(error.contains("growing"), "{stage}: {error}");
        assert!(matches!(
            engine.submit(request(&oracle.prompt("mid"), Some("growing"), greedy(2))),
            Err(EngineError::UnknownAdapter { .. })
        ));
        let whole = adapter_path(&oracle, "alpha");
        match stage {
            "empty" => drop(fs::copy(whole.join("adapter_config.json"), folder.join("adapter_config.json"))),
            "configuration only" => {
                let bytes = fs::read(whole.join("adapter_model.safetensors")).expect("the tensors");
                fs::write(folder.join("adapter_model.safetensors"), &bytes[..bytes.len() / 2]).expect("written");
            }
            _ => copy(&whole, &folder),
        }
    }
    register().expect("it is whole now");
    assert_eq!(answer(&engine, &oracle, Some("growing")), answer(&engine, &oracle, Some("alpha")));
}

/// an adapter whose tensors turn out to be bad at its first read fails the requests that wait for it, and only
/// those; when the file is good the next request is served.
#[test]
fn a_23_a_bad_first_read_fails_only_those_who_wait() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    load(&engine, &oracle, &["beta"]);
    let beta = answer(&engine, &oracle, Some("beta"));
    let root = tempfile::tempdir().expect("a folder");
    copy(&adapter_path(&oracle, "alpha"), root.path());
    engine.register_adapter(AdapterSource::directory("late", root.path())).expect("its header is good");
    let tensors = root.path().join("adapter_model.safetensors");
    let whole = fs::read(&tensors).expect("the tensors");
    fs::write(&tensors, &whole[..whole.len() - 8]).expect("cut");
    let names = ["late", "beta", "late", "beta"];
    let all = names.map(|name| engine.submit(request(&oracle.prompt("mid"), Some(name), greedy(6))).expect("queued"));
    for (name, mut stream) in names.into_iter().zip(all) {
        match (name, stream.collect_all()) {
            ("late", Err(EngineError::RequestFailed(reason))) => {
                assert!(reason.to_string().contains("late"), "{reason}");
            }
            ("beta", Ok(samples)) => assert_eq!(samples[0].token_ids, beta.0),
            (name, other) => panic!("{name}: {other:?}"),
        }
    }
    fs::write(&tensors, &whole).expect("mended");
    load(&engine, &oracle, &["alpha"]);
    assert_eq!(answer(&engine, &oracle, Some("late")), answer(&engine, &oracle, Some("alpha")));
}

/// more registered adapters than places, none read before it is asked for.
#[test]
fn a_30_registered_adapters_are_read_on_demand() {
    let oracle = Oracle::open("llama");
    let reference = engine(&oracle, |_| {});
    let names = ["alpha", "beta", "gamma", "qv", "rank5", "rs16"];
    load(&reference, &oracle, &names);
    let engine = engine(&oracle, |config| {
        config.max_loras = Some(1);
        config.max_cpu_loras = Some(2);
    });
    let sources: Vec<AdapterSource> = names.iter().map(|name| source(&oracle, name, name)).collect();
    for (result, name) in engine.register_adapters(&sources).into_iter().zip(names) {
        assert_eq!(result.expect("registered").name, name);
    }
    assert_eq!(engine.stats().expect("stats").adapter_reads, 0);
    for _ in 0..5 {
        for name in names {
            assert_eq!(answer(&engine, &oracle, Some(name)), answer(&reference, &oracle, Some(name)), "{name}");
            assert!(engine.stats().expect("stats").adapters.len() <= 2);
        }
    }
}

/// A load for which there is no room now is checked all the same, and read when it is asked for.
#[test]
fn a_load_without_room_is_checked_and_served_later() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |config| {
        config.max_loras = Some(1);
        config.max_cpu_loras = Some(1);
    });
    load(&engine, &oracle, &["alpha"]);
    let mut running = engine.submit(request(&oracle.prompt("mid"), Some("alpha"), greedy(400))).expect("queued");
    running.next_delta().expect("a delta").expect("a token");
    let loaded = engine.load_adapter(source(&oracle, "beta", "beta")).expect("it is good, if not resident");
    assert!(loaded.version.is_some());
    let broken = AdapterSource::directory("broken", oracle_root().join("malformed/nan"));
    engine.load_adapter(broken).expect_err("its values are no numbers, room or not");
    let waiting = engine.submit(request(&oracle.prompt("mid"), Some("beta"), greedy(6))).expect("queued");
    running.abort();
    let tokens: Vec<u32> = waiting.into_iter().flat_map(|delta| delta.expect("tokens").token_ids).collect();
    let reference = common::engine(&oracle, |_| {});
    load(&reference, &oracle, &["beta"]);
    assert_eq!(tokens, answer(&reference, &oracle, Some("beta")).0);
}

/// a pinned adapter is refreshed by a replacement and stays pinned.
#[test]
fn a_34_a_pinned_adapter_can_be_refreshed() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |config| {
        config.max_loras = Some(2);
        config.max_cpu_loras = Some(2);
    });
    load(&engine, &oracle, &["alpha", "beta"]);
    engine.pin_adapter("alpha").expect("pinned");
    let fresh = engine.replace_adapter(source(&oracle, "alpha", "rank5"), None).expect("replaced").version;
    for name in ["beta", "gamma", "beta"] {
        if name == "gamma" {
            load(&engine, &oracle, &["gamma"]);
        }
        answer(&engine, &oracle, Some(name));
        let stats = engine.stats().expect("stats");
        assert!(stats.adapters.iter().any(|adapter| Some(adapter.digest) == fresh && adapter.pinned), "{name}");
    }
    engine.unpin_adapter("alpha").expect("unpinned");
}

/// an unload that is given up goes on; it can be waited for again, or turned into an abort.
#[test]
fn a_51_unload_with_a_timeout() {
    let oracle = Oracle::open("llama");
    let (hook, gate) = Gate::hook("held");
    let engine = engine(&oracle, |config| config.before_read = Some(hook));
    load(&engine, &oracle, &["beta"]);
    engine.register_adapter(source(&oracle, "held", "alpha")).expect("registered");
    // Its read is held back, so the request cannot finish whatever the machine does.
    let mut stream = engine.submit(request(&oracle.prompt("mid"), Some("held"), greedy(6))).expect("queued");
    gate.wait_for_a_read();
    let short = Duration::from_millis(10);
    for _ in 0..2 {
        match engine.unload_adapter_within("held", UnloadMode::Drain, short) {
            Err(EngineError::UnloadTimeout { name, requests, .. }) => {
                assert_eq!((name.as_str(), requests), ("held", 1));
            }
            other => panic!("it is held: {other:?}"),
        }
        assert!(matches!(
            engine.submit(request(&oracle.prompt("mid"), Some("held"), greedy(2))),
            Err(EngineError::UnknownAdapter { .. })
        ));
        // Neither traffic nor other loads wait for it.
        answer(&engine, &oracle, Some("beta"));
        load(&engine, &oracle, &["gamma"]);
        engine.unload_adapter("gamma", UnloadMode::Drain).expect("unloads");
    }
    std::thread::scope(|scope| {
        let aborted = scope.spawn(|| engine.unload_adapter("held", UnloadMode::Abort));
        assert_eq!(stream.collect_all().expect("it ends")[0].finish_reason, Some(FinishReason::Abort));
        gate.let_go();
        aborted.join().expect("no panic").expect("gone");
    });
    assert_eq!(engine.list_adapters().len(), 1);
    assert_eq!(engine.stats().expect("stats").loading_bytes, 0);
}

/// Adapters that only memory holds are never evicted, and one that cannot stay is refused.
#[test]
fn adapters_from_memory_stay() {
    let oracle = Oracle::open("llama");
    let reference = engine(&oracle, |_| {});
    let names = ["alpha", "beta", "gamma", "qv"];
    load(&reference, &oracle, &names);
    let engine = engine(&oracle, |config| {
        config.max_loras = Some(1);
        config.max_cpu_loras = Some(2);
    });
    engine.load_adapter(in_memory(&oracle, "alpha", "alpha")).expect("it loads");
    for _ in 0..3 {
        for name in names {
            if name != "alpha" {
                load(&engine, &oracle, &[name]);
            }
            assert_eq!(answer(&engine, &oracle, Some(name)), answer(&reference, &oracle, Some(name)), "{name}");
        }
    }
    let again = engine.load_adapter(in_memory(&oracle, "alpha", "alpha")).expect("the same content is a no-op");
    assert_eq!(again.version, reference.adapter("alpha").expect("known").version);
    let error = common::engine(&oracle, |config| config.lora_memory_bytes = Some(64))
        .load_adapter(in_memory(&oracle, "alpha", "alpha"))
        .expect_err("it can never fit")
        .to_string();
    assert!(error.contains("64"), "{error}");
    // Replaced from memory, it is gone, and the new content stays.
    engine.replace_adapter(in_memory(&oracle, "alpha", "beta"), None).expect("replaced");
    assert_eq!(answer(&engine, &oracle, Some("alpha")), answer(&reference, &oracle, Some("beta")));
}

/// An unload comes between a load and its read: the load counts as the later of the two, and nobody waits for ever.
#[test]
fn a_24_an_unload_overtakes_a_load() {
    let oracle = Oracle::open("llama");
    let (hook, gate) = Gate::hook("x");
    let engine = engine(&oracle, |config| config.before_read = Some(hook));
    let reference = common::engine(&oracle, |_| {});
    load(&reference, &oracle, &["alpha", "beta"]);
    let expected = |name: &str| answer(&reference, &oracle, Some(name));
    engine.register_adapter(source(&oracle, "x", "alpha")).expect("registered");
    std::thread::scope(|scope| {
        // A request waits for the read; draining lets it finish.
        let mut waiting = engine.submit(request(&oracle.prompt("mid"), Some("x"), greedy(6))).expect("queued");
        gate.wait_for_a_read();
        let loaded = scope.spawn(|| engine.load_adapter(source(&oracle, "x", "alpha")));
        let unloaded = scope.spawn(|| engine.unload_adapter("x", UnloadMode::Drain));
        gate.let_go();
        assert_eq!(waiting.collect_all().expect("it finishes")[0].token_ids, expected("alpha").0);
        unloaded.join().expect("no panic").expect("unloaded");
        // The load may have begun anew, which is another read.
        while !loaded.is_finished() {
            let _ = gate.go.send(());
            std::thread::sleep(Duration::from_millis(1));
        }
        loaded.join().expect("no panic").expect("loaded");
    });
    for _ in 0..50 {
        let _ = gate.go.send(());
    }
    // Whatever came first, names and content agree: it serves, or it is unknown.
    match engine.submit(request(&oracle.prompt("mid"), Some("x"), greedy(6))) {
        Ok(mut stream) => assert_eq!(stream.collect_all().expect("finishes")[0].token_ids, expected("alpha").0),
        Err(error) => assert!(matches!(error, EngineError::UnknownAdapter { .. }), "{error}"),
    }
    // A replacement is interrupted likewise; with an expectation there is nothing left that it could replace.
    engine.load_adapter(source(&oracle, "x", "alpha")).expect("loaded");
    let version = engine.adapter("x").expect("known").version;
    for expectation in [version, None] {
        std::thread::scope(|scope| {
            let replaced = scope.spawn(|| engine.replace_adapter(source(&oracle, "x", "beta"), expectation));
            std::thread::sleep(Duration::from_millis(5));
            let _ = engine.unload_adapter("x", UnloadMode::Drain);
            match replaced.join().expect("no panic") {
                Ok(_) | Err(EngineError::UnknownAdapter { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        });
        if engine.adapter("x").is_ok() {
            assert_eq!(answer(&engine, &oracle, Some("x")), expected("beta"));
            engine.unload_adapter("x", UnloadMode::Drain).expect("unloads");
        }
        engine.load_adapter(source(&oracle, "x", "alpha")).expect("loaded");
    }
}

/// Random calls from several threads: every one is answered, names lead to what was loaded under them, and nothing is left.
#[test]
fn random_calls_from_many_threads_end_well() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |config| {
        config.max_loras = Some(2);
        config.max_cpu_loras = Some(3);
    });
    let contents = ["alpha", "beta", "rank5", "qv"];
    let reference = common::engine(&oracle, |_| {});
    load(&reference, &oracle, &contents);
    let tokens: HashSet<Vec<u32>> = contents.iter().map(|name| answer(&reference, &oracle, Some(name)).0).collect();
    std::thread::scope(|scope| {
        for thread in 0..6_u64 {
            let (engine, oracle, tokens) = (&engine, &oracle, &tokens);
            scope.spawn(move || {
                let mut state = (thread + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                let mut draw = |limit: usize| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    (state >> 33) as usize % limit
                };
                for _ in 0..150 {
                    let (name, content) = (["x", "y", "z"][draw(3)], contents[draw(4)]);
                    let int_id = [None, None, Some(1 + draw(3) as u64)][draw(3)];
                    let source = AdapterSource { int_id, replace: draw(2) == 0, ..source(oracle, name, content) };
                    let given = || in_memory(oracle, name, content);
                    // Conflicts, names that are gone, pins without room: all of them are answers.
                    match draw(12) {
                        0..3 => drop(engine.load_adapter(source)),
                        3 => drop(engine.register_adapter(source)),
                        4 => drop(
                            engine.replace_adapter(source, engine.adapter(name).ok().and_then(|info| info.version)),
                        ),
                        5 => drop(engine.unload_adapter(name, UnloadMode::Drain)),
                        6 => drop(engine.unload_adapter(name, UnloadMode::Abort)),
                        7 => drop(engine.pin_adapter(name)),
                        8 => drop(engine.unpin_adapter(name)),
                        9 => drop(engine.load_adapter(AdapterSource { replace: true, ..given() })),
                        _ => {
                            let request = request(&oracle.prompt("mid"), Some(name), greedy(6));
                            let Ok(mut stream) = engine.submit(request) else { continue };
                            if let Ok(samples) = stream.collect_all()
                                && samples[0].finish_reason == Some(FinishReason::Length)
                            {
                                assert!(
                                    tokens.contains(&samples[0].token_ids),
                                    "an answer of no content under `{name}`"
                                );
                            }
                        }
                    }
                }
            });
        }
    });
    for name in ["x", "y", "z"] {
        let _ = engine.unload_adapter(name, UnloadMode::Abort);
    }
    assert!(engine.list_adapters().is_empty());
    let stats = engine.stats().expect("stats");
    assert_eq!((stats.adapter_bytes, stats.loading_bytes, stats.running, stats.waiting), (0, 0, 0, 0));
    assert_eq!(stats.free_blocks, stats.total_blocks);
    load(&engine, &oracle, &["alpha"]);
    assert_eq!(answer(&engine, &oracle, Some("alpha")), answer(&reference, &oracle, Some("alpha")));
}

/// while a cold adapter is read, for however long, streams that run get their tokens; the request that waits starts
/// when its adapter is there. Adapters of requests that wait for their turn are read ahead of it.
#[test]
fn a_35_reads_never_hold_up_decoding() {
    let oracle = Oracle::open("llama");
    let (hook, gate) = Gate::hook("cold");
    let engine = engine(&oracle, |config| {
        config.max_loras = Some(1);
        config.max_cpu_loras = Some(2);
        config.before_read = Some(hook);
    });
    load(&engine, &oracle, &["alpha"]);
    engine.register_adapter(source(&oracle, "cold", "beta")).expect("registered");
    let long = || engine.submit(request(&oracle.prompt("few"), Some("alpha"), greedy(400))).expect("queued");
    let mut running: Vec<_> = (0..4).map(|_| long()).collect();
    for stream in &mut running {
        stream.next_delta().expect("a delta").expect("a token");
    }
    // It cannot start before they end, for a step has one adapter at most; it is read all the same.
    let mut waiting = engine.submit(request(&oracle.prompt("mid"), Some("cold"), greedy(6))).expect("queued");
    gate.wait_for_a_read();
    for stream in &mut running {
        for _ in 0..20 {
            let delta = stream.next_delta().expect("a delta").expect("tokens come while the read is held");
            assert!(!delta.token_ids.is_empty() && delta.finish_reason.is_none());
        }
    }
    gate.let_go();
    while engine.stats().expect("stats").adapters.len() < 2 {
        std::thread::yield_now();
    }
    drop(running);
    let reference = common::engine(&oracle, |_| {});
    load(&reference, &oracle, &["beta"]);
    assert_eq!(waiting.collect_all().expect("finishes")[0].token_ids, answer(&reference, &oracle, Some("beta")).0);
    assert_eq!(engine.stats().expect("stats").adapter_reads, 2);
}
