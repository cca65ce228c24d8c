//! What can go wrong in this crate: construction, and on a device any step.

/// Errors of the kernel layer.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Memory for a buffer, a weight or the KV cache could not be had.
    #[error("out of memory: {what} needs {bytes} bytes; lower the size that asks for it")]
    OutOfMemory {
        /// What was being allocated.
        what: String,
        /// How many bytes it needed.
        bytes: usize,
    },
    /// The SIMD level asked for does not exist or this processor does not have it.
    #[error("SIMD level `{level}` is not available here; this processor offers: {available}")]
    SimdLevel {
        /// The value that was given.
        level: String,
        /// The levels that can be chosen.
        available: String,
    },
    /// A value does not fit the number format it must be stored in.
    #[error("value `{value}` of {what} does not fit in {dtype}; load with a wider dtype")]
    Overflow {
        /// Which tensor holds it.
        what: String,
        /// The value.
        value: f32,
        /// The format that is too narrow.
        dtype: &'static str,
    },
    /// The device, its driver or its kernels: the message says what was found and what is needed.
    #[error("{0}")]
    Device(String),
    /// The backend does not store this format.
    #[error("the {backend} backend does not store {dtype}; choose dtype {choose}")]
    Format {
        /// Which backend.
        backend: &'static str,
        /// The format asked for.
        dtype: &'static str,
        /// What it stores.
        choose: &'static str,
    },
    /// Reading the source of a weight failed.
    #[error("{0}")]
    Source(String),
}
