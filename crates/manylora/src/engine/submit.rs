//! From a [`GenerateRequest`] to sequences: everything that can be wrong with a request is found here, on the caller's
//! thread, before anything is queued. What its samples have in common - the prompt, and what penalties need of it - they
//! share: all of them are made before the first one runs.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;

use manylora_core::sampling::{DEFAULT_MAX_N, LogprobCount, SamplingLimits};
use manylora_core::{AdapterUse, NewRequest, RequestId, SamplingParams, SchedulingPolicy};
use manylora_model::tokenizer::{Detokenizer, StopChecker, StopStrings, Tokenizer};

use super::command::Command;
use super::handle::{Logits, Shared};
use super::running::{Capture, RunningSequence, SequenceSetup, StopTokens, TextState};
use crate::error::EngineError;
use crate::registry::Entry;
use crate::request::{AdapterSelection, GenerateRequest, Prompt};
use crate::sampler::{PromptTokens, RandomKey, SamplerSetup, SequenceSampler, bad_word_sequences};
use crate::stream::{RequestStream, channel};
use crate::structure::{Constraint, Grammar};

/// Sampling parameters that were found good.
struct Sampling {
    params: SamplingParams,
    bad_words: Vec<Vec<u32>>,
    stops: Arc<StopStrings>,
    grammar: Option<Arc<Grammar>>,
}

/// A request that was found good.
struct Checked {
    prompt: Arc<[u32]>,
    sampling: Arc<Sampling>,
    adapters: Vec<AdapterUse>,
    holds: Vec<Entry>,
    priority: i64,
    cache_salt: Option<String>,
    tenant: Option<String>,
}

/// Requests of which all was found good that is known before their texts are encoded, their grammars compiled. See
/// [`super::EngineHandle::check_all`].
pub struct CheckedRequests(Vec<(GenerateRequest, Arc<Sampling>)>);

impl std::fmt::Debug for CheckedRequests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("CheckedRequests").field(&self.0.len()).finish()
    }
}

/// Checks what neither encodes a text nor names an adapter. What takes no time comes first: nobody waits for a grammar to be
/// told that the prompt is too long.
pub(crate) fn check_all(shared: &Shared, requests: Vec<GenerateRequest>) -> Result<CheckedRequests, EngineError> {
    for request in &requests {
        check_size(shared, &request.prompt)?;
    }
    // Prompts of one call have the same parameters most of the time, and those may be large.
    let mut last: Option<(Arc<SamplingParams>, Arc<Sampling>)> = None;
    let mut checked = Vec::with_capacity(requests.len());
    for request in requests {
        let known = last.take().filter(|(params, _)| Arc::ptr_eq(params, &request.params));
        let sampling = match known {
            Some((_, sampling)) => sampling,
            None => Arc::new(check_sampling(shared, &request.params)?),
        };
        last = Some((Arc::clone(&request.params), Arc::clone(&sampling)));
        checked.push((request, sampling));
    }
    Ok(CheckedRequests(checked))
}

/// Encodes the prompts that are texts, and checks all of them.
pub(crate) fn encode_all(
    shared: &Shared,
    CheckedRequests(mut requests): CheckedRequests,
) -> Result<CheckedRequests, EngineError> {
    for (request, _) in &mut requests {
        request.prompt =
            Prompt::Tokens(encode(shared, std::mem::replace(&mut request.prompt, Prompt::Tokens(Vec::new())))?);
    }
    Ok(CheckedRequests(requests))
}

pub(crate) fn prompt_logprob_entries(shared: &Shared, CheckedRequests(requests): &CheckedRequests) -> usize {
    let entries = |(request, sampling): &(GenerateRequest, Arc<Sampling>)| {
        let Prompt::Tokens(tokens) = &request.prompt else { return 0 };
        let each = match sampling.params.prompt_logprobs.map(LogprobCount::from_parameter) {
            None => 0,
            Some(LogprobCount::Top(most)) => most.saturating_add(1),
            Some(LogprobCount::All) => shared.spec.vocab_size,
        };
        tokens.len().saturating_mul(each)
    };
    requests.iter().map(entries).fold(0, usize::saturating_add)
}

pub(crate) fn submit(
    shared: &Arc<Shared>,
    CheckedRequests(requests): CheckedRequests,
    streaming: bool,
) -> Result<Vec<RequestStream>, EngineError> {
    let mut names = HashMap::new();
    let check = |(request, sampling)| check(shared, request, sampling, &mut names);
    let checked = requests.into_iter().map(check).collect::<Result<Vec<_>, _>>()?;
    checked.into_iter().map(|request| queue(shared, request, streaming)).collect()
}

pub(crate) fn logits(
    shared: &Arc<Shared>,
    tokens: &[u32],
    adapters: &[AdapterSelection],
) -> Result<Logits, EngineError> {
    let params =
        SamplingParams { temperature: 0.0, max_tokens: Some(1), detokenize: false, ..SamplingParams::default() };
    let mut request = GenerateRequest::tokens(tokens).params(params);
    request.adapters = adapters.to_vec();
    let sampling = Arc::new(check_sampling(shared, &request.params)?);
    let checked = check(shared, request, sampling, &mut HashMap::new())?;
    let (reply, answer) = sync_channel(1);
    let capture = Capture { values: Vec::with_capacity(tokens.len() * shared.spec.vocab_size), reply };
    let key = RandomKey::of_request(0, 0);
    let setup = SequenceSetup {
        index: 0,
        max_tokens: 1,
        sampler: sampler(shared, &checked.sampling, &PromptTokens::NONE, key),
        stop_tokens: stop_tokens(shared, &checked.sampling.params),
        text: None,
        prompt: Arc::clone(&checked.prompt),
        prompt_logprobs: None,
        adapters: Vec::new(),
        stream: None,
        capture: Some(capture),
        streaming: false,
    };
    let id = RequestId(shared.next_request.fetch_add(1, Ordering::Relaxed));
    let request = core_request(shared, &checked, id, true);
    shared.send(Command::Submit(vec![(request, RunningSequence::new(setup))], checked.holds))?;
    let values = answer.recv().unwrap_or_else(|_| Err(shared.stopped_error()))?;
    Ok(Logits { rows: tokens.len(), vocab_size: shared.spec.vocab_size, values })
}

/// What names stand for in requests that are submitted together: the same in all of them.
type Resolved = HashMap<String, Entry>;

fn check_sampling(shared: &Shared, params: &SamplingParams) -> Result<Sampling, EngineError> {
    let limits = SamplingLimits {
        vocab_size: shared.spec.vocab_size,
        max_logprobs: i32::try_from(shared.config.max_logprobs).unwrap_or(i32::MAX),
        max_n: DEFAULT_MAX_N,
    };
    let normalized = params.validate_and_normalize(&limits)?;
    for warning in &normalized.warnings {
        tracing::warn!("{warning}");
    }
    let mut params = normalized.params;
    if shared.tokenizer.is_none() && params.stop.is_empty() {
        // Without a tokenizer there is no text to make; asking for it by default is not an error.
        params.detokenize = false;
    }
    if params.detokenize {
        shared.tokenizer()?;
    }
    let bad_words = if params.bad_words.is_empty() {
        Vec::new()
    } else {
        let tokenizer = shared.tokenizer()?;
        bad_word_sequences(&params.bad_words, |word| tokenizer.encode(word, false).unwrap_or_default())?
    };
    let compile = |outputs| shared.structure.compile(shared.tokenizer()?, outputs);
    let grammar = params.structured_outputs.as_ref().map(compile).transpose()?;
    let stops = Arc::new(StopStrings::new(std::mem::take(&mut params.stop)));
    Ok(Sampling { params, bad_words, stops, grammar })
}

fn check(
    shared: &Shared,
    request: GenerateRequest,
    sampling: Arc<Sampling>,
    names: &mut Resolved,
) -> Result<Checked, EngineError> {
    if request.priority != 0 && shared.config.scheduling_policy != SchedulingPolicy::Priority {
        return Err(EngineError::PriorityWithoutPolicy(request.priority));
    }
    let prompt = encode(shared, request.prompt)?;
    let (adapters, holds) = resolve(shared, &request.adapters, names)?.into_iter().unzip();
    Ok(Checked {
        prompt: prompt.into(),
        sampling,
        adapters,
        holds,
        priority: request.priority,
        cache_salt: request.cache_salt,
        tenant: request.tenant,
    })
}

/// The tokens of a prompt, if it is a good one.
fn encode(shared: &Shared, prompt: Prompt) -> Result<Vec<u32>, EngineError> {
    let tokens = match prompt {
        Prompt::Tokens(tokens) => tokens,
        Prompt::Text { text, add_special_tokens } => shared.tokenizer()?.encode(&text, add_special_tokens)?,
    };
    check_prompt(&tokens, shared.spec.vocab_size, shared.info.max_model_len)?;
    Ok(tokens)
}

/// Refuses what cannot fit, however it is encoded: encoding takes time, and far more memory than the text.
fn check_size(shared: &Shared, prompt: &Prompt) -> Result<(), EngineError> {
    let (tokens, counted) = match prompt {
        Prompt::Tokens(tokens) => (tokens.len(), true),
        Prompt::Text { text, .. } => (shared.tokenizer()?.fewest_tokens(text), false),
    };
    let max_model_len = shared.info.max_model_len;
    if tokens < max_model_len {
        return Ok(());
    }
    Err(EngineError::PromptTooLong { tokens, counted, max_model_len })
}

fn check_prompt(prompt: &[u32], vocab_size: usize, max_model_len: usize) -> Result<(), EngineError> {
    if prompt.is_empty() {
        return Err(EngineError::InvalidArgument(
            "The prompt is empty: give at least one token (a chat template or a BOS token counts).".to_owned(),
        ));
    }
    if let Some(token) = prompt.iter().find(|&&token| token as usize >= vocab_size) {
        return Err(EngineError::InvalidArgument(format!(
            "Token id `{token}` is out of vocabulary: ids go from 0 to {}.",
            vocab_size - 1
        )));
    }
    if prompt.len() >= max_model_len {
        return Err(EngineError::PromptTooLong { tokens: prompt.len(), counted: true, max_model_len });
    }
    Ok(())
}

fn resolve(
    shared: &Shared,
    adapters: &[AdapterSelection],
    names: &mut Resolved,
) -> Result<Vec<(AdapterUse, Entry)>, EngineError> {
    if !adapters.is_empty() && !shared.config.enable_lora {
        return Err(EngineError::InvalidArgument(format!(
            "Got lora_request for `{}` but LoRA is not enabled!",
            adapters[0].name
        )));
    }
    if let Some(most) = shared.info.max_composed.filter(|&most| adapters.len() > most) {
        return Err(EngineError::InvalidArgument(format!(
            "a request names `{}` adapters and can compose up to {most} on {}",
            adapters.len(),
            shared.info.device
        )));
    }
    adapters
        .iter()
        .map(|adapter| {
            if !adapter.scale.is_finite() {
                return Err(EngineError::InvalidArgument(format!(
                    "scale of adapter `{}` must be finite, got `{}`",
                    adapter.name, adapter.scale
                )));
            }
            if !names.contains_key(&adapter.name) {
                names.insert(adapter.name.clone(), shared.registry.resolve(&adapter.name)?);
            }
            let entry = names[&adapter.name].clone();
            Ok((AdapterUse { registration: entry.registration, scale: adapter.scale, first_active: 0 }, entry))
        })
        .collect()
}

fn queue(shared: &Arc<Shared>, request: Checked, streaming: bool) -> Result<RequestStream, EngineError> {
    let submission = shared.next_submission.fetch_add(1, Ordering::Relaxed);
    let params = &request.sampling.params;
    let samples = params.n;
    let first = shared.next_request.fetch_add(samples as u64, Ordering::Relaxed);
    let ids: Vec<RequestId> = (first..first + samples as u64).map(RequestId).collect();
    let abort = {
        let (shared, ids) = (Arc::clone(shared), ids.clone());
        // A send error means that the engine is gone, and the request with it.
        move || drop(shared.send(Command::Abort(ids)))
    };
    let versions = request.holds.iter().map(|entry| (entry.info.name.clone(), entry.info.version)).collect();
    // Where no stop string ends it, nothing depends on the text: whoever reads makes it. Not all at the end, though, where that
    // takes long: the engine does it token by token.
    let is_quick = || streaming || shared.tokenizer.as_ref().is_some_and(Tokenizer::is_bytewise);
    let by_reader = params.detokenize && request.sampling.stops.is_empty() && is_quick();
    let texts = (0..if by_reader { samples } else { 0 }).map(|_| detokenizer(shared, &request).map(Some));
    let texts = texts.collect::<Result<Vec<_>, EngineError>>()?;
    let (sender, stream) = channel(samples, texts, Arc::clone(&request.prompt), versions, abort);
    let repeated = PromptTokens::new(params, &request.prompt);
    let sequences = ids
        .into_iter()
        .enumerate()
        .map(|(index, id)| {
            let key = match params.seed {
                Some(seed) => RandomKey::of_request(seed, index as u32),
                None => RandomKey::of_submission(shared.config.seed, submission, index as u32),
            };
            // Prompt logprobs belong to the prompt: the first sample brings them.
            let prompt_logprobs = params
                .prompt_logprobs
                .filter(|_| index == 0)
                .map(|count| (LogprobCount::from_parameter(count), shared.config.logprobs_mode));
            let core = core_request(shared, &request, id, prompt_logprobs.is_some());
            let setup = SequenceSetup {
                index,
                max_tokens: core.max_tokens,
                sampler: sampler(shared, &request.sampling, &repeated, key),
                stop_tokens: stop_tokens(shared, params),
                text: if by_reader { None } else { text_state(shared, &request)? },
                prompt: Arc::clone(&request.prompt),
                prompt_logprobs,
                adapters: request.adapters.iter().map(|adapter| adapter.registration).collect(),
                stream: Some(sender.clone()),
                capture: None,
                streaming,
            };
            Ok((core, RunningSequence::new(setup)))
        })
        .collect::<Result<Vec<_>, EngineError>>()?;
    shared.send(Command::Submit(sequences, request.holds))?;
    Ok(stream)
}

fn core_request(shared: &Shared, request: &Checked, id: RequestId, all_prompt_logits: bool) -> NewRequest {
    let params = &request.sampling.params;
    let room = shared.info.max_model_len - request.prompt.len();
    NewRequest {
        id,
        prompt: Arc::clone(&request.prompt),
        max_tokens: params.max_tokens.map_or(room, |max| max.min(room)),
        priority: request.priority,
        cache_salt: request.cache_salt.clone(),
        tenant: request.tenant.clone(),
        adapters: request.adapters.clone(),
        read_prefix_cache: !all_prompt_logits && !params.skip_reading_prefix_cache.unwrap_or(false),
        all_prompt_logits,
    }
}

fn sampler(shared: &Shared, sampling: &Sampling, prompt: &PromptTokens, key: RandomKey) -> SequenceSampler {
    let Sampling { params, bad_words, grammar, .. } = sampling;
    let mut end_tokens = shared.end_tokens.clone();
    end_tokens.extend_from_slice(&params.stop_token_ids);
    SequenceSampler::new(
        params,
        SamplerSetup {
            prompt,
            vocab_size: shared.spec.vocab_size,
            end_tokens: &end_tokens,
            bad_words,
            key,
            logprobs_mode: shared.config.logprobs_mode,
        },
    )
    .under(grammar.clone().map(Constraint::new))
}

fn stop_tokens(shared: &Shared, params: &SamplingParams) -> StopTokens {
    // A grammar permits an end token where its text may end, and nowhere else: it is an end under `ignore_eos`, too.
    let ignored = params.ignore_eos && params.structured_outputs.is_none();
    StopTokens {
        end_tokens: if ignored { Vec::new() } else { shared.end_tokens.clone() },
        stop_token_ids: params.stop_token_ids.clone(),
        min_tokens: params.min_tokens,
        include_in_output: params.include_stop_str_in_output,
    }
}

fn text_state(shared: &Shared, request: &Checked) -> Result<Option<TextState>, EngineError> {
    let Sampling { params, stops, .. } = &*request.sampling;
    if !params.detokenize {
        return Ok(None);
    }
    let stops = StopChecker::new(Arc::clone(stops), params.include_stop_str_in_output);
    Ok(Some(TextState { detokenizer: Some(detokenizer(shared, request)?), stops }))
}

fn detokenizer(shared: &Shared, request: &Checked) -> Result<Detokenizer, EngineError> {
    let params = &request.sampling.params;
    let (skip_special, spaces) = (params.skip_special_tokens, params.spaces_between_special_tokens);
    Ok(Detokenizer::after_prompt(shared.tokenizer()?, &request.prompt, skip_special, spaces)?)
}
