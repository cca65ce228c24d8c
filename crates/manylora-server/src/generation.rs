//! Requests on their way through the engine: submitted together, read as one stream, aborted when nobody listens.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::stream::{SelectAll, Stream, StreamExt, select_all};
use manylora::{Delta, EngineError, GenerateRequest, Prompt, RequestStream, SamplingParams};

use crate::app::{App, Pending};
use crate::body::Room;
use crate::error::{ApiError, PROMPT, STRUCTURED_OUTPUTS};
use crate::keys::Caller;
use crate::metrics::Account;
use crate::target;

/// Sequences that one request may ask for: what is made for each of them is made before any of them runs.
const MOST_SEQUENCES: usize = 16_384;
/// Bytes of what each of them has for itself: stop strings, biases, and lists of tokens.
const MOST_LIST_BYTES: usize = 64 << 20;

/// Admits the sequences of a request - so many prompts, each with `params` - if one request may ask for that.
pub(crate) fn admit(
    app: &Arc<App>,
    caller: &Caller,
    prompts: usize,
    params: &SamplingParams,
) -> Result<Pending, ApiError> {
    let sequences = prompts.saturating_mul(params.n);
    if sequences > MOST_SEQUENCES {
        return Err(ApiError::bad_request(format!(
            "the request asks for `{sequences}` sequences (prompts times `n`), one may ask for {MOST_SEQUENCES} at most"
        ))
        .about("n"));
    }
    let bytes = params.list_bytes();
    if sequences > 1 && sequences.saturating_mul(bytes) > MOST_LIST_BYTES {
        return Err(ApiError::bad_request(format!(
            "the request asks for `{sequences}` sequences (prompts times `n`), each with `{bytes}` bytes of stop strings, bad \
             words, biases and token ids, and they may have {MOST_LIST_BYTES} together; send fewer prompts at a time"
        ))
        .about("n"));
    }
    app.admit(caller, sequences)
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

/// One HTTP request's prompts in the engine. Dropping it aborts what still runs.
pub(crate) struct Generation {
    app: Arc<App>,
    /// Each prompt as token ids.
    pub(crate) prompts: Vec<Vec<u32>>,
    /// Versions of the adapters that serve it, with commas between them; None for the base.
    pub(crate) version: Option<String>,
    first: Option<(usize, Delta)>,
    rest: SelectAll<Tagged>,
    blame: Blame,
    account: Account,
    _pending: Pending,
}

impl Generation {
    /// Submits requests that were admitted and waits for the first news, so that whatever keeps them from running is told
    /// before any byte of an answer. With `streaming` false each sample arrives whole. `room` is what their body was given.
    pub(crate) async fn start(
        (app, caller, pending): (&Arc<App>, &Caller, Pending),
        requests: Vec<GenerateRequest>,
        room: Room,
        streaming: bool,
        blame: Blame,
    ) -> Result<Self, ApiError> {
        let mut account = Account::open(app, &requests);
        let texts = requests.iter().map(|request| match &request.prompt {
            Prompt::Text { text, .. } => text.len(),
            Prompt::Tokens(_) => 0,
        });
        let permit = app.encoding(texts.sum()).await.inspect_err(|_| account.void())?;
        let caller = caller.clone();
        // All that they have been given goes along: where nobody waits for the end of this any more, it still lasts.
        let work = move |app: &Arc<App>| {
            let submitted = app.engine.submit_all(requests, streaming);
            drop((room, permit));
            match submitted {
                Ok(streams) => Ok((streams, pending)),
                // It went while the request was looked at.
                Err(EngineError::UnknownAdapter { name, .. }) => Err(target::unknown(app, &caller, &name)),
                Err(error) => Err(error.into()),
            }
        };
        let submitted = app.blocking(work).await.map_err(|error| blame.put(app, error));
        let (streams, pending) = submitted.inspect_err(|_| account.void())?;
        account.submitted(streams.iter().map(|stream| stream.prompt_token_ids().len()));
        let prompts = streams.iter().map(|stream| stream.prompt_token_ids().to_vec()).collect();
        let tagged = streams.into_iter().enumerate().map(|(prompt, stream)| Tagged { prompt, stream });
        let rest = select_all(tagged);
        let mut generation =
            Self { app: Arc::clone(app), prompts, version: None, first: None, rest, blame, account, _pending: pending };
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

    /// Waits for all samples; `[prompt][sample]`.
    pub(crate) async fn finish(&mut self, samples: usize) -> Result<Vec<Vec<Delta>>, ApiError> {
        let empty = || (0..samples).map(|index| Delta { index, ..Delta::default() }).collect::<Vec<_>>();
        let mut all: Vec<Vec<Delta>> = self.prompts.iter().map(|_| empty()).collect();
        while let Some(news) = self.next().await {
            let (prompt, delta) = news?;
            let sample = all.get_mut(prompt).and_then(|samples| samples.get_mut(delta.index));
            let Some(sample) = sample else {
                return Err(ApiError::internal("the engine answered for a sample that nobody asked for"));
            };
            sample.append(delta);
        }
        Ok(all)
    }
}
