//! A card as the engine's device: whether it can be used, and how its memory is divided.
//!
//! The engine may take a share of the card's memory (`gpu_memory_utilization`). Out of that one budget come what the driver
//! takes (its context, code, recorded steps), weights, working memory, KV blocks and adapters. All but the driver's is one
//! reservation, which the sizes here fill to the byte. What weights and working memory leave is shared by KV blocks and
//! adapters, as a processor's is.

use std::sync::Arc;

use manylora_core::budget::{Ledger, NumberFormat, TargetModule};
use manylora_kernels::cuda::{
    self, AlgorithmChoice, CudaBackend, CudaError, CudaOptions, Matmul, ProductChoice, ProductSource, StepRoom,
};
use manylora_kernels::{KernelError, StorageType};
use manylora_model::decoder::{DecoderLimits, buffer_groups, rotary_table_len, weight_groups};
use manylora_model::{ModelError, ModelSpec};

use super::device::Unusable;
use super::sizes::{self, Sizes};
use super::startup::CardMemory;
use crate::config::{DType, EngineConfig};
use crate::error::EngineError;

/// Adapters that one request can compose on a card: what a step has working memory for.
const MOST_COMPOSED: usize = 8;
/// What is taken of a card's memory once it is open is the driver's, for our context and code, up to one part in so many and
/// a limit; beyond that it is others'.
const DRIVER_SHARE: u64 = 40;
const DRIVER_LIMIT: u64 = 1 << 30;
/// One part in so many, up to a limit, is left free for what the driver takes later. An estimate, which no card has confirmed yet
/// (the bench `card` tells what it was): some 500 launches are a recorded step of a 7B model, each takes the driver about a
/// KiB, and 256 steps are kept, hence 128 MiB; and cuBLASLt's code, tens of MiB for each of a few algorithms. Both are less
/// for smaller models, which smaller cards have: 150 MiB are left of 24 GB. Where it is not enough, steps are no
/// longer recorded, and run.
const LATER_SHARE: u64 = 160;
const LATER_LIMIT: u64 = 512 << 20;

/// A card that can compute.
pub(super) struct Card {
    device: cuda::Device,
    options: CudaOptions,
    dtype_name: &'static str,
    /// What a user should know of it.
    note: Option<String>,
}

/// A part of the reservation: whole granules, rounded down.
const fn whole(bytes: u64) -> u64 {
    bytes / cuda::GRANULE as u64 * cuda::GRANULE as u64
}

/// Opens a card for a model.
pub(super) fn open(config: &EngineConfig, spec: &ModelSpec, ordinal: usize) -> Result<Card, Unusable> {
    let refused = |error: KernelError| Unusable { error: error.into(), surprising: true };
    let (dtype, dtype_name) = match config.dtype {
        // What is stored as float16 has three bits that bfloat16 would drop.
        DType::Auto if spec.checkpoint_dtype == "float16" => (StorageType::F16, "float16"),
        DType::Auto | DType::BFloat16 => (StorageType::Bf16, "bfloat16"),
        DType::Float16 => (StorageType::F16, "float16"),
        DType::Float32 => (StorageType::F32, "float32"),
    };
    // Of cuBLASLt's algorithms none promises the same bits for any number of rows.
    let products = if config.batch_invariant { ProductChoice::Own } else { ProductChoice::Auto };
    let mut options = CudaOptions {
        ordinal,
        dtype,
        layers: spec.layers,
        heads: spec.heads,
        kv_heads: spec.kv_heads,
        head_dim: spec.head_dim,
        memory_bytes: 0,
        shared_bytes: 0,
        products,
        algorithms: AlgorithmChoice::Fastest,
        workspace_bytes: None,
        library_folders: config.cuda_library_folders.clone(),
        graphs: !config.enforce_eager,
    };
    // The card first: without one, what it could store is beside the point.
    let device = cuda::Device::open(ordinal).map_err(|error| {
        let surprising = !matches!(error, CudaError::NoDriver { .. } | CudaError::NoDevice { .. });
        Unusable { error: KernelError::from(error).into(), surprising }
    })?;
    let source = products.source(&options.library_folders).map_err(|error| refused(error.into()))?;
    CudaBackend::check(&options).map_err(refused)?;
    for (what, width) in
        [("hidden size", spec.hidden_size), ("intermediate size", spec.intermediate_size), ("heads", spec.q_width())]
    {
        if !width.is_multiple_of(8) {
            return Err(refused(KernelError::Device(format!(
                "the model's {what} is `{width}` wide and the kernels for cards take multiples of 8; use device \"cpu\""
            ))));
        }
    }
    let (workspace, note) = match source {
        ProductSource::Library(_) => (Some(Matmul::advised_workspace(device.context())), None),
        ProductSource::Own(why) => (None, why.map(|why| format!("base products go to our own kernels: {why}"))),
    };
    options.workspace_bytes = workspace;
    Ok(Card { device, options, dtype_name, note })
}

/// A card, and how its memory is divided for a model.
pub(super) struct Placed {
    pub(super) card: Card,
    pub(super) sizes: Sizes,
    pub(super) memory: CardMemory,
    pub(super) notes: Vec<String>,
}

impl Card {
    /// Divides its memory for a model.
    pub(super) fn place(self, config: &EngineConfig, spec: &ModelSpec) -> Result<Placed, EngineError> {
        let mut notes: Vec<String> = self.note.clone().into_iter().collect();
        let (sizes, memory) = self.divide(config, spec, &mut notes)?;
        Ok(Placed { card: self, sizes, memory, notes })
    }

    /// For people: `cuda:0`.
    pub(super) fn name(&self) -> String {
        format!("cuda:{}", self.options.ordinal)
    }

    /// Room for steps of these limits.
    fn room(config: &EngineConfig, limits: &DecoderLimits) -> StepRoom {
        let sequences = config.max_num_seqs.min(limits.max_rows);
        let distinct = sequences.min(config.max_loras.unwrap_or(usize::MAX));
        StepRoom {
            rows: limits.max_rows,
            entries: limits.max_entries,
            rank: limits.max_rank,
            block_tables: sequences * limits.max_position.div_ceil(limits.block_size),
            adapters: if limits.max_entries == 0 { 1 } else { distinct * MOST_COMPOSED },
        }
    }

    /// Bytes of working memory for steps of these limits, the rotary tables included.
    fn working_bytes(&self, config: &EngineConfig, spec: &ModelSpec, limits: &DecoderLimits) -> u64 {
        let activations: usize = buffer_groups(spec, limits)
            .iter()
            .map(|(rows, widths, kind)| cuda::activation_bytes(*rows, widths, *kind))
            .sum();
        let tables = 2 * cuda::vector_bytes(rotary_table_len(spec, limits));
        let products = self.options.workspace_bytes.map_or(0, cuda::granules);
        let steps = cuda::step_bytes(&Self::room(config, limits), spec.layers, spec.heads, spec.head_dim);
        [activations, tables, products, steps].into_iter().fold(0u64, |sum, bytes| sum.saturating_add(bytes as u64))
    }

    /// Divides the card's memory.
    fn divide(
        &self,
        config: &EngineConfig,
        spec: &ModelSpec,
        notes: &mut Vec<String>,
    ) -> Result<(Sizes, CardMemory), EngineError> {
        let memory = self.device.context().memory().map_err(KernelError::from)?;
        let (total, free) = (memory.total as u64, memory.free as u64);
        let name = self.name();
        let utilization = config.gpu_memory_utilization;
        let budget_bytes = (total as f64 * utilization) as u64;
        // The context is there, and the kernels are loaded.
        let taken = total.saturating_sub(free);
        let driver = taken.min(total / DRIVER_SHARE).min(DRIVER_LIMIT);
        if budget_bytes > free + driver {
            return Err(EngineError::InvalidArgument(format!(
                "gpu_memory_utilization `{utilization}` asks for {budget_bytes} of {name}'s {total} bytes, and {free} are \
                 free (others have {} bytes, the driver {driver}); lower it, or end what else runs on the card",
                taken - driver
            )));
        }
        let driver_bytes = driver + (total / LATER_SHARE).min(LATER_LIMIT);
        let groups = weight_groups(spec);
        let matrices: usize = groups.matrices.iter().map(|group| cuda::matrices_bytes(group)).sum();
        let vectors: usize = groups.vectors.iter().map(|&len| cuda::vector_bytes(len)).sum();
        let weight_bytes = (matrices + vectors) as u64;
        let dimensions = sizes::model_dimensions(spec);
        let block_bytes = dimensions.kv_block_bytes(config.block_size as u64, NumberFormat::Bf16);
        // A lowered context leaves room for one adapter of the largest rank, so that the shelf is not empty for ever.
        let adapter = dimensions.card_adapter_bytes(config.max_lora_rank as u64, &TargetModule::ALL);

        let context = sizes::context(config, spec)?;
        let max_rows = sizes::max_rows(config, context);
        // A context that has to be lowered needs less working memory: the second round gives the difference to KV blocks.
        let mut max_model_len = context;
        let mut rounds = 0;
        let most_blocks = cuda::most_kv_blocks(spec.layers, config.block_size);
        loop {
            let limits = sizes::limits_for(config, max_rows, max_model_len, most_blocks);
            let limits = DecoderLimits { max_entries: limits.max_entries * MOST_COMPOSED, ..limits };
            let working_bytes = self.working_bytes(config, spec, &limits);
            let needed = driver_bytes.saturating_add(weight_bytes).saturating_add(working_bytes);
            let left = whole(budget_bytes.saturating_sub(needed));
            if left < block_bytes {
                return Err(EngineError::Model(ModelError::DoesNotFit {
                    needed: needed.saturating_add(block_bytes),
                    available: budget_bytes,
                    message: format!(
                        "on {name} of {total} bytes with gpu_memory_utilization `{utilization}`: weights in {} ({weight_bytes} \
                         bytes), working memory of {max_rows} rows ({working_bytes} bytes), the driver's own ({driver_bytes} \
                         bytes), and KV blocks; use a smaller model, a smaller max_num_batched_tokens or max_lora_rank, a \
                         larger gpu_memory_utilization, or device \"cpu\"",
                        self.dtype_name
                    ),
                }));
            }
            let shared_bytes = shared(config, left)?.min(whole(most_blocks as u64 * block_bytes));
            let ledger = Ledger { bytes: shared_bytes, block_bytes, block_size: config.block_size };
            let kept = if config.enable_lora { adapter.min(shared_bytes / 2) } else { 0 };
            let raise = if config.kv_cache_memory_bytes.is_some() { sizes::RAISE } else { "gpu_memory_utilization" };
            let fits = sizes::lowered_context(config, &ledger, (context, kept), raise)?;
            if fits != max_model_len && rounds < 2 {
                max_model_len = fits;
                rounds += 1;
                continue;
            }
            let max_model_len = fits.min(max_model_len);
            notes.extend(sizes::lowered_note(context, max_model_len, shared_bytes));
            let limits = DecoderLimits { max_position: max_model_len, ..limits };
            let card = CardMemory {
                total_bytes: total,
                budget_bytes,
                driver_bytes,
                weight_bytes,
                working_bytes: self.working_bytes(config, spec, &limits),
                shared_bytes,
            };
            let (dtype, dtype_name) = (self.options.dtype, self.dtype_name);
            let sizes = Sizes {
                max_rows,
                dtype,
                dtype_name,
                block_bytes,
                ledger_bytes: shared_bytes,
                blocks: ledger.blocks_beside(0),
                max_model_len,
                most_composed: Some(MOST_COMPOSED),
                card: Some(card),
            };
            return Ok((sizes, card));
        }
    }

    /// The backend, with the memory that was decided.
    pub(super) fn backend(
        self,
        config: &EngineConfig,
        sizes: &Sizes,
        memory: &CardMemory,
    ) -> Result<Arc<CudaBackend>, EngineError> {
        let limits = sizes::decoder_limits(config, sizes);
        let room = Self::room(config, &limits);
        let algorithms = if config.fixed_gemm_algorithm {
            AlgorithmChoice::OnePerWeight { rows: limits.max_rows }
        } else {
            AlgorithmChoice::Fastest
        };
        let options = CudaOptions {
            algorithms,
            memory_bytes: memory.reserved_bytes() as usize,
            shared_bytes: memory.shared_bytes as usize,
            ..self.options
        };
        Ok(Arc::new(CudaBackend::on(self.device, options, room)?))
    }
}

/// Bytes that KV blocks and adapters share, out of what is left.
fn shared(config: &EngineConfig, left: u64) -> Result<u64, EngineError> {
    let Some(wanted) = config.kv_cache_memory_bytes else { return Ok(left) };
    let bytes = wanted.div_ceil(cuda::GRANULE as u64).saturating_mul(cuda::GRANULE as u64);
    if bytes > left {
        return Err(EngineError::InvalidArgument(format!(
            "kv_cache_memory_bytes `{wanted}` is more than the {left} bytes that gpu_memory_utilization `{}` leaves beside \
             weights and working memory; lower it, or raise gpu_memory_utilization",
            config.gpu_memory_utilization
        )));
    }
    Ok(bytes)
}
