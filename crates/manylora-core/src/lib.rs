//! The control plane of ManyLoRA: pure, deterministic, no I/O, no clock, no threads, no device.
//!
//! Everything that decides *what runs when* is here, so that the engine and the simulator run the very same code.
//! Time comes in as an argument. Every input is one [`Event`]; what must happen outside comes back as [`Effect`]s.
//!
//! Reading order: [`event`] and [`plan`] (the contract), [`control`] (the one entry point), `scheduler` (what makes a
//! step), `queue` and [`fairness`] (who is next), `admission` (who may start, and the bound on waiting), `loads` (what is
//! read when), `outcome` (what comes back), `shelf` (adapters, versions, leases), [`eviction`], `replacement` (a new version
//! in an old one's place), `memory` (the ledger between adapters and KV blocks), [`block_pool`], [`budget`], then
//! [`sampling`], [`config`] and [`trace`] (what an engine's log of all this looks like in a file).

mod admission;
pub mod block_pool;
pub mod budget;
pub mod config;
pub mod control;
pub mod error;
pub mod event;
pub mod eviction;
pub mod fairness;
pub mod identity;
mod loads;
mod memory;
mod order;
mod outcome;
pub mod plan;
mod queue;
mod replacement;
mod request;
pub mod sampling;
mod scheduler;
mod shelf;
pub mod stats;
pub mod trace;

pub use config::{CoreConfig, LARGEST_COUNT, LoraMemory, SchedulingPolicy, SchedulingSettings};
pub use control::ControlPlane;
pub use error::CoreError;
pub use event::{
    AdapterUse, Client, Effect, Event, FailureReason, FinishReason, LoadFailure, LoadFault, LoadedAdapter, NewRequest,
    SequenceOutcome, StepOutcome, UnloadMode,
};
pub use eviction::EvictionPolicyKind;
pub use identity::{AdapterSlot, BlockId, Digest, RegistrationId, RequestId, Time};
pub use plan::{PlannedAdapter, PlannedSequence, StepPlan};
pub use sampling::SamplingParams;
pub use stats::{AdapterUsers, CoreStats, RegistrationStatus, ResidentAdapter, Users};
