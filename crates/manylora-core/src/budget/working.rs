//! What a step takes beside weights, KV blocks and adapters: the activations of its rows and the rotary tables.
//!
//! What the kernels of a backend want for themselves comes on top: a card's is in [`super::card`], a processor's is the
//! processor's own business, because it depends on its SIMD level and its threads.

use super::ModelDimensions;

/// The largest step that room is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct StepLimits {
    /// Rows.
    pub max_rows: usize,
    /// Rows whose logits are computed.
    pub max_logit_rows: usize,
    /// Positions are below this.
    pub max_position: usize,
    /// Positions of a KV block.
    pub block_size: usize,
    /// KV blocks.
    pub blocks: usize,
    /// Entries of the row-adapter plan; 0 where there are no adapters.
    pub max_entries: usize,
    /// Largest rank of an adapter.
    pub max_rank: usize,
}

/// What a buffer of activations holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationRole {
    /// Sums, always f32.
    Sums,
    /// What linear maps read: f32 on a processor, two bytes a number on a card.
    Inputs,
}

/// Activations that one linear map reads or fills: rows, widths and role.
pub type ActivationGroup = (u64, Vec<u64>, ActivationRole);

impl ModelDimensions {
    /// All activations of a step.
    pub fn activations(&self, limits: &StepLimits) -> [ActivationGroup; 9] {
        use ActivationRole::{Inputs, Sums};
        let (rows, logit_rows) = (limits.max_rows as u64, limits.max_logit_rows as u64);
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        [
            (rows, vec![self.hidden], Sums),
            (rows, vec![self.hidden], Inputs),
            (rows, vec![queries, keys, keys], Sums),
            (rows, vec![queries], Inputs),
            (rows, vec![self.intermediate, self.intermediate], Sums),
            (rows, vec![self.intermediate], Inputs),
            (logit_rows, vec![self.hidden], Sums),
            (logit_rows, vec![self.hidden], Inputs),
            (logit_rows, vec![self.vocabulary], Sums),
        ]
    }

    /// Length of each of the two rotary tables: half a head for every position.
    pub const fn rotary_table_len(&self, limits: &StepLimits) -> u64 {
        limits.max_position as u64 * (self.head_dim / 2)
    }

    /// Bytes of activations and tables on a processor: f32 throughout.
    pub fn processor_activation_bytes(&self, limits: &StepLimits) -> u64 {
        let activations = self.activations(limits);
        let numbers = activations.iter().flat_map(|(rows, widths, _)| widths.iter().map(move |width| rows * width));
        4 * (numbers.sum::<u64>() + 2 * self.rotary_table_len(limits))
    }

    /// Widest input of any linear map.
    pub fn widest_input(&self) -> u64 {
        self.hidden.max(self.heads * self.head_dim).max(self.intermediate)
    }
}
