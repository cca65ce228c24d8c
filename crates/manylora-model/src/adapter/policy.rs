//! What an adapter is checked against: the base, the limits of the deployment, and where files may lie.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use manylora_kernels::{RowSource, StorageType};

use super::combinations::EngineFeature;
use crate::checkpoint::Checkpoint;
use crate::spec::ModelSpec;

/// Ranks that the kernels compute.
pub const MAX_RANK: usize = 512;

/// Matrices of the base, for comparison with the copies of them that exporters put into adapters.
pub trait BaseTensors: Send + Sync {
    /// The weight of a module (`model.embed_tokens`, `lm_head`, `model.layers.0.self_attn.q_proj`), as the checkpoint
    /// stores it, or None when there is no such matrix. On a tied base `lm_head` is the embedding.
    fn matrix(&self, module: &str) -> Option<Box<dyn RowSource + '_>>;
}

impl BaseTensors for Checkpoint {
    fn matrix(&self, module: &str) -> Option<Box<dyn RowSource + '_>> {
        let mut name = format!("{module}.weight");
        if module == "lm_head" && !self.has(&name) {
            "model.embed_tokens.weight".clone_into(&mut name);
        }
        if self.has(&name) { Self::matrix(self, &name).ok() } else { None }
    }
}

/// A base whose matrices cannot be read back. Adapters that carry copies of base matrices are refused.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoBaseTensors;

impl BaseTensors for NoBaseTensors {
    fn matrix(&self, _module: &str) -> Option<Box<dyn RowSource + '_>> {
        None
    }
}

/// Everything an adapter is checked against. Cheap to clone.
#[derive(Clone)]
pub struct AdapterPolicy {
    /// The base.
    pub spec: ModelSpec,
    /// Largest rank allowed; at most [`MAX_RANK`] is ever allowed.
    pub max_rank: usize,
    /// Number format in which the factors will be stored.
    pub dtype: StorageType,
    /// Refuse values beyond the range of float16 (`dtype="float16"`).
    pub check_fp16_range: bool,
    /// Names of the base: hub id, folder or file name, `_name_or_path`, `general.name`, served names.
    pub base_names: Vec<String>,
    /// Refuse adapters that name another base.
    pub strict_base: bool,
    /// Folders that adapters must lie in once links are resolved (`lora_root`s and the hub cache); None = anywhere.
    pub allowed_roots: Option<Vec<PathBuf>>,
    /// Modules that this deployment allows, by suffix or full path; None = all.
    pub target_modules: Option<Vec<String>>,
    /// Ids that the base's tokenizer knows. Ids of the adapter's own tokenizer beyond it are warned about, beyond the
    /// embedding refused.
    pub tokenizer_size: usize,
    /// Matrices of the base.
    pub base_tensors: Arc<dyn BaseTensors>,
    /// What the engine does with this base; pairs that are not in the table of [`super::combinations`] are refused.
    pub features: Vec<EngineFeature>,
}

/// Of two folders the one that lies in the other; None where they lie apart.
fn inner(one: &Path, other: &Path) -> Option<PathBuf> {
    let (one, other) = (one.canonicalize().ok()?, other.canonicalize().ok()?);
    if one.starts_with(&other) { Some(one) } else { other.starts_with(&one).then_some(other) }
}

impl AdapterPolicy {
    /// The same for an adapter that must lie in this folder, too.
    #[must_use]
    pub fn within(&self, root: &Path) -> Self {
        let allowed_roots = match &self.allowed_roots {
            None => vec![root.to_owned()],
            Some(roots) => roots.iter().filter_map(|other| inner(root, other)).collect(),
        };
        Self { allowed_roots: Some(allowed_roots), ..self.clone() }
    }

    /// A policy with vLLM's defaults: rank up to 16, bfloat16, any name, any place, any module.
    pub fn new(spec: ModelSpec, base_tensors: Arc<dyn BaseTensors>) -> Self {
        Self {
            tokenizer_size: spec.vocab_size,
            spec,
            max_rank: 16,
            dtype: StorageType::Bf16,
            check_fp16_range: false,
            base_names: Vec::new(),
            strict_base: false,
            allowed_roots: None,
            target_modules: None,
            base_tensors,
            features: Vec::new(),
        }
    }
}

impl std::fmt::Debug for AdapterPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AdapterPolicy")
            .field("max_rank", &self.max_rank)
            .field("dtype", &self.dtype)
            .field("check_fp16_range", &self.check_fp16_range)
            .field("base_names", &self.base_names)
            .field("strict_base", &self.strict_base)
            .field("allowed_roots", &self.allowed_roots)
            .field("target_modules", &self.target_modules)
            .field("tokenizer_size", &self.tokenizer_size)
            .field("features", &self.features)
            .finish_non_exhaustive()
    }
}
