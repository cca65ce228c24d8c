//! The decoder: one forward pass for all families, written once over [`Backend`].
//!
//! [`DecoderWeights::load`] packs a checkpoint, [`DecoderWeights::allocate`] adds buffers and the KV cache, and the
//! resulting [`Decoder`] is the engine's [`crate::Runner`]. A step allocates nothing.

mod forward;
mod packer;
pub mod rope;
mod weights;
mod working_memory;

pub use packer::BackendPacker;
pub use weights::{DecoderWeights, LoadProgress, packed_bytes};
pub use working_memory::{Decoder, DecoderLimits};

use std::sync::Arc;

use manylora_kernels::{Backend, StorageType};

use crate::checkpoint::Checkpoint;
use crate::error::ModelError;

impl<B: Backend> Decoder<B> {
    /// Packs a checkpoint's weights; call [`DecoderWeights::allocate`] on the result to get a decoder.
    pub fn load(
        backend: Arc<B>,
        checkpoint: &Checkpoint,
        dtype: StorageType,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<DecoderWeights<B>, ModelError> {
        DecoderWeights::load(backend, checkpoint, dtype, progress)
    }
}
