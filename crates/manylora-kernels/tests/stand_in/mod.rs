//! The emulated device: stand-ins for the driver and for cuBLASLt, built once per target folder from `kernels/`, and the
//! functions by which a test counts calls, makes one fail, and asks what is still held.
//!
//! With `MANYLORA_CARD=1` the same programs run on the card that the system's driver offers. It has no such functions:
//! what they would tell is not compared there, and cases that are about nothing else are skipped.
//!
//! A process can have one driver library only, so each test that needs another kind runs in a process of its own.
#![allow(unsafe_code, reason = "calls the stand-in's control functions")]
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod cases;
pub(crate) mod sweep;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names a folder with stand-ins that were built before.
pub(crate) const FOLDER_VARIABLE: &str = "MANYLORA_EMULATOR_FOLDER";
/// `1`: where the stand-ins cannot be built, tests fail instead of saying so.
pub(crate) const REQUIRE_VARIABLE: &str = "MANYLORA_REQUIRE_EMULATOR";

/// `1`: a real card in place of the emulated device.
const CARD_VARIABLE: &str = "MANYLORA_CARD";

/// Whether the tests run on a real card.
pub(crate) fn on_card() -> bool {
    std::env::var(CARD_VARIABLE).is_ok_and(|value| value == "1")
}

/// How the stand-in and its kernels were compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Build {
    /// As they are.
    Plain,
    /// With the checker of memory accesses.
    Checked,
}

/// Builds the stand-ins and returns their folder. `Err` says why that is not possible.
pub(crate) fn build(kind: Build) -> Result<PathBuf, String> {
    let folder = match std::env::var_os(FOLDER_VARIABLE) {
        Some(folder) => PathBuf::from(folder),
        None => make(kind)?,
    };
    let folder = if kind == Build::Checked { folder.join("check") } else { folder };
    let library = folder.join("libcuda.so");
    if library.is_file() { Ok(folder) } else { Err(format!("there is no `{}`", library.display())) }
}

fn make(kind: Build) -> Result<PathBuf, String> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
    for tool in [compiler.as_str(), "make"] {
        let found = Command::new(tool).arg("--version").output();
        found.map_err(|error| format!("`{tool}` cannot be started: {error}"))?;
    }
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated-device");
    let goal = if kind == Build::Checked { "emu-check" } else { "emu" };
    let mut command = Command::new("make");
    command.arg("-C").arg(&kernels).arg(goal).arg(format!("OUT={}", folder.display()));
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    // A failed build is an error of the project, never a reason to skip.
    assert!(
        output.status.success(),
        "{command:?} failed:\n{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(folder)
}

/// The driver that this process has loaded.
#[derive(Clone, Copy)]
pub(crate) struct StandIn {
    handle: *mut c_void,
}

/// Kinds of things that a process can hold of the device, and the functions that count them. (In the order of
/// `held`: the last is cuBLASLt's.)
const COUNTERS: [(&str, &str); 8] = [
    ("bytes of device memory", "emu_allocated_bytes"),
    ("page-locked blocks", "emu_pinned_allocations"),
    ("modules", "emu_modules"),
    ("streams", "emu_streams"),
    ("events", "emu_events"),
    ("graphs", "emu_graphs"),
    ("contexts", "emu_contexts"),
    ("objects of cuBLASLt", "emu_cublaslt_objects"),
];

/// What a process holds of the device, by kind.
pub(crate) type Held = [usize; COUNTERS.len()];

impl StandIn {
    /// The stand-in of the driver, which `MANYLORA_CUDA_LIBRARY` names. (On a card: nothing that can be asked.)
    pub(crate) fn get() -> Self {
        if on_card() {
            return Self { handle: std::ptr::null_mut() };
        }
        Self::open(manylora_kernels::cuda::DRIVER_VARIABLE)
    }

    fn open(variable: &str) -> Self {
        let path = CString::new(std::env::var(variable).unwrap()).unwrap();
        // SAFETY: the library has only the emulator's own initializers.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "{path:?} does not load");
        Self { handle }
    }

    /// The stand-in where there is one: what it counts is compared there only.
    pub(crate) fn counting() -> Option<Self> {
        (!on_card()).then(Self::get)
    }

    /// A control function.
    ///
    /// # Safety
    /// `F` is its type.
    unsafe fn function<F: Copy>(self, name: &str) -> F {
        assert!(!self.handle.is_null(), "a card has no `{name}`: this case must be skipped there");
        let text = CString::new(name).unwrap();
        // SAFETY: the handle is open.
        let address = unsafe { libc::dlsym(self.handle, text.as_ptr()) };
        assert!(!address.is_null() && size_of::<F>() == size_of_val(&address), "the stand-in has no `{name}`");
        // SAFETY: the address of a function of this type, as the caller promises.
        unsafe { std::mem::transmute_copy(&address) }
    }

    /// The `nth` call of `function` from now on (1: the next) does nothing and returns `code`.
    pub(crate) fn fail(self, function: &str, nth: u64, code: i32) {
        let name = CString::new(function).unwrap();
        // SAFETY: the type in the stand-in's `control.cpp`.
        let fail: unsafe extern "C" fn(*const c_char, u64, c_int) = unsafe { self.function("emu_fail_call") };
        // SAFETY: the name ends in zero.
        unsafe { fail(name.as_ptr(), nth, code) };
    }

    /// No call fails any more.
    pub(crate) fn forget_failures(self) {
        // SAFETY: as above.
        let forget: unsafe extern "C" fn() = unsafe { self.function("emu_forget_failures") };
        // SAFETY: takes nothing.
        unsafe { forget() };
    }

    /// Calls of `function` since the counts were reset.
    pub(crate) fn calls(self, function: &str) -> u64 {
        let name = CString::new(function).unwrap();
        // SAFETY: as above.
        let count: unsafe extern "C" fn(*const c_char) -> u64 = unsafe { self.function("emu_call_count") };
        // SAFETY: the name ends in zero.
        unsafe { count(name.as_ptr()) }
    }

    /// Launches of a kernel, of products (`cublasLtMatmul`), or of all (an empty name), replayed ones included.
    pub(crate) fn launches(self, kernel: &str) -> u64 {
        let name = CString::new(kernel).unwrap();
        // SAFETY: as above.
        let count: unsafe extern "C" fn(*const c_char) -> u64 = unsafe { self.function("emu_launch_count") };
        // SAFETY: the name ends in zero.
        unsafe { count(name.as_ptr()) }
    }

    /// Sets the counts of calls and launches to 0.
    pub(crate) fn reset_counts(self) {
        // SAFETY: as above.
        let reset: unsafe extern "C" fn() = unsafe { self.function("emu_reset_counts") };
        // SAFETY: takes nothing.
        unsafe { reset() };
    }

    /// All functions that were called since the counts were reset, of the driver and of cuBLASLt, and how often.
    pub(crate) fn all_calls(self) -> Vec<(String, u64)> {
        // SAFETY: as above.
        let list: unsafe extern "C" fn(*mut c_char, usize) -> usize = unsafe { self.function("emu_calls") };
        let mut text = vec![0u8; 1 << 16];
        // SAFETY: so many bytes may be written.
        let needed = unsafe { list(text.as_mut_ptr().cast(), text.len()) };
        assert!(needed <= text.len());
        let text = CStr::from_bytes_until_nul(&text).unwrap().to_str().unwrap();
        let parse = |line: &str| line.split_once(' ').map(|(name, count)| (name.to_owned(), count.parse().unwrap()));
        text.lines().map(|line| parse(line).unwrap()).collect()
    }

    /// What is held now.
    pub(crate) fn held(self) -> Held {
        let blas = std::env::var(manylora_kernels::cuda::BLAS_VARIABLE).is_ok_and(|path| !path.is_empty());
        COUNTERS.map(|(_, name)| {
            let library = match name {
                "emu_cublaslt_objects" if !blas => return 0,
                "emu_cublaslt_objects" => Self::open(manylora_kernels::cuda::BLAS_VARIABLE),
                _ => self,
            };
            // SAFETY: as above.
            let count: unsafe extern "C" fn() -> usize = unsafe { library.function(name) };
            // SAFETY: takes nothing.
            unsafe { count() }
        })
    }

    /// Fails unless nothing is held.
    pub(crate) fn assert_nothing_held(self) {
        if on_card() {
            return;
        }
        let held = self.held();
        let left: Vec<_> = COUNTERS.iter().zip(held).filter(|(_, count)| *count > 0).collect();
        assert!(left.is_empty(), "still held: {left:?}");
    }
}
