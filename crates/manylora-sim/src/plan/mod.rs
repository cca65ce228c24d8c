//! What fits: a model, its adapters and its sequences on a card or on processors, in bytes.
//!
//! [`PlanRequest`] asks, [`plan`] answers with a [`Plan`]. The memory is divided as an engine divides it at its start
//! ([`manylora_core::budget::division`]); adapters and KV blocks then share what is left, as the ledger has them do.
//! `comparison` says what others' ways would take, `warnings` which settings will hurt.

mod comparison;
mod request;
mod warnings;

use manylora_core::budget::card::{self as card_bytes, StepRoom, product_workspace_bytes};
use manylora_core::budget::division::{self, CardState, Division, ModelBytes, divide_card, divide_processor};
use manylora_core::budget::working::StepLimits;
use manylora_core::budget::{Ledger, ModelDimensions, NumberFormat, TargetModule};
use manylora_core::{CoreConfig, Digest};
use serde::Serialize;

pub use comparison::{FullCopies, MaxRankReservation, ModuleParameters};
pub use request::{DType, FleetGroup, PlanRequest, PlannedDevice, ProcessorSpec};

use crate::error::SimError;

/// Where the bytes go. All but `unused` add up to `budget`, and with `unused` to `total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PlanBytes {
    /// What there is: a card's memory, or a processor's free memory.
    pub total: u64,
    /// What the engine may take.
    pub budget: u64,
    /// What is left to others.
    pub unused: u64,
    /// The card's driver.
    pub driver: u64,
    /// The base's weights.
    pub base: u64,
    /// Activations, tables, what kernels need.
    pub workspace: u64,
    /// Adapters that are resident.
    pub adapters: u64,
    /// KV blocks beside them.
    pub kv_blocks: u64,
    /// What of the ledger is no whole block, and what of the budget the ledger does not take.
    pub rest: u64,
}

/// A group of like adapters.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedGroup {
    /// How many were asked for.
    pub count: u64,
    /// How many of them are resident at a time.
    pub resident: u64,
    /// Their rank.
    pub rank: u64,
    /// The modules that they touch, as checkpoints call them.
    pub target_modules: Vec<&'static str>,
    /// Parameters of one.
    pub parameters: u64,
    /// Bytes of one in the ledger.
    pub bytes: u64,
}

/// Sequences of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedSequences {
    /// Tokens of a sequence, prompt and output.
    pub tokens: usize,
    /// Bytes of its KV blocks.
    pub bytes: u64,
    /// How many have room beside the resident adapters.
    pub fit: usize,
    /// How many would without any adapter.
    pub fit_without_adapters: usize,
    /// How many run at a time: `max_num_seqs` caps them.
    pub running: usize,
}

/// A quantized checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedQuantization {
    /// How it is stored.
    pub scheme: String,
    /// Bytes that its weights take once they are loaded.
    pub loaded_bytes: u64,
    /// Bytes that they take as they are stored.
    pub packed_bytes: u64,
    /// What to tell.
    pub note: String,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The model's name.
    pub model: String,
    /// Its parameters.
    pub parameters: u64,
    /// What it runs on.
    pub device: String,
    /// How numbers are stored.
    pub dtype: &'static str,
    /// Where the bytes go.
    pub bytes: PlanBytes,
    /// Bytes that KV blocks and adapters share.
    pub ledger_bytes: u64,
    /// Bytes of one KV block.
    pub block_bytes: u64,
    /// Positions of one.
    pub block_size: usize,
    /// KV blocks without any adapter.
    pub total_blocks: usize,
    /// KV blocks beside the resident adapters.
    pub blocks: usize,
    /// Rows of a step.
    pub max_num_batched_tokens: usize,
    /// Longest sequence.
    pub max_model_len: usize,
    /// Bytes that adapters can take at most.
    pub adapter_room: u64,
    /// Adapters that have room if all are like the first group's.
    pub most_adapters: u64,
    /// The adapters.
    pub fleet: Vec<PlannedGroup>,
    /// Bytes of all of them.
    pub fleet_bytes: u64,
    /// The sequences that were asked for.
    pub sequences: Vec<PlannedSequences>,
    /// Base and adapter parameters of each module that the first group touches.
    pub modules: Vec<ModuleParameters>,
    /// What engines that reserve by `max_lora_rank` take, and what this one does.
    pub reservation: Option<MaxRankReservation>,
    /// Full fine-tunes in the adapters' place.
    pub full_copies: FullCopies,
    /// How the checkpoint is stored, if not as it is loaded.
    pub quantization: Option<PlannedQuantization>,
    /// What was decided for the user.
    pub notes: Vec<String>,
    /// Settings that will hurt, each named.
    pub warnings: Vec<String>,
}

/// Bytes of a model and of its steps on the device that was asked for.
struct Placed<'a> {
    request: &'a PlanRequest<'a>,
    dtype: DType,
    number: NumberFormat,
    base: u64,
    block: u64,
}

impl<'a> Placed<'a> {
    fn new(request: &'a PlanRequest<'a>) -> Result<Self, SimError> {
        let dimensions = &request.model.dimensions;
        let dtype = request.resolved_dtype()?;
        let number = if dtype == DType::Float32 { NumberFormat::F32 } else { NumberFormat::Bf16 };
        let base = match &request.device {
            PlannedDevice::Card(_) => dimensions.card_weight_bytes(),
            PlannedDevice::Processor(processor) => dimensions.weight_bytes(number, (processor.packing)(number)),
        };
        let block = dimensions.kv_block_bytes(request.settings.block_size as u64, number);
        Ok(Self { request, dtype, number, base, block })
    }

    fn dimensions(&self) -> &ModelDimensions {
        &self.request.model.dimensions
    }

    /// Bytes of an adapter in the ledger.
    fn adapter(&self, rank: u64, modules: &[TargetModule]) -> u64 {
        match self.request.device {
            PlannedDevice::Card(_) => self.dimensions().card_adapter_bytes(rank, modules),
            PlannedDevice::Processor(_) => self.dimensions().adapter_bytes(rank, modules, self.number),
        }
    }

    /// Bytes of working memory.
    fn working(&self, limits: &StepLimits) -> u64 {
        match &self.request.device {
            PlannedDevice::Card(card) => {
                let settings = &self.request.settings;
                let room = StepRoom::new(limits, settings.max_num_seqs, settings.max_loras);
                let workspace = self.request.cublas.then(|| product_workspace_bytes(card.capability_major));
                self.dimensions().card_working_bytes(limits, &room, workspace)
            }
            PlannedDevice::Processor(processor) => (processor.working)(self.dimensions(), limits, self.number),
        }
    }

    fn divide(&self) -> Result<Division, SimError> {
        let settings = &self.request.settings;
        let model = ModelBytes {
            weights: self.base,
            block: self.block,
            largest_adapter: self.adapter(settings.max_lora_rank as u64, &TargetModule::ALL),
            dtype: self.dtype.name(),
        };
        let working = |limits: &StepLimits| self.working(limits);
        Ok(match &self.request.device {
            PlannedDevice::Card(card) => {
                let total = card.memory_bytes;
                let state = CardState {
                    name: &card.name,
                    total,
                    free: self.request.free_bytes.unwrap_or(total - division::largest_driver_share(total)),
                    most_blocks: card_bytes::most_kv_blocks(self.dimensions().layers, settings.block_size),
                };
                divide_card(settings, &model, &state, &working)?
            }
            PlannedDevice::Processor(processor) => divide_processor(settings, &model, processor.free_bytes, &working)?,
        })
    }
}

/// Answers.
pub fn plan(request: &PlanRequest<'_>) -> Result<Plan, SimError> {
    decide(request).map(|(plan, _)| plan)
}

/// The answer, and what an engine of it tells its control plane.
pub(crate) fn decide(request: &PlanRequest<'_>) -> Result<(Plan, CoreConfig), SimError> {
    request.validate()?;
    let placed = Placed::new(request)?;
    let division = placed.divide()?;
    let settings = &request.settings;
    let dimensions = &request.model.dimensions;
    let ledger = Ledger { bytes: division.ledger_bytes, block_bytes: placed.block, block_size: settings.block_size };
    let room =
        ledger.adapter_room(division.max_model_len).min(request.scheduling.lora_memory_bytes.unwrap_or(u64::MAX));

    let fleet = resident_fleet(request, &placed, room);
    let adapters: u64 = fleet.iter().map(|group| group.resident * group.bytes).sum();
    let blocks = ledger.blocks_beside(adapters).min(division.blocks);
    let kv_blocks = blocks as u64 * placed.block;
    let total = match &request.device {
        PlannedDevice::Card(card) => card.memory_bytes,
        PlannedDevice::Processor(processor) => processor.free_bytes,
    };
    let taken = division.driver_bytes + placed.base + division.working_bytes + adapters + kv_blocks;
    let bytes = PlanBytes {
        total,
        budget: division.budget_bytes,
        unused: total.saturating_sub(division.budget_bytes),
        driver: division.driver_bytes,
        base: placed.base,
        workspace: division.working_bytes,
        adapters,
        kv_blocks,
        rest: division.budget_bytes.saturating_sub(taken),
    };
    let lengths: Vec<usize> =
        if request.lengths.is_empty() { vec![division.max_model_len] } else { request.lengths.clone() };
    let sequences = lengths.iter().map(|&tokens| sequences(request, &division, &ledger, blocks, tokens));
    let sequences = sequences.collect::<Result<Vec<_>, _>>()?;
    let mut plan = Plan {
        model: request.model.name.clone(),
        parameters: dimensions.parameters(),
        device: request.device.name().to_owned(),
        dtype: placed.dtype.name(),
        bytes,
        ledger_bytes: division.ledger_bytes,
        block_bytes: placed.block,
        block_size: settings.block_size,
        total_blocks: division.blocks,
        blocks,
        max_num_batched_tokens: division.max_rows,
        max_model_len: division.max_model_len,
        adapter_room: room,
        most_adapters: fleet.first().map_or(0, |group| room / group.bytes),
        fleet_bytes: fleet.iter().map(|group| group.count * group.bytes).sum(),
        modules: request.fleet.first().map_or_else(Vec::new, |group| comparison::modules(dimensions, group)),
        reservation: comparison::reservation(&placed, &division, &sequences),
        full_copies: comparison::full_copies(&placed, &division),
        quantization: quantization(request, &placed),
        notes: division.notes.clone(),
        warnings: Vec::new(),
        fleet,
        sequences,
    };
    plan.warnings = warnings::warnings(request, &plan);
    let core = CoreConfig::of_engine(settings, &division, placed.block, &request.scheduling, Digest([0; 32]));
    Ok((plan, core))
}

/// The groups in their order, each as far as there is room (and `max_cpu_loras` lets them stay).
fn resident_fleet(request: &PlanRequest<'_>, placed: &Placed<'_>, room: u64) -> Vec<PlannedGroup> {
    let mut left = room;
    let mut places = request.scheduling.max_cpu_loras.map_or(u64::MAX, |places| places as u64);
    let group = |group: &FleetGroup| {
        let bytes = placed.adapter(group.rank, &group.modules);
        let resident = group.count.min(left / bytes).min(places);
        left -= resident * bytes;
        places -= resident;
        PlannedGroup {
            count: group.count,
            resident,
            rank: group.rank,
            target_modules: group.modules.iter().map(|&module| request::module_name(module)).collect(),
            parameters: placed.dimensions().adapter_parameters(group.rank, &group.modules),
            bytes,
        }
    };
    request.fleet.iter().map(group).collect()
}

fn sequences(
    request: &PlanRequest<'_>,
    division: &Division,
    ledger: &Ledger,
    blocks: usize,
    tokens: usize,
) -> Result<PlannedSequences, SimError> {
    if tokens == 0 || tokens > division.max_model_len {
        let message = format!(
            "a sequence has 1 to {} tokens here (max_model_len); give a shorter one, or raise max_model_len and the memory",
            division.max_model_len
        );
        return Err(SimError::field("lengths", tokens, message));
    }
    let each = tokens.div_ceil(ledger.block_size);
    let fit = blocks / each;
    Ok(PlannedSequences {
        tokens,
        bytes: ledger.sequence_bytes(tokens),
        fit,
        fit_without_adapters: division.blocks / each,
        running: fit.min(request.settings.max_num_seqs),
    })
}

fn quantization(request: &PlanRequest<'_>, placed: &Placed<'_>) -> Option<PlannedQuantization> {
    let quantized = request.model.quantized.as_ref()?;
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    Some(PlannedQuantization {
        scheme: quantized.scheme.clone(),
        loaded_bytes: placed.base,
        packed_bytes: quantized.packed_bytes,
        note: format!(
            "{} is dequantized at load by this version: {:.2} GB in memory as {}; as it is stored it would take {:.2} GB",
            quantized.scheme,
            gigabytes(placed.base),
            placed.dtype.name(),
            gigabytes(quantized.packed_bytes)
        ),
    })
}
