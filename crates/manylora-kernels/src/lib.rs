//! Kernels of ManyLoRA: the [`Backend`] trait and its implementations.
//!
//! This crate is the data plane. It knows matrices, KV blocks and row-adapter plans, and nothing about requests,
//! names or scheduling. A step arrives as a [`StepBatch`]; the decoder (in `manylora-model`) walks the layers and
//! calls one [`Backend`] operation after the other over preallocated buffers.
//!
//! Reading order: [`batch`] (what a step is), [`backend`] (the operations), [`cpu`] (the one implementation so far). Feature
//! `cuda` adds the layer that an implementation for NVIDIA cards stands on.

pub mod backend;
pub mod batch;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod error;
pub mod largest;
pub mod site;

pub use backend::{
    AdapterTable, AttentionShape, Backend, BufferKind, BufferRole, FactorFeed, FactorSink, FactorType, FillFactors,
    HeadInputs, KvShape, LinearOutput, LinearPart, MemoryUse, PackedAdapter, RowSet, RowSource, StorageType,
    StoredFactor, StoredRows,
};
pub use batch::{AdapterEntry, AdapterSegment, RowAdapterPlan, SequenceRows, StepBatch};
pub use error::KernelError;
pub use largest::{LargestValues, ListedValues};
pub use site::{Module, Site, SiteShape};
