//! What can be drawn, and how often, against a straightforward sorted reference in float64.

mod one_sampler;

use manylora::sampler::{RandomKey, SamplerScratch, SequenceSampler};
use manylora_core::SamplingParams;
use one_sampler::{sampler, setup};
use proptest::prelude::*;

fn draw(params: &SamplingParams, logits: &[f32], key: RandomKey, count: usize) -> Vec<u32> {
    let mut sampler = SequenceSampler::new(params, setup(logits.len(), key));
    let mut scratch = SamplerScratch::for_vocabulary(logits.len());
    (0..count).map(|_| sampler.sample(logits, &mut scratch).token).collect()
}

/// Probabilities by token id, and how near the closest decision was to going the other way.
fn reference(logits: &[f32], params: &SamplingParams) -> (Vec<(u32, f64)>, f64) {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scaled = |logit: f32| (f64::from(logit) - f64::from(top)) / params.temperature;
    let mut margin = f64::INFINITY;
    let mut tokens: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&logit| scaled(logit))).collect();
    if params.min_p > 0.0 {
        let bound = params.min_p.ln();
        // The most likely token is decided by equality, not by rounding.
        let undecided = tokens.iter().filter(|(_, x)| *x < 0.0).map(|(_, x)| (x - bound).abs());
        margin = undecided.fold(margin, f64::min);
        tokens.retain(|&(_, x)| x >= bound);
    }
    tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if params.top_k > 0 && (params.top_k as usize) < tokens.len() {
        let last = tokens[params.top_k as usize - 1].1;
        tokens.retain(|&(_, x)| x >= last);
    }
    let total: f64 = tokens.iter().map(|(_, x)| x.exp()).sum();
    if params.top_p < 1.0 {
        let mut sum = 0.0;
        let mut kept = tokens.len();
        for (index, (_, x)) in tokens.iter().enumerate() {
            sum += x.exp() / total;
            margin = margin.min((sum - params.top_p).abs());
            if sum >= params.top_p {
                kept = index + 1;
                break;
            }
        }
        tokens.truncate(kept);
    }
    let total: f64 = tokens.iter().map(|(_, x)| x.exp()).sum();
    let mut probabilities: Vec<_> = tokens.into_iter().map(|(token, x)| (token, x.exp() / total)).collect();
    probabilities.sort_by_key(|&(token, _)| token);
    (probabilities, margin)
}

/// Rows with many equal logits, from sharply peaked to flat, shorter and longer than every internal block.
fn rows() -> impl Strategy<Value = Vec<f32>> {
    let sizes = prop_oneof![1_usize..20, 200_usize..900, Just(3001_usize)];
    (sizes, prop_oneof![Just(0.01_f32), Just(0.1), Just(0.5)]).prop_flat_map(|(size, step)| {
        prop::collection::vec((-60_i32..=60).prop_map(move |units| units as f32 * step), size)
    })
}

fn filters() -> impl Strategy<Value = SamplingParams> {
    let temperature = prop_oneof![Just(1.0), 0.05_f64..2.0];
    let top_k = prop_oneof![Just(0_i64), Just(-1), 1_i64..50, 50_i64..4000];
    let top_p = prop_oneof![Just(1.0), 0.001_f64..1.0];
    let min_p = prop_oneof![Just(0.0), 1e-4_f64..1.0];
    (temperature, top_k, top_p, min_p).prop_map(|(temperature, top_k, top_p, min_p)| SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        ..SamplingParams::default()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(384))]

    #[test]
    fn support_and_probabilities_agree_with_the_reference(logits in rows(), params in filters()) {
        let (expected, margin) = reference(&logits, &params);
        prop_assume!(margin > 3e-6);
        let mut scratch = SamplerScratch::for_vocabulary(logits.len());
        let found = sampler(&params, logits.len(), 0).probabilities(&logits, &mut scratch);
        // What is less likely than the smallest normal number cannot be drawn.
        let drawable: Vec<_> = expected.iter().filter(|(_, p)| *p > 1e-37).collect();
        let found: Vec<_> = found.iter().filter(|(_, p)| *p > 1e-37).collect();
        prop_assert_eq!(
            found.iter().map(|(token, _)| *token).collect::<Vec<_>>(),
            drawable.iter().map(|(token, _)| *token).collect::<Vec<_>>()
        );
        for ((_, found), (token, expected)) in found.iter().zip(drawable) {
            prop_assert!((found / expected - 1.0).abs() < 2e-4, "token {}: {} for {}", token, found, expected);
            prop_assert!((found - expected).abs() < 2e-6, "token {}: {} for {}", token, found, expected);
        }
    }

    #[test]
    fn draws_come_from_the_support_and_are_reproducible(
        logits in rows(), params in filters(), seed in any::<i64>(), sample in 0_u32..4,
    ) {
        let mut scratch = SamplerScratch::for_vocabulary(logits.len());
        let support = sampler(&params, logits.len(), 0).probabilities(&logits, &mut scratch);
        let tokens = draw(&params, &logits, RandomKey::of_request(seed, sample), 20);
        for token in &tokens {
            prop_assert!(support.binary_search_by_key(token, |&(token, _)| token).is_ok(), "{} was drawn", token);
        }
        prop_assert_eq!(tokens, draw(&params, &logits, RandomKey::of_request(seed, sample), 20));
    }

    #[test]
    fn hostile_rows_never_panic_and_give_a_token_of_the_vocabulary(
        logits in prop::collection::vec(
            prop_oneof![
                any::<f32>(),
                Just(f32::NAN),
                Just(f32::INFINITY),
                Just(f32::NEG_INFINITY),
                Just(f32::MAX),
                Just(f32::MIN),
                Just(0.0_f32),
            ],
            1..600,
        ),
        params in filters(),
        greedy in any::<bool>(),
        repetition_penalty in prop_oneof![Just(1.0), Just(1e-300), Just(1e300)],
        logprobs in prop_oneof![Just(None), Just(Some(0)), Just(Some(5)), Just(Some(-1))],
    ) {
        let temperature = if greedy { 0.0 } else { params.temperature };
        let params = SamplingParams { temperature, repetition_penalty, logprobs, ..params };
        let mut sampler = sampler(&params, logits.len(), 3);
        let mut scratch = SamplerScratch::default();
        for _ in 0..4 {
            let sampled = sampler.sample(&logits, &mut scratch);
            prop_assert!((sampled.token as usize) < logits.len());
            for entry in sampled.logprobs.iter().flat_map(|it| &it.entries) {
                prop_assert!(!entry.logprob.is_nan() && entry.logprob <= 0.0);
                prop_assert!(entry.rank >= 1 && entry.rank as usize <= logits.len());
            }
        }
    }
}

/// The 0.999 quantile of the chi-square distribution (Wilson and Hilferty's approximation).
fn chi_square_limit(degrees: f64) -> f64 {
    let spread = 2.0 / (9.0 * degrees);
    degrees * (1.0 - spread + 3.09 * spread.sqrt()).powi(3)
}

fn check_frequencies(logits: &[f32], params: &SamplingParams, seed: i64) {
    let draws = 20_000;
    let (expected, _) = reference(logits, params);
    let mut counts = vec![0_u32; logits.len()];
    for token in draw(params, logits, RandomKey::of_request(seed, 0), draws) {
        counts[token as usize] += 1;
    }
    // Rare tokens share one bin, so that every bin expects enough draws.
    let (mut chi_square, mut bins) = (0.0, 0.0);
    let (mut rest_expected, mut rest_count) = (0.0, 0.0);
    for &(token, probability) in &expected {
        let (expected, count) = (probability * draws as f64, f64::from(counts[token as usize]));
        counts[token as usize] = 0;
        if expected < 8.0 {
            rest_expected += expected;
            rest_count += count;
        } else {
            chi_square += (count - expected).powi(2) / expected;
            bins += 1.0;
        }
    }
    assert!(counts.iter().all(|&count| count == 0), "a token outside the support was drawn");
    if rest_expected >= 8.0 {
        chi_square += (rest_count - rest_expected).powi(2) / rest_expected;
        bins += 1.0;
    } else {
        assert!(rest_count < 30.0, "{rest_count} draws of tokens that expect {rest_expected}");
    }
    if bins > 1.0 {
        let limit = chi_square_limit(bins - 1.0);
        assert!(chi_square < limit, "{chi_square} over {limit} with {bins} bins");
    }
}

#[test]
fn frequencies_follow_the_distribution() {
    let small: Vec<f32> = vec![0.3, -1.2, 2.0, 1.9, 0.0, -3.5, 1.0, 0.3];
    let large: Vec<f32> = (0..700_i32).map(|i| ((i * 7919) % 701) as f32 * 0.011 - 4.0).collect();
    let default = SamplingParams::default;
    let table = [
        default(),
        SamplingParams { temperature: 0.6, ..default() },
        SamplingParams { temperature: 1.7, ..default() },
        SamplingParams { top_k: 3, ..default() },
        SamplingParams { top_p: 0.8, ..default() },
        SamplingParams { min_p: 0.3, ..default() },
        SamplingParams { top_k: 6, top_p: 0.93, min_p: 0.05, temperature: 1.3, ..default() },
    ];
    for (seed, params) in (11..).zip(&table) {
        check_frequencies(&small, params, seed);
        check_frequencies(&large, params, seed);
    }
}

#[test]
fn equal_logits_are_drawn_equally() {
    check_frequencies(&[1.5; 300], &SamplingParams::default(), 1);
    check_frequencies(&[-2.0; 50], &SamplingParams { min_p: 1.0, ..SamplingParams::default() }, 2);
}

#[test]
fn filters_by_hand() {
    // Probabilities 0.5, 0.25, 0.125, 0.125.
    let logits = [8.0_f32.ln(), 4.0_f32.ln(), 2.0_f32.ln(), 2.0_f32.ln()];
    let support = |params: SamplingParams| {
        let mut scratch = SamplerScratch::default();
        let probabilities = sampler(&params, 4, 0).probabilities(&logits, &mut scratch);
        probabilities.into_iter().map(|(token, p)| (token, (p * 1e6).round() / 1e6)).collect::<Vec<_>>()
    };
    let default = SamplingParams::default;
    assert_eq!(support(default()), [(0, 0.5), (1, 0.25), (2, 0.125), (3, 0.125)]);
    assert_eq!(support(SamplingParams { top_p: 0.45, ..default() }), [(0, 1.0)]);
    assert_eq!(support(SamplingParams { top_p: 0.7, ..default() }), [(0, 0.666_667), (1, 0.333_333)]);
    assert_eq!(support(SamplingParams { top_p: 0.8, ..default() }), [(0, 0.571_429), (1, 0.285_714), (2, 0.142_857)]);
    assert_eq!(support(SamplingParams { top_k: 1, ..default() }), [(0, 1.0)]);
    assert_eq!(support(SamplingParams { top_k: 3, ..default() }).len(), 4, "ties for the last place stay");
    assert_eq!(support(SamplingParams { min_p: 0.4, ..default() }), [(0, 0.666_667), (1, 0.333_333)]);
    assert_eq!(support(SamplingParams { min_p: 1.0, ..default() }), [(0, 1.0)]);
    // At temperature 1/2 probabilities are squared: 64, 16, 4, 4 of 88; top_p counts after top_k.
    let cold = SamplingParams { temperature: 0.5, ..default() };
    assert_eq!(support(cold.clone()), [(0, 0.727_273), (1, 0.181_818), (2, 0.045_455), (3, 0.045_455)]);
    assert_eq!(support(SamplingParams { top_k: 2, top_p: 0.79, ..cold.clone() }), [(0, 1.0)]);
    assert_eq!(support(SamplingParams { top_p: 0.79, ..cold }), [(0, 0.8), (1, 0.2)]);
}

#[test]
fn the_same_seed_gives_the_same_tokens_whatever_runs_beside() {
    let params = SamplingParams::default();
    let rows: Vec<Vec<f32>> =
        (0..30_u32).map(|step| (0..500_u32).map(|i| ((i * 31 + step * 17) % 97) as f32 * 0.05).collect()).collect();
    let mut scratch = SamplerScratch::for_vocabulary(500);
    let mut alone = sampler(&params, 500, 42);
    let solo: Vec<u32> = rows.iter().map(|row| alone.sample(row, &mut scratch).token).collect();

    let mut batch: Vec<_> = [7, 42, 8].map(|seed| sampler(&params, 500, seed)).into();
    let mut together = Vec::new();
    for (step, row) in rows.iter().enumerate() {
        // Neighbours come before it, after it, and not at all.
        if step % 3 != 0 {
            batch[0].sample(&rows[29 - step], &mut scratch);
        }
        together.push(batch[1].sample(row, &mut scratch).token);
        if step % 2 == 0 {
            batch[2].sample(row, &mut scratch);
        }
    }
    assert_eq!(together, solo);
    assert!(
        draw(&params, &rows[0], RandomKey::of_request(43, 0), 30)
            != draw(&params, &rows[0], RandomKey::of_request(42, 0), 30)
    );
}

#[test]
fn a_draw_depends_on_the_position_and_not_on_how_it_was_reached() {
    let params = SamplingParams::default();
    let row: Vec<f32> = (0..64_u32).map(|i| (i % 7) as f32 * 0.1).collect();
    let mut scratch = SamplerScratch::default();
    let mut sampled = sampler(&params, 64, 5);
    for _ in 0..9 {
        sampled.sample(&row, &mut scratch);
    }
    let mut accepted = sampler(&params, 64, 5);
    for token in 0..9 {
        accepted.accept(token);
    }
    assert_eq!((sampled.output_len(), accepted.output_len()), (9, 9));
    assert_eq!(sampled.sample(&row, &mut scratch), accepted.sample(&row, &mut scratch));
}

#[test]
fn samples_of_one_request_and_requests_of_one_engine_differ() {
    let params = SamplingParams::default();
    let row = vec![0.0_f32; 1000];
    let mut streams: Vec<Vec<u32>> =
        (0..4).map(|sample| draw(&params, &row, RandomKey::of_request(0, sample), 8)).collect();
    for submission in 0..4 {
        streams.push(draw(&params, &row, RandomKey::of_submission(0, submission, 0), 8));
    }
    streams.sort();
    streams.dedup();
    assert_eq!(streams.len(), 8);
}
