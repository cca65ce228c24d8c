//! The [`Backend`] trait: the layer-level operations a decoder is made of, over preallocated buffers.
//!
//! LoRA is an argument of `linear`, not a wrapper around it. How a weight is packed is the backend's secret. Nothing
//! here allocates during a step, and an output element's reduction order depends on shapes only, never on the number
//! of rows, their order, or the number of threads.

use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::batch::{RowAdapterPlan, StepBatch};
use crate::error::KernelError;
use crate::largest::LargestValues;
use crate::site::{Site, SiteShape};

/// Number format in which weights, adapters and the KV cache are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StorageType {
    /// bfloat16: 2 bytes
    Bf16,
    /// IEEE half: 2 bytes. Processors refuse it; checkpoints of it are kept in a format that they compute in.
    F16,
    /// IEEE single: 4 bytes. Cards refuse it.
    F32,
}

impl StorageType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Rows of a matrix, read as f32: what a weight is packed from (a mapped file, a dequantizer, a test's vector).
pub trait RowSource: Sync {
    /// Number of rows (outputs).
    fn rows(&self) -> usize;
    /// Number of columns (inputs).
    fn columns(&self) -> usize;
    /// Writes rows `first..first + out.len() / columns` to `out`, row-major.
    fn read(&self, first: usize, out: &mut [f32]) -> Result<(), KernelError>;
    /// The same rows as they are stored, if that is as `dtype` has them in memory: whoever packs them in `dtype` need not
    /// widen and round them.
    fn stored(&self, _dtype: StorageType) -> Option<&dyn StoredRows> {
        None
    }
}

/// Rows of a matrix as they are stored: plain numbers in the processor's order of bytes.
pub trait StoredRows: Sync {
    /// Fills `out` with the bytes of rows from `first` on, row-major; it has room for whole rows.
    fn read_stored(&self, first: usize, out: &mut [u8]) -> Result<(), KernelError>;
}

/// Shape of the paged KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Decoder layers.
    pub layers: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Number of blocks.
    pub blocks: usize,
    /// Element type.
    pub dtype: StorageType,
}

/// Shape of one attention call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; `heads` is a multiple of it.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Factor on the scores, usually 1/sqrt(head_dim).
    pub scale: f32,
    /// A row sees at most this many positions, itself included (Mistral's sliding window).
    pub window: Option<usize>,
}

/// What a buffer holds, hence its number format on a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferRole {
    /// Sums: results of linear maps, the residual stream, logits. Always f32.
    Sums,
    /// What linear maps read, in the backend's own format of activations.
    Inputs,
}

/// Which rows a buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowSet {
    /// Those of the step: [`Backend::begin_step`] says how many there are.
    Batch,
    /// Those whose logits are computed: [`Backend::begin_samples`] says which.
    Samples,
}

/// Role and rows of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferKind {
    /// What it holds.
    pub role: BufferRole,
    /// Rows of what.
    pub rows: RowSet,
}

impl BufferKind {
    /// Sums of a step's rows.
    pub const SUMS: Self = Self { role: BufferRole::Sums, rows: RowSet::Batch };
    /// Inputs of linear maps over a step's rows.
    pub const INPUTS: Self = Self { role: BufferRole::Inputs, rows: RowSet::Batch };
    /// Sums of sampled rows.
    pub const SAMPLE_SUMS: Self = Self { role: BufferRole::Sums, rows: RowSet::Samples };
    /// Inputs of linear maps over sampled rows.
    pub const SAMPLE_INPUTS: Self = Self { role: BufferRole::Inputs, rows: RowSet::Samples };
}

/// What happens to the heads of q, k and v between their linear maps and the rotation.
pub struct HeadInputs<'a, B: Backend + ?Sized> {
    /// Biases of the three maps, `[heads x head_dim]` and `[kv_heads x head_dim]`, added first.
    pub q_bias: Option<&'a B::Vector>,
    /// As above.
    pub k_bias: Option<&'a B::Vector>,
    /// As above.
    pub v_bias: Option<&'a B::Vector>,
    /// RMSNorm of each head of q, `[head_dim]`.
    pub q_norm: Option<&'a B::Vector>,
    /// RMSNorm of each head of k, `[head_dim]`.
    pub k_norm: Option<&'a B::Vector>,
    /// Of the norms.
    pub epsilon: f32,
}

impl<B: Backend + ?Sized> HeadInputs<'_, B> {
    /// Nothing happens to them.
    pub const NONE: Self = Self { q_bias: None, k_bias: None, v_bias: None, q_norm: None, k_norm: None, epsilon: 0.0 };
}

/// What `linear` does with its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearOutput {
    /// `out = result`
    Store,
    /// `out = out + result` (the residual stream)
    Add,
}

/// One of the up to three maps that share an input (q/k/v, gate/up, or a single one).
pub struct LinearPart<'a, B: Backend + ?Sized> {
    /// The packed weight `[output, input]`.
    pub weight: &'a B::Weight,
    /// Bias `[output]`, added after the delta.
    pub bias: Option<&'a B::Vector>,
    /// Where adapters look themselves up.
    pub site: Site,
    /// Result `[rows, output]`.
    pub out: &'a mut B::Buffer,
    /// Store or add.
    pub mode: LinearOutput,
}

/// What a backend's own memory is used for, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// All of it.
    pub reserved: u64,
    /// Weights and rotary tables.
    pub weights: u64,
    /// Activations, what steps tell the kernels, and the kernels' working memory.
    pub working: u64,
    /// What the KV cache has of what it shares with adapters.
    pub kv_cache: u64,
    /// The rest of it: what adapters can have now.
    pub adapter_room: u64,
    /// What they have.
    pub adapters: u64,
}

/// A packed adapter on the backend.
pub trait PackedAdapter: Send + Sync + 'static {
    /// Bytes of the packed blob: exactly what `core::budget` charges for it.
    fn bytes(&self) -> usize;
}

/// Writes the factors A and B of one site (by its index) as f32, row-major, to vectors that it first resizes.
pub type FillFactors<'a> = dyn FnMut(usize, &mut Vec<f32>, &mut Vec<f32>) -> Result<(), KernelError> + 'a;

/// Number format in which a file, or whoever made an adapter in memory, stores a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FactorType {
    /// bfloat16: 2 bytes
    Bf16,
    /// IEEE half: 2 bytes
    F16,
    /// IEEE single: 4 bytes
    F32,
}

impl FactorType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// One factor as it is stored.
#[derive(Clone, Copy, Debug)]
pub struct StoredFactor<'a> {
    /// Format of the elements.
    pub dtype: FactorType,
    /// Little-endian elements, row-major: A `[rank, input]`, B `[output, rank]`. Need not be aligned.
    pub bytes: &'a [u8],
}

impl<'a> StoredFactor<'a> {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements `range`.
    #[must_use]
    pub fn part(&self, range: std::ops::Range<usize>) -> StoredFactor<'a> {
        let width = self.dtype.bytes();
        StoredFactor { dtype: self.dtype, bytes: &self.bytes[range.start * width..range.end * width] }
    }

    /// Widens to f32, exactly. `out` has [`Self::len`] elements.
    #[inline]
    pub fn widen(&self, out: &mut [f32]) {
        match self.dtype {
            FactorType::Bf16 => {
                // Written so that it becomes vector code, as the others are.
                for (value, pair) in out.iter_mut().zip(self.bytes.as_chunks::<2>().0) {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes(*pair)) << 16);
                }
            }
            FactorType::F16 => {
                let mut block = [f16::ZERO; 64];
                for (out, bytes) in out.chunks_mut(64).zip(self.bytes.chunks(128)) {
                    for (value, pair) in block.iter_mut().zip(bytes.as_chunks::<2>().0) {
                        *value = f16::from_le_bytes(*pair);
                    }
                    block[..out.len()].convert_to_f32_slice(out);
                }
            }
            FactorType::F32 => {
                for (value, four) in out.iter_mut().zip(self.bytes.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(*four);
                }
            }
        }
    }
}

/// Takes the factors A and B of one site, by its index.
pub type FactorSink<'a> = dyn FnMut(usize, StoredFactor<'_>, StoredFactor<'_>) -> Result<(), KernelError> + 'a;

/// Gives the factors of every site to a sink, once each, in any order.
pub type FactorFeed<'a> = dyn FnMut(&mut FactorSink<'_>) -> Result<(), KernelError> + 'a;

/// The adapters a step can refer to, by slot.
#[derive(Debug)]
pub struct AdapterTable<A> {
    slots: Vec<Option<Arc<A>>>,
}

impl<A> AdapterTable<A> {
    /// A table of `slots` empty slots.
    pub fn new(slots: usize) -> Self {
        Self { slots: (0..slots).map(|_| None).collect() }
    }

    /// Puts an adapter in a slot (growing the table if need be) and returns what was there.
    pub fn install(&mut self, slot: u32, adapter: Arc<A>) -> Option<Arc<A>> {
        let slot = slot as usize;
        if slot >= self.slots.len() {
            self.slots.resize_with(slot + 1, || None);
        }
        self.slots[slot].replace(adapter)
    }

    /// Empties a slot and returns what was there.
    pub fn remove(&mut self, slot: u32) -> Option<Arc<A>> {
        self.slots.get_mut(slot as usize).and_then(Option::take)
    }

    /// The adapter in a slot.
    pub fn get(&self, slot: u32) -> Option<&A> {
        self.slots.get(slot as usize).and_then(Option::as_deref)
    }
}

/// The operations of a decoder, over preallocated buffers.
///
/// A `Buffer` is a row-major matrix `[capacity, width]`. `rows` says how many rows an operation works on.
///
/// A step is [`Self::begin_step`], its operations over buffers of [`RowSet::Batch`], [`Self::end_step`]; its logits are, any
/// number of times, [`Self::begin_samples`], operations over buffers of [`RowSet::Samples`], [`Self::end_step`]. Operations
/// return nothing: what goes wrong in one (on a device: the launch of a kernel) comes out of `end_step`, or of `read`,
/// `argmax` and `largest`, which wait for results. Every operation of a step gets the batch, plan and adapters that it began with.
pub trait Backend: Send + Sync + 'static {
    /// Activation matrix.
    type Buffer: Send;
    /// Packed matrix.
    type Weight: Send + Sync;
    /// Vector of f32: norm weights, biases, rotary tables.
    type Vector: Send + Sync;
    /// Paged key/value cache.
    type KvCache: Send;
    /// Packed adapter.
    type Adapter: PackedAdapter;

    /// Name for people: `cpu (avx2, 2 threads)`.
    fn describe(&self) -> String;

    /// What its memory is used for now; None where it has none of its own.
    fn memory_use(&self) -> Option<MemoryUse> {
        None
    }

    /// Zeroed buffers of these widths, which one [`Self::linear`] fills or reads together: a backend may put them side by
    /// side.
    fn buffers(&self, rows: usize, widths: &[usize], kind: BufferKind) -> Result<Vec<Self::Buffer>, KernelError>;

    /// A zeroed buffer for sums of a step's rows.
    fn buffer(&self, rows: usize, width: usize) -> Result<Self::Buffer, KernelError> {
        self.one_buffer(rows, width, BufferKind::SUMS)
    }

    /// One zeroed buffer.
    fn one_buffer(&self, rows: usize, width: usize, kind: BufferKind) -> Result<Self::Buffer, KernelError> {
        let mut made = self.buffers(rows, &[width], kind)?;
        Ok(made.pop().expect("one buffer for one width"))
    }

    /// Bytes that [`Self::buffers`] takes.
    fn buffer_bytes(&self, rows: usize, widths: &[usize], kind: BufferKind) -> u64 {
        let _ = kind;
        widths.iter().map(|&width| rows as u64 * width as u64 * StorageType::F32.bytes() as u64).sum()
    }

    /// Announces the largest step (rows, adapter entries, rank of any site, input width of any linear), so that working
    /// memory is had now and no step allocates. A backend without working memory of its own does nothing.
    fn reserve(&self, _rows: usize, _entries: usize, _rank: usize, _width: usize) -> Result<(), KernelError> {
        Ok(())
    }

    /// Bytes that [`Self::reserve`] takes for such steps, when nothing was reserved before.
    fn reserved_bytes(&self, _rows: usize, _entries: usize, _rank: usize, _width: usize) -> usize {
        0
    }

    /// Bytes that attention comes to use beside a KV cache of this shape, for contexts of up to `context` positions.
    fn attention_bytes(&self, _shape: &KvShape, _context: usize) -> usize {
        0
    }

    /// Packs a matrix. `what` names it in errors. Refuses nothing but memory: values are rounded to `dtype`.
    fn pack_weight(&self, what: &str, source: &dyn RowSource, dtype: StorageType) -> Result<Self::Weight, KernelError>;

    /// Packs matrices that one [`Self::linear`] multiplies with the same input: a backend may put them side by side.
    fn pack_weights(
        &self,
        parts: &[(&str, &dyn RowSource)],
        dtype: StorageType,
    ) -> Result<Vec<Self::Weight>, KernelError> {
        parts.iter().map(|(what, source)| self.pack_weight(what, *source, dtype)).collect()
    }

    /// A vector.
    fn vector(&self, values: &[f32]) -> Result<Self::Vector, KernelError>;

    /// Bytes that [`Self::pack_weight`] will take for a matrix `[rows, columns]`, this backend's padding included.
    fn weight_bytes(&self, rows: usize, columns: usize, dtype: StorageType) -> usize {
        rows * columns * dtype.bytes()
    }

    /// Bytes that [`Self::pack_adapter`] will take for these sites, this backend's padding included.
    fn adapter_bytes(&self, sites: &[SiteShape], dtype: StorageType) -> usize {
        let elements = |site: &SiteShape| site.rank as usize * (site.input as usize + site.output as usize);
        sites.iter().map(elements).sum::<usize>() * dtype.bytes()
    }

    /// An empty KV cache. Memory is reserved, and committed by the pages that are written.
    fn kv_cache(&self, shape: KvShape) -> Result<Self::KvCache, KernelError>;

    /// Gives back the memory of KV blocks, as far as whole pages lie inside them. Their content is lost.
    fn release_blocks(&self, _cache: &mut Self::KvCache, _blocks: &[u32]) {}

    /// Takes one core from the steps that run meanwhile, for work on the calling thread, until what is returned is dropped;
    /// None where steps do not need the processor.
    fn lend_core(&self) -> Option<Box<dyn Send + '_>> {
        None
    }

    /// Calls `work(part, parts)` once for every part in `0..parts`, on the threads that steps compute on, and returns when all
    /// are done. Not for use within an operation or by `work`. Without such threads there is one part, on this one.
    fn run_parts(&self, work: &(dyn Fn(usize, usize) + Sync)) {
        work(0, 1);
    }

    /// Packs an adapter into one blob. `fill(i, a, b)` writes the factors of `sites[i]` as f32, row-major, into
    /// vectors that it first resizes: A `[rank, input]`, B `[output, rank]`. Can be called from any thread.
    fn pack_adapter(
        &self,
        sites: &[SiteShape],
        dtype: StorageType,
        fill: &mut FillFactors<'_>,
    ) -> Result<Self::Adapter, KernelError>;

    /// As [`Self::pack_adapter`], from factors as they are stored, which need not be in memory all at once: what a load
    /// uses. Sites that `feed` leaves out, or gives twice, are errors.
    fn pack_stored_adapter(
        &self,
        sites: &[SiteShape],
        dtype: StorageType,
        feed: &mut FactorFeed<'_>,
    ) -> Result<Self::Adapter, KernelError>;

    /// Starts a step. See [`Backend`].
    fn begin_step(&self, _batch: &StepBatch, _adapters: &AdapterTable<Self::Adapter>) -> Result<(), KernelError> {
        Ok(())
    }

    /// Starts the logits of some `rows` of the step, with their own plan (whose rows count from 0). See [`Backend`].
    fn begin_samples(
        &self,
        _rows: &[u32],
        _plan: &RowAdapterPlan,
        _adapters: &AdapterTable<Self::Adapter>,
    ) -> Result<(), KernelError> {
        Ok(())
    }

    /// Ends what the last of them began: the first thing that went wrong in the operations since then.
    fn end_step(&self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Runs `layers`: the operations of all layers. A backend may record what they queue and replay it in later steps,
    /// without calling it: in all steps of one `walk` they are the same calls, on the same weights, buffers and cache.
    fn run_layers(&self, _walk: u64, _batch: &StepBatch, layers: &mut dyn FnMut()) {
        layers();
    }

    /// `out[row] = weight[tokens[row]]`, plus the deltas of adapters that touch `site`.
    fn embed(
        &self,
        batch: &StepBatch,
        adapters: &AdapterTable<Self::Adapter>,
        weight: &Self::Weight,
        site: Site,
        out: &mut Self::Buffer,
    );

    /// RMSNorm of groups of `weight.len()` columns of each row, with f32 accumulation. `site` is where adapters that touch
    /// norms would be found.
    fn rms_norm(
        &self,
        rows: usize,
        input: &Self::Buffer,
        weight: &Self::Vector,
        epsilon: f32,
        site: Site,
        out: &mut Self::Buffer,
    );

    /// `out_i = input W_i^T + sum over the row's entries of scale x B(A x) + bias_i` for every part, with one shared
    /// shrink of `input`. The number of parallel regions does not depend on how many adapters the plan mixes.
    fn linear(
        &self,
        rows: usize,
        plan: &RowAdapterPlan,
        adapters: &AdapterTable<Self::Adapter>,
        input: &Self::Buffer,
        parts: &mut [LinearPart<'_, Self>],
    );

    /// `out = silu(gate) * up`, where gate and up are what [`Self::linear`] would make of the two parts. What it leaves in the
    /// parts' own results is unspecified: a backend that passes sums on to the activation writes nothing there.
    fn gated_linear(
        &self,
        rows: usize,
        plan: &RowAdapterPlan,
        adapters: &AdapterTable<Self::Adapter>,
        input: &Self::Buffer,
        parts: &mut [LinearPart<'_, Self>; 2],
        out: &mut Self::Buffer,
    ) {
        self.linear(rows, plan, adapters, input, parts);
        self.gated_activation(rows, parts[0].out, parts[1].out, out);
    }

    /// Sums a row-parallel linear's partial results over devices: nothing on one device.
    fn reduce(&self, _rows: usize, _out: &mut Self::Buffer) {}

    /// Adds the biases of `heads`, normalizes the heads of q and k where it says so, rotates them (half-split pairs, as
    /// Hugging Face's `rotate_half`) and writes k and v to the cache at `batch.slot_mapping`. q is changed in place; what
    /// the buffer of k holds afterwards is the backend's business. `cos` and `sin` are `[positions, head_dim / 2]`.
    #[allow(clippy::too_many_arguments)]
    fn rope_kv_write(
        &self,
        batch: &StepBatch,
        layer: usize,
        shape: &AttentionShape,
        heads: &HeadInputs<'_, Self>,
        cos: &Self::Vector,
        sin: &Self::Vector,
        q: &mut Self::Buffer,
        k: &mut Self::Buffer,
        v: &Self::Buffer,
        cache: &mut Self::KvCache,
    );

    /// Causal attention of every row over its sequence's cached positions. A row's result depends on its own context
    /// only: not on chunking, block ids or neighbours.
    fn attention(
        &self,
        batch: &StepBatch,
        layer: usize,
        shape: &AttentionShape,
        q: &Self::Buffer,
        cache: &Self::KvCache,
        out: &mut Self::Buffer,
    );

    /// `out = silu(gate) * up`
    fn gated_activation(&self, rows: usize, gate: &Self::Buffer, up: &Self::Buffer, out: &mut Self::Buffer);

    /// `out[i] = input[rows[i]]`
    fn gather_rows(&self, rows: &[u32], input: &Self::Buffer, out: &mut Self::Buffer);

    /// The first `rows` rows as the host sees them, row-major, once they are there.
    fn read<'a>(&'a self, buffer: &'a mut Self::Buffer, rows: usize) -> Result<&'a [f32], KernelError>;

    /// Token with the largest value of each of the first `rows` rows; ties go to the lowest id, NaN never wins.
    fn argmax(&self, rows: usize, logits: &Self::Buffer, out: &mut [u32]) -> Result<(), KernelError>;

    /// Lists the `k` largest values of each of the first `rows` rows, `k` from 1 to [`LargestValues::MOST`], with all that
    /// tie with the last of them, in the order of tokens: all that is above minus infinity where that is less. The two zeros
    /// tie; NaN is never listed. A row with more ties than its list takes has no list. False where this is not to be had,
    /// or not for so many rows: [`Self::read`] them. (Logits in the host's own memory are read as they are.)
    fn largest(
        &self,
        _rows: usize,
        _k: usize,
        _logits: &Self::Buffer,
        _out: &mut LargestValues,
    ) -> Result<bool, KernelError> {
        Ok(false)
    }
}
