//! Moving bytes between host and device beside the work of a step: page-locked buffers, each with the event that says
//! when it may be used again.
//!
//! - [`Uploader`]: whole blobs (adapters, weights) on the copy stream, through a ring of page-locked chunks
//! - [`StepBlock`]: what varies per step, at a fixed address, by one copy per step
//! - [`Readback`]: a step's results
#![expect(unsafe_code, reason = "queues copies from and to memory that must stay as it is until they are done")]

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::result;

use super::arena::{Arena, DeviceSlice, Holding};
use super::context::Context;
use super::error::{CudaError, DriverResult};
use super::memory::{DeviceElement, DevicePointer, PinnedMemory};
use super::stream::{Event, Stream};

/// Page-locked bytes, and the event after which no copy uses them.
#[derive(Debug)]
struct Slot {
    memory: PinnedMemory,
    idle: Event,
}

impl Slot {
    fn new(context: &Arc<Context>, what: &str, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { memory: PinnedMemory::new(context, what, bytes)?, idle: Event::new(context)? })
    }

    /// The bytes, to write, once no copy reads them.
    fn bytes_mut(&mut self) -> Result<&mut [u8], CudaError> {
        self.idle.synchronize()?;
        // SAFETY: `idle` marks the last copy, and it is done.
        Ok(unsafe { self.memory.bytes_mut() })
    }

    /// Queues a copy of the first `bytes` bytes to the device.
    ///
    /// # Safety
    /// `target` has so many bytes.
    unsafe fn send(&mut self, stream: &Stream, target: DevicePointer<u8>, bytes: usize) -> Result<(), CudaError> {
        stream.context().bind()?;
        // SAFETY: nothing writes the bytes before `idle` is done: `bytes_mut` waits for it.
        let source = unsafe { &self.memory.bytes()[..bytes] };
        // SAFETY: as the caller promises; the source stays until `idle`.
        let queued = unsafe { result::memcpy_htod_async(target.address(), source, stream.raw()) };
        self.mark(stream, queued.of("cuMemcpyHtoDAsync"))
    }

    /// Queues a copy of `bytes` bytes from the device.
    ///
    /// # Safety
    /// `source` has so many bytes.
    unsafe fn fetch(&mut self, stream: &Stream, source: DevicePointer<u8>, bytes: usize) -> Result<(), CudaError> {
        let target = &mut self.bytes_mut()?[..bytes];
        // SAFETY: as the caller promises; nothing touches the target until `idle`.
        let queued = unsafe { result::memcpy_dtoh_async(target, source.address(), stream.raw()) };
        self.mark(stream, queued.of("cuMemcpyDtoHAsync"))
    }

    /// Marks the copy that was just queued. Where that fails it waits instead, so that the bytes are idle in any case.
    fn mark(&self, stream: &Stream, queued: Result<(), CudaError>) -> Result<(), CudaError> {
        let marked = queued.and_then(|()| stream.record(&self.idle));
        if marked.is_err() {
            let _ = stream.drain();
        }
        marked
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.idle.synchronize().is_err() {
            let _ = self.memory.context().synchronize();
        }
    }
}

/// Uploads whole blobs on a copy stream of its own, while the compute stream works. Can be shared by loader threads.
#[derive(Debug)]
pub struct Uploader {
    copy: Stream,
    compute: Arc<Stream>,
    ring: Mutex<Ring>,
}

#[derive(Debug)]
struct Ring {
    slots: Vec<Slot>,
    next: usize,
    /// Marks the compute stream's work at the start of an upload.
    readers: Event,
}

impl Uploader {
    /// An uploader with `chunks` page-locked chunks of `chunk` bytes: two are enough to keep the bus busy.
    pub fn new(compute: &Arc<Stream>, chunks: usize, chunk: usize) -> Result<Self, CudaError> {
        let context = compute.context();
        let copy = Stream::new(context)?;
        let slots =
            (0..chunks.max(1)).map(|_| Slot::new(context, "upload buffer", chunk.max(1))).collect::<Result<_, _>>()?;
        let ring = Mutex::new(Ring { slots, next: 0, readers: Event::new(context)? });
        Ok(Self { copy, compute: Arc::clone(compute), ring })
    }

    /// Queues copying `bytes` to `target` from `first` on. Returns when the last chunk is queued, and has read all of
    /// `bytes` by then; the content is there for whoever waits for the result.
    ///
    /// The part of the arena may have been another's before: the copy waits until the work that is on the compute stream
    /// now, which may still read it, is done. One upload runs at a time.
    pub fn upload(&self, target: &mut DeviceSlice<u8>, first: usize, bytes: &[u8]) -> Result<Upload, CudaError> {
        target.within(&(first..first.saturating_add(bytes.len())))?;
        let done = Event::new(self.copy.context())?;
        // A ring whose user panicked is as good as new: every slot knows by itself when it is idle.
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        self.compute.record(&ring.readers)?;
        self.copy.wait(&ring.readers)?;
        let chunk = ring.slots[0].memory.len();
        for (index, source) in bytes.chunks(chunk).enumerate() {
            let next = ring.next;
            ring.next = (next + 1) % ring.slots.len();
            let slot = &mut ring.slots[next];
            slot.bytes_mut()?[..source.len()].copy_from_slice(source);
            let address = target.pointer().add(first + index * chunk);
            // SAFETY: the range was checked against the target's length.
            unsafe { slot.send(&self.copy, address, source.len()) }?;
        }
        self.copy.record(&done)?;
        Ok(Upload { done })
    }

    /// Lets what is queued on `stream` from now on wait for all uploads so far, those included whose target was given back
    /// before they were done. The host does not wait.
    pub(super) fn before(&self, stream: &Stream) -> Result<(), CudaError> {
        let done = Event::new(self.copy.context())?;
        self.copy.record(&done)?;
        stream.wait(&done)
    }

    /// Waits for all uploads.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.copy.synchronize()
    }
}

/// An upload that is under way.
#[derive(Debug)]
pub struct Upload {
    done: Event,
}

impl Upload {
    /// Lets what is queued on `stream` from now on wait for it. The host does not wait.
    pub fn before(&self, stream: &Stream) -> Result<(), CudaError> {
        stream.wait(&self.done)
    }

    /// Whether it is done.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.done.is_done()
    }

    /// Waits for it.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.done.synchronize()
    }
}

/// A typed part of a [`StepBlock`].
#[derive(Debug, PartialEq, Eq)]
pub struct Section<T> {
    start: usize,
    len: usize,
    elements: std::marker::PhantomData<fn() -> T>,
}

// By hand, because a derive would ask the same of `T`.
impl<T> Clone for Section<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Section<T> {}

impl<T> Section<T> {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    const fn end(&self) -> usize {
        self.start + self.len * size_of::<T>()
    }
}

/// Where the sections of a block lie: one after the other, each aligned for 16-byte loads.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepLayout {
    bytes: usize,
}

impl StepLayout {
    /// A layout without sections.
    pub const fn new() -> Self {
        Self { bytes: 0 }
    }

    /// Adds a section of `len` elements.
    pub const fn section<T: DeviceElement>(&mut self, len: usize) -> Section<T> {
        let start = self.bytes;
        self.bytes = (start + len * size_of::<T>()).next_multiple_of(16);
        Section { start, len, elements: std::marker::PhantomData }
    }

    /// Bytes of all sections.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Per-step data: a block at a fixed device address, filled on the host and sent by one copy.
///
/// There are two host copies, so that the next step can be written while the last one is still being sent.
#[derive(Debug)]
pub struct StepBlock {
    device: DeviceSlice<u8>,
    slots: [Slot; 2],
    current: usize,
}

impl StepBlock {
    /// A zeroed block.
    pub fn new(arena: &Arena, layout: StepLayout) -> Result<Self, CudaError> {
        let context = arena.context();
        let slot = || Slot::new(context, "step data", layout.bytes());
        let device = arena.allocate(Holding::Buffers, "step data", layout.bytes())?;
        Ok(Self { device, slots: [slot()?, slot()?], current: 0 })
    }

    /// Address of a section on the device: the same in every step.
    pub fn pointer<T: DeviceElement>(&self, section: Section<T>) -> DevicePointer<T> {
        self.device.pointer().add(section.start).cast()
    }

    /// The block on the device.
    pub fn device(&self) -> &DeviceSlice<u8> {
        &self.device
    }

    /// Starts writing a step: waits until the host copy's last sending is done. What it holds is of an older step.
    pub fn begin(&mut self) -> Result<StepWriter<'_>, CudaError> {
        let Self { device, slots, current } = self;
        let slot = &mut slots[*current];
        slot.bytes_mut()?;
        Ok(StepWriter { slot, target: device.pointer(), current })
    }
}

/// Writes one step's data.
#[derive(Debug)]
pub struct StepWriter<'a> {
    slot: &'a mut Slot,
    target: DevicePointer<u8>,
    current: &'a mut usize,
}

impl StepWriter<'_> {
    /// A section, to write.
    pub fn section<T: DeviceElement>(&mut self, section: Section<T>) -> Result<&mut [T], CudaError> {
        // SAFETY: `begin` has waited, and the writer has the slot to itself.
        let bytes = unsafe { self.slot.memory.bytes_mut() };
        let (len, range) = (bytes.len(), section.start..section.end());
        let part = bytes.get_mut(range.clone()).ok_or(CudaError::Range {
            what: "step data",
            len,
            start: range.start,
            end: range.end,
        })?;
        // SAFETY: so many bytes of plain numbers; page-locked blocks start at a page, sections at 16 bytes in it.
        Ok(unsafe { std::slice::from_raw_parts_mut(part.as_mut_ptr().cast(), section.len) })
    }

    /// Queues sending the block up to the first `used` elements of `last`; the device keeps what it has of what follows.
    pub fn send_used<T>(self, stream: &Stream, last: Section<T>, used: usize) -> Result<(), CudaError> {
        let bytes = (last.start + used * size_of::<T>()).min(last.end()).min(self.slot.memory.len());
        *self.current = (*self.current + 1) % 2;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the block on the device is as long as its host copies.
        unsafe { self.slot.send(stream, self.target, bytes) }
    }
}

/// A page-locked buffer for results.
#[derive(Debug)]
pub struct Readback<T: DeviceElement> {
    slot: Slot,
    capacity: usize,
    fetched: usize,
    elements: std::marker::PhantomData<T>,
}

impl<T: DeviceElement> Readback<T> {
    /// A buffer for up to `capacity` elements.
    pub fn new(context: &Arc<Context>, capacity: usize) -> Result<Self, CudaError> {
        let slot = Slot::new(context, "result buffer", capacity.saturating_mul(size_of::<T>()))?;
        Ok(Self { slot, capacity, fetched: 0, elements: std::marker::PhantomData })
    }

    /// Queues fetching `len` elements of `source` from `first` on. What was fetched before is lost.
    pub fn fetch(
        &mut self,
        stream: &Stream,
        source: &DeviceSlice<T>,
        first: usize,
        len: usize,
    ) -> Result<(), CudaError> {
        source.within(&(first..first.saturating_add(len)))?;
        if len > self.capacity {
            return Err(CudaError::Range { what: "result buffer", len: self.capacity, start: 0, end: len });
        }
        self.fetched = 0;
        if len > 0 {
            let bytes = len * size_of::<T>();
            // SAFETY: the range was checked.
            unsafe { self.slot.fetch(stream, source.pointer().add(first).cast(), bytes) }?;
        }
        self.fetched = len;
        Ok(())
    }

    /// What was fetched last, once it is there.
    pub fn wait(&self) -> Result<&[T], CudaError> {
        self.slot.idle.synchronize()?;
        // SAFETY: the copy is done, and the next one needs `self` to itself.
        let bytes = unsafe { self.slot.memory.bytes() };
        // SAFETY: so many elements were written; any byte pattern is a value; the block starts at a page.
        Ok(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), self.fetched) })
    }
}
