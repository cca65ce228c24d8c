//! Checkpoints: where a model's weights, tokenizer and generation defaults come from.
//!
//! A [`Checkpoint`] is a validated promise that weights can be read: the configuration is understood and every tensor
//! the decoder needs is there with the right shape, and no weight has been read yet. Formats differ in one place only,
//! the [`TensorStore`] behind it: [`safetensors`], [`int4`] (dequantizing on top of safetensors) and
//! [`gguf`] (dequantizing from one file). All of them speak Hugging Face tensor names.

pub mod content;
pub mod generation;
pub mod gguf;
pub mod int4;
pub mod mapped_file;
pub mod memory;
pub mod safetensors;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use manylora_kernels::{KernelError, RowSource};
use serde_json::Value;

use crate::error::ModelError;
use crate::spec::{self, ModelSpec};

pub use content::{ContentHash, content_digest};
pub use generation::GenerationDefaults;
pub use mapped_file::MappedFile;

/// Tensors by their Hugging Face names, read as f32 whatever the format on disk.
///
/// A store answers questions about names and shapes from headers; values are read only through [`Self::matrix`] and
/// [`Self::vector`].
pub trait TensorStore: Send + Sync {
    /// Names of all tensors, in no particular order.
    fn names(&self) -> Vec<String>;

    /// Shape after dequantization, `[rows, columns]` or `[length]`; None when there is no such tensor.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;

    /// The rows of a matrix. The source converts or dequantizes row by row, straight from the file.
    fn matrix(&self, name: &str) -> Result<Box<dyn RowSource + '_>, ModelError>;

    /// A vector.
    fn vector(&self, name: &str) -> Result<Vec<f32>, ModelError>;

    /// A tensor has been read: completes its digest, most of which was computed as it was read, and tells the system that
    /// its pages are not needed in this process's memory for now.
    fn discard(&self, name: &str);

    /// Bytes of all tensor data on disk.
    fn storage_bytes(&self) -> u64;

    /// Feeds everything that tells two checkpoints apart: every tensor's name, storage type, shape and [`content_digest`],
    /// in the order of the names. Tensors that were not read yet are read for it.
    fn digest_into(&self, hasher: &mut blake3::Hasher);
}

/// Where the tokenizer of a checkpoint is.
#[derive(Clone, Debug)]
pub enum TokenizerSource {
    /// `tokenizer.json`, `tokenizer_config.json` and perhaps `chat_template.jinja` in this folder.
    Directory(PathBuf),
    /// The metadata of a GGUF file.
    Gguf(Box<GgufTokenizer>),
}

/// The `tokenizer.*` metadata of a GGUF file, lists checked for equal length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufTokenizer {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE), `llama` (SentencePiece-like), ...
    pub model: String,
    /// `tokenizer.ggml.pre`: name of the pre-tokenizer, such as `llama-bpe`, `qwen2`, `smollm`.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`: the text of every id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type` (1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte), or empty.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.scores`, or empty.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.merges`, each `left right`, or empty.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`
    pub eos: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`
    pub unknown: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`
    pub padding: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.chat_template`
    pub chat_template: Option<String>,
}

/// What is quantized on disk and what it takes once dequantized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizationNote {
    /// Scheme as people name it: `AWQ 4-bit`, `GPTQ 4-bit`, `compressed-tensors pack-quantized`, `GGUF Q4_1`.
    pub scheme: String,
    /// Bytes of the tensor data on disk.
    pub bytes_on_disk: u64,
    /// Number of parameters after dequantization; times the bytes of the load dtype this is what memory holds.
    pub parameters: u64,
}

impl QuantizationNote {
    /// One line for start-up: `AWQ 4-bit, dequantized at load: 0.5 GB on disk, 2.1 GB in memory`.
    pub fn line(&self, bytes_per_parameter: usize) -> String {
        let gigabytes = |bytes: u64| bytes as f64 / 1e9;
        format!(
            "{}, dequantized at load: {:.1} GB on disk, {:.1} GB in memory",
            self.scheme,
            gigabytes(self.bytes_on_disk),
            gigabytes(self.parameters.saturating_mul(bytes_per_parameter as u64)),
        )
    }
}

/// What a format's opener hands over; [`Checkpoint::open`] validates it against the specification.
pub struct Opened {
    /// The model.
    pub spec: ModelSpec,
    /// Names the base answers to, besides the folder or file name.
    pub names: Vec<String>,
    /// Sampling defaults and special ids.
    pub generation: GenerationDefaults,
    /// Where the tokenizer is.
    pub tokenizer: TokenizerSource,
    /// What was quantized, if anything.
    pub quantization: Option<QuantizationNote>,
    /// The tensors.
    pub store: Box<dyn TensorStore>,
}

/// A model on disk, validated but not read.
pub struct Checkpoint {
    /// What the decoder is.
    pub spec: ModelSpec,
    /// The folder or file that was opened.
    pub path: PathBuf,
    /// Names the base answers to: folder or file name, the configuration's `_name_or_path`, GGUF's `general.name`.
    pub names: Vec<String>,
    /// Sampling defaults and special ids.
    pub generation: GenerationDefaults,
    /// Where the tokenizer is.
    pub tokenizer: TokenizerSource,
    /// What was quantized on disk, if anything.
    pub quantization: Option<QuantizationNote>,
    store: Box<dyn TensorStore>,
    digest: OnceLock<[u8; 32]>,
    fp16_range: bool,
}

/// Largest finite value of float16.
const FP16_MAX: f32 = 65504.0;

/// A matrix that is refused where a value is beyond float16's range.
struct WithinFp16<'a> {
    name: String,
    source: Box<dyn RowSource + 'a>,
}

impl RowSource for WithinFp16<'_> {
    fn rows(&self) -> usize {
        self.source.rows()
    }

    fn columns(&self) -> usize {
        self.source.columns()
    }

    fn read(&self, first: usize, out: &mut [f32]) -> Result<(), KernelError> {
        self.source.read(first, out)?;
        within_fp16(&self.name, out)
    }
}

fn within_fp16(name: &str, values: &[f32]) -> Result<(), KernelError> {
    match values.iter().find(|value| value.abs() > FP16_MAX) {
        None => Ok(()),
        Some(&value) => Err(KernelError::Overflow { what: format!("tensor `{name}`"), value, dtype: "float16" }),
    }
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checkpoint").field("path", &self.path).field("spec", &self.spec).finish_non_exhaustive()
    }
}

impl Checkpoint {
    /// Opens a folder (safetensors, single or sharded through an index; or exactly one `.gguf`) or a `.gguf` file.
    ///
    /// Configuration errors and missing tensors and tensors of a wrong shape are found here, before any weight is read.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let metadata = std::fs::metadata(path).map_err(|source| not_found_or_io(path, "a model", source))?;
        let opened = if metadata.is_dir() { open_directory(path)? } else { open_file(path)? };
        Self::validate(path, opened)
    }

    fn validate(path: &Path, opened: Opened) -> Result<Self, ModelError> {
        let Opened { mut spec, names: declared, generation, tokenizer, quantization, store } = opened;
        // A head that is not stored is the embedding, unless the configuration says otherwise (checked before).
        spec.tied |= store.shape(spec::HEAD).is_none();
        check_tensors(path, &spec, store.as_ref())?;
        let mut names: Vec<String> = Vec::new();
        let resolved = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        for name in [path, resolved.as_path()]
            .into_iter()
            .filter_map(|path| path.file_name().map(|name| name.to_string_lossy().into_owned()))
            .chain(declared)
        {
            if !name.is_empty() && !names.contains(&name) {
                names.push(name);
            }
        }
        Ok(Self {
            spec,
            path: path.to_path_buf(),
            names,
            generation,
            tokenizer,
            quantization,
            store,
            digest: OnceLock::new(),
            fp16_range: false,
        })
    }

    /// Refuses values beyond float16's range when tensors are read (`dtype="float16"`).
    #[must_use]
    pub fn within_fp16_range(mut self) -> Self {
        self.fp16_range = true;
        self
    }

    /// Whether there is a tensor of this (Hugging Face) name.
    pub fn has(&self, name: &str) -> bool {
        self.store.shape(name).is_some()
    }

    /// Rows of a matrix, read as f32.
    pub fn matrix(&self, name: &str) -> Result<Box<dyn RowSource + '_>, ModelError> {
        let source = self.store.matrix(name)?;
        Ok(if self.fp16_range { Box::new(WithinFp16 { name: name.to_owned(), source }) } else { source })
    }

    /// A vector, read as f32.
    pub fn vector(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let values = self.store.vector(name)?;
        if self.fp16_range {
            within_fp16(name, &values)?;
        }
        Ok(values)
    }

    /// A tensor has been read: completes its digest, and tells the system that its pages are not needed in this process's
    /// memory for now.
    pub fn discard(&self, name: &str) {
        self.store.discard(name);
    }

    /// Digest of the base (BLAKE3): the specification (as JSON) and, in the order of names, every tensor's name, storage
    /// type, shape and [`content_digest`]. Files and their names do not enter, nor does what is computed from the stored
    /// bytes: a GGUF, AWQ, GPTQ or compressed-tensors base has the digest of its quantized words (and of the scheme that
    /// gives them their meaning), so the same weights stored in another format are another base.
    ///
    /// Computed on first use. Tensors that [`Self::discard`] was called for have been hashed; any others are read now.
    pub fn digest(&self) -> [u8; 32] {
        *self.digest.get_or_init(|| {
            let mut hasher = blake3::Hasher::new();
            hasher.update(b"manylora base 3\0");
            hash_field(&mut hasher, &serde_json::to_vec(&self.spec).unwrap_or_default());
            self.store.digest_into(&mut hasher);
            hasher.finalize().into()
        })
    }

    /// Bytes of the tensor data on disk.
    pub fn storage_bytes(&self) -> u64 {
        self.store.storage_bytes()
    }
}

/// Feeds a length-prefixed field, so that neighbouring fields cannot run into each other.
pub(crate) fn hash_field(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

fn open_directory(path: &Path) -> Result<Opened, ModelError> {
    let config_path = path.join("config.json");
    let has_safetensors = safetensors::is_checkpoint(path);
    if !has_safetensors {
        let mut gguf_files = files_with_extension(path, "gguf")?;
        match gguf_files.len() {
            1 => return gguf::open(&gguf_files.remove(0)),
            0 => {}
            _ => {
                let listed: Vec<String> = gguf_files
                    .iter()
                    .filter_map(|file| file.file_name().map(|name| format!("`{}`", name.to_string_lossy())))
                    .collect();
                return Err(ModelError::Unsupported {
                    message: format!(
                        "`{}` holds several GGUF files ({}); name the file to load",
                        path.display(),
                        listed.join(", ")
                    ),
                });
            }
        }
    }
    if !config_path.is_file() {
        return Err(ModelError::NotFound {
            path: config_path,
            what: "a model folder needs config.json and safetensors weights, or one .gguf file".to_owned(),
        });
    }
    let json = std::fs::read(&config_path).map_err(|source| ModelError::Io { path: config_path.clone(), source })?;
    let config = spec::config_object(&config_path, &json)?;
    let spec = ModelSpec::from_config(&config_path, &config)?;
    if !has_safetensors {
        return Err(ModelError::NotFound {
            path: path.join("model.safetensors"),
            what: "the weights: model.safetensors, or model.safetensors.index.json with its shards (pickled .bin \
                   weights are never read; convert them to safetensors)"
                .to_owned(),
        });
    }
    let files = safetensors::SafetensorsStore::open(path)?;
    let generation = GenerationDefaults::read(path, &config)?;
    let names = config.get("_name_or_path").and_then(Value::as_str).map(str::to_owned).into_iter().collect();
    let tokenizer = TokenizerSource::Directory(path.to_path_buf());
    let (store, quantization): (Box<dyn TensorStore>, _) = match config.get("quantization_config") {
        None | Some(Value::Null) => (Box::new(files), None),
        Some(quantization) => {
            let (store, note) = int4::open(&config_path, quantization, &spec, files)?;
            (store, Some(note))
        }
    };
    if config.get("tie_word_embeddings") == Some(&Value::Bool(false)) && store.shape(spec::HEAD).is_none() {
        return Err(ModelError::Malformed {
            path: path.to_path_buf(),
            message: format!(
                "tensor `{}` is missing and tie_word_embeddings is false; the checkpoint is incomplete",
                spec::HEAD
            ),
        });
    }
    Ok(Opened { spec, names, generation, tokenizer, quantization, store })
}

fn open_file(path: &Path) -> Result<Opened, ModelError> {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase());
    match extension.as_deref() {
        Some("gguf") => gguf::open(path),
        _ => Err(ModelError::Unsupported {
            message: format!(
                "`{}` is not a model: give a folder with config.json and safetensors weights, or a .gguf file",
                path.display()
            ),
        }),
    }
}

/// Every tensor the decoder will ask for is there, with its shape; tensors that would change the result if they were
/// left out are not silently ignored.
fn check_tensors(path: &Path, spec: &ModelSpec, store: &dyn TensorStore) -> Result<(), ModelError> {
    let damaged = |message: String| ModelError::Malformed { path: path.to_path_buf(), message };
    let wanted = spec.tensors();
    let mut missing = Vec::new();
    for tensor in &wanted {
        match store.shape(&tensor.name) {
            None => missing.push(tensor.name.as_str()),
            Some(shape) if shape == tensor.shape => {}
            Some(shape) => {
                return Err(damaged(format!(
                    "tensor `{}` has shape {shape:?} and the configuration asks for {:?}; weights and config.json do \
                     not belong together",
                    tensor.name, tensor.shape
                )));
            }
        }
    }
    if let Some(first) = missing.first() {
        return Err(damaged(format!(
            "tensor `{first}` is missing{}; the checkpoint is incomplete or of another architecture",
            if missing.len() > 1 { format!(" (and {} more)", missing.len() - 1) } else { String::new() }
        )));
    }
    let known: std::collections::HashSet<&str> = wanted.iter().map(|tensor| tensor.name.as_str()).collect();
    let mut unused: Vec<String> = store.names().into_iter().filter(|name| !known.contains(name.as_str())).collect();
    unused.sort();
    // Rotary frequencies are recomputed from the configuration, and a tied head is the embedding by definition.
    let harmless = |name: &str| name.ends_with("rotary_emb.inv_freq") || (spec.tied && name == spec::HEAD);
    if let Some(name) = unused.iter().find(|name| !harmless(name)) {
        return Err(damaged(format!(
            "tensor `{name}` is not part of this architecture as config.json describes it, and leaving it out would \
             change the model"
        )));
    }
    for name in &unused {
        tracing::info!(tensor = name.as_str(), "tensor is not needed and was left out");
    }
    Ok(())
}

fn files_with_extension(folder: &Path, extension: &str) -> Result<Vec<PathBuf>, ModelError> {
    let io = |source| ModelError::Io { path: folder.to_path_buf(), source };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension)) && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Maps a failed access: absent files are [`ModelError::NotFound`], anything else is [`ModelError::Io`].
pub(crate) fn not_found_or_io(path: &Path, what: &str, source: std::io::Error) -> ModelError {
    if source.kind() == std::io::ErrorKind::NotFound {
        ModelError::NotFound { path: path.to_path_buf(), what: what.to_owned() }
    } else {
        ModelError::Io { path: path.to_path_buf(), source }
    }
}
