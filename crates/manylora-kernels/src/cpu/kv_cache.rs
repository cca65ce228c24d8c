//! The paged key/value cache.
//!
//! One block is contiguous over all layers, `[block][layer][K, V][kv_head]`, so that a freed block's pages can go back
//! to the system. Inside a head K is `[head_dim][block_size]` and V is `[block_size][head_dim]`: scores are then vectors
//! of positions and outputs are vectors of columns, and neither needs a sum across lanes.
#![expect(unsafe_code, reason = "hands addresses of its memory to kernels that write disjoint slots from many threads")]

use std::cell::{RefCell, RefMut};

use super::attention::scratch_len;
use super::level::SimdLevel;
use super::memory::AlignedVec;
use crate::backend::{KvShape, StorageType};
use crate::error::KernelError;

/// f32 values per cache line: parts of different threads do not share one.
const LINE: usize = 16;
/// Sequences that a step can hold before the task index has to grow; each owns at least one block.
const MOST_SEQUENCES: usize = 1 << 16;

/// Bytes of one block over all layers, K and V: exactly what a block occupies, padding included (there is none).
pub const fn kv_block_bytes(shape: &KvShape) -> usize {
    2 * shape.layers * shape.kv_heads * shape.head_dim * shape.block_size * shape.dtype.bytes()
}

/// Bytes that attention at `level` over a cache of this shape can come to use beside it, for contexts of up to `context`
/// positions on `threads` threads. Address space is reserved for a context that fills the cache.
pub fn attention_scratch_bytes(level: SimdLevel, shape: &KvShape, context: usize, threads: usize) -> usize {
    let values = thread_values(level, shape, context).saturating_mul(threads);
    values.saturating_mul(size_of::<f32>()) + shape.blocks.min(MOST_SEQUENCES) * size_of::<usize>()
}

/// Values of one thread, on cache lines of its own.
fn thread_values(level: SimdLevel, shape: &KvShape, positions: usize) -> usize {
    scratch_len(level, shape.dtype, shape.head_dim, positions).next_multiple_of(LINE)
}

/// What attention needs while it runs; its size depends on the cache and the number of threads only.
#[derive(Debug)]
pub(super) struct AttentionScratch {
    /// First task of each sequence.
    pub(super) first_task: Vec<usize>,
    /// `per_thread` values for each of `threads` threads. Pages that no context is long enough for are never committed.
    pub(super) values: AlignedVec<f32>,
    /// Values of one thread.
    pub(super) per_thread: usize,
    /// Number of threads.
    pub(super) threads: usize,
}

/// A paged key/value cache in reserved memory: pages are committed when they are first written.
#[derive(Debug)]
pub struct KvCache {
    shape: KvShape,
    data: AlignedVec<u8>,
    scratch: RefCell<AttentionScratch>,
}

impl KvCache {
    /// An empty cache for attention at `level` on a pool of `threads` threads.
    pub fn new(level: SimdLevel, shape: KvShape, threads: usize) -> Result<Self, KernelError> {
        let bytes = [shape.layers, shape.kv_heads, shape.head_dim, shape.block_size, shape.blocks, shape.dtype.bytes()]
            .into_iter()
            .try_fold(2_usize, usize::checked_mul)
            .unwrap_or(usize::MAX);
        let data = AlignedVec::zeroed("the KV cache", bytes)?;
        let per_thread = thread_values(level, &shape, shape.blocks * shape.block_size);
        let values = AlignedVec::zeroed("the scratch of attention", per_thread.saturating_mul(threads))?;
        let first_task = Vec::with_capacity(shape.blocks.min(MOST_SEQUENCES));
        Ok(Self { shape, data, scratch: RefCell::new(AttentionScratch { first_task, values, per_thread, threads }) })
    }

    /// Its shape.
    pub const fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Positions that all blocks together can hold.
    pub const fn positions(&self) -> usize {
        self.shape.blocks * self.shape.block_size
    }

    /// Bytes that the cache occupies when every block is in use.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Gives the memory of freed blocks back to the system, as far as they cover whole pages. Their contents are lost:
    /// what is read from them before it is written again is unspecified (old values or zeros).
    pub fn release_blocks(&mut self, blocks: &[u32]) {
        self.check_blocks(blocks);
        for &block in blocks {
            self.give_back(block);
        }
    }

    #[cfg(target_os = "linux")]
    fn give_back(&mut self, block: u32) {
        // SAFETY: a plain question to the system.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(1);
        let stride = self.block_stride();
        let memory = self.data.as_mut_ptr();
        let start = memory.addr() + block as usize * stride;
        let end = start + stride;
        // Pages that neighbours share stay.
        let (start, end) = (start.next_multiple_of(page), end / page * page);
        if start < end {
            // SAFETY: only pages that lie wholly inside the block, which is inside `data` and borrowed mutably.
            unsafe { libc::madvise(memory.with_addr(start).cast(), end - start, libc::MADV_DONTNEED) };
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn give_back(&mut self, _block: u32) {}

    /// Panics unless all the blocks are the cache's.
    pub(super) fn check_blocks(&self, blocks: &[u32]) {
        // Folded without a branch, so that it is a handful of vector instructions.
        let largest = blocks.iter().fold(0, |largest, &block| largest.max(block));
        assert!(
            blocks.is_empty() || (largest as usize) < self.shape.blocks,
            "block {largest} of {}",
            self.shape.blocks
        );
    }

    /// Bytes from a block to the next.
    pub(super) const fn block_stride(&self) -> usize {
        kv_block_bytes(&self.shape)
    }

    /// Bytes of K and V of one layer in one block.
    const fn layer_stride(&self) -> usize {
        2 * self.shape.kv_heads * self.shape.head_dim * self.shape.block_size * self.shape.dtype.bytes()
    }

    /// Start of a layer in block 0.
    pub(super) fn layer(&self, layer: usize) -> *const u8 {
        self.data[layer * self.layer_stride()..].as_ptr()
    }

    /// Start of a layer in block 0, to write through.
    pub(super) fn layer_mut(&mut self, layer: usize) -> *mut u8 {
        let start = layer * self.layer_stride();
        self.data[start..].as_mut_ptr()
    }

    /// What attention works in. A cache is not `Sync`, so there is one user at a time.
    pub(super) fn scratch(&self) -> RefMut<'_, AttentionScratch> {
        self.scratch.borrow_mut()
    }

    /// K and V of one position as f32, for tests and inspection: `[kv_heads * head_dim]` each.
    pub fn read_position(&self, layer: usize, slot: u32) -> (Vec<f32>, Vec<f32>) {
        let KvShape { kv_heads, head_dim, block_size, dtype, .. } = self.shape;
        let (block, within) = (slot as usize / block_size, slot as usize % block_size);
        let start = block * self.block_stride() + layer * self.layer_stride();
        let bytes = &self.data[start..start + self.layer_stride()];
        let element = |index: usize| match dtype {
            StorageType::Bf16 => {
                f32::from_bits(u32::from(u16::from_ne_bytes([bytes[2 * index], bytes[2 * index + 1]])) << 16)
            }
            StorageType::F32 => {
                let at = 4 * index;
                f32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
            }
            StorageType::F16 => unreachable!("refused where it is asked for"),
        };
        let columns = 0..kv_heads * head_dim;
        let head = |column: usize| column / head_dim * head_dim * block_size;
        let k = columns.clone().map(|column| element(head(column) + column % head_dim * block_size + within)).collect();
        let values = kv_heads * head_dim * block_size;
        let v = columns.map(|column| element(values + head(column) + within * head_dim + column % head_dim)).collect();
        (k, v)
    }
}
