//! The object-safe face of a loaded model: what the engine calls, whatever the backend behind it.

use std::any::Any;
use std::sync::Arc;

use manylora_kernels::{FactorFeed, LargestValues, MemoryUse, SiteShape, StepBatch};

use crate::adapter::PreparedAdapter;
use crate::error::ModelError;

/// A packed adapter, opaque to the engine.
#[derive(Clone)]
pub struct PackedHandle {
    /// The backend's own type, `Arc<B::Adapter>`.
    pub(crate) inner: Arc<dyn Any + Send + Sync>,
    /// Exact bytes of the blob.
    pub bytes: u64,
}

impl std::fmt::Debug for PackedHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PackedHandle").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Packs adapters from any thread, off the step loop.
pub trait AdapterPacker: Send + Sync {
    /// Exact bytes that an adapter with these sites will take.
    fn bytes(&self, sites: &[SiteShape]) -> u64;
    /// Packs factors as they are stored; refuses ranks that steps have no working memory for, before it asks for any.
    fn pack_stored(&self, sites: &[SiteShape], feed: &mut FactorFeed<'_>) -> Result<PackedHandle, ModelError>;
    /// Whether packed adapters lie in memory of a device, of which there is only as much as was set aside for them.
    fn has_own_memory(&self) -> bool {
        false
    }
    /// Takes one core from the steps that run meanwhile until what is returned is dropped. See [`manylora_kernels::Backend`].
    fn lend_core(&self) -> Option<Box<dyn Send + '_>> {
        None
    }
    /// Packs a validated adapter.
    fn pack(&self, adapter: &PreparedAdapter) -> Result<PackedHandle, ModelError> {
        self.pack_stored(&adapter.sites, &mut |sink| adapter.feed(sink))
    }
}

/// A loaded model with its buffers and KV cache.
pub trait Runner: Send {
    /// For people: backend, dtype, bytes.
    fn describe(&self) -> String;
    /// Runs all layers over the batch; the hidden rows named by `batch.sample_rows` are kept for [`Self::logits`]. An error
    /// here, and in what asks for results, is one of the device: the runner is of no use any more.
    fn forward(&mut self, batch: &StepBatch) -> Result<(), ModelError>;
    /// Computes the logits of `batch.sample_rows[first..first + count]`; `count <= max_logit_rows()`.
    fn logits(&mut self, batch: &StepBatch, first: usize, count: usize) -> Result<(), ModelError>;
    /// Logits `[count, vocab]` of the last [`Self::logits`] call.
    fn read_logits(&mut self, count: usize) -> Result<&[f32], ModelError>;
    /// Calls `work(part, parts, logits)`, with the logits `[count, vocab]` of the last [`Self::logits`] call, once for every
    /// part on the threads that steps compute on, and returns when all are done. See [`manylora_kernels::Backend::run_parts`].
    fn share_logits(&mut self, count: usize, work: &(dyn Fn(usize, usize, &[f32]) + Sync)) -> Result<(), ModelError>;
    /// Greedy tokens of the rows of the last [`Self::logits`] call.
    fn argmax(&mut self, count: usize, out: &mut [u32]) -> Result<(), ModelError>;
    /// The `k` largest logits of the rows of the last [`Self::logits`] call, with ties; false where that is not offered.
    /// See [`manylora_kernels::Backend::largest`].
    fn largest(&mut self, count: usize, k: usize, out: &mut LargestValues) -> Result<bool, ModelError>;
    /// Most rows of one [`Self::logits`] call.
    fn max_logit_rows(&self) -> usize;
    /// Does other work on the threads that steps compute on, between two calls. See [`manylora_kernels::Backend::run_parts`].
    fn run_parts(&self, work: &(dyn Fn(usize, usize) + Sync));
    /// Packs adapters for this model.
    fn packer(&self) -> Arc<dyn AdapterPacker>;
    /// Makes an adapter known under a slot. Takes no memory of its own but the table's.
    fn install(&mut self, slot: u32, adapter: PackedHandle);
    /// Forgets what is in a slot.
    fn remove(&mut self, slot: u32);
    /// Gives back the memory of KV blocks that are not used for now. Their content is lost; they can be used again.
    fn release_blocks(&mut self, blocks: &[u32]);
    /// Bytes of the packed weights.
    fn weight_bytes(&self) -> u64;
    /// What the backend's own memory is used for; None where it has none.
    fn memory_use(&self) -> Option<MemoryUse>;
}
