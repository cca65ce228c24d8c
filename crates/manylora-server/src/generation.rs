//! Requests on their way through the engine: submitted together, read as one stream, aborted when nobody listens.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::response::Response;
use futures_util::stream::{SelectAll, Stream, StreamExt, select_all};
use manylora::sampler::TokenLogprobs;
use manylora::{AdapterSelection, Delta, EngineError, GenerateRequest, Prompt, RequestStream, SamplingParams};

use crate::answer;
use crate::app::{App, MOST_LISTED, Pending};
use crate::error::{ApiError, PROMPT, STRUCTURED_OUTPUTS};
use crate::keys::Caller;
use crate::metrics::Account;
use crate::room::Room;
use crate::{structured, target};

/// Sequences that one request may ask for: what is made for each of them is made before any of them runs.
const MOST_SEQUENCES: usize = 16_384;
/// Bytes of what they have for themselves: stop strings, biases, lists of tokens, names, and what their answers repeat of
/// the prompt.
const MOST_BYTES: usize = 64 << 20;

/// Bytes of an answer that are written where nobody is served.
pub(crate) const MUCH: usize = 64 << 10;

/// What a request asks for, as far as it may be too much.
#[derive(Debug)]
pub(crate) struct Extent<'a> {
    pub(crate) prompts: usize,
    /// Of each prompt.
    pub(crate) params: &'a SamplingParams,
    /// Of each prompt.
    pub(crate) adapters: &'a [AdapterSelection],
    /// Of each prompt.
    pub(crate) cache_salt: Option<&'a str>,
    /// Bytes of all prompts that the answer of each of their samples repeats.
    pub(crate) repeated: usize,
    /// Bytes of what else the answer needs of the request.
    pub(crate) needed: usize,
}

/// What of a request's body is kept, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    /// Until its sequences wait in the engine, beside the prompts.
    pub(crate) at_first: usize,
    /// Until it is answered.
    pub(crate) to_the_end: usize,
}

/// How many sequences so many prompts are, if one request may ask for that.
pub(crate) fn sequences(prompts: usize, samples: usize) -> Result<usize, ApiError> {
    let sequences = prompts.saturating_mul(samples);
    if sequences <= MOST_SEQUENCES {
        return Ok(sequences);
    }
    Err(ApiError::bad_request(format!(
        "the request asks for `{sequences}` sequences (prompts times `n`), one may ask for {MOST_SEQUENCES} at most"
    ))
    .about("n"))
}

/// Admits the sequences of a request, if one may ask for that; also gives what is kept of the body.
pub(crate) fn admit(app: &Arc<App>, caller: &Caller, extent: &Extent<'_>) -> Result<(Pending, Kept), ApiError> {
    let Extent { prompts, params, adapters, cache_salt, repeated, needed } = *extent;
    let sequences = sequences(prompts, params.n)?;
    let adapters = adapters.iter().map(|adapter| size_of::<AdapterSelection>() + adapter.name.len()).sum::<usize>();
    let each = params.list_bytes() + adapters + cache_salt.map_or(0, str::len);
    let bytes = sequences.saturating_mul(each).saturating_add(params.n.saturating_mul(repeated));
    if sequences > 1 && bytes > MOST_BYTES {
        return Err(ApiError::bad_request(format!(
            "the request asks for `{sequences}` sequences (prompts times `n`); their stop strings, bad words, biases, token ids \
             and names, and what their answers repeat of the prompts, come to `{bytes}` bytes, and may come to {MOST_BYTES}; \
             send fewer prompts at a time"
        ))
        .about("n"));
    }
    let to_the_end = each.saturating_add(repeated).saturating_add(needed);
    let structure = params.structured_outputs.as_ref().map_or(0, structured::bytes);
    Ok((app.admit(caller, sequences)?, Kept { at_first: to_the_end.saturating_add(structure), to_the_end }))
}

/// A request's stream, with the number of its prompt.
struct Tagged {
    prompt: usize,
    stream: RequestStream,
}

impl Stream for Tagged {
    type Item = (usize, Result<Delta, EngineError>);

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let prompt = self.prompt;
        self.stream.poll_next_unpin(context).map(|delta| delta.map(|delta| (prompt, delta)))
    }
}

/// The fields that are to blame when something is wrong with what they say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blame {
    /// Where the prompts are.
    pub(crate) prompt: &'static str,
    /// Where a structure of the outputs is asked for, if it is.
    pub(crate) structure: &'static str,
}

impl Blame {
    /// Names the field in an error of the engine's; a request that is turned away for a while is counted.
    fn put(self, app: &App, error: ApiError) -> ApiError {
        if let Some(reason) = error.rejection() {
            app.metrics.rejections().count(reason);
        }
        error.renamed(PROMPT, self.prompt).renamed(STRUCTURED_OUTPUTS, self.structure)
    }
}

/// What a request was given: a place among those that are answered, and memory, of which so much is kept to the end.
pub(crate) struct Given {
    #[expect(dead_code, reason = "it is held")]
    pub(crate) pending: Pending,
    pub(crate) room: Room,
    pub(crate) to_the_end: usize,
}

/// Submits requests on threads that may wait. All that they have been given goes along: where nobody waits for the end of
/// this any more, it still lasts.
async fn submit(
    (app, caller, mut given): (&Arc<App>, &Caller, Given),
    requests: Vec<GenerateRequest>,
    mut account: Account,
    streaming: bool,
) -> Result<(Vec<RequestStream>, Given, Account), ApiError> {
    let texts = requests.iter().map(|request| match &request.prompt {
        Prompt::Text { text, .. } => text.len(),
        Prompt::Tokens(_) => 0,
    });
    let text_bytes = texts.sum();
    let lists = requests.iter().any(|request| request.params.prompt_logprobs.is_some());
    let caller = caller.clone();
    let queue = move |app: &Arc<App>, requests, mut given: Given| match app.engine.submit_checked(requests, streaming) {
        Ok(streams) => {
            account.submitted(streams.iter().map(|stream| stream.prompt_token_ids().len()));
            given.room.keep(given.to_the_end);
            Ok((streams, given, account))
        }
        // It went while the request was looked at.
        Err(EngineError::UnknownAdapter { name, .. }) => Err(target::unknown(app, &caller, &name)),
        Err(error) => Err(error.into()),
    };
    if !App::is_large_text(text_bytes) && !lists {
        let work = move |app: &Arc<App>| {
            let checked = app.engine.check_all(requests)?;
            queue(app, checked, given)
        };
        return app.blocking(work).await;
    }
    // Nobody who has a large text to encode waits for somebody's grammar.
    let check = move |app: &Arc<App>| Ok((app.engine.check_all(requests)?, given));
    let requests;
    (requests, given) = app.blocking(check).await?;
    let permit = app.encoding(text_bytes).await?;
    let encode = move |app: &Arc<App>| {
        let encoded = app.engine.encode_all(requests)?;
        drop(permit);
        Ok((app.engine.prompt_logprob_entries(&encoded), encoded, given))
    };
    let (entries, encoded);
    (entries, encoded, given) = app.blocking(encode).await?;
    given.room.listed = app.listing(entries).await?;
    app.blocking(move |app| queue(app, encoded, given)).await
}

/// Tokens that logprobs list.
fn listed(logprobs: &[TokenLogprobs]) -> usize {
    logprobs.iter().map(|position| position.entries.len()).sum()
}

/// Bytes, roughly, that an answer has of these news.
pub(crate) fn told_bytes(delta: &Delta) -> usize {
    let entries = listed(&delta.logprobs) + delta.prompt_logprobs.as_deref().map_or(0, listed);
    delta.text.len() + (delta.token_ids.len() + 8 * entries) * size_of::<u64>()
}

/// One HTTP request's prompts in the engine. Dropping it aborts what still runs.
pub(crate) struct Generation {
    app: Arc<App>,
    /// Each prompt as token ids.
    pub(crate) prompts: Vec<Arc<[u32]>>,
    /// Versions of the adapters that serve it, with commas between them; None for the base.
    pub(crate) version: Option<String>,
    first: Option<(usize, Delta)>,
    rest: SelectAll<Tagged>,
    blame: Blame,
    account: Account,
    given: Given,
}

impl Generation {
    /// Submits requests that were admitted and waits for the first news, so that whatever keeps them from running is told
    /// before any byte of an answer. With `streaming` false each sample arrives whole, unless it lists logprobs, which may
    /// become too many. `id` is the answer's.
    pub(crate) async fn start(
        (app, caller, given): (&Arc<App>, &Caller, Given),
        requests: Vec<GenerateRequest>,
        streaming: bool,
        blame: Blame,
        id: &str,
    ) -> Result<Self, ApiError> {
        let account = Account::open(app, &requests, id);
        let streaming = streaming || requests.iter().any(|request| request.params.logprobs.is_some());
        let submitted = submit((app, caller, given), requests, account, streaming).await;
        let (streams, given, account) = submitted.map_err(|error| blame.put(app, error))?;
        let prompts = streams.iter().map(RequestStream::shared_prompt).collect();
        let tagged = streams.into_iter().enumerate().map(|(prompt, stream)| Tagged { prompt, stream });
        let rest = select_all(tagged);
        let mut generation =
            Self { app: Arc::clone(app), prompts, version: None, first: None, rest, blame, account, given };
        generation.first = generation.next().await.transpose()?;
        generation.version = generation.bound_versions();
        generation.account.bound(generation.version.clone());
        Ok(generation)
    }

    /// What serves the prompt that had news first: the same as all others.
    fn bound_versions(&self) -> Option<String> {
        let (prompt, _) = self.first.as_ref()?;
        let first = self.rest.iter().find(|tagged| tagged.prompt == *prompt)?;
        let versions = first.stream.adapter_versions().into_iter().filter_map(|(_, version)| version);
        let versions: Vec<String> = versions.map(|version| version.to_string()).collect();
        (!versions.is_empty()).then(|| versions.join(", "))
    }

    /// News of a sample, with the number of its prompt; None when all have ended.
    pub(crate) async fn next(&mut self) -> Option<Result<(usize, Delta), ApiError>> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        let (prompt, delta) = self.rest.next().await?;
        match &delta {
            Ok(delta) => self.account.see(prompt, delta),
            Err(_) => self.account.fail(prompt),
        }
        Some(delta.map(|delta| (prompt, delta)).map_err(|error| self.blame.put(&self.app, ApiError::from(error))))
    }

    /// The answer that `write` makes of all samples: where nobody is served, if it is long.
    pub(crate) async fn answer(
        self,
        all: Vec<Vec<Delta>>,
        write: impl FnOnce(Vec<Vec<Delta>>) -> String + Send + 'static,
    ) -> Result<Response, ApiError> {
        let Self { app, prompts, given, account, .. } = self;
        let samples = all.iter().map(Vec::len).max().unwrap_or_default();
        let told: usize = all.iter().flatten().map(told_bytes).sum();
        let repeated = prompts.iter().map(|prompt| prompt.len() * size_of::<u64>()).sum::<usize>() * samples;
        let write = move || {
            let text = write(all);
            drop(account);
            (text, given)
        };
        let (text, Given { room, .. }) =
            if told + repeated > MUCH { app.blocking(move |_| Ok(write())).await? } else { write() };
        Ok(answer::json_in(room, text))
    }

    /// Waits for all samples; `[prompt][sample]`.
    pub(crate) async fn finish(&mut self, samples: usize) -> Result<Vec<Vec<Delta>>, ApiError> {
        let empty = || (0..samples).map(|index| Delta { index, ..Delta::default() }).collect::<Vec<_>>();
        let mut all: Vec<Vec<Delta>> = self.prompts.iter().map(|_| empty()).collect();
        let mut entries = 0;
        while let Some(news) = self.next().await {
            let (prompt, delta) = news?;
            entries += listed(&delta.logprobs);
            if entries > MOST_LISTED {
                return Err(ApiError::bad_request(format!(
                    "the logprobs of the answer list more than {MOST_LISTED} tokens; ask for fewer `logprobs` (or `top_logprobs`), \
                     samples or `max_tokens`, or for a stream"
                ))
                .about("logprobs"));
            }
            let sample = all.get_mut(prompt).and_then(|samples| samples.get_mut(delta.index));
            let Some(sample) = sample else {
                return Err(ApiError::internal("the engine answered for a sample that nobody asked for"));
            };
            sample.append(delta);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use axum::Extension;
    use axum::body::Body;
    use axum::extract::State;
    use futures_util::FutureExt;
    use manylora::StructuredOutputs;

    use super::*;
    use crate::app::tests::app;
    use crate::keys::User;
    use crate::metrics::Rejection;

    /// The oracle's base, with a tokenizer of which nothing is known but what it makes of a text: no text is too long for it.
    fn base_without_reach() -> tempfile::TempDir {
        let oracle = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle/llama/base");
        let folder = tempfile::tempdir().expect("a folder");
        for file in std::fs::read_dir(oracle).expect("the oracle") {
            let file = file.expect("a file").path();
            std::fs::copy(&file, folder.path().join(file.file_name().expect("a name"))).expect("a copy");
        }
        let place = folder.path().join("tokenizer.json");
        let text = std::fs::read_to_string(&place).expect("a tokenizer");
        let mut tokenizer: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let before = tokenizer["normalizer"].take();
        let all = [serde_json::json!({"type": "StripAccents"}), before];
        let all: Vec<_> = all.into_iter().filter(|one| !one.is_null()).collect();
        tokenizer["normalizer"] = serde_json::json!({"type": "Sequence", "normalizers": all});
        std::fs::write(place, tokenizer.to_string()).expect("a tokenizer");
        folder
    }

    fn given(pending: Pending) -> Given {
        Given { pending, room: Room::default(), to_the_end: 0 }
    }

    fn request(bytes: usize, regex: &str) -> GenerateRequest {
        let regex = Some(regex.to_owned());
        let structured_outputs = Some(StructuredOutputs { regex, ..StructuredOutputs::default() });
        GenerateRequest::text("x ".repeat(bytes / 2))
            .params(SamplingParams { structured_outputs, ..SamplingParams::default() })
    }

    #[tokio::test]
    async fn who_encodes_a_text_waits_for_nobodys_grammar() {
        let base = base_without_reach();
        let (_engine, app) = app(Some(base.path()));
        let caller = Caller::default();
        let submit = async |request: GenerateRequest| {
            let pending = app.admit(&caller, 1).expect("room");
            let requests = vec![request];
            let account = Account::open(&app, &requests, "x");
            let submitted = submit((&app, &caller, given(pending)), requests, account, false).await;
            submitted.map(drop).map_err(|error| error.to_json()["error"]["message"].to_string())
        };
        // Somebody encodes as much as may be encoded at once.
        let all = app.encoding(usize::MAX).await.expect("a permit");
        let told = submit(request(100_000, "(")).await.expect_err("no regular expression");
        assert!(told.contains("structured_outputs.regex"), "{told}");
        // A small one waits for nothing, and is found too long for it once it is encoded.
        let told = submit(request(2000, "x")).await.expect_err("too many tokens");
        assert!(told.contains("maximum context length"), "{told}");
        let waiting = submit(request(100_000, "x"));
        tokio::pin!(waiting);
        let soon = tokio::time::Duration::from_millis(300);
        assert!(tokio::time::timeout(soon, &mut waiting).await.is_err(), "it was not encoded");
        drop(all);
        let told = waiting.await.expect_err("too many tokens");
        assert!(told.contains("maximum context length"), "{told}");
    }

    /// Whoever waits - for a grammar, for others who encode - holds no room for what is gone.
    #[tokio::test]
    async fn who_waits_has_given_back_what_the_body_took() {
        let base = base_without_reach();
        let (_engine, app) = app(Some(base.path()));
        let (all, _) = app.left();
        let permit = app.encoding(usize::MAX).await.expect("a permit");
        let kind = (axum::http::header::CONTENT_TYPE, axum::http::HeaderValue::from_static("application/json"));
        let headers = || axum::http::HeaderMap::from_iter([kind.clone()]);
        let text = "x ".repeat(50_000);
        let other = vec![0; 300_000];
        let (state, caller) = (|| State(Arc::clone(&app)), || Extension(Caller::default()));
        let body = |mut fields: serde_json::Value| {
            fields["other"] = other.clone().into();
            Body::from(fields.to_string())
        };
        let prompt = body(serde_json::json!({"prompt": &text}));
        let messages = serde_json::json!([{"role": "user", "content": &text, "name": &other}]);
        let tools = serde_json::json!([{"type": "function", "function": {"name": "f", "parameters": {"a": &other}}}]);
        let chat = body(serde_json::json!({"messages": messages, "tools": tools, "tool_choice": "none"}));
        let tokenized = body(serde_json::json!({"messages": messages}));
        let waiting = [
            tokio::spawn(crate::completions::create(state(), caller(), headers(), prompt)),
            tokio::spawn(crate::chat::create(state(), caller(), headers(), chat)),
            tokio::spawn(crate::tokens::tokenize(state(), caller(), headers(), tokenized)),
        ];
        let given_back = async {
            while app.left() != (all, waiting.len()) {
                tokio::task::yield_now().await;
            }
        };
        let in_time = tokio::time::timeout(tokio::time::Duration::from_secs(60), given_back).await;
        assert!(in_time.is_ok() && !waiting.iter().any(tokio::task::JoinHandle::is_finished), "{:?}", app.left());
        drop(permit);
        for answer in waiting {
            drop(answer.await.expect("no panic"));
        }
    }

    /// So much of what prompts' logprobs list is there at once; others wait, and get theirs when it was sent.
    #[tokio::test]
    async fn logprobs_of_prompts_wait_for_room() {
        let (_engine, app) = app(None);
        let too_many = app.listing(MOST_LISTED + 1).await.expect_err("too many").to_json().to_string();
        assert!(too_many.contains("`1048577`") && too_many.contains("prompt_logprobs"), "{too_many}");
        let held = [app.listing(MOST_LISTED).await.expect("room"), app.listing(MOST_LISTED).await.expect("room")];
        // What is left of it: nobody pays for the few that everybody may list.
        let left = app.listing(12 << 10).await.expect("room");
        let caller = Caller::default();
        let ask = async |prompt: usize, prompt_logprobs: i32| {
            let params = SamplingParams {
                max_tokens: Some(1),
                prompt_logprobs: Some(prompt_logprobs),
                ..SamplingParams::default()
            };
            let requests = vec![GenerateRequest::tokens(vec![5; prompt]).params(params)];
            let given = given(app.admit(&caller, 1).expect("a place"));
            let blame = Blame { prompt: "prompt", structure: "response_format" };
            let mut generation = Generation::start((&app, &caller, given), requests, false, blame, "x").await?;
            let all = generation.finish(1).await?;
            let listed = all[0][0].prompt_logprobs.as_deref().map(listed);
            generation.answer(all, move |_| format!("{listed:?}")).await
        };
        // A few are everybody's.
        let answer = ask(100, 20).await.expect("an answer");
        let body = axum::body::to_bytes(answer.into_body(), 1000).await.expect("a body");
        assert!(body.starts_with(b"Some("));
        let waiting = ask(400, 20);
        tokio::pin!(waiting);
        let soon = tokio::time::Duration::from_millis(300);
        assert!(tokio::time::timeout(soon, &mut waiting).await.is_err(), "there is no room");
        drop(held);
        let answer = waiting.await.expect("an answer");
        // It is kept until the answer is gone.
        let rest = app.listing(MOST_LISTED).await.expect("room");
        let last = app.listing(MOST_LISTED);
        tokio::pin!(last);
        assert!(last.as_mut().now_or_never().is_none());
        drop(answer);
        drop((last.await.expect("room"), rest, left));
    }

    #[tokio::test]
    async fn a_48_who_named_what_went_meanwhile_is_told_nothing_of_others() {
        let (engine, app) = app(None);
        let adapter = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle/llama/adapters/beta");
        engine.register_adapter(manylora::AdapterSource::directory("secret", adapter)).expect("a good one");
        let key = r#"{"name": "one", "key": "k", "adapters": ["mine"], "base": false}"#;
        let user = User::named(serde_json::from_str(key).expect("a key"), None).expect("a good key");
        let caller = Caller(Some(Arc::new(user)));
        let requests = vec![GenerateRequest::tokens([5]).adapter("mine")];
        let account = Account::open(&app, &requests, "x");
        let pending = app.admit(&caller, 1).expect("room");
        let submitted = submit((&app, &caller, given(pending)), requests, account, false).await;
        let told = submitted.map(drop).expect_err("it is not there").to_json().to_string();
        assert!(told.contains("The model `mine` does not exist.") && told.contains("404"), "{told}");
        assert!(!told.contains("secret"), "{told}");
    }

    #[tokio::test]
    async fn a_request_that_is_turned_away_for_a_while_is_counted() {
        let (_engine, app) = app(None);
        let blame = Blame { prompt: "prompt", structure: "response_format" };
        let counted = || app.metrics.rejections().series()[Rejection::StructuredOutputs as usize].1;
        let before = counted();
        let error = blame.put(&app, EngineError::Busy("later".to_owned()).into());
        assert!(error.is_unavailable());
        assert_eq!(counted(), before + 1);
        let error = blame.put(&app, EngineError::StructuredOutputs("no".to_owned()).into());
        assert_eq!((counted(), &error.to_json()["error"]["param"]), (before + 1, &"response_format".into()));
    }
}
