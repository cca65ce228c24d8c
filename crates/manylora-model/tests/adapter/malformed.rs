//! Every folder of the oracle's malformed set, with its manifest's expectation.

use std::path::Path;

use manylora_model::RefusalKind;
use manylora_model::adapter::{AdapterPolicy, PreparedAdapter};
use serde_json::Value;

use crate::fixtures::{load, load_path, oracle, policy, read_json};

fn same_content(name: &str, equals: &Value, adapter: &PreparedAdapter) {
    let (base, parent) = equals.as_str().unwrap().split_once('/').unwrap();
    let parent = load(base, parent).unwrap();
    assert_eq!(adapter.digest, parent.digest, "{name}");
    assert_eq!(adapter.sites, parent.sites, "{name}");
}

#[test]
fn every_entry_of_the_manifest() {
    let root = oracle().join("malformed");
    let policy = AdapterPolicy { allowed_roots: Some(vec![root.clone()]), ..policy("llama") };
    let manifest = read_json(&root.join("manifest.json"));
    let entries = manifest["adapters"].as_object().unwrap();
    assert!(entries.len() > 60);
    for (name, entry) in entries {
        assert_eq!(entry["base"], "llama");
        let result = load_path(&root.join(name), &policy);
        match (entry["expect"].as_str().unwrap(), result) {
            ("load" | "refuse_or_equal", Ok(adapter)) => {
                if entry.get("equals").is_some() {
                    same_content(name, &entry["equals"], &adapter);
                }
            }
            ("refuse" | "refuse_or_equal", Err(refusal)) => {
                assert_eq!(&refusal.adapter, name);
                assert!(refusal.reason.len() > 20, "{name}: {refusal}");
                assert_eq!(refusal.report.unwrap()["version"], Value::Null);
            }
            ("load", Err(refusal)) => panic!("{name}: {refusal}"),
            (expect, Ok(adapter)) => panic!("{name}: {expect}, and it was loaded: {:#?}", adapter.report),
            (expect, Err(_)) => panic!("{name}: unknown expectation {expect}"),
        }
    }
    assert!(!Path::new("ORACLE_PICKLE_WAS_EXECUTED").exists());
}

#[test]
fn a_15_prefix_spellings_resolve_to_the_same_adapter() {
    let policy = policy("llama");
    let expected = load("llama", "small").unwrap();
    for name in [
        "prefix-none",
        "prefix-bare-layers",
        "prefix-orig-mod",
        "prefix-orig-mod-outer",
        "prefix-default-suffix",
        "prefix-language-model",
        "prefix-inner-language-model",
    ] {
        let adapter = load_path(&oracle().join("malformed").join(name), &policy).unwrap();
        assert_eq!(adapter.digest, expected.digest, "{name}");
        assert_eq!(adapter.report.matched.len(), 8, "{name}");
        let warned = adapter.report.warnings.len();
        assert_eq!(warned, usize::from(name.contains("language-model")), "{name}: {:?}", adapter.report.warnings);
    }
}

#[test]
fn a_13_values_beyond_float16_are_refused_only_where_float16_is_used() {
    let folder = oracle().join("malformed/fp16-overflow");
    let plain = policy("llama");
    assert!(load_path(&folder, &plain).is_ok());
    let refusal = load_path(&folder, &AdapterPolicy { check_fp16_range: true, ..plain }).unwrap_err();
    assert!(refusal.reason.contains("holds 70000, which is beyond float16's 65504"), "{refusal}");
    assert_eq!(refusal.keys.len(), 1);
}

#[test]
fn a_48_links_may_not_leave_the_root() {
    let root = oracle().join("malformed");
    let confined = AdapterPolicy { allowed_roots: Some(vec![root.clone()]), ..policy("llama") };
    for name in ["link-file-escapes", "link-dir-escapes"] {
        let refusal = load_path(&root.join(name), &confined).unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Forbidden, "{name}: {refusal}");
        // Without a root, a link is a link.
        let free = load_path(&root.join(name), &policy("llama")).unwrap();
        assert_eq!(free.digest, load("llama", "small").unwrap().digest);
    }
    assert!(load_path(&root.join("link-inside"), &confined).is_ok());
}

#[test]
fn a_10_a_tokenizer_with_added_ids_is_refused_and_a_copy_is_not() {
    let root = oracle().join("malformed");
    let refusal = load_path(&root.join("tokenizer-adds-3"), &policy("llama")).unwrap_err();
    assert_eq!(refusal.keys, ["added_tokens.json"]);
    assert!(refusal.reason.contains("token ids up to 290"), "{refusal}");
    assert!(load_path(&root.join("has-tokenizer-copy"), &policy("llama")).unwrap().report.warnings.is_empty());
}

#[test]
fn files_in_memory_load_as_the_folder_does() {
    let folder = oracle().join("llama/adapters/small");
    let [config, tensors] =
        ["adapter_config.json", "adapter_model.safetensors"].map(|file| std::fs::read(folder.join(file)).unwrap());
    let policy = policy("llama");
    let adapter = PreparedAdapter::from_bytes("small", &config, &tensors, &policy).unwrap();
    assert_eq!(adapter.digest, load("llama", "small").unwrap().digest);
    let cut = &tensors[..tensors.len() - 1];
    let refusal = PreparedAdapter::from_bytes("small", &config, cut, &policy).unwrap_err();
    assert!(refusal.reason.contains("file truncated"), "{refusal}");
    assert!(PreparedAdapter::from_bytes("small", b"{", &tensors, &policy).is_err());
}
