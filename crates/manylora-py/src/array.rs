//! Numbers that come back as an array which other libraries read without a copy.

use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::dlpack::{self, Buffer};

/// A row-major array of float32: `numpy.from_dlpack(array)` or `torch.from_dlpack(array)` makes one of theirs of it, in
/// the same memory.
#[pyclass(frozen, module = "manylora._core")]
pub(crate) struct Array {
    buffer: Arc<Buffer>,
    shape: Vec<usize>,
}

impl Array {
    /// `values` in row-major order; `shape` multiplies to their number.
    pub(crate) fn new(values: Vec<f32>, shape: Vec<usize>) -> Self {
        Self { buffer: Arc::new(values.into()), shape }
    }
}

#[pymethods]
impl Array {
    /// Its dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Always `float32`.
    #[getter]
    #[expect(clippy::unused_self, reason = "an attribute of arrays")]
    fn dtype(&self) -> &'static str {
        "float32"
    }

    fn __repr__(&self) -> String {
        let shape: Vec<String> = self.shape.iter().map(ToString::to_string).collect();
        format!("Array(shape=({}), dtype=float32)", shape.join(", "))
    }

    /// The array as a DLPack capsule: what `from_dlpack` of other libraries calls.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("stream must be None: the array is in the CPU's memory"));
        }
        if let Some(device) = dl_device.filter(|&device| device != self.__dlpack_device__()) {
            return Err(PyBufferError::new_err(format!("the array is on device (1, 0), not on {device:?}")));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::export(py, &self.buffer, &self.shape, versioned, copy == Some(true))
    }

    /// The CPU.
    #[expect(clippy::unused_self, reason = "DLPack's protocol")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }
}
