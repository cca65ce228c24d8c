//! A validated adapter in memory, ready to be packed by a backend.

use std::collections::BTreeMap;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use manylora_kernels::{RowSource, Site, SiteShape, StorageType};
use rayon::prelude::*;
use safetensors::Dtype;
use serde_json::Value;

use super::config::AdapterConfig;
use super::digest::{Stored, adapter_digest, factors_digest, hex};
use super::effect::product_norm;
use super::fault::Fault;
use super::header::check_base_name;
use super::matching::{BaseCopy, Matched, MatchedSite, match_tensors};
use super::policy::AdapterPolicy;
use super::report::LoadReport;
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

/// Where the bytes of an adapter's tensors come from.
pub(super) trait TensorBytes {
    /// Fills `out` with the bytes of `tensor` from `first` on.
    fn read(&mut self, tensor: &TensorEntry, first: u64, out: &mut [u8]) -> Result<(), Fault>;
}

/// A factor as it is stored.
#[derive(Clone)]
struct Factor {
    dtype: Dtype,
    bytes: Vec<u8>,
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
    factors: Vec<(Factor, Factor)>,
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
        let Some((factor_a, factor_b)) = self.factors.get(index) else {
            let reason = format!("site number `{index}` was asked for and it has {} sites", self.factors.len());
            return Err(Fault::invalid(reason).into_refusal(self.report.clone()));
        };
        decode(factor_a.dtype, &factor_a.bytes, a);
        decode(factor_b.dtype, &factor_b.bytes, b);
        Ok(())
    }

    /// Bytes that this value holds on the host.
    pub fn host_bytes(&self) -> usize {
        self.factors.iter().map(|(a, b)| a.bytes.len() + b.bytes.len()).sum()
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
    factors: Vec<(Factor, Factor)>,
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
    for copy in &matched.copies {
        compare_with_base(copy, &tensors[copy.tensor], bytes, policy)?;
        let reason = format!("a copy of the base's `{}`, identical to it", copy.module);
        report.ignored.insert(tensors[copy.tensor].name.clone(), reason);
    }
    let mut read_factor = |tensor: usize| {
        let entry = &tensors[tensor];
        let mut content = vec![0_u8; entry.bytes];
        bytes.read(entry, 0, &mut content)?;
        Ok(Factor { dtype: entry.dtype, bytes: content })
    };
    let factors = matched
        .sites
        .iter()
        .map(|site| Ok((read_factor(site.a)?, read_factor(site.b)?)))
        .collect::<Result<Vec<_>, Fault>>()?;
    if config.ties_head_to_embedding && policy.spec.tied {
        check_transposed(&matched.sites, &factors)?;
    }

    let examined = matched
        .sites
        .par_iter()
        .zip(&factors)
        .map_init(Default::default, |decoded, (site, factors)| examine(site, factors, tensors, policy, decoded))
        .collect::<Vec<Result<Examined, Fault>>>();
    let mut digests = Vec::with_capacity(examined.len());
    let mut moves = false;
    for (site, examined) in matched.sites.iter().zip(examined) {
        let Examined { digest, effect } = examined?;
        digests.push(digest);
        moves |= effect > 0.0;
        if let Some(module) = report.modules.get_mut(&site.module) {
            module.effect = Some(effect);
        }
    }
    if !moves {
        report.warnings.push("it has no effect: scale x B A is zero in every module".to_owned());
    }
    let sites: Vec<SiteShape> = matched.sites.iter().map(|site| site.shape).collect();
    let digest = adapter_digest(&sites, &digests);
    report.version = Some(hex(&digest));
    Ok(Parts { sites, digest, factors })
}

struct Examined {
    digest: [u8; 32],
    effect: f64,
}

/// Checks the values of one site and measures them. `decoded` is memory that is used again for every site.
fn examine(
    site: &MatchedSite,
    factors: &(Factor, Factor),
    tensors: &[TensorEntry],
    policy: &AdapterPolicy,
    decoded: &mut (Vec<f32>, Vec<f32>),
) -> Result<Examined, Fault> {
    let (a, b) = decoded;
    decode(factors.0.dtype, &factors.0.bytes, a);
    decode(factors.1.dtype, &factors.1.bytes, b);
    check_values(&tensors[site.a].name, a, policy)?;
    check_values(&tensors[site.b].name, b, policy)?;
    let norm = product_norm(a, b, site.shape.rank as usize);
    let stored = |factor| {
        let Factor { dtype, bytes }: &Factor = factor;
        Stored { dtype: *dtype, bytes }
    };
    let digest = factors_digest((a, stored(&factors.0)), (b, stored(&factors.1)));
    Ok(Examined { digest, effect: norm * f64::from(site.shape.scale).abs() })
}

/// Refuses values that are not numbers or do not fit the format they will be computed in.
fn check_values(key: &str, values: &[f32], policy: &AdapterPolicy) -> Result<(), Fault> {
    // The bits of magnitudes are in the order of magnitudes, infinities and NaN above all numbers: the common case is
    // one maximum.
    let largest = values.iter().fold(0, |largest: u32, value| largest.max(value.abs().to_bits()));
    let most = match (policy.check_fp16_range, policy.dtype) {
        (true, _) => FP16_MAX,
        (false, StorageType::Bf16) => bf16::MAX.to_f32(),
        (false, StorageType::F32) => f32::MAX,
    };
    if largest <= most.to_bits() {
        return Ok(());
    }
    let fits = |value: f32| {
        value.is_finite()
            && !(policy.check_fp16_range && value.abs() > FP16_MAX)
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
fn check_transposed(sites: &[MatchedSite], factors: &[(Factor, Factor)]) -> Result<(), Fault> {
    let find = |wanted: Site| sites.iter().position(|site| site.shape.site == wanted);
    let (Some(embedding), Some(head)) = (find(Site::EMBED), find(Site::HEAD)) else {
        return Ok(());
    };
    let values = |factor: &Factor| {
        let mut values = Vec::new();
        decode(factor.dtype, &factor.bytes, &mut values);
        values
    };
    let rank = sites[head].shape.rank as usize;
    let transposes = |wide: &[f32], tall: &[f32]| {
        let columns = wide.len() / rank;
        wide.len() == tall.len()
            && (0..rank).all(|row| (0..columns).all(|column| wide[row * columns + column] == tall[column * rank + row]))
    };
    let tied = sites[embedding].shape.rank == sites[head].shape.rank
        && transposes(&values(&factors[head].0), &values(&factors[embedding].1))
        && transposes(&values(&factors[embedding].0), &values(&factors[head].1));
    if tied {
        return Ok(());
    }
    Err(Fault::invalid(
        "`ensure_weight_tying` is set and the factors of `lm_head` are not the transposes of those of `embed_tokens`",
    )
    .key("ensure_weight_tying"))
}

/// Bytes of a little-endian element.
fn element_bytes(dtype: Dtype) -> usize {
    if dtype == Dtype::F32 { 4 } else { 2 }
}

/// Widens to f32, exactly. The dtype is one of those that [`match_tensors`] lets through.
fn decode(dtype: Dtype, bytes: &[u8], out: &mut Vec<f32>) {
    out.clear();
    match dtype {
        Dtype::BF16 => {
            // The upper half of an f32; written so that it becomes vector code.
            let widen = |pair: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16);
            out.extend(bytes.chunks_exact(2).map(widen));
        }
        Dtype::F16 => {
            out.resize(bytes.len() / 2, 0.0);
            let mut block = [f16::ZERO; 64];
            for (out, bytes) in out.chunks_mut(64).zip(bytes.chunks(128)) {
                for (value, pair) in block.iter_mut().zip(bytes.chunks_exact(2)) {
                    *value = f16::from_le_bytes([pair[0], pair[1]]);
                }
                block[..out.len()].convert_to_f32_slice(out);
            }
        }
        _ => out.extend(bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]))),
    }
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
    let width = columns * element_bytes(tensor.dtype);
    let (mut stored, mut values) = (Vec::new(), Vec::new());
    let mut base = Vec::new();
    for first in (0..rows).step_by(COMPARED_ROWS) {
        let count = COMPARED_ROWS.min(rows - first);
        stored.resize(count * width, 0);
        bytes.read(tensor, (first * width) as u64, &mut stored)?;
        decode(tensor.dtype, &stored, &mut values);
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
