//! Serve many LoRA adapters on one frozen base model: the engine, for embedding in any Rust program.
//!
//! [`Engine::start`] loads a base once and runs one engine thread. [`EngineHandle`] is `Clone + Send + Sync`:
//! [`EngineHandle::load_adapter`] puts PEFT adapters on the shelf, [`EngineHandle::submit`] runs a prompt with any
//! of them (or none) in the one continuous batch and returns a stream of deltas.
//!
//! ```no_run
//! use manylora::{AdapterSource, Engine, EngineConfig, GenerateRequest};
//!
//! # fn main() -> Result<(), manylora::EngineError> {
//! let engine = Engine::start(EngineConfig::new("path/to/base"))?;
//! engine.load_adapter(AdapterSource::directory("sql", "path/to/adapter"))?;
//! let mut stream = engine.submit(GenerateRequest::text("List all customers.").adapter("sql"))?;
//! while let Some(delta) = stream.next_delta() {
//!     print!("{}", delta?.text);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: [`config`], [`engine`] (the thread, its loop, the loader), [`registry`] (names), [`request`],
//! [`stream`], [`sampler`], `structure` (grammars that output follows).

pub mod config;
pub mod engine;
pub mod error;
pub mod limits;
pub mod machine;
mod monitor;
pub mod registry;
pub mod request;
pub mod sampler;
pub mod stream;
mod structure;

pub use config::{DType, Device, EngineConfig, ReadHook};
pub use engine::{
    CardMemory, CheckedRequests, DeviceMemory, Distribution, Engine, EngineHandle, EngineInfo, EngineStats,
    InspectedModule, Inspection, LoadFailureCounts, Meters, NamedResident, NamedUsers, Phase, PhaseSeconds,
    ProcessorBytes, Share, Timing, inspect_adapter, model_dimensions,
};
pub use error::EngineError;
pub use manylora_core::eviction::EvictionPolicyKind;
pub use manylora_core::sampling::{LogprobsMode, StructuredOutputs};
pub use manylora_core::{
    AdapterUsers, Digest, FailureReason, FinishReason, LoadFailure, LoadFault, SamplingParams, SchedulingPolicy,
    UnloadMode,
};
pub use manylora_model as model;
pub use registry::{AdapterInfo, AdapterOrigin, AdapterSource, AdapterTensors};
pub use request::{AdapterSelection, GenerateRequest, Prompt};
pub use stream::{BlockingDeltas, Delta, RequestStream, StopReason};
pub use structure::lark;
