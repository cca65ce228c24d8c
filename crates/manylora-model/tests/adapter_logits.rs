//! Every adapter of the oracle that must load equals PEFT; those that may be refused are refused or equal.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

mod harness;

use std::path::Path;
use std::sync::Arc;

use harness::{BASES, Model, NEAR_TIE, Oracle, TOLERANCE, compare, compare_prompt, difference, levels, positions};
use manylora_kernels::StorageType;
use manylora_model::Runner;
use manylora_model::adapter::{AdapterHeader, AdapterPolicy, PreparedAdapter, inspect};
use manylora_model::checkpoint::Checkpoint;

fn policy(folder: &Path, dtype: StorageType) -> AdapterPolicy {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let mut policy = AdapterPolicy::new(checkpoint.spec.clone(), Arc::new(checkpoint));
    policy.max_rank = 512;
    policy.dtype = dtype;
    policy
}

fn prepare(oracle: &Oracle, policy: &AdapterPolicy, name: &str) -> Result<PreparedAdapter, String> {
    let path = oracle.folder.join("adapters").join(name);
    inspect(name, &path, policy).and_then(AdapterHeader::read).map_err(|refusal| refusal.to_string())
}

fn install(model: &mut Model, slot: u32, adapter: &PreparedAdapter) {
    let packer = model.decoder.packer();
    let handle = packer.pack(adapter).unwrap();
    assert_eq!(handle.bytes, packer.bytes(&adapter.sites), "announced and packed bytes differ");
    model.decoder.install(slot, handle);
}

#[test]
fn every_adapter_equals_the_oracle_in_f32_on_every_simd_level() {
    for base in BASES {
        let oracle = Oracle::open(base);
        let policy = policy(&oracle.base_folder(), StorageType::F32);
        let mut models: Vec<Model> =
            levels().into_iter().map(|level| Model::load(&oracle.base_folder(), StorageType::F32, level)).collect();
        let (mut loaded, mut refused) = (0, 0);
        for (name, adapter) in oracle.adapters() {
            let expect = adapter["expect"].as_str().unwrap();
            match prepare(&oracle, &policy, &name) {
                Ok(prepared) => {
                    assert_ne!(expect, "refuse", "{base}/{name} must be refused");
                    loaded += 1;
                    for (model, level) in models.iter_mut().zip(levels()) {
                        install(model, 3, &prepared);
                        let label = format!("{base}/{name} {level}");
                        compare(&oracle, model, &label, Some(&name), &[(3, 1.0)], TOLERANCE, NEAR_TIE);
                        model.decoder.remove(3);
                    }
                }
                Err(reason) => {
                    assert_ne!(expect, "load", "{base}/{name} must load: {reason}");
                    refused += 1;
                }
            }
        }
        println!("{base}: {loaded} loaded, {refused} refused");
        assert!(loaded >= 3, "{base}: only {loaded} adapters loaded");
    }
}

#[test]
fn adapters_in_bf16_stay_within_twice_the_error_that_peft_has() {
    for base in BASES {
        let oracle = Oracle::open(base);
        let policy = policy(&oracle.base_folder(), StorageType::Bf16);
        let prepared = prepare(&oracle, &policy, "alpha").unwrap();
        let error = oracle.half_precision_error("alpha");
        for level in levels() {
            let mut model = Model::load(&oracle.base_folder(), StorageType::Bf16, level);
            install(&mut model, 0, &prepared);
            let label = format!("{base}/alpha {level} bf16");
            compare(&oracle, &mut model, &label, Some("alpha"), &[(0, 1.0)], 2.0 * error, 4.0 * f64::from(error));
        }
    }
}

#[test]
fn unmerged_equals_merged() {
    for base in BASES {
        let oracle = Oracle::open(base);
        let policy = policy(&oracle.base_folder(), StorageType::F32);
        let prepared = prepare(&oracle, &policy, "alpha").unwrap();
        let mut model = Model::load(&oracle.base_folder(), StorageType::F32, levels().pop().unwrap());
        install(&mut model, 0, &prepared);
        let mut compared = 0;
        for (prompt, expectation) in oracle.expectations(Some("alpha")) {
            let Some(want) = oracle.array(&format!("alpha@merged/{prompt}/logits")) else { continue };
            let got = model.logits(&oracle.prompt(&prompt), &positions(&expectation), &[(0, 1.0)], 64);
            let most = difference(&got.concat(), &want);
            assert!(most <= TOLERANCE, "{base} {prompt}: merged and unmerged differ by {most}");
            compared += 1;
        }
        assert!(compared > 0 || oracle.manifest["adapters"]["alpha"]["merged_arrays"].is_null(), "{base}");
    }
}

#[test]
fn composition_equals_the_sum_of_deltas() {
    let oracle = Oracle::open("llama");
    let policy = policy(&oracle.base_folder(), StorageType::F32);
    let mixes = oracle.manifest["composition"]["mixes"].as_object().unwrap().clone();
    assert!(!mixes.is_empty());
    let mut model = Model::load(&oracle.base_folder(), StorageType::F32, levels().pop().unwrap());
    for (mix, description) in &mixes {
        let mut entries = Vec::new();
        for (slot, part) in description["parts"].as_array().unwrap().iter().enumerate() {
            let prepared = prepare(&oracle, &policy, part[0].as_str().unwrap()).unwrap();
            install(&mut model, slot as u32, &prepared);
            let scale = part[1].as_f64().unwrap() as f32;
            // Entries of scale 0 are dropped before a plan is made.
            if scale != 0.0 {
                entries.push((slot as u32, scale));
            }
        }
        for (prompt, expectation) in description["expect_by_prompt"].as_object().unwrap() {
            let key = format!("mix:{mix}/{prompt}");
            let tokens = oracle.prompt(prompt);
            compare_prompt(&oracle, &mut model, mix, &key, &tokens, expectation, &entries, TOLERANCE, NEAR_TIE);
        }
    }
}
