//! Hundreds of adapters that come and go. One test in one process, so that its memory is nobody else's.

mod common;

use std::collections::HashSet;
use std::fs;
use std::sync::Arc;

use common::{Oracle, answers, engine, greedy, in_memory, request};
use manylora::{AdapterOrigin, UnloadMode};

/// 500 different adapters, loaded, used and unloaded one after the other, leave nothing behind.
#[test]
fn a_50_five_hundred_different_adapters() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let start = engine.stats().expect("stats");
    let mut versions = HashSet::new();
    let mut memory = Vec::new();
    for number in 0..500_u16 {
        let mut given = in_memory(&oracle, "fleet", "alpha");
        let AdapterOrigin::Memory(Some(tensors)) = &mut given.origin else { panic!("it has tensors") };
        let tensors = Arc::get_mut(tensors).expect("nobody else has them");
        let tensor = tensors.tensors.values_mut().next().expect("a tensor");
        tensor.bytes[..4].copy_from_slice(&(1.0 + f32::from(number)).to_le_bytes());
        versions.insert(engine.load_adapter(given).expect("it loads").version);
        if number % 10 == 0 {
            answers(&engine, vec![request(&oracle.prompt("mid"), Some("fleet"), greedy(6))]);
        }
        engine.unload_adapter("fleet", UnloadMode::Drain).expect("unloads");
        memory.push(resident_kilobytes());
    }
    assert_eq!(versions.len(), 500);
    let end = engine.stats().expect("stats");
    assert!(end.adapters.is_empty() && engine.list_adapters().is_empty());
    assert_eq!((end.adapter_bytes, end.free_blocks), (0, start.free_blocks));
    // The first hundred warm up; this test has its process for itself.
    let (early, late) = (memory[100].zip(memory[499])).unwrap_or_default();
    assert!(late <= early + early / 50 + 1024, "{early} kB grew to {late} kB");
}

fn resident_kilobytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse().ok()
}
