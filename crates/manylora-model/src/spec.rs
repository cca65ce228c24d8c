//! [`ModelSpec`]: everything that distinguishes one Llama-like decoder from another, as data.
//!
//! One decoder reads this; there is no copy of it per family.

mod config;
mod parse;
mod rope;
mod tensors;

use serde::{Deserialize, Serialize};

pub use parse::config_object;
pub use tensors::{EMBEDDING, FINAL_NORM, HEAD, TensorSpec, layer_tensor};

/// Model families whose checkpoints load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Family {
    /// Llama 2 and 3.x (SmolLM2 among them)
    Llama,
    /// Mistral: sliding window
    Mistral,
    /// Qwen2 and 2.5: biases on q, k, v
    Qwen2,
    /// Qwen3: norms on q and k heads, explicit head_dim
    Qwen3,
}

/// How positions beyond the trained context are mapped (names as in Hugging Face's `rope_type`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    /// None.
    Default,
    /// Positions divided by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Llama 3.1's frequency bands.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Bound of the low band.
        low_freq_factor: f64,
        /// Bound of the high band.
        high_freq_factor: f64,
        /// Trained context.
        original_max_position: usize,
    },
    /// YaRN (Peng et al. 2023).
    Yarn {
        /// Context extension.
        factor: f64,
        /// Trained context.
        original_max_position: usize,
        /// Fast bound of the ramp.
        beta_fast: f64,
        /// Slow bound of the ramp.
        beta_slow: f64,
        /// Factor on cos and sin.
        attention_factor: f64,
        /// Whether the ramp's bounds are rounded outward to whole dimensions.
        truncate: bool,
    },
    /// Every frequency divided by its own factor: how GGUF stores Llama 3.1's bands (`rope_freqs.weight`).
    Factors {
        /// Divisors of the frequencies, `[head_dim / 2]`, lowest dimension first; positive and finite.
        divisors: Vec<f32>,
    },
}

/// Rotary embedding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling beyond the trained context.
    pub scaling: RopeScaling,
}

/// One decoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Family.
    pub family: Family,
    /// Rows of the embedding (may exceed the tokenizer's ids).
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head (not always hidden / heads).
    pub head_dim: usize,
    /// Epsilon of the norms.
    pub rms_norm_eps: f32,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// Sliding window per layer; None = full attention.
    pub windows: Vec<Option<usize>>,
    /// Biases on q, k, v.
    pub qkv_bias: bool,
    /// Bias on o.
    pub o_bias: bool,
    /// Biases in the MLP.
    pub mlp_bias: bool,
    /// RMS norms on q and k heads.
    pub qk_norm: bool,
    /// Whether `lm_head` is the embedding.
    pub tied: bool,
    /// Context of the model.
    pub max_position_embeddings: usize,
    /// Element type named by the checkpoint: `bfloat16`, `float16`, `float32`.
    pub checkpoint_dtype: String,
}
