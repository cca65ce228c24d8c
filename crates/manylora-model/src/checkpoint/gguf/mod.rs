//! GGUF: weights, configuration and tokenizer in one file, dequantized at load.
//!
//! [`header`] parses bytes that are not trusted, [`metadata`] answers for keys, [`model`] reads the specification and
//! the tokenizer out of them, [`names`] speaks Hugging Face, [`blocks`] turns blocks into f32 (`quantized` does it for
//! the quantized ones, and needs the feature `dequantize`).

mod blocks;
pub mod header;
pub mod metadata;
mod model;
mod names;
#[cfg(feature = "dequantize")]
mod quantized;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use manylora_kernels::{KernelError, RowSource};
use rayon::prelude::*;

use self::header::{GgufHeader, GgufTensor};
use super::{
    ContentHash, GenerationDefaults, GgufTokenizer, MappedFile, Opened, QuantizationNote, TensorStore, TokenizerSource,
    hash_field,
};
use crate::error::ModelError;
use crate::spec::ModelSpec;

pub use self::metadata::{GgufError, GgufMetadata, GgufValue};
pub use self::model::tokenizer;

/// Opens a GGUF file of the Llama, Qwen2 or Qwen3 architecture.
///
/// Only the header is read. [`ModelError::Malformed`] names what is broken, [`ModelError::Unsupported`] what is not
/// supported.
pub fn open(path: &Path) -> Result<Opened, ModelError> {
    let file = MappedFile::open(path)?;
    let GgufContents { spec, names, generation, tokenizer, quantization, tensors } = read(path, file.bytes())?;
    Ok(Opened {
        spec,
        names,
        generation,
        tokenizer: TokenizerSource::Gguf(Box::new(tokenizer)),
        quantization,
        store: Box::new(GgufStore { file, tensors }),
    })
}

/// What the header of a GGUF file says, checked.
#[derive(Clone, Debug)]
pub struct GgufContents {
    /// The model.
    pub spec: ModelSpec,
    /// `general.name`, if there is one.
    pub names: Vec<String>,
    /// Special ids.
    pub generation: GenerationDefaults,
    /// The tokenizer's metadata.
    pub tokenizer: GgufTokenizer,
    /// What is quantized, if anything.
    pub quantization: Option<QuantizationNote>,
    /// By Hugging Face name.
    tensors: BTreeMap<String, Stored>,
}

/// Reads the header of a whole file's bytes; `path` is what errors name.
pub fn read(path: &Path, file: &[u8]) -> Result<GgufContents, ModelError> {
    let damaged = |error: GgufError| ModelError::Malformed { path: path.to_path_buf(), message: error.0 };
    let unsupported = |what: String| ModelError::Unsupported { message: format!("`{}` {what}", path.display()) };
    let header = GgufHeader::parse(file).map_err(damaged)?;
    let model = model::read(path, &header, file)?;
    let mut tensors = BTreeMap::new();
    for tensor in &header.tensors {
        if tensor.name == model::ROPE_FACTORS {
            continue;
        }
        let name = names::hugging_face(&tensor.name).ok_or_else(|| {
            unsupported(format!(
                "holds the tensor `{}`, which no {} model that is supported has; leaving it out would change the model",
                metadata::shown(&tensor.name),
                model.architecture
            ))
        })?;
        if !blocks::readable(tensor.kind) {
            return Err(unsupported(format!(
                "holds the tensor `{}` as {}, and this program was built without the feature `dequantize`; build it \
                 with that feature, or use a model in F32, F16 or BF16",
                metadata::shown(&tensor.name),
                tensor.kind.name()
            )));
        }
        let permuted_head = (model.permuted
            && [".self_attn.q_proj.", ".self_attn.k_proj."].iter().any(|part| name.contains(part)))
        .then_some(model.spec.head_dim);
        if permuted_head.is_some_and(|head| !elements_of_rows(tensor).is_multiple_of(head)) {
            return Err(damaged(GgufError(format!(
                "the tensor `{}` does not have whole heads of {} rows",
                metadata::shown(&tensor.name),
                model.spec.head_dim
            ))));
        }
        tensors.insert(name, Stored { tensor: tensor.clone(), permuted_head, content: Arc::default() });
    }
    let parameters = tensors.values().map(|stored| (stored.tensor.rows * stored.tensor.columns) as u64).sum();
    let bytes_on_disk = tensors.values().map(|stored| stored.tensor.bytes as u64).sum();
    let quantization = model::dominant_type(&header).map(|kind| QuantizationNote {
        scheme: format!("GGUF {}", kind.name()),
        bytes_on_disk,
        parameters,
    });
    Ok(GgufContents {
        spec: model.spec,
        names: model.names,
        generation: model.generation,
        tokenizer: model.tokenizer,
        quantization,
        tensors,
    })
}

/// How many elements the un-permutation moves: rows of a matrix, elements of a bias.
fn elements_of_rows(tensor: &GgufTensor) -> usize {
    if tensor.dimensions == 1 { tensor.columns } else { tensor.rows }
}

/// A tensor and what must be undone to it.
#[derive(Clone, Debug)]
struct Stored {
    tensor: GgufTensor,
    /// Width of a head whose rows are interleaved pairs (q and k of the llama architecture), as ggml's rotary
    /// embedding wants them, instead of two halves, as ours does.
    permuted_head: Option<usize>,
    content: Arc<ContentHash>,
}

impl Stored {
    fn bytes<'a>(&self, file: &'a MappedFile) -> &'a [u8] {
        &file.bytes()[self.tensor.start..self.tensor.start + self.tensor.bytes]
    }

    fn digest(&self, file: &MappedFile) -> [u8; 32] {
        self.content.digest(self.bytes(file))
    }
}

/// Where row `row` of the half-split order is in the interleaved order: position `half * s + j` of a head comes from
/// position `2 * j + s`.
fn interleaved_row(row: usize, head: usize) -> usize {
    let (base, within, half) = (row / head * head, row % head, head / 2);
    base + 2 * (within % half) + within / half
}

/// The tensors of a mapped GGUF file, under Hugging Face names.
struct GgufStore {
    file: MappedFile,
    tensors: BTreeMap<String, Stored>,
}

impl GgufStore {
    fn stored(&self, name: &str) -> Result<&Stored, ModelError> {
        self.tensors.get(name).ok_or_else(|| ModelError::Malformed {
            path: self.file.path().to_path_buf(),
            message: format!("tensor `{name}` is missing"),
        })
    }

    fn wrong_shape(&self, name: &str, stored: &Stored) -> ModelError {
        ModelError::Malformed {
            path: self.file.path().to_path_buf(),
            message: format!("tensor `{name}` has {} dimension(s) in the file", stored.tensor.dimensions),
        }
    }
}

impl TensorStore for GgufStore {
    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.tensors.get(name).map(|stored| match stored.tensor.dimensions {
            1 => vec![stored.tensor.columns],
            _ => vec![stored.tensor.rows, stored.tensor.columns],
        })
    }

    fn matrix(&self, name: &str) -> Result<Box<dyn RowSource + '_>, ModelError> {
        let stored = self.stored(name)?;
        if stored.tensor.dimensions != 2 {
            return Err(self.wrong_shape(name, stored));
        }
        self.file.will_need(stored.tensor.start..stored.tensor.start + stored.tensor.bytes);
        Ok(Box::new(GgufRows { bytes: stored.bytes(&self.file), stored }))
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let stored = self.stored(name)?;
        if stored.tensor.dimensions != 1 {
            return Err(self.wrong_shape(name, stored));
        }
        let mut values = vec![0.0; stored.tensor.columns];
        blocks::dequantize(stored.tensor.kind, stored.bytes(&self.file), &mut values)
            .map_err(|message| ModelError::Malformed { path: self.file.path().to_path_buf(), message })?;
        Ok(match stored.permuted_head {
            None => values,
            Some(head) => (0..values.len()).map(|row| values[interleaved_row(row, head)]).collect(),
        })
    }

    fn discard(&self, name: &str) {
        if let Some(stored) = self.tensors.get(name) {
            stored.digest(&self.file);
            self.file.discard(stored.tensor.start..stored.tensor.start + stored.tensor.bytes);
        }
    }

    fn storage_bytes(&self) -> u64 {
        self.tensors.values().map(|stored| stored.tensor.bytes as u64).sum()
    }

    fn digest_into(&self, hasher: &mut blake3::Hasher) {
        let digests: Vec<[u8; 32]> = self.tensors.par_iter().map(|(_, stored)| stored.digest(&self.file)).collect();
        for ((name, stored), digest) in self.tensors.iter().zip(digests) {
            let tensor = &stored.tensor;
            hash_field(hasher, name.as_bytes());
            hash_field(hasher, format!("{} {} {}", tensor.kind.name(), tensor.rows, tensor.columns).as_bytes());
            hash_field(hasher, &[u8::from(stored.permuted_head.is_some())]);
            hasher.update(&digest);
        }
    }
}

/// Rows of one tensor, dequantized as they are read; can be read by any number of threads.
struct GgufRows<'a> {
    bytes: &'a [u8],
    stored: &'a Stored,
}

impl RowSource for GgufRows<'_> {
    fn rows(&self) -> usize {
        self.stored.tensor.rows
    }

    fn columns(&self) -> usize {
        self.stored.tensor.columns
    }

    fn read(&self, first: usize, out: &mut [f32]) -> Result<(), KernelError> {
        let tensor = &self.stored.tensor;
        let (columns, row_bytes) = (tensor.columns, tensor.row_bytes());
        let count = out.len() / columns;
        if count * columns != out.len() || first.checked_add(count).is_none_or(|end| end > tensor.rows) {
            return Err(KernelError::Source(format!(
                "rows from {first} with {} values are not rows of `{}`, which has {} of {columns}",
                out.len(),
                tensor.name,
                tensor.rows
            )));
        }
        let named = |message| KernelError::Source(format!("tensor `{}`: {message}", tensor.name));
        let Some(head) = self.stored.permuted_head else {
            let bytes = &self.bytes[first * row_bytes..(first + count) * row_bytes];
            blocks::dequantize(tensor.kind, bytes, out).map_err(named)?;
            self.stored.content.add(first * row_bytes, bytes, self.bytes.len());
            return Ok(());
        };
        for (row, out) in (first..).zip(out.chunks_exact_mut(columns)) {
            let source = interleaved_row(row, head);
            let bytes = &self.bytes[source * row_bytes..(source + 1) * row_bytes];
            blocks::dequantize(tensor.kind, bytes, out).map_err(named)?;
        }
        Ok(())
    }
}
