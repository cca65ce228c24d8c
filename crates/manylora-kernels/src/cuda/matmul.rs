//! Base GEMMs through cuBLASLt: `out = x W^T` (or added to `out`), half-width operands, f32 sums and results.
//!
//! A plan holds descriptors and the algorithm for one shape, so that a step asks for nothing. Row-major matrices are
//! column-major ones transposed: what is called is `out^T [n, m] = W [n, k] x^T [k, m]`.
//!
//! cuBLASLt may choose another algorithm for another number of rows, and then sums in another order. With
//! [`AlgorithmChoice::OnePerWeight`] the algorithm is chosen once per weight shape, for the largest number of rows, and
//! used for all: a row's result does not depend on how many rows there are.
#![expect(unsafe_code, reason = "calls cuBLASLt")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys};

use super::arena::{Arena, DeviceSlice, Holding};
use super::context::Context;
use super::error::{CudaError, DriverResult};
use super::library::BlasLibrary;
use super::memory::DevicePointer;
use super::stream::Stream;

/// Number format of the operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperandType {
    /// bfloat16
    Bf16,
    /// IEEE half
    F16,
}

impl OperandType {
    const fn raw(self) -> sys::cudaDataType {
        match self {
            Self::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            Self::F16 => sys::cudaDataType_t::CUDA_R_16F,
        }
    }
}

/// How algorithms are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlgorithmChoice {
    /// The one that cuBLASLt thinks fastest for each shape.
    Fastest,
    /// One per weight shape, whatever the number of rows: that for `rows` rows, the most that a product will have.
    OnePerWeight {
        /// Rows that it is chosen for.
        rows: usize,
    },
}

/// A shape of product. All strides are in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatmulShape {
    /// Rows of `x` and `out`.
    pub rows: usize,
    /// Columns of `out` = rows of the weight.
    pub output: usize,
    /// Columns of `x` and of the weight.
    pub input: usize,
    /// From one row of `x` to the next.
    pub x_stride: usize,
    /// From one row of `out` to the next.
    pub out_stride: usize,
    /// Format of `x` and the weight.
    pub operands: OperandType,
    /// Whether the result is added to `out`.
    pub add: bool,
}

impl MatmulShape {
    /// Rows that follow each other directly, stored.
    pub const fn dense(rows: usize, output: usize, input: usize, operands: OperandType) -> Self {
        Self { rows, output, input, x_stride: input, out_stride: output, operands, add: false }
    }

    fn describe(&self) -> String {
        let Self { rows, output, input, operands, .. } = self;
        format!("[{rows} x {input}] x [{input} x {output}] in {operands:?}")
    }
}

/// Alignment in bytes of all operands: what kernels ask of rows as well.
const ALIGNMENT: u32 = 16;

/// `CUBLAS_OP_T`, which the bindings of cuBLASLt leave out.
const TRANSPOSE: i32 = 1;

/// cuBLASLt on one device, its working memory, and a plan for each shape seen.
#[derive(Debug)]
pub struct Matmul {
    plans: HashMap<MatmulShape, Plan>,
    /// By weight shape, with `rows` of the choice.
    fixed: HashMap<MatmulShape, sys::cublasLtMatmulAlgo_t>,
    choice: AlgorithmChoice,
    workspace: DeviceSlice<u8>,
    library: &'static BlasLibrary,
    handle: Handle,
}

impl Matmul {
    /// Working memory that the library's maker advises for a card.
    pub fn advised_workspace(context: &Context) -> usize {
        if context.properties().capability.0 >= 9 { 32 << 20 } else { 4 << 20 }
    }

    /// Loads cuBLASLt (`folders`: where Python packages keep it) and takes `workspace` bytes of the arena.
    pub fn new(
        arena: &Arena,
        folders: &[PathBuf],
        workspace: usize,
        choice: AlgorithmChoice,
    ) -> Result<Self, CudaError> {
        let library = BlasLibrary::load(folders)?;
        let context = Arc::clone(arena.context());
        context.bind()?;
        let raw = result::create_handle().of("cublasLtCreate")?;
        let handle = Handle { context, raw };
        let workspace = arena.allocate(Holding::Buffers, "working memory of matrix products", workspace)?;
        Ok(Self { plans: HashMap::new(), fixed: HashMap::new(), choice, workspace, library, handle })
    }

    /// Makes the plan for a shape if there is none. Before a recording, since it may load code.
    pub fn prepare(&mut self, shape: MatmulShape) -> Result<(), CudaError> {
        if self.plans.contains_key(&shape) {
            return Ok(());
        }
        self.handle.context.bind()?;
        let mut plan = Plan::new(shape)?;
        plan.algorithm = match self.choice {
            AlgorithmChoice::Fastest => plan.fastest(&self.handle, self.workspace.len())?,
            AlgorithmChoice::OnePerWeight { rows } => {
                // Strides and whether it adds leave the sums as they are.
                let algorithm = self.fixed(MatmulShape::dense(rows, shape.output, shape.input, shape.operands))?;
                plan.check(&self.handle, &algorithm, self.workspace.len())?;
                algorithm
            }
        };
        self.plans.insert(shape, plan);
        Ok(())
    }

    /// The algorithm of a weight, chosen for the rows of `weight`.
    fn fixed(&mut self, weight: MatmulShape) -> Result<sys::cublasLtMatmulAlgo_t, CudaError> {
        if let Some(known) = self.fixed.get(&weight) {
            return Ok(*known);
        }
        let algorithm = Plan::new(weight)?.fastest(&self.handle, self.workspace.len())?;
        self.fixed.insert(weight, algorithm);
        Ok(algorithm)
    }

    /// Makes sure, where one algorithm is to serve a weight, that it serves all numbers of rows that `round` rounds up to: so
    /// that what the library refuses is known at the start.
    pub(super) fn check_weight(
        &mut self,
        (output, input): (usize, usize),
        operands: OperandType,
        round: impl Fn(usize) -> usize,
    ) -> Result<(), CudaError> {
        let AlgorithmChoice::OnePerWeight { rows: most } = self.choice else { return Ok(()) };
        self.handle.context.bind()?;
        let algorithm = self.fixed(MatmulShape::dense(most, output, input, operands))?;
        let mut rows = 0;
        while rows < most {
            rows = round(rows + 1).min(most);
            let shape = MatmulShape::dense(rows, output, input, operands);
            Plan::new(shape)?.check(&self.handle, &algorithm, self.workspace.len())?;
        }
        Ok(())
    }

    /// Queues a product: `x [rows, input]`, `weight [output, input]`, `out [rows, output]`. Products share the working
    /// memory, so all are queued on one stream. The calling thread must be bound to the context.
    ///
    /// # Safety
    /// The addresses must be multiples of 16, hold matrices of this shape, and stay until the product is done (a recorded
    /// one: as long as the graph is replayed).
    pub unsafe fn run(
        &mut self,
        stream: &Stream,
        shape: MatmulShape,
        x: DevicePointer<u8>,
        weight: DevicePointer<u8>,
        out: DevicePointer<f32>,
    ) -> Result<(), CudaError> {
        self.prepare(shape)?;
        let Some(plan) = self.plans.get(&shape) else { return Ok(()) };
        let (alpha, beta) = (1.0f32, f32::from(u8::from(shape.add)));
        let address = |pointer: u64| pointer as usize as *mut c_void;
        // SAFETY: all descriptors are alive and of this shape; the factors are read before the call returns; the
        // matrices are the caller's word.
        unsafe {
            result::matmul(
                self.handle.raw,
                plan.operation.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                address(weight.address()),
                plan.weight.0,
                address(x.address()),
                plan.x.0,
                address(out.address()),
                plan.out.0,
                address(out.address()),
                plan.out.0,
                &raw const plan.algorithm,
                address(self.workspace.pointer().address()),
                self.workspace.len(),
                stream.raw().cast(),
            )
        }
        .of("cublasLtMatmul")
    }

    /// The library that computes.
    pub fn library(&self) -> &'static BlasLibrary {
        self.library
    }
}

#[derive(Debug)]
struct Handle {
    context: Arc<Context>,
    raw: sys::cublasLtHandle_t,
}

// SAFETY: handles may be used from any bound thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // Products may still be running.
        let _ = self.context.synchronize();
        // SAFETY: destroyed once.
        let _ = unsafe { result::destroy_handle(self.raw) };
    }
}

/// Descriptors are host memory of the library: nothing is to be done where giving them back fails.
macro_rules! descriptor {
    ($name:ident, $raw:ty, $destroy:path) => {
        #[derive(Debug)]
        struct $name($raw);

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: destroyed once.
                let _ = unsafe { $destroy(self.0) };
            }
        }
    };
}

descriptor!(Operation, sys::cublasLtMatmulDesc_t, result::destroy_matmul_desc);
descriptor!(Layout, sys::cublasLtMatrixLayout_t, result::destroy_matrix_layout);
descriptor!(Preference, sys::cublasLtMatmulPreference_t, result::destroy_matmul_pref);

/// What a product of one shape needs.
#[derive(Debug)]
struct Plan {
    shape: MatmulShape,
    operation: Operation,
    weight: Layout,
    x: Layout,
    out: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: descriptors are memory that only this plan's owner uses.
unsafe impl Send for Plan {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Plan {}

impl Plan {
    /// Descriptors, without an algorithm yet.
    fn new(shape: MatmulShape) -> Result<Self, CudaError> {
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let operation = Operation(
            result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F).of("cublasLtMatmulDescCreate")?,
        );
        let transpose = TRANSPOSE;
        // SAFETY: the descriptor is alive; four bytes are read.
        unsafe {
            result::set_matmul_desc_attribute(
                operation.0,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transpose).cast(),
                size_of::<i32>(),
            )
        }
        .of("cublasLtMatmulDescSetAttribute")?;
        let layout = |format, rows: usize, columns: usize, stride: usize| {
            result::create_matrix_layout(format, rows as u64, columns as u64, stride as i64)
                .of("cublasLtMatrixLayoutCreate")
                .map(Layout)
        };
        let MatmulShape { rows, output, input, x_stride, out_stride, operands, .. } = shape;
        Ok(Self {
            shape,
            operation,
            weight: layout(operands.raw(), input, output, input)?,
            x: layout(operands.raw(), input, rows, x_stride)?,
            out: layout(sys::cudaDataType_t::CUDA_R_32F, output, rows, out_stride)?,
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        })
    }

    /// The algorithm that cuBLASLt thinks fastest with so much working memory.
    fn fastest(&self, handle: &Handle, workspace: usize) -> Result<sys::cublasLtMatmulAlgo_t, CudaError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Preference(result::create_matmul_pref().of("cublasLtMatmulPreferenceCreate")?);
        // SAFETY: the descriptor is alive; so many bytes are read.
        let set = |which: Attribute, value: *const c_void, bytes: usize| {
            unsafe { result::set_matmul_pref_attribute(preference.0, which, value, bytes) }
                .of("cublasLtMatmulPreferenceSetAttribute")
        };
        let most = workspace as u64;
        set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const most).cast(), size_of::<u64>())?;
        let alignment = ALIGNMENT;
        for which in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            set(which, (&raw const alignment).cast(), size_of::<u32>())?;
        }
        // SAFETY: all descriptors are alive.
        let found = unsafe {
            result::get_matmul_algo_heuristic(
                handle.raw,
                self.operation.0,
                self.weight.0,
                self.x.0,
                self.out.0,
                self.out.0,
                preference.0,
            )
        };
        match found.of("cublasLtMatmulAlgoGetHeuristic") {
            Err(CudaError::Blas { name, code: 15, .. }) => Err(CudaError::NoAlgorithm {
                product: self.shape.describe(),
                reason: name,
                remedy: "widths must be multiples of 8",
            }),
            other => other.map(|found| found.algo),
        }
    }

    /// An error unless `algorithm` can do this product.
    fn check(&self, handle: &Handle, algorithm: &sys::cublasLtMatmulAlgo_t, workspace: usize) -> Result<(), CudaError> {
        let mut found = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: all descriptors are alive; one result is written.
        let answer = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                handle.raw,
                self.operation.0,
                self.weight.0,
                self.x.0,
                self.out.0,
                self.out.0,
                algorithm,
                found.as_mut_ptr(),
            )
        };
        let refused = |reason: String| CudaError::NoAlgorithm {
            product: self.shape.describe(),
            reason,
            remedy: "let cuBLASLt choose one for each number of rows, or let our own kernels compute",
        };
        match answer.result().of("cublasLtMatmulAlgoCheck") {
            Err(CudaError::Blas { name, code: 7 | 15, .. }) => return Err(refused(name)),
            other => other?,
        }
        // SAFETY: zeros are a value of it, and the library wrote over them.
        let needed = unsafe { found.assume_init() }.workspaceSize;
        if needed > workspace {
            return Err(refused(format!("it would need {needed} bytes of working memory, there are {workspace}")));
        }
        Ok(())
    }
}
