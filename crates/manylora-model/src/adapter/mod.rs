//! PEFT LoRA adapters: applied completely or refused, with the offending keys named.
//!
//! An adapter is a folder of foreign bytes that may be broken, made for another model, or ask for arithmetic that the
//! engine does not do. Everything that can make it be applied in part, or not at all, is found here, before a single
//! request can name it. Reading order: [`policy`] (what it is checked against), [`config`] and [`scaling`] (what
//! `adapter_config.json` says), [`names`] and [`modules`] (which tensor belongs where), [`matching`] (the two put
//! together), [`folder`] and [`tensor_file`] (reading untrusted files), [`factors`], [`header`] and [`prepared`] (the results),
//! [`report`], [`digest`] and [`combinations`]; [`spectrum`] is for those who look closer.
//!
//! An adapter may also be given in memory: [`PreparedAdapter::from_tensors`], with `candle_tensors` of the feature
//! `candle` for those who have them as candle tensors.
//!
//! [`inspect`] looks at the configuration and the tensor header only; [`AdapterHeader::read`] then reads and checks
//! every value, and [`AdapterHeader::load`] packs them in the same pass. Files are read, never mapped: whoever overwrites or truncates an adapter file in place cannot take
//! the process down, and what was checked is what is used.

pub mod base_name;
#[cfg(feature = "candle")]
pub mod candle;
pub mod combinations;
pub mod config;
pub mod digest;
mod effect;
mod factors;
mod fault;
mod features;
mod folder;
pub mod header;
pub mod matching;
pub mod modules;
pub mod names;
pub mod policy;
pub mod prepared;
pub mod report;
pub mod scaling;
pub mod spectrum;
pub mod tensor_file;
mod tokenizer_ids;

#[cfg(feature = "candle")]
pub use candle::candle_tensors;
pub use combinations::{AdapterFeature, EngineFeature, Verdict};
pub use header::{AdapterHeader, LoadedContent, inspect};
pub use policy::{AdapterPolicy, BaseTensors, MAX_RANK, NoBaseTensors};
pub use prepared::{MemoryTensor, PreparedAdapter};
pub use report::{LoadReport, ModuleReport};
/// Element type of a [`MemoryTensor`].
pub use safetensors::Dtype;
pub use spectrum::Spectrum;
