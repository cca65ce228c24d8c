//! `config.json` to [`ModelSpec`]: old and new spellings, the defaults that transformers has per architecture, and
//! bounds on every value, so that nothing downstream needs to distrust a specification.

use std::path::Path;

use serde_json::{Map, Value};

use super::config::Config;
use super::{Family, ModelSpec, rope};
use crate::error::ModelError;

/// Bounds of sizes: far above any model there is, far below where products overflow.
const MAX_VOCABULARY: usize = 1 << 24;
const MAX_WIDTH: usize = 1 << 22;
const MAX_LAYERS: usize = 4096;
const MAX_HEADS: usize = 1 << 16;
const MAX_HEAD_DIM: usize = 4096;
/// Largest context.
pub(super) const MAX_POSITIONS: usize = 1 << 30;

/// The JSON object in a configuration file's text.
pub fn config_object(path: &Path, json: &[u8]) -> Result<Map<String, Value>, ModelError> {
    serde_json::from_slice(json).map_err(|error| ModelError::Malformed {
        path: path.to_path_buf(),
        message: format!("it is not a JSON object: {error}"),
    })
}

impl ModelSpec {
    /// The model that the text of a `config.json` describes.
    pub fn parse(json: &[u8]) -> Result<Self, ModelError> {
        let path = Path::new("config.json");
        Self::from_config(path, &config_object(path, json)?)
    }

    /// The model that a configuration describes; `path` is named in errors. Other formats (GGUF) come here too, by
    /// writing their metadata under Hugging Face's keys, so that there is one set of checks.
    pub fn from_config(path: &Path, map: &Map<String, Value>) -> Result<Self, ModelError> {
        let config = Config::new(path, map);
        let family = family(&config)?;
        if let Some(activation) = config.text("hidden_act")?.or(config.text("hidden_activation")?)
            && activation != "silu"
        {
            return Err(unsupported(format!("hidden_act `{activation}` is not supported; only `silu` is")));
        }

        let vocab_size = config.size("vocab_size", 1..=MAX_VOCABULARY)?;
        let hidden_size = config.size("hidden_size", 1..=MAX_WIDTH)?;
        let intermediate_size = config.size("intermediate_size", 1..=MAX_WIDTH)?;
        let layers = config.size("num_hidden_layers", 1..=MAX_LAYERS)?;
        let heads = config.size("num_attention_heads", 1..=MAX_HEADS)?;
        let kv_heads = match (config.optional_size("num_key_value_heads", 1..=MAX_HEADS)?, family) {
            (Some(kv_heads), _) => kv_heads,
            (None, Family::Llama) => heads,
            // transformers' defaults of these classes differ from `heads`, so guessing would be silent damage.
            (None, _) => config.size("num_key_value_heads", 1..=MAX_HEADS)?,
        };
        if heads % kv_heads != 0 {
            return Err(config.damaged(format!(
                "`num_attention_heads` is `{heads}`, which is not a multiple of `num_key_value_heads`, `{kv_heads}`"
            )));
        }
        let head_dim = match (config.optional_size("head_dim", 1..=MAX_HEAD_DIM)?, family) {
            (Some(head_dim), _) => head_dim,
            (None, Family::Qwen3) => 128,
            (None, _) if hidden_size % heads == 0 => hidden_size / heads,
            (None, _) => {
                return Err(config.damaged(format!(
                    "`hidden_size` is `{hidden_size}`, which is not a multiple of `num_attention_heads`, `{heads}`, \
                     and there is no `head_dim`"
                )));
            }
        };
        if head_dim % 2 != 0 || head_dim > MAX_HEAD_DIM {
            return Err(config.damaged(format!(
                "the head dimension is `{head_dim}`; an even number up to {MAX_HEAD_DIM} is needed for rotary positions"
            )));
        }
        if heads * head_dim > MAX_WIDTH {
            return Err(config.damaged(format!(
                "`num_attention_heads` is `{heads}` and the head dimension is `{head_dim}`; their product is larger \
                 than {MAX_WIDTH}"
            )));
        }
        let partial = config
            .optional_number("partial_rotary_factor", "a number is needed", |_| true)?
            .filter(|factor| *factor != 1.0);
        if let Some(factor) = partial {
            return Err(unsupported(format!("partial_rotary_factor `{factor}` is not supported; only 1.0 is")));
        }

        let declared_positions = match config.optional_size("max_position_embeddings", 1..=MAX_POSITIONS)? {
            Some(positions) => positions,
            None if family == Family::Llama => 2048,
            None => config.size("max_position_embeddings", 1..=MAX_POSITIONS)?,
        };
        let (rope, max_position_embeddings) = rope::parse(&config, declared_positions)?;
        let rms_norm_eps = config
            .optional_number("rms_norm_eps", "a number from 0 to below 1 is needed", |eps| (0.0..1.0).contains(&eps))?;
        let attention_bias = config.flag("attention_bias", false)?;
        let biased = matches!(family, Family::Llama | Family::Qwen3) && attention_bias;
        Ok(Self {
            family,
            vocab_size,
            hidden_size,
            intermediate_size,
            layers,
            heads,
            kv_heads,
            head_dim,
            rms_norm_eps: rms_norm_eps.unwrap_or(1e-6) as f32,
            rope,
            windows: windows(&config, family, layers)?,
            qkv_bias: family == Family::Qwen2 || biased,
            o_bias: biased,
            mlp_bias: family == Family::Llama && config.flag("mlp_bias", false)?,
            qk_norm: family == Family::Qwen3,
            tied: config.flag("tie_word_embeddings", false)?,
            max_position_embeddings,
            checkpoint_dtype: checkpoint_dtype(&config)?,
        })
    }
}

fn unsupported(message: String) -> ModelError {
    ModelError::Unsupported { message }
}

const SUPPORTED: [(&str, &str, Family); 4] = [
    ("LlamaForCausalLM", "llama", Family::Llama),
    ("MistralForCausalLM", "mistral", Family::Mistral),
    ("Qwen2ForCausalLM", "qwen2", Family::Qwen2),
    ("Qwen3ForCausalLM", "qwen3", Family::Qwen3),
];

fn family(config: &Config<'_>) -> Result<Family, ModelError> {
    let supported = || SUPPORTED.map(|(architecture, ..)| architecture).join(", ");
    if let Some(architectures) = config.texts("architectures")?
        && !architectures.is_empty()
    {
        return architectures
            .iter()
            .find_map(|name| SUPPORTED.iter().find(|(architecture, ..)| architecture == name))
            .map(|(.., family)| *family)
            .ok_or_else(|| {
                unsupported(format!(
                    "architecture `{}` is not supported; supported are {}",
                    architectures.join("`, `"),
                    supported()
                ))
            });
    }
    match config.text("model_type")? {
        Some(model_type) => {
            SUPPORTED.iter().find(|(_, name, _)| *name == model_type).map(|(.., family)| *family).ok_or_else(|| {
                unsupported(format!("model type `{model_type}` is not supported; supported are {}", supported()))
            })
        }
        None => Err(config.damaged("it has neither `architectures` nor `model_type`".to_owned())),
    }
}

/// The sliding window of every layer, by transformers' rules: Mistral slides everywhere when it names a window (an
/// absent key means 4096, null means none); Qwen slides from `max_window_layers` on, if `use_sliding_window`;
/// `layer_types`, where given, says it layer by layer.
fn windows(config: &Config<'_>, family: Family, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    const BOUNDS: std::ops::RangeInclusive<usize> = 1..=MAX_POSITIONS;
    let (window, first) = match family {
        Family::Mistral if config.keys().any(|key| key == "sliding_window") => {
            (config.optional_size("sliding_window", BOUNDS)?, 0)
        }
        Family::Mistral => (Some(4096), 0),
        Family::Qwen2 | Family::Qwen3 if config.flag("use_sliding_window", false)? => {
            let window = config.optional_size("sliding_window", BOUNDS)?.unwrap_or(4096);
            (Some(window), config.optional_size("max_window_layers", 0..=MAX_POSITIONS)?.unwrap_or(28))
        }
        Family::Llama | Family::Qwen2 | Family::Qwen3 => (None, 0),
    };
    let Some(types) = config.texts("layer_types")? else {
        return Ok((0..layers).map(|layer| window.filter(|_| layer >= first)).collect());
    };
    if types.len() != layers {
        return Err(config
            .damaged(format!("`layer_types` has `{}` entries and `num_hidden_layers` is `{layers}`", types.len())));
    }
    types
        .iter()
        .map(|kind| match (*kind, window) {
            ("full_attention", _) => Ok(None),
            ("sliding_attention", Some(window)) => Ok(Some(window)),
            ("sliding_attention", None) => Err(config
                .damaged("`layer_types` asks for `sliding_attention` and there is no `sliding_window`".to_owned())),
            (other, _) => Err(unsupported(format!(
                "layer type `{other}` is not supported; supported are full_attention and sliding_attention"
            ))),
        })
        .collect()
}

fn checkpoint_dtype(config: &Config<'_>) -> Result<String, ModelError> {
    let name = match config.text("dtype")? {
        Some(name) => name,
        None => config.text("torch_dtype")?.unwrap_or("float32"),
    };
    match name.strip_prefix("torch.").unwrap_or(name) {
        known @ ("bfloat16" | "float16" | "float32") => Ok(known.to_owned()),
        "half" => Ok("float16".to_owned()),
        "float" => Ok("float32".to_owned()),
        other => {
            Err(unsupported(format!("dtype `{other}` is not supported; supported are bfloat16, float16 and float32")))
        }
    }
}
