//! A base and adapters become one checkpoint: W + the sum of weight x scale x B A, written in Hugging Face's layout.
//!
//! What comes out computes what the engine computes with the adapters beside the base. So a tied matrix that an adapter touches
//! at one end is written twice (PEFT's own merge changes both ends), sums are f64 and rounded once, and what the engine would
//! refuse is refused. Rows are computed and written a block at a time, so that memory does not grow with the model.
//!
//! Reading order: this file, [`sum`] (the numbers), [`shards`] (the files of weights), [`settings`] (the files beside them),
//! [`place`] (a folder that is there whole or not at all).

mod place;
mod settings;
mod shards;
mod sum;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use manylora_kernels::Site;

use crate::adapter::modules::{Resolved, resolve};
use crate::adapter::{AdapterPolicy, MAX_RANK, PreparedAdapter, inspect};
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::spec::{EMBEDDING, HEAD, TensorSpec};

use place::Place;
use shards::ShardPlan;
use sum::Delta;

/// Number format of what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergedType {
    /// float32
    F32,
    /// bfloat16
    Bf16,
    /// float16; values beyond its range are refused.
    F16,
}

impl MergedType {
    /// As configurations spell it: `float32`, `bfloat16`, `float16`.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "float32" => Some(Self::F32),
            "bfloat16" => Some(Self::Bf16),
            "float16" => Some(Self::F16),
            _ => None,
        }
    }

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// Bytes of a number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// An adapter to merge.
#[derive(Clone, Debug)]
pub struct MergedAdapter {
    /// Its folder.
    pub path: PathBuf,
    /// Factor on its scale: what a request's strength is to the engine.
    pub weight: f32,
}

/// What is to be merged, and where it goes.
#[derive(Clone, Debug)]
pub struct MergeRequest {
    /// Folder or GGUF file of the base.
    pub base: PathBuf,
    /// Further names of the base, for comparison with those that adapters give.
    pub base_names: Vec<String>,
    /// Adapters, summed.
    pub adapters: Vec<MergedAdapter>,
    /// The folder to make.
    pub output: PathBuf,
    /// Number format; None = that which the base's configuration names.
    pub dtype: Option<MergedType>,
    /// Most bytes of tensors in a file; a larger tensor has a file of its own.
    pub max_shard_bytes: u64,
    /// Whether a checkpoint that is there already is replaced.
    pub overwrite: bool,
}

impl MergeRequest {
    /// Bytes of a file of weights unless it is said otherwise: 5 GB.
    pub const SHARD_BYTES: u64 = 5_000_000_000;
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Merged {
    /// Where it is.
    pub output: PathBuf,
    /// Number format.
    pub dtype: &'static str,
    /// Files of weights.
    pub shards: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Tensors that differ from the base's.
    pub changed: usize,
    /// Whether head and embedding were one matrix and are two now.
    pub untied: bool,
    /// What a user should know: a base that was dequantized, warnings about adapters.
    pub notes: Vec<String>,
}

/// Told how many bytes of how many are written; false stops the merge.
pub type MergeProgress<'a> = dyn FnMut(u64, u64) -> bool + 'a;

/// Merges. The output appears whole, by a rename, or not at all.
///
/// # Errors
/// The base or an adapter is refused as by the engine ([`ModelError::Adapter`] names it), the output cannot be written
/// ([`ModelError::Output`]), a value does not fit the format, or `progress` stopped it ([`ModelError::Interrupted`]).
pub fn merge(request: &MergeRequest, progress: &mut MergeProgress<'_>) -> Result<Merged, ModelError> {
    let checkpoint = Arc::new(Checkpoint::open(&request.base)?);
    let mut notes = Vec::new();
    let adapters = read_adapters(request, &checkpoint, &mut notes)?;
    let spec = &checkpoint.spec;
    let dtype = match request.dtype {
        Some(dtype) => dtype,
        None => MergedType::parse(&spec.checkpoint_dtype).unwrap_or(MergedType::Bf16),
    };
    notes.extend(checkpoint.quantization.as_ref().map(|note| note.line(dtype.bytes())));
    let touched = |site: Site| adapters.iter().any(|(adapter, _)| adapter.sites.iter().any(|shape| shape.site == site));
    let untied = spec.tied && (touched(Site::EMBED) || touched(Site::HEAD));
    let mut tensors = spec.tensors();
    if untied {
        tensors.push(TensorSpec { name: HEAD.to_owned(), shape: vec![spec.vocab_size, spec.hidden_size] });
        notes.push(
            "head and embedding were one matrix, and an adapter touches one end of it: they are two now \
             (tie_word_embeddings is false)"
                .to_owned(),
        );
    }
    let settings = settings::Settings::read(&checkpoint, dtype, spec.tied && !untied)?;
    let plan = ShardPlan::new(&tensors, dtype, request.max_shard_bytes);
    let sources: Vec<&Path> = request.adapters.iter().map(|adapter| adapter.path.as_path()).collect();
    let place = Place::prepare(&request.output, &request.base, &sources, request.overwrite)?;
    place.check_room(plan.bytes() + settings.bytes())?;

    let mut changed = 0;
    plan.write(place.folder(), &mut |tensor, writer| {
        let tied_head = tensor.name == HEAD && spec.tied;
        let source = if tied_head { EMBEDDING } else { tensor.name.as_str() };
        let deltas = deltas(&checkpoint, &adapters, tensor)?;
        changed += usize::from(!deltas.is_empty());
        sum::write_tensor(&checkpoint, source, tensor, &deltas, dtype, writer, progress)
    })?;
    settings.write(place.folder())?;
    place.finish()?;
    Ok(Merged {
        output: request.output.clone(),
        dtype: dtype.name(),
        shards: plan.shards(),
        bytes: plan.bytes(),
        changed,
        untied,
        notes,
    })
}

/// The adapters with their weights; those of weight 0 are checked and left out.
fn read_adapters(
    request: &MergeRequest,
    checkpoint: &Arc<Checkpoint>,
    notes: &mut Vec<String>,
) -> Result<Vec<(PreparedAdapter, f32)>, ModelError> {
    let mut base_names = checkpoint.names.clone();
    base_names.extend(request.base_names.iter().cloned());
    let policy = AdapterPolicy {
        max_rank: MAX_RANK,
        dtype: manylora_kernels::StorageType::F32,
        base_names,
        ..AdapterPolicy::new(checkpoint.spec.clone(), Arc::<Checkpoint>::clone(checkpoint))
    };
    let mut adapters = Vec::with_capacity(request.adapters.len());
    for MergedAdapter { path, weight } in &request.adapters {
        let name = path.display().to_string();
        if !weight.is_finite() {
            return Err(ModelError::Unsupported { message: format!("the weight of `{name}` is {weight}") });
        }
        let adapter = inspect(&name, path, &policy)?.read()?;
        notes.extend(adapter.report.warnings.iter().map(|warning| format!("adapter `{name}`: {warning}")));
        if *weight != 0.0 {
            adapters.push((adapter, *weight));
        }
    }
    Ok(adapters)
}

/// What the adapters add to a tensor.
fn deltas(
    checkpoint: &Checkpoint,
    adapters: &[(PreparedAdapter, f32)],
    tensor: &TensorSpec,
) -> Result<Vec<Delta>, ModelError> {
    let Some(module) = tensor.name.strip_suffix(".weight") else { return Ok(Vec::new()) };
    let path: Vec<String> = module.split('.').map(str::to_owned).collect();
    let Resolved::Module { site, .. } = resolve(&checkpoint.spec, &path) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for (adapter, weight) in adapters {
        for (index, shape) in adapter.sites.iter().enumerate().filter(|(_, shape)| shape.site == site) {
            let (mut a, mut b) = (Vec::new(), Vec::new());
            adapter.fill(index, &mut a, &mut b)?;
            found.push(Delta::new(shape, &a, &b, *weight)?);
        }
    }
    Ok(found)
}
