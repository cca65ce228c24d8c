//! The token chosen from the largest values of a row is the one chosen from the row, whatever the filters, and however much
//! longer than needed the list is.

mod one_sampler;

use manylora::sampler::{RowNeed, SamplerScratch};
use manylora_core::SamplingParams;
use manylora_kernels::{LargestValues, ListedValues};
use one_sampler::sampler;
use proptest::prelude::*;

/// The `k` largest values above minus infinity and what ties with the last, by token.
fn largest(logits: &[f32], k: usize) -> (Vec<f32>, Vec<u32>) {
    let mut order: Vec<u32> =
        (0..logits.len() as u32).filter(|&token| logits[token as usize] > f32::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).expect("no NaN is left"));
    if let Some(&last) = order.get(k - 1) {
        order.retain(|&token| logits[token as usize] >= logits[last as usize]);
    }
    order.sort_unstable();
    (order.iter().map(|&token| logits[token as usize]).collect(), order)
}

/// Rows with many ties, from peaked to flat, and rows of whatever there is.
fn rows() -> impl Strategy<Value = Vec<f32>> {
    let size = || prop_oneof![1_usize..24, 100_usize..900, Just(3001_usize)];
    let step = prop_oneof![Just(0.0_f32), Just(0.003), Just(0.1), Just(0.5)];
    let tied = (size(), step).prop_flat_map(|(size, step)| {
        prop::collection::vec((-60_i32..=60).prop_map(move |units| units as f32 * step), size)
    });
    let hostile = prop_oneof![
        4 => any::<f32>(),
        4 => -3.0_f32..3.0,
        1 => Just(f32::NAN),
        1 => Just(f32::INFINITY),
        8 => Just(f32::NEG_INFINITY),
        1 => Just(0.0_f32),
        1 => Just(-0.0_f32),
    ];
    let masked = prop_oneof![1 => -3.0_f32..3.0, 30 => Just(f32::NEG_INFINITY), 1 => Just(f32::NAN)];
    prop_oneof![
        3 => tied,
        1 => size().prop_flat_map(move |size| prop::collection::vec(hostile.clone(), size)),
        1 => size().prop_flat_map(move |size| prop::collection::vec(masked.clone(), size)),
    ]
}

fn filters() -> impl Strategy<Value = SamplingParams> {
    let temperature = prop_oneof![Just(1.0), 0.05_f64..2.0, Just(1e-4), Just(1e30)];
    let top_k = prop_oneof![1_i64..8, 1_i64..=256];
    let top_p = prop_oneof![Just(1.0), 0.001_f64..1.0, Just(0.8)];
    let min_p = prop_oneof![2 => Just(0.0), 1 => 1e-4_f64..1.0];
    (temperature, top_k, top_p, min_p).prop_map(|(temperature, top_k, top_p, min_p)| SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        ..SamplingParams::default()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn a_list_gives_the_token_of_the_row(
        logits in rows(), params in filters(), seed in any::<i64>(), more in prop_oneof![Just(0_usize), 0_usize..64],
    ) {
        let mut from_row = sampler(&params, logits.len(), seed);
        let mut from_list = from_row.clone();
        let (k, vocab_size) = (params.top_k as usize, logits.len());
        let wanted = if k < vocab_size { RowNeed::Largest(k) } else { RowNeed::Row };
        prop_assert_eq!(from_row.need(), wanted);
        if k >= vocab_size {
            return Ok(());
        }
        let (values, tokens) = largest(&logits, k + more);
        let listed = ListedValues { values: &values, tokens: &tokens };
        let mut scratch = SamplerScratch::for_vocabulary(vocab_size);
        for draw in 0..24 {
            let token = from_row.sample(&logits, &mut scratch).token;
            prop_assert_eq!(from_list.sample_listed(listed, &mut scratch), token, "draw {}", draw);
        }
        prop_assert_eq!(from_list.output_len(), 24);
    }
}

#[test]
fn a_list_is_enough_for_top_k_alone() {
    let need = |params: SamplingParams| sampler(&params, 1000, 0).need();
    let random = SamplingParams { temperature: 0.7, top_k: 20, top_p: 0.8, ..SamplingParams::default() };
    assert_eq!(need(random.clone()), RowNeed::Largest(20));
    assert_eq!(need(SamplingParams { min_p: 0.1, ..random.clone() }), RowNeed::Largest(20));
    assert_eq!(need(SamplingParams { top_k: LargestValues::MOST as i64, ..random.clone() }), RowNeed::Largest(256));
    let whole = [
        SamplingParams { top_k: LargestValues::MOST as i64 + 1, ..random.clone() },
        SamplingParams { top_k: 0, ..random.clone() },
        SamplingParams { top_k: 1000, ..random.clone() },
        SamplingParams { logprobs: Some(0), ..random.clone() },
        SamplingParams { repetition_penalty: 1.1, ..random.clone() },
        SamplingParams { presence_penalty: 0.5, ..random.clone() },
        SamplingParams { allowed_token_ids: Some(vec![1, 2]), ..random.clone() },
        SamplingParams { logit_bias: [(3, 1.0)].into(), ..random.clone() },
    ];
    for params in whole {
        assert_eq!(need(params.clone()), RowNeed::Row, "{params:?}");
    }
    assert_eq!(need(SamplingParams { temperature: 0.0, ..random }), RowNeed::Greedy);
}
