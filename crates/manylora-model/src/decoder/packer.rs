//! Packing adapters for a backend, from any thread.

use std::sync::Arc;

use manylora_kernels::{Backend, FactorFeed, PackedAdapter, SiteShape, StorageType};

use crate::error::ModelError;
use crate::runner::{AdapterPacker, PackedHandle};

/// Packs adapters as a decoder of this backend and dtype wants them.
pub struct BackendPacker<B: Backend> {
    backend: Arc<B>,
    dtype: StorageType,
    max_rank: usize,
}

impl<B: Backend> BackendPacker<B> {
    /// A packer for decoders on `backend` whose weights are stored as `dtype` and whose working memory is for ranks up
    /// to `max_rank`.
    pub const fn new(backend: Arc<B>, dtype: StorageType, max_rank: usize) -> Self {
        Self { backend, dtype, max_rank }
    }
}

impl<B: Backend> AdapterPacker for BackendPacker<B> {
    fn bytes(&self, sites: &[SiteShape]) -> u64 {
        self.backend.adapter_bytes(sites, self.dtype) as u64
    }

    fn has_own_memory(&self) -> bool {
        self.backend.memory_use().is_some()
    }

    fn lend_core(&self) -> Option<Box<dyn Send + '_>> {
        self.backend.lend_core()
    }

    fn pack_stored(&self, sites: &[SiteShape], feed: &mut FactorFeed<'_>) -> Result<PackedHandle, ModelError> {
        let rank = sites.iter().map(|site| site.rank as usize).max().unwrap_or(0);
        if rank > self.max_rank {
            return Err(ModelError::Unsupported {
                message: format!(
                    "the adapter has rank `{rank}` and the working memory of a step is for ranks up to `{}`; start with a \
                     larger max_lora_rank",
                    self.max_rank
                ),
            });
        }
        let packed = self.backend.pack_stored_adapter(sites, self.dtype, feed)?;
        let bytes = packed.bytes() as u64;
        Ok(PackedHandle { inner: Arc::new(packed), bytes })
    }
}
