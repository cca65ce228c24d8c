//! Argument lists of this project's kernels, in the order of `kernels/ABI.md`, which says what each means.
//!
//! A generic list is that of a family: `T` is the format that the kernel's name ends in. Strides and widths are in
//! elements. A kernel is looked up with its list ([`super::Kernels::kernel`]), and refused if they differ.

use super::memory::DevicePointer;
use crate::kernel_arguments;

/// Numbers at the start of the step's block, by their place in the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum HeaderField {
    /// Rows of the batch.
    Rows = 0,
    /// Entries of the plan.
    Entries = 1,
    /// Segments of the plan.
    Segments = 2,
    /// Sequences.
    Sequences = 3,
    /// Rows whose logits are wanted.
    SampleRows = 4,
    /// Tiles of the plan.
    Tiles = 5,
    /// Tiles of order 0.
    FirstTiles = 6,
    /// Work items of attention.
    AttentionItems = 7,
    /// Stride of the shrink's results.
    ShrinkStride = 8,
    /// Rows whose attention is reduced.
    ReduceRows = 9,
}

impl HeaderField {
    /// Numbers in a header.
    pub const COUNT: usize = 16;
}

kernel_arguments! {
    /// `lora_shrink_bf16`, `lora_shrink_f16`
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct LoraShrink<T> {
        pub header: DevicePointer<i32>,
        pub tile_slot: DevicePointer<i32>,
        pub tile_first: DevicePointer<i32>,
        pub tile_count: DevicePointer<i32>,
        pub entry_row: DevicePointer<i32>,
        pub a_pointers: DevicePointer<u64>,
        pub ranks: DevicePointer<i32>,
        pub sites: i32,
        pub site: i32,
        pub parts: i32,
        pub x: DevicePointer<T>,
        pub x_stride: i32,
        pub input: i32,
        pub s: DevicePointer<f32>,
    }

    /// `lora_expand_bf16`, `lora_expand_f16`. The adapters' format is behind `b_pointers`.
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct LoraExpand {
        pub header: DevicePointer<i32>,
        pub tile_slot: DevicePointer<i32>,
        pub tile_first: DevicePointer<i32>,
        pub tile_count: DevicePointer<i32>,
        pub entry_row: DevicePointer<i32>,
        pub entry_slot: DevicePointer<i32>,
        pub entry_scale: DevicePointer<f32>,
        pub row_first: DevicePointer<i32>,
        pub row_entries: DevicePointer<i32>,
        pub b_pointers: DevicePointer<u64>,
        pub ranks: DevicePointer<i32>,
        pub scales: DevicePointer<f32>,
        pub sites: i32,
        pub site: i32,
        pub parts: i32,
        pub input: i32,
        pub s: DevicePointer<f32>,
        pub out_0: DevicePointer<f32>,
        pub stride_0: i32,
        pub width_0: i32,
        pub out_1: DevicePointer<f32>,
        pub stride_1: i32,
        pub width_1: i32,
        pub out_2: DevicePointer<f32>,
        pub stride_2: i32,
        pub width_2: i32,
    }

    /// `matmul_few_rows_bf16`, `matmul_few_rows_f16`, `matmul_bf16`, `matmul_f16`
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct MatmulRows<T> {
        pub header: DevicePointer<i32>,
        pub count: i32,
        pub x: DevicePointer<T>,
        pub x_stride: i32,
        pub weight: DevicePointer<T>,
        pub input: i32,
        pub output: i32,
        pub out: DevicePointer<f32>,
        pub out_stride: i32,
        pub add: i32,
    }

    /// `lora_embed_bf16`, `lora_embed_f16`. The adapters' format is behind `a_pointers`.
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct LoraEmbed {
        pub header: DevicePointer<i32>,
        pub tile_slot: DevicePointer<i32>,
        pub tile_first: DevicePointer<i32>,
        pub tile_count: DevicePointer<i32>,
        pub entry_row: DevicePointer<i32>,
        pub tokens: DevicePointer<u32>,
        pub a_pointers: DevicePointer<u64>,
        pub ranks: DevicePointer<i32>,
        pub sites: i32,
        pub site: i32,
        pub s: DevicePointer<f32>,
    }

    /// `embed_bf16`, `embed_f16`
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct Embed<T> {
        pub header: DevicePointer<i32>,
        pub tokens: DevicePointer<u32>,
        pub weight: DevicePointer<T>,
        pub width: i32,
        pub out: DevicePointer<f32>,
        pub out_stride: i32,
    }

    /// `rms_norm_bf16`, `rms_norm_f16`, `rms_norm_f32`: `T` is the result's format.
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct RmsNorm<T> {
        pub header: DevicePointer<i32>,
        pub count: i32,
        pub row_index: DevicePointer<u32>,
        pub input: DevicePointer<f32>,
        pub input_stride: i32,
        pub add: DevicePointer<f32>,
        pub weight: DevicePointer<f32>,
        pub epsilon: f32,
        pub width: i32,
        pub out: DevicePointer<T>,
        pub out_stride: i32,
    }

    /// `rms_norm_groups_f32`
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct RmsNormGroups {
        pub header: DevicePointer<i32>,
        pub values: DevicePointer<f32>,
        pub stride: i32,
        pub weight: DevicePointer<f32>,
        pub epsilon: f32,
        pub groups: i32,
        pub width: i32,
    }

    /// `rope_kv_write_bf16`, `rope_kv_write_f16`
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct RopeKvWrite<T> {
        pub header: DevicePointer<i32>,
        pub positions: DevicePointer<u32>,
        pub slot_mapping: DevicePointer<u32>,
        pub cos: DevicePointer<f32>,
        pub sin: DevicePointer<f32>,
        pub q: DevicePointer<f32>,
        pub q_stride: i32,
        pub k: DevicePointer<f32>,
        pub k_stride: i32,
        pub v: DevicePointer<f32>,
        pub v_stride: i32,
        pub q_bias: DevicePointer<f32>,
        pub k_bias: DevicePointer<f32>,
        pub v_bias: DevicePointer<f32>,
        pub q_norm: DevicePointer<f32>,
        pub k_norm: DevicePointer<f32>,
        pub epsilon: f32,
        pub heads: i32,
        pub kv_heads: i32,
        pub head_dim: i32,
        pub k_cache: DevicePointer<T>,
        pub v_cache: DevicePointer<T>,
    }

    /// `paged_attention_64_bf16` and its like: for heads of up to 64, 128 or 256.
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct PagedAttention<T> {
        pub header: DevicePointer<i32>,
        pub item_sequence: DevicePointer<i32>,
        pub item_first: DevicePointer<i32>,
        pub item_rows: DevicePointer<i32>,
        pub item_partition: DevicePointer<i32>,
        pub item_partitions: DevicePointer<i32>,
        pub item_partial: DevicePointer<i32>,
        pub sequence_row: DevicePointer<i32>,
        pub sequence_position: DevicePointer<i32>,
        pub sequence_table: DevicePointer<i32>,
        pub block_tables: DevicePointer<u32>,
        pub q: DevicePointer<f32>,
        pub q_stride: i32,
        pub k_cache: DevicePointer<T>,
        pub v_cache: DevicePointer<T>,
        pub out: DevicePointer<T>,
        pub out_stride: i32,
        pub partials: DevicePointer<f32>,
        pub heads: i32,
        pub kv_heads: i32,
        pub head_dim: i32,
        pub block_size: i32,
        pub scale: f32,
        pub window: i32,
    }

    /// `paged_attention_reduce_bf16`, `paged_attention_reduce_f16`
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct PagedAttentionReduce<T> {
        pub header: DevicePointer<i32>,
        pub reduce_row: DevicePointer<i32>,
        pub reduce_first: DevicePointer<i32>,
        pub reduce_count: DevicePointer<i32>,
        pub partials: DevicePointer<f32>,
        pub out: DevicePointer<T>,
        pub out_stride: i32,
        pub heads: i32,
        pub head_dim: i32,
    }

    /// `gated_activation_bf16`, `gated_activation_f16`
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct GatedActivation<T> {
        pub header: DevicePointer<i32>,
        pub gate: DevicePointer<f32>,
        pub gate_stride: i32,
        pub up: DevicePointer<f32>,
        pub up_stride: i32,
        pub width: i32,
        pub out: DevicePointer<T>,
        pub out_stride: i32,
    }

    /// `bias_add_f32`
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct BiasAdd {
        pub header: DevicePointer<i32>,
        pub count: i32,
        pub parts: i32,
        pub out_0: DevicePointer<f32>,
        pub stride_0: i32,
        pub width_0: i32,
        pub bias_0: DevicePointer<f32>,
        pub out_1: DevicePointer<f32>,
        pub stride_1: i32,
        pub width_1: i32,
        pub bias_1: DevicePointer<f32>,
        pub out_2: DevicePointer<f32>,
        pub stride_2: i32,
        pub width_2: i32,
        pub bias_2: DevicePointer<f32>,
    }

    /// `convert_bf16`, `convert_f16`
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct Convert<T> {
        pub header: DevicePointer<i32>,
        pub count: i32,
        pub input: DevicePointer<f32>,
        pub input_stride: i32,
        pub width: i32,
        pub out: DevicePointer<T>,
        pub out_stride: i32,
    }

    /// `gather_rows_f32`
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct GatherRows {
        pub header: DevicePointer<i32>,
        pub row_index: DevicePointer<u32>,
        pub input: DevicePointer<f32>,
        pub input_stride: i32,
        pub width: i32,
        pub out: DevicePointer<f32>,
        pub out_stride: i32,
    }

    /// `argmax_f32`
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct Argmax {
        pub header: DevicePointer<i32>,
        pub count: i32,
        pub logits: DevicePointer<f32>,
        pub stride: i32,
        pub vocabulary: i32,
        pub out: DevicePointer<u32>,
    }

    /// `largest_f32`
    #[allow(missing_docs, reason = "kernels/ABI.md")]
    pub struct Largest {
        pub header: DevicePointer<i32>,
        pub count: i32,
        pub logits: DevicePointer<f32>,
        pub stride: i32,
        pub vocabulary: i32,
        pub k: i32,
        pub capacity: i32,
        pub out: DevicePointer<u32>,
    }
}
