//! The engine against what PEFT computes: every base and every adapter of the oracle, in f32, through `Engine::logits`.

mod common;

use common::{NEAR_TIE, Oracle, adapter_path, answers, compare, engine, greedy, load, request};
use manylora::{AdapterSelection, AdapterSource, EngineError};

fn check(base: &str) {
    let oracle = Oracle::open(base);
    let engine = engine(&oracle, |_| {});
    let mut compared = 0;
    for (prompt, expectation) in oracle.expectations(None) {
        let logits = engine.logits(&oracle.prompt(&prompt), &[]).expect("base logits");
        compare(&oracle, &format!("base/{prompt}"), &expectation, &logits);
        compared += 1;
    }
    for (name, entry) in oracle.adapters() {
        let expect = entry["expect"].as_str().unwrap_or_default();
        let loaded = engine.load_adapter(AdapterSource::directory(name.as_str(), adapter_path(&oracle, &name)));
        match (expect, loaded) {
            ("load", Err(error)) => panic!("{base}/{name}: must load: {error}"),
            ("refuse", Ok(_)) => panic!("{base}/{name}: must be refused"),
            ("refuse" | "load_or_refuse", Err(EngineError::AdapterRefused(refusal))) => {
                assert!(!refusal.reason.is_empty(), "{base}/{name}: a refusal has a reason");
                assert!(engine.adapter(&name).is_err(), "{base}/{name}: a refused adapter is not listed");
            }
            (_, Err(error)) => panic!("{base}/{name}: {error}"),
            (_, Ok(_)) => {
                let selection = AdapterSelection { name: name.clone(), scale: 1.0 };
                for (prompt, expectation) in oracle.expectations(Some(&name)) {
                    let tokens = oracle.prompt(&prompt);
                    let logits = engine.logits(&tokens, std::slice::from_ref(&selection)).expect("logits");
                    compare(&oracle, &format!("{name}/{prompt}"), &expectation, &logits);
                    let request = request(&tokens, Some(&name), greedy(16));
                    let answer = answers(&engine, vec![request]).remove(0);
                    compare_greedy(&format!("{base}/{name}/{prompt}"), &expectation, &answer.0);
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 10, "{base}: only {compared} cases");
}

fn compare_greedy(what: &str, expectation: &serde_json::Value, tokens: &[u32]) {
    let wanted = expectation["greedy"].as_array().expect("tokens");
    let margins = expectation["margins"].as_array().expect("margins");
    for (step, (want, margin)) in wanted.iter().zip(margins).enumerate() {
        if margin.as_f64().expect("a number") < NEAR_TIE {
            return;
        }
        assert_eq!(u64::from(tokens[step]), want.as_u64().expect("a token"), "{what} step {step}, margin {margin}");
    }
}

macro_rules! bases {
    ($($name:ident: $folder:literal,)*) => { $(
        #[test]
        fn $name() {
            check($folder);
        }
    )* };
}

bases! {
    llama: "llama",
    llama_tied: "llama-tied",
    llama_odd: "llama-odd",
    llama_deep: "llama-deep",
    llama_rope3: "llama-rope3",
    qwen2: "qwen2",
    qwen2_padded: "qwen2-padded",
    qwen3: "qwen3",
    mistral: "mistral",
}

/// Several adapters on one row: base + each one's delta times its factor, whatever the order of loading.
#[test]
fn composition_sums_the_deltas() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    let mixes = oracle.manifest["composition"]["mixes"].as_object().expect("mixes").clone();
    assert!(mixes.len() >= 4);
    for (key, mix) in &mixes {
        let mut selection = Vec::new();
        for part in mix["parts"].as_array().expect("parts") {
            let name = part[0].as_str().expect("a name");
            load(&engine, &oracle, &[name]);
            selection
                .push(AdapterSelection { name: name.to_owned(), scale: part[1].as_f64().expect("a factor") as f32 });
        }
        for (prompt, expectation) in mix["expect_by_prompt"].as_object().expect("prompts") {
            let logits = engine.logits(&oracle.prompt(prompt), &selection).expect("logits");
            compare(&oracle, &format!("mix:{key}/{prompt}"), expectation, &logits);
        }
    }
}

/// strength 0 is the base exactly, and different strengths give different results.
#[test]
fn a_53_scale_zero_is_the_base() {
    let oracle = Oracle::open("llama");
    let engine = engine(&oracle, |_| {});
    load(&engine, &oracle, &["alpha"]);
    let tokens = oracle.prompt("mid");
    let with = |scale| engine.logits(&tokens, &[AdapterSelection { name: "alpha".into(), scale }]).expect("logits");
    let base = engine.logits(&tokens, &[]).expect("logits");
    assert_eq!(with(0.0), base);
    assert_ne!(with(0.5), base);
    assert_ne!(with(0.5), with(1.0));
}
