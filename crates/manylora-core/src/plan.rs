//! What one step does: the scheduler's answer, in the form that the engine lowers to a kernel batch.
//!
//! A plan is reused from step to step. `plan` of step n+1 may be made while step n is in flight: the tokens that step n
//! will bring then stand as [`PLACEHOLDER`] and are filled in on the device.

use crate::identity::{AdapterSlot, BlockId, RequestId};

/// Stands for a token that the step in flight will produce.
pub const PLACEHOLDER: u32 = u32::MAX;

/// One adapter of a planned sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlannedAdapter {
    /// Where it is resident.
    pub slot: AdapterSlot,
    /// Strength.
    pub scale: f32,
    /// First position it applies to.
    pub first_active: u32,
}

/// The rows of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedSequence {
    /// Which request.
    pub request: RequestId,
    /// Start of its tokens in [`StepPlan::tokens`]; one row each.
    pub first_token: u32,
    /// Number of rows.
    pub rows: u32,
    /// Position of the first row.
    pub first_position: u32,
    /// Start of its block table in [`StepPlan::blocks`].
    pub first_block: u32,
    /// Length of its block table.
    pub blocks: u32,
    /// Start of its adapters in [`StepPlan::adapters`].
    pub first_adapter: u32,
    /// Number of adapters (0 = base).
    pub adapters: u32,
    /// Whether the last row's logits give the next token (the prompt is complete after this step).
    pub samples: bool,
    /// Whether logits of all rows are wanted. After a preemption in mid prompt, rows come again: keep them by position.
    pub all_logits: bool,
    /// Tokens of this sequence that were found in the prefix cache when it was admitted.
    pub cached_tokens: u32,
    /// How often it has lost its blocks so far.
    pub preemptions: u32,
}

/// One step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    /// Running number.
    pub step: u64,
    /// Sequences in row order.
    pub sequences: Vec<PlannedSequence>,
    /// Tokens of all rows.
    pub tokens: Vec<u32>,
    /// Block tables.
    pub blocks: Vec<BlockId>,
    /// Adapters of all sequences, in each request's order.
    pub adapters: Vec<PlannedAdapter>,
}

impl StepPlan {
    /// Empties the plan, keeping its memory.
    pub fn clear(&mut self) {
        self.sequences.clear();
        self.tokens.clear();
        self.blocks.clear();
        self.adapters.clear();
    }

    /// Whether there is nothing to run.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }
}
