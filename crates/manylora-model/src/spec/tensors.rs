//! The tensors a specification needs, by Hugging Face name and shape: what a checkpoint is checked against.

use manylora_kernels::Module;

use super::ModelSpec;

/// Name of the input embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the norm before the head.
pub const FINAL_NORM: &str = "model.norm.weight";
/// Name of the output projection.
pub const HEAD: &str = "lm_head.weight";

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Hugging Face name.
    pub name: String,
    /// `[output, input]` or `[length]`.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|size| *size as u64).product()
    }
}

/// Name of a tensor of a layer: `layer_tensor(3, "self_attn.q_proj.weight")`.
pub fn layer_tensor(layer: usize, tail: &str) -> String {
    format!("model.layers.{layer}.{tail}")
}

impl ModelSpec {
    /// Width of the concatenated query heads.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of the concatenated key (or value) heads.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Path of a linear module within its layer, as checkpoints and adapters spell it.
    pub const fn module_path(module: Module) -> &'static str {
        match module {
            Module::Q => "self_attn.q_proj",
            Module::K => "self_attn.k_proj",
            Module::V => "self_attn.v_proj",
            Module::O => "self_attn.o_proj",
            Module::Gate => "mlp.gate_proj",
            Module::Up => "mlp.up_proj",
            Module::Down => "mlp.down_proj",
            Module::InputNorm => "input_layernorm",
            Module::PostNorm => "post_attention_layernorm",
        }
    }

    /// Shape `[output, input]` of a linear module (`[1, width]` of a norm).
    pub fn module_shape(&self, module: Module) -> [usize; 2] {
        match module {
            Module::Q => [self.q_width(), self.hidden_size],
            Module::K | Module::V => [self.kv_width(), self.hidden_size],
            Module::O => [self.hidden_size, self.q_width()],
            Module::Gate | Module::Up => [self.intermediate_size, self.hidden_size],
            Module::Down => [self.hidden_size, self.intermediate_size],
            Module::InputNorm | Module::PostNorm => [1, self.hidden_size],
        }
    }

    /// Whether a linear module has a bias.
    pub fn module_bias(&self, module: Module) -> bool {
        match module {
            Module::Q | Module::K | Module::V => self.qkv_bias,
            Module::O => self.o_bias,
            Module::Gate | Module::Up | Module::Down => self.mlp_bias,
            Module::InputNorm | Module::PostNorm => false,
        }
    }

    /// Every tensor that is read to build the decoder, in the order in which it is read.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut tensors = Vec::with_capacity(3 + self.layers * 14);
        let mut add = |name: String, shape: &[usize]| tensors.push(TensorSpec { name, shape: shape.to_vec() });
        add(EMBEDDING.to_owned(), &[self.vocab_size, self.hidden_size]);
        for layer in 0..self.layers {
            for norm in [Module::InputNorm, Module::PostNorm] {
                let path = Self::module_path(norm);
                add(layer_tensor(layer, &format!("{path}.weight")), &[self.hidden_size]);
            }
            if self.qk_norm {
                for path in ["self_attn.q_norm", "self_attn.k_norm"] {
                    add(layer_tensor(layer, &format!("{path}.weight")), &[self.head_dim]);
                }
            }
            for module in Module::LINEAR {
                let path = Self::module_path(module);
                let shape = self.module_shape(module);
                add(layer_tensor(layer, &format!("{path}.weight")), &shape);
                if self.module_bias(module) {
                    add(layer_tensor(layer, &format!("{path}.bias")), &shape[..1]);
                }
            }
        }
        add(FINAL_NORM.to_owned(), &[self.hidden_size]);
        if !self.tied {
            add(HEAD.to_owned(), &[self.vocab_size, self.hidden_size]);
        }
        tensors
    }

    /// Number of parameters (a tied head counts once).
    pub fn parameters(&self) -> u64 {
        self.tensors().iter().map(TensorSpec::elements).sum()
    }
}
