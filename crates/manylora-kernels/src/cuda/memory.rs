//! Raw memory: blocks of the device, page-locked blocks of the host, and addresses on the device.
#![expect(unsafe_code, reason = "calls the driver, and owns memory that it gives")]

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use half::{bf16, f16};

use super::context::Context;
use super::error::{CudaError, DriverResult};

/// Numbers that host and device lay out alike, of which every byte pattern is a value.
///
/// # Safety
/// Implementors are plain numbers without padding.
pub unsafe trait DeviceElement: Copy + Send + Sync + 'static {}

// SAFETY: plain numbers, here and below.
unsafe impl DeviceElement for u8 {}
// SAFETY: as above.
unsafe impl DeviceElement for u16 {}
// SAFETY: as above.
unsafe impl DeviceElement for u32 {}
// SAFETY: as above.
unsafe impl DeviceElement for u64 {}
// SAFETY: as above.
unsafe impl DeviceElement for i32 {}
// SAFETY: as above.
unsafe impl DeviceElement for f32 {}
// SAFETY: as above.
unsafe impl DeviceElement for f16 {}
// SAFETY: as above.
unsafe impl DeviceElement for bf16 {}

/// Address of elements on the device, as kernels take it. The host cannot follow it.
#[repr(transparent)]
pub struct DevicePointer<T> {
    address: u64,
    element: PhantomData<fn() -> T>,
}

impl<T> DevicePointer<T> {
    /// No address: for arguments that a kernel does not use.
    pub const NULL: Self = Self::new(0);

    /// An address.
    pub const fn new(address: u64) -> Self {
        Self { address, element: PhantomData }
    }

    /// The address as a number, as tables of pointers hold it.
    pub const fn address(self) -> u64 {
        self.address
    }

    /// The address of the element `count` further on.
    #[must_use]
    pub const fn add(self, count: usize) -> Self {
        Self::new(self.address + (count * size_of::<T>()) as u64)
    }

    /// The same address of other elements.
    pub const fn cast<U>(self) -> DevicePointer<U> {
        DevicePointer::new(self.address)
    }
}

// By hand, because a derive would ask the same of `T`.
impl<T> Clone for DevicePointer<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DevicePointer<T> {}

impl<T> PartialEq for DevicePointer<T> {
    fn eq(&self, other: &Self) -> bool {
        self.address == other.address
    }
}

impl<T> Eq for DevicePointer<T> {}

impl<T> std::fmt::Debug for DevicePointer<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "device:{:#x}", self.address)
    }
}

/// A block of device memory, freed at the end.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl DeviceMemory {
    /// A block of at least one byte, aligned to 256. `what` names it in errors.
    pub fn new(context: &Arc<Context>, what: &str, bytes: usize) -> Result<Self, CudaError> {
        context.bind()?;
        // SAFETY: no precondition; freed in `drop`.
        let allocated = unsafe { result::malloc_sync(bytes.max(1)) }.of("cuMemAlloc");
        let address = match allocated {
            Err(CudaError::Driver { code: 2, .. }) => {
                let free = context.memory().map_or(0, |memory| memory.free);
                return Err(CudaError::OutOfMemory { what: what.to_owned(), bytes, free, largest: free });
            }
            other => other?,
        };
        Ok(Self { context: Arc::clone(context), address, bytes })
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Its address.
    pub fn pointer(&self) -> DevicePointer<u8> {
        DevicePointer::new(self.address)
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Streams may still have work that uses it.
        let _ = self.context.synchronize();
        // SAFETY: freed once, and unused by now.
        self.context.release(|| unsafe { result::free_sync(self.address) });
    }
}

/// A page-locked block of host memory, which copies to and from the device need to run beside other work.
pub struct PinnedMemory {
    context: Arc<Context>,
    pointer: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its bytes as a `Vec` does.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// A zeroed block. `what` names it in errors.
    pub fn new(context: &Arc<Context>, what: &str, bytes: usize) -> Result<Self, CudaError> {
        context.bind()?;
        // SAFETY: no precondition; freed in `drop`. Flags 0: not write-combined, since the host reads it as well.
        let allocated = unsafe { result::malloc_host(bytes.max(1), 0) }.of("cuMemHostAlloc");
        let out_of_memory = || CudaError::OutOfPinnedMemory { what: what.to_owned(), bytes };
        let pointer = match allocated {
            Err(CudaError::Driver { code: 2, .. }) => return Err(out_of_memory()),
            other => NonNull::new(other?.cast::<u8>()).ok_or_else(out_of_memory)?,
        };
        // SAFETY: the block has this many bytes.
        unsafe { pointer.write_bytes(0, bytes.max(1)) };
        Ok(Self { context: Arc::clone(context), pointer, bytes })
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Its size.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Its bytes.
    ///
    /// # Safety
    /// No copy into them is under way.
    pub(super) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the block has this many initialized bytes, and nothing writes them.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.bytes) }
    }

    /// Its bytes, to write.
    ///
    /// # Safety
    /// No copy from or into them is under way.
    pub(super) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let pointer = self.pointer.as_ptr().cast();
        // SAFETY: freed once; owners wait for copies first.
        self.context.release(|| unsafe { result::free_host(pointer) });
    }
}

impl std::fmt::Debug for PinnedMemory {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("PinnedMemory").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
