//! The kernels of the operations, looked up once for one format of activations.

use super::super::arguments::{
    Argmax, BiasAdd, Embed, GatedActivation, GatherRows, Largest, LoraEmbed, LoraExpand, LoraShrink, PagedAttention,
    PagedAttentionReduce, RmsNorm, RopeKvWrite,
};
use super::super::error::CudaError;
use super::super::launch::Kernel;
use super::super::module::Kernels;

/// Largest head of each attention kernel.
const HEAD_DIMS: [usize; 3] = [64, 128, 256];

/// Formats are by name: an element of activations is 16 bits to the host.
#[derive(Debug)]
pub(super) struct KernelSet {
    pub(super) lora_shrink: Kernel<LoraShrink<u16>>,
    pub(super) lora_expand: Kernel<LoraExpand>,
    pub(super) lora_embed: Kernel<LoraEmbed>,
    pub(super) embed: Kernel<Embed<u16>>,
    pub(super) rms_norm: Kernel<RmsNorm<u16>>,
    pub(super) rms_norm_sums: Kernel<RmsNorm<f32>>,
    pub(super) rope_kv_write: Kernel<RopeKvWrite<u16>>,
    pub(super) paged_attention: Kernel<PagedAttention<u16>>,
    pub(super) paged_attention_reduce: Kernel<PagedAttentionReduce<u16>>,
    pub(super) gated_activation: Kernel<GatedActivation<u16>>,
    pub(super) bias_add: Kernel<BiasAdd>,
    pub(super) gather_rows: Kernel<GatherRows>,
    pub(super) argmax: Kernel<Argmax>,
    pub(super) largest: Kernel<Largest>,
}

impl KernelSet {
    /// `format` is the ending of the kernels' names. Heads are at most 256 wide.
    pub(super) fn new(kernels: &Kernels, format: &str, head_dim: usize) -> Result<Self, CudaError> {
        let named = |name: &str| format!("{name}_{format}");
        let widest = HEAD_DIMS.into_iter().find(|&widest| head_dim <= widest).unwrap_or(HEAD_DIMS[2]);
        Ok(Self {
            lora_shrink: kernels.kernel(&named("lora_shrink"))?,
            lora_expand: kernels.kernel(&named("lora_expand"))?,
            lora_embed: kernels.kernel(&named("lora_embed"))?,
            embed: kernels.kernel(&named("embed"))?,
            rms_norm: kernels.kernel(&named("rms_norm"))?,
            rms_norm_sums: kernels.kernel("rms_norm_f32")?,
            rope_kv_write: kernels.kernel(&named("rope_kv_write"))?,
            paged_attention: kernels.kernel(&named(&format!("paged_attention_{widest}")))?,
            paged_attention_reduce: kernels.kernel(&named("paged_attention_reduce"))?,
            gated_activation: kernels.kernel(&named("gated_activation"))?,
            bias_add: kernels.kernel("bias_add_f32")?,
            gather_rows: kernels.kernel("gather_rows_f32")?,
            argmax: kernels.kernel("argmax_f32")?,
            largest: kernels.kernel("largest_f32")?,
        })
    }
}
