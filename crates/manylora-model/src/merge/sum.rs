//! Rows of a merged tensor: the base's and what adapters add, in f64, rounded once.

use candle_core::{Device, Tensor};
use half::{bf16, f16};
use manylora_kernels::{Site, SiteShape};
use rayon::prelude::*;

use super::{MergeProgress, MergedType};
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::spec::TensorSpec;

/// Numbers of a tensor that are computed at a time.
const BLOCK_ELEMENTS: usize = 1 << 21;

/// What one adapter adds to one matrix: `scale x left x right`, `[rows, rank]` times `[rank, columns]`.
pub(super) struct Delta {
    left: Tensor,
    right: Tensor,
    scale: f64,
}

impl Delta {
    /// Of row-major A `[rank, input]` and B `[output, rank]` of a site.
    pub(super) fn new(shape: &SiteShape, a: &[f32], b: &[f32], weight: f32) -> Result<Self, ModelError> {
        let (rank, input, output) = (shape.rank as usize, shape.input as usize, shape.output as usize);
        let matrix = |values: &[f32], rows: usize, columns: usize| -> candle_core::Result<Tensor> {
            let wide: Vec<f64> = values.iter().map(|&value| f64::from(value)).collect();
            Tensor::from_vec(wide, (rows, columns), &Device::Cpu)
        };
        let made = || -> candle_core::Result<(Tensor, Tensor)> {
            let (a, b) = (matrix(a, rank, input)?, matrix(b, output, rank)?);
            // The embedding is stored by token, so its delta is the transpose of B A.
            Ok(if shape.site == Site::EMBED { (a.t()?.contiguous()?, b.t()?.contiguous()?) } else { (b, a) })
        };
        let (left, right) = made().map_err(failed)?;
        // As the engine has it: two factors in f32.
        Ok(Self { left, right, scale: f64::from(shape.scale * weight) })
    }

    /// Adds rows `first..` of it to `out`, whole rows of `columns`.
    fn add(&self, first: usize, columns: usize, out: &mut [f64]) -> Result<(), ModelError> {
        let product = || -> candle_core::Result<Vec<f64>> {
            let rows = self.left.narrow(0, first, out.len() / columns)?;
            rows.matmul(&self.right)?.flatten_all()?.to_vec1()
        };
        let product = product().map_err(failed)?;
        out.par_iter_mut().zip(product).for_each(|(out, value)| *out += self.scale * value);
        Ok(())
    }
}

#[expect(clippy::needless_pass_by_value, reason = "what `map_err` hands over")]
fn failed(error: candle_core::Error) -> ModelError {
    ModelError::Unsupported { message: format!("a product could not be computed: {error}") }
}

/// Writes `source` with `deltas` as `tensor`.
pub(super) fn write_tensor(
    checkpoint: &Checkpoint,
    source: &str,
    tensor: &TensorSpec,
    deltas: &[Delta],
    dtype: MergedType,
    writer: &mut super::shards::ShardWriter<'_>,
    progress: &mut MergeProgress<'_>,
) -> Result<(), ModelError> {
    let [rows, columns] = *tensor.shape.as_slice() else {
        let values: Vec<f64> = checkpoint.vector(source)?.into_iter().map(f64::from).collect();
        let mut bytes = vec![0; values.len() * dtype.bytes()];
        encode(&tensor.name, &values, dtype, &mut bytes)?;
        writer.write(&bytes)?;
        return writer.tell(progress);
    };
    let matrix = checkpoint.matrix(source)?;
    let block = (BLOCK_ELEMENTS / columns).clamp(1, rows);
    let mut sums = vec![0.0_f64; block * columns];
    let mut bytes = vec![0_u8; block * columns * dtype.bytes()];
    // Rows that a thread converts at a time.
    let share = (block / (4 * rayon::current_num_threads())).max(1);
    for first in (0..rows).step_by(block) {
        let count = block.min(rows - first);
        let sums = &mut sums[..count * columns];
        let bytes = &mut bytes[..count * columns * dtype.bytes()];
        sums.par_chunks_mut(share * columns).enumerate().try_for_each_init(Vec::new, |values, (place, sums)| {
            values.resize(sums.len(), 0.0);
            matrix.read(first + place * share, values)?;
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = f64::from(*value));
            Ok::<_, ModelError>(())
        })?;
        for delta in deltas {
            delta.add(first, columns, sums)?;
        }
        sums.par_chunks(share * columns)
            .zip(bytes.par_chunks_mut(share * columns * dtype.bytes()))
            .try_for_each(|(sums, bytes)| encode(&tensor.name, sums, dtype, bytes))?;
        writer.write(bytes)?;
        writer.tell(progress)?;
    }
    drop(matrix);
    checkpoint.discard(source);
    Ok(())
}

/// Rounds once. What was finite must stay so.
fn encode(name: &str, values: &[f64], dtype: MergedType, out: &mut [u8]) -> Result<(), ModelError> {
    let mut beyond = None;
    let mut check = |value: f64, rounded: f64| {
        if value.is_finite() && !rounded.is_finite() {
            beyond = Some(value);
        }
    };
    match dtype {
        MergedType::F32 => {
            for (out, &value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                let rounded = value as f32;
                check(value, f64::from(rounded));
                *out = rounded.to_le_bytes();
            }
        }
        MergedType::Bf16 => {
            for (out, &value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                let rounded = bf16::from_f32(sticky(value));
                check(value, rounded.to_f64());
                *out = rounded.to_le_bytes();
            }
        }
        MergedType::F16 => {
            for (out, &value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                let rounded = f16::from_f32(sticky(value));
                check(value, rounded.to_f64());
                *out = rounded.to_le_bytes();
            }
        }
    }
    match beyond {
        None => Ok(()),
        Some(value) => Err(ModelError::Unsupported {
            message: format!(
                "`{name}` would hold {value}, which is beyond {}'s range; merge with another dtype",
                dtype.name()
            ),
        }),
    }
}

/// A value in f32 for one more rounding to fewer bits: cut off, with the last bit set where something was lost, so that what
/// comes out is what rounding the value itself would give (round to odd; Boldo and Melquiond 2008).
fn sticky(value: f64) -> f32 {
    let nearest = value as f32;
    let wide = f64::from(nearest);
    if wide == value || value.is_nan() {
        return nearest;
    }
    let cut = nearest.to_bits() - u32::from(wide.abs() > value.abs());
    f32::from_bits(cut | 1)
}

#[cfg(test)]
mod tests {
    use super::{MergedType, encode};

    #[test]
    fn values_are_rounded_once() {
        // Halfway between two bf16 numbers, and a little more: by way of f32 it would be a tie, and go down.
        let value = 1.0 + 2.0_f64.powi(-8) + 2.0_f64.powi(-40);
        let mut bytes = [0; 2];
        encode("x", &[value], MergedType::Bf16, &mut bytes).unwrap();
        assert_eq!(half::bf16::from_le_bytes(bytes).to_f64(), 1.0 + 2.0_f64.powi(-7));
        for (value, wanted) in [
            (1.0 + 2.0_f64.powi(-8), 1.0),
            (1.0 + 2.0_f64.powi(-8) - 2.0_f64.powi(-40), 1.0),
            (-1.0 - 2.0_f64.powi(-8) - 2.0_f64.powi(-40), -1.0 - 2.0_f64.powi(-7)),
            (1.0 + 3.0 * 2.0_f64.powi(-8), 1.0 + 2.0_f64.powi(-6)),
            (2.0_f64.powi(-200), 0.0),
            (f64::INFINITY, f64::INFINITY),
        ] {
            encode("x", &[value], MergedType::Bf16, &mut bytes).unwrap();
            assert_eq!(half::bf16::from_le_bytes(bytes).to_f64(), wanted, "{value}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let message = encode("x.weight", &[1.0, 70000.0], MergedType::F16, &mut [0; 4]).unwrap_err().to_string();
        assert!(message.contains("`x.weight` would hold 70000, which is beyond float16's range"), "{message}");
        assert!(encode("x", &[f64::NAN], MergedType::F16, &mut [0; 2]).is_ok(), "what the base has, stays");
    }
}
