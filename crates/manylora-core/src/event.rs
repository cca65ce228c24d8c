//! The inputs and outputs of the control plane. A recorded trace is the log of [`Event`]s with their times.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::identity::{AdapterSlot, Digest, RegistrationId, RequestId};

/// One adapter of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdapterUse {
    /// Which registration.
    pub registration: RegistrationId,
    /// Strength, 1 unless the request says otherwise. Entries of scale 0 are dropped at admission.
    pub scale: f32,
    /// First position of the sequence that the adapter applies to (0 = all; activated LoRA starts later).
    pub first_active: u32,
}

/// To whom service is charged under [`crate::SchedulingPolicy::Fair`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Client {
    /// Requests without an adapter that name no tenant.
    Base,
    /// Requests whose first adapter is this registration (or one that replaced it, or was replaced by it) and that name
    /// no tenant.
    Adapter(RegistrationId),
    /// Requests of this tenant.
    Tenant(String),
}

/// A request as the scheduler sees it: one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NewRequest {
    /// Chosen by the caller, never used twice.
    pub id: RequestId,
    /// Prompt tokens; at least one. The samples of a request share them.
    #[serde(with = "shared")]
    pub prompt: Arc<[u32]>,
    /// At most this many tokens are generated.
    pub max_tokens: usize,
    /// Lower runs first under the priority policy.
    pub priority: i64,
    /// Keeps the KV blocks of different tenants apart.
    pub cache_salt: Option<String>,
    /// Whose share of a fair service it takes; None = its first adapter's, or the base's.
    #[serde(default)]
    pub tenant: Option<String>,
    /// Adapters, in the request's order; none = the base.
    pub adapters: Vec<AdapterUse>,
    /// Whether cached blocks may stand for computed ones (not for prompt logprobs, which need every row).
    pub read_prefix_cache: bool,
    /// Whether logits are wanted for every prompt row (prompt logprobs, `Engine::logits`), not only the last.
    pub all_prompt_logits: bool,
}

/// Shared tokens, in a trace as any others.
mod shared {
    use super::{Arc, Deserialize, Serialize};

    pub(super) fn serialize<S: serde::Serializer>(tokens: &Arc<[u32]>, serializer: S) -> Result<S::Ok, S::Error> {
        tokens.as_ref().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Arc<[u32]>, D::Error> {
        Vec::deserialize(deserializer).map(Into::into)
    }
}

/// What a finished load brings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadedAdapter {
    /// Digest of tensors and effective configuration: the version's identity.
    pub digest: Digest,
    /// Exact packed bytes.
    pub bytes: u64,
    /// What reading and packing took, in seconds, if it was measured; [`crate::eviction::CostAware`] weighs it.
    #[serde(default)]
    pub load_seconds: Option<f64>,
}

impl LoadedAdapter {
    /// Without a measured time.
    pub const fn new(digest: Digest, bytes: u64) -> Self {
        Self { digest, bytes, load_seconds: None }
    }
}

fn yes() -> bool {
    true
}

/// How an adapter is unloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UnloadMode {
    /// Requests that hold it finish; new ones are refused; then its bytes are freed.
    Drain,
    /// Requests that hold it are aborted now.
    Abort,
}

/// Everything that can happen to the control plane.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A request arrives. A second request with the id of a live one is ignored.
    Submit(NewRequest),
    /// A client is gone.
    Abort(RequestId),
    /// An adapter's configuration and header were validated. `bytes` is the exact packed size its header implies.
    Register {
        /// The id that [`crate::ControlPlane::next_registration`] gave.
        registration: RegistrationId,
        /// Packed bytes.
        bytes: u64,
        /// Whether its content can be read again at any time. Content that was given from memory cannot: once it is
        /// resident it stays until it is unloaded.
        #[serde(default = "yes")]
        rereadable: bool,
    },
    /// Load now although nobody asks yet (vLLM's `add_lora`): answered by [`Effect::Resident`], by
    /// [`Effect::OnDemand`] if there is no room now, or by [`Effect::RegistrationFailed`]. Content that cannot be read
    /// again waits for room instead, no longer than a request would.
    Prefetch(RegistrationId),
    /// Let `new` take the place of `old`: compare, load, swap.
    ///
    /// `new` was registered just before and is named by nobody yet. It is made resident while `old` goes on serving; then,
    /// in one step, `old`'s pin moves to it and [`Effect::Replaced`] is given. If anything fails, `old` is untouched,
    /// [`Effect::RegistrationFailed`] names `new` and `new` is unloaded. Equal content is swapped like any other: nothing
    /// is read twice, evicted or lost.
    ///
    /// Several replacements of one adapter are carried out one after the other, in the order of their events.
    Replace {
        /// The registration to replace. If it was replaced meanwhile: the one that serves in its place now.
        old: RegistrationId,
        /// What takes its place.
        new: RegistrationId,
        /// The version that must serve when the event arrives, and still when `new` is resident; otherwise the
        /// replacement fails.
        expected: Option<Digest>,
    },
    /// Gives a client more (above 1) or less of a fair service from now on. Weights are 1 at first; one that is not
    /// positive and finite is ignored. Forgotten when the adapter's last registration goes.
    SetWeight {
        /// Whose.
        client: Client,
        /// Its share in relation to others'.
        weight: f64,
    },
    /// A load ordered by [`Effect::Load`] ended: the version, or why it failed. What was loaded is to be
    /// dropped unless an [`Effect::Install`] of its digest follows at once: nobody wants it any more, or the same content
    /// is resident already.
    LoadFinished {
        /// Which registration.
        registration: RegistrationId,
        /// The outcome.
        result: Result<LoadedAdapter, LoadFailure>,
    },
    /// Take an adapter off the shelf.
    Unload {
        /// Which registration.
        registration: RegistrationId,
        /// How.
        mode: UnloadMode,
    },
    /// Keep resident until unpinned or unloaded.
    Pin(RegistrationId),
    /// Allow eviction again.
    Unpin(RegistrationId),
    /// The results of a planned step.
    Outcome(StepOutcome),
}

/// What the control plane wants done, or wants known. Drained after every call.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Read, validate and pack this adapter off the step loop; answer with [`Event::LoadFinished`]. `expected` is the
    /// version's digest if it was read before: other content is then a failure of the load.
    Load {
        /// Which registration.
        registration: RegistrationId,
        /// Digest it had.
        expected: Option<Digest>,
    },
    /// Put the loaded version into the backend's table.
    Install {
        /// Where.
        slot: AdapterSlot,
        /// Which version.
        digest: Digest,
    },
    /// Take a version out of the table and drop its packed bytes. May be carried out ahead of effects before it: nothing that
    /// is planned or installed by then uses it.
    Evict {
        /// Where it was.
        slot: AdapterSlot,
        /// Which version.
        digest: Digest,
    },
    /// All adapters of a request are bound to versions and it may be scheduled.
    LeaseBound(RequestId),
    /// A request failed before or while running.
    RequestFailed {
        /// Which.
        request: RequestId,
        /// Why.
        reason: FailureReason,
    },
    /// A request ended: by the outcome's word, by length, or by an abort.
    Finished {
        /// Which.
        request: RequestId,
        /// Why.
        reason: FinishReason,
    },
    /// An unload ended and the registration is gone.
    Unloaded(RegistrationId),
    /// A registration could not be pinned, loaded, made resident or put in another's place; names the reason with its
    /// numbers. After a failed [`Event::Replace`] an [`Effect::Unloaded`] of it follows as soon as nothing uses it.
    RegistrationFailed {
        /// Which.
        registration: RegistrationId,
        /// Why.
        message: String,
    },
    /// A [`Event::Prefetch`] or [`Event::Pin`] was carried out: the version is resident.
    Resident(RegistrationId),
    /// There is no room for a [`Event::Prefetch`] now. Nothing was loaded and nothing will be until a request, or another
    /// prefetch, asks for it.
    OnDemand(RegistrationId),
    /// `new` serves in `old`'s place: publish it under `old`'s name, and unload `old` (draining) once nobody who still
    /// means `old` by that name can submit. Until then `old` takes requests and keeps its bytes, in every case.
    Replaced {
        /// Whose place it took: the last that served, if there were several replacements.
        old: RegistrationId,
        /// What serves now.
        new: RegistrationId,
    },
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// End token, stop token or stop string.
    Stop,
    /// `max_tokens` or the model's context.
    Length,
    /// Cancelled.
    Abort,
}

impl FinishReason {
    /// The word for it in OpenAI's and vLLM's answers.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

/// Whose doing it is that an adapter could not be loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoadFault {
    /// Its files are not there.
    Missing,
    /// They may not be read.
    Forbidden,
    /// They are broken, unsuitable, other ones than were registered, or too large.
    #[default]
    Invalid,
    /// The machine's, or the moment's: it may go well another time.
    Temporary,
}

/// Why an adapter could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct LoadFailure {
    /// Whose doing it is.
    pub fault: LoadFault,
    /// The reason, with values and what to do.
    pub message: String,
}

impl LoadFailure {
    /// A failure of the moment.
    pub fn temporary(message: impl Into<String>) -> Self {
        Self { fault: LoadFault::Temporary, message: message.into() }
    }
}

impl From<String> for LoadFailure {
    fn from(message: String) -> Self {
        Self { fault: LoadFault::default(), message }
    }
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FailureReason {
    /// Its adapter could not be loaded.
    #[error("adapter could not be loaded: {0}")]
    AdapterLoad(LoadFailure),
    /// Its adapter was unloaded before the request started.
    #[error("adapter was unloaded before the request started")]
    AdapterUnloaded,
    /// Not even alone does it fit the KV blocks.
    #[error(
        "the request needs `{needed}` KV blocks and there are `{available}`; raise kv_cache_memory_bytes or shorten it"
    )]
    TooLarge {
        /// Blocks it needs.
        needed: usize,
        /// Blocks there are.
        available: usize,
    },
    /// Its prompt is empty or longer than a sequence may be.
    #[error("the prompt has `{tokens}` tokens and must have 1 to `{limit}` (max_model_len)")]
    PromptLength {
        /// Tokens it has.
        tokens: usize,
        /// Tokens it may have.
        limit: usize,
    },
    /// It combines more adapters than a step can have.
    #[error(
        "the request combines `{needed}` adapters and `{limit}` can run together; raise max_loras and max_cpu_loras"
    )]
    TooManyAdapters {
        /// Adapters it combines.
        needed: usize,
        /// Adapters that can run together.
        limit: usize,
    },
}

/// Result of one sequence in a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SequenceOutcome {
    /// Which request.
    pub request: Option<RequestId>,
    /// First of its new tokens in [`StepOutcome::tokens`].
    pub first_token: u32,
    /// Number of new tokens: 0 while its prompt is incomplete, 1 usually, more with speculative decoding.
    pub tokens: u32,
    /// Set when the engine saw an end token, a stop token or a stop string.
    pub stopped: bool,
}

/// Results of a planned step, in the plan's order.
///
/// A sequence that is missing counts as lost and is computed again. If a sampling sequence brings other than one token,
/// or is lost, what a step that was planned already brings for it is void: its placeholder stood for another token.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepOutcome {
    /// Number of the step, as in the plan.
    pub step: u64,
    /// One per planned sequence.
    pub sequences: Vec<SequenceOutcome>,
    /// New tokens of all sequences.
    pub tokens: Vec<u32>,
}
