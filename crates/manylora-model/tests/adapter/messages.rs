//! What people read when an adapter is refused, word by word.

use manylora_model::adapter::AdapterPolicy;
use manylora_model::{AdapterRefusal, RefusalKind};
use serde_json::json;

use crate::fixtures::{HandMade, load_path, oracle, policy, read_json};

fn line(name: &str, refusal: &AdapterRefusal) -> String {
    let kind = match refusal.kind {
        RefusalKind::NotFound => "not found",
        RefusalKind::Forbidden => "forbidden",
        RefusalKind::Invalid => "invalid",
        RefusalKind::Unavailable => "unavailable",
    };
    let root = oracle().display().to_string();
    format!("{name} ({kind})\n  {}\n  keys {:?}\n", refusal.to_string().replace(&root, "<oracle>"), refusal.keys)
}

#[test]
fn refusals_of_the_malformed_set() {
    let root = oracle().join("malformed");
    let policy = AdapterPolicy { allowed_roots: Some(vec![root.clone()]), ..policy("llama") };
    let manifest = read_json(&root.join("manifest.json"));
    let lines: Vec<String> = manifest["adapters"]
        .as_object()
        .unwrap()
        .keys()
        .filter_map(|name| load_path(&root.join(name), &policy).err().map(|refusal| line(name, &refusal)))
        .collect();
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn refusals_with_the_phrases_of_vllm() {
    let policy = AdapterPolicy { max_rank: 16, ..policy("llama") };
    let mut lines = Vec::new();
    for (key, value, phrase) in [
        ("r", json!(1024), "is greater than max_lora_rank"),
        ("use_dora", json!(true), "does not yet support DoRA"),
        ("modules_to_save", json!(["lm_head"]), "Unsupported modules_to_save"),
        ("rank_pattern", json!({"q_proj": 32}), "LoRA rank 32 is greater than max_lora_rank"),
        ("r", json!(0), "must be a positive integer"),
        ("r", json!(-8), "must be a positive integer"),
        ("lora_bias", json!(true), "does not support LoRA bias"),
        ("init_lora_weights", json!("pissa"), "init_lora_weights='pissa'"),
        ("init_lora_weights", json!("future_init"), "init_lora_weights='future_init'"),
        ("alora_invocation_tokens", json!([1, 2]), "Activated LoRA"),
        ("layer_replication", json!([[0, 2]]), "layer_replication"),
        ("use_bdlora", json!({"a": 1}), "BD-LoRA"),
        ("use_qalora", json!(true), "QALoRA"),
        ("bias", json!("all"), "Adapter bias is not supported"),
        ("target_parameters", json!(["mlp.experts"]), "target_parameters"),
        ("use_rslora", json!("yes"), "must be true or false"),
        ("peft_type", json!("LOHA"), "`peft_type` is 'LOHA'"),
    ] {
        let refusal = HandMade::on_llama(8).with(key, value.clone()).refusal(&policy);
        assert!(refusal.reason.contains(phrase), "{refusal}");
        lines.push(line(&format!("{key}={value}"), &refusal));
    }
    let many = HandMade::on_llama(8).with("use_dora", json!(true)).with("bias", json!("all")).with("r", json!(99));
    lines.push(line("several", &many.refusal(&policy)));
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn the_report_of_an_accepted_adapter() {
    let adapter = load_path(&oracle().join("llama/adapters/embed-head"), &policy("llama")).unwrap();
    let mut report = adapter.report.to_json();
    report["path"] = json!("<oracle>");
    for module in report["modules"].as_object_mut().unwrap().values_mut() {
        let effect = module["effect"].as_f64().unwrap();
        module["effect"] = json!(format!("{effect:.4}"));
    }
    insta::assert_snapshot!(serde_json::to_string_pretty(&report).unwrap());
}
