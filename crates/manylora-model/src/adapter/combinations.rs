//! The table of what an adapter can bring and what an engine can do with its base, and which pairs work together.
//!
//! Two settings that cannot work together are refused when the second of them appears: engine features at start,
//! adapter features at load. A pair that is not in [`SUPPORTED`] is refused; there is no third state.

use serde::Serialize;

/// What an adapter brings along.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AdapterFeature {
    /// LoRA on the linear modules of decoder layers, plain or rank-stabilized
    Linear,
    /// LoRA on `lm_head`
    Head,
    /// LoRA on `embed_tokens`
    Embedding,
    /// Weight-decomposed LoRA (magnitude vectors)
    Dora,
    /// Whole matrices that replace those of the base
    ModulesToSave,
    /// Biases of the base or of B
    Bias,
    /// Replaced or added token rows
    TokenRows,
    /// Activated LoRA: on from an invocation sequence
    Activated,
    /// An initialization that changes the base (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA)
    MutatedBase,
    /// Replicated layers
    LayerReplication,
    /// Expert tensors of mixture models
    Experts,
    /// Another factorization or routing (QALoRA, BD-LoRA, Arrow and their like)
    OtherArithmetic,
}

/// What an engine does with its base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineFeature {
    /// Weights as the checkpoint stores them
    FullPrecisionBase,
    /// GGUF or INT4 weights, dequantized at load
    DequantizedBase,
    /// `lm_head` is the embedding
    TiedEmbeddings,
    /// Sliding-window attention
    SlidingWindow,
    /// Prompts computed in pieces
    ChunkedPrefill,
    /// Preemption by recompute
    Preemption,
    /// Reuse of KV blocks between requests
    PrefixCache,
    /// Several adapters on one row
    Composition,
    /// Strength given by the request
    RequestScale,
    /// A draft model or head
    SpeculativeDecoding,
    /// Beam search
    BeamSearch,
    /// Weights released while idle
    SleepMode,
    /// One model on several devices
    TensorParallel,
    /// Weights kept in an integer format while computing
    QuantizedCompute,
}

impl AdapterFeature {
    /// Every feature.
    pub const ALL: [Self; 12] = [
        Self::Linear,
        Self::Head,
        Self::Embedding,
        Self::Dora,
        Self::ModulesToSave,
        Self::Bias,
        Self::TokenRows,
        Self::Activated,
        Self::MutatedBase,
        Self::LayerReplication,
        Self::Experts,
        Self::OtherArithmetic,
    ];
}

impl EngineFeature {
    /// Every feature.
    pub const ALL: [Self; 14] = [
        Self::FullPrecisionBase,
        Self::DequantizedBase,
        Self::TiedEmbeddings,
        Self::SlidingWindow,
        Self::ChunkedPrefill,
        Self::Preemption,
        Self::PrefixCache,
        Self::Composition,
        Self::RequestScale,
        Self::SpeculativeDecoding,
        Self::BeamSearch,
        Self::SleepMode,
        Self::TensorParallel,
        Self::QuantizedCompute,
    ];
}

/// Pairs that work, and give the results of plain LoRA on the base as it is computed.
pub const SUPPORTED: &[(AdapterFeature, &[EngineFeature])] = &[
    (AdapterFeature::Linear, COMPUTED_HERE),
    (AdapterFeature::Head, COMPUTED_HERE),
    (AdapterFeature::Embedding, COMPUTED_HERE),
];

const COMPUTED_HERE: &[EngineFeature] = &[
    EngineFeature::FullPrecisionBase,
    EngineFeature::DequantizedBase,
    EngineFeature::TiedEmbeddings,
    EngineFeature::SlidingWindow,
    EngineFeature::ChunkedPrefill,
    EngineFeature::Preemption,
    EngineFeature::PrefixCache,
    EngineFeature::Composition,
    EngineFeature::RequestScale,
];

/// Whether two features work together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// They do, and tests show it.
    Supported,
    /// They do not; whichever comes second is refused.
    Refused,
}

/// What the table says of a pair.
pub fn verdict(adapter: AdapterFeature, engine: EngineFeature) -> Verdict {
    let row = SUPPORTED.iter().find(|(feature, _)| *feature == adapter);
    match row {
        Some((_, engines)) if engines.contains(&engine) => Verdict::Supported,
        _ => Verdict::Refused,
    }
}

/// The whole table, for documentation and for tests that walk it.
pub fn table() -> Vec<(AdapterFeature, EngineFeature, Verdict)> {
    AdapterFeature::ALL
        .iter()
        .flat_map(|&adapter| EngineFeature::ALL.iter().map(move |&engine| (adapter, engine, verdict(adapter, engine))))
        .collect()
}
