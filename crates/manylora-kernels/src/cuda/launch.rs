//! Kernels with typed arguments. A kernel's parameters are compared with the argument list's when it is looked up, so a
//! launch passes what the kernel reads.
#![expect(unsafe_code, reason = "launches kernels")]

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::error::{CudaError, DriverResult};
use super::memory::DevicePointer;
use super::module::Module;
use super::stream::Stream;

/// The most parameters that a kernel has.
pub const MAX_ARGUMENTS: usize = 48;

/// A value that is one parameter of a kernel.
///
/// # Safety
/// Implementors are laid out as the parameter of the kernel's source.
pub unsafe trait KernelArgument: Copy {}

// One by one: an implementation for every `T: Copy` would take references as well.
// SAFETY: the same numbers in both languages, here and below.
unsafe impl KernelArgument for i32 {}
// SAFETY: as above.
unsafe impl KernelArgument for u32 {}
// SAFETY: as above.
unsafe impl KernelArgument for i64 {}
// SAFETY: as above.
unsafe impl KernelArgument for u64 {}
// SAFETY: as above.
unsafe impl KernelArgument for f32 {}
// SAFETY: an address of 8 bytes, as pointers are on the device.
unsafe impl<T> KernelArgument for DevicePointer<T> {}

/// The argument list of a kernel. Made by [`kernel_arguments!`](crate::kernel_arguments).
///
/// # Safety
/// `addresses` gives the addresses of as many live values as `PARAMETERS` says, of these sizes.
pub unsafe trait KernelArguments {
    /// Name and size of each.
    const PARAMETERS: &'static [(&'static str, usize)];

    /// Writes the address of each to `out`.
    fn addresses(&self, out: &mut [*mut c_void; MAX_ARGUMENTS]);
}

/// Declares a struct that is the argument list of a kernel: its fields, in order, are the kernel's parameters.
#[macro_export]
macro_rules! kernel_arguments {
    ($(
        $(#[$attribute:meta])*
        $visibility:vis struct $name:ident $(<$element:ident>)? {
            $($(#[$field_attribute:meta])* $field_visibility:vis $field:ident: $type:ty),* $(,)?
        }
    )*) => {$(
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug)]
        $visibility struct $name $(<$element>)? {
            $($(#[$field_attribute])* $field_visibility $field: $type,)*
        }

        #[allow(unsafe_code, reason = "the macro names every field once")]
        // SAFETY: one address for each field, whose type is a kernel argument.
        unsafe impl $(<$element>)? $crate::cuda::KernelArguments for $name $(<$element>)? {
            const PARAMETERS: &'static [(&'static str, usize)] = {
                const fn size<T: $crate::cuda::KernelArgument>() -> usize {
                    ::core::mem::size_of::<T>()
                }
                let parameters: &'static [(&'static str, usize)] = &[$((stringify!($field), size::<$type>())),*];
                assert!(parameters.len() <= $crate::cuda::MAX_ARGUMENTS, "more arguments than a launch can pass");
                parameters
            };

            fn addresses(&self, out: &mut [*mut ::core::ffi::c_void; $crate::cuda::MAX_ARGUMENTS]) {
                let addresses = [$((&raw const self.$field).cast_mut().cast::<::core::ffi::c_void>()),*];
                out[..addresses.len()].copy_from_slice(&addresses);
            }
        }
    )*};
}

/// Number of blocks and threads of a launch, and the dynamic shared memory of a block in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared: u32,
}

impl Grid {
    /// Blocks in x and y.
    pub const fn new(x: u32, y: u32, threads: u32) -> Self {
        Self { blocks: [x, y, 1], threads, shared: 0 }
    }
}

/// A kernel that takes the arguments `A`.
pub struct Kernel<A> {
    module: Arc<Module>,
    function: sys::CUfunction,
    name: Box<str>,
    arguments: PhantomData<fn(A)>,
}

// SAFETY: functions may be launched from any bound thread.
unsafe impl<A> Send for Kernel<A> {}
// SAFETY: as above.
unsafe impl<A> Sync for Kernel<A> {}

impl<A: KernelArguments> Kernel<A> {
    pub(super) fn new(module: Arc<Module>, function: sys::CUfunction, name: &str) -> Result<Self, CudaError> {
        if module.context().library().knows_parameters() {
            // SAFETY: the function belongs to the module, which is alive.
            unsafe { check_parameters(function, name, A::PARAMETERS) }?;
        }
        if module.context().library().loads_functions() {
            // Else a driver may load it at its first launch, which must not happen while launches are recorded.
            // SAFETY: as above.
            unsafe { sys::cuFuncLoad(function).result() }.of("cuFuncLoad")?;
        }
        Ok(Self { module, function, name: name.into(), arguments: PhantomData })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lets launches ask for up to `bytes` of dynamic shared memory (beyond 48 KiB the driver wants to be told).
    pub fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        self.module.context().bind()?;
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to the module, which is alive.
        unsafe { result::function::set_function_attribute(self.function, attribute, bytes as i32) }
            .of("cuFuncSetAttribute")
    }

    /// Queues a launch. The calling thread must be bound to the context ([`super::Context::bind`]). A grid without blocks
    /// does nothing.
    ///
    /// # Safety
    /// The pointers in `arguments` must hold what the kernel reads and writes, and stay until the launch is over. For a
    /// launch that is captured: as long as the graph is replayed.
    pub unsafe fn launch(&self, stream: &Stream, grid: Grid, arguments: &A) -> Result<(), CudaError> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let mut addresses = [std::ptr::null_mut(); MAX_ARGUMENTS];
        arguments.addresses(&mut addresses);
        let [x, y, z] = grid.blocks;
        // SAFETY: number and sizes of the arguments were checked against the kernel's own; the driver copies them.
        // What they point at is the caller's word.
        unsafe {
            result::launch_kernel(
                self.function,
                (x, y, z),
                (grid.threads, 1, 1),
                grid.shared,
                stream.raw(),
                &mut addresses[..A::PARAMETERS.len()],
            )
        }
        .of("cuLaunchKernel")
    }
}

impl<A> std::fmt::Debug for Kernel<A> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Kernel").field(&self.name).finish()
    }
}

/// Compares a kernel's own parameters with `expected`.
///
/// # Safety
/// The function is alive, and the driver has `cuFuncGetParamInfo`.
unsafe fn check_parameters(function: sys::CUfunction, name: &str, expected: &[(&str, usize)]) -> Result<(), CudaError> {
    let mut own = Vec::with_capacity(expected.len());
    while own.len() <= MAX_ARGUMENTS {
        let (mut offset, mut size) = (0usize, 0usize);
        // SAFETY: as the caller promises; two numbers are written.
        let answer = unsafe { sys::cuFuncGetParamInfo(function, own.len(), &raw mut offset, &raw mut size) }.result();
        match answer {
            // There is no parameter of this number: that was all.
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_INVALID_VALUE => break,
            answer => answer.of("cuFuncGetParamInfo")?,
        }
        own.push(size);
    }
    let differs = |difference: String| CudaError::Parameters { kernel: name.to_owned(), difference };
    for (index, (&size, &(argument, passed))) in own.iter().zip(expected).enumerate() {
        if size != passed {
            return Err(differs(format!(
                "parameter {} has {size} bytes, argument `{argument}` has {passed}",
                index + 1
            )));
        }
    }
    if own.len() != expected.len() {
        return Err(differs(format!("it has {} parameters, {} would be passed", own.len(), expected.len())));
    }
    Ok(())
}
