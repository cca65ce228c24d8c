//! Packed weights: read tensor by tensor straight from the checkpoint, never a second full copy.

use std::sync::Arc;

use manylora_kernels::{Backend, Module, StorageType};

use super::working_memory::{Decoder, DecoderLimits};
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::spec::{EMBEDDING, FINAL_NORM, HEAD, ModelSpec, TensorSpec, layer_tensor};

/// How far loading has come, in bytes of packed weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Packed so far.
    pub done_bytes: u64,
    /// To pack in all.
    pub total_bytes: u64,
}

/// Bytes of a model's weights in memory, before padding: what progress is counted in.
/// [`DecoderWeights::bytes`] is the exact number afterwards; padding adds less than a panel of outputs per matrix.
pub fn packed_bytes(spec: &ModelSpec, dtype: StorageType) -> u64 {
    spec.tensors().iter().map(|tensor| tensor_bytes(tensor, dtype)).sum()
}

fn tensor_bytes(tensor: &TensorSpec, dtype: StorageType) -> u64 {
    let width = if tensor.shape.len() == 1 { StorageType::F32.bytes() } else { dtype.bytes() };
    tensor.elements() * width as u64
}

/// One linear map.
pub(super) struct Linear<B: Backend> {
    pub(super) weight: B::Weight,
    pub(super) bias: Option<B::Vector>,
}

/// One decoder layer.
pub(super) struct Layer<B: Backend> {
    pub(super) input_norm: B::Vector,
    pub(super) q: Linear<B>,
    pub(super) k: Linear<B>,
    pub(super) v: Linear<B>,
    pub(super) q_norm: Option<B::Vector>,
    pub(super) k_norm: Option<B::Vector>,
    pub(super) o: Linear<B>,
    pub(super) post_norm: B::Vector,
    pub(super) gate: Linear<B>,
    pub(super) up: Linear<B>,
    pub(super) down: Linear<B>,
}

/// A model's weights on a backend, without working memory: [`Self::allocate`] adds that.
pub struct DecoderWeights<B: Backend> {
    pub(super) backend: Arc<B>,
    pub(super) spec: ModelSpec,
    pub(super) dtype: StorageType,
    pub(super) embedding: B::Weight,
    pub(super) layers: Vec<Layer<B>>,
    pub(super) final_norm: B::Vector,
    /// None: the embedding serves as head.
    pub(super) head: Option<B::Weight>,
    bytes: u64,
}

impl<B: Backend> DecoderWeights<B> {
    /// Packs all weights of a checkpoint. `progress` is called after every tensor.
    pub fn load(
        backend: Arc<B>,
        checkpoint: &Checkpoint,
        dtype: StorageType,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, ModelError> {
        let spec = checkpoint.spec.clone();
        let total_bytes = packed_bytes(&spec, dtype);
        let mut loader =
            Loader { backend: &*backend, checkpoint, dtype, progress, bytes: 0, done_bytes: 0, total_bytes };
        (loader.progress)(LoadProgress { done_bytes: 0, total_bytes });
        let embedding = loader.matrix(EMBEDDING)?;
        let layers = (0..spec.layers).map(|layer| loader.layer(&spec, layer)).collect::<Result<_, _>>()?;
        let final_norm = loader.vector(FINAL_NORM)?;
        let head = if spec.tied { None } else { Some(loader.matrix(HEAD)?) };
        let bytes = loader.bytes;
        Ok(Self { backend, spec, dtype, embedding, layers, final_norm, head, bytes })
    }

    /// The model.
    pub const fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Bytes of the packed weights, padding included.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes the working buffers, the rotary tables and the KV cache.
    pub fn allocate(self, limits: DecoderLimits) -> Result<Decoder<B>, ModelError> {
        Decoder::new(self, limits)
    }
}

struct Loader<'a, B: Backend> {
    backend: &'a B,
    checkpoint: &'a Checkpoint,
    dtype: StorageType,
    progress: &'a mut dyn FnMut(LoadProgress),
    bytes: u64,
    done_bytes: u64,
    total_bytes: u64,
}

impl<B: Backend> Loader<'_, B> {
    fn finished(&mut self, name: &str, unpadded: usize, packed: usize) {
        self.checkpoint.discard(name);
        self.bytes += packed as u64;
        self.done_bytes += unpadded as u64;
        (self.progress)(LoadProgress { done_bytes: self.done_bytes, total_bytes: self.total_bytes });
    }

    fn matrix(&mut self, name: &str) -> Result<B::Weight, ModelError> {
        let source = self.checkpoint.matrix(name)?;
        let (rows, columns) = (source.rows(), source.columns());
        let weight = self.backend.pack_weight(name, &*source, self.dtype)?;
        let packed = self.backend.weight_bytes(rows, columns, self.dtype);
        self.finished(name, rows * columns * self.dtype.bytes(), packed);
        Ok(weight)
    }

    /// Matrices that one input is multiplied with: packed together, so that a backend may put them side by side.
    fn matrices<const N: usize>(&mut self, names: &[String; N]) -> Result<[B::Weight; N], ModelError> {
        let sources = names.iter().map(|name| self.checkpoint.matrix(name)).collect::<Result<Vec<_>, _>>()?;
        let parts: Vec<_> = names.iter().zip(&sources).map(|(name, source)| (name.as_str(), &**source)).collect();
        let weights = self.backend.pack_weights(&parts, self.dtype)?;
        for (name, source) in parts {
            let (rows, columns) = (source.rows(), source.columns());
            let packed = self.backend.weight_bytes(rows, columns, self.dtype);
            self.finished(name, rows * columns * self.dtype.bytes(), packed);
        }
        weights.try_into().map_err(|_| ModelError::Unsupported { message: "a backend left out a weight".to_owned() })
    }

    fn vector(&mut self, name: &str) -> Result<B::Vector, ModelError> {
        let values = self.checkpoint.vector(name)?;
        let vector = self.backend.vector(&values)?;
        let bytes = values.len() * StorageType::F32.bytes();
        self.finished(name, bytes, bytes);
        Ok(vector)
    }

    fn linear(&mut self, spec: &ModelSpec, layer: usize, module: Module) -> Result<Linear<B>, ModelError> {
        let weight = self.matrix(&weight_name(layer, module))?;
        Ok(Linear { weight, bias: self.bias(spec, layer, module)? })
    }

    fn linears<const N: usize>(
        &mut self,
        spec: &ModelSpec,
        layer: usize,
        modules: [Module; N],
    ) -> Result<[Linear<B>; N], ModelError> {
        let mut weights = self.matrices(&modules.map(|module| weight_name(layer, module)))?.into_iter();
        let linears = modules
            .iter()
            .zip(&mut weights)
            .map(|(module, weight)| Ok(Linear { weight, bias: self.bias(spec, layer, *module)? }));
        let linears = linears.collect::<Result<Vec<_>, ModelError>>()?;
        linears.try_into().map_err(|_| ModelError::Unsupported { message: "a backend left out a weight".to_owned() })
    }

    fn bias(&mut self, spec: &ModelSpec, layer: usize, module: Module) -> Result<Option<B::Vector>, ModelError> {
        if !spec.module_bias(module) {
            return Ok(None);
        }
        let path = ModelSpec::module_path(module);
        self.vector(&layer_tensor(layer, &format!("{path}.bias"))).map(Some)
    }

    fn layer(&mut self, spec: &ModelSpec, layer: usize) -> Result<Layer<B>, ModelError> {
        let head_norm = |loader: &mut Self, path: &str| -> Result<Option<B::Vector>, ModelError> {
            if !spec.qk_norm {
                return Ok(None);
            }
            loader.vector(&layer_tensor(layer, path)).map(Some)
        };
        let [q, k, v] = self.linears(spec, layer, [Module::Q, Module::K, Module::V])?;
        let [gate, up] = self.linears(spec, layer, [Module::Gate, Module::Up])?;
        Ok(Layer {
            input_norm: self.vector(&layer_tensor(layer, "input_layernorm.weight"))?,
            post_norm: self.vector(&layer_tensor(layer, "post_attention_layernorm.weight"))?,
            q_norm: head_norm(self, "self_attn.q_norm.weight")?,
            k_norm: head_norm(self, "self_attn.k_norm.weight")?,
            q,
            k,
            v,
            o: self.linear(spec, layer, Module::O)?,
            gate,
            up,
            down: self.linear(spec, layer, Module::Down)?,
        })
    }
}

fn weight_name(layer: usize, module: Module) -> String {
    layer_tensor(layer, &format!("{}.weight", ModelSpec::module_path(module)))
}
