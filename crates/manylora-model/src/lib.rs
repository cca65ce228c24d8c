//! Checkpoints, tokenizers, chat templates, PEFT adapters, and the decoder written once over a kernel backend.
//!
//! Reading order: [`spec`] (what a model is), [`checkpoint`] (where its weights come from: safetensors, GGUF, INT4),
//! [`decoder`] (the forward pass), [`runner`] (the face the engine sees), [`adapter`] (PEFT folders: applied completely
//! or refused), [`tokenizer`] and [`chat`].

pub mod adapter;
pub mod chat;
pub mod checkpoint;
pub mod decoder;
pub mod error;
pub mod runner;
pub mod spec;
pub mod tokenizer;

pub use error::{AdapterRefusal, ModelError};
pub use runner::{AdapterPacker, PackedHandle, Runner};
pub use spec::{Family, ModelSpec, RopeScaling, RopeSpec};
