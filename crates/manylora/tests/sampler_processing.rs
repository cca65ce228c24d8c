//! Masks, biases and penalties with results computed by hand, and rows that leave nothing to choose.

use std::collections::BTreeMap;

use manylora::sampler::{
    PromptTokens, RandomKey, RowNeed, Sampled, SamplerScratch, SamplerSetup, SequenceSampler, bad_word_sequences,
};
use manylora_core::SamplingParams;
use manylora_core::sampling::LogprobsMode;
use proptest::prelude::*;

struct Context<'a> {
    prompt: &'a [u32],
    end_tokens: &'a [u32],
    bad_words: &'a [Vec<u32>],
}

const NOTHING: Context<'static> = Context { prompt: &[], end_tokens: &[], bad_words: &[] };

fn sampler(params: &SamplingParams, vocab_size: usize, context: &Context<'_>) -> SequenceSampler {
    let &Context { prompt, end_tokens, bad_words } = context;
    let key = RandomKey::of_request(1, 0);
    let prompt = &PromptTokens::new(params, prompt);
    let setup =
        SamplerSetup { prompt, vocab_size, end_tokens, bad_words, key, logprobs_mode: LogprobsMode::RawLogprobs };
    SequenceSampler::new(params, setup)
}

fn greedy() -> SamplingParams {
    SamplingParams::greedy(100)
}

fn tokens(sampler: &mut SequenceSampler, logits: &[f32], count: usize) -> Vec<u32> {
    let mut scratch = SamplerScratch::default();
    (0..count).map(|_| sampler.sample(logits, &mut scratch).token).collect()
}

fn greedy_tokens(params: &SamplingParams, logits: &[f32], context: &Context<'_>, count: usize) -> Vec<u32> {
    tokens(&mut sampler(params, logits.len(), context), logits, count)
}

#[test]
fn greedy_takes_the_lowest_id_of_equal_logits() {
    assert_eq!(greedy_tokens(&greedy(), &[1.0, 3.0, 2.0, 3.0], &NOTHING, 2), [1, 1]);
    assert_eq!(greedy_tokens(&greedy(), &[-0.0, 0.0], &NOTHING, 1), [0]);
}

#[test]
fn only_plain_greedy_does_without_logits() {
    let needs = |params: SamplingParams| sampler(&params, 10, &NOTHING).need() == RowNeed::Row;
    assert_eq!(sampler(&greedy(), 10, &NOTHING).need(), RowNeed::Greedy);
    assert!(needs(SamplingParams { temperature: 0.5, ..greedy() }));
    assert!(needs(SamplingParams { logprobs: Some(0), ..greedy() }));
    assert!(needs(SamplingParams { presence_penalty: 0.1, ..greedy() }));
    assert!(needs(SamplingParams { logit_bias: BTreeMap::from([(1, 1.0)]), ..greedy() }));
    assert!(needs(SamplingParams { allowed_token_ids: Some(vec![1]), ..greedy() }));
    let context = Context { bad_words: &[vec![1, 2]], ..NOTHING };
    assert_eq!(sampler(&greedy(), 10, &context).need(), RowNeed::Row);
}

#[test]
fn min_tokens_holds_end_tokens_back_and_then_lets_them_go() {
    let params = SamplingParams { min_tokens: 3, ..greedy() };
    let context = Context { end_tokens: &[2, 4], ..NOTHING };
    let mut sampler = sampler(&params, 5, &context);
    assert_eq!(sampler.need(), RowNeed::Row);
    assert_eq!(tokens(&mut sampler, &[0.0, 1.0, 9.0, 0.5, 8.0], 5), [1, 1, 1, 2, 2]);
    assert_eq!(sampler.need(), RowNeed::Greedy, "nothing is held back any more");
}

#[test]
fn a_positive_bias_cannot_free_a_masked_token() {
    let params = SamplingParams {
        min_tokens: 1,
        logit_bias: BTreeMap::from([(0, 100.0), (1, 100.0), (2, 100.0)]),
        allowed_token_ids: Some(vec![0, 1, 3]),
        ..greedy()
    };
    let context = Context { end_tokens: &[0], bad_words: &[vec![1]], ..NOTHING };
    assert_eq!(greedy_tokens(&params, &[5.0, 4.0, 3.0, -7.0], &context, 2), [3, 0]);
}

#[test]
fn logit_bias_is_added() {
    let logits = [1.0, 2.0, 3.0];
    let biased = |token, bias| {
        let params = SamplingParams { logit_bias: BTreeMap::from([(token, bias)]), ..greedy() };
        greedy_tokens(&params, &logits, &NOTHING, 1)[0]
    };
    assert_eq!(biased(0, 1.75), 2);
    assert_eq!(biased(0, 2.25), 0);
    assert_eq!(biased(2, -1.5), 1);
    assert_eq!(biased(77, 100.0), 2, "an id outside the vocabulary has no effect");
}

#[test]
fn allowed_tokens_exclude_all_others() {
    let params = SamplingParams { allowed_token_ids: Some(vec![3, 1, 3]), ..greedy() };
    assert_eq!(greedy_tokens(&params, &[9.0, 1.0, 8.0, 2.0], &NOTHING, 1), [3]);
    let random = SamplingParams { temperature: 2.0, ..params };
    let mut drawn = greedy_tokens(&random, &[9.0, 1.0, 8.0, 2.0], &NOTHING, 200);
    drawn.sort_unstable();
    drawn.dedup();
    assert_eq!(drawn, [1, 3]);
}

#[test]
fn a_bad_word_of_one_token_never_comes() {
    let context = Context { bad_words: &[vec![2], vec![0]], ..NOTHING };
    assert_eq!(greedy_tokens(&greedy(), &[8.0, 1.0, 9.0, 2.0], &context, 2), [3, 3]);
}

#[test]
fn a_bad_word_of_several_tokens_is_not_completed() {
    // 2 is always the favourite, then 1, then 0.
    let logits = [1.0, 2.0, 3.0];
    let pair = Context { bad_words: &[vec![2, 2]], ..NOTHING };
    assert_eq!(greedy_tokens(&greedy(), &logits, &pair, 5), [2, 1, 2, 1, 2]);
    let triple = Context { bad_words: &[vec![2, 2, 2]], ..NOTHING };
    assert_eq!(greedy_tokens(&greedy(), &logits, &triple, 6), [2, 2, 1, 2, 2, 1]);
    let both = Context { bad_words: &[vec![2, 2, 2], vec![2, 1]], ..NOTHING };
    assert_eq!(greedy_tokens(&greedy(), &logits, &both, 5), [2, 2, 0, 2, 2]);
    // The prompt does not begin a word.
    let prompt = Context { prompt: &[2], ..pair };
    assert_eq!(greedy_tokens(&greedy(), &logits, &prompt, 2), [2, 1]);
}

#[test]
fn bad_words_stand_at_the_start_and_after_a_space() {
    // One token per character, with " a" as a token of its own (100).
    let encode = |text: &str| -> Vec<u32> {
        match text.strip_prefix(" a") {
            Some(rest) => std::iter::once(100).chain(rest.chars().map(|c| c as u32)).collect(),
            None => text.trim_start().chars().map(|c| c as u32).collect(),
        }
    };
    let words = |words: &[&str]| {
        let words: Vec<String> = words.iter().map(|&word| word.into()).collect();
        bad_word_sequences(&words, encode)
    };
    assert_eq!(words(&["ab"]).expect("valid words"), [vec![97, 98], vec![100, 98]]);
    assert_eq!(words(&["  a", "a"]).expect("valid words"), [vec![97], vec![100]]);
    assert_eq!(words(&["b"]).expect("valid words"), [vec![98]], "the space changes nothing here");
    let refusal = words(&["ab", "  "]).expect_err("a word of spaces").to_string();
    assert_eq!(refusal, "bad_words entries must tokenize to at least one token, got \"  \".");
}

#[test]
fn presence_penalty_counts_a_token_once() {
    // Token 1 leads by 0.5; the penalty is 1 and only of the output.
    let params = SamplingParams { presence_penalty: 1.0, ..greedy() };
    let context = Context { prompt: &[1, 1], ..NOTHING };
    assert_eq!(greedy_tokens(&params, &[2.0, 2.5, 1.7], &context, 4), [1, 0, 2, 1]);
}

#[test]
fn frequency_penalty_counts_every_occurrence() {
    // 3.0 -> 2.0 -> 1.0 for token 0; token 1 stays at 1.5 until it is taken.
    let params = SamplingParams { frequency_penalty: 1.0, ..greedy() };
    assert_eq!(greedy_tokens(&params, &[3.0, 1.5], &NOTHING, 4), [0, 0, 1, 0]);
    let encouraged = SamplingParams { frequency_penalty: -2.0, ..greedy() };
    assert_eq!(greedy_tokens(&encouraged, &[3.0, 1.5], &NOTHING, 4), [0, 0, 0, 0]);
}

#[test]
fn repetition_penalty_counts_prompt_and_output_and_knows_the_sign() {
    let params = SamplingParams { repetition_penalty: 2.0, ..greedy() };
    let context = Context { prompt: &[0], ..NOTHING };
    // 4 / 2 = 2 is behind 3; then 3 / 2 = 1.5 is behind 2.
    assert_eq!(greedy_tokens(&params, &[4.0, 3.0], &context, 2), [1, 0]);
    // -1 * 2 = -2 is behind -1.5.
    assert_eq!(greedy_tokens(&params, &[-1.0, -1.5], &context, 1), [1]);
    let encouraged = SamplingParams { repetition_penalty: 0.5, ..greedy() };
    assert_eq!(greedy_tokens(&encouraged, &[2.0, 3.0], &context, 1), [0]);
}

fn argmax_with_margin(scores: &[f64]) -> (u32, f64) {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    (order[0] as u32, scores[order[0]] - scores[order[1]])
}

proptest! {
    #[test]
    fn penalties_and_biases_agree_with_float64(
        logits in prop::collection::vec(-8.0_f32..8.0, 12),
        prompt in prop::collection::vec(0_u32..12, 0..6),
        presence_penalty in -2.0_f64..2.0,
        frequency_penalty in -2.0_f64..2.0,
        repetition_penalty in prop_oneof![Just(1.0), 0.3_f64..3.0],
        logit_bias in prop::collection::btree_map(0_u32..12, -10.0_f32..10.0, 0..4),
    ) {
        let params = SamplingParams {
            presence_penalty, frequency_penalty, repetition_penalty, logit_bias: logit_bias.clone(), ..greedy()
        };
        let context = Context { prompt: &prompt, ..NOTHING };
        let mut sampler = sampler(&params, 12, &context);
        let mut scratch = SamplerScratch::default();
        let mut output: Vec<u32> = Vec::new();
        for _ in 0..12 {
            let scores: Vec<f64> = (0..12_u32).map(|token| {
                let mut score = f64::from(logits[token as usize]);
                score += logit_bias.get(&token).copied().map_or(0.0, f64::from);
                let count = output.iter().filter(|&&other| other == token).count() as f64;
                if count > 0.0 || prompt.contains(&token) {
                    score = if score > 0.0 { score / repetition_penalty } else { score * repetition_penalty };
                }
                score - frequency_penalty * count - if count > 0.0 { presence_penalty } else { 0.0 }
            }).collect();
            let (expected, margin) = argmax_with_margin(&scores);
            let token = sampler.sample(&logits, &mut scratch).token;
            if margin > 1e-4 {
                prop_assert_eq!(token, expected);
            }
            output.push(token);
        }
    }
}

#[test]
fn nan_never_wins() {
    let row = [f32::NAN, 1.0, f32::NAN, 0.5];
    assert_eq!(greedy_tokens(&greedy(), &row, &NOTHING, 1), [1]);
    let params = [
        SamplingParams::default(),
        SamplingParams { top_k: 3, ..SamplingParams::default() },
        SamplingParams { top_p: 0.99, ..SamplingParams::default() },
        SamplingParams { min_p: 0.01, presence_penalty: 0.1, ..SamplingParams::default() },
    ];
    for params in params {
        let drawn = greedy_tokens(&params, &row, &NOTHING, 100);
        assert!(drawn.iter().all(|token| [1, 3].contains(token)) && drawn.contains(&3), "{params:?}");
    }
}

#[test]
fn infinite_logits_share_the_probability() {
    let row = [f32::INFINITY, 3.0, f32::INFINITY, f32::MAX];
    assert_eq!(greedy_tokens(&greedy(), &row, &NOTHING, 1), [0]);
    let mut scratch = SamplerScratch::default();
    for top_k in [0, 1, 3] {
        let params = SamplingParams { top_k, ..SamplingParams::default() };
        let distribution = sampler(&params, 4, &NOTHING).probabilities(&row, &mut scratch);
        assert_eq!(distribution, [(0, 0.5), (2, 0.5)], "top_k {top_k}");
        let drawn = greedy_tokens(&params, &row, &NOTHING, 100);
        assert!(drawn.contains(&0) && drawn.contains(&2) && !drawn.contains(&1) && !drawn.contains(&3));
    }
}

#[test]
fn a_row_without_a_choice_gives_the_lowest_token_that_no_mask_excludes() {
    let dead = [f32::NEG_INFINITY, f32::NAN, f32::NEG_INFINITY, f32::NAN];
    for temperature in [0.0, 1.0] {
        let first = |params: SamplingParams, context: &Context<'_>| {
            greedy_tokens(&SamplingParams { temperature, ..params }, &dead, context, 1)[0]
        };
        assert_eq!(first(greedy(), &NOTHING), 0);
        let allowed = SamplingParams { allowed_token_ids: Some(vec![3, 2]), ..greedy() };
        assert_eq!(first(allowed.clone(), &NOTHING), 2);
        assert_eq!(first(allowed.clone(), &Context { bad_words: &[vec![2]], ..NOTHING }), 3);
        let held = Context { bad_words: &[vec![0]], end_tokens: &[1], ..NOTHING };
        assert_eq!(first(SamplingParams { min_tokens: 1, ..greedy() }, &held), 2);
        let everything = Context { bad_words: &[vec![2], vec![3]], ..NOTHING };
        assert_eq!(first(allowed, &everything), 2, "all allowed tokens are excluded");
    }
}

#[test]
fn masks_that_exclude_everything_are_answered_the_same_way() {
    let params = SamplingParams { allowed_token_ids: Some(vec![1]), min_tokens: 5, ..greedy() };
    let context = Context { end_tokens: &[1], ..NOTHING };
    assert_eq!(greedy_tokens(&params, &[1.0, 2.0, 3.0], &context, 2), [1, 1]);
}

#[test]
fn processing_leaves_logprobs_alone() {
    let params = SamplingParams {
        logprobs: Some(1),
        logit_bias: BTreeMap::from([(0, 50.0)]),
        temperature: 0.01,
        ..SamplingParams::default()
    };
    let logits = [0.0, 1.0];
    let Sampled { token, logprobs } = sampler(&params, 2, &NOTHING).sample(&logits, &mut SamplerScratch::default());
    assert_eq!(token, 0);
    let entries = logprobs.expect("asked for").entries;
    let total = 1.0 + std::f32::consts::E;
    assert_eq!((entries[0].token, entries[0].rank), (0, 2));
    assert!((entries[0].logprob + total.ln()).abs() < 1e-6);
    assert_eq!((entries[1].token, entries[1].rank), (1, 1));
    assert!((entries[1].logprob - (1.0 - total.ln())).abs() < 1e-6);
}

#[test]
fn an_empty_row_is_no_panic() {
    assert_eq!(greedy_tokens(&SamplingParams::default(), &[], &NOTHING, 1), [0]);
    assert_eq!(greedy_tokens(&greedy(), &[], &NOTHING, 1), [0]);
}
