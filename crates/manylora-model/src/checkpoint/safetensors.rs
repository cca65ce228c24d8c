//! Safetensors checkpoints: one file, or shards found through `model.safetensors.index.json`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use half::{bf16, f16};
use manylora_kernels::{KernelError, RowSource, StorageType, StoredRows};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::Value;

use super::{ContentHash, MappedFile, TensorStore, hash_field, not_found_or_io};
use crate::error::ModelError;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Whether a folder holds safetensors weights under the names that Hugging Face uses.
pub fn is_checkpoint(folder: &Path) -> bool {
    folder.join(SINGLE).exists() || folder.join(INDEX).exists()
}

/// One tensor's place.
#[derive(Clone, Debug)]
pub struct Entry {
    file: usize,
    /// Element type on disk.
    pub dtype: Dtype,
    /// Shape on disk.
    pub shape: Vec<usize>,
    range: Range<usize>,
    content: Arc<ContentHash>,
}

/// The tensors of one or more mapped safetensors files.
#[derive(Debug)]
pub struct SafetensorsStore {
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, Entry>,
}

impl SafetensorsStore {
    /// Maps the weights of a model folder and reads their headers.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let index = folder.join(INDEX);
        // As transformers does: the single file wins over an index.
        if folder.join(SINGLE).exists() || !index.exists() {
            return Self::open_files(&[folder.join(SINGLE)]);
        }
        let damaged = |message: String| ModelError::Malformed { path: index.clone(), message };
        let json =
            std::fs::read(&index).map_err(|source| not_found_or_io(&index, "the index of the shards", source))?;
        let json: Value = serde_json::from_slice(&json).map_err(|error| damaged(error.to_string()))?;
        let map = json
            .get("weight_map")
            .and_then(Value::as_object)
            .ok_or_else(|| damaged("it has no `weight_map` object".to_owned()))?;
        let mut places: BTreeMap<&str, &str> = BTreeMap::new();
        for (tensor, file) in map {
            let file = file.as_str().ok_or_else(|| damaged(format!("the shard of `{tensor}` is not a string")))?;
            let mut components = Path::new(file).components();
            if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) {
                return Err(damaged(format!("shard `{file}` is not a plain file name in the same folder")));
            }
            places.insert(tensor, file);
        }
        let names: BTreeSet<&str> = places.values().copied().collect();
        let paths: Vec<PathBuf> = names.iter().map(|name| folder.join(name)).collect();
        for path in &paths {
            if !path.exists() {
                return Err(ModelError::NotFound {
                    path: path.clone(),
                    what: format!("a shard that `{INDEX}` names; download it or remove the index"),
                });
            }
        }
        let store = Self::open_files(&paths)?;
        for (tensor, file) in &places {
            let found = store.tensors.get(*tensor).map(|entry| store.files[entry.file].path());
            if found.and_then(Path::file_name).is_none_or(|name| name != std::ffi::OsStr::new(file)) {
                return Err(damaged(format!("it says that `{tensor}` is in `{file}`, and it is not there")));
            }
        }
        Ok(store)
    }

    /// Maps the given files and reads their headers.
    pub fn open_files(paths: &[PathBuf]) -> Result<Self, ModelError> {
        let mut files = Vec::with_capacity(paths.len());
        let mut tensors: BTreeMap<String, Entry> = BTreeMap::new();
        for (index, path) in paths.iter().enumerate() {
            let file = MappedFile::open(path)?;
            for (name, mut entry) in read_header(path, file.bytes())? {
                entry.file = index;
                if tensors.contains_key(&name) {
                    return Err(ModelError::Malformed {
                        path: path.clone(),
                        message: format!("tensor `{name}` is stored in two shards"),
                    });
                }
                tensors.insert(name, entry);
            }
            files.push(file);
        }
        Ok(Self { files, tensors })
    }

    /// Where a tensor is and what it is made of.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.tensors.get(name)
    }

    /// A tensor's bytes as stored, little-endian.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.tensors.get(name).map(|entry| self.entry_bytes(entry))
    }

    fn entry_bytes(&self, entry: &Entry) -> &[u8] {
        &self.files[entry.file].bytes()[entry.range.clone()]
    }

    fn entry_digest(&self, entry: &Entry) -> [u8; 32] {
        entry.content.digest(self.entry_bytes(entry))
    }

    /// The file that holds a tensor, for error messages.
    pub fn path_of(&self, name: &str) -> PathBuf {
        let file = self.tensors.get(name).map_or(0, |entry| entry.file);
        self.files.get(file).map(|file| file.path().to_path_buf()).unwrap_or_default()
    }

    fn float(&self, name: &str, dimensions: usize) -> Result<(&Entry, FloatType), ModelError> {
        let damaged = |message: String| ModelError::Malformed { path: self.path_of(name), message };
        let entry = self.tensors.get(name).ok_or_else(|| damaged(format!("tensor `{name}` is missing")))?;
        if entry.shape.len() != dimensions {
            return Err(damaged(format!(
                "tensor `{name}` has shape {:?} where {dimensions} dimension(s) are needed",
                entry.shape
            )));
        }
        let kind = FloatType::of(entry.dtype).ok_or_else(|| ModelError::Unsupported {
            message: format!(
                "tensor `{name}` is stored as `{:?}`; weights can be BF16, F16 or F32 (or a quantized format that \
                 config.json's quantization_config names)",
                entry.dtype
            ),
        })?;
        Ok((entry, kind))
    }
}

/// Reads and checks the header of one safetensors file, given its bytes; `path` is what errors name.
pub fn read_header(path: &Path, bytes: &[u8]) -> Result<Vec<(String, Entry)>, ModelError> {
    let damaged = |message: String| ModelError::Malformed { path: path.to_path_buf(), message };
    let (header, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| {
        damaged(format!(
            "{error}; the file has {} bytes and is truncated or not a safetensors file, download it again",
            bytes.len()
        ))
    })?;
    let data = header.checked_add(8).ok_or_else(|| damaged("its header length overflows".to_owned()))?;
    let infos: HashMap<String, _> = metadata.tensors();
    infos
        .into_iter()
        .map(|(name, info)| {
            let range = data + info.data_offsets.0..data + info.data_offsets.1;
            if range.start > range.end || range.end > bytes.len() {
                return Err(damaged(format!("tensor `{name}` lies beyond the end of the file")));
            }
            let content = Arc::default();
            Ok((name, Entry { file: 0, dtype: info.dtype, shape: info.shape.clone(), range, content }))
        })
        .collect()
}

impl TensorStore for SafetensorsStore {
    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.tensors.get(name).map(|entry| entry.shape.clone())
    }

    fn matrix(&self, name: &str) -> Result<Box<dyn RowSource + '_>, ModelError> {
        let (entry, kind) = self.float(name, 2)?;
        let file = &self.files[entry.file];
        file.will_need(entry.range.clone());
        Ok(Box::new(FloatRows { rows: entry.shape[0], columns: entry.shape[1], file, entry, kind }))
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let (entry, kind) = self.float(name, 1)?;
        let mut values = vec![0.0; entry.shape[0]];
        kind.decode(self.entry_bytes(entry), &mut values);
        Ok(values)
    }

    fn discard(&self, name: &str) {
        if let Some(entry) = self.tensors.get(name) {
            self.entry_digest(entry);
            self.files[entry.file].discard(entry.range.clone());
        }
    }

    fn storage_bytes(&self) -> u64 {
        self.tensors.values().map(|entry| entry.range.len() as u64).sum()
    }

    fn digest_into(&self, hasher: &mut blake3::Hasher) {
        let digests: Vec<[u8; 32]> = self.tensors.par_iter().map(|(_, entry)| self.entry_digest(entry)).collect();
        for ((name, entry), digest) in self.tensors.iter().zip(digests) {
            hash_field(hasher, name.as_bytes());
            hash_field(hasher, format!("{:?} {:?}", entry.dtype, entry.shape).as_bytes());
            hasher.update(&digest);
        }
    }
}

/// The floating-point types that weights come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatType {
    /// bfloat16
    Bf16,
    /// IEEE half
    F16,
    /// IEEE single
    F32,
}

impl FloatType {
    /// The float type of a safetensors dtype, if it is one that weights may have.
    pub fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::BF16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::F16),
            Dtype::F32 => Some(Self::F32),
            _ => None,
        }
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// Converts little-endian elements; `bytes` and `out` describe the same number of them.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::Bf16 => {
                for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *value = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
                }
            }
            Self::F16 => {
                for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *value = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
                }
            }
            Self::F32 => {
                for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
            }
        }
    }
}

/// Rows of a float matrix in a file, hashed as they are read.
struct FloatRows<'a> {
    rows: usize,
    columns: usize,
    file: &'a MappedFile,
    entry: &'a Entry,
    kind: FloatType,
}

impl FloatRows<'_> {
    /// Where `length` bytes from row `first` on are in the tensor.
    fn range(&self, first: usize, length: usize) -> Result<Range<usize>, KernelError> {
        let start = first.saturating_mul(self.columns).saturating_mul(self.kind.bytes());
        let end = start.saturating_add(length);
        if end > self.entry.range.len() {
            let values = length / self.kind.bytes();
            return Err(KernelError::Source(format!("row {first} and {values} values are outside of the matrix")));
        }
        Ok(start..end)
    }

    /// Bytes of the tensor that have been read from `start` on.
    fn hash(&self, start: usize, bytes: &[u8]) {
        self.entry.content.add(start, bytes, self.entry.range.len());
    }
}

impl RowSource for FloatRows<'_> {
    fn rows(&self) -> usize {
        self.rows
    }

    fn columns(&self) -> usize {
        self.columns
    }

    fn read(&self, first: usize, out: &mut [f32]) -> Result<(), KernelError> {
        let range = self.range(first, out.len() * self.kind.bytes())?;
        let bytes = &self.file.bytes()[self.entry.range.clone()][range.clone()];
        self.kind.decode(bytes, out);
        self.hash(range.start, bytes);
        Ok(())
    }

    fn stored(&self, dtype: StorageType) -> Option<&dyn StoredRows> {
        let same =
            matches!((self.kind, dtype), (FloatType::Bf16, StorageType::Bf16) | (FloatType::F32, StorageType::F32));
        (same && cfg!(target_endian = "little")).then_some(self)
    }
}

impl StoredRows for FloatRows<'_> {
    fn read_stored(&self, first: usize, out: &mut [u8]) -> Result<(), KernelError> {
        let range = self.range(first, out.len())?;
        self.file.read(self.entry.range.start + range.start, out).map_err(|error| {
            KernelError::Source(format!("`{}` could not be read: {error}", self.file.path().display()))
        })?;
        self.hash(range.start, out);
        Ok(())
    }
}
