//! [`EngineHandle`]: what callers hold. Validation, tokenizing and name resolution happen here, on their threads.

use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Sender, sync_channel};
use std::sync::{Arc, OnceLock};

use manylora_core::UnloadMode;
use manylora_model::adapter::{AdapterPolicy, LoadReport};
use manylora_model::chat::{ChatTemplate, RenderOptions};
use manylora_model::tokenizer::Tokenizer;
use manylora_model::{AdapterPacker, ModelSpec};

use super::EngineStats;
use super::command::{Command, Reply};
use super::startup::EngineInfo;
use super::{loader, submit};
use crate::config::EngineConfig;
use crate::error::EngineError;
use crate::registry::{AdapterInfo, AdapterSource, Registry};
use crate::request::{AdapterSelection, GenerateRequest};
use crate::stream::RequestStream;

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

pub(crate) struct Shared {
    pub(crate) config: EngineConfig,
    pub(crate) info: EngineInfo,
    pub(crate) spec: ModelSpec,
    pub(crate) end_tokens: Vec<u32>,
    pub(crate) tokenizer: Option<Tokenizer>,
    pub(crate) chat_template: Option<ChatTemplate>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) policy: AdapterPolicy,
    pub(crate) packer: Arc<dyn AdapterPacker>,
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
    /// the same name is a no-op; other content is an error unless `replace` is set.
    #[expect(clippy::needless_pass_by_value, reason = "callers build a source on the spot")]
    pub fn load_adapter(&self, source: AdapterSource) -> Result<AdapterInfo, EngineError> {
        let shared = &self.shared;
        if !shared.config.enable_lora {
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
        let read = loader::read(&source, &shared.policy, shared.packer.as_ref())?;
        self.call(|reply| Command::Register(Box::new(read), reply))
    }

    /// Takes an adapter off the shelf: `Drain` waits for the requests that hold it, `Abort` ends them.
    pub fn unload_adapter(&self, name: &str, mode: UnloadMode) -> Result<(), EngineError> {
        self.call(|reply| Command::Unload { name: name.to_owned(), mode, reply })
    }

    /// Keeps an adapter resident until it is unpinned or unloaded.
    pub fn pin_adapter(&self, name: &str) -> Result<(), EngineError> {
        self.call(|reply| Command::Pin { name: name.to_owned(), pinned: true, reply })
    }

    /// Allows an adapter to be evicted again.
    pub fn unpin_adapter(&self, name: &str) -> Result<(), EngineError> {
        self.call(|reply| Command::Pin { name: name.to_owned(), pinned: false, reply })
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
        submit::submit(&self.shared, requests, stream)
    }

    /// Logits of every position of `tokens`, under the given adapters: one prefill, nothing generated.
    pub fn logits(&self, tokens: &[u32], adapters: &[AdapterSelection]) -> Result<Logits, EngineError> {
        submit::logits(&self.shared, tokens, adapters)
    }

    /// Counters and levels.
    pub fn stats(&self) -> Result<EngineStats, EngineError> {
        self.call(Command::Stats)
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
        self.commands.send(command).map_err(|_| self.stopped_error())
    }

    pub(crate) fn stopped_error(&self) -> EngineError {
        EngineError::Stopped(self.stopped.get().cloned().unwrap_or_else(|| "it was shut down".to_owned()))
    }
}
