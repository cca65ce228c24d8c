//! The files beside the weights: the base's own, with what the merge changes in `config.json`; or, where the base is a GGUF file,
//! the same files made from its metadata.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::MergedType;
use super::shards::{output_error, write_json};
use crate::checkpoint::{Checkpoint, GgufTokenizer, TokenizerSource};
use crate::decoder::rope::frequencies;
use crate::error::ModelError;
use crate::spec::{Family, ModelSpec, RopeScaling, RopeSpec, config_object};
use crate::tokenizer::Tokenizer;

/// Endings of what a tokenizer, a chat template and generation defaults are made of.
const COPIED: [&str; 3] = ["json", "jinja", "txt"];
/// Files with such endings that describe the base's weights and not what is written.
const OF_WEIGHTS: [&str; 4] = ["config.json", "quantize_config.json", "quant_config.json", "adapter_config.json"];

/// What is written beside the weights.
pub(super) struct Settings {
    config: Map<String, Value>,
    /// Files of the base that are copied.
    copied: Vec<PathBuf>,
    /// Files that are made, by name.
    made: Vec<(&'static str, Value)>,
}

impl Settings {
    /// Reads what the base has. `tied`: whether head and embedding are one matrix in what is written.
    pub(super) fn read(checkpoint: &Checkpoint, dtype: MergedType, tied: bool) -> Result<Self, ModelError> {
        let (mut config, copied, made) = match &checkpoint.tokenizer {
            TokenizerSource::Directory(folder) => {
                let path = folder.join("config.json");
                let json = fs::read(&path).map_err(|source| ModelError::Io { path: path.clone(), source })?;
                (config_object(&path, &json)?, files_to_copy(folder)?, Vec::new())
            }
            TokenizerSource::Gguf(tokenizer) => {
                (config_of(checkpoint)?, Vec::new(), files_of_gguf(checkpoint, tokenizer)?)
            }
        };
        config.remove("quantization_config");
        // It is another base now, and adapters of the old one would be wrong on it.
        config.remove("_name_or_path");
        // Newer and older transformers, each under its own key.
        let is_new = config.contains_key("dtype");
        if !is_new || config.contains_key("torch_dtype") {
            config.insert("torch_dtype".to_owned(), dtype.name().into());
        }
        if is_new {
            config.insert("dtype".to_owned(), dtype.name().into());
        }
        config.insert("tie_word_embeddings".to_owned(), tied.into());
        Ok(Self { config, copied, made })
    }

    /// Bytes that they take, as far as they are copied.
    pub(super) fn bytes(&self) -> u64 {
        self.copied.iter().filter_map(|path| fs::metadata(path).ok()).map(|metadata| metadata.len()).sum()
    }

    /// Writes them.
    pub(super) fn write(&self, folder: &Path) -> Result<(), ModelError> {
        for source in &self.copied {
            let target = folder.join(source.file_name().unwrap_or_default());
            fs::copy(source, &target).map_err(|error| output_error(&target, &error))?;
        }
        for (name, value) in &self.made {
            write_json(&folder.join(name), value)?;
        }
        write_json(&folder.join("config.json"), &Value::Object(self.config.clone()))
    }
}

fn files_to_copy(folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let failed = |source| ModelError::Io { path: folder.to_path_buf(), source };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_wanted = name == "tokenizer.model"
            || (path.extension().is_some_and(|ending| COPIED.iter().any(|wanted| ending == *wanted))
                && !OF_WEIGHTS.contains(&name.as_str())
                && !name.ends_with(".index.json"));
        if is_wanted && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// `config.json` of a base that has none. What it says is read again and must be the same model.
fn config_of(checkpoint: &Checkpoint) -> Result<Map<String, Value>, ModelError> {
    let spec = &checkpoint.spec;
    let (architecture, model_type) = match spec.family {
        Family::Llama => ("LlamaForCausalLM", "llama"),
        Family::Mistral => ("MistralForCausalLM", "mistral"),
        Family::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
        Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
    };
    let rope = expressible(&spec.rope, spec.head_dim);
    let context = match rope.scaling {
        RopeScaling::Linear { factor } => (spec.max_position_embeddings as f64 / factor).round() as usize,
        _ => spec.max_position_embeddings,
    };
    let config = json!({
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling(&rope.scaling),
        "attention_bias": spec.qkv_bias && spec.family != Family::Qwen2,
        "mlp_bias": spec.mlp_bias,
        "sliding_window": spec.windows.first().copied().flatten(),
        "use_sliding_window": false,
        "max_position_embeddings": context,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": spec.checkpoint_dtype,
        "eos_token_id": checkpoint.generation.eos,
        "bos_token_id": checkpoint.generation.bos,
        "pad_token_id": checkpoint.generation.pad,
    });
    let Value::Object(config) = config else { return Ok(Map::new()) };
    let again = ModelSpec::from_config(&checkpoint.path, &config)?;
    let wanted = ModelSpec { rope, ..spec.clone() };
    if again == wanted {
        return Ok(config);
    }
    let message = format!(
        "`{}` has biases or a rotary embedding that a config.json cannot say; merge into the model's safetensors instead",
        checkpoint.path.display()
    );
    Err(ModelError::Unsupported { message })
}

/// Divisors of frequencies as GGUF stores them are Llama 3's bands nearly always: the same rotary embedding under that name, if it
/// is the same.
fn expressible(rope: &RopeSpec, head_dim: usize) -> RopeSpec {
    let RopeScaling::Factors { divisors } = &rope.scaling else { return rope.clone() };
    let factor = f64::from(divisors.iter().copied().fold(1.0, f32::max));
    let stored = frequencies(rope, head_dim);
    // What all published models have; tests have smaller ones.
    for original_max_position in [8192, 4096, 2048, 1024, 512, 256, 128, 64, 32] {
        let scaling =
            RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position };
        let named = RopeSpec { theta: rope.theta, scaling };
        let same = |(one, other): (&f64, &f64)| (one - other).abs() <= 1e-6 * one.abs();
        if stored.iter().zip(&frequencies(&named, head_dim)).all(same) {
            return named;
        }
    }
    rope.clone()
}

fn scaling(scaling: &RopeScaling) -> Value {
    match scaling {
        // Divisors have no name there.
        RopeScaling::Default | RopeScaling::Factors { .. } => Value::Null,
        RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position,
        }),
        RopeScaling::Yarn { factor, original_max_position, beta_fast, beta_slow, attention_factor, truncate } => {
            json!({
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original_max_position,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "attention_factor": attention_factor,
                "truncate": truncate,
            })
        }
    }
}

/// Tokenizer, chat template and special ids of a GGUF file, as files.
fn files_of_gguf(checkpoint: &Checkpoint, metadata: &GgufTokenizer) -> Result<Vec<(&'static str, Value)>, ModelError> {
    let tokenizer = Tokenizer::from_gguf(metadata)?;
    let mut json = tokenizer.to_json()?;
    if metadata.model == "llama" {
        json["decoder"] = sentence_piece_decoder(metadata, json["model"]["byte_fallback"] == true);
    }
    let mut about = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false,
        "model_max_length": checkpoint.spec.max_position_embeddings,
        "chat_template": metadata.chat_template,
    });
    for (name, token) in tokenizer.named_tokens() {
        about[name] = token.as_str().into();
    }
    let generation = json!({
        "eos_token_id": checkpoint.generation.eos,
        "bos_token_id": checkpoint.generation.bos,
        "pad_token_id": checkpoint.generation.pad,
    });
    Ok(vec![("tokenizer.json", json), ("tokenizer_config.json", about), ("generation_config.json", generation)])
}

/// How tokens of SentencePiece join to text.
fn sentence_piece_decoder(metadata: &GgufTokenizer, byte_fallback: bool) -> Value {
    let mut steps = vec![json!({ "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " })];
    if byte_fallback {
        steps.push(json!({ "type": "ByteFallback" }));
    }
    steps.push(json!({ "type": "Fuse" }));
    if metadata.add_space_prefix.unwrap_or(true) {
        steps.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    json!({ "type": "Sequence", "decoders": steps })
}
