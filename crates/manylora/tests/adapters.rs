//! The life of adapters on a running engine: load, replace, evict, read again, unload. Case ids are those of the
//! acceptance list.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use common::{Answer, Oracle, adapter_path, answers, engine, greedy, load, oracle_root, request};
use manylora::{AdapterSource, Engine, EngineError, FinishReason, UnloadMode};

fn answer(engine: &Engine, oracle: &Oracle, adapter: Option<&str>) -> Answer {
    answers(engine, vec![request(&oracle.prompt("mid"), adapter, greedy(6))]).remove(0)
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(from.join(file), to.join(file)).expect("a copy");
    }
}

/// an adapter on the embedding and the head, with a copy of the base's matrices in its file, serves many at once.
#[test]
fn a_05_eighty_five_requests_on_embedding_and_head() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |config| {
        config.max_num_seqs = 96;
        config.max_num_batched_tokens = Some(128);
    });
    load(&engine, &oracle, &["embed-head", "alpha"]);
    let adapters = [Some("embed-head"), None, Some("embed-head"), Some("alpha"), Some("embed-head")];
    let alone = adapters.map(|adapter| answer(&engine, &oracle, adapter));
    assert_ne!(alone[0], alone[1]);
    let all = (0..85).map(|row| request(&oracle.prompt("mid"), adapters[row % adapters.len()], greedy(6))).collect();
    for (row, got) in answers(&engine, all).into_iter().enumerate() {
        assert_eq!(got, alone[row % adapters.len()], "row {row}");
    }
}

/// a broken adapter fails its own requests only, also when its files vanish after it was evicted.
#[test]
fn a_23_a_deleted_adapter_fails_alone() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |config| {
        config.max_loras = Some(1);
        config.max_cpu_loras = Some(1);
    });
    let folder = tempfile::tempdir().expect("a folder");
    copy(&adapter_path(&oracle, "beta"), folder.path());
    load(&engine, &oracle, &["alpha"]);
    let alpha = answer(&engine, &oracle, Some("alpha"));
    engine.load_adapter(AdapterSource::directory("gone", folder.path())).expect("it is good now");
    answer(&engine, &oracle, Some("gone"));
    answer(&engine, &oracle, Some("alpha"));
    fs::remove_file(folder.path().join("adapter_model.safetensors")).expect("removed");

    let good = engine.submit(request(&oracle.prompt("mid"), Some("alpha"), greedy(6))).expect("queued");
    let mut bad = engine.submit(request(&oracle.prompt("mid"), Some("gone"), greedy(6))).expect("queued");
    match bad.collect_all() {
        Err(EngineError::RequestFailed(reason)) => assert!(reason.to_string().contains("gone"), "{reason}"),
        other => panic!("the request must fail: {other:?}"),
    }
    let samples: Vec<_> = good.into_iter().collect::<Result<_, _>>().expect("the other request is untouched");
    let tokens: Vec<u32> = samples.iter().flat_map(|delta| delta.token_ids.clone()).collect();
    assert_eq!(tokens, alpha.0);
    assert_eq!(answer(&engine, &oracle, Some("alpha")), alpha);
}

/// A-23, P2: content that changed on disk after eviction fails by name; it is never served under the old version.
#[test]
fn a_23_changed_content_is_not_served() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |config| {
        config.max_loras = Some(1);
        config.max_cpu_loras = Some(1);
    });
    let folder = tempfile::tempdir().expect("a folder");
    copy(&adapter_path(&oracle, "beta"), folder.path());
    engine.load_adapter(AdapterSource::directory("changing", folder.path())).expect("loads");
    load(&engine, &oracle, &["alpha"]);
    answer(&engine, &oracle, Some("alpha"));
    copy(&adapter_path(&oracle, "gamma"), folder.path());
    let mut stream = engine.submit(request(&oracle.prompt("mid"), Some("changing"), greedy(6))).expect("queued");
    let error = stream.collect_all().expect_err("the content is another one").to_string();
    assert!(error.contains("changed on disk"), "{error}");
}

/// a source that is confined to a folder is so with each of its files, at every read.
#[test]
fn a_48_files_are_confined_whenever_they_are_read() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |config| {
        config.max_loras = Some(1);
        config.max_cpu_loras = Some(1);
    });
    let (root, outside) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let tensors = "adapter_model.safetensors";
    let source = |name: &str| AdapterSource::directory(name, root.path().join(name)).confined_to(root.path());
    copy(&adapter_path(&oracle, "alpha"), outside.path());
    for (name, file) in [("config", "adapter_config.json"), ("tensors", tensors), ("late", ""), ("evicted", "")] {
        let folder = root.path().join(name);
        copy(&adapter_path(&oracle, "alpha"), &folder);
        if !file.is_empty() {
            fs::remove_file(folder.join(file)).expect("a file");
            symlink(outside.path().join(file), folder.join(file)).expect("a link");
            let refused = engine.load_adapter(source(name)).expect_err("a file elsewhere");
            assert!(refused.to_string().contains("leaves the folder"), "{refused}");
            // Where the source may lie anywhere its files may, too.
            engine.register_adapter(AdapterSource::directory(name, folder)).expect("the operator's own");
        }
    }
    engine.register_adapter(source("late")).expect("its files lie inside");
    engine.load_adapter(source("evicted")).expect("its files lie inside");
    load(&engine, &oracle, &["beta"]);
    answer(&engine, &oracle, Some("beta"));
    for name in ["late", "evicted"] {
        let file = root.path().join(name).join(tensors);
        fs::remove_file(&file).expect("a file");
        symlink(outside.path().join(tensors), &file).expect("a link");
        let mut stream = engine.submit(request(&oracle.prompt("mid"), Some(name), greedy(6))).expect("queued");
        let error = stream.collect_all().expect_err("a file elsewhere").to_string();
        assert!(error.contains("leaves the folder"), "{error}");
    }
}

/// other content under a name is refused without the flag, replaces with it, and a failed replacement
/// leaves the old version serving. Requests that run finish on the version they started with.
#[test]
fn a_25_replacement_is_explicit_and_atomic() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    load(&engine, &oracle, &["alpha", "beta"]);
    let [alpha, beta] = ["alpha", "beta"].map(|name| answer(&engine, &oracle, Some(name)));
    let source = |folder: &Path, replace| AdapterSource { replace, ..AdapterSource::directory("x", folder) };
    let path = |name| adapter_path(&oracle, name);
    let first = engine.load_adapter(source(&path("alpha"), false)).expect("loads");
    let refused = engine.load_adapter(source(&path("beta"), false)).expect_err("other content");
    assert!(matches!(&refused, EngineError::AdapterConflict { existing, .. } if existing == "x"), "{refused}");
    let again = engine.load_adapter(source(&path("alpha"), false)).expect("the same content is a no-op");
    assert_eq!(again.version, first.version);

    let corrupt = oracle_root().join("malformed/truncated");
    engine.load_adapter(source(&corrupt, true)).expect_err("a corrupt replacement");
    assert_eq!(answer(&engine, &oracle, Some("x")), alpha);

    let mut running = engine.submit(request(&oracle.prompt("mid"), Some("x"), greedy(6))).expect("queued");
    engine.load_adapter(source(&path("beta"), true)).expect("replaced");
    assert_eq!(answer(&engine, &oracle, Some("x")), beta);
    assert_eq!(running.collect_all().expect("finishes")[0].token_ids, alpha.0);
}

/// a slot that held a big adapter gives a smaller one, and one without effect, nothing of it.
#[test]
fn a_29_slots_are_clean() {
    let oracle = Oracle::open("llama");
    let reference = engine(&oracle, |_| {});
    let names = ["gamma", "layers-0", "null", "alpha", "rank1"];
    load(&reference, &oracle, &names);
    let wanted: Vec<Answer> = names.iter().map(|name| answer(&reference, &oracle, Some(name))).collect();
    assert_eq!(wanted[2], answer(&reference, &oracle, None), "an adapter without effect is the base");
    let engine = engine(&oracle, |config| {
        config.max_loras = Some(1);
        config.max_cpu_loras = Some(1);
    });
    load(&engine, &oracle, &names);
    let mut state = 7_usize;
    for step in 0..200 {
        state = state.wrapping_mul(1_103_515_245).wrapping_add(12_345);
        let index = if step < names.len() { step } else { (state >> 16) % names.len() };
        assert_eq!(answer(&engine, &oracle, Some(names[index])), wanted[index], "swap {step}: {}", names[index]);
    }
}

/// more adapters than places: all answer, in turn and at once; a host cache smaller than a step's cap is refused.
#[test]
fn a_30_more_adapters_than_places() {
    let oracle = Oracle::open("llama");
    let reference = engine(&oracle, |_| {});
    let names = ["alpha", "beta", "gamma", "qv", "rank5", "rs16"];
    load(&reference, &oracle, &names);
    let wanted: Vec<Answer> = names.iter().map(|name| answer(&reference, &oracle, Some(name))).collect();
    let engine = engine(&oracle, |config| {
        config.max_loras = Some(1);
        config.max_cpu_loras = Some(2);
    });
    load(&engine, &oracle, &names);
    for _ in 0..5 {
        for (name, wanted) in names.iter().zip(&wanted) {
            assert_eq!(&answer(&engine, &oracle, Some(name)), wanted, "{name}");
        }
    }
    let all = names.iter().map(|name| request(&oracle.prompt("mid"), Some(name), greedy(6))).collect();
    assert_eq!(answers(&engine, all), wanted);
    assert!(engine.stats().expect("stats").evictions > 20);

    let mut config = manylora::EngineConfig::new(oracle.base_folder());
    config.max_loras = Some(4);
    config.max_cpu_loras = Some(2);
    let error = Engine::start(config).expect_err("the setting is refused").to_string();
    assert!(error.contains("max_cpu_loras (2) must be >= max_loras (4)"), "{error}");
}

/// the same integer id with other content is an error; a new version is a new identity.
#[test]
fn a_41_identity_is_content() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let source = |name: &str, id, path: &str| AdapterSource {
        int_id: Some(id),
        ..AdapterSource::directory(name, adapter_path(&oracle, path))
    };
    let alpha = engine.load_adapter(source("a", 1, "alpha")).expect("loads");
    engine.load_adapter(source("b", 1, "beta")).expect_err("id 1 has other content");
    engine.load_adapter(source("a", 2, "beta")).expect_err("name a has other content");
    let same = engine.load_adapter(source("a", 2, "alpha")).expect("the same content under another id");
    assert_eq!(same.version, alpha.version);
    assert_eq!(engine.adapter_of_id(2).expect("id 2 leads to it").name, "a");
    let copy = engine.load_adapter(source("c", 3, "alpha")).expect("the same content under another name");
    assert_eq!(copy.version, alpha.version);
}

/// 200 loads and unloads leave nothing behind.
#[test]
fn a_50_unload_frees() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let start = engine.stats().expect("stats");
    let names: Vec<String> = (0..12).map(|index| format!("fleet-{index:02}")).collect();
    for round in 0..200 {
        let name = &names[round % names.len()];
        load(&engine, &oracle, &[name]);
        if round % 3 == 0 {
            answer(&engine, &oracle, Some(name));
        }
        assert!(engine.stats().expect("stats").adapter_bytes > 0);
        engine.unload_adapter(name, UnloadMode::Drain).expect("unloads");
    }
    let end = engine.stats().expect("stats");
    assert_eq!(end.adapter_bytes, 0);
    assert!(end.adapters.is_empty() && engine.list_adapters().is_empty());
    assert_eq!((end.total_blocks, end.free_blocks), (start.total_blocks, start.free_blocks));
}

/// drain lets requests finish, abort ends them and says so; both free the name at once.
#[test]
fn a_51_unload_while_requests_run() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    load(&engine, &oracle, &["alpha"]);
    let long = || request(&oracle.prompt("mid"), Some("alpha"), greedy(200));
    let mut streams: Vec<_> = (0..3).map(|_| engine.submit(long()).expect("queued")).collect();
    engine.unload_adapter("alpha", UnloadMode::Drain).expect("drained");
    for stream in &mut streams {
        assert_eq!(stream.collect_all().expect("finishes")[0].finish_reason, Some(FinishReason::Length));
    }
    assert!(matches!(engine.submit(long()), Err(EngineError::UnknownAdapter { .. })));

    load(&engine, &oracle, &["alpha"]);
    let mut stream = engine.submit(long()).expect("queued");
    stream.next_delta().expect("a delta").expect("a token");
    engine.unload_adapter("alpha", UnloadMode::Abort).expect("aborted");
    assert_eq!(stream.collect_all().expect("ends")[0].finish_reason, Some(FinishReason::Abort));
    assert_eq!(engine.stats().expect("stats").adapter_bytes, 0);
}

/// a pin holds, and the last place cannot be pinned.
#[test]
fn a_34_pins() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |config| {
        config.max_loras = Some(2);
        config.max_cpu_loras = Some(2);
    });
    load(&engine, &oracle, &["alpha", "beta", "gamma"]);
    engine.pin_adapter("alpha").expect("pinned");
    let error = engine.pin_adapter("beta").expect_err("one place must stay free").to_string();
    assert!(error.contains("beta"), "{error}");
    let pinned = engine.adapter("alpha").expect("known").version;
    for name in ["beta", "gamma", "beta", "gamma"] {
        answer(&engine, &oracle, Some(name));
        let stats = engine.stats().expect("stats");
        assert!(stats.adapters.iter().any(|adapter| Some(adapter.digest) == pinned && adapter.pinned), "{name}");
    }
}

/// A dropped stream frees its rows, blocks and lease; dropping the engine ends what runs with an error.
#[test]
fn dropping_a_stream_aborts_and_dropping_the_engine_joins() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    load(&engine, &oracle, &["alpha"]);
    let free = engine.stats().expect("stats").free_blocks;
    let mut stream = engine.submit(request(&oracle.prompt("mid"), Some("alpha"), greedy(400))).expect("queued");
    stream.next_delta().expect("a delta").expect("a token");
    drop(stream);
    let stats = loop {
        let stats = engine.stats().expect("stats");
        if stats.running == 0 {
            break stats;
        }
    };
    assert_eq!(stats.free_blocks, free);
    assert!(stats.adapters.iter().all(|adapter| adapter.leases == 0));
    let mut stream = engine.submit(request(&oracle.prompt("mid"), None, greedy(400))).expect("queued");
    let handle = engine.handle();
    drop(engine);
    assert!(matches!(stream.collect_all(), Err(EngineError::Stopped(_))));
    assert!(matches!(handle.stats(), Err(EngineError::Stopped(_))));
}
