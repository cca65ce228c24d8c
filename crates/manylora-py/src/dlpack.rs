//! Arrays in and out by DLPack, the protocol that numpy, torch and jax share: the limited Python API that one wheel for
//! all versions is built on has no buffer protocol.
//!
//! In: [`import`] copies an array of another library and gives it back at once. Out: [`export`] lends a [`Buffer`]
//! without a copy; it lives until its last reader has dropped it. The layouts are those of DLPack's specification,
//! version 1.0; exporters from before it, with structures that carry no version, are read and served too.

#![expect(unsafe_code, reason = "DLPack exchanges C structures behind Python capsules")]

use std::ffi::{CStr, c_void};
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use manylora::model::adapter::{Dtype, MemoryTensor};
use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The version of the protocol that is asked for and served.
const VERSION: [u32; 2] = [1, 0];
/// `DLDeviceType` of plain memory.
const CPU: i32 = 1;
/// `DLDeviceType` of memory that the CPU reads in place: plain, or pinned for CUDA or for ROCm.
const READABLE_DEVICES: [i32; 3] = [CPU, 3, 11];
/// `DLDataTypeCode` of IEEE floats and of bfloat16.
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
/// `DLPACK_FLAG_BITMASK_IS_COPIED`.
const IS_COPIED: u64 = 2;
/// More dimensions than any library has; a larger number is a damaged structure.
const MAX_DIMENSIONS: i32 = 64;

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ElementType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    dimensions: i32,
    element: ElementType,
    shape: *mut i64,
    /// In elements; null = row-major without gaps.
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Unversioned {
    tensor: Tensor,
    owner: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned`. All versions have the first three fields in these places.
#[repr(C)]
struct Versioned {
    version: [u32; 2],
    owner: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: Tensor,
}

/// What lies behind a capsule, of either kind.
trait Managed: Sized {
    /// Name of a capsule that nobody has taken the content of.
    const FRESH: &'static CStr;
    /// Name of a capsule whose content has an owner of its own.
    const TAKEN: &'static CStr;

    fn lend(tensor: Tensor, owner: *mut c_void, flags: u64) -> Self;
    fn owner(&self) -> *mut c_void;
    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)>;
    /// The tensor, if its layout is one that is known.
    fn tensor(&self) -> Result<&Tensor, String>;
}

impl Managed for Unversioned {
    const FRESH: &'static CStr = c"dltensor";
    const TAKEN: &'static CStr = c"used_dltensor";

    fn lend(tensor: Tensor, owner: *mut c_void, _flags: u64) -> Self {
        Self { tensor, owner, deleter: Some(release::<Self>) }
    }

    fn owner(&self) -> *mut c_void {
        self.owner
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }

    fn tensor(&self) -> Result<&Tensor, String> {
        Ok(&self.tensor)
    }
}

impl Managed for Versioned {
    const FRESH: &'static CStr = c"dltensor_versioned";
    const TAKEN: &'static CStr = c"used_dltensor_versioned";

    fn lend(tensor: Tensor, owner: *mut c_void, flags: u64) -> Self {
        Self { version: VERSION, owner, deleter: Some(release::<Self>), flags, tensor }
    }

    fn owner(&self) -> *mut c_void {
        self.owner
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }

    fn tensor(&self) -> Result<&Tensor, String> {
        let [major, minor] = self.version;
        if major == VERSION[0] { Ok(&self.tensor) } else { Err(format!("is of DLPack {major}.{minor}; 1.x is read")) }
    }
}

/// The content of a capsule that was taken: its deleter is called when this is dropped, and never otherwise.
struct Taken<M: Managed>(NonNull<M>);

impl<M: Managed> Taken<M> {
    /// Takes the content of `capsule`; None if it is of another kind or was taken before.
    fn from_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        // SAFETY: `capsule` is a live object and this thread is attached; a valid capsule of that name holds an `M`.
        // Renaming it is what hands its content over: its destructor leaves the content alone from then on.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule.as_ptr(), M::FRESH.as_ptr()) == 0 {
                return Ok(None);
            }
            let content = NonNull::new(ffi::PyCapsule_GetPointer(capsule.as_ptr(), M::FRESH.as_ptr()).cast());
            match content {
                Some(content) if ffi::PyCapsule_SetName(capsule.as_ptr(), M::TAKEN.as_ptr()) == 0 => {
                    Ok(Some(Self(content)))
                }
                _ => Err(PyErr::fetch(capsule.py())),
            }
        }
    }

    fn copy(&self) -> Result<MemoryTensor, String> {
        // SAFETY: the content stays until the deleter is called, which only `drop` does.
        copy(unsafe { self.0.as_ref() }.tensor()?)
    }
}

impl<M: Managed> Drop for Taken<M> {
    fn drop(&mut self) {
        // SAFETY: as in `copy`; this is the one call of the deleter, and nothing looks at the content after it.
        unsafe {
            if let Some(deleter) = self.0.as_ref().deleter() {
                deleter(self.0.as_ptr());
            }
        }
    }
}

/// Copies an array of numpy, torch, jax or another library that speaks DLPack, and gives it back.
///
/// The inner error says what is wrong with the array, to be read after its name. The outer one is an interruption.
pub(crate) fn import(array: &Bound<'_, PyAny>) -> PyResult<Result<MemoryTensor, String>> {
    match import_from(array) {
        Ok(imported) => Ok(imported),
        Err(raised) if raised.is_instance_of::<PyException>(array.py()) => {
            Ok(Err(format!("cannot be read through DLPack: {raised}")))
        }
        Err(interruption) => Err(interruption),
    }
}

fn import_from(array: &Bound<'_, PyAny>) -> PyResult<Result<MemoryTensor, String>> {
    let py = array.py();
    if !array.hasattr("__dlpack__")? || !array.hasattr("__dlpack_device__")? {
        let kind = array.get_type().name()?;
        return Ok(Err(format!("is a `{kind}`, which has no `__dlpack__`: give an array of numpy, torch or jax")));
    }
    let (kind, id): (i32, i32) = array.call_method0("__dlpack_device__")?.extract()?;
    if !READABLE_DEVICES.contains(&kind) {
        return Ok(Err(elsewhere(Device { kind, id })));
    }
    let arguments = PyDict::new(py);
    arguments.set_item("max_version", (VERSION[0], VERSION[1]))?;
    let capsule = match array.call_method("__dlpack__", (), Some(&arguments)) {
        // Exporters from before version 1 do not know the argument.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => array.call_method0("__dlpack__")?,
        other => other?,
    };
    if let Some(taken) = Taken::<Versioned>::from_capsule(&capsule)? {
        return Ok(taken.copy());
    }
    if let Some(taken) = Taken::<Unversioned>::from_capsule(&capsule)? {
        return Ok(taken.copy());
    }
    Ok(Err("gave no DLPack capsule, or one whose content somebody else has taken".to_owned()))
}

fn elsewhere(device: Device) -> String {
    let name = match device.kind {
        2 | 13 => "a CUDA device",
        8 => "a Metal device",
        10 => "a ROCm device",
        14 => "a oneAPI device",
        _ => "a device that the CPU cannot read",
    };
    let Device { kind, id } = device;
    format!("is on {name} (DLPack device type {kind}, number {id}): copy it to the CPU first")
}

/// Copies a tensor in row-major order.
fn copy(tensor: &Tensor) -> Result<MemoryTensor, String> {
    if !READABLE_DEVICES.contains(&tensor.device.kind) {
        return Err(elsewhere(tensor.device));
    }
    let ElementType { code, bits, lanes } = tensor.element;
    let (dtype, size) = match (code, bits, lanes) {
        (FLOAT, 32, 1) => (Dtype::F32, 4),
        (FLOAT, 16, 1) => (Dtype::F16, 2),
        (BFLOAT, 16, 1) => (Dtype::BF16, 2),
        _ => {
            let kinds = ["int", "uint", "float", "handle", "bfloat", "complex", "bool"];
            let kind = match kinds.get(usize::from(code)) {
                Some(kind) => format!("{kind}{bits}"),
                None => format!("{bits} bits of a type that DLPack numbers {code}"),
            };
            let lanes = if lanes == 1 { String::new() } else { format!(" in vectors of {lanes}") };
            return Err(format!("has elements of {kind}{lanes}: convert it to float32, float16 or bfloat16"));
        }
    };
    let damaged = |what: &str| format!("has a damaged DLPack structure: {what}");
    if !(0..=MAX_DIMENSIONS).contains(&tensor.dimensions) {
        return Err(damaged(&format!("{} dimensions", tensor.dimensions)));
    }
    let dimensions = tensor.dimensions as usize;
    let shape = numbers(tensor.shape, dimensions)
        .ok_or_else(|| damaged("no shape"))?
        .into_iter()
        .map(|length| usize::try_from(length).map_err(|_| damaged(&format!("a dimension of {length}"))))
        .collect::<Result<Vec<_>, _>>()?;
    let count = shape.iter().try_fold(size, |bytes: usize, &length| bytes.checked_mul(length));
    let count = count.filter(|&count| isize::try_from(count).is_ok());
    let count = count.ok_or_else(|| format!("has the shape {shape:?}, which no memory holds"))?;
    let mut bytes = Vec::new();
    if count > 0 {
        bytes.try_reserve_exact(count).map_err(|_| format!("needs {count} bytes, which are not free"))?;
        let strides = match numbers(tensor.strides, dimensions) {
            Some(strides) => strides
                .into_iter()
                .map(|stride| isize::try_from(stride).ok()?.checked_mul(size as isize))
                .collect::<Option<Vec<_>>>()
                .ok_or_else(|| damaged("a stride without bounds"))?,
            None => row_major(&shape, size),
        };
        let offset = usize::try_from(tensor.byte_offset).map_err(|_| damaged("an offset without bounds"))?;
        if tensor.data.is_null() {
            return Err(damaged("no data"));
        }
        // SAFETY: the exporter vouches that the shape and the strides, from the offset on, stay inside its memory, and
        // that this memory stays while the structure does.
        unsafe { gather(tensor.data.cast::<u8>().add(offset), &shape, &strides, size, &mut bytes) };
    }
    if cfg!(target_endian = "big") {
        bytes.chunks_exact_mut(size).for_each(<[u8]>::reverse);
    }
    Ok(MemoryTensor { shape, dtype, bytes })
}

/// The numbers at `first`; None if there are to be some and `first` is null.
fn numbers(first: *const i64, count: usize) -> Option<Vec<i64>> {
    // SAFETY: where it is not null, the exporter vouches for as many numbers as there are dimensions.
    (count == 0 || !first.is_null()).then(|| (0..count).map(|i| unsafe { first.add(i).read_unaligned() }).collect())
}

/// Strides in bytes of an array without gaps.
fn row_major(shape: &[usize], size: usize) -> Vec<isize> {
    let mut strides = vec![size as isize; shape.len()];
    for dimension in (1..shape.len()).rev() {
        strides[dimension - 1] = strides[dimension] * shape[dimension] as isize;
    }
    strides
}

/// Appends the elements in row-major order. Elements need not be aligned.
///
/// # Safety
/// All elements that `shape` and `strides` (in bytes) reach from `data` on can be read; no length is zero; `bytes` has
/// room for them all.
unsafe fn gather(data: *const u8, shape: &[usize], strides: &[isize], size: usize, bytes: &mut Vec<u8>) {
    // The inner dimensions that lie without gaps are copied as one piece.
    let (mut piece, mut outer) = (size, shape.len());
    while outer > 0 && (shape[outer - 1] == 1 || strides[outer - 1] == piece as isize) {
        piece *= shape[outer - 1];
        outer -= 1;
    }
    let mut index = vec![0; outer];
    let mut position = 0_isize;
    loop {
        let filled = bytes.len();
        // SAFETY: `position` is that of an element and `piece` bytes lie there; the room is reserved.
        unsafe {
            ptr::copy_nonoverlapping(data.offset(position), bytes.as_mut_ptr().add(filled), piece);
            bytes.set_len(filled + piece);
        }
        let mut dimension = outer;
        loop {
            if dimension == 0 {
                return;
            }
            dimension -= 1;
            index[dimension] += 1;
            position += strides[dimension];
            if index[dimension] < shape[dimension] {
                break;
            }
            position -= strides[dimension] * shape[dimension] as isize;
            index[dimension] = 0;
        }
    }
}

/// Numbers that readers in other libraries hold, and may write: nothing here refers to them but by pointer.
pub(crate) struct Buffer {
    values: NonNull<[f32]>,
}

// SAFETY: it owns its memory, and threads share nothing of it but the pointer.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl From<Vec<f32>> for Buffer {
    fn from(values: Vec<f32>) -> Self {
        Self { values: NonNull::from(Box::leak(values.into_boxed_slice())) }
    }
}

impl Buffer {
    fn duplicate(&self) -> Self {
        let mut copied = vec![0.0; self.values.len()];
        // SAFETY: both are of that length, and the new one is nobody else's.
        unsafe { ptr::copy_nonoverlapping(self.values.as_ptr().cast(), copied.as_mut_ptr(), copied.len()) };
        copied.into()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a box, and the last holder is gone.
        drop(unsafe { Box::from_raw(self.values.as_ptr()) });
    }
}

/// What an exported structure points into.
struct Lent {
    buffer: Arc<Buffer>,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

/// A capsule through which another library reads `buffer` as a row-major array of `shape`, in place unless `copied`.
/// `versioned`: the reader knows DLPack 1.
pub(crate) fn export<'py>(
    py: Python<'py>,
    buffer: &Arc<Buffer>,
    shape: &[usize],
    versioned: bool,
    copied: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let buffer = if copied { Arc::new(buffer.duplicate()) } else { Arc::clone(buffer) };
    let strides = row_major(shape, 1).into_iter().map(|stride| stride as i64).collect();
    let lent = Lent { buffer, shape: shape.iter().map(|&length| length as i64).collect(), strides };
    let flags = if copied { IS_COPIED } else { 0 };
    if versioned { capsule::<Versioned>(py, lent, flags) } else { capsule::<Unversioned>(py, lent, flags) }
}

fn capsule<M: Managed>(py: Python<'_>, lent: Lent, flags: u64) -> PyResult<Bound<'_, PyAny>> {
    let mut lent = Box::new(lent);
    let tensor = Tensor {
        data: lent.buffer.values.as_ptr().cast(),
        device: Device { kind: CPU, id: 0 },
        dimensions: lent.shape.len() as i32,
        element: ElementType { code: FLOAT, bits: 8 * mem::size_of::<f32>() as u8, lanes: 1 },
        shape: lent.shape.as_mut_ptr(),
        strides: lent.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let managed = Box::into_raw(Box::new(M::lend(tensor, Box::into_raw(lent).cast(), flags)));
    // SAFETY: the name lives for ever; the structure lives until `release`, which `discard` or its taker calls.
    unsafe {
        let made = ffi::PyCapsule_New(managed.cast(), M::FRESH.as_ptr(), Some(discard::<M>));
        Bound::from_owned_ptr_or_err(py, made).inspect_err(|_| release(managed))
    }
}

/// The deleter of what is lent. Any thread may call it, attached to Python or not.
unsafe extern "C" fn release<M: Managed>(managed: *mut M) {
    // SAFETY: `capsule` made both boxes, and a deleter is called once.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.owner().cast::<Lent>()));
    }
}

/// The destructor of a capsule: what nobody took is released with it.
unsafe extern "C" fn discard<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls it once, with a capsule that `capsule` made; of that name it still owns its content.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, M::FRESH.as_ptr()) != 0 {
            release::<M>(ffi::PyCapsule_GetPointer(capsule, M::FRESH.as_ptr()).cast());
        }
    }
}
