//! What a GGUF file says about its model: specification, names, sampling defaults and tokenizer, from the metadata.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;

use super::super::{GenerationDefaults, GgufTokenizer};
use super::blocks;
use super::header::{GgmlType, GgufHeader};
use super::metadata::{GgufError, GgufMetadata, shown};
use crate::error::ModelError;
use crate::spec::{ModelSpec, RopeScaling};

/// Divisors of the rotary frequencies, one per pair: how llama3 rope scaling is stored.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// What the metadata says.
pub(super) struct GgufModel {
    /// `general.architecture`
    pub(super) architecture: String,
    /// Whether rows of q and k are interleaved.
    pub(super) permuted: bool,
    pub(super) spec: ModelSpec,
    pub(super) names: Vec<String>,
    pub(super) generation: GenerationDefaults,
    pub(super) tokenizer: GgufTokenizer,
}

/// Reads and checks the metadata; `file` is the whole file.
pub(super) fn read(path: &Path, header: &GgufHeader, file: &[u8]) -> Result<GgufModel, ModelError> {
    let damaged = |error: GgufError| ModelError::Malformed { path: path.to_path_buf(), message: error.0 };
    let metadata = &header.metadata;
    let architecture =
        GgufMetadata::require("general.architecture", metadata.text("general.architecture")).map_err(damaged)?;
    let reader = SpecReader { path, header, file, architecture };
    if !matches!(architecture, "llama" | "qwen2" | "qwen3") {
        return Err(reader.unsupported(&format!(
            "is of the architecture `{}`; supported are llama (Mistral too), qwen2 and qwen3",
            shown(architecture)
        )));
    }
    let spec = reader.spec(architecture)?;
    let tokenizer = tokenizer(metadata).map_err(damaged)?;
    let mut names = Vec::new();
    if let Some(name) = metadata.text("general.name").map_err(damaged)?.filter(|name| !name.is_empty()) {
        names.push(name.to_owned());
    }
    Ok(GgufModel {
        architecture: architecture.to_owned(),
        permuted: architecture == "llama",
        spec,
        names,
        generation: generation(metadata).map_err(damaged)?,
        tokenizer,
    })
}

/// The type that most of the elements have, unless it is a float: what the file is called by.
pub(super) fn dominant_type(header: &GgufHeader) -> Option<GgmlType> {
    let mut elements: HashMap<&str, (GgmlType, usize)> = HashMap::new();
    for tensor in &header.tensors {
        elements.entry(tensor.kind.name()).or_insert((tensor.kind, 0)).1 += tensor.rows * tensor.columns;
    }
    let (kind, _) = elements.into_values().max_by_key(|&(kind, count)| (count, kind.name()))?;
    (kind.block_elements() > 1).then_some(kind)
}

struct SpecReader<'a> {
    path: &'a Path,
    header: &'a GgufHeader,
    file: &'a [u8],
    architecture: &'a str,
}

impl SpecReader<'_> {
    fn unsupported(&self, what: &str) -> ModelError {
        ModelError::Unsupported { message: format!("`{}` {what}", self.path.display()) }
    }

    fn damaged(&self, message: String) -> ModelError {
        ModelError::Malformed { path: self.path.to_path_buf(), message }
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn size(&self, key: &str) -> Result<Option<u32>, ModelError> {
        let key = self.key(key);
        // Some converters write one value per layer; they must agree.
        if let Ok(Some(values)) = self.header.metadata.integers(&key) {
            return match values.split_first() {
                Some((&first, rest)) if rest.iter().all(|&value| value == first) && u32::try_from(first).is_ok() => {
                    Ok(Some(first as u32))
                }
                _ => Err(self.unsupported(&format!("has layers that differ in `{key}`, which is not supported"))),
            };
        }
        self.header.metadata.u32(&key).map_err(|error| self.damaged(error.0))
    }

    /// A size that must be there and not zero.
    fn required(&self, key: &str) -> Result<u32, ModelError> {
        match self.size(key)? {
            Some(0) => Err(self.damaged(format!("the metadata key `{}` is `0`", self.key(key)))),
            Some(value) => Ok(value),
            None => Err(self.damaged(format!("the metadata key `{}` is missing", self.key(key)))),
        }
    }

    /// A float that must be finite and positive when it is there.
    fn positive(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let key = self.key(key);
        match self.header.metadata.f64(&key) {
            Ok(Some(value)) if value.is_finite() && value > 0.0 => Ok(Some(value)),
            Ok(Some(value)) => Err(self.damaged(format!("the metadata key `{key}` is `{value}`"))),
            Ok(None) => Ok(None),
            Err(error) => Err(self.damaged(error.0)),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.header.tensors.iter().any(|tensor| tensor.name == name)
    }

    /// Writes the metadata under Hugging Face's keys, so that there is one set of checks, and adds what GGUF says by
    /// the presence of tensors.
    fn spec(&self, model_type: &str) -> Result<ModelSpec, ModelError> {
        if self.size("expert_count")?.is_some_and(|experts| experts > 0) {
            return Err(self.unsupported("is a mixture of experts, which is not supported"));
        }
        let Some(embedding) = self.header.tensors.iter().find(|tensor| tensor.name == "token_embd.weight") else {
            return Err(self.damaged("the tensor `token_embd.weight` is missing".to_owned()));
        };
        let hidden_size = self.required("embedding_length")?;
        let heads = self.required("attention.head_count")?;
        let kv_heads = match self.size("attention.head_count_kv")? {
            None => heads,
            Some(_) => self.required("attention.head_count_kv")?,
        };
        let head_dim = match self.size("attention.key_length")? {
            Some(head_dim) => head_dim,
            None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
            None => {
                return Err(self.damaged(format!(
                    "the embedding length `{hidden_size}` is not a multiple of `{heads}` heads, and `{}` is missing",
                    self.key("attention.key_length")
                )));
            }
        };
        let value_dim = self.size("attention.value_length")?.unwrap_or(head_dim);
        let rotated = self.size("rope.dimension_count")?.unwrap_or(head_dim);
        if value_dim != head_dim || rotated != head_dim {
            return Err(self.unsupported(&format!(
                "has heads of `{head_dim}` with values of `{value_dim}` and `{rotated}` rotated dimensions; only equal \
                 ones are supported"
            )));
        }
        let layers = self.required("block_count")?;
        // Each layer has tensors of its own, so a larger number cannot be true.
        if layers as usize > self.header.tensors.len() {
            return Err(self.damaged(format!(
                "`{}` is `{layers}` and the file has {} tensors",
                self.key("block_count"),
                self.header.tensors.len()
            )));
        }
        let epsilon = "attention.layer_norm_rms_epsilon";
        let epsilon = self
            .positive(epsilon)?
            .ok_or_else(|| self.damaged(format!("the metadata key `{}` is missing", self.key(epsilon))))?;
        let window = self.size("attention.sliding_window")?.filter(|&window| window > 0);
        let model_type = match (model_type, window) {
            (model_type, None) => model_type,
            // Converters write Mistral as llama; only its window tells.
            ("llama", Some(_)) => "mistral",
            (_, Some(window)) => {
                return Err(self.unsupported(&format!(
                    "has a sliding window of `{window}`, which is not supported for the architecture `{}`",
                    self.architecture
                )));
            }
        };
        let (scaling, divisors) = self.rope_scaling(head_dim)?;
        let config = serde_json::json!({
            "model_type": model_type,
            "vocab_size": embedding.rows,
            "hidden_size": hidden_size,
            "intermediate_size": self.required("feed_forward_length")?,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": epsilon,
            "rope_theta": self.positive("rope.freq_base")?.unwrap_or(10_000.0),
            "rope_scaling": scaling,
            "sliding_window": window,
            "tie_word_embeddings": !self.has("output.weight"),
            "max_position_embeddings": self.required("context_length")?,
            // Quantized weights have no float type of their own.
            "dtype": "bfloat16",
        });
        let Value::Object(config) = config else { return Err(self.damaged("it has no configuration".to_owned())) };
        let mut spec = ModelSpec::from_config(self.path, &config)?;
        spec.qkv_bias |= self.has("blk.0.attn_q.bias");
        spec.o_bias = self.has("blk.0.attn_output.bias");
        spec.mlp_bias = self.has("blk.0.ffn_up.bias");
        if let Some(divisors) = divisors {
            spec.rope.scaling = RopeScaling::Factors { divisors };
        }
        Ok(spec)
    }

    /// The scaling under Hugging Face's keys, and the divisors of the frequencies where they are stored.
    fn rope_scaling(&self, head_dim: u32) -> Result<(Value, Option<Vec<f32>>), ModelError> {
        let kind = self.header.metadata.text(&self.key("rope.scaling.type")).map_err(|error| self.damaged(error.0))?;
        let factor = match self.positive("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.positive("rope.scale_linear")?,
        };
        let scaling = match (kind, factor) {
            (None | Some("linear"), Some(factor)) if factor != 1.0 => {
                serde_json::json!({ "rope_type": "linear", "factor": factor })
            }
            (Some("yarn"), factor) => {
                let stored = match self.positive("rope.scaling.yarn_attn_factor")? {
                    None => self.positive("rope.scaling.attn_factor")?,
                    stored => stored,
                };
                // As ggml computes it: the stored factor multiplies the one that follows from the extension.
                let attention = stored.map(|stored| match factor {
                    Some(factor) if factor > 1.0 => stored * (0.1 * factor.ln() + 1.0),
                    _ => stored,
                });
                serde_json::json!({
                    "rope_type": "yarn",
                    "factor": factor,
                    "original_max_position_embeddings": self.size("rope.scaling.original_context_length")?,
                    "beta_fast": self.positive("rope.scaling.yarn_beta_fast")?,
                    "beta_slow": self.positive("rope.scaling.yarn_beta_slow")?,
                    "attention_factor": attention,
                })
            }
            (None | Some("none" | "linear"), _) => Value::Null,
            (Some(other), _) => {
                return Err(self.unsupported(&format!(
                    "scales its rotary embedding by `{other}`; supported are linear, yarn and llama3's stored factors"
                )));
            }
        };
        let divisors = self.rope_factors(head_dim as usize)?;
        if divisors.is_some() && !scaling.is_null() {
            return Err(
                self.unsupported(&format!("has both `{ROPE_FACTORS}` and another scaling, which is not supported"))
            );
        }
        Ok((scaling, divisors))
    }

    fn rope_factors(&self, head_dim: usize) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(tensor) = self.header.tensors.iter().find(|tensor| tensor.name == ROPE_FACTORS) else {
            return Ok(None);
        };
        if tensor.dimensions != 1 || tensor.columns != head_dim / 2 {
            return Err(self.damaged(format!(
                "the tensor `{ROPE_FACTORS}` should have {} elements, one per pair of a head",
                head_dim / 2
            )));
        }
        let mut divisors = vec![0.0; tensor.columns];
        let bytes = &self.file[tensor.start..tensor.start + tensor.bytes];
        blocks::dequantize(tensor.kind, bytes, &mut divisors).map_err(|message| self.damaged(message))?;
        match divisors.iter().find(|divisor| !divisor.is_finite() || **divisor <= 0.0) {
            Some(divisor) => Err(self.damaged(format!("the tensor `{ROPE_FACTORS}` holds `{divisor}`"))),
            None => Ok(Some(divisors)),
        }
    }
}

fn generation(metadata: &GgufMetadata) -> Result<GenerationDefaults, GgufError> {
    let mut eos = Vec::new();
    // Chat models end a turn with their end-of-turn token even where another one ends the text.
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        if let Some(id) = metadata.u32(key)?.filter(|id| !eos.contains(id)) {
            eos.push(id);
        }
    }
    Ok(GenerationDefaults {
        eos,
        bos: metadata.u32("tokenizer.ggml.bos_token_id")?,
        pad: metadata.u32("tokenizer.ggml.padding_token_id")?,
        ..GenerationDefaults::default()
    })
}

/// The tokenizer's keys, with arrays that have one entry per token and ids that have a token.
pub fn tokenizer(metadata: &GgufMetadata) -> Result<GgufTokenizer, GgufError> {
    let text = |key: &str| metadata.text(key).map(|text| text.map(str::to_owned));
    let tokens = GgufMetadata::require("tokenizer.ggml.tokens", metadata.texts("tokenizer.ggml.tokens"))?.to_vec();
    let token_types = match metadata.integers("tokenizer.ggml.token_type")? {
        None => Vec::new(),
        Some(types) => types
            .into_iter()
            .map(|kind| {
                i32::try_from(kind)
                    .map_err(|_| GgufError(format!("`tokenizer.ggml.token_type` holds `{kind}`, which is no type")))
            })
            .collect::<Result<_, _>>()?,
    };
    let scores = metadata.f32s("tokenizer.ggml.scores")?.map(<[f32]>::to_vec).unwrap_or_default();
    for (key, length) in [("token_type", token_types.len()), ("scores", scores.len())] {
        if length != 0 && length != tokens.len() {
            return Err(GgufError(format!(
                "`tokenizer.ggml.{key}` has {length} entries and there are {} tokens",
                tokens.len()
            )));
        }
    }
    let id = |key: &str| match metadata.u32(key)? {
        Some(id) if id as usize >= tokens.len() => {
            Err(GgufError(format!("`{key}` is `{id}` and there are {} tokens", tokens.len())))
        }
        id => Ok(id),
    };
    Ok(GgufTokenizer {
        model: GgufMetadata::require("tokenizer.ggml.model", metadata.text("tokenizer.ggml.model"))?.to_owned(),
        pre: text("tokenizer.ggml.pre")?,
        bos: id("tokenizer.ggml.bos_token_id")?,
        eos: id("tokenizer.ggml.eos_token_id")?,
        unknown: id("tokenizer.ggml.unknown_token_id")?,
        padding: id("tokenizer.ggml.padding_token_id")?,
        token_types,
        scores,
        merges: metadata.texts("tokenizer.ggml.merges")?.map(<[String]>::to_vec).unwrap_or_default(),
        add_bos: metadata.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: metadata.bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?,
        chat_template: text("tokenizer.chat_template")?,
        tokens,
    })
}
