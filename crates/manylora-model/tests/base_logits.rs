//! Logits, log-probabilities and greedy tokens of every base of the oracle.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

mod harness;

use harness::{BASES, Model, NEAR_TIE, Oracle, TOLERANCE, compare, levels, positions};
use manylora_kernels::StorageType;

#[test]
fn every_base_equals_the_oracle_in_f32_on_every_simd_level() {
    for base in BASES {
        let oracle = Oracle::open(base);
        for level in levels() {
            let mut model = Model::load(&oracle.base_folder(), StorageType::F32, level);
            let label = format!("{base} {level}");
            let most = compare(&oracle, &mut model, &label, None, &[], TOLERANCE, NEAR_TIE);
            println!("{label}: {most:e}");
        }
    }
}

#[test]
fn every_base_in_bf16_stays_within_twice_the_error_that_peft_has() {
    for base in BASES {
        let oracle = Oracle::open(base);
        let error = oracle.half_precision_error("base");
        for level in levels() {
            let mut model = Model::load(&oracle.base_folder(), StorageType::Bf16, level);
            let label = format!("{base} {level} bf16");
            let most = compare(&oracle, &mut model, &label, None, &[], 2.0 * error, 4.0 * f64::from(error));
            println!("{label}: {most:e} of {error:e}");
        }
    }
}

#[test]
fn a_prompt_far_beyond_the_trained_context_of_llama3_scaling() {
    let oracle = Oracle::open("llama-rope3");
    let expectation = &oracle.manifest["base_expect"]["verylong"];
    let tokens = oracle.prompt("verylong");
    assert!(tokens.len() > 4 * 32, "the prompt has to leave the original context");
    for level in levels() {
        let mut model = Model::load(&oracle.base_folder(), StorageType::F32, level);
        let got = model.logits(&tokens, &positions(expectation), &[], 64);
        let want = oracle.array("base/verylong/logits").unwrap();
        assert!(harness::difference(&got.concat(), &want) <= TOLERANCE);
    }
}

/// P3 on the level of the decoder: chunking and the number of logit rows per call change no bit.
#[test]
fn chunks_and_portions_change_no_bit() {
    for base in ["llama", "mistral", "qwen3"] {
        let oracle = Oracle::open(base);
        for dtype in [StorageType::F32, StorageType::Bf16] {
            let level = levels().pop().unwrap();
            let mut model = Model::load(&oracle.base_folder(), dtype, level);
            let tokens = oracle.prompt("long");
            let all: Vec<usize> = (0..tokens.len()).collect();
            let reference = model.logits(&tokens, &all, &[], tokens.len());
            for chunk in [1, 2, 3, 5, 16, 46] {
                let got = model.logits(&tokens, &all, &[], chunk);
                assert!(got == reference, "{base} {dtype:?}: chunks of {chunk} rows change the result");
            }
            // Only the last row, asked for alone.
            let last = model.logits(&tokens, &[tokens.len() - 1], &[], 16);
            assert!(last[0] == reference[tokens.len() - 1], "{base} {dtype:?}: the last row alone differs");
        }
    }
}
