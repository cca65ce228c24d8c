//! Kernels of this build: images that the build script embedded, loaded into a context, looked up by name.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::Context;
use super::error::{CudaError, DriverResult};
use super::launch::{Kernel, KernelArguments};

// What the build script found: `TOOLKIT`, `ARCHITECTURES`, `MISSING` and `IMAGES`.
include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// What the emulated device takes in place of an image: its kernels are compiled in.
const EMULATED_IMAGE: &[u8] = b"EMU\0";

/// Whether this build holds kernels, and for which cards: `sm_80 sm_90`.
pub fn embedded_architectures() -> Option<&'static str> {
    (!IMAGES.is_empty()).then_some(ARCHITECTURES)
}

/// One loaded image.
#[derive(Debug)]
pub(super) struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: modules may be used from any bound thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self, CudaError> {
        // The driver reads the image in words, and finds its end by itself: a copy that is aligned, and ends in zeros.
        let mut words = vec![0u64; image.len() / 8 + 2];
        for (word, bytes) in words.iter_mut().zip(image.chunks(8)) {
            let mut eight = [0; 8];
            eight[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(eight);
        }
        context.bind()?;
        // SAFETY: an image that the build made (or the emulated device's), alive for the call.
        let raw = unsafe { result::module::load_data(words.as_ptr().cast()) }.of("cuModuleLoadData")?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// `None` if it has no kernel of this name.
    fn function(&self, name: &str) -> Result<Option<sys::CUfunction>, CudaError> {
        let Ok(name) = CString::new(name) else { return Ok(None) };
        self.context.bind()?;
        // SAFETY: the module is loaded.
        match unsafe { result::module::get_function(self.raw, name) } {
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_FOUND => Ok(None),
            found => found.of("cuModuleGetFunction").map(Some),
        }
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // Its kernels may still be running.
        let _ = self.context.synchronize();
        // SAFETY: unloaded once; kernels hold an `Arc` of it.
        self.context.release(|| unsafe { result::module::unload(self.raw) });
    }
}

/// The kernels of this build, loaded on one device.
#[derive(Clone, Debug)]
pub struct Kernels {
    modules: Arc<[Arc<Module>]>,
}

impl Kernels {
    /// Loads what this build holds (on the emulated device: what it holds).
    pub fn load(context: &Arc<Context>) -> Result<Self, CudaError> {
        if context.library().is_emulated() {
            let module = Module::load(context, EMULATED_IMAGE)?;
            return Ok(Self { modules: Arc::new([Arc::new(module)]) });
        }
        if IMAGES.is_empty() {
            return Err(CudaError::NoKernels { why: MISSING });
        }
        let refused = |error: CudaError| match error {
            // No image for this card, or one that only newer drivers read.
            CudaError::Driver { code: 200 | 209 | 218 | 222 | 223, name, .. } => CudaError::Image {
                architectures: ARCHITECTURES.to_owned(),
                device: context.properties().name.clone(),
                reason: name,
            },
            other => other,
        };
        let load = |(_, image): &(&str, &[u8])| Module::load(context, image).map(Arc::new).map_err(refused);
        Ok(Self { modules: IMAGES.iter().map(load).collect::<Result<_, _>>()? })
    }

    /// The kernel `name`, which must take exactly the arguments `A`.
    pub fn kernel<A: KernelArguments>(&self, name: &str) -> Result<Kernel<A>, CudaError> {
        for module in self.modules.iter() {
            if let Some(function) = module.function(name)? {
                return Kernel::new(Arc::clone(module), function, name);
            }
        }
        Err(CudaError::UnknownKernel { name: name.to_owned() })
    }
}
