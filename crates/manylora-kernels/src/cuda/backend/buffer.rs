//! Activations, weights and vectors on the card.

use std::sync::Arc;

use half::{bf16, f16};

use super::super::arena::{Arena, DeviceSlice, Holding};
use super::super::error::CudaError;
use super::super::free_list::granules;
use super::super::matmul::OperandType;
use super::super::memory::DevicePointer;
use super::super::staging::{Readback, Uploader};
use super::super::stream::Stream;
use crate::backend::{BufferKind, BufferRole, RowSet, RowSource, StorageType};
use crate::error::KernelError;

/// Rows start at multiples of so many elements: what kernels load at once.
const COLUMNS: usize = 8;
/// Values that are converted and sent at a time.
const CHUNK: usize = 1 << 20;

/// A format of weights and inputs, as products name it.
pub(super) const fn operands(dtype: StorageType) -> OperandType {
    match dtype {
        StorageType::F16 => OperandType::F16,
        StorageType::Bf16 | StorageType::F32 => OperandType::Bf16,
    }
}

/// Stride in elements of buffers of these widths side by side, and the first column of each.
fn columns(widths: &[usize]) -> (usize, Vec<usize>) {
    let mut next = 0;
    let first = widths.iter().map(|width| {
        let first = next;
        next += width.next_multiple_of(COLUMNS);
        first
    });
    let first = first.collect();
    (next, first)
}

const fn element_bytes(role: BufferRole) -> usize {
    match role {
        BufferRole::Sums => size_of::<f32>(),
        BufferRole::Inputs => size_of::<u16>(),
    }
}

/// What [`CudaBuffer::side_by_side`] takes.
pub(super) fn buffer_bytes(rows: usize, widths: &[usize], kind: BufferKind) -> usize {
    granules(rows.saturating_mul(columns(widths).0).saturating_mul(element_bytes(kind.role)))
}

/// The elements of one or of several buffers.
#[derive(Clone, Debug)]
enum Elements {
    Sums(Arc<DeviceSlice<f32>>),
    Inputs(Arc<DeviceSlice<u16>>),
}

/// An activation matrix `[rows, width]`; rows are `stride` elements apart.
#[derive(Debug)]
pub struct CudaBuffer {
    elements: Elements,
    first: usize,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
    pub(super) set: RowSet,
    /// What [`super::CudaBackend::read`] fetched: dense rows of sums come through page-locked memory.
    dense: Option<Readback<f32>>,
    gathered: Vec<f32>,
}

impl CudaBuffer {
    /// Zeroed buffers whose rows lie side by side.
    pub(super) fn side_by_side(
        arena: &Arena,
        stream: &Stream,
        rows: usize,
        widths: &[usize],
        kind: BufferKind,
    ) -> Result<Vec<Self>, CudaError> {
        let (stride, first) = columns(widths);
        let (what, len) = ("an activation buffer", rows.saturating_mul(stride));
        let elements = match kind.role {
            BufferRole::Sums => {
                let mut memory = arena.allocate(Holding::Buffers, what, len)?;
                memory.fill_zero(stream)?;
                Elements::Sums(Arc::new(memory))
            }
            BufferRole::Inputs => {
                let mut memory = arena.allocate(Holding::Buffers, what, len)?;
                memory.fill_zero(stream)?;
                Elements::Inputs(Arc::new(memory))
            }
        };
        let buffers = widths.iter().zip(first).map(|(&width, first)| Self {
            elements: elements.clone(),
            first,
            rows,
            width,
            stride,
            set: kind.rows,
            dense: None,
            gathered: Vec::new(),
        });
        Ok(buffers.collect())
    }

    /// Its first element, of a buffer of sums.
    pub(super) fn sums(&self) -> DevicePointer<f32> {
        match &self.elements {
            Elements::Sums(memory) => memory.pointer().add(self.first),
            Elements::Inputs(_) => panic!("an operation that sums up was given a buffer of inputs"),
        }
    }

    /// Its first element, of a buffer of inputs.
    pub(super) fn inputs(&self) -> DevicePointer<u16> {
        match &self.elements {
            Elements::Inputs(memory) => memory.pointer().add(self.first),
            Elements::Sums(_) => panic!("an operation that reads inputs was given a buffer of sums"),
        }
    }

    /// Whether it holds sums.
    pub(super) const fn is_sums(&self) -> bool {
        matches!(self.elements, Elements::Sums(_))
    }

    /// The first rows, once they are there.
    pub(super) fn read(&mut self, stream: &Stream, rows: usize, dtype: StorageType) -> Result<&[f32], CudaError> {
        let (width, stride, first) = (self.width, self.stride, self.first);
        if let Elements::Sums(memory) = &self.elements
            && width == stride
        {
            let dense = match &mut self.dense {
                Some(dense) => dense,
                none => none.insert(Readback::new(stream.context(), self.rows * width)?),
            };
            dense.fetch(stream, memory, 0, rows * width)?;
            return dense.wait();
        }
        self.gathered.clear();
        match &self.elements {
            Elements::Sums(memory) => {
                let mut values = vec![0.0; rows * stride];
                memory.read(stream, 0, &mut values)?;
                values.chunks(stride).for_each(|row| self.gathered.extend_from_slice(&row[first..first + width]));
            }
            Elements::Inputs(memory) => {
                let mut values = vec![0u16; rows * stride];
                memory.read(stream, 0, &mut values)?;
                let widen = |&value: &u16| widened(value, dtype);
                values.chunks(stride).for_each(|row| self.gathered.extend(row[first..first + width].iter().map(widen)));
            }
        }
        Ok(&self.gathered)
    }

    /// Writes the first rows, and waits.
    pub(super) fn write(&self, stream: &Stream, values: &[f32], dtype: StorageType) -> Result<(), CudaError> {
        for (row, values) in values.chunks(self.width).enumerate() {
            let at = row * self.stride + self.first;
            match &self.elements {
                Elements::Sums(memory) => memory.write_shared(stream, at, values)?,
                Elements::Inputs(memory) => {
                    let values: Vec<u16> = values.iter().map(|&value| rounded(value, dtype)).collect();
                    memory.write_shared(stream, at, &values)?;
                }
            }
        }
        Ok(())
    }
}

/// A value in a half-width format.
pub(super) fn rounded(value: f32, dtype: StorageType) -> u16 {
    match dtype {
        StorageType::F16 => f16::from_f32(value).to_bits(),
        StorageType::Bf16 | StorageType::F32 => bf16::from_f32(value).to_bits(),
    }
}

fn widened(value: u16, dtype: StorageType) -> f32 {
    match dtype {
        StorageType::F16 => f16::from_bits(value).to_f32(),
        StorageType::Bf16 | StorageType::F32 => bf16::from_bits(value).to_f32(),
    }
}

/// A matrix `[outputs, inputs]`, row-major, alone or with those that are multiplied with the same input behind it.
#[derive(Debug)]
pub struct CudaWeight {
    _memory: Arc<DeviceSlice<u8>>,
    pub(super) pointer: DevicePointer<u16>,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
}

impl CudaWeight {
    /// Converts and sends matrices, one behind the other.
    pub(super) fn pack(
        arena: &Arena,
        uploader: &Uploader,
        parts: &[(&str, &dyn RowSource)],
        dtype: StorageType,
    ) -> Result<Vec<Self>, KernelError> {
        let Some((what, _)) = parts.first() else { return Ok(Vec::new()) };
        for (what, source) in parts {
            let columns = source.columns();
            if columns == 0 || !columns.is_multiple_of(COLUMNS) {
                return Err(KernelError::Device(format!(
                    "{what} has `{columns}` columns and the kernels for cards take multiples of {COLUMNS}; use device \"cpu\""
                )));
            }
        }
        let bytes = |source: &dyn RowSource| source.rows() * source.columns() * size_of::<u16>();
        let total = parts.iter().map(|(_, source)| bytes(*source)).sum();
        let mut memory = arena.allocate::<u8>(Holding::Weights, what, total)?;
        let mut first = 0;
        for (what, source) in parts {
            send(&mut memory, first, uploader, what, *source, dtype)?;
            first += bytes(*source);
        }
        // Whoever uses them need not wait for events of the past.
        uploader.synchronize()?;
        let memory = Arc::new(memory);
        let mut at = memory.pointer();
        let weights = parts.iter().map(|(_, source)| {
            let weight = Self {
                _memory: Arc::clone(&memory),
                pointer: at.cast(),
                outputs: source.rows(),
                inputs: source.columns(),
            };
            at = at.add(bytes(*source));
            weight
        });
        Ok(weights.collect())
    }
}

fn send(
    memory: &mut DeviceSlice<u8>,
    first: usize,
    uploader: &Uploader,
    what: &str,
    source: &dyn RowSource,
    dtype: StorageType,
) -> Result<(), KernelError> {
    let (rows, columns) = (source.rows(), source.columns());
    let at_once = (CHUNK / columns).clamp(1, rows.max(1));
    let mut values = vec![0.0; at_once * columns];
    let mut bytes = Vec::with_capacity(values.len() * size_of::<u16>());
    for row in (0..rows).step_by(at_once) {
        let values = &mut values[..at_once.min(rows - row) * columns];
        source.read(row, values)?;
        bytes.clear();
        for &value in &*values {
            let narrow = rounded(value, dtype);
            if value.is_finite() && !widened(narrow, dtype).is_finite() {
                return Err(KernelError::Overflow { what: what.to_owned(), value, dtype: name(dtype) });
            }
            bytes.extend_from_slice(&narrow.to_le_bytes());
        }
        uploader.upload(memory, first + row * columns * size_of::<u16>(), &bytes)?;
    }
    Ok(())
}

/// Name of a format.
pub(super) const fn name(dtype: StorageType) -> &'static str {
    match dtype {
        StorageType::Bf16 => "bfloat16",
        StorageType::F16 => "float16",
        StorageType::F32 => "float32",
    }
}

/// A vector of f32.
#[derive(Debug)]
pub struct CudaVector {
    memory: DeviceSlice<f32>,
}

impl CudaVector {
    pub(super) fn new(arena: &Arena, stream: &Stream, values: &[f32]) -> Result<Self, CudaError> {
        let mut memory = arena.allocate(Holding::Weights, "a vector", values.len())?;
        memory.write(stream, 0, values)?;
        Ok(Self { memory })
    }

    pub(super) fn pointer(&self) -> DevicePointer<f32> {
        self.memory.pointer()
    }

    pub(super) fn len(&self) -> usize {
        self.memory.len()
    }
}

/// Its address, or none.
pub(super) fn optional(vector: Option<&CudaVector>) -> DevicePointer<f32> {
    vector.map_or(DevicePointer::NULL, CudaVector::pointer)
}
