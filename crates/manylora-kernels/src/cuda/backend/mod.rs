//! The backend that runs on a card.
//!
//! Reading order: `buffer`, `kv` and `adapter` (how things lie in its memory), `block` and `items` (what a step tells the
//! kernels), `step` (what changes from step to step), then the operations: `linear`, `attention`, `elementwise`, `largest`.
//!
//! An operation queues one launch or a few and returns; what goes wrong stops the operations after it and comes out of
//! `end_step`. The layers of a small step are recorded when they are run for the second time, and replayed from then on:
//! everything that varies lies in the step's block, in the table of adapters and in the KV cache.

mod adapter;
mod attention;
mod block;
mod buffer;
mod elementwise;
mod items;
mod kernels;
mod kv;
mod largest;
mod linear;
mod product;
mod region;
mod room;
mod step;
mod together;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

pub use adapter::CudaAdapter;
pub use buffer::{CudaBuffer, CudaVector, CudaWeight};
pub use kv::CudaKvCache;
pub use product::{ProductChoice, ProductSource};
pub use room::{
    StepRoom, activation_bytes, kv_cache_bytes, matrices_bytes, most_kv_blocks, packed_adapter_bytes, step_bytes,
    vector_bytes,
};

use super::arena::{Arena, ArenaUsage, Holding};
use super::device::Device;
use super::error::CudaError;
use super::graph::GraphCache;
use super::matmul::AlgorithmChoice;
use super::staging::Uploader;
use super::stream::Stream;
use crate::backend::{
    AdapterTable, AttentionShape, Backend, BufferKind, FactorFeed, FillFactors, HeadInputs, KvShape, LinearPart,
    MemoryUse, RowSource, StorageType,
};
use crate::batch::{RowAdapterPlan, StepBatch};
use crate::error::KernelError;
use crate::largest::LargestValues;
use crate::site::{Site, SiteShape};
use attention::RopeInputs;
use kernels::KernelSet;
use kv::Positions;
use product::Products;
use region::{AdapterRegion, Gather, Placing};
use step::StepState;

/// Chunks of page-locked memory for uploads, and bytes of each.
const UPLOAD_CHUNKS: usize = 2;
const UPLOAD_CHUNK: usize = 4 << 20;

/// What a CUDA backend is made with. It serves one shape of model.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Number of the card.
    pub ordinal: usize,
    /// Format of weights, activations, adapters and the KV cache: bf16 or f16.
    pub dtype: StorageType,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head: a multiple of 8, at most 256.
    pub head_dim: usize,
    /// Bytes of the card that are taken: all but the driver's own.
    pub memory_bytes: usize,
    /// Of these, bytes that KV blocks and adapters share.
    pub shared_bytes: usize,
    /// Who computes base products.
    pub products: ProductChoice,
    /// How cuBLASLt computes them.
    pub algorithms: AlgorithmChoice,
    /// Working memory of cuBLASLt, taken where it is used; None = what its maker advises.
    pub workspace_bytes: Option<usize>,
    /// Folders in which cuBLASLt may lie.
    pub library_folders: Vec<PathBuf>,
    /// Record steps and replay them.
    pub graphs: bool,
}

/// Recorded steps that are kept: the driver takes some hundred KiB for each, which no budget counts.
const MOST_RECORDED: usize = 256;
/// The driver's code for it, CUDA_ERROR_OUT_OF_MEMORY.
const OUT_OF_MEMORY: u32 = 2;

/// What a recorded run of the layers is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct RunKey {
    walk: u64,
    rows: usize,
    small: bool,
    touched: u16,
    tiles: usize,
    first_tiles: usize,
    items: usize,
    reduces: bool,
}

#[derive(Debug)]
struct Recorded {
    cache: GraphCache<RunKey>,
    /// Run once, so that kernels are loaded and products planned.
    warm: HashSet<RunKey>,
    /// The driver had no memory for one: nothing is recorded any more.
    off: bool,
}

/// The backend that runs on a card.
#[derive(Debug)]
pub struct CudaBackend {
    described: String,
    dtype: StorageType,
    sites: usize,
    shape: (usize, usize, usize),
    graphs: bool,
    /// Before what they use, so that they go first. Locked before `state` where both are.
    recorded: Mutex<Recorded>,
    /// Uncontended: one step runs at a time per backend.
    state: Mutex<StepState>,
    kernels: KernelSet,
    uploader: Uploader,
    adapters: AdapterRegion,
    arena: Arena,
    device: Device,
}

impl CudaBackend {
    /// Opens a card and reserves its memory. Room for steps is made by [`Backend::reserve`].
    pub fn open(options: CudaOptions) -> Result<Self, KernelError> {
        Self::check(&options)?;
        let device = Device::open(options.ordinal)?;
        Self::make(device, options, None)
    }

    /// Reserves memory on a card that was opened before, with room for steps that is never added to as long as no step needs
    /// more: the reservation may be exactly what [`step_bytes`] and its like say.
    pub fn on(device: Device, options: CudaOptions, room: StepRoom) -> Result<Self, KernelError> {
        Self::check(&options)?;
        Self::make(device, options, Some(StepRoom { entries: room.entries.max(1), ..room }))
    }

    /// Refuses formats and heads that the kernels do not take.
    pub fn check(options: &CudaOptions) -> Result<(), KernelError> {
        let &CudaOptions { dtype, heads, kv_heads, head_dim, .. } = options;
        if dtype == StorageType::F32 {
            return Err(refused(dtype));
        }
        if head_dim == 0 || !head_dim.is_multiple_of(8) || head_dim > 256 {
            return Err(KernelError::Device(format!(
                "heads are `{head_dim}` wide and the kernels for cards take multiples of 8 up to 256; use device \"cpu\""
            )));
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(KernelError::Device(format!("`{heads}` query heads are no multiple of `{kv_heads}` KV heads")));
        }
        Ok(())
    }

    fn make(device: Device, options: CudaOptions, room: Option<StepRoom>) -> Result<Self, KernelError> {
        let CudaOptions {
            ordinal: _,
            dtype,
            layers,
            heads,
            kv_heads,
            head_dim,
            memory_bytes,
            shared_bytes,
            products: choice,
            algorithms,
            workspace_bytes,
            library_folders,
            graphs,
        } = options;
        let format = if dtype == StorageType::F16 { "f16" } else { "bf16" };
        let arena = Arena::reserve(device.context(), memory_bytes)?;
        let adapters = AdapterRegion::new(&arena, shared_bytes)?;
        let uploader = Uploader::new(device.compute(), UPLOAD_CHUNKS, UPLOAD_CHUNK)?;
        let kernels = KernelSet::new(device.kernels(), format, head_dim)?;
        let products =
            Products::new(&arena, device.kernels(), format, choice, &library_folders, workspace_bytes, algorithms)?;
        let described = format!("{}, {}", device.describe(), products.describe());
        let sites = Site::count(layers as u32);
        let shape = (heads, kv_heads, head_dim);
        let state = StepState::new(&arena, device.compute(), products, sites, shape, room)?;
        let recorded = Recorded { cache: GraphCache::new(device.context())?, warm: HashSet::new(), off: false };
        device.compute().synchronize()?;
        Ok(Self {
            described,
            dtype,
            sites,
            shape,
            graphs,
            recorded: Mutex::new(recorded),
            state: Mutex::new(state),
            kernels,
            uploader,
            adapters,
            arena,
            device,
        })
    }

    /// What its memory is used for. What adapters hold of what they share with KV blocks is [`Self::adapter_usage`].
    pub fn usage(&self) -> ArenaUsage {
        self.arena.usage()
    }

    /// What adapters hold of what they can have now.
    pub fn adapter_usage(&self) -> ArenaUsage {
        self.adapters.usage()
    }

    /// The card.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Number of recorded steps.
    pub fn recorded_steps(&self) -> usize {
        self.recorded().cache.len()
    }

    /// Writes the first rows of a buffer, and waits: for tests and measurements.
    pub fn write(&self, buffer: &mut CudaBuffer, values: &[f32]) -> Result<(), KernelError> {
        Ok(buffer.write(self.device.compute(), values, self.dtype)?)
    }

    /// Places an adapter, moving others together if need be.
    fn place_adapter(&self, bytes: usize) -> Result<Placing, CudaError> {
        self.adapters.place(bytes, &|gather| self.gather(gather))
    }

    fn gather(&self, gather: &Gather<'_>) -> Result<(), CudaError> {
        let mut state = self.state();
        let gathered = gather.run(self.device.compute(), &self.uploader, &mut state.table);
        if let Err(error) = &gathered {
            // A step that has begun may already have gone through blobs that are half moved.
            state.broken = Some(error.clone());
        }
        gathered
    }

    /// Gives the blocks of a step memory, where they have none: what adapters had before is taken from them.
    fn provide_blocks(&self, batch: &StepBatch) -> Result<(), CudaError> {
        let (reached, limit) = {
            let mut state = self.state();
            state.whole()?;
            let Some(positions) = &mut state.positions else { return Ok(()) };
            let reached = positions.provide(&batch.block_tables)?;
            if reached.is_empty() {
                return Ok(());
            }
            (reached, positions.limit())
        };
        // Not under the step's lock, which whoever is waited for may need.
        let taken = self.adapters.lower(limit, &|gather| self.gather(gather));
        let mut state = self.state();
        let Some(positions) = &mut state.positions else { return Ok(()) };
        let zeroed = taken.and_then(|()| {
            self.uploader.before(self.device.compute())?;
            positions.zero(self.adapters.shared(), self.device.compute(), &reached)
        });
        if zeroed.is_err() {
            positions.forget(reached);
        }
        zeroed
    }

    /// What is in a KV block's memory, if it has any: for tests.
    pub fn read_block(&self, block: u32) -> Result<Option<Vec<u8>>, KernelError> {
        let state = self.state();
        let Some(positions) = &state.positions else { return Ok(None) };
        Ok(positions.read(self.adapters.shared(), self.device.compute(), block)?)
    }

    fn state(&self) -> MutexGuard<'_, StepState> {
        // After a panic in an operation the step's own state is as good as any: the next step writes it anew.
        match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let _waiting = self.adapters.queue.wait();
                self.state.lock().unwrap_or_else(PoisonError::into_inner)
            }
        }
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs an operation, unless an earlier one has failed.
    fn operate(&self, operation: impl FnOnce(&mut StepState) -> Result<(), CudaError>) {
        let mut state = self.state();
        if state.error.is_none() {
            state.error = operation(&mut state).err();
        }
    }

    fn check_shape(&self, shape: &AttentionShape) {
        assert_eq!((shape.heads, shape.kv_heads, shape.head_dim), self.shape, "the backend serves another shape");
    }

    fn check_dtype(&self, dtype: StorageType) -> Result<(), KernelError> {
        if dtype == self.dtype { Ok(()) } else { Err(refused(dtype)) }
    }

    /// The key of the step's layers, if they are to be recorded.
    fn run_key(&self, walk: u64) -> Option<RunKey> {
        let state = self.state();
        let block = &state.batch;
        let wanted = self.graphs && state.error.is_none() && block.rows <= block::SMALL_ROWS;
        let touched = block.touched;
        wanted.then(|| RunKey {
            walk,
            rows: step::bucket(block.rows),
            small: block.is_small(),
            touched,
            tiles: if touched == 0 { 0 } else { step::tile_grid(block.tiles) },
            first_tiles: if touched == 0 { 0 } else { step::tile_grid(block.first_tiles) },
            items: attention::item_grid(block.items),
            reduces: block.reduces > 0,
        })
    }

    /// Records the layers, if that was not done before, and replays them.
    fn replay(&self, recorded: &mut Recorded, key: RunKey, layers: &mut dyn FnMut()) -> Result<(), CudaError> {
        let graph = recorded.cache.get_or_record(key, |recording: &Arc<Stream>| {
            let compute = std::mem::replace(&mut self.state().stream, Arc::clone(recording));
            let restored = Restore { backend: self, compute: Some(compute) };
            layers();
            drop(restored);
            self.state().error.take().map_or(Ok::<(), CudaError>(()), Err)
        })?;
        #[expect(unsafe_code, reason = "replays what was recorded")]
        // SAFETY: what it uses belongs to the backend, which forgets recorded steps when it moves, or to whoever called
        // with the same `walk`, who has promised the same calls.
        unsafe {
            graph.replay(self.device.compute())
        }
    }
}

/// Gives operations their stream back, also where recording panics.
struct Restore<'a> {
    backend: &'a CudaBackend,
    compute: Option<Arc<Stream>>,
}

impl Drop for Restore<'_> {
    fn drop(&mut self) {
        if let Some(compute) = self.compute.take() {
            self.backend.state().stream = compute;
        }
    }
}

fn refused(dtype: StorageType) -> KernelError {
    let dtype = buffer::name(dtype);
    KernelError::Format { backend: "CUDA", dtype, choose: "bfloat16 or float16, the same for all" }
}

impl Backend for CudaBackend {
    type Buffer = CudaBuffer;
    type Weight = CudaWeight;
    type Vector = CudaVector;
    type KvCache = CudaKvCache;
    type Adapter = CudaAdapter;

    fn describe(&self) -> String {
        self.described.clone()
    }

    fn buffers(&self, rows: usize, widths: &[usize], kind: BufferKind) -> Result<Vec<CudaBuffer>, KernelError> {
        Ok(CudaBuffer::side_by_side(&self.arena, self.device.compute(), rows, widths, kind)?)
    }

    fn buffer_bytes(&self, rows: usize, widths: &[usize], kind: BufferKind) -> u64 {
        buffer::buffer_bytes(rows, widths, kind) as u64
    }

    fn reserve(&self, rows: usize, entries: usize, rank: usize, _width: usize) -> Result<(), KernelError> {
        Ok(self.state().reserve(&self.arena, StepRoom::of_rows(rows, entries, rank))?)
    }

    fn reserved_bytes(&self, rows: usize, entries: usize, rank: usize, _width: usize) -> usize {
        let floats = self.state().floats_per_partial();
        StepRoom::of_rows(rows, entries, rank).bytes(floats)
    }

    fn pack_weight(&self, what: &str, source: &dyn RowSource, dtype: StorageType) -> Result<CudaWeight, KernelError> {
        let mut packed = self.pack_weights(&[(what, source)], dtype)?;
        Ok(packed.pop().expect("one weight for one source"))
    }

    fn pack_weights(
        &self,
        parts: &[(&str, &dyn RowSource)],
        dtype: StorageType,
    ) -> Result<Vec<CudaWeight>, KernelError> {
        self.check_dtype(dtype)?;
        let packed = CudaWeight::pack(&self.arena, &self.uploader, parts, dtype)?;
        if let Some(weight) = parts.first().and_then(|(_, first)| {
            // Weights of one input are multiplied as one.
            let same = parts.iter().all(|(_, part)| part.columns() == first.columns());
            same.then(|| (parts.iter().map(|(_, part)| part.rows()).sum(), first.columns()))
        }) {
            self.state().products.check_weight(weight, buffer::operands(dtype))?;
        }
        Ok(packed)
    }

    fn vector(&self, values: &[f32]) -> Result<CudaVector, KernelError> {
        Ok(CudaVector::new(&self.arena, self.device.compute(), values)?)
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        let (all, adapters) = (self.arena.usage(), self.adapters.usage());
        Some(MemoryUse {
            reserved: all.capacity as u64,
            weights: all.held(Holding::Weights) as u64,
            working: (all.held(Holding::Buffers) + all.held(Holding::Adapters)) as u64,
            kv_cache: (all.held(Holding::Shared) - adapters.capacity) as u64,
            adapter_room: adapters.capacity as u64,
            adapters: adapters.held(Holding::Adapters) as u64,
        })
    }

    fn adapter_bytes(&self, sites: &[SiteShape], _dtype: StorageType) -> usize {
        adapter::adapter_bytes(sites, self.sites)
    }

    fn kv_cache(&self, shape: KvShape) -> Result<CudaKvCache, KernelError> {
        self.check_dtype(shape.dtype)?;
        if self.state().positions.as_ref().is_some_and(Positions::in_use) {
            return Err(KernelError::Device("a backend has one KV cache at a time; make another backend".to_owned()));
        }
        let (cache, positions) = CudaKvCache::new(self.adapters.shared(), shape)?;
        let limit = positions.limit_beside_blocks();
        self.adapters.lower(limit, &|gather| self.gather(gather))?;
        self.adapters.raise(limit);
        self.state().positions = Some(positions);
        Ok(cache)
    }

    fn release_blocks(&self, _cache: &mut CudaKvCache, blocks: &[u32]) {
        let mut state = self.state();
        let Some(positions) = &mut state.positions else { return };
        let mut moves = positions.give_up(blocks).into_iter();
        let moved = moves.try_for_each(|way| positions.follow(self.adapters.shared(), self.device.compute(), way));
        let limit = positions.limit_beside_blocks();
        match moved {
            Ok(()) => self.adapters.raise(limit),
            Err(error) => state.broken = Some(error),
        }
    }

    fn pack_adapter(
        &self,
        sites: &[SiteShape],
        dtype: StorageType,
        fill: &mut FillFactors<'_>,
    ) -> Result<CudaAdapter, KernelError> {
        self.check_dtype(dtype)?;
        CudaAdapter::pack(self, sites, self.sites, dtype, fill)
    }

    fn pack_stored_adapter(
        &self,
        sites: &[SiteShape],
        dtype: StorageType,
        feed: &mut FactorFeed<'_>,
    ) -> Result<CudaAdapter, KernelError> {
        self.check_dtype(dtype)?;
        CudaAdapter::pack_stored(self, sites, self.sites, dtype, feed)
    }

    fn begin_step(&self, batch: &StepBatch, adapters: &AdapterTable<CudaAdapter>) -> Result<(), KernelError> {
        self.device.context().bind()?;
        self.provide_blocks(batch)?;
        Ok(self.state().begin_step(&self.arena, batch, adapters)?)
    }

    fn begin_samples(
        &self,
        rows: &[u32],
        plan: &RowAdapterPlan,
        adapters: &AdapterTable<CudaAdapter>,
    ) -> Result<(), KernelError> {
        self.device.context().bind()?;
        Ok(self.state().begin_samples(&self.arena, rows, plan, adapters)?)
    }

    fn end_step(&self) -> Result<(), KernelError> {
        let mut state = self.state();
        state.whole()?;
        match state.error.take() {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }

    fn run_layers(&self, walk: u64, _batch: &StepBatch, layers: &mut dyn FnMut()) {
        let Some(key) = self.run_key(walk) else { return layers() };
        let mut recorded = self.recorded();
        if recorded.off {
            return layers();
        }
        if std::mem::take(&mut self.state().moved) {
            recorded.cache.clear();
            // Products are planned by shape, kernels are loaded: the next run of each may be recorded at once.
        }
        if recorded.cache.get(&key).is_none() {
            if recorded.warm.insert(key) {
                drop(recorded);
                return layers();
            }
            if recorded.cache.len() >= MOST_RECORDED {
                recorded.cache.clear();
            }
        }
        match self.replay(&mut recorded, key, layers) {
            Ok(()) => {}
            // What is recorded takes the driver's memory, of which there is no more: steps run without.
            Err(CudaError::Driver { code, .. }) if code == OUT_OF_MEMORY => {
                recorded.cache.clear();
                recorded.off = true;
                drop(recorded);
                layers();
            }
            Err(error) => {
                self.state().error.get_or_insert(error);
            }
        }
    }

    fn embed(
        &self,
        _batch: &StepBatch,
        _adapters: &AdapterTable<CudaAdapter>,
        weight: &CudaWeight,
        site: Site,
        out: &mut CudaBuffer,
    ) {
        self.operate(|state| {
            elementwise::embed(self, state, weight, out)?;
            linear::embed_deltas(self, state, site, out)
        });
    }

    fn rms_norm(
        &self,
        rows: usize,
        input: &CudaBuffer,
        weight: &CudaVector,
        epsilon: f32,
        _site: Site,
        out: &mut CudaBuffer,
    ) {
        self.operate(|state| elementwise::rms_norm(self, state, rows, input, weight, epsilon, out));
    }

    fn linear(
        &self,
        rows: usize,
        _plan: &RowAdapterPlan,
        _adapters: &AdapterTable<CudaAdapter>,
        input: &CudaBuffer,
        parts: &mut [LinearPart<'_, Self>],
    ) {
        self.operate(|state| linear::linear(self, state, rows, input, parts));
    }

    fn rope_kv_write(
        &self,
        _batch: &StepBatch,
        layer: usize,
        shape: &AttentionShape,
        heads: &HeadInputs<'_, Self>,
        cos: &CudaVector,
        sin: &CudaVector,
        q: &mut CudaBuffer,
        k: &mut CudaBuffer,
        v: &CudaBuffer,
        cache: &mut CudaKvCache,
    ) {
        let inputs = RopeInputs { heads, cos, sin, q, k, v };
        self.operate(|state| attention::rope_kv_write(self, state, layer, shape, &inputs, cache));
    }

    fn attention(
        &self,
        _batch: &StepBatch,
        layer: usize,
        shape: &AttentionShape,
        q: &CudaBuffer,
        cache: &CudaKvCache,
        out: &mut CudaBuffer,
    ) {
        self.operate(|state| attention::attention(self, state, layer, shape, q, cache, out));
    }

    fn gated_activation(&self, rows: usize, gate: &CudaBuffer, up: &CudaBuffer, out: &mut CudaBuffer) {
        self.operate(|state| elementwise::gated_activation(self, state, rows, gate, up, out));
    }

    fn gather_rows(&self, rows: &[u32], input: &CudaBuffer, out: &mut CudaBuffer) {
        self.operate(|state| elementwise::gather_rows(self, state, rows, input, out));
    }

    fn read<'a>(&'a self, buffer: &'a mut CudaBuffer, rows: usize) -> Result<&'a [f32], KernelError> {
        assert!(rows <= buffer.rows, "{rows} rows of {}", buffer.rows);
        let values = buffer.read(self.device.compute(), rows, self.dtype)?;
        self.state().whole()?;
        Ok(values)
    }

    fn argmax(&self, rows: usize, logits: &CudaBuffer, out: &mut [u32]) -> Result<(), KernelError> {
        self.device.context().bind()?;
        let mut state = self.state();
        largest::argmax(self, &mut state, rows, logits, out)?;
        Ok(state.whole()?)
    }

    fn largest(
        &self,
        rows: usize,
        k: usize,
        logits: &CudaBuffer,
        out: &mut LargestValues,
    ) -> Result<bool, KernelError> {
        self.device.context().bind()?;
        let mut state = self.state();
        let listed = largest::largest(self, &mut state, rows, k, logits, out)?;
        state.whole()?;
        Ok(listed)
    }
}
