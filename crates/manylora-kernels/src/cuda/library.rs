//! Finds the driver and cuBLASLt at run time, so that one build imports and runs anywhere.
//!
//! The bindings load both by bare names and panic where a library or a function is missing. So everything goes through
//! here first: a library that is named by a variable or lies in a Python package is loaded by its full path (the
//! system's loader then answers its bare name with it), and every function that this crate calls is looked up before
//! the first call. What is missing comes out as an error.
#![expect(unsafe_code, reason = "loads foreign libraries")]

use std::ffi::{CStr, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::{cublaslt, driver};

use super::error::{CudaError, DriverResult};
use super::module::TOOLKIT;

/// Names the driver library by its full path: a driver in an unusual place, or the emulated device of the tests.
pub const DRIVER_VARIABLE: &str = "MANYLORA_CUDA_LIBRARY";
/// Names the cuBLASLt library by its full path.
pub const BLAS_VARIABLE: &str = "MANYLORA_CUBLASLT_LIBRARY";

/// A function that only the emulated device has.
const EMULATED: &str = "emu_build";

/// Only measurements need it.
const ELAPSED: &str = "cuEventElapsedTime_v2";

/// What is called in any case.
const DRIVER_FUNCTIONS: &[&str] = &[
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncSetAttribute",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphGetNodes",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

const BLAS_FUNCTIONS: &[&str] = &[
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetVersion",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoCheck",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
];

/// The driver library of this process.
#[derive(Debug)]
pub struct DriverLibrary {
    path: String,
    emulated: bool,
    knows_parameters: bool,
    loads_functions: bool,
    measures_time: bool,
}

impl DriverLibrary {
    /// Loads the driver, once per process. That there is none is found anew each time.
    pub fn load() -> Result<&'static Self, CudaError> {
        static LOADED: OnceLock<DriverLibrary> = OnceLock::new();
        if let Some(library) = LOADED.get() {
            return Ok(library);
        }
        let named = preload_named(DRIVER_VARIABLE, "cuInit")?;
        // SAFETY: the library's initializers are the driver's own (or those of a file that the user chose).
        if !unsafe { driver::sys::is_culib_present() } {
            return Err(CudaError::NoDriver { branch: branch(needed_version()), variable: DRIVER_VARIABLE });
        }
        let path = confirm(named, driver_function("cuInit"))?;
        if let Some(function) = DRIVER_FUNCTIONS.iter().find(|name| driver_function(name).is_none()) {
            return Err(CudaError::Incomplete { library: path, function });
        }
        let has = |name| driver_function(name).is_some();
        Ok(LOADED.get_or_init(|| Self {
            path,
            emulated: has(EMULATED),
            knows_parameters: has("cuFuncGetParamInfo"),
            loads_functions: has("cuFuncLoad"),
            measures_time: has(ELAPSED),
        }))
    }

    /// Where it was found.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether this is the tests' emulated device, which has its kernels compiled in.
    pub fn is_emulated(&self) -> bool {
        self.emulated
    }

    /// Whether the driver can say which parameters a kernel has (drivers for CUDA 12.4 and newer).
    pub(super) fn knows_parameters(&self) -> bool {
        self.knows_parameters
    }

    /// Whether the driver can be told to load a kernel now (as above).
    pub(super) fn loads_functions(&self) -> bool {
        self.loads_functions
    }

    /// An error unless the driver can measure the time between events by the call that the bindings make (drivers for
    /// CUDA 12.8 and newer).
    pub(super) fn check_measures_time(&self) -> Result<(), CudaError> {
        if self.measures_time {
            return Ok(());
        }
        Err(CudaError::Incomplete { library: self.path.clone(), function: ELAPSED })
    }

    /// The newest CUDA version that the driver offers, major and minor. It is an error if that is too old.
    pub fn version(&self) -> Result<(u32, u32), CudaError> {
        let mut version: c_int = 0;
        // SAFETY: the function was looked up in `load`, and writes one integer.
        unsafe { driver::sys::cuDriverGetVersion(&raw mut version).result() }.of("cuDriverGetVersion")?;
        let found = (version as u32 / 1000, version as u32 % 1000 / 10);
        let needed = needed_version();
        if found < needed {
            return Err(CudaError::DriverTooOld {
                found: format!("{}.{}", found.0, found.1),
                needed: format!("{}.{}", needed.0, needed.1),
                branch: branch(needed),
            });
        }
        Ok(found)
    }
}

/// The cuBLASLt library of this process.
#[derive(Debug)]
pub struct BlasLibrary {
    path: String,
}

impl BlasLibrary {
    /// Loads cuBLASLt, once per process: the file that [`BLAS_VARIABLE`] names, else the first that one of `folders`
    /// holds (where pip's packages put it), else what the system's loader finds.
    pub fn load(folders: &[PathBuf]) -> Result<&'static Self, CudaError> {
        static LOADED: OnceLock<BlasLibrary> = OnceLock::new();
        if let Some(library) = LOADED.get() {
            return Ok(library);
        }
        let mut named = preload_named(BLAS_VARIABLE, "cublasLtCreate")?;
        let mut looked = Vec::new();
        if named.is_none() {
            named = preload_from(folders, &mut looked)?;
        }
        // SAFETY: as for the driver.
        if !unsafe { cublaslt::sys::is_culib_present() } {
            looked.push("the system's library folders".to_owned());
            return Err(CudaError::NoBlas { looked: looked.join(", "), variable: BLAS_VARIABLE });
        }
        let path = confirm(named, blas_function("cublasLtCreate"))?;
        if let Some(function) = BLAS_FUNCTIONS.iter().find(|name| blas_function(name).is_none()) {
            return Err(CudaError::Incomplete { library: path, function });
        }
        Ok(LOADED.get_or_init(|| Self { path }))
    }

    /// Where it was found.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Its version: major x 10000 + minor x 100 + patch.
    pub fn version(&self) -> usize {
        // SAFETY: the function was looked up in `load`; it takes nothing.
        unsafe { cublaslt::sys::cublasLtGetVersion() }
    }
}

/// The CUDA version that a driver must offer: that of the toolkit which built the kernels, in its first minor version,
/// because drivers run what any minor version of their major version built. One of an earlier major version does not: it knows
/// neither the format of these images nor their PTX.
fn needed_version() -> (u32, u32) {
    (TOOLKIT.map_or(12, |(major, _)| major.max(12)), 0)
}

/// First driver that offers a CUDA version.
fn branch(version: (u32, u32)) -> u32 {
    if version.0 <= 12 { 525 } else { 580 }
}

/// A library that was loaded on somebody's word: its path, whose word, and the address of one of its functions.
struct Named {
    path: PathBuf,
    origin: String,
    probe: Option<*const c_void>,
}

/// Loads the library that the variable names, if it names one.
fn preload_named(variable: &str, probe: &str) -> Result<Option<Named>, CudaError> {
    match std::env::var_os(variable) {
        Some(path) if !path.is_empty() => preload(Path::new(&path), variable, probe).map(Some),
        _ => Ok(None),
    }
}

fn preload_from(folders: &[PathBuf], looked: &mut Vec<String>) -> Result<Option<Named>, CudaError> {
    for folder in folders {
        looked.push(folder.display().to_string());
        for name in ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"] {
            let path = folder.join(name);
            if path.is_file() {
                return preload(&path, "the Python packages", "cublasLtCreate").map(Some);
            }
        }
    }
    Ok(None)
}

#[cfg(unix)]
fn preload(path: &Path, origin: &str, probe: &str) -> Result<Named, CudaError> {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    let failed =
        |reason: String| CudaError::Library { path: path.display().to_string(), origin: origin.to_owned(), reason };
    let name =
        CString::new(path.as_os_str().as_bytes()).map_err(|_| failed("the path holds a zero byte".to_owned()))?;
    // SAFETY: a path that ends in zero. The library's initializers are those of the file that was chosen. The handle is
    // kept for the life of the process, so that the bare name goes on meaning this file.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: called right after the failure on the same thread; the text is copied before any other call.
        let text = unsafe { libc::dlerror() };
        let reason = if text.is_null() {
            "no reason given".to_owned()
        } else {
            // SAFETY: a non-null result of `dlerror` is a string that ends in zero.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        return Err(failed(reason));
    }
    let probe = CString::new(probe).map_err(|_| failed("no such function".to_owned()))?;
    // SAFETY: the handle is open, the name ends in zero.
    let address = unsafe { libc::dlsym(handle, probe.as_ptr()) };
    let probe = (!address.is_null()).then_some(address.cast_const());
    Ok(Named { path: path.to_owned(), origin: origin.to_owned(), probe })
}

#[cfg(not(unix))]
fn preload(path: &Path, origin: &str, _probe: &str) -> Result<Named, CudaError> {
    Err(CudaError::Library {
        path: path.display().to_string(),
        origin: origin.to_owned(),
        reason: "libraries can be named on Unix only".to_owned(),
    })
}

/// The path of the library that calls go to, and an error if that is not the one that was named.
fn confirm(named: Option<Named>, used: Option<*const c_void>) -> Result<String, CudaError> {
    let path = used.and_then(path_of);
    match named {
        Some(named) if named.probe != used => Err(CudaError::Shadowed {
            named: named.path.display().to_string(),
            origin: named.origin,
            used: path.unwrap_or_else(|| "another library".to_owned()),
        }),
        Some(named) => Ok(named.path.display().to_string()),
        None => Ok(path.unwrap_or_else(|| "a library of unknown path".to_owned())),
    }
}

/// The file that holds an address.
#[cfg(unix)]
fn path_of(address: *const c_void) -> Option<String> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: any address may be asked about; the result is written to `info`.
    let found = unsafe { libc::dladdr(address, &raw mut info) } != 0 && !info.dli_fname.is_null();
    // SAFETY: the name of a loaded file, which stays loaded.
    found.then(|| unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned())
}

#[cfg(not(unix))]
fn path_of(_address: *const c_void) -> Option<String> {
    None
}

/// Address of a driver function. The library must be present.
fn driver_function(name: &str) -> Option<*const c_void> {
    // SAFETY: the library is present (or this panics, which `load` has excluded); nothing is called.
    let symbol = unsafe { driver::sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) };
    symbol.ok().map(|function| *function as *const c_void)
}

/// Address of a cuBLASLt function. The library must be present.
fn blas_function(name: &str) -> Option<*const c_void> {
    // SAFETY: as above.
    let symbol = unsafe { cublaslt::sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) };
    symbol.ok().map(|function| *function as *const c_void)
}
