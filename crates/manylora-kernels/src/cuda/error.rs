//! What can go wrong on a device, said so that a person knows what was found and what is needed.

use cudarc::cublaslt::result::CublasError;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;

use crate::error::KernelError;

/// Errors of the CUDA layer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A library that the user named could not be loaded.
    #[error("`{path}` (from `{origin}`) could not be loaded: {reason}; correct the path or unset the variable")]
    Library {
        /// The file.
        path: String,
        /// The variable or setting that named it.
        origin: String,
        /// What the loader said.
        reason: String,
    },
    /// A library that the user named was loaded, but another one of the same name took its place.
    #[error("`{named}` (from `{origin}`) was loaded, but `{used}` answers in its place; give that path, or remove it")]
    Shadowed {
        /// The file that was named.
        named: String,
        /// The variable or setting that named it.
        origin: String,
        /// The file that calls would go to.
        used: String,
    },
    /// There is no driver on this machine.
    #[error(
        "no NVIDIA driver: neither `libcuda.so.1` nor another name of it could be loaded; install the driver \
         (version {branch} or newer), set `{variable}` to the library's full path, or use device \"cpu\""
    )]
    NoDriver {
        /// First driver version that will do.
        branch: u32,
        /// The variable that can name the library.
        variable: &'static str,
    },
    /// The driver does not offer the CUDA version that the kernels were built for.
    #[error(
        "the NVIDIA driver is too old: it offers CUDA {found}, this build needs CUDA {needed}; install driver {branch} or newer, or use device \"cpu\""
    )]
    DriverTooOld {
        /// CUDA version of the driver.
        found: String,
        /// CUDA version needed.
        needed: String,
        /// First driver version that will do.
        branch: u32,
    },
    /// A library lacks a function that is called.
    #[error("library `{library}` has no function `{function}`: it is too old or broken; install a newer one")]
    Incomplete {
        /// Its path.
        library: String,
        /// What is missing.
        function: &'static str,
    },
    /// There is a driver and no card.
    #[error(
        "there is no NVIDIA card here (driver for CUDA {version} was found; `CUDA_VISIBLE_DEVICES` is {visible}); use device \"cpu\""
    )]
    NoDevice {
        /// CUDA version of the driver.
        version: String,
        /// What the variable says.
        visible: String,
    },
    /// The card asked for does not exist.
    #[error("device `cuda:{ordinal}` does not exist: there are {count}, numbered from 0")]
    Ordinal {
        /// The number asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The card cannot run the kernels.
    #[error(
        "`{name}` is too old: it has compute capability {major}.{minor}, the kernels need 8.0 or newer (Ampere: A100, \
         RTX 30xx and what came after); use device \"cpu\""
    )]
    DeviceTooOld {
        /// The card.
        name: String,
        /// Its compute capability.
        major: u32,
        /// Second part of it.
        minor: u32,
    },
    /// This build holds no kernels.
    #[error(
        "this build holds no CUDA kernels: {why}; use a release wheel, or build where nvcc is (CONTRIBUTING says how)"
    )]
    NoKernels {
        /// Why not.
        why: &'static str,
    },
    /// The driver refused the kernels.
    #[error(
        "the kernels of this build ({architectures}) do not load on `{device}`: {reason}; use a build for this card"
    )]
    Image {
        /// What they were built for.
        architectures: String,
        /// The card.
        device: String,
        /// What the driver said.
        reason: String,
    },
    /// No kernel has this name.
    #[error("kernel `{name}` is not in this build; build library and kernels from the same sources")]
    UnknownKernel {
        /// Its name.
        name: String,
    },
    /// A kernel's parameters are not the arguments that would be passed.
    #[error(
        "kernel `{kernel}` does not take these arguments: {difference}; build library and kernels from the same sources"
    )]
    Parameters {
        /// Its name.
        kernel: String,
        /// What differs.
        difference: String,
    },
    /// Device memory is used up.
    #[error(
        "out of device memory: {what} needs {bytes} bytes, {free} are free (largest piece {largest}); lower the size \
         that asks for it"
    )]
    OutOfMemory {
        /// What was being allocated.
        what: String,
        /// How many bytes it needed.
        bytes: usize,
        /// How many were free.
        free: usize,
        /// The longest run of free bytes.
        largest: usize,
    },
    /// Page-locked host memory could not be had.
    #[error(
        "{what} needs {bytes} bytes of page-locked host memory, which could not be had; lower the size that asks for it"
    )]
    OutOfPinnedMemory {
        /// What was being allocated.
        what: String,
        /// How many bytes it needed.
        bytes: usize,
    },
    /// A range lies outside of its memory.
    #[error("{what} of {len} elements has no range {start}..{end}")]
    Range {
        /// Which memory.
        what: &'static str,
        /// Its length.
        len: usize,
        /// First element asked for.
        start: usize,
        /// End of what was asked for.
        end: usize,
    },
    /// A driver call failed.
    #[error("driver call `{call}` failed: {name} ({code}){hint}")]
    Driver {
        /// The function.
        call: &'static str,
        /// Its result.
        code: u32,
        /// Name of the result.
        name: String,
        /// What to do, if anything is known.
        hint: &'static str,
    },
    /// cuBLASLt was not found.
    #[error(
        "cuBLASLt was not found (looked in: {looked}); install it with `pip install manylora[cuda]`, or set \
         `{variable}` to the library's full path"
    )]
    NoBlas {
        /// Folders and names.
        looked: String,
        /// The variable that can name the library.
        variable: &'static str,
    },
    /// A cuBLASLt call failed.
    #[error("cuBLASLt call `{call}` failed: {name} ({code})")]
    Blas {
        /// The function.
        call: &'static str,
        /// Its result.
        code: u32,
        /// Name of the result.
        name: String,
    },
    /// cuBLASLt has no algorithm for a product.
    #[error("cuBLASLt has no algorithm for {product}: {reason}; {remedy}")]
    NoAlgorithm {
        /// Shape and types.
        product: String,
        /// What it said.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
}

impl CudaError {
    /// Whether the context is lost: after a failed kernel every later call fails too, and only a new process helps.
    pub fn is_fatal(&self) -> bool {
        // Illegal address, launch timeout, assert, hardware stack, illegal instruction, misaligned address, invalid
        // address space, invalid program counter, launch failure; ECC errors.
        matches!(self, Self::Driver { code: 214 | 700 | 702 | 710 | 714..=719, .. })
    }

    /// Whether memory, of the device or page-locked, was used up.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::OutOfPinnedMemory { .. } | Self::Driver { code: 2, .. })
    }
}

impl From<CudaError> for KernelError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::OutOfMemory { what, bytes, .. } => Self::OutOfMemory { what, bytes },
            other => Self::Device(other.to_string()),
        }
    }
}

/// Names the driver call of a failed result.
pub(super) trait DriverResult<T> {
    /// The value, or an error that names `call`.
    fn of(self, call: &'static str) -> Result<T, CudaError>;
}

impl<T> DriverResult<T> for Result<T, DriverError> {
    fn of(self, call: &'static str) -> Result<T, CudaError> {
        self.map_err(|DriverError(result)| CudaError::Driver {
            call,
            code: result as u32,
            // Not the driver's own text: asking for it is a call that can fail too.
            name: format!("{result:?}"),
            hint: hint(result),
        })
    }
}

impl<T> DriverResult<T> for Result<T, CublasError> {
    fn of(self, call: &'static str) -> Result<T, CudaError> {
        self.map_err(|CublasError(status)| CudaError::Blas { call, code: status as u32, name: format!("{status:?}") })
    }
}

fn hint(result: CUresult) -> &'static str {
    match result {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => ": device memory is used up; lower the size that asks for it",
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            ": kernel module and library are of different driver versions; restart the machine after the update"
        }
        CUresult::CUDA_ERROR_SYSTEM_NOT_READY => ": the card is not ready; see whether nvidia-smi works",
        CUresult::CUDA_ERROR_UNKNOWN => ": see whether nvidia-smi works",
        CUresult::CUDA_ERROR_LAUNCH_FAILED
        | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE => ": the device context is lost; start the process again",
        CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => ": another process has the card to itself",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_name_the_call() {
        let failed: Result<(), _> = Err(DriverError(CUresult::CUDA_ERROR_LAUNCH_FAILED));
        let error = failed.of("cuStreamSynchronize").unwrap_err();
        assert!(error.is_fatal());
        let text = error.to_string();
        assert!(text.contains("`cuStreamSynchronize`") && text.contains("CUDA_ERROR_LAUNCH_FAILED (719)"), "{text}");
    }

    #[test]
    fn memory_errors_stay_memory_errors() {
        let error = CudaError::OutOfMemory { what: "KV cache".to_owned(), bytes: 7, free: 3, largest: 2 };
        assert!(error.is_out_of_memory() && !error.is_fatal());
        assert!(matches!(KernelError::from(error), KernelError::OutOfMemory { bytes: 7, .. }));
        let error = CudaError::NoKernels { why: "nvcc was not found" };
        assert!(matches!(KernelError::from(error), KernelError::Device(text) if text.contains("nvcc was not found")));
    }
}
