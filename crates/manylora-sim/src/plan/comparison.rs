//! What other ways of serving the same fine-tunes would take.

use manylora_core::budget::card::MOST_COMPOSED;
use manylora_core::budget::division::Division;
use manylora_core::budget::working::StepLimits;
use manylora_core::budget::{ModelDimensions, TargetModule};
use serde::Serialize;

use super::request::{FleetGroup, PlannedDevice, module_name};
use super::{Placed, PlannedSequences};

/// One module of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ModuleParameters {
    /// What checkpoints call it.
    pub module: &'static str,
    /// Widths of its output and input.
    pub shape: [u64; 2],
    /// Parameters of the base's matrix.
    pub base_parameters: u64,
    /// Parameters of an adapter's two factors.
    pub adapter_parameters: u64,
    /// How many times fewer these are.
    pub ratio: f64,
}

pub(super) fn modules(dimensions: &ModelDimensions, group: &FleetGroup) -> Vec<ModuleParameters> {
    let one = |&module: &TargetModule| {
        let (input, output) = dimensions.shape(module);
        let (base_parameters, adapter_parameters) = (input * output, group.rank * (input + output));
        ModuleParameters {
            module: module_name(module),
            shape: [output, input],
            base_parameters,
            adapter_parameters,
            ratio: base_parameters as f64 / adapter_parameters as f64,
        }
    };
    group.modules.iter().map(one).collect()
}

/// Engines that reserve a place of the largest rank on every module for each adapter of a step, against this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MaxRankReservation {
    /// Places: `max_loras`, or one for each adapter.
    pub slots: u64,
    /// `max_lora_rank`.
    pub max_lora_rank: u64,
    /// Bytes that such an engine reserves.
    pub reserved_bytes: u64,
    /// Bytes of the factors of the adapters in those places, the largest ones.
    pub used_bytes: u64,
    /// The difference.
    pub wasted_bytes: u64,
    /// Sequences of the first length that have no room for it.
    pub lost_sequences: u64,
    /// Bytes that the ledger of this engine charges for the same adapters: the factors, and what their alignment and their
    /// rows of a table take. `max_lora_rank` is no part of it.
    pub charged_here_bytes: u64,
    /// Bytes by which this engine's working memory grows from the largest rank there is to `max_lora_rank`.
    pub workspace_here_bytes: u64,
}

pub(super) fn reservation(
    placed: &Placed<'_>,
    division: &Division,
    sequences: &[PlannedSequences],
) -> Option<MaxRankReservation> {
    let (request, dimensions) = (placed.request, placed.dimensions());
    let settings = &request.settings;
    let slots = settings.max_loras.map_or(request.adapters(), |slots| (slots as u64).min(request.adapters()));
    if slots == 0 {
        return None;
    }
    // The largest first: a place must have room for any of them.
    let mut sizes: Vec<(u64, u64, u64)> = request
        .fleet
        .iter()
        .map(|group| {
            let parameters = dimensions.adapter_parameters(group.rank, &group.modules);
            (parameters * placed.number.bytes(), placed.adapter(group.rank, &group.modules), group.count)
        })
        .collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let (mut left, mut used_bytes, mut charged_here_bytes) = (slots, 0, 0);
    for (factors, charged, count) in sizes {
        let taken = count.min(left);
        used_bytes += factors * taken;
        charged_here_bytes += charged * taken;
        left -= taken;
    }
    let max_lora_rank = settings.max_lora_rank as u64;
    let each = dimensions.adapter_parameters(max_lora_rank, &TargetModule::ALL) * placed.number.bytes();
    let wasted_bytes = slots * each - used_bytes;
    let composed = match request.device {
        PlannedDevice::Card(_) => MOST_COMPOSED,
        PlannedDevice::Processor(_) => 1,
    };
    let workspace = |rank: u64| {
        let limits = settings.step_limits(division.max_rows, division.max_model_len, division.blocks, composed);
        placed.working(&StepLimits { max_rank: rank as usize, ..limits })
    };
    Some(MaxRankReservation {
        slots,
        max_lora_rank,
        reserved_bytes: slots * each,
        used_bytes,
        wasted_bytes,
        lost_sequences: sequences.first().map_or(0, |one| wasted_bytes / one.bytes),
        charged_here_bytes,
        workspace_here_bytes: workspace(max_lora_rank).saturating_sub(workspace(request.largest_rank())),
    })
}

/// As many full fine-tunes as there are adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FullCopies {
    /// How many.
    pub count: u64,
    /// Bytes of their weights: two for each parameter in a format of two bytes.
    pub bytes: u64,
    /// How many fit in the budget beside the driver and one working memory, without any KV block.
    pub fit: u64,
}

pub(super) fn full_copies(placed: &Placed<'_>, division: &Division) -> FullCopies {
    let each = placed.dimensions().parameters() * placed.number.bytes();
    let count = placed.request.adapters();
    let room = division.budget_bytes - division.driver_bytes - division.working_bytes;
    FullCopies { count, bytes: count * each, fit: room / each }
}
