//! A card as the engine's device: whether it can be used, and how its memory is divided.
//!
//! The engine may take a share of the card's memory (`gpu_memory_utilization`). Out of that one budget come what the driver
//! takes (its context, code, recorded steps), weights, working memory, KV blocks and adapters. All but the driver's is one
//! reservation, which the sizes here fill to the byte. What weights and working memory leave is shared by KV blocks and
//! adapters, as a processor's is.

use std::sync::Arc;

use manylora_core::budget::card::{self, MOST_COMPOSED};
use manylora_core::budget::division::{CardState, ModelBytes, divide_card};
use manylora_core::budget::working::StepLimits;
use manylora_core::budget::{NumberFormat, TargetModule};
use manylora_kernels::cuda::{
    self, AlgorithmChoice, CudaBackend, CudaError, CudaOptions, Matmul, ProductChoice, ProductSource, StepRoom,
};
use manylora_kernels::{KernelError, StorageType};
use manylora_model::ModelSpec;

use super::device::Unusable;
use super::sizes::{self, Sizes};
use super::startup::CardMemory;
use crate::config::{DType, EngineConfig};
use crate::error::EngineError;

/// A card that can compute.
pub(super) struct Card {
    device: cuda::Device,
    options: CudaOptions,
    dtype_name: &'static str,
    /// What a user should know of it.
    note: Option<String>,
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

    /// Divides the card's memory.
    fn divide(
        &self,
        config: &EngineConfig,
        spec: &ModelSpec,
        notes: &mut Vec<String>,
    ) -> Result<(Sizes, CardMemory), EngineError> {
        let memory = self.device.context().memory().map_err(KernelError::from)?;
        let name = self.name();
        let dimensions = sizes::model_dimensions(spec);
        let state = CardState {
            name: &name,
            total: memory.total as u64,
            free: memory.free as u64,
            most_blocks: card::most_kv_blocks(dimensions.layers, config.block_size),
        };
        let model = ModelBytes {
            weights: dimensions.card_weight_bytes(),
            block: dimensions.kv_block_bytes(config.block_size as u64, NumberFormat::Bf16),
            largest_adapter: dimensions.card_adapter_bytes(config.max_lora_rank as u64, &TargetModule::ALL),
            dtype: self.dtype_name,
        };
        let workspace = self.options.workspace_bytes.map(|bytes| bytes as u64);
        let working = |limits: &StepLimits| {
            let room = card::StepRoom::new(limits, config.max_num_seqs, config.max_loras);
            dimensions.card_working_bytes(limits, &room, workspace)
        };
        let division = divide_card(&sizes::settings(config, spec), &model, &state, &working)?;
        notes.extend(division.notes.iter().cloned());
        let memory = CardMemory {
            total_bytes: state.total,
            budget_bytes: division.budget_bytes,
            driver_bytes: division.driver_bytes,
            weight_bytes: model.weights,
            working_bytes: division.working_bytes,
            shared_bytes: division.ledger_bytes,
        };
        let sizes = Sizes {
            division,
            dtype: self.options.dtype,
            dtype_name: self.dtype_name,
            block_bytes: model.block,
            most_composed: Some(MOST_COMPOSED),
            card: Some(memory),
        };
        Ok((sizes, memory))
    }

    /// The backend, with the memory that was decided.
    pub(super) fn backend(
        self,
        config: &EngineConfig,
        spec: &ModelSpec,
        sizes: &Sizes,
        memory: &CardMemory,
    ) -> Result<Arc<CudaBackend>, EngineError> {
        let division = &sizes.division;
        let (rows, context, blocks) = (division.max_rows, division.max_model_len, division.blocks);
        let limits = sizes::settings(config, spec).step_limits(rows, context, blocks, MOST_COMPOSED);
        let room = card::StepRoom::new(&limits, config.max_num_seqs, config.max_loras);
        let room = StepRoom {
            rows: room.rows,
            entries: room.entries,
            rank: room.rank,
            block_tables: room.block_tables,
            adapters: room.adapters,
        };
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
