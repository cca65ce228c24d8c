//! The lines of a recorded trace: what an engine writes and the simulator reads, so that they cannot disagree.
//!
//! A trace is a text file with one JSON object on each line. Its first line is the [`TraceHeader`]; what follows is, in order,
//! every input of the control plane, what it decided, and how long that took. Read back in order, the inputs lead to the same
//! decisions. No line has a token or a text: where content decides, because prompts share prefixes, blocks of tokens have
//! numbers that tell equal from different, and nothing else.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::budget::{ModelDimensions, NumberFormat};
use crate::config::CoreConfig;
use crate::event::{
    AdapterUse, Effect, Event, FinishReason, LoadFailure, LoadFault, LoadedAdapter, NewRequest, StepOutcome,
};
use crate::identity::{AdapterSlot, Digest, RegistrationId, RequestId, Time};
use crate::plan::{PlannedSequence, StepPlan};

/// What [`TraceHeader::format`] says.
pub const TRACE_FORMAT: &str = "manylora-trace";
/// The version of the lines that are described here.
pub const TRACE_VERSION: u32 = 1;

/// Name of a block of tokens: equal for equal tokens after equal blocks, in one trace. Below 2^52, which every reader of JSON
/// can hold. It comes from a key that is drawn for the trace and kept nowhere, so that nobody can try texts against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockName(pub u64);

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TraceLine {
    /// The first line.
    Header(Box<TraceHeader>),
    /// An adapter that is about to be registered.
    Adapter(TracedAdapter),
    /// A request: [`Event::Submit`].
    Submit(TracedRequest),
    /// The end of a load: [`Event::LoadFinished`].
    Load(TracedLoad),
    /// Any other event.
    Event {
        /// When.
        time: Time,
        /// What.
        event: Event,
    },
    /// Somebody asked to forget cached KV blocks.
    ResetPrefixCache {
        /// When.
        time: Time,
        /// Whether they were forgotten.
        done: bool,
    },
    /// A step was to be planned, and nothing could run.
    Idle {
        /// When.
        time: Time,
    },
    /// A step was planned.
    Step(TracedStep),
    /// Its results.
    Outcome(TracedOutcome),
    /// What the control plane wanted done, in its order; the ends of requests have lines of their own.
    Effect {
        /// When the engine turned to it.
        time: Time,
        /// What.
        #[serde(flatten)]
        effect: TracedEffect,
    },
    /// A request ended: [`Effect::Finished`] or [`Effect::RequestFailed`].
    End(TracedEnd),
    /// A request that had not ended when the trace was closed, or lost lines.
    Unfinished(TracedEnd),
    /// How long the last step took, with what was done since the one before.
    Took {
        /// The step.
        step: u64,
        /// Seconds by phase, in the order of [`TraceHeader::phases`]. Waiting for something to do is not among them.
        seconds: Vec<f64>,
    },
    /// Lines were not written here, because the disk did not follow. What comes later cannot be replayed.
    Lost {
        /// How many.
        lines: u64,
    },
    /// The last line of a trace that was closed in order.
    Close {
        /// When.
        time: Time,
        /// Lines that were not written, in all.
        lost: u64,
    },
}

/// The engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceHeader {
    /// [`TRACE_FORMAT`].
    pub format: String,
    /// [`TRACE_VERSION`].
    pub version: u32,
    /// Version of the program.
    pub program: String,
    /// When it started, in seconds since 1970. All other times are seconds since then.
    pub started: f64,
    /// All that the control plane was told.
    pub config: CoreConfig,
    /// Threads that read adapters.
    pub loader_threads: usize,
    /// Names of the model.
    pub model: Vec<String>,
    /// Its shape.
    pub dimensions: ModelDimensions,
    /// How numbers are stored.
    pub number: NumberFormat,
    /// What it runs on: `cpu`, `cuda:0`.
    pub device: String,
    /// The backend in words: kernels, threads.
    pub backend: String,
    /// Names of the phases of a step.
    pub phases: Vec<String>,
}

impl TraceHeader {
    /// The header of an engine with these settings, of a model of this shape; of all else it knows nothing yet.
    pub fn new(config: CoreConfig, dimensions: ModelDimensions, number: NumberFormat) -> Self {
        Self {
            format: TRACE_FORMAT.to_owned(),
            version: TRACE_VERSION,
            program: String::new(),
            started: 0.0,
            config,
            loader_threads: 1,
            model: Vec::new(),
            dimensions,
            number,
            device: "cpu".to_owned(),
            backend: String::new(),
            phases: Vec::new(),
        }
    }
}

/// An adapter, as far as its header tells. Its digest comes with its first load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedAdapter {
    /// The registration that it will have.
    pub registration: RegistrationId,
    /// The name that requests use.
    pub name: String,
    /// Highest rank of its factors.
    pub rank: u64,
    /// Bytes that it takes where it is computed with.
    pub bytes: u64,
    /// Bytes of its file; None where it was given in memory.
    pub file_bytes: Option<u64>,
}

/// A request. Of its tokens there is their number only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedRequest {
    /// When the control plane was told.
    pub time: Time,
    /// When it was submitted: what had to end first came in between.
    pub arrival: f64,
    /// Its id.
    pub id: RequestId,
    /// Its adapters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterUse>,
    /// Whether each of them was resident then: a hit, or a miss.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resident: Vec<bool>,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens that it may generate.
    pub max_tokens: u64,
    /// Its priority.
    pub priority: i64,
    /// Its tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// A number for its cache salt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salt: Option<BlockName>,
    /// Whether cached blocks may stand for computed ones.
    pub read_prefix_cache: bool,
    /// Whether logits of all rows of the prompt are wanted.
    pub all_prompt_logits: bool,
    /// Names of the full blocks of its prompt; none where prefixes are not cached.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<BlockName>,
}

impl TracedRequest {
    /// Of a request that arrived at this time and is told now. Names of its salt and its blocks are for others to give.
    pub fn of(now: Time, arrival: f64, request: &NewRequest, resident: Vec<bool>) -> Self {
        Self {
            time: now,
            arrival,
            id: request.id,
            adapters: request.adapters.clone(),
            resident,
            prompt_tokens: request.prompt.len() as u32,
            max_tokens: request.max_tokens as u64,
            priority: request.priority,
            tenant: request.tenant.clone(),
            salt: None,
            read_prefix_cache: request.read_prefix_cache,
            all_prompt_logits: request.all_prompt_logits,
            blocks: Vec::new(),
        }
    }
}

/// The end of a load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedLoad {
    /// When the control plane was told.
    pub time: Time,
    /// Of which registration.
    pub registration: RegistrationId,
    /// What it brought, or whose fault it is that it brought nothing.
    #[serde(flatten)]
    pub result: TracedLoadResult,
}

/// What a load brought.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum TracedLoadResult {
    /// The adapter.
    Loaded {
        /// Its version.
        digest: Digest,
        /// Bytes that it takes.
        bytes: u64,
        /// Nanoseconds of the thread that read it, as its clock has them; None if nothing was read. Evictions may depend on
        /// them, so they are whole numbers, which are read as they were written.
        nanoseconds: Option<u64>,
    },
    /// Nothing.
    Failed {
        /// Whose doing it is.
        fault: LoadFault,
    },
}

impl TracedLoadResult {
    /// A load that went well.
    pub fn loaded(loaded: &LoadedAdapter) -> Self {
        let LoadedAdapter { digest, bytes, load_seconds } = *loaded;
        let nanoseconds = load_seconds.map(|seconds| (seconds * 1e9).round() as u64);
        Self::Loaded { digest, bytes, nanoseconds }
    }

    /// What the control plane was told, to the bit: times come from clocks that count nanoseconds.
    pub fn result(&self) -> Result<LoadedAdapter, LoadFailure> {
        match *self {
            Self::Loaded { digest, bytes, nanoseconds } => {
                let load_seconds = nanoseconds.map(|nanoseconds| Duration::from_nanos(nanoseconds).as_secs_f64());
                Ok(LoadedAdapter { digest, bytes, load_seconds })
            }
            Self::Failed { fault } => Err(LoadFailure { fault, message: "it failed when it was recorded".to_owned() }),
        }
    }
}

/// A planned step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedStep {
    /// When.
    pub time: Time,
    /// Its number.
    pub step: u64,
    /// Rows of all sequences.
    pub rows: u64,
    /// Distinct adapters.
    pub adapters: u64,
    /// Its sequences, in their order.
    pub sequences: Vec<TracedSequence>,
}

/// A sequence of a step: id, rows, position of the first one, tokens that were found in the prefix cache, preemptions so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedSequence(pub RequestId, pub u32, pub u32, pub u32, pub u32);

impl From<&PlannedSequence> for TracedSequence {
    fn from(planned: &PlannedSequence) -> Self {
        let PlannedSequence { request, rows, first_position, cached_tokens, preemptions, .. } = *planned;
        Self(request, rows, first_position, cached_tokens, preemptions)
    }
}

impl TracedStep {
    /// Of a plan; `slots` is room to count its adapters in.
    pub fn of(now: Time, plan: &StepPlan, slots: &mut Vec<u32>) -> Self {
        slots.clear();
        slots.extend(plan.adapters.iter().map(|adapter| adapter.slot.0));
        slots.sort_unstable();
        slots.dedup();
        Self {
            time: now,
            step: plan.step,
            rows: plan.tokens.len() as u64,
            adapters: slots.len() as u64,
            sequences: plan.sequences.iter().map(TracedSequence::from).collect(),
        }
    }
}

/// Results of a step: one token for each sequence that was to bring one, but for exceptions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedOutcome {
    /// When.
    pub time: Time,
    /// The step.
    pub step: u64,
    /// Sequences that have ended by what they said.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stopped: Vec<RequestId>,
    /// Sequences that brought another number of tokens than their plan has them bring.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<(RequestId, u32)>,
    /// Names of the blocks that sequences have filled with the tokens they got.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub filled: Vec<(RequestId, BlockName)>,
}

impl TracedOutcome {
    /// Of a plan's results. Names of blocks that were filled are for others to give.
    pub fn of(now: Time, plan: &StepPlan, outcome: &StepOutcome) -> Self {
        let pairs = || plan.sequences.iter().zip(&outcome.sequences);
        let others = pairs().filter(|(planned, result)| result.tokens != u32::from(planned.samples));
        Self {
            time: now,
            step: outcome.step,
            stopped: pairs().filter(|(_, result)| result.stopped).map(|(planned, _)| planned.request).collect(),
            others: others.map(|(planned, result)| (planned.request, result.tokens)).collect(),
            filled: Vec::new(),
        }
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TracedReason {
    /// See [`FinishReason::Stop`].
    Stop,
    /// See [`FinishReason::Length`].
    Length,
    /// See [`FinishReason::Abort`].
    Abort,
    /// With an error.
    Failed,
    /// It has not.
    Unfinished,
}

impl From<FinishReason> for TracedReason {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Abort => Self::Abort,
        }
    }
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedEnd {
    /// When the engine turned to it.
    pub time: Time,
    /// Its id.
    pub id: RequestId,
    /// How it ended.
    pub reason: TracedReason,
    /// Tokens that it generated; None if lines of it were lost.
    pub tokens: Option<u64>,
}

/// An [`Effect`] as a trace has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "effect", rename_all = "snake_case")]
pub enum TracedEffect {
    /// See [`Effect::Load`].
    Load {
        /// Which registration.
        registration: RegistrationId,
    },
    /// See [`Effect::Install`].
    Install {
        /// Where.
        slot: AdapterSlot,
        /// Which version.
        digest: Digest,
    },
    /// See [`Effect::Evict`].
    Evict {
        /// Where.
        slot: AdapterSlot,
        /// Which version.
        digest: Digest,
    },
    /// See [`Effect::LeaseBound`].
    Bound {
        /// Which request.
        id: RequestId,
    },
    /// See [`Effect::Unloaded`].
    Unloaded {
        /// Which registration.
        registration: RegistrationId,
    },
    /// See [`Effect::RegistrationFailed`].
    RegistrationFailed {
        /// Which registration.
        registration: RegistrationId,
    },
    /// See [`Effect::Resident`].
    Resident {
        /// Which registration.
        registration: RegistrationId,
    },
    /// See [`Effect::OnDemand`].
    OnDemand {
        /// Which registration.
        registration: RegistrationId,
    },
    /// See [`Effect::Replaced`].
    Replaced {
        /// Whose place it took.
        old: RegistrationId,
        /// What serves now.
        new: RegistrationId,
    },
}

/// A decision as a trace has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// A request ended so.
    End(RequestId, TracedReason),
    /// Any other effect.
    Effect(TracedEffect),
}

impl From<&Effect> for Decision {
    fn from(effect: &Effect) -> Self {
        Self::Effect(match *effect {
            Effect::Finished { request, reason } => return Self::End(request, reason.into()),
            Effect::RequestFailed { request, .. } => return Self::End(request, TracedReason::Failed),
            Effect::Load { registration, .. } => TracedEffect::Load { registration },
            Effect::Install { slot, digest } => TracedEffect::Install { slot, digest },
            Effect::Evict { slot, digest } => TracedEffect::Evict { slot, digest },
            Effect::LeaseBound(id) => TracedEffect::Bound { id },
            Effect::Unloaded(registration) => TracedEffect::Unloaded { registration },
            Effect::RegistrationFailed { registration, .. } => TracedEffect::RegistrationFailed { registration },
            Effect::Resident(registration) => TracedEffect::Resident { registration },
            Effect::OnDemand(registration) => TracedEffect::OnDemand { registration },
            Effect::Replaced { old, new } => TracedEffect::Replaced { old, new },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_of_loads_come_back_to_the_bit() {
        for nanoseconds in (0..60).map(|power| 3_u64.pow(power % 35) + u64::from(power)) {
            let seconds = Duration::from_nanos(nanoseconds).as_secs_f64();
            let loaded = LoadedAdapter { load_seconds: Some(seconds), ..LoadedAdapter::new(Digest([1; 32]), 5) };
            let line = serde_json::to_string(&TracedLoadResult::loaded(&loaded)).unwrap();
            let read: TracedLoadResult = serde_json::from_str(&line).unwrap();
            assert_eq!(read.result().unwrap(), loaded, "{nanoseconds}");
        }
    }

    #[test]
    fn lines_are_read_as_they_were_written() {
        let registration = RegistrationId { index: 3, generation: 1 };
        let digest = Digest([7; 32]);
        let lines = [
            TraceLine::Idle { time: Time(0.25) },
            TraceLine::Event { time: Time(0.5), event: Event::Pin(registration) },
            TraceLine::Load(TracedLoad {
                time: Time(1.0),
                registration,
                result: TracedLoadResult::Loaded { digest, bytes: 10, nanoseconds: Some(125) },
            }),
            TraceLine::Effect { time: Time(1.5), effect: TracedEffect::Install { slot: AdapterSlot(2), digest } },
            TraceLine::Outcome(TracedOutcome {
                time: Time(2.0),
                step: 9,
                stopped: vec![RequestId(4)],
                others: vec![(RequestId(5), 0)],
                filled: vec![(RequestId(6), BlockName((1 << 52) - 1))],
            }),
            TraceLine::End(TracedEnd {
                time: Time(2.5),
                id: RequestId(4),
                reason: TracedReason::Stop,
                tokens: Some(12),
            }),
        ];
        for line in lines {
            let text = serde_json::to_string(&line).unwrap();
            assert_eq!(serde_json::from_str::<TraceLine>(&text).unwrap(), line, "{text}");
        }
    }
}
