//! Device memory from one reservation: aligned parts of it, by what they are for, counted to the byte.
//!
//! The device is asked once, at the start. Weights, buffers, the KV cache and adapters are parts of that reservation,
//! so a step allocates nothing, addresses stay fixed (which captured graphs rely on), and one budget covers them all.
//! A region can be carved out for parts that come and go (adapters), so that they never break up the rest. It may end
//! before its memory does: what lies behind is somebody else's (KV blocks), who works on it by the byte.
//!
//! Giving a part back is bookkeeping: the device may still be reading it. Whoever writes a part anew does so on a
//! stream that has waited for those readers (see `staging`).
#![expect(unsafe_code, reason = "copies to and from device memory")]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::result;

use super::context::Context;
use super::error::{CudaError, DriverResult};
use super::free_list::{FreeList, Span};
use super::memory::{DeviceElement, DeviceMemory, DevicePointer};
use super::stream::Stream;

/// What memory is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Holding {
    /// Base weights, norms, rotary tables.
    Weights,
    /// Activations, step data, working memory of kernels and of cuBLASLt.
    Buffers,
    /// What KV blocks and packed adapters share.
    Shared,
    /// The table of adapters; in what is shared, packed adapters.
    Adapters,
}

impl Holding {
    const COUNT: usize = 4;
}

/// What an arena holds, in bytes, rounding included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaUsage {
    /// All of it.
    pub capacity: usize,
    /// Not given out.
    pub free: usize,
    /// The largest part that can be given out.
    pub largest: usize,
    held: [usize; Holding::COUNT],
}

impl ArenaUsage {
    /// What is held for one purpose.
    pub fn held(&self, holding: Holding) -> usize {
        self.held[holding as usize]
    }
}

/// One reservation of device memory. Clones are the same arena; it lives as long as any part of it.
#[derive(Clone, Debug)]
pub struct Arena {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    context: Arc<Context>,
    base: DevicePointer<u8>,
    bytes: usize,
    state: Mutex<State>,
    /// Owns the bytes; last, so that it goes last.
    _backing: Backing,
}

#[derive(Debug)]
#[expect(dead_code, reason = "held for what dropping them does")]
enum Backing {
    Whole(DeviceMemory),
    Part(DeviceSlice<u8>),
}

#[derive(Debug)]
struct State {
    list: FreeList,
    held: [usize; Holding::COUNT],
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Arena {
    /// Reserves `bytes` bytes of the device.
    pub fn reserve(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        let memory = DeviceMemory::new(context, "the memory of this engine", bytes)?;
        let (base, bytes) = (memory.pointer(), memory.bytes());
        Ok(Self::over(context, base, bytes, Backing::Whole(memory)))
    }

    /// Carves a region out for parts of its own. It counts here as held, in full; its own parts count in it.
    pub fn region(&self, holding: Holding, what: &str, bytes: usize) -> Result<Self, CudaError> {
        let part = self.allocate::<u8>(holding, what, bytes)?;
        let (base, bytes) = (part.pointer(), part.taken());
        Ok(Self::over(&self.shared.context, base, bytes, Backing::Part(part)))
    }

    fn over(context: &Arc<Context>, base: DevicePointer<u8>, bytes: usize, backing: Backing) -> Self {
        let state = Mutex::new(State { list: FreeList::new(bytes), held: [0; Holding::COUNT] });
        Self { shared: Arc::new(Shared { context: Arc::clone(context), base, bytes, state, _backing: backing }) }
    }

    /// A part of `len` elements, whose content is undefined. `what` names it in errors.
    pub fn allocate<T: DeviceElement>(
        &self,
        holding: Holding,
        what: &str,
        len: usize,
    ) -> Result<DeviceSlice<T>, CudaError> {
        let bytes = len.saturating_mul(size_of::<T>());
        let mut state = self.shared.state();
        let Some(span) = state.list.allocate(bytes) else {
            let (free, largest) = (state.list.free(), state.list.largest());
            return Err(CudaError::OutOfMemory { what: what.to_owned(), bytes, free, largest });
        };
        state.held[holding as usize] += span.bytes();
        drop(state);
        let pointer = self.shared.base.add(span.start()).cast();
        let shared = Arc::clone(&self.shared);
        Ok(DeviceSlice { shared, span: Some(span), holding, pointer, len, elements: PhantomData })
    }

    /// What it holds now.
    pub fn usage(&self) -> ArenaUsage {
        let state = self.shared.state();
        ArenaUsage {
            capacity: state.list.capacity(),
            free: state.list.free(),
            largest: state.list.largest(),
            held: state.held,
        }
    }

    /// Lets it end elsewhere, in whole granules, within its memory. False, and nothing is changed, if a part is in the way.
    pub(super) fn resize(&self, capacity: usize) -> bool {
        self.shared.state().list.resize(capacity.min(self.shared.bytes))
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.shared.context
    }

    /// Bytes of its memory, wherever it ends now.
    pub(super) fn extent(&self) -> usize {
        self.shared.bytes
    }

    /// Address of a byte of its memory.
    pub(super) fn address(&self, at: usize) -> DevicePointer<u8> {
        self.shared.base.add(at)
    }

    /// Where one of its parts starts.
    pub(super) fn offset(&self, part: &DeviceSlice<u8>) -> usize {
        (part.pointer().address() - self.shared.base.address()) as usize
    }

    /// What is in no part: where it starts and how long it is, in order.
    pub(super) fn holes(&self) -> Vec<(usize, usize)> {
        self.shared.state().list.holes().collect()
    }

    /// An error unless the range lies in its memory, behind its end.
    fn behind(&self, range: &Range<usize>) -> Result<(), CudaError> {
        let end = self.shared.state().list.capacity();
        if end <= range.start && range.start <= range.end && range.end <= self.shared.bytes {
            return self.shared.context.bind();
        }
        Err(CudaError::Range {
            what: "memory behind a region",
            len: self.shared.bytes,
            start: range.start,
            end: range.end,
        })
    }

    /// Queues zeroing bytes behind its end.
    pub(super) fn zero(&self, stream: &Stream, range: Range<usize>) -> Result<(), CudaError> {
        self.behind(&range)?;
        // SAFETY: the range was checked; the block outlives the stream's work.
        unsafe { result::memset_d8_async(self.address(range.start).address(), 0, range.len(), stream.raw()) }
            .of("cuMemsetD8Async")
    }

    /// Queues copying bytes behind its end to another place there, which does not overlap.
    pub(super) fn copy(&self, stream: &Stream, to: usize, from: Range<usize>) -> Result<(), CudaError> {
        let target = to..to.saturating_add(from.len());
        self.behind(&from)?;
        self.behind(&target)?;
        if target.start < from.end && from.start < target.end {
            return Err(CudaError::Range { what: "a copy that overlaps", len: from.start, start: to, end: target.end });
        }
        let (to, from, bytes) = (self.address(to), self.address(from.start), from.len());
        // SAFETY: both ranges were checked.
        unsafe { result::memcpy_dtod_async(to.address(), from.address(), bytes, stream.raw()) }.of("cuMemcpyDtoDAsync")
    }

    /// Copies bytes behind its end to `values`, and waits.
    pub(super) fn read(&self, stream: &Stream, first: usize, values: &mut [u8]) -> Result<(), CudaError> {
        self.behind(&(first..first.saturating_add(values.len())))?;
        // SAFETY: the range was checked, `values` lives until the wait below is over.
        let queued = unsafe { result::memcpy_dtoh_async(values, self.address(first).address(), stream.raw()) };
        let done = stream.drain();
        queued.of("cuMemcpyDtoHAsync").and(done)
    }
}

/// A part of an arena: elements at a fixed address on the device, given back at the end.
#[derive(Debug)]
pub struct DeviceSlice<T: DeviceElement> {
    shared: Arc<Shared>,
    /// Taken by `drop` only.
    span: Option<Span>,
    holding: Holding,
    pointer: DevicePointer<T>,
    len: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T: DeviceElement> DeviceSlice<T> {
    /// Address of the first element.
    pub fn pointer(&self) -> DevicePointer<T> {
        self.pointer
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Bytes that it takes of the arena: [`Self::bytes`], rounded up to whole granules.
    pub fn taken(&self) -> usize {
        self.span.as_ref().map_or(0, Span::bytes)
    }

    /// Queues zeroing it.
    pub fn fill_zero(&mut self, stream: &Stream) -> Result<(), CudaError> {
        if self.is_empty() {
            return Ok(());
        }
        self.shared.context.bind()?;
        // SAFETY: the elements are this many bytes of the arena's block, which outlives the stream's work.
        unsafe { result::memset_d8_async(self.pointer.address(), 0, self.bytes(), stream.raw()) }.of("cuMemsetD8Async")
    }

    /// Copies `values` to `first..`, and waits. For small things at the start; `staging` has the fast ways.
    pub fn write(&mut self, stream: &Stream, first: usize, values: &[T]) -> Result<(), CudaError> {
        self.write_shared(stream, first, values)
    }

    /// As [`Self::write`], of memory that several own.
    pub(super) fn write_shared(&self, stream: &Stream, first: usize, values: &[T]) -> Result<(), CudaError> {
        self.within(&(first..first.saturating_add(values.len())))?;
        if values.is_empty() {
            return Ok(());
        }
        self.shared.context.bind()?;
        // SAFETY: the range was checked, and `values` lives until the wait below is over.
        let queued = unsafe { result::memcpy_htod_async(self.pointer.add(first).address(), values, stream.raw()) };
        // Also where queueing failed: nothing may read `values` any more.
        let done = stream.drain();
        queued.of("cuMemcpyHtoDAsync").and(done)
    }

    /// Copies elements `first..` to `values`, and waits.
    pub fn read(&self, stream: &Stream, first: usize, values: &mut [T]) -> Result<(), CudaError> {
        self.within(&(first..first.saturating_add(values.len())))?;
        if values.is_empty() {
            return Ok(());
        }
        self.shared.context.bind()?;
        // SAFETY: the range was checked, `values` lives until the wait below is over, and every byte pattern is a value.
        let queued = unsafe { result::memcpy_dtoh_async(values, self.pointer.add(first).address(), stream.raw()) };
        let done = stream.drain();
        queued.of("cuMemcpyDtoHAsync").and(done)
    }

    /// Queues a copy of `source`'s elements `from` to `to..` here.
    pub fn copy_from(
        &mut self,
        stream: &Stream,
        to: usize,
        source: &Self,
        from: Range<usize>,
    ) -> Result<(), CudaError> {
        source.within(&from)?;
        self.within(&(to..to.saturating_add(from.len())))?;
        if from.is_empty() {
            return Ok(());
        }
        self.shared.context.bind()?;
        let (target, bytes) = (self.pointer.add(to).address(), from.len() * size_of::<T>());
        // SAFETY: both ranges were checked; two parts never overlap.
        unsafe { result::memcpy_dtod_async(target, source.pointer.add(from.start).address(), bytes, stream.raw()) }
            .of("cuMemcpyDtoDAsync")
    }

    /// Moves the part down over the hole before it, if there is one: where its content still lies. Moving that is the
    /// caller's, by [`Self::follow`], before anything else is placed in the arena.
    pub(super) fn slide_down(&mut self) -> Option<DevicePointer<T>> {
        let span = self.span.as_mut()?;
        if !self.shared.state().list.slide_down(span) {
            return None;
        }
        let from = self.pointer;
        self.pointer = self.shared.base.add(span.start()).cast();
        Some(from)
    }

    /// Queues moving the content from where it lay before [`Self::slide_down`], in pieces that do not overlap: through
    /// `between` where the way is shorter than that.
    pub(super) fn follow(
        &self,
        stream: &Stream,
        from: DevicePointer<T>,
        between: &DeviceSlice<u8>,
    ) -> Result<(), CudaError> {
        self.shared.context.bind()?;
        let (from, to, bytes) = (from.address(), self.pointer.address(), self.bytes());
        let way = (from - to) as usize;
        let direct = way >= between.len();
        let piece = if direct { way } else { between.len() };
        for at in (0..bytes).step_by(piece) {
            let (length, at) = (piece.min(bytes - at), at as u64);
            let copy = |to: u64, from: u64| {
                // SAFETY: both lie in the arena or in `between`; a piece is no longer than the way, or than `between`.
                unsafe { result::memcpy_dtod_async(to, from, length, stream.raw()) }.of("cuMemcpyDtoDAsync")
            };
            if direct {
                copy(to + at, from + at)?;
            } else {
                copy(between.pointer.address(), from + at)?;
                copy(to + at, between.pointer.address())?;
            }
        }
        Ok(())
    }

    /// Queues a copy of `values` to `first..`.
    ///
    /// # Safety
    /// `values` stays as it is until the stream has done it.
    pub(super) unsafe fn send(&self, stream: &Stream, first: usize, values: &[T]) -> Result<(), CudaError> {
        self.within(&(first..first.saturating_add(values.len())))?;
        self.shared.context.bind()?;
        // SAFETY: the range was checked; `values` is the caller's word.
        unsafe { result::memcpy_htod_async(self.pointer.add(first).address(), values, stream.raw()) }
            .of("cuMemcpyHtoDAsync")
    }

    /// An error unless the range lies inside.
    pub(super) fn within(&self, range: &Range<usize>) -> Result<(), CudaError> {
        if range.start <= range.end && range.end <= self.len {
            return Ok(());
        }
        Err(CudaError::Range { what: "device memory", len: self.len, start: range.start, end: range.end })
    }
}

impl<T: DeviceElement> Drop for DeviceSlice<T> {
    fn drop(&mut self) {
        if let Some(span) = self.span.take() {
            let mut state = self.shared.state();
            state.held[self.holding as usize] -= span.bytes();
            state.list.release(span);
        }
    }
}
