//! The real SmolLM2-135M-Instruct GGUF (Q4_1) against the oracle's greedy tokens.
//!
//! The file is found through `MANYLORA_SMOLLM2`, or as `~/.cache/manylora/SmolLM2-135M-Instruct.Q4_1.gguf`; `make test`
//! fetches it. Where the variable is not set and the file is not there, this test says so and passes.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

mod harness;

use std::path::PathBuf;

use harness::{Model, levels, oracle_root};
use manylora_kernels::StorageType;
use manylora_model::checkpoint::Checkpoint;
use serde_json::Value;

fn model_file() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("MANYLORA_SMOLLM2") {
        // A variable that points nowhere is a mistake, not an absent model.
        return Some(PathBuf::from(path));
    }
    assert!(std::env::var_os("MANYLORA_REQUIRE_DATA").is_none(), "MANYLORA_SMOLLM2 is not set");
    None
}

#[test]
fn greedy_tokens_of_the_dequantized_file_equal_the_oracle() {
    let Some(path) = model_file() else {
        println!("the model is not here: set MANYLORA_SMOLLM2 to SmolLM2-135M-Instruct.Q4_1.gguf");
        return;
    };
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!((checkpoint.spec.layers, checkpoint.spec.hidden_size, checkpoint.spec.vocab_size), (30, 576, 49152));
    assert!(checkpoint.spec.tied);
    assert_eq!(checkpoint.generation.eos, [2]);
    let note = checkpoint.quantization.as_ref().unwrap();
    assert_eq!(note.scheme, "GGUF Q4_1");
    let expected = std::fs::read(oracle_root().join("smollm2/expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    let mut model = Model::from_checkpoint(&checkpoint, StorageType::F32, levels().pop().unwrap());
    let mut compared = 0;
    for result in &expected["results"]["base"]["dequant"].as_array().unwrap()[..3] {
        let integers = |value: &Value| -> Vec<u32> {
            value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let prompt = integers(&expected["prompts"][result["prompt"].as_u64().unwrap() as usize]["ids"]);
        let margins = result["margins"].as_array().unwrap();
        let sure = margins.iter().take_while(|margin| margin.as_f64().unwrap() >= 0.05).count();
        let want = integers(&result["tokens"]);
        assert_eq!(model.greedy(&prompt, sure, &[]), want[..sure], "prompt {}", result["prompt"]);
        compared += sure;
    }
    assert!(compared >= 20, "only {compared} tokens were compared");
}
