//! Every refusal with its exact message, every normalization with its result.

use std::collections::BTreeMap;

use super::super::{SamplingLimits, SamplingParams};
use crate::error::CoreError;

fn limits() -> SamplingLimits {
    SamplingLimits::for_vocabulary(100)
}

type Change = fn(&mut SamplingParams);

#[test]
fn refusals_name_the_value_and_the_range() {
    let table: &[(&str, Change, &str)] = &[
        ("n", |p| p.n = 0, "n must be at least 1, got 0."),
        ("n", |p| p.n = 16_385, "n must be at most 16384, got 16385."),
        (
            "n",
            |p| {
                p.n = 2;
                p.temperature = 0.0;
            },
            "n must be 1 when using greedy sampling, got 2.",
        ),
        ("presence_penalty", |p| p.presence_penalty = 2.1, "presence_penalty must be in [-2, 2], got 2.1."),
        ("presence_penalty", |p| p.presence_penalty = f64::NAN, "presence_penalty must be in [-2, 2], got NaN."),
        ("frequency_penalty", |p| p.frequency_penalty = -2.5, "frequency_penalty must be in [-2, 2], got -2.5."),
        (
            "repetition_penalty",
            |p| p.repetition_penalty = f64::INFINITY,
            "repetition_penalty must be a finite number, got inf.",
        ),
        (
            "repetition_penalty",
            |p| p.repetition_penalty = 0.0,
            "repetition_penalty must be greater than zero, got 0.0.",
        ),
        ("temperature", |p| p.temperature = f64::NAN, "temperature must be a finite number, got NaN."),
        ("temperature", |p| p.temperature = -0.5, "temperature must be non-negative, got -0.5."),
        ("temperature", |p| p.temperature = 2.5, "temperature must be in [0, 2], got 2.5."),
        ("top_p", |p| p.top_p = 0.0, "top_p must be in (0, 1], got 0.0."),
        ("top_p", |p| p.top_p = 1.5, "top_p must be in (0, 1], got 1.5."),
        ("top_p", |p| p.top_p = f64::NAN, "top_p must be in (0, 1], got NaN."),
        ("top_k", |p| p.top_k = -2, "top_k must be 0 (disable), or at least 1, got -2."),
        ("min_p", |p| p.min_p = -0.1, "min_p must be in [0, 1], got -0.1."),
        ("min_p", |p| p.min_p = 1.1, "min_p must be in [0, 1], got 1.1."),
        ("max_tokens", |p| p.max_tokens = Some(0), "max_tokens must be at least 1, got 0."),
        ("min_tokens", |p| p.min_tokens = 17, "min_tokens must be less than or equal to max_tokens=16, got 17."),
        ("logprobs", |p| p.logprobs = Some(-2), "logprobs must be non-negative or -1, got -2."),
        ("prompt_logprobs", |p| p.prompt_logprobs = Some(-3), "prompt_logprobs must be non-negative or -1, got -3."),
        (
            "logprobs",
            |p| p.logprobs = Some(21),
            "Requested sample logprobs of 21, which is greater than max allowed: 20. Raise max_logprobs, or set it to \
             -1 for the whole vocabulary.",
        ),
        (
            "logprobs",
            |p| p.logprobs = Some(-1),
            "Requested sample logprobs of 100, which is greater than max allowed: 20. Raise max_logprobs, or set it to \
             -1 for the whole vocabulary.",
        ),
        (
            "prompt_logprobs",
            |p| p.prompt_logprobs = Some(22),
            "Requested prompt logprobs of 22, which is greater than max allowed: 20. Raise max_logprobs, or set it to \
             -1 for the whole vocabulary.",
        ),
        (
            "stop",
            |p| p.stop = vec!["a".into(), String::new()],
            "stop cannot contain an empty string. Got stop=[\"a\", \"\"]",
        ),
        (
            "stop",
            |p| {
                p.stop = vec!["a".into()];
                p.detokenize = false;
            },
            "stop strings are only supported when detokenize is True. Set detokenize=True to use stop=[\"a\"].",
        ),
        (
            "stop",
            |p| p.stop = vec!["a".into(); 1025],
            "stop can have 1024 strings of 32768 bytes in all, got 1025 of 1025.",
        ),
        (
            "stop",
            |p| p.stop = vec!["a".repeat(16_000); 3],
            "stop can have 1024 strings of 32768 bytes in all, got 3 of 48000.",
        ),
        (
            "bad_words",
            |p| p.bad_words = vec!["ab".into(); 4097],
            "bad_words can have 4096 strings of 65536 bytes in all, got 4097 of 8194.",
        ),
        (
            "bad_words",
            |p| p.bad_words = vec![String::new()],
            "bad_words cannot contain an empty string. Got bad_words=[\"\"]",
        ),
        (
            "stop_token_ids",
            |p| p.stop_token_ids = vec![5, 100, 7, 4_000_000_000],
            "token_id(s) [100, 4000000000] in stop_token_ids contain out-of-vocab token ids. Vocabulary size: 100",
        ),
        (
            "logit_bias",
            |p| p.logit_bias = BTreeMap::from([(99, 1.0), (100, 1.0)]),
            "token_id(s) [100] in logit_bias contain out-of-vocab token ids. Vocabulary size: 100",
        ),
        (
            "logit_bias",
            |p| p.logit_bias = BTreeMap::from([(9, f32::NAN)]),
            "logit_bias of token `9` must be a number, got NaN.",
        ),
        (
            "allowed_token_ids",
            |p| p.allowed_token_ids = Some(vec![]),
            "allowed_token_ids is not None and empty! Name at least one token, or leave it out.",
        ),
        (
            "allowed_token_ids",
            |p| p.allowed_token_ids = Some(vec![1, 101]),
            "token_id(s) [101] in allowed_token_ids contain out-of-vocab token ids. Vocabulary size: 100",
        ),
    ];
    for (name, change, expected) in table {
        let mut params = SamplingParams::default();
        change(&mut params);
        let error = params.validate_and_normalize(&limits()).expect_err(expected);
        assert_eq!(&error.to_string(), expected);
        let CoreError::InvalidArgument { parameter, .. } = error else { panic!("wrong kind of error for {name}") };
        assert_eq!(&parameter, name);
    }
}

#[test]
fn values_at_the_ends_of_their_ranges_are_accepted() {
    let table: &[Change] = &[
        |p| p.n = 16_384,
        |p| p.presence_penalty = -2.0,
        |p| p.frequency_penalty = 2.0,
        |p| p.repetition_penalty = 1e-300,
        |p| p.temperature = 2.0,
        |p| p.top_p = 1e-9,
        |p| p.top_k = -1,
        |p| p.top_k = 1_000_000,
        |p| p.min_p = 1.0,
        |p| p.max_tokens = Some(1),
        |p| p.min_tokens = 16,
        |p| p.max_tokens = None,
        |p| p.logprobs = Some(20),
        |p| p.logprobs = Some(0),
        |p| p.prompt_logprobs = Some(20),
        |p| p.stop_token_ids = vec![99],
        |p| p.allowed_token_ids = Some(vec![0]),
    ];
    for (index, change) in table.iter().enumerate() {
        let mut params = SamplingParams::default();
        change(&mut params);
        let normalized = params.validate_and_normalize(&limits());
        assert!(normalized.is_ok_and(|it| it.warnings.is_empty()), "row {index} of the table");
    }
}

#[test]
fn max_logprobs_minus_one_allows_the_whole_vocabulary() {
    let open = SamplingLimits { max_logprobs: -1, ..limits() };
    for count in [-1, 0, 21, 100] {
        let params =
            SamplingParams { logprobs: Some(count), prompt_logprobs: Some(count), ..SamplingParams::default() };
        assert!(params.validate_and_normalize(&open).is_ok(), "{count}");
    }
    let params = SamplingParams { logprobs: Some(101), ..SamplingParams::default() };
    assert!(params.validate_and_normalize(&open).is_err());
}

#[test]
fn a_tiny_temperature_is_raised_with_a_warning() {
    for temperature in [1e-9, 1e-5, 0.009] {
        let params = SamplingParams { temperature, ..SamplingParams::default() };
        let normalized = params.normalize().expect("valid parameters");
        assert_eq!(normalized.params.temperature, 0.01);
        assert_eq!(normalized.warnings.len(), 1);
        assert!(normalized.warnings[0].contains(&format!("`{temperature:?}`")), "{}", normalized.warnings[0]);
    }
    let exact =
        SamplingParams { temperature: 0.01, ..SamplingParams::default() }.normalize().expect("valid parameters");
    assert!(exact.warnings.is_empty());
}

#[test]
fn greedy_switches_the_filters_off() {
    let params = SamplingParams { temperature: 0.0, top_p: 0.5, top_k: 3, min_p: 0.2, ..SamplingParams::default() };
    let normalized = params.normalize().expect("valid parameters").params;
    assert_eq!((normalized.top_p, normalized.top_k, normalized.min_p), (1.0, 0, 0.0));
}

#[test]
fn equal_settings_are_spelled_in_one_way() {
    let params = SamplingParams {
        seed: Some(-1),
        stop_token_ids: vec![7, 3, 7],
        bad_words: vec!["a".into(), "b".into(), "a".into()],
        logit_bias: BTreeMap::from([(1, 1000.0), (2, f32::NEG_INFINITY), (3, 0.5)]),
        ..SamplingParams::default()
    };
    let normalized = params.validate_and_normalize(&limits()).expect("valid parameters");
    assert_eq!(normalized.params.seed, None);
    assert_eq!(normalized.params.stop_token_ids, [7, 3]);
    assert_eq!(normalized.params.bad_words, ["a", "b"]);
    assert_eq!(normalized.params.logit_bias, BTreeMap::from([(1, 100.0), (2, -100.0), (3, 0.5)]));
    let again = normalized.params.validate_and_normalize(&limits()).expect("valid parameters");
    assert_eq!(again, normalized);
}

#[test]
fn prompt_logprobs_need_every_prompt_row_computed() {
    let skip = |prompt_logprobs, skip_reading_prefix_cache| {
        let params = SamplingParams { prompt_logprobs, skip_reading_prefix_cache, ..SamplingParams::default() };
        params.normalize().expect("valid parameters").params.skip_reading_prefix_cache
    };
    assert_eq!(skip(None, None), Some(false));
    assert_eq!(skip(Some(0), None), Some(true));
    assert_eq!(skip(Some(0), Some(false)), Some(true));
    assert_eq!(skip(None, Some(true)), Some(true));
}
