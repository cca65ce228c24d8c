//! A validated adapter in memory, ready to be packed by a backend.

use std::collections::BTreeMap;

use half::{bf16, f16};
use manylora_kernels::cpu::{FactorMeter, SimdLevel};
use manylora_kernels::{FactorSink, KernelError, RowSource, Site, SiteShape, StorageType, StoredFactor};
use rayon::prelude::*;
use safetensors::Dtype;
use serde_json::Value;

use super::config::AdapterConfig;
use super::digest::{FactorsDigest, adapter_digest, hex};
use super::effect::product_norm;
use super::factors::{Factors, MakeRoom, SiteFactors, TensorBytes, factor_type, stream, widen};
use super::fault::Fault;
use super::header::check_base_name;
use super::matching::{BaseCopy, Matched, MatchedSite, match_tensors};
use super::policy::AdapterPolicy;
use super::report::LoadReport;
use super::spectrum::Spectrum;
use super::tensor_file::TensorEntry;
use crate::error::AdapterRefusal;

/// Largest finite value of float16.
const FP16_MAX: f32 = 65504.0;

/// Rows of a base matrix compared at a time.
const COMPARED_ROWS: usize = 64;

/// One tensor given in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryTensor {
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Element type; float32, float16 and bfloat16 are accepted.
    pub dtype: Dtype,
    /// Little-endian, row-major.
    pub bytes: Vec<u8>,
}

/// An adapter whose configuration, shapes and values were checked. It owns its factors as the file stores them.
#[derive(Clone)]
pub struct PreparedAdapter {
    /// Adapted sites, sorted by index.
    pub sites: Vec<SiteShape>,
    /// Content digest: the adapter version's identity.
    pub digest: [u8; 32],
    /// What is applied and what is not.
    pub report: LoadReport,
    factors: Factors,
}

impl std::fmt::Debug for PreparedAdapter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PreparedAdapter")
            .field("adapter", &self.report.adapter)
            .field("digest", &hex(&self.digest))
            .field("sites", &self.sites.len())
            .finish_non_exhaustive()
    }
}

impl PreparedAdapter {
    /// Writes the factors of `sites[index]` as f32, row-major: A `[rank, input]`, B `[output, rank]`. The vectors are
    /// resized.
    pub fn fill(&self, index: usize, a: &mut Vec<f32>, b: &mut Vec<f32>) -> Result<(), AdapterRefusal> {
        let Some((stored_a, stored_b)) = self.factors.site(index) else {
            let reason = format!("site number `{index}` was asked for and it has {} sites", self.factors.len());
            return Err(Fault::invalid(reason).into_refusal(self.report.clone()));
        };
        widen(stored_a, a);
        widen(stored_b, b);
        Ok(())
    }

    /// Gives the factors of every site, as they are stored, to whoever packs them.
    pub fn feed(&self, sink: &mut FactorSink<'_>) -> Result<(), KernelError> {
        self.factors.iter().enumerate().try_for_each(|(index, (a, b))| sink(index, a, b))
    }

    /// Singular values of B A at each of `sites`, on all threads. The largest step holds one site's factors as f32 and a few
    /// matrices of `[rank, rank]` for each thread.
    pub fn spectra(&self) -> Vec<Spectrum> {
        let of = |(place, site): (usize, &SiteShape)| {
            let (mut a, mut b) = (Vec::new(), Vec::new());
            if let Some((stored_a, stored_b)) = self.factors.site(place) {
                widen(stored_a, &mut a);
                widen(stored_b, &mut b);
            }
            Spectrum::of(&a, &b, site.rank as usize)
        };
        self.sites.par_iter().enumerate().map(of).collect()
    }

    /// Bytes that this value holds on the host.
    pub fn host_bytes(&self) -> usize {
        self.factors.bytes()
    }

    /// An adapter from memory, checked as one from a folder is. `config` is what `adapter_config.json` would say.
    pub fn from_tensors(
        name: &str,
        config: &Value,
        tensors: &BTreeMap<String, MemoryTensor>,
        policy: &AdapterPolicy,
    ) -> Result<Self, AdapterRefusal> {
        let mut report = LoadReport::new(name, "");
        let mut build = || {
            let config = AdapterConfig::from_value(config, policy.max_rank)?;
            config.describe(&mut report);
            check_base_name(&config, policy, &mut report)?;
            let (entries, mut bytes) = memory_entries(tensors)?;
            let matched = match_tensors(&config, &entries, policy, &mut report)?;
            prepare(&config, &matched, &entries, &mut bytes, policy, &mut report)
        };
        match build() {
            Ok(parts) => Ok(parts.into_adapter(report)),
            Err(fault) => Err(fault.into_refusal(report)),
        }
    }
}

struct MemoryBytes<'a>(&'a BTreeMap<String, MemoryTensor>);

impl TensorBytes for MemoryBytes<'_> {
    fn read(&mut self, tensor: &TensorEntry, first: u64, out: &mut [u8]) -> Result<(), Fault> {
        let range = first as usize..first as usize + out.len();
        let source = self.0.get(&tensor.name).and_then(|tensor| tensor.bytes.get(range));
        let Some(source) = source else {
            return Err(Fault::invalid(format!("tensor `{}` is too short", tensor.name)).key(&tensor.name));
        };
        out.copy_from_slice(source);
        Ok(())
    }
}

fn memory_entries(tensors: &BTreeMap<String, MemoryTensor>) -> Result<(Vec<TensorEntry>, MemoryBytes<'_>), Fault> {
    let mut entries = Vec::with_capacity(tensors.len());
    for (name, MemoryTensor { shape, dtype, bytes }) in tensors {
        let bits = shape.iter().try_fold(dtype.bitsize(), |product, &size| product.checked_mul(size));
        if bits != bytes.len().checked_mul(8) {
            let reason = format!("tensor `{name}` of {dtype:?} {shape:?} is given {} bytes", bytes.len());
            return Err(Fault::invalid(reason).key(name));
        }
        entries.push(TensorEntry {
            name: name.clone(),
            dtype: *dtype,
            shape: shape.clone(),
            offset: 0,
            bytes: bytes.len(),
        });
    }
    Ok((entries, MemoryBytes(tensors)))
}

/// The values of an adapter, before they are joined with its report.
pub(super) struct Parts {
    sites: Vec<SiteShape>,
    digest: [u8; 32],
    factors: Factors,
}

impl Parts {
    pub(super) fn into_adapter(self, report: LoadReport) -> PreparedAdapter {
        let Self { sites, digest, factors } = self;
        PreparedAdapter { sites, digest, report, factors }
    }
}

/// Reads and checks every value, and completes the report.
pub(super) fn prepare(
    config: &AdapterConfig,
    matched: &Matched,
    tensors: &[TensorEntry],
    bytes: &mut dyn TensorBytes,
    policy: &AdapterPolicy,
    report: &mut LoadReport,
) -> Result<Parts, Fault> {
    compare_copies(matched, tensors, bytes, policy, report)?;
    let mut examiner = Examiner::new(matched, tensors, policy);
    let factors =
        Factors::read(&matched.sites, tensors, bytes, &mut |index, factors| examiner.examine(index, factors))?;
    if must_tie(config, policy) {
        check_transposed(&matched.sites, &factors)?;
    }
    let digest = examiner.finish(report);
    Ok(Parts { sites: matched.sites.iter().map(|site| site.shape).collect(), digest, factors })
}

/// As [`prepare`], but the factors go to `sink` one site after the other and are not kept; returns their digest. With the
/// report of an earlier time values are only hashed, and what that found is taken over if they are the same.
pub(super) fn prepare_into(
    sink: &mut FactorSink<'_>,
    matched: &Matched,
    tensors: &[TensorEntry],
    bytes: &mut dyn TensorBytes,
    policy: &AdapterPolicy,
    (known, make_room): (Option<&LoadReport>, &MakeRoom<'_>),
    report: &mut LoadReport,
) -> Result<[u8; 32], Fault> {
    compare_copies(matched, tensors, bytes, policy, report)?;
    let mut examiner = Examiner::new(matched, tensors, policy);
    examiner.known = known;
    stream(&matched.sites, tensors, bytes, make_room, &mut |index, factors| {
        examiner.examine(index, factors)?;
        sink(index, factors.a, factors.b).map_err(|error| Fault::invalid(error.to_string()))
    })?;
    Ok(examiner.finish(report))
}

/// Whether the factors of the head and of the embedding must be looked at side by side.
pub(super) fn must_tie(config: &AdapterConfig, policy: &AdapterPolicy) -> bool {
    config.ties_head_to_embedding && policy.spec.tied
}

fn compare_copies(
    matched: &Matched,
    tensors: &[TensorEntry],
    bytes: &mut dyn TensorBytes,
    policy: &AdapterPolicy,
    report: &mut LoadReport,
) -> Result<(), Fault> {
    for copy in &matched.copies {
        compare_with_base(copy, &tensors[copy.tensor], bytes, policy)?;
        let reason = format!("a copy of the base's `{}`, identical to it", copy.module);
        report.ignored.insert(tensors[copy.tensor].name.clone(), reason);
    }
    Ok(())
}

/// Checks, measures and hashes the values of sites, one after the other in the same memory. It does so on this thread
/// alone: adapters are loaded while others are served, who need the other cores.
struct Examiner<'p> {
    sites: &'p [MatchedSite],
    tensors: &'p [TensorEntry],
    policy: &'p AdapterPolicy,
    /// Largest magnitude that surely fits.
    most: f32,
    meter: FactorMeter,
    /// Factors that need a second look.
    widened: (Vec<f32>, Vec<f32>),
    /// By position of the site: `||scale B A||_F` and the digest of the factors.
    found: Vec<Option<(f64, FactorsDigest)>>,
    /// What was found when the same content was examined before.
    known: Option<&'p LoadReport>,
}

impl<'p> Examiner<'p> {
    fn new(matched: &'p Matched, tensors: &'p [TensorEntry], policy: &'p AdapterPolicy) -> Self {
        let most = match (policy.check_fp16_range, policy.dtype) {
            (true, _) | (false, StorageType::F16) => FP16_MAX,
            (false, StorageType::Bf16) => bf16::MAX.to_f32(),
            (false, StorageType::F32) => f32::MAX,
        };
        // A level that does not exist is the engine's to refuse.
        let level = SimdLevel::from_environment().unwrap_or_else(|_| SimdLevel::detect());
        Self {
            sites: &matched.sites,
            tensors,
            policy,
            most,
            meter: FactorMeter::new(level),
            widened: Default::default(),
            found: vec![None; matched.sites.len()],
            known: None,
        }
    }

    fn examine(&mut self, index: usize, factors: SiteFactors<'_>) -> Result<(), Fault> {
        let SiteFactors { a, b, joined } = factors;
        let site = &self.sites[index];
        if let Some(known) = self.known {
            let effect = known.modules.get(&site.module).and_then(|module| module.effect).unwrap_or_default();
            self.found[index] = Some((effect, FactorsDigest::new(a, b, joined)));
            return Ok(());
        }
        let rank = site.shape.rank as usize;
        let measure = self.meter.measure(a, b, rank);
        let (wide_a, wide_b) = &mut self.widened;
        for (tensor, stored, largest, wide) in
            [(site.a, a, measure.largest_a, &mut *wide_a), (site.b, b, measure.largest_b, &mut *wide_b)]
        {
            if largest.is_nan() || largest > self.most {
                widen(stored, wide);
                check_values(&self.tensors[tensor].name, wide, self.policy)?;
            }
        }
        let norm = measure.product_norm.unwrap_or_else(|| {
            widen(a, wide_a);
            widen(b, wide_b);
            product_norm(wide_a, wide_b, rank)
        });
        self.found[index] = Some((norm * f64::from(site.shape.scale).abs(), FactorsDigest::new(a, b, joined)));
        Ok(())
    }

    /// Completes the report and returns the adapter's digest.
    fn finish(self, report: &mut LoadReport) -> [u8; 32] {
        // Every site was shown once.
        let found: Vec<_> = self.found.into_iter().flatten().collect();
        for (site, (effect, _)) in self.sites.iter().zip(&found) {
            if let Some(module) = report.modules.get_mut(&site.module) {
                module.effect = Some(*effect);
            }
        }
        if found.iter().all(|(effect, _)| *effect <= 0.0) {
            report.warnings.push("it has no effect: scale x B A is zero in every module".to_owned());
        }
        let shapes: Vec<SiteShape> = self.sites.iter().map(|site| site.shape).collect();
        let digests: Vec<FactorsDigest> = found.iter().map(|(_, digest)| *digest).collect();
        let digest = adapter_digest(&shapes, &digests);
        report.version = Some(hex(&digest));
        digest
    }
}

/// Refuses values that are not numbers or do not fit the format they will be computed in.
fn check_values(key: &str, values: &[f32], policy: &AdapterPolicy) -> Result<(), Fault> {
    let fits = |value: f32| {
        value.is_finite()
            && !((policy.check_fp16_range || policy.dtype == StorageType::F16) && value.abs() > FP16_MAX)
            && (policy.dtype != StorageType::Bf16 || bf16::from_f32(value).is_finite())
    };
    let Some(position) = values.iter().position(|&value| !fits(value)) else {
        return Ok(());
    };
    let value = values[position];
    let reason = if !value.is_finite() {
        format!("`{key}` holds {value} at element {position}: training diverged or the file is damaged")
    } else if policy.check_fp16_range && value.abs() > FP16_MAX {
        format!("`{key}` holds {value}, which is beyond float16's {FP16_MAX}; use dtype bfloat16 or float32")
    } else {
        format!("`{key}` holds {value}, which is beyond bfloat16's range; use dtype float32")
    };
    Err(Fault::invalid(reason).key(key))
}

/// A tied head's delta must be the transpose of the embedding's.
fn check_transposed(sites: &[MatchedSite], factors: &Factors) -> Result<(), Fault> {
    let find = |wanted: Site| sites.iter().position(|site| site.shape.site == wanted);
    let (Some(embedding), Some(head)) = (find(Site::EMBED), find(Site::HEAD)) else {
        return Ok(());
    };
    let (Some(embedding_factors), Some(head_factors)) = (factors.site(embedding), factors.site(head)) else {
        return Ok(());
    };
    let values = |stored: StoredFactor<'_>| {
        let mut values = Vec::new();
        widen(stored, &mut values);
        values
    };
    let rank = sites[head].shape.rank as usize;
    let transposes = |wide: &[f32], tall: &[f32]| {
        let columns = wide.len() / rank;
        wide.len() == tall.len()
            && (0..rank).all(|row| (0..columns).all(|column| wide[row * columns + column] == tall[column * rank + row]))
    };
    let tied = sites[embedding].shape.rank == sites[head].shape.rank
        && transposes(&values(head_factors.0), &values(embedding_factors.1))
        && transposes(&values(embedding_factors.0), &values(head_factors.1));
    if tied {
        return Ok(());
    }
    Err(Fault::invalid(
        "`ensure_weight_tying` is set and the factors of `lm_head` are not the transposes of those of `embed_tokens`",
    )
    .key("ensure_weight_tying"))
}

/// A copy of a base matrix may only be left out when it is the base's own.
fn compare_with_base(
    copy: &BaseCopy,
    tensor: &TensorEntry,
    bytes: &mut dyn TensorBytes,
    policy: &AdapterPolicy,
) -> Result<(), Fault> {
    let key = &tensor.name;
    let refuse = |reason: String| Fault::invalid(reason).key(key);
    let unreadable =
        || refuse(format!("`{key}` is a copy of `{}`, which cannot be compared with this base", copy.module));
    let matrix: Box<dyn RowSource + '_> = policy.base_tensors.matrix(&copy.module).ok_or_else(unreadable)?;
    let (rows, columns) = (matrix.rows(), matrix.columns());
    if tensor.shape != [rows, columns] {
        return Err(refuse(format!("`{key}` has shape {:?}; the base has [{rows}, {columns}]", tensor.shape)));
    }
    let base_dtype = match policy.spec.checkpoint_dtype.as_str() {
        "float16" => Dtype::F16,
        "bfloat16" => Dtype::BF16,
        _ => Dtype::F32,
    };
    let dtype = factor_type(tensor.dtype);
    let width = columns * dtype.bytes();
    let (mut stored, mut values) = (Vec::new(), Vec::new());
    let mut base = Vec::new();
    for first in (0..rows).step_by(COMPARED_ROWS) {
        let count = COMPARED_ROWS.min(rows - first);
        stored.resize(count * width, 0);
        bytes.read(tensor, (first * width) as u64, &mut stored)?;
        widen(StoredFactor { dtype, bytes: &stored }, &mut values);
        base.resize(count * columns, 0.0);
        matrix
            .read(first, &mut base)
            .map_err(|error| refuse(format!("`{key}` could not be compared with the base: {error}")))?;
        let differs = values
            .iter()
            .zip(&base)
            .position(|(&copy, &base)| copy != round(base, tensor.dtype) && round(copy, base_dtype) != base);
        if let Some(position) = differs {
            return Err(refuse(format!(
                "`{key}` is a copy of `{}` that differs from this base (row {}: {} instead of {}): the adapter belongs \
                 to another or a changed base",
                copy.module,
                first + position / columns,
                values[position],
                base[position]
            )));
        }
    }
    Ok(())
}

/// A value rounded to a format and widened again.
fn round(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::BF16 => bf16::from_f32(value).to_f32(),
        Dtype::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    }
}
