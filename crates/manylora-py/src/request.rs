//! Conversion of requests and sampling parameters, read by attribute from the package's own classes.

use std::collections::BTreeMap;

use manylora::{AdapterSelection, EngineError, GenerateRequest, Prompt, SamplingParams, StructuredOutputs};
use pyo3::prelude::*;

use crate::errors::IntoPython;

/// `manylora.SamplingParams`, after its own checks.
#[derive(FromPyObject)]
pub(crate) struct Params {
    n: usize,
    presence_penalty: f64,
    frequency_penalty: f64,
    repetition_penalty: f64,
    temperature: f64,
    top_p: f64,
    top_k: i64,
    min_p: f64,
    seed: Option<i64>,
    stop: Vec<String>,
    stop_token_ids: Vec<u32>,
    bad_words: Vec<String>,
    ignore_eos: bool,
    max_tokens: Option<usize>,
    min_tokens: usize,
    logprobs: Option<i32>,
    prompt_logprobs: Option<i32>,
    detokenize: bool,
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool,
    include_stop_str_in_output: bool,
    logit_bias: Option<BTreeMap<u32, f32>>,
    allowed_token_ids: Option<Vec<u32>>,
    skip_reading_prefix_cache: Option<bool>,
    structured_outputs: Option<Structured>,
}

/// `manylora.sampling_params.StructuredOutputsParams`, after its own checks.
#[derive(FromPyObject)]
pub(crate) struct Structured {
    /// The schema as text.
    schema: Option<String>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
    json_object: Option<bool>,
    disable_any_whitespace: bool,
    disable_additional_properties: bool,
    whitespace_pattern: Option<String>,
}

impl From<Structured> for StructuredOutputs {
    fn from(outputs: Structured) -> Self {
        Self {
            json: outputs.schema,
            regex: outputs.regex,
            choice: outputs.choice,
            grammar: outputs.grammar,
            json_object: outputs.json_object,
            disable_any_whitespace: outputs.disable_any_whitespace,
            disable_additional_properties: outputs.disable_additional_properties,
            whitespace_pattern: outputs.whitespace_pattern,
            after: None,
            opening: None,
        }
    }
}

impl From<Params> for SamplingParams {
    fn from(params: Params) -> Self {
        Self {
            n: params.n,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            repetition_penalty: params.repetition_penalty,
            temperature: params.temperature,
            top_p: params.top_p,
            top_k: params.top_k,
            min_p: params.min_p,
            seed: params.seed,
            stop: params.stop,
            stop_token_ids: params.stop_token_ids,
            bad_words: params.bad_words,
            ignore_eos: params.ignore_eos,
            max_tokens: params.max_tokens,
            min_tokens: params.min_tokens,
            logprobs: params.logprobs,
            prompt_logprobs: params.prompt_logprobs,
            detokenize: params.detokenize,
            skip_special_tokens: params.skip_special_tokens,
            spaces_between_special_tokens: params.spaces_between_special_tokens,
            include_stop_str_in_output: params.include_stop_str_in_output,
            logit_bias: params.logit_bias.unwrap_or_default(),
            allowed_token_ids: params.allowed_token_ids,
            skip_reading_prefix_cache: params.skip_reading_prefix_cache,
            structured_outputs: params.structured_outputs.map(Into::into),
        }
    }
}

/// Checks everything that can be checked without a model; returns the temperature that will be used, and a line about
/// each value that was adjusted.
#[pyfunction]
pub(crate) fn check_sampling_params(py: Python<'_>, params: Params) -> PyResult<(f64, Vec<String>)> {
    let normalized = SamplingParams::from(params).normalize().map_err(EngineError::from).into_python(py)?;
    Ok((normalized.params.temperature, normalized.warnings))
}

/// Checks that there is exactly one constraint, which says something.
#[pyfunction]
pub(crate) fn check_structured_outputs(py: Python<'_>, outputs: Structured) -> PyResult<()> {
    let outputs = StructuredOutputs::from(outputs);
    outputs.constraint().map(drop).map_err(EngineError::from).into_python(py)
}

/// `manylora.engine.Request`: exactly one of `text` and `token_ids` is set.
#[derive(FromPyObject)]
pub(crate) struct Request {
    text: Option<String>,
    add_special_tokens: bool,
    token_ids: Option<Vec<u32>>,
    params: Params,
    adapters: Vec<(String, f32)>,
    priority: i64,
    cache_salt: Option<String>,
    tenant: Option<String>,
}

impl From<Request> for GenerateRequest {
    fn from(request: Request) -> Self {
        let prompt = match (request.text, request.token_ids) {
            (Some(text), None) => Prompt::Text { text, add_special_tokens: request.add_special_tokens },
            (_, tokens) => Prompt::Tokens(tokens.unwrap_or_default()),
        };
        Self {
            prompt,
            params: SamplingParams::from(request.params).into(),
            adapters: request.adapters.into_iter().map(|(name, scale)| AdapterSelection { name, scale }).collect(),
            priority: request.priority,
            cache_salt: request.cache_salt,
            tenant: request.tenant,
        }
    }
}
