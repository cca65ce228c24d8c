//! The sampling fields of requests: OpenAI's, and what vLLM adds to them.

use manylora::SamplingParams;
use manylora::model::checkpoint::GenerationDefaults;

use crate::error::ApiError;
use crate::fields::Fields;
use crate::structured;

/// Fields that change results and that this server does not have: with a value that says something they are refused.
const REFUSED: [(&str, &str); 14] = [
    ("use_beam_search", "there is no beam search"),
    ("length_penalty", "there is no beam search"),
    ("early_stopping", "there is no beam search"),
    ("suffix", "models here continue a text, they do not fill gaps"),
    ("prompt_embeds", "prompts are text or token ids"),
    ("logprob_token_ids", "logprobs are of the chosen and the most likely tokens"),
    ("kv_transfer_params", "KV blocks stay in this process"),
    ("ec_transfer_params", "models are text-only"),
    ("mm_processor_kwargs", "models are text-only"),
    ("media_io_kwargs", "models are text-only"),
    ("repetition_detection", "use repetition_penalty or frequency_penalty"),
    ("thinking_token_budget", "use max_tokens"),
    ("truncate_prompt_tokens", "shorten the prompt"),
    ("vllm_xargs", "there are no extensions that could read them"),
];

/// What the model's authors chose.
fn defaults(generation: &GenerationDefaults) -> SamplingParams {
    let mut params = SamplingParams { max_tokens: None, ..SamplingParams::default() };
    let wide = |value: Option<f32>, otherwise: f64| value.map_or(otherwise, f64::from);
    params.temperature = wide(generation.temperature, params.temperature);
    params.top_p = wide(generation.top_p, params.top_p);
    params.min_p = wide(generation.min_p, params.min_p);
    params.repetition_penalty = wide(generation.repetition_penalty, params.repetition_penalty);
    params.top_k = generation.top_k.map_or(params.top_k, i64::from);
    if generation.do_sample == Some(false) {
        params.temperature = 0.0;
    }
    params
}

/// Reads all but `max_tokens` and the logprobs, which the endpoints spell differently.
pub(crate) fn read(fields: &mut Fields, generation: Option<&GenerationDefaults>) -> Result<SamplingParams, ApiError> {
    for (name, reason) in REFUSED {
        // Its neutral value.
        if name == "length_penalty" && fields.peek(name).is_some_and(|penalty| penalty.as_f64() == Some(1.0)) {
            continue;
        }
        fields.refuse(name, reason)?;
    }
    let none = GenerationDefaults::default();
    let mut params = defaults(generation.unwrap_or(&none));
    let set = |field: &mut f64, value: Option<f64>| *field = value.unwrap_or(*field);
    set(&mut params.temperature, fields.number("temperature")?);
    set(&mut params.top_p, fields.number("top_p")?);
    set(&mut params.min_p, fields.number("min_p")?);
    set(&mut params.presence_penalty, fields.number("presence_penalty")?);
    set(&mut params.frequency_penalty, fields.number("frequency_penalty")?);
    set(&mut params.repetition_penalty, fields.number("repetition_penalty")?);
    params.top_k = fields.integer("top_k")?.unwrap_or(params.top_k);
    params.n = fields.count("n")?.unwrap_or(1);
    if params.n == 0 {
        return Err(ApiError::bad_request("`n` must be at least 1, got `0`").about("n"));
    }
    if let Some(best_of) = fields.count("best_of")?
        && best_of != params.n
    {
        return Err(ApiError::bad_request(format!(
            "`best_of` is not supported: it is `{best_of}`, and `n` is {}",
            params.n
        ))
        .about("best_of"));
    }
    params.seed = fields.integer("seed")?;
    params.stop = fields.texts("stop")?.unwrap_or_default();
    params.stop_token_ids = fields.tokens("stop_token_ids")?.unwrap_or_default();
    params.bad_words = fields.texts("bad_words")?.unwrap_or_default();
    params.min_tokens = fields.count("min_tokens")?.unwrap_or(0);
    params.logit_bias = fields.by_token("logit_bias")?.unwrap_or_default();
    params.allowed_token_ids = fields.tokens("allowed_token_ids")?;
    let flag = |field: &mut bool, value: Option<bool>| *field = value.unwrap_or(*field);
    flag(&mut params.ignore_eos, fields.flag("ignore_eos")?);
    flag(&mut params.skip_special_tokens, fields.flag("skip_special_tokens")?);
    flag(&mut params.spaces_between_special_tokens, fields.flag("spaces_between_special_tokens")?);
    flag(&mut params.include_stop_str_in_output, fields.flag("include_stop_str_in_output")?);
    params.prompt_logprobs = logprob_count(fields, "prompt_logprobs")?;
    params.structured_outputs = structured::read(fields)?;
    Ok(params)
}

/// A number of logprobs; -1 = the whole vocabulary.
pub(crate) fn logprob_count(fields: &mut Fields, name: &str) -> Result<Option<i32>, ApiError> {
    let Some(count) = fields.integer(name)? else { return Ok(None) };
    i32::try_from(count)
        .ok()
        .filter(|count| *count >= -1)
        .map(Some)
        .ok_or_else(|| ApiError::bad_request(format!("`{name}` must be -1 or more, got `{count}`")).about(name))
}
