//! One quantized module: its tensors checked against each other, and its packed words turned into rows of f32.

use manylora_kernels::{KernelError, RowSource};
use safetensors::tensor::Dtype;

use super::super::safetensors::{FloatType, SafetensorsStore};
use super::config::{Method, Quantization, Strategy};
use crate::error::ModelError;

/// Where AWQ puts output `i` of eight in a word: it packs them in the order 0, 2, 4, 6, 1, 3, 5, 7.
const AWQ_POSITION: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A quantized module, validated.
#[derive(Debug)]
pub(super) struct Module {
    /// `model.layers.0.self_attn.q_proj`
    pub(super) name: String,
    /// Outputs.
    pub(super) rows: usize,
    /// Inputs.
    pub(super) columns: usize,
    /// Groups of columns that share a scale.
    groups: usize,
    /// Group of every column.
    group_of: Vec<u32>,
    quantization: Quantization,
}

impl Module {
    /// Checks that all tensors of a module are there, in shapes and types that belong together.
    pub(super) fn read(files: &SafetensorsStore, name: &str, quantization: &Quantization) -> Result<Self, ModelError> {
        let per_word = 32 / quantization.bits;
        let parts = Parts { files, module: name };
        let (rows, columns) = match quantization.method {
            Method::Awq => {
                let [columns, words] = parts.shape("qweight", Dtype::I32)?;
                (parts.times(words, per_word)?, columns)
            }
            Method::Gptq { .. } => {
                let [words, rows] = parts.shape("qweight", Dtype::I32)?;
                (rows, parts.times(words, per_word)?)
            }
            Method::CompressedTensors { .. } => {
                let [rows, words] = parts.shape("weight_packed", Dtype::I32)?;
                let [stored_rows, columns] = parts.stored_shape()?;
                if stored_rows != rows || columns.div_ceil(per_word) != words {
                    return Err(parts.damaged(&format!(
                        "`weight_packed` has shape [{rows}, {words}] and `weight_shape` says [{stored_rows}, {columns}]"
                    )));
                }
                (rows, columns)
            }
        };
        if rows == 0 || columns == 0 {
            return Err(parts.damaged("it has no elements"));
        }
        let group_size = quantization.group_size.unwrap_or(columns);
        if !columns.is_multiple_of(group_size) {
            return Err(ModelError::Unsupported {
                message: format!(
                    "the quantized module `{name}` has {columns} inputs, which are no whole groups of {group_size}; \
                     such a last group is not supported"
                ),
            });
        }
        let groups = columns / group_size;
        match quantization.method {
            Method::Awq => {
                parts.expect("qzeros", Dtype::I32, [groups, rows / per_word])?;
                parts.expect_float("scales", [groups, rows])?;
            }
            Method::Gptq { .. } => {
                if !rows.is_multiple_of(per_word) {
                    return Err(parts.damaged(&format!("its {rows} outputs do not fill whole words of zero points")));
                }
                parts.expect("qzeros", Dtype::I32, [groups, rows / per_word])?;
                parts.expect_float("scales", [groups, rows])?;
            }
            Method::CompressedTensors { symmetric, strategy, .. } => {
                if strategy == Strategy::Tensor {
                    parts.expect_single_scale()?;
                } else {
                    parts.expect_float("weight_scale", [rows, groups])?;
                }
                if symmetric && parts.has("weight_zero_point") {
                    return Err(parts.damaged("it is symmetric and has zero points"));
                }
                if !symmetric {
                    if strategy == Strategy::Tensor {
                        return Err(ModelError::Unsupported {
                            message: format!(
                                "`{name}` has one zero point for the whole tensor, which is not supported; `channel` \
                                 and `group` are"
                            ),
                        });
                    }
                    parts.expect("weight_zero_point", Dtype::I32, [rows.div_ceil(per_word), groups])?;
                }
            }
        }
        let in_order = |column: usize| (column / group_size) as u32;
        let (index, needed) = match quantization.method {
            Method::Awq => (None, false),
            Method::Gptq { act_order, .. } => (Some("g_idx"), act_order && groups > 1),
            Method::CompressedTensors { group_order, .. } => (Some("weight_g_idx"), group_order && groups > 1),
        };
        let group_of = match index.filter(|index| parts.has(index)) {
            Some(index) => parts.group_index(index, columns, groups)?,
            None if needed => {
                return Err(parts.damaged("it was quantized in order of activation, and its group index is missing"));
            }
            None => (0..columns).map(in_order).collect(),
        };
        Ok(Self { name: name.to_owned(), rows, columns, groups, group_of, quantization: *quantization })
    }
}

/// The tensors of one module while they are checked.
struct Parts<'a> {
    files: &'a SafetensorsStore,
    module: &'a str,
}

impl Parts<'_> {
    fn full(&self, part: &str) -> String {
        format!("{}.{part}", self.module)
    }

    fn has(&self, part: &str) -> bool {
        self.files.entry(&self.full(part)).is_some()
    }

    fn damaged(&self, message: &str) -> ModelError {
        let path = ["qweight", "weight_packed"]
            .iter()
            .map(|part| self.full(part))
            .find(|name| self.files.entry(name).is_some())
            .map(|name| self.files.path_of(&name))
            .unwrap_or_default();
        ModelError::Malformed { path, message: format!("quantized module `{}`: {message}", self.module) }
    }

    fn times(&self, words: usize, per_word: usize) -> Result<usize, ModelError> {
        words.checked_mul(per_word).ok_or_else(|| self.damaged("its shape is too large"))
    }

    fn shape(&self, part: &str, dtype: Dtype) -> Result<[usize; 2], ModelError> {
        let entry = self.files.entry(&self.full(part));
        let entry = entry.ok_or_else(|| self.damaged(&format!("`{part}` is missing")))?;
        match entry.shape.as_slice() {
            &[first, second] if entry.dtype == dtype => Ok([first, second]),
            shape => Err(self.damaged(&format!(
                "`{part}` has shape {shape:?} and type `{:?}`; two dimensions of `{dtype:?}` are needed",
                entry.dtype
            ))),
        }
    }

    fn expect(&self, part: &str, dtype: Dtype, wanted: [usize; 2]) -> Result<(), ModelError> {
        let found = self.shape(part, dtype)?;
        if found == wanted {
            return Ok(());
        }
        Err(self.damaged(&format!(
            "`{part}` has shape {found:?} where the weight and `quantization_config` ask for {wanted:?}"
        )))
    }

    fn expect_float(&self, part: &str, wanted: [usize; 2]) -> Result<(), ModelError> {
        let entry = self.files.entry(&self.full(part));
        let entry = entry.ok_or_else(|| self.damaged(&format!("`{part}` is missing")))?;
        if FloatType::of(entry.dtype).is_some() && entry.shape == wanted {
            return Ok(());
        }
        Err(self.damaged(&format!(
            "`{part}` has shape {:?} and type `{:?}` where the weight and `quantization_config` ask for {wanted:?} in \
             F16, BF16 or F32",
            entry.shape, entry.dtype
        )))
    }

    fn expect_single_scale(&self) -> Result<(), ModelError> {
        let entry = self.files.entry(&self.full("weight_scale"));
        let entry = entry.ok_or_else(|| self.damaged("`weight_scale` is missing"))?;
        if FloatType::of(entry.dtype).is_some() && entry.shape.iter().product::<usize>() == 1 {
            return Ok(());
        }
        Err(self.damaged(&format!("`weight_scale` has shape {:?} where one scale is needed", entry.shape)))
    }

    /// `weight_shape`: `[rows, columns]` as integers.
    fn stored_shape(&self) -> Result<[usize; 2], ModelError> {
        let name = self.full("weight_shape");
        let wrong = || self.damaged("`weight_shape` should hold two sizes as I64 or I32");
        let entry = self.files.entry(&name).ok_or_else(|| self.damaged("`weight_shape` is missing"))?;
        let bytes = self.files.bytes(&name).ok_or_else(wrong)?;
        let sizes: Vec<i64> = match entry.dtype {
            Dtype::I64 => bytes.as_chunks::<8>().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect(),
            Dtype::I32 => bytes.as_chunks::<4>().0.iter().map(|&bytes| i32::from_le_bytes(bytes).into()).collect(),
            _ => return Err(wrong()),
        };
        match sizes.as_slice() {
            // Rows and words of a stored tensor are below 2^48, whatever the file says.
            &[rows @ 0..=0xffff_ffff_ffff, columns @ 0..=0xffff_ffff_ffff] => Ok([rows as usize, columns as usize]),
            _ => Err(wrong()),
        }
    }

    /// The group of every column.
    fn group_index(&self, part: &str, columns: usize, groups: usize) -> Result<Vec<u32>, ModelError> {
        let name = self.full(part);
        let entry = self.files.entry(&name).ok_or_else(|| self.damaged(&format!("`{part}` is missing")))?;
        if entry.dtype != Dtype::I32 || entry.shape != [columns] {
            return Err(self.damaged(&format!(
                "`{part}` has shape {:?} and type `{:?}` where [{columns}] in I32 is needed",
                entry.shape, entry.dtype
            )));
        }
        let bytes = self.files.bytes(&name).unwrap_or_default();
        bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&bytes| {
                let group = i32::from_le_bytes(bytes);
                u32::try_from(group)
                    .ok()
                    .filter(|&group| (group as usize) < groups)
                    .ok_or_else(|| self.damaged(&format!("`{part}` names group `{group}` and there are {groups}")))
            })
            .collect()
    }
}

/// Rows of a quantized module, dequantized as they are read; can be read by any number of threads.
pub(super) struct PackedRows<'a> {
    module: &'a Module,
    weight: Words<'a>,
    zeros: Option<Words<'a>>,
    scales: Scales<'a>,
}

impl<'a> PackedRows<'a> {
    pub(super) fn new(files: &'a SafetensorsStore, module: &'a Module) -> Result<Self, ModelError> {
        let (weight, zeros, scales) = match module.quantization.method {
            Method::Awq | Method::Gptq { .. } => ("qweight", "qzeros", "scales"),
            Method::CompressedTensors { .. } => ("weight_packed", "weight_zero_point", "weight_scale"),
        };
        let missing = |part: &str| ModelError::Malformed {
            path: files.path_of(&format!("{}.{part}", module.name)),
            message: format!("quantized module `{}`: `{part}` is missing", module.name),
        };
        let words = |part: &str| {
            let name = format!("{}.{part}", module.name);
            let width = files.entry(&name)?.shape.last().copied()?;
            Some(Words { words: files.bytes(&name)?.as_chunks().0, width })
        };
        let name = format!("{}.{scales}", module.name);
        let entry = files.entry(&name).ok_or_else(|| missing(scales))?;
        Ok(Self {
            module,
            weight: words(weight).ok_or_else(|| missing(weight))?,
            zeros: words(zeros),
            scales: Scales {
                bytes: files.bytes(&name).unwrap_or_default(),
                kind: FloatType::of(entry.dtype).ok_or_else(|| missing(scales))?,
            },
        })
    }

    /// Scale and zero of every group of one row, zero as a stored (unsigned) number.
    fn row_groups(&self, row: usize, scales: &mut Vec<f32>, zeros: &mut Vec<i32>) {
        let module = self.module;
        let bits = module.quantization.bits as u32;
        let (mask, per_word) = ((1u32 << bits) - 1, (32 / bits) as usize);
        scales.clear();
        zeros.clear();
        for group in 0..module.groups {
            let (scale, zero) = match module.quantization.method {
                Method::Awq => {
                    let word = self.zeros.as_ref().map_or(0, |zeros| zeros.at(group, row / per_word));
                    let zero = (word >> (bits * AWQ_POSITION[row % per_word])) & mask;
                    (self.scales.at(group * module.rows + row), zero as i32)
                }
                Method::Gptq { plain_zeros, .. } => {
                    let mut word = self.zeros.as_ref().map_or(0, |zeros| zeros.at(group, row / per_word));
                    if !plain_zeros {
                        // The first format stores zero points less one. They are added back to the word as a whole,
                        // as GPTQModel does, so that a borrow over a zero of 0 is undone too.
                        word = word.wrapping_add(if bits == 4 { 0x1111_1111 } else { 0x0101_0101 });
                    }
                    let zero = (word >> (bits * (row % per_word) as u32)) & mask;
                    (self.scales.at(group * module.rows + row), zero as i32)
                }
                Method::CompressedTensors { strategy, .. } => {
                    let zero = match &self.zeros {
                        // Both are offset by half the range, which cancels.
                        Some(zeros) => {
                            let word = zeros.at(row / per_word, group);
                            ((word >> (bits * (row % per_word) as u32)) & mask) as i32
                        }
                        None => 1 << (bits - 1),
                    };
                    let index = if strategy == Strategy::Tensor { 0 } else { row * module.groups + group };
                    (self.scales.at(index), zero)
                }
            };
            scales.push(scale);
            zeros.push(zero);
        }
    }

    fn read_row(&self, row: usize, scales: &[f32], zeros: &[i32], out: &mut [f32]) {
        let module = self.module;
        let bits = module.quantization.bits as u32;
        let (mask, per_word) = ((1u32 << bits) - 1, (32 / bits) as usize);
        let values = out.iter_mut().zip(&module.group_of).enumerate();
        match module.quantization.method {
            Method::Awq => {
                let (word, shift) = (row / per_word, bits * AWQ_POSITION[row % per_word]);
                for (column, (value, &group)) in values {
                    let stored = (self.weight.at(column, word) >> shift) & mask;
                    *value = (stored as i32 - zeros[group as usize]) as f32 * scales[group as usize];
                }
            }
            Method::Gptq { .. } => {
                let mut word = 0;
                for (column, (value, &group)) in values {
                    let position = column % per_word;
                    if position == 0 {
                        word = self.weight.at(column / per_word, row);
                    }
                    let stored = (word >> (bits * position as u32)) & mask;
                    *value = (stored as i32 - zeros[group as usize]) as f32 * scales[group as usize];
                }
            }
            Method::CompressedTensors { .. } => {
                let mut word = 0;
                for (column, (value, &group)) in values {
                    let position = column % per_word;
                    if position == 0 {
                        word = self.weight.at(row, column / per_word);
                    }
                    let stored = (word >> (bits * position as u32)) & mask;
                    *value = (stored as i32 - zeros[group as usize]) as f32 * scales[group as usize];
                }
            }
        }
    }
}

impl RowSource for PackedRows<'_> {
    fn rows(&self) -> usize {
        self.module.rows
    }

    fn columns(&self) -> usize {
        self.module.columns
    }

    fn read(&self, first: usize, out: &mut [f32]) -> Result<(), KernelError> {
        let module = self.module;
        let count = out.len() / module.columns;
        if count * module.columns != out.len() || first.checked_add(count).is_none_or(|end| end > module.rows) {
            return Err(KernelError::Source(format!(
                "rows from {first} with {} values are not rows of `{}`, which has {} of {}",
                out.len(),
                module.name,
                module.rows,
                module.columns
            )));
        }
        let (mut scales, mut zeros) = (Vec::with_capacity(module.groups), Vec::with_capacity(module.groups));
        for (row, out) in (first..).zip(out.chunks_exact_mut(module.columns)) {
            self.row_groups(row, &mut scales, &mut zeros);
            self.read_row(row, &scales, &zeros, out);
        }
        Ok(())
    }
}

/// A row-major matrix of 32-bit words, little-endian.
struct Words<'a> {
    words: &'a [[u8; 4]],
    width: usize,
}

impl Words<'_> {
    fn at(&self, row: usize, column: usize) -> u32 {
        u32::from_le_bytes(self.words[row * self.width + column])
    }
}

/// Scales as stored.
struct Scales<'a> {
    bytes: &'a [u8],
    kind: FloatType,
}

impl Scales<'_> {
    fn at(&self, index: usize) -> f32 {
        let width = self.kind.bytes();
        let mut value = [0.0];
        self.kind.decode(&self.bytes[index * width..(index + 1) * width], &mut value);
        value[0]
    }
}
