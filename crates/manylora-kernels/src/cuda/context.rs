//! One card's context: what the card is, its memory, and binding threads to it.
//!
//! This is the device's primary context, which other users of the card in this process share. It is kept by hand rather
//! than by the bindings' safe layer: that one tracks events on every buffer (many calls per launch, and captures fail),
//! and leaks the context where its construction fails half way.
#![expect(unsafe_code, reason = "calls the driver")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::{result, sys};

use super::error::{CudaError, DriverResult};
use super::library::DriverLibrary;

/// First compute capability that has what the kernels use (bf16 tensor cores, asynchronous copies to shared memory).
pub const LEAST_CAPABILITY: (u32, u32) = (8, 0);

/// What a card is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Its number.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Bytes of its memory.
    pub memory: usize,
    /// Multiprocessors, for sizing grids.
    pub multiprocessors: u32,
    /// The most dynamic shared memory that a block can be given, in bytes.
    pub shared_memory: usize,
    /// CUDA version of the driver, major and minor.
    pub driver: (u32, u32),
}

impl DeviceProperties {
    /// Asks the driver what card `ordinal` is. Takes nothing of the card, however old it is.
    pub fn read(ordinal: usize) -> Result<Self, CudaError> {
        let library = DriverLibrary::load()?;
        let count = device_count()?;
        if ordinal >= count {
            return Err(CudaError::Ordinal { ordinal, count });
        }
        let device = result::device::get(ordinal as i32).of("cuDeviceGet")?;
        let attribute = |which: sys::CUdevice_attribute| {
            // SAFETY: `device` came from the driver.
            unsafe { result::device::get_attribute(device, which) }.of("cuDeviceGetAttribute").map(|value| value as u32)
        };
        Ok(Self {
            ordinal,
            name: result::device::get_name(device).of("cuDeviceGetName")?,
            capability: (
                attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            // SAFETY: `device` came from the driver.
            memory: unsafe { result::device::total_mem(device) }.of("cuDeviceTotalMem")?,
            multiprocessors: attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_memory: attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                as usize,
            driver: library.version()?,
        })
    }
}

/// Memory of a card at one moment, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemoryState {
    /// Not in use by anybody.
    pub free: usize,
    /// All of it.
    pub total: usize,
}

/// Number of cards, once the driver is there and new enough.
pub fn device_count() -> Result<usize, CudaError> {
    let library = DriverLibrary::load()?;
    let version = library.version()?;
    let no_device = || CudaError::NoDevice {
        version: format!("{}.{}", version.0, version.1),
        visible: std::env::var("CUDA_VISIBLE_DEVICES").map_or("not set".to_owned(), |value| format!("`{value}`")),
    };
    match result::init() {
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => return Err(no_device()),
        started => started.of("cuInit")?,
    }
    match result::device::get_count().of("cuDeviceGetCount")? {
        0 => Err(no_device()),
        count => Ok(count as usize),
    }
}

/// A card's primary context, held until the last user is gone.
pub struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
    properties: DeviceProperties,
    library: &'static DriverLibrary,
    /// The first failure of a release, which has nobody to return it to.
    late: AtomicU32,
}

// SAFETY: a context may be used from any thread that is bound to it, and from several at a time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens card `ordinal` and binds this thread to it. Refuses a driver or a card that is too old.
    pub fn open(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        let library = DriverLibrary::load()?;
        let properties = DeviceProperties::read(ordinal)?;
        let (major, minor) = properties.capability;
        if (major, minor) < LEAST_CAPABILITY {
            return Err(CudaError::DeviceTooOld { name: properties.name, major, minor });
        }
        let device = result::device::get(ordinal as i32).of("cuDeviceGet")?;
        // SAFETY: `device` came from the driver; released in `drop`, which every later path reaches.
        let raw = unsafe { result::primary_ctx::retain(device) }.of("cuDevicePrimaryCtxRetain")?;
        let context = Arc::new(Self { device, raw, properties, library, late: AtomicU32::new(0) });
        context.bind()?;
        Ok(context)
    }

    /// Makes this the calling thread's context. Everything here that can be called from a new thread does so itself;
    /// launches do not, because they are many: whoever starts a step binds first.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { result::ctx::set_current(self.raw) }.of("cuCtxSetCurrent")
    }

    /// What the card is.
    pub fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    /// The driver library.
    pub fn library(&self) -> &'static DriverLibrary {
        self.library
    }

    /// Free and total memory of the card now.
    pub fn memory(&self) -> Result<DeviceMemoryState, CudaError> {
        self.bind()?;
        let (free, total) = result::mem_get_info().of("cuMemGetInfo")?;
        Ok(DeviceMemoryState { free, total })
    }

    /// Waits for everything on the card that this process started.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        result::ctx::synchronize().of("cuCtxSynchronize")
    }

    /// The first failure of a release since the last call, if there was one.
    pub fn take_late_error(&self) -> Option<CudaError> {
        match self.late.swap(0, Ordering::Relaxed) {
            0 => None,
            code => Some(CudaError::Driver { call: "release", code, name: "late error".to_owned(), hint: "" }),
        }
    }

    /// Runs a release: binds, calls, and keeps the failure, since a destructor can return nothing.
    pub(super) fn release(&self, free: impl FnOnce() -> Result<(), result::DriverError>) {
        // A thread that cannot be bound may be bound already, so the release is tried in any case.
        let bound = self.bind();
        let freed = free().of("release");
        if let Err(CudaError::Driver { code, .. }) = freed.and(bound) {
            let _ = self.late.compare_exchange(0, code, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained in `open`, and nothing made in it is left: all hold an `Arc` of it. There is nobody to tell
        // of a failure.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Context").field("properties", &self.properties).finish_non_exhaustive()
    }
}
