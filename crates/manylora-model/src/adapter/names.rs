//! Tensor names: what an adapter's keys say once wrappers' prefixes are gone.
//!
//! The most frequent silent failure of adapter serving is a prefix that does not match, so that nothing is applied.
//! Spellings that can mean one thing only are understood; everything else is an error that names the key.

use super::combinations::AdapterFeature;

/// Path segments that wrappers insert anywhere: they carry no meaning.
const WRAPPERS: &[&str] = &["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// What a tensor is to its module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// `lora_A.weight`: `[rank, input]`
    A,
    /// `lora_B.weight`: `[output, rank]`
    B,
    /// `lora_embedding_A`: `[rank, vocabulary]`
    EmbeddingA,
    /// `lora_embedding_B`: `[hidden, rank]`
    EmbeddingB,
    /// `base_layer.weight`: a copy of the base's matrix
    BaseCopy,
}

/// A tensor name, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorName {
    /// Path of the module, without `base_model.model.` and wrappers.
    pub module: Vec<String>,
    /// What the tensor is to it.
    pub part: Part,
    /// An adapter's name left in the key (`lora_A.default.weight`).
    pub adapter: Option<String>,
}

/// A tensor that cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedTensor {
    /// The reason.
    pub reason: String,
    /// What would have to be supported, when that is known.
    pub feature: Option<AdapterFeature>,
}

impl TensorName {
    /// Takes a key apart.
    pub fn parse(key: &str) -> Result<Self, UnsupportedTensor> {
        let mut segments: Vec<&str> = key.split('.').filter(|segment| !WRAPPERS.contains(segment)).collect();
        if segments.first() == Some(&"module") {
            segments.remove(0);
        }
        if segments.starts_with(&["base_model", "model"]) {
            segments.drain(..2);
        }
        let (module, part, adapter) = split_part(&segments).ok_or_else(|| unsupported(&segments))?;
        if module.is_empty() || module.iter().any(|segment| segment.is_empty()) {
            return Err(unsupported(&segments));
        }
        Ok(Self {
            module: module.iter().map(|&segment| segment.to_owned()).collect(),
            part,
            adapter: adapter.map(str::to_owned),
        })
    }
}

type Split<'a> = (&'a [&'a str], Part, Option<&'a str>);

fn split_part<'a>(segments: &'a [&'a str]) -> Option<Split<'a>> {
    let part = |name: &str| match name {
        "lora_A" => Some(Part::A),
        "lora_B" => Some(Part::B),
        "lora_embedding_A" => Some(Part::EmbeddingA),
        "lora_embedding_B" => Some(Part::EmbeddingB),
        _ => None,
    };
    let embedding = |part: &Part| matches!(part, Part::EmbeddingA | Part::EmbeddingB);
    match segments {
        [module @ .., "base_layer", "weight"] => Some((module, Part::BaseCopy, None)),
        [module @ .., last] if part(last).as_ref().is_some_and(embedding) => Some((module, part(last)?, None)),
        [module @ .., name, adapter] if part(name).as_ref().is_some_and(embedding) => {
            Some((module, part(name)?, Some(adapter)))
        }
        [module @ .., name, "weight"] if part(name).is_some() => Some((module, part(name)?, None)),
        [module @ .., name, adapter, "weight"] if part(name).is_some() => Some((module, part(name)?, Some(adapter))),
        _ => None,
    }
}

/// Names the kind of a tensor that is not part of plain LoRA.
fn unsupported(segments: &[&str]) -> UnsupportedTensor {
    let has = |name: &str| segments.contains(&name);
    let last = segments.last().copied().unwrap_or_default();
    let (reason, feature) = if has("lora_magnitude_vector") {
        ("a magnitude vector: ManyLoRA does not yet support DoRA", Some(AdapterFeature::Dora))
    } else if has("token_adapter") || last.starts_with("trainable_tokens") {
        ("trainable token rows are not supported", Some(AdapterFeature::TokenRows))
    } else if has("lora_B") && last == "bias" {
        ("ManyLoRA does not support LoRA bias (lora_bias)", Some(AdapterFeature::Bias))
    } else if !segments.iter().any(|segment| segment.starts_with("lora_")) && last == "bias" {
        ("Adapter bias is not supported", Some(AdapterFeature::Bias))
    } else if has("modules_to_save") || is_whole_matrix(segments) {
        (
            "a whole matrix of the base (modules_to_save) cannot be kept per adapter yet",
            Some(AdapterFeature::ModulesToSave),
        )
    } else {
        ("unsupported LoRA weight", None)
    };
    UnsupportedTensor { reason: reason.to_owned(), feature }
}

fn is_whole_matrix(segments: &[&str]) -> bool {
    matches!(segments, [.., module, "weight"]
        if matches!(*module, "lm_head" | "embed_tokens" | "score" | "classifier") || module.ends_with("norm"))
}
