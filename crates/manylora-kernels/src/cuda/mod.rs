//! CUDA: the backend for cards, and everything below it, from finding the driver to replaying a recorded step.
//!
//! Nothing here needs a card, a driver or a CUDA toolkit to build, and nothing panics where they are missing at run time.
//!
//! Reading order: `error`, `library` (what is on this machine), `context` and `stream` (one card), `memory`,
//! `free_list` and `arena` (where everything lies), `module`, `launch` and [`arguments`] (kernels), `staging` (moving bytes),
//! `matmul` (base GEMMs by cuBLASLt), `graph` (a step by one call), `device` (a card that is ready), `backend` (the operations).

mod arena;
pub mod arguments;
mod backend;
mod context;
mod device;
mod error;
mod free_list;
mod graph;
mod launch;
mod library;
mod matmul;
mod memory;
mod module;
mod staging;
mod stream;

pub use arena::{Arena, ArenaUsage, DeviceSlice, Holding};
pub use backend::{
    CudaAdapter, CudaBackend, CudaBuffer, CudaKvCache, CudaOptions, CudaVector, CudaWeight, ProductChoice,
    ProductSource, StepRoom, activation_bytes, kv_cache_bytes, matrices_bytes, most_kv_blocks, packed_adapter_bytes,
    step_bytes, vector_bytes,
};
pub use context::{Context, DeviceMemoryState, DeviceProperties, LEAST_CAPABILITY, device_count};
pub use device::Device;
pub use error::CudaError;
pub use free_list::{GRANULE, granules};
pub use graph::{Graph, GraphCache, Recorder};
pub use launch::{Grid, Kernel, KernelArgument, KernelArguments, MAX_ARGUMENTS};
pub use library::{BLAS_VARIABLE, BlasLibrary, DRIVER_VARIABLE, DriverLibrary};
pub use matmul::{AlgorithmChoice, Matmul, MatmulShape, OperandType};
pub use memory::{DeviceElement, DeviceMemory, DevicePointer, PinnedMemory};
pub use module::{Kernels, embedded_architectures};
pub use staging::{Readback, Section, StepBlock, StepLayout, StepWriter, Upload, Uploader};
pub use stream::{Event, Stream};
