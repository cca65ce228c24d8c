//! [`EngineHandle`]: what callers hold. Validation, tokenizing and name resolution happen here, on their threads.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use manylora_core::{Client, Digest, UnloadMode};
use manylora_kernels::cpu::take_what_is_left;
use manylora_model::ModelSpec;
use manylora_model::adapter::LoadReport;
use manylora_model::chat::{ChatTemplate, RenderOptions};
use manylora_model::tokenizer::Tokenizer;

use super::command::{Command, Order, Reply};
use super::loader::Reader;
use super::meters::LoadFailures;
use super::startup::EngineInfo;
use super::submit::{self, CheckedRequests};
use super::{EngineStats, NamedResident};
use crate::config::EngineConfig;
use crate::error::EngineError;
use crate::registry::{AdapterInfo, AdapterSource, Registry};
use crate::request::{AdapterSelection, GenerateRequest};
use crate::stream::RequestStream;
use crate::structure::Structure;

/// Logits of every position of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    /// Rows: one per token.
    pub rows: usize,
    /// Columns: the model's vocabulary.
    pub vocab_size: usize,
    /// `[rows, vocab_size]`, row-major.
    pub values: Vec<f32>,
}

/// To whom a fair service is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share<'a> {
    /// Requests without an adapter and a tenant.
    Base,
    /// Requests whose first adapter has this name, and that name no tenant.
    Adapter(&'a str),
    /// Requests of this tenant.
    Tenant(&'a str),
}

pub(crate) struct Shared {
    pub(crate) config: EngineConfig,
    pub(crate) info: EngineInfo,
    pub(crate) spec: ModelSpec,
    pub(crate) end_tokens: Vec<u32>,
    pub(crate) tokenizer: Option<Tokenizer>,
    pub(crate) chat_template: Option<ChatTemplate>,
    pub(crate) structure: Structure,
    pub(crate) registry: Arc<Registry>,
    /// Until the engine thread ends: it holds on to the device.
    pub(crate) reader: Arc<Mutex<Option<Reader>>>,
    pub(crate) failures: Arc<LoadFailures>,
    pub(crate) next_request: AtomicU64,
    pub(crate) next_submission: AtomicU64,
    pub(crate) commands: Sender<Command>,
    /// Why the engine thread ended, once it has.
    pub(crate) stopped: Arc<OnceLock<String>>,
}

/// A handle to a running engine: `Clone + Send + Sync`.
#[derive(Clone)]
pub struct EngineHandle {
    pub(crate) shared: Arc<Shared>,
}

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineHandle").field("model", &self.shared.config.model).finish_non_exhaustive()
    }
}

impl EngineHandle {
    /// What was decided at start: sizes, bytes, dtype, context.
    pub fn info(&self) -> &EngineInfo {
        &self.shared.info
    }

    /// What it was told at start.
    pub fn config(&self) -> &EngineConfig {
        &self.shared.config
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> Result<&Tokenizer, EngineError> {
        self.shared.tokenizer()
    }

    /// The model's chat template.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.shared.chat_template.as_ref()
    }

    /// Renders chat messages to the text of a prompt, with the model's template or with another one.
    pub fn render_chat(
        &self,
        messages: &serde_json::Value,
        template: Option<&str>,
        options: &RenderOptions,
    ) -> Result<String, EngineError> {
        let rendered = match (template, &self.shared.chat_template) {
            (Some(text), _) => ChatTemplate::from_text(text, self.tokenizer()?)?.render(messages, options)?,
            (None, Some(template)) => template.render(messages, options)?,
            (None, None) => return Err(ChatTemplate::missing().into()),
        };
        Ok(rendered)
    }

    /// Reads, validates, packs and registers an adapter. When this returns, requests can name it. The same content under
    /// the same name is a no-op; other content is an error unless `replace` is set. Several calls for one folder at once
    /// are one read.
    #[expect(clippy::needless_pass_by_value, reason = "callers build a source on the spot")]
    pub fn load_adapter(&self, source: AdapterSource) -> Result<AdapterInfo, EngineError> {
        let order = self.inspect(&source)?;
        self.shelve(order)
    }

    /// Lets the name of `source` stand for its content from now on, if it stands for version `expected` now (None =
    /// whatever it stands for). Requests that run, or were submitted before this returns, finish on the version that the
    /// name stood for then; if anything is wrong with the new content, nothing changes.
    pub fn replace_adapter(&self, source: AdapterSource, expected: Option<Digest>) -> Result<AdapterInfo, EngineError> {
        let order = self.inspect(&AdapterSource { replace: true, ..source })?;
        self.shelve(Order { expected, ..order })
    }

    /// Registers an adapter by its configuration and tensor header: nothing else is read before a request asks for it. One
    /// that is given in memory is loaded at once.
    #[expect(clippy::needless_pass_by_value, reason = "callers build a source on the spot")]
    pub fn register_adapter(&self, source: AdapterSource) -> Result<AdapterInfo, EngineError> {
        let order = self.inspect(&source)?;
        self.shelve(Order { lazy: order.read.is_none(), ..order })
    }

    /// As [`Self::register_adapter`] for many adapters at once: a result for each, in order. One that is refused does not
    /// keep the others out.
    pub fn register_adapters(&self, sources: &[AdapterSource]) -> Vec<Result<AdapterInfo, EngineError>> {
        let threads = self.shared.reader_threads().min(sources.len()).max(1);
        let share = sources.len().div_ceil(threads).max(1);
        let inspected: Vec<Result<Order, EngineError>> = std::thread::scope(|scope| {
            let inspect = |share: &[AdapterSource]| share.iter().map(|one| self.inspect(one)).collect::<Vec<_>>();
            let shares: Vec<_> =
                sources.chunks(share).map(|share| (share, scope.spawn(move || inspect(share)))).collect();
            let failed = |source: &AdapterSource| {
                let message = "looking at its files failed unexpectedly; please report this with them".to_owned();
                Err(EngineError::AdapterOperation { name: source.name.clone(), message })
            };
            let join = |(share, thread): (&[AdapterSource], std::thread::ScopedJoinHandle<'_, Vec<_>>)| {
                thread.join().unwrap_or_else(|_| share.iter().map(failed).collect())
            };
            shares.into_iter().flat_map(join).collect()
        });
        let mut orders = Vec::with_capacity(inspected.len());
        let mut answers = Vec::with_capacity(inspected.len());
        for order in inspected {
            answers.push(order.map(|order| {
                let (reply, answer) = sync_channel(1);
                orders.push(Order { lazy: order.read.is_none(), replies: vec![reply], ..order });
                answer
            }));
        }
        if let Err(error) = self.send(Command::Shelve(orders)) {
            return answers.iter().map(|_| Err(error.for_another())).collect();
        }
        let wait = |answer: Receiver<Result<_, _>>| answer.recv().unwrap_or_else(|_| Err(self.shared.stopped_error()));
        answers.into_iter().map(|answer| answer.and_then(wait)).collect()
    }

    /// What can be said of an adapter before it is read.
    fn inspect(&self, source: &AdapterSource) -> Result<Order, EngineError> {
        if !self.shared.config.enable_lora {
            return Err(EngineError::InvalidArgument(format!(
                "adapter `{}` cannot be loaded: LoRA is not enabled; start the engine with enable_lora",
                source.name
            )));
        }
        if source.name.trim().is_empty() || source.name.chars().any(char::is_control) {
            return Err(EngineError::InvalidArgument(format!(
                "adapter name {:?} is blank or has control characters; give a printable name",
                source.name
            )));
        }
        self.shared.reader()?.inspect(source)
    }

    fn shelve(&self, mut order: Order) -> Result<AdapterInfo, EngineError> {
        self.call(|reply| {
            order.replies.push(reply);
            Command::Shelve(vec![order])
        })
    }

    /// Takes an adapter off the shelf: `Drain` waits for the requests that hold it, `Abort` ends them. New requests are
    /// refused from the start.
    pub fn unload_adapter(&self, name: &str, mode: UnloadMode) -> Result<(), EngineError> {
        self.call(|reply| Command::Unload { name: name.to_owned(), mode, reply })
    }

    /// As [`Self::unload_adapter`], but waits no longer than `timeout`: the error then says how many requests still hold
    /// the adapter. It goes on leaving the shelf as they end; calling this again waits again, and can abort them.
    pub fn unload_adapter_within(&self, name: &str, mode: UnloadMode, timeout: Duration) -> Result<(), EngineError> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Unload { name: name.to_owned(), mode, reply })?;
        match answer.recv_timeout(timeout) {
            Ok(result) => result,
            Err(RecvTimeoutError::Disconnected) => Err(self.shared.stopped_error()),
            Err(RecvTimeoutError::Timeout) => Err(EngineError::UnloadTimeout {
                name: name.to_owned(),
                seconds: timeout.as_secs_f64(),
                requests: self.call(|reply| Command::Holders { name: name.to_owned(), reply })?,
            }),
        }
    }

    /// Keeps an adapter resident until it is unpinned or unloaded.
    pub fn pin_adapter(&self, name: &str) -> Result<(), EngineError> {
        self.call(|reply| Command::Pin { name: name.to_owned(), pinned: true, reply })
    }

    /// Allows an adapter to be evicted again.
    pub fn unpin_adapter(&self, name: &str) -> Result<(), EngineError> {
        self.call(|reply| Command::Pin { name: name.to_owned(), pinned: false, reply })
    }

    /// Gives the requests of a tenant, of an adapter, or of the base more (above 1) or less of a fair service from now on.
    pub fn set_weight(&self, share: Share<'_>, weight: f64) -> Result<(), EngineError> {
        if !(weight.is_finite() && weight > 0.0) {
            return Err(EngineError::InvalidArgument(format!("a weight must be positive and finite, got `{weight}`")));
        }
        let client = match share {
            Share::Base => Client::Base,
            Share::Adapter(name) => Client::Adapter(self.shared.registry.resolve(name)?.registration),
            Share::Tenant(tenant) => Client::Tenant(tenant.to_owned()),
        };
        self.send(Command::SetWeight(client, weight))
    }

    /// The registered adapters, by name.
    pub fn list_adapters(&self) -> Vec<AdapterInfo> {
        self.shared.registry.list()
    }

    /// One registered adapter.
    pub fn adapter(&self, name: &str) -> Result<AdapterInfo, EngineError> {
        self.shared.registry.resolve(name).map(|entry| entry.info)
    }

    /// The adapter that an integer id leads to.
    pub fn adapter_of_id(&self, id: u64) -> Option<AdapterInfo> {
        let name = self.shared.registry.name_of_id(id)?;
        self.shared.registry.get(&name).map(|entry| entry.info)
    }

    /// The load report of a registered adapter.
    pub fn load_report(&self, name: &str) -> Result<Arc<LoadReport>, EngineError> {
        self.adapter(name).map(|info| info.report)
    }

    /// Validates a request and queues it. The stream brings its deltas; dropping the stream aborts the request.
    pub fn submit(&self, request: GenerateRequest) -> Result<RequestStream, EngineError> {
        self.submit_all(vec![request], true)?.pop().ok_or_else(|| EngineError::Stopped("a request was lost".to_owned()))
    }

    /// Validates all requests, then queues them in order: either all are queued or none. With `stream` false each sample
    /// arrives as one delta when it has finished.
    pub fn submit_all(&self, requests: Vec<GenerateRequest>, stream: bool) -> Result<Vec<RequestStream>, EngineError> {
        self.submit_checked(self.check_all(requests)?, stream)
    }

    /// The first half of [`Self::submit_all`]: checks requests as far as no text must be encoded for it, and waits for their
    /// grammars. Who encodes few texts at a time takes the next one between the halves, so that none of them waits for
    /// somebody's grammar.
    pub fn check_all(&self, requests: Vec<GenerateRequest>) -> Result<CheckedRequests, EngineError> {
        submit::check_all(&self.shared, requests)
    }

    /// Encodes the texts of checked requests, which [`Self::submit_checked`] else does: who wants to know more of the prompts
    /// before they are queued looks at them between.
    pub fn encode_all(&self, requests: CheckedRequests) -> Result<CheckedRequests, EngineError> {
        submit::encode_all(&self.shared, requests)
    }

    /// How many tokens the logprobs of these requests' prompts list, position by position: what their results may take of
    /// memory, and an answer that tells them. Prompts that were not encoded are not counted.
    pub fn prompt_logprob_entries(&self, requests: &CheckedRequests) -> usize {
        submit::prompt_logprob_entries(&self.shared, requests)
    }

    /// The second half of [`Self::submit_all`]: encodes texts, looks for adapters by their names, and queues.
    pub fn submit_checked(&self, requests: CheckedRequests, stream: bool) -> Result<Vec<RequestStream>, EngineError> {
        submit::submit(&self.shared, requests, stream)
    }

    /// Logits of every position of `tokens`, under the given adapters: one prefill, nothing generated.
    pub fn logits(&self, tokens: &[u32], adapters: &[AdapterSelection]) -> Result<Logits, EngineError> {
        submit::logits(&self.shared, tokens, adapters)
    }

    /// Makes what structured outputs need of the vocabulary, which takes seconds for a large one, on a thread that takes what
    /// others leave of the processors. Without this, or before it is done, the first request with one does so.
    pub fn prepare_structured_outputs(&self) {
        let shared = Arc::clone(&self.shared);
        let prepare = move || {
            take_what_is_left();
            if let Some(tokenizer) = &shared.tokenizer {
                shared.structure.prepare(tokenizer);
            }
        };
        if let Err(error) = Builder::new().name("manylora-vocabulary".to_owned()).spawn(prepare) {
            tracing::warn!("structured outputs are not prepared for, no thread could be started: {error}");
        }
    }

    /// Whether the engine runs, and why not; waits for nothing.
    pub fn check_health(&self) -> Result<(), EngineError> {
        if self.shared.stopped.get().is_some() { Err(self.shared.stopped_error()) } else { Ok(()) }
    }

    /// Counters and levels.
    pub fn stats(&self) -> Result<EngineStats, EngineError> {
        let mut stats = self.call(Command::Stats)?;
        stats.load_failures = self.shared.failures.counts();
        stats.registered = self.shared.registry.len();
        stats.residents = self.residents(&stats);
        stats.sort_names();
        Ok(stats)
    }

    /// The resident versions, with the names that lead to them.
    fn residents(&self, stats: &EngineStats) -> Vec<NamedResident> {
        let mut place = HashMap::new();
        let mut residents: Vec<NamedResident> = Vec::with_capacity(stats.core.adapters.len());
        for resident in &stats.core.adapters {
            place.insert(resident.digest, residents.len());
            residents.push(NamedResident {
                names: Vec::new(),
                version: resident.digest,
                bytes: resident.bytes,
                pinned: resident.pinned,
                rank: 0,
            });
        }
        self.shared.registry.each(|info| {
            let Some(&place) = info.version.and_then(|version| place.get(&version)) else { return };
            let resident = &mut residents[place];
            resident.names.push(info.name.clone());
            resident.rank = info.rank();
        });
        residents
    }

    /// Forgets cached prefixes; false if requests still use some of the blocks.
    pub fn reset_prefix_cache(&self) -> Result<bool, EngineError> {
        self.call(Command::ResetPrefixCache)
    }

    pub(crate) fn send(&self, command: Command) -> Result<(), EngineError> {
        self.shared.send(command)
    }

    fn call<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, EngineError> {
        let (reply, answer) = sync_channel(1);
        self.send(command(reply))?;
        answer.recv().unwrap_or_else(|_| Err(self.shared.stopped_error()))
    }
}

impl Shared {
    /// Threads that look at many adapters at once.
    fn reader_threads(&self) -> usize {
        self.config.num_threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }

    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer, EngineError> {
        self.tokenizer.as_ref().ok_or_else(|| {
            EngineError::InvalidArgument(
                "this engine has no tokenizer (`skip_tokenizer_init`): give prompts as token ids and set \
                 `detokenize=False`"
                    .to_owned(),
            )
        })
    }

    pub(crate) fn send(&self, command: Command) -> Result<(), EngineError> {
        self.commands.send(command).map_err(|_| self.stopped_error())?;
        // Sent too late, perhaps, to be looked at.
        if self.stopped.get().is_some() { Err(self.stopped_error()) } else { Ok(()) }
    }

    /// What reads adapters, as long as the engine runs.
    pub(crate) fn reader(&self) -> Result<Reader, EngineError> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or_else(|| self.stopped_error())
    }

    pub(crate) fn stopped_error(&self) -> EngineError {
        EngineError::Stopped(self.stopped.get().cloned().unwrap_or_else(|| "it was shut down".to_owned()))
    }
}
