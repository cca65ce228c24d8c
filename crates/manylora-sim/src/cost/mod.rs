//! What things take: seconds of a step, and of a load. The virtual engine asks a [`CostModel`]; [`Roofline`] is one from a
//! card's figures, and whatever measures a real engine can be another.

mod roofline;

use manylora_core::StepPlan;
use serde::{Deserialize, Serialize};

pub use roofline::{Efficiency, Roofline};

/// An adapter, as far as costs depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterShape {
    /// Bytes that the ledger charges for it.
    pub bytes: u64,
    /// Its parameters, all layers together.
    pub parameters: u64,
    /// Its rank.
    pub rank: u64,
}

/// Where an adapter is read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Tier {
    /// From a disk.
    Disk,
    /// From the host's memory: it was read before, and its bytes are still there.
    Host,
}

/// What a step does, in the quantities that its time depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepWork {
    /// Sequences.
    pub sequences: u64,
    /// Rows.
    pub rows: u64,
    /// Rows that belong to prompts, or to what is computed again.
    pub prefill_rows: u64,
    /// Sequences that are in a step for the first time.
    pub started: u64,
    /// Rows whose logits are computed.
    pub sampled_rows: u64,
    /// Positions whose keys and values are read: each sequence's context once.
    pub context: u64,
    /// Pairs of a row and a position before it.
    pub attention_pairs: u64,
    /// Distinct adapters.
    pub adapters: u64,
    /// Bytes of these.
    pub adapter_bytes: u64,
    /// Rows with an adapter, an adapter of several counted each.
    pub adapter_rows: u64,
    /// Parameters of adapters that are applied, row by row.
    pub adapter_row_parameters: u64,
    /// Loads of adapters that are under way when it begins.
    pub loads: u64,
}

/// Seconds of steps and loads.
pub trait CostModel {
    /// Seconds from planning a step to having its tokens.
    fn step(&self, work: &StepWork) -> f64;

    /// Seconds of a load on one of the loader's threads.
    fn load(&self, adapter: &AdapterShape, tier: Tier) -> f64;
}

/// Adds up what steps do; knows what lies in which slot.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepWorker {
    slots: Vec<Slot>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    shape: Option<AdapterShape>,
    /// The step that counted it last.
    counted: u64,
}

impl StepWorker {
    pub(crate) fn put(&mut self, slot: usize, shape: Option<AdapterShape>) {
        if self.slots.len() <= slot {
            self.slots.resize(slot + 1, Slot::default());
        }
        self.slots[slot].shape = shape;
    }

    /// What a planned step does, while so many adapters are read.
    pub(crate) fn work(&mut self, plan: &StepPlan, loads: usize) -> StepWork {
        let mut work = StepWork { sequences: plan.sequences.len() as u64, loads: loads as u64, ..StepWork::default() };
        for sequence in &plan.sequences {
            let (rows, first) = (u64::from(sequence.rows), u64::from(sequence.first_position));
            work.rows += rows;
            work.started += u64::from(sequence.preemptions == 0 && sequence.first_position == sequence.cached_tokens);
            work.prefill_rows += if rows > 1 || !sequence.samples { rows } else { 0 };
            work.sampled_rows += if sequence.all_logits { rows } else { u64::from(sequence.samples) };
            work.context += first + rows;
            work.attention_pairs += rows * first + rows * (rows + 1) / 2;
            let range = sequence.first_adapter as usize..(sequence.first_adapter + sequence.adapters) as usize;
            for adapter in &plan.adapters[range] {
                let slot = &mut self.slots[adapter.slot.0 as usize];
                let Some(shape) = slot.shape else { continue };
                let active = (first + rows).saturating_sub(u64::from(adapter.first_active).max(first));
                work.adapter_rows += active;
                let parameters = active.saturating_mul(shape.parameters);
                work.adapter_row_parameters = work.adapter_row_parameters.saturating_add(parameters);
                if slot.counted != plan.step {
                    slot.counted = plan.step;
                    work.adapters += 1;
                    work.adapter_bytes = work.adapter_bytes.saturating_add(shape.bytes);
                }
            }
        }
        work
    }
}
