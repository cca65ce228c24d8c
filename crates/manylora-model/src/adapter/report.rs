//! The load report: what of an adapter is applied, what is not, and why.

use std::collections::BTreeMap;

use serde::Serialize;

/// What one adapter does to one module.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModuleReport {
    /// Rank of the factors.
    pub rank: u32,
    /// alpha/r, or alpha/sqrt(r) for rank-stabilized adapters.
    pub scale: f32,
    /// Frobenius norm of scale x B A; None until the tensors were read. Zero means that the module is left unchanged.
    pub effect: Option<f64>,
}

/// What was found in an adapter. Serializes to the JSON that users see.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LoadReport {
    /// Name under which it was loaded.
    pub adapter: String,
    /// Path as it was given; empty for adapters from memory.
    pub path: String,
    /// Content digest as 64 hex digits; None until the tensors were read.
    pub version: Option<String>,
    /// `base_model_name_or_path` of its configuration.
    pub base_model: Option<String>,
    /// Adapted modules by their path in the base.
    pub modules: BTreeMap<String, ModuleReport>,
    /// Tensors that are applied, sorted; of a refused adapter, those that nothing is wrong with, as far as it was looked at.
    pub matched: Vec<String>,
    /// Tensors that are not applied although nothing is lost by it, with the reason.
    pub ignored: BTreeMap<String, String>,
    /// Tensors or configuration keys that led to refusal, with the reason.
    pub refused: BTreeMap<String, String>,
    /// Bytes of the factors in the format they are stored in, without a backend's padding.
    pub bytes: u64,
    /// What a user should look at.
    pub warnings: Vec<String>,
}

impl LoadReport {
    /// An empty report.
    pub fn new(adapter: &str, path: &str) -> Self {
        Self { adapter: adapter.to_owned(), path: path.to_owned(), ..Self::default() }
    }

    /// The report as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).unwrap_or(serde_json::Value::Null)
    }
}
