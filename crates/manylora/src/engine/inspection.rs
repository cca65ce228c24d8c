//! What an engine would say of an adapter, without an engine: its load report, and a closer look at its factors.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use manylora_core::budget::card;
use manylora_kernels::cpu::packed_adapter_bytes;
use manylora_kernels::{Site, SiteShape};
use manylora_model::adapter::modules::{Resolved, resolve};
use manylora_model::adapter::{self, LoadReport, Spectrum};
use manylora_model::checkpoint::Checkpoint;
use manylora_model::tokenizer::Tokenizer;
use manylora_model::{ModelSpec, RefusalKind};
use serde::Serialize;
use serde_json::Value;

use super::sizes;
use super::startup::{adapter_policy, open_tokenizer};
use crate::config::EngineConfig;
use crate::error::EngineError;

/// What an adapter does to one module.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InspectedModule {
    /// Rank of the factors.
    pub rank: u32,
    /// Alpha, the module's own where there is a pattern.
    pub alpha: f64,
    /// alpha/r, or alpha/sqrt(r) for rank-stabilized adapters.
    pub scale: f32,
    /// Columns of A.
    pub input: u32,
    /// Rows of B.
    pub output: u32,
    /// Numbers in both.
    pub parameters: u64,
    /// Bytes that it takes on the shelf of a processor's engine.
    pub bytes: u64,
    /// Frobenius norm of scale x B A.
    pub effect: Option<f64>,
    /// Singular values of B A, and how many of them count.
    #[serde(flatten)]
    pub spectrum: Spectrum,
}

/// What there is to say of an adapter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspection {
    /// Whether an engine would serve it.
    pub accepted: bool,
    /// Why not.
    pub reason: Option<String>,
    /// Number format in which factors would be stored.
    pub dtype: &'static str,
    /// Largest rank that was allowed.
    pub max_lora_rank: usize,
    /// Whether scales are alpha/sqrt(r); None where the adapter is refused.
    pub rank_stabilized: Option<bool>,
    /// Names of the modules that it touches, without their layers.
    pub target_modules: BTreeSet<String>,
    /// Numbers in all factors.
    pub parameters: u64,
    /// Bytes that a processor's engine charges for it.
    pub bytes: u64,
    /// Bytes that an engine on a card charges for it, in bfloat16 or float16.
    pub card_bytes: u64,
    /// Adapted modules by their path in the base.
    pub modules: BTreeMap<String, InspectedModule>,
    /// The load report, as a server shows it; of a refused adapter, as far as it came.
    pub report: Value,
}

/// Looks at the adapter in `path` for the base of `config`, whose limits (`max_lora_rank`, target modules, roots) it is held
/// to. No weight of the base is read, unless the adapter carries a copy of one.
///
/// # Errors
/// The base cannot be opened, or the adapter is not there, or may not be read. One that is there and is refused is an answer.
pub fn inspect_adapter(config: &EngineConfig, name: &str, path: &Path) -> Result<Inspection, EngineError> {
    let checkpoint = Arc::new(Checkpoint::open(&config.model)?);
    let (dtype, dtype_name) = sizes::processor_format(config.dtype);
    let spec = checkpoint.spec.clone();
    let mut note = None;
    // Only how many ids there are matters here.
    let tokenizer_size = match open_tokenizer(config, &checkpoint) {
        Ok(tokenizer) => tokenizer.as_ref().map_or(spec.vocab_size, Tokenizer::vocab_size),
        Err(error) => {
            note = Some(format!("the base has no tokenizer to compare the adapter's with: {error}"));
            spec.vocab_size
        }
    };
    let policy = adapter_policy(config, checkpoint, dtype, tokenizer_size);
    let mut inspection = Inspection {
        accepted: false,
        reason: None,
        dtype: dtype_name,
        max_lora_rank: config.max_lora_rank,
        rank_stabilized: None,
        target_modules: BTreeSet::new(),
        parameters: 0,
        bytes: 0,
        card_bytes: 0,
        modules: BTreeMap::new(),
        report: Value::Null,
    };
    let looked = adapter::inspect(name, path, &policy).and_then(|header| {
        let scaling = header.scaling().clone();
        Ok((scaling, header.read()?))
    });
    let (scaling, adapter) = match looked {
        Ok(found) => found,
        Err(refusal) if refusal.kind == RefusalKind::Invalid => {
            inspection.reason = Some(refusal.reason);
            inspection.report = refusal.report.map_or(Value::Null, |report| *report);
            return Ok(inspection);
        }
        Err(refusal) => return Err(refusal.into()),
    };
    let spectra = adapter.spectra();
    for (module, found) in &adapter.report.modules {
        let Some((place, shape)) = site_of(&spec, module, &adapter.sites) else { continue };
        let SiteShape { rank, input, output, .. } = *shape;
        let parameters = u64::from(rank) * (u64::from(input) + u64::from(output));
        let inspected = InspectedModule {
            rank,
            alpha: scaling.alpha(module),
            scale: found.scale,
            input,
            output,
            parameters,
            bytes: packed_adapter_bytes(std::slice::from_ref(shape), dtype) as u64,
            effect: found.effect,
            spectrum: spectra[place].clone(),
        };
        inspection.parameters += parameters;
        inspection.target_modules.insert(module.rsplit('.').next().unwrap_or(module).to_owned());
        inspection.modules.insert(module.clone(), inspected);
    }
    inspection.accepted = true;
    inspection.rank_stabilized = Some(scaling.rank_stabilized());
    inspection.bytes = packed_adapter_bytes(&adapter.sites, dtype) as u64;
    inspection.card_bytes = card_bytes(&spec, &adapter.sites);
    let mut report = LoadReport { bytes: inspection.bytes, ..adapter.report.clone() };
    report.warnings.extend(note);
    inspection.report = report.to_json();
    Ok(inspection)
}

fn site_of<'s>(spec: &ModelSpec, module: &str, sites: &'s [SiteShape]) -> Option<(usize, &'s SiteShape)> {
    let path: Vec<String> = module.split('.').map(str::to_owned).collect();
    let Resolved::Module { site, .. } = resolve(spec, &path) else { return None };
    sites.iter().enumerate().find(|(_, shape)| shape.site == site)
}

fn card_bytes(spec: &ModelSpec, sites: &[SiteShape]) -> u64 {
    let factors = sites.iter().map(|shape| {
        let [rank, input, output] = [shape.rank, shape.input, shape.output].map(u64::from);
        if shape.site == Site::EMBED {
            card::embedding_factor_bytes(rank, input, output)
        } else {
            card::factor_bytes(rank, input, output)
        }
    });
    card::adapter_bytes(spec.layers as u64, factors.sum())
}
