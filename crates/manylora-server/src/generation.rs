//! Requests on their way through the engine: submitted together, read as one stream, aborted when nobody listens.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::stream::{SelectAll, Stream, StreamExt, select_all};
use manylora::{Delta, EngineError, GenerateRequest, RequestStream};

use crate::app::{App, Pending};
use crate::error::{ApiError, PROMPT, STRUCTURED_OUTPUTS};
use crate::keys::Caller;
use crate::metrics::Account;

/// Sequences that one request may ask for: what is made for each of them is made before any of them runs.
const MOST_SEQUENCES: usize = 16_384;

/// Whether a request asks for more sequences than one may.
pub(crate) fn check_size(sequences: usize) -> Result<(), ApiError> {
    if sequences > MOST_SEQUENCES {
        return Err(ApiError::bad_request(format!(
            "the request asks for `{sequences}` sequences (prompts times `n`), one may ask for {MOST_SEQUENCES} at most"
        ))
        .about("n"));
    }
    Ok(())
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
    /// Submits requests and waits for the first news, so that whatever keeps them from running is told before any byte of
    /// an answer. With `streaming` false each sample arrives whole.
    pub(crate) async fn start(
        (app, caller): (&Arc<App>, &Caller),
        requests: Vec<GenerateRequest>,
        streaming: bool,
        blame: Blame,
    ) -> Result<Self, ApiError> {
        let sequences = requests.iter().fold(0_usize, |sum, request| sum.saturating_add(request.params.n));
        check_size(sequences)?;
        let pending = app.admit(caller, sequences)?;
        let mut account = Account::open(app, &requests);
        let submitted = app.blocking(move |app| app.engine.submit_all(requests, streaming)).await;
        let streams = submitted.map_err(|error| blame.put(app, error)).inspect_err(|_| account.void())?;
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
