//! Checkpoints, tokenizers, chat templates, PEFT adapters, and the decoder written once over a kernel backend.
//!
//! Reading order: [`spec`] (what a model is), [`checkpoint`] (where its weights come from: safetensors, GGUF, INT4),
//! [`decoder`] (the forward pass), [`runner`] (the face the engine sees), [`adapter`] (PEFT folders: applied completely
//! or refused), `merge` (a checkpoint of base and adapters), [`vocabulary`] (what tokenizers are made of), `tokenizer` and `chat`. Without the default features
//! `text` (those last two modules) and `dequantize` (quantized GGUF tensors), what is left reads headers,
//! configurations, vocabularies and adapters with few dependencies.

pub mod adapter;
#[cfg(feature = "text")]
pub mod chat;
pub mod checkpoint;
pub mod decoder;
pub mod error;
#[cfg(feature = "merge")]
pub mod merge;
pub mod runner;
pub mod spec;
#[cfg(feature = "text")]
pub mod tokenizer;
pub mod vocabulary;

pub use error::{AdapterRefusal, ModelError, RefusalKind};
pub use runner::{AdapterPacker, PackedHandle, Runner};
pub use spec::{Family, ModelSpec, RopeScaling, RopeSpec};
