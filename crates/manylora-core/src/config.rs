//! Limits of the control plane, the same for the engine and the simulator.

use serde::{Deserialize, Serialize};

use crate::budget::Ledger;
use crate::budget::division::{Division, SizeSettings};
use crate::error::CoreError;
use crate::eviction::EvictionPolicyKind;
use crate::identity::Digest;

/// Counts beyond this are mistakes: they would overflow the arithmetic of bytes, or take all memory there is.
pub const LARGEST_COUNT: usize = 1 << 24;

/// Order in which waiting requests are looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SchedulingPolicy {
    /// Weighted fair service per tenant or adapter, see [`crate::fairness`].
    #[default]
    Fair,
    /// First come, first served.
    Fcfs,
    /// Lowest priority value first, then arrival.
    Priority,
}

/// How many bytes adapters may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoraMemory {
    /// Whatever the ledger shared with the KV cache has.
    #[default]
    Elastic,
    /// At most this many bytes (still out of the shared ledger).
    Bytes(u64),
}

/// Everything the control plane has to know. Validated by [`crate::ControlPlane::new`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoreConfig {
    /// Sequences per step.
    pub max_num_seqs: usize,
    /// Rows per step.
    pub max_num_batched_tokens: usize,
    /// Longest sequence, prompt and output.
    pub max_model_len: usize,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Bytes of one KV block over all layers.
    pub block_bytes: u64,
    /// Bytes that KV blocks and adapters share.
    pub ledger_bytes: u64,
    /// Whether finished blocks are kept for requests with the same prefix.
    pub enable_prefix_caching: bool,
    /// Whether a prompt may be split over steps.
    pub enable_chunked_prefill: bool,
    /// Order of the waiting queue.
    pub policy: SchedulingPolicy,
    /// Distinct adapters per step; None = no cap beyond the ledger.
    pub max_loras: Option<usize>,
    /// Resident adapters; None = unbounded.
    pub max_cpu_loras: Option<usize>,
    /// Bytes for adapters.
    pub lora_memory: LoraMemory,
    /// Which resident adapter goes when room is needed.
    #[serde(default)]
    pub eviction: EvictionPolicyKind,
    /// Digest of the base's weights and configuration: the root of every block hash.
    pub base_digest: Digest,
    /// A waiting adapter that the cap on distinct adapters keeps out for this many steps closes admission to others
    /// until it has its turn (promise P5).
    pub max_deferred_steps: u64,
    /// Loads for waiting requests that are under way at once: what the loader has its hands full with. More would take
    /// bytes long before they are read, and could not give them back to whoever is ahead. None = unbounded.
    #[serde(default)]
    pub max_loading: Option<usize>,
}

/// What an engine is told that decides no sizes: who is next, what goes, what is read when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulingSettings {
    /// Whose turn it is.
    pub policy: SchedulingPolicy,
    /// Which resident adapter goes when room is needed.
    pub eviction: EvictionPolicyKind,
    /// Whether finished blocks are kept for requests with the same prefix.
    pub enable_prefix_caching: bool,
    /// Resident adapters; None = unbounded.
    pub max_cpu_loras: Option<usize>,
    /// Most bytes of adapters; None = elastic.
    pub lora_memory_bytes: Option<u64>,
    /// See [`CoreConfig::max_deferred_steps`].
    pub max_deferred_steps: u64,
    /// Threads that read adapters.
    pub loader_threads: usize,
}

impl Default for SchedulingSettings {
    /// An engine's defaults, with the fewest threads that it reads with.
    fn default() -> Self {
        Self {
            policy: SchedulingPolicy::Fair,
            eviction: EvictionPolicyKind::Lru,
            enable_prefix_caching: true,
            max_cpu_loras: None,
            lora_memory_bytes: None,
            max_deferred_steps: 256,
            loader_threads: 2,
        }
    }
}

impl CoreConfig {
    /// What an engine with these settings tells its control plane, and the simulator its own: there is no other way from
    /// settings to limits.
    pub fn of_engine(
        sizes: &SizeSettings,
        division: &Division,
        block_bytes: u64,
        scheduling: &SchedulingSettings,
        base_digest: Digest,
    ) -> Self {
        Self {
            max_num_seqs: sizes.max_num_seqs,
            max_num_batched_tokens: division.max_rows,
            max_model_len: division.max_model_len,
            block_size: sizes.block_size,
            block_bytes,
            ledger_bytes: division.ledger_bytes,
            enable_prefix_caching: scheduling.enable_prefix_caching,
            enable_chunked_prefill: sizes.enable_chunked_prefill,
            policy: scheduling.policy,
            max_loras: sizes.max_loras,
            max_cpu_loras: scheduling.max_cpu_loras,
            lora_memory: scheduling.lora_memory_bytes.map_or(LoraMemory::Elastic, LoraMemory::Bytes),
            eviction: scheduling.eviction,
            base_digest,
            max_deferred_steps: scheduling.max_deferred_steps,
            // One that is read and one that is next, for each thread.
            max_loading: Some(2 * scheduling.loader_threads),
        }
    }

    /// The bytes of KV blocks and adapters.
    pub(crate) const fn ledger(&self) -> Ledger {
        let (bytes, block_bytes, block_size) = (self.ledger_bytes, self.block_bytes, self.block_size);
        Ledger { bytes, block_bytes, block_size }
    }

    /// Refuses what cannot work, alone or together.
    pub(crate) fn validate(&self) -> Result<(), CoreError> {
        let refuse = |message: String| Err(CoreError::InvalidConfig(message));
        let counts = [
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_model_len", self.max_model_len),
            ("block_size", self.block_size),
            ("max_loras", self.max_loras.unwrap_or(1)),
            ("max_cpu_loras", self.max_cpu_loras.unwrap_or(1)),
            ("max_loading", self.max_loading.unwrap_or(1)),
        ];
        if let Some((name, value)) = counts.iter().find(|(_, value)| !(1..=LARGEST_COUNT).contains(value)) {
            return refuse(format!("{name} (`{value}`) must be at least 1 and at most {LARGEST_COUNT}."));
        }
        if self.block_bytes == 0 {
            return refuse("the bytes of a KV block (`0`) must be at least 1.".to_owned());
        }
        if let (Some(slots), Some(host)) = (self.max_loras, self.max_cpu_loras)
            && host < slots
        {
            return refuse(format!("max_cpu_loras ({host}) must be >= max_loras ({slots})."));
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return refuse(format!(
                "max_num_batched_tokens ({}) must be greater than or equal to max_num_seqs ({}).",
                self.max_num_batched_tokens, self.max_num_seqs
            ));
        }
        if !self.enable_chunked_prefill && self.max_num_batched_tokens < self.max_model_len {
            return refuse(format!(
                "max_num_batched_tokens ({}) must be greater than or equal to max_model_len ({}) while \
                 enable_chunked_prefill is False: a prompt is computed in one step then.",
                self.max_num_batched_tokens, self.max_model_len
            ));
        }
        let ledger = self.ledger();
        if ledger.blocks_beside(0) >= u32::MAX as usize {
            return refuse(format!("`{}` bytes make more KV blocks than 2^32; raise block_size", self.ledger_bytes));
        }
        let needed_bytes = ledger.sequence_bytes(self.max_model_len);
        if needed_bytes > self.ledger_bytes {
            return Err(CoreError::LedgerTooSmall {
                max_model_len: self.max_model_len,
                needed_bytes,
                ledger_bytes: self.ledger_bytes,
                fits: ledger.longest_sequence(0),
            });
        }
        Ok(())
    }
}
