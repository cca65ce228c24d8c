//! Products with the base's weights: by cuBLASLt, or by kernels of our own where it is missing or not wanted.
//!
//! cuBLASLt is tuned for every card. Our own kernels run wherever there is a driver, and give an element the same bits
//! whatever the number of rows.
#![expect(unsafe_code, reason = "launches kernels and products over buffers that were checked")]

use std::path::PathBuf;

use super::super::arena::Arena;
use super::super::arguments::MatmulRows;
use super::super::error::CudaError;
use super::super::launch::{Grid, Kernel};
use super::super::library::{BLAS_VARIABLE, BlasLibrary};
use super::super::matmul::{AlgorithmChoice, Matmul, MatmulShape, OperandType};
use super::super::memory::DevicePointer;
use super::super::module::Kernels;
use super::super::stream::Stream;
use super::step::bucket;

/// Who computes products with the base's weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProductChoice {
    /// cuBLASLt where it is found, else our own kernels.
    #[default]
    Auto,
    /// cuBLASLt; it is an error if it is missing.
    Library,
    /// Our own kernels: a row gets the same bits whatever other rows there are.
    Own,
}

/// Where products go on a machine.
#[derive(Debug)]
pub enum ProductSource {
    /// To this library.
    Library(&'static BlasLibrary),
    /// To our own kernels, which need no working memory; with the reason, where the library was wanted.
    Own(Option<CudaError>),
}

impl ProductChoice {
    /// Where products go on this machine. The library is looked for in `folders` too; one that [`BLAS_VARIABLE`] names is
    /// never passed over.
    pub fn source(self, folders: &[PathBuf]) -> Result<ProductSource, CudaError> {
        if self == Self::Own {
            return Ok(ProductSource::Own(None));
        }
        match BlasLibrary::load(folders) {
            Ok(library) => Ok(ProductSource::Library(library)),
            Err(why) if self == Self::Auto && std::env::var_os(BLAS_VARIABLE).is_none_or(|name| name.is_empty()) => {
                Ok(ProductSource::Own(Some(why)))
            }
            Err(error) => Err(error),
        }
    }
}

/// Rows up to which the kernel for few is taken: what its registers hold at once.
const FEW_ROWS: usize = 32;
/// Most blocks of y in a grid.
const MOST_BLOCKS: usize = 65_535;

/// Where one product's operands lie.
pub(super) struct Operands {
    /// The step's header, and where in it the number of rows is.
    pub(super) header: DevicePointer<i32>,
    pub(super) count: i32,
    pub(super) x: DevicePointer<u16>,
    pub(super) weight: DevicePointer<u16>,
    pub(super) out: DevicePointer<f32>,
}

/// What computes products.
#[derive(Debug)]
pub(super) enum Products {
    Library(Box<Matmul>),
    /// With the reason, where the library was wanted.
    Own {
        few_rows: Kernel<MatmulRows<u16>>,
        rows: Kernel<MatmulRows<u16>>,
        why: Option<CudaError>,
    },
}

impl Products {
    /// `workspace` and `algorithms` are for cuBLASLt; `format` is the ending of the kernels' names.
    pub(super) fn new(
        arena: &Arena,
        kernels: &Kernels,
        format: &str,
        choice: ProductChoice,
        folders: &[PathBuf],
        workspace: Option<usize>,
        algorithms: AlgorithmChoice,
    ) -> Result<Self, CudaError> {
        let why = match choice.source(folders)? {
            ProductSource::Library(_) => {
                let workspace = workspace.unwrap_or_else(|| Matmul::advised_workspace(arena.context()));
                return Ok(Self::Library(Box::new(Matmul::new(arena, folders, workspace, algorithms)?)));
            }
            ProductSource::Own(why) => why,
        };
        let few_rows = kernels.kernel(&format!("matmul_few_rows_{format}"))?;
        Ok(Self::Own { few_rows, rows: kernels.kernel(&format!("matmul_{format}"))?, why })
    }

    /// For people: `products by cuBLASLt 13.0.2`.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Library(matmul) => {
                let version = matmul.library().version();
                format!("products by cuBLASLt {}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
            }
            Self::Own { why: Some(why), .. } => format!("products by own kernels: {why}"),
            Self::Own { why: None, .. } => "products by own kernels".to_owned(),
        }
    }

    /// Makes sure of what is to compute products with a weight `[output, input]`.
    pub(super) fn check_weight(&mut self, weight: (usize, usize), operands: OperandType) -> Result<(), CudaError> {
        match self {
            Self::Library(matmul) => matmul.check_weight(weight, operands, bucket),
            Self::Own { .. } => Ok(()),
        }
    }

    /// Queues a product. `shape.rows` is what a recorded step is made for; our own kernels compute as many of them as the
    /// header says.
    ///
    /// # Safety
    /// As for [`Matmul::run`]; the header says no more than `shape.rows`.
    pub(super) unsafe fn run(
        &mut self,
        stream: &Stream,
        shape: MatmulShape,
        operands: &Operands,
    ) -> Result<(), CudaError> {
        let &Operands { header, count, x, weight, out } = operands;
        let (few_rows, rows) = match self {
            // SAFETY: the caller's word.
            Self::Library(matmul) => return unsafe { matmul.run(stream, shape, x.cast(), weight.cast(), out) },
            Self::Own { few_rows, rows, .. } => (few_rows, rows),
        };
        let arguments = MatmulRows {
            header,
            count,
            x,
            x_stride: shape.x_stride as i32,
            weight,
            input: shape.input as i32,
            output: shape.output as i32,
            out,
            out_stride: shape.out_stride as i32,
            add: i32::from(shape.add),
        };
        let grid = |rows: usize, outputs: usize, threads: u32| {
            let outputs = shape.output.div_ceil(outputs).min(MOST_BLOCKS);
            Grid::new(shape.rows.div_ceil(rows) as u32, outputs as u32, threads)
        };
        // SAFETY: the caller's word.
        unsafe {
            if shape.rows <= FEW_ROWS {
                few_rows.launch(stream, grid(FEW_ROWS, if shape.rows <= 8 { 16 } else { 32 }, 256), &arguments)
            } else {
                rows.launch(stream, grid(128, 64, 128), &arguments)
            }
        }
    }
}
