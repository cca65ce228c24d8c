//! Logprobs, ranks and their order against float64, for output and prompt tokens alike.

use manylora::sampler::{SamplerScratch, TokenLogprobs, token_logprobs};
use manylora_core::sampling::{LogprobCount, LogprobsMode};
use proptest::prelude::*;

fn logprobs(logits: &[f32], chosen: u32, top: LogprobCount) -> TokenLogprobs {
    token_logprobs(logits, chosen, top, LogprobsMode::RawLogprobs, &mut SamplerScratch::default())
}

fn tokens_and_ranks(found: &TokenLogprobs) -> Vec<(u32, u32)> {
    found.entries.iter().map(|entry| (entry.token, entry.rank)).collect()
}

#[test]
fn the_chosen_token_is_first_and_listed_once() {
    let logits = [1.0, 4.0, 2.0, 3.0];
    assert_eq!(tokens_and_ranks(&logprobs(&logits, 0, LogprobCount::Top(0))), [(0, 4)]);
    assert_eq!(tokens_and_ranks(&logprobs(&logits, 0, LogprobCount::Top(2))), [(0, 4), (1, 1), (3, 2)]);
    assert_eq!(tokens_and_ranks(&logprobs(&logits, 3, LogprobCount::Top(2))), [(3, 2), (1, 1)]);
    assert_eq!(tokens_and_ranks(&logprobs(&logits, 2, LogprobCount::Top(9))), [(2, 3), (1, 1), (3, 2), (0, 4)]);
}

#[test]
fn equal_logits_share_a_rank_and_are_listed_by_id() {
    let logits = [2.0, 5.0, 2.0, 5.0, 2.0, 1.0];
    assert_eq!(tokens_and_ranks(&logprobs(&logits, 5, LogprobCount::Top(3))), [(5, 6), (1, 1), (3, 1), (0, 3)]);
    let all = logprobs(&logits, 4, LogprobCount::All);
    assert_eq!(tokens_and_ranks(&all), [(4, 3), (1, 1), (3, 1), (0, 3), (2, 3), (5, 6)]);
    assert_eq!(logprobs(&[7.0; 400], 399, LogprobCount::Top(2)).entries[1..].iter().map(|e| e.token).max(), Some(1));
}

#[test]
fn raw_logits_are_given_as_they_are() {
    let logits = [0.25, -3.5, 8.0];
    let mut scratch = SamplerScratch::default();
    let found = token_logprobs(&logits, 1, LogprobCount::All, LogprobsMode::RawLogits, &mut scratch);
    let values: Vec<_> = found.entries.iter().map(|entry| (entry.token, entry.logprob)).collect();
    assert_eq!(values, [(1, -3.5), (2, 8.0), (0, 0.25)]);
    assert_eq!(found.chosen(), -3.5);
}

#[test]
fn logprobs_by_hand() {
    let found = logprobs(&[0.0; 4], 2, LogprobCount::Top(1));
    assert!((found.chosen() + 4.0_f32.ln()).abs() < 1e-7);
    assert_eq!(logprobs(&[3.0], 0, LogprobCount::Top(1)).entries[0].logprob.to_bits(), 0.0_f32.to_bits());
}

#[test]
fn rows_with_infinities_and_nan_have_defined_logprobs() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let found = logprobs(&[0.0, -inf, nan, 0.0], 2, LogprobCount::All);
    assert_eq!(tokens_and_ranks(&found), [(2, 3), (0, 1), (3, 1), (1, 3)]);
    assert_eq!((found.chosen(), found.entries[3].logprob), (-inf, -inf));
    assert!((found.entries[1].logprob + 2.0_f32.ln()).abs() < 1e-7);

    let found = logprobs(&[inf, 1.0, inf], 1, LogprobCount::Top(2));
    assert_eq!(tokens_and_ranks(&found), [(1, 3), (0, 1), (2, 1)]);
    assert_eq!(found.chosen(), -inf);
    assert!((found.entries[1].logprob + 2.0_f32.ln()).abs() < 1e-7);

    let found = logprobs(&[nan, -inf], 1, LogprobCount::Top(1));
    assert_eq!(tokens_and_ranks(&found), [(1, 1), (0, 1)]);
    assert!(found.entries.iter().all(|entry| entry.logprob == -inf));
    assert_eq!(logprobs(&[1.0], 9, LogprobCount::Top(0)).chosen(), -inf);
}

proptest! {
    #[test]
    fn logprobs_agree_with_float64(
        units in prop::collection::vec(-200_i32..200, 1..900),
        step in prop_oneof![Just(0.003_f32), Just(0.25)],
        chosen in any::<prop::sample::Index>(),
        count in 0_usize..40,
    ) {
        let logits: Vec<f32> = units.iter().map(|&unit| unit as f32 * step).collect();
        let chosen = chosen.index(logits.len()) as u32;
        let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let expected = |token: u32| f64::from(logits[token as usize]) - total.ln();
        let rank = |token: u32| 1 + logits.iter().filter(|&&other| other > logits[token as usize]).count() as u32;
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));

        for (top, listed) in [(LogprobCount::Top(count), count.min(logits.len())), (LogprobCount::All, logits.len())] {
            let found = logprobs(&logits, chosen, top);
            let mut tokens = vec![chosen];
            tokens.extend(order[..listed].iter().filter(|&&token| token != chosen));
            prop_assert_eq!(found.entries.iter().map(|entry| entry.token).collect::<Vec<_>>(), tokens);
            for entry in &found.entries {
                let expected_logprob = expected(entry.token);
                let tolerance = 3e-7 * expected_logprob.abs().max(1.0);
                prop_assert!((f64::from(entry.logprob) - expected_logprob).abs() < tolerance);
                prop_assert_eq!(entry.rank, rank(entry.token));
            }
        }
    }
}
