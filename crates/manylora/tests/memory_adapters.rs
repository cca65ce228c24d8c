//! Adapters that an embedding program gives in memory: the same as from a folder, and not kept twice.

mod common;

use std::sync::Arc;

use common::{Answer, Oracle, adapter_path, answers, engine, greedy, in_memory, load, request};
use manylora::{AdapterOrigin, AdapterSource, Engine, EngineError};

fn answer(engine: &Engine, oracle: &Oracle, adapter: &str) -> Answer {
    answers(engine, vec![request(&oracle.prompt("mid"), Some(adapter), greedy(6))]).remove(0)
}

#[test]
fn tensors_in_memory_are_the_version_that_the_folder_holds() {
    let oracle = Oracle::open("llama");
    let (from_disk, from_memory) = (engine(&oracle, |_| {}), engine(&oracle, |_| {}));
    for name in ["alpha", "bf16", "fp16", "embed-head"] {
        load(&from_disk, &oracle, &[name]);
        let saved = from_disk.adapter(name).expect("it is there");
        let given = from_memory.load_adapter(in_memory(&oracle, name, name)).expect("it loads");
        assert_eq!(given.version, saved.version, "{name}");
        assert_eq!(answer(&from_memory, &oracle, name), answer(&from_disk, &oracle, name), "{name}");
        assert_eq!(given.report.modules, saved.report.modules);
        assert_eq!(saved.origin.path(), Some(adapter_path(&oracle, name).as_path()));
        // What is registered holds no tensors: the packed form is the only copy.
        assert_eq!(given.origin, AdapterOrigin::Memory(None));
        assert!(saved.origin.is_rereadable() && !given.origin.is_rereadable());
    }
}

#[test]
fn the_engine_drops_given_tensors() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let source = in_memory(&oracle, "given", "beta");
    let AdapterOrigin::Memory(Some(tensors)) = source.origin.clone() else { panic!("it has tensors") };
    engine.load_adapter(source).expect("it loads");
    assert_eq!(Arc::strong_count(&tensors), 1);
}

#[test]
fn other_content_under_a_given_name_is_a_conflict_that_says_where_it_came_from() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    engine.load_adapter(in_memory(&oracle, "x", "alpha")).expect("it loads");
    let before = answer(&engine, &oracle, "x");
    let error = engine.load_adapter(in_memory(&oracle, "x", "beta")).expect_err("other content");
    assert!(matches!(&error, EngineError::AdapterConflict { existing, .. } if existing == "x"), "{error}");
    assert!(error.to_string().contains("`x` of tensors in memory"), "{error}");
    assert_eq!(answer(&engine, &oracle, "x"), before);
    let other = AdapterSource { replace: true, ..in_memory(&oracle, "x", "beta") };
    engine.load_adapter(other).expect("a replacement");
    load(&engine, &oracle, &["beta"]);
    assert_eq!(answer(&engine, &oracle, "x"), answer(&engine, &oracle, "beta"));
}
