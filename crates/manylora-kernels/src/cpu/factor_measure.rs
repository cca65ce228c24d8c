//! What a load must know of an adapter's factors, in one pass over them: the largest magnitude of each, which tells
//! whether all are numbers that fit, and the Frobenius norm of their product, which tells how much the adapter does.
//!
//! The product is never formed: `||B A||_F^2 = sum of (B^T B) o (A A^T)`, two matrices of `[rank, rank]`. A block of
//! values is widened into the first-level cache, its largest magnitude taken on the way, and its part of the matrices
//! computed in f32; blocks are added up in f64.
#![expect(clippy::inline_always, reason = "inlined into the function that switches the level's instructions on")]

use super::level::SimdLevel;
use super::vector::{LANES, Vector8, VectorKernel, run};
use crate::backend::{FactorType, StoredFactor};

/// Columns of A that are widened at a time: sums of f32 are this long, divided by the lanes.
const COLUMNS: usize = 256;
/// Rows of B that are widened at a time: sums of f32 are this long.
const ROWS: usize = 128;

/// Magnitudes whose squares, and sums of squares, f32 holds with room to spare.
const SQUARED: std::ops::RangeInclusive<f32> = 1e-12..=1e15;
/// Least share of `||A||^2 ||B||^2` that the product's square may be: below, the factors cancel each other, and so do the
/// digits of f32.
const SHARE: f64 = 1e-3;

/// What [`FactorMeter::measure`] found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FactorMeasure {
    /// Largest magnitude of A; infinite or NaN if any value is.
    pub largest_a: f32,
    /// Largest magnitude of B; infinite or NaN if any value is.
    pub largest_b: f32,
    /// `||B A||_F` within 1e-5 of itself; None where f32 is not enough for that, because magnitudes are extreme or the
    /// factors cancel each other.
    pub product_norm: Option<f64>,
}

/// Measures factors; holds the memory for it, so that all sites of an adapter use the same.
#[derive(Clone, Debug)]
pub struct FactorMeter {
    level: SimdLevel,
    block: Vec<f32>,
    gram_a: Vec<f64>,
    gram_b: Vec<f64>,
}

impl FactorMeter {
    /// A meter that uses the instructions of `level`.
    pub const fn new(level: SimdLevel) -> Self {
        Self { level, block: Vec::new(), gram_a: Vec::new(), gram_b: Vec::new() }
    }

    /// Measures A `[rank, input]` and B `[output, rank]`; `rank` divides the length of both.
    pub fn measure(&mut self, a: StoredFactor<'_>, b: StoredFactor<'_>, rank: usize) -> FactorMeasure {
        let stride = rank.next_multiple_of(LANES);
        for gram in [&mut self.gram_a, &mut self.gram_b] {
            gram.clear();
            gram.resize(stride * stride, 0.0);
        }
        // Padding of ranks stays zero in both halves of the work.
        self.block.clear();
        self.block.resize(stride * COLUMNS.max(ROWS), 0.0);
        let (mut bits_a, mut bits_b) = (0, 0);
        run(self.level, RowProducts { a, rank, block: &mut self.block, gram: &mut self.gram_a, bits: &mut bits_a });
        self.block.fill(0.0);
        run(self.level, ColumnProducts { b, rank, block: &mut self.block, gram: &mut self.gram_b, bits: &mut bits_b });
        let (largest_a, largest_b) = (f32::from_bits(bits_a), f32::from_bits(bits_b));
        let product_norm = if bits_a == 0 || bits_b == 0 {
            Some(0.0)
        } else if SQUARED.contains(&largest_a) && SQUARED.contains(&largest_b) {
            self.norm(rank, stride)
        } else {
            None
        };
        FactorMeasure { largest_a, largest_b, product_norm }
    }

    fn norm(&self, rank: usize, stride: usize) -> Option<f64> {
        let (mut square, mut trace_a, mut trace_b) = (0.0, 0.0, 0.0);
        for i in 0..rank {
            let row = i * stride..i * stride + i + 1;
            let (row_a, row_b) = (&self.gram_a[row.clone()], &self.gram_b[row]);
            trace_a += row_a[i];
            trace_b += row_b[i];
            square += row_a[i] * row_b[i];
            square += 2.0 * row_a[..i].iter().zip(&row_b[..i]).map(|(a, b)| a * b).sum::<f64>();
        }
        (square > SHARE * trace_a * trace_b).then(|| square.sqrt())
    }
}

/// Widens to f32 and returns the largest of `bits` and the magnitudes' bits, which are in the order of magnitudes,
/// infinities and NaN above all numbers.
#[inline(always)]
fn widen(stored: StoredFactor<'_>, bits: u32, out: &mut [f32]) -> u32 {
    const MAGNITUDE: u32 = 0x7fff_ffff;
    let mut largest = bits;
    match stored.dtype {
        FactorType::Bf16 => {
            for (value, pair) in out.iter_mut().zip(stored.bytes.as_chunks::<2>().0) {
                let wide = u32::from(u16::from_le_bytes(*pair)) << 16;
                largest = largest.max(wide & MAGNITUDE);
                *value = f32::from_bits(wide);
            }
        }
        FactorType::F32 => {
            for (value, four) in out.iter_mut().zip(stored.bytes.as_chunks::<4>().0) {
                let wide = u32::from_le_bytes(*four);
                largest = largest.max(wide & MAGNITUDE);
                *value = f32::from_bits(wide);
            }
        }
        FactorType::F16 => {
            stored.widen(out);
            for value in &*out {
                largest = largest.max(value.to_bits() & MAGNITUDE);
            }
        }
    }
    largest
}

/// Inner products of the rows of A `[rank, length]`: the lower triangle of `[stride, stride]`.
struct RowProducts<'m> {
    a: StoredFactor<'m>,
    rank: usize,
    block: &'m mut [f32],
    gram: &'m mut [f64],
    bits: &'m mut u32,
}

/// Rows of a tile of products.
const TILE: usize = 4;
/// Columns of a tile of products.
const TILE_COLUMNS: usize = 2;

impl VectorKernel for RowProducts<'_> {
    #[inline(always)]
    fn run<V: Vector8>(self, vector: V) {
        let Self { a, rank, block, gram, bits } = self;
        let (length, stride) = (a.len() / rank, rank.next_multiple_of(LANES));
        let mut largest = 0;
        for first in (0..length).step_by(COLUMNS) {
            let width = COLUMNS.min(length - first);
            let padded = width.next_multiple_of(LANES);
            for (row, out) in block.chunks_exact_mut(COLUMNS).take(rank).enumerate() {
                let start = row * length + first;
                largest = widen(a.part(start..start + width), largest, &mut out[..width]);
                out[width..padded].fill(0.0);
            }
            let row = |index: usize| block[index * COLUMNS..][..padded].as_chunks::<LANES>().0;
            for i in (0..rank).step_by(TILE) {
                for j in (0..i + TILE).step_by(TILE_COLUMNS) {
                    let left = [row(i), row(i + 1), row(i + 2), row(i + 3)];
                    let right = [row(j), row(j + 1)];
                    let mut sums = [[vector.splat(0.0); TILE_COLUMNS]; TILE];
                    for step in 0..padded / LANES {
                        let right = right.map(|row| vector.load(&row[step]));
                        for (sums, row) in sums.iter_mut().zip(&left) {
                            let left = vector.load(&row[step]);
                            sums[0] = vector.mul_add(left, right[0], sums[0]);
                            sums[1] = vector.mul_add(left, right[1], sums[1]);
                        }
                    }
                    for (row, sums) in sums.iter().enumerate() {
                        let gram = &mut gram[(i + row) * stride + j..][..TILE_COLUMNS];
                        gram[0] += f64::from(vector.sum(sums[0]));
                        gram[1] += f64::from(vector.sum(sums[1]));
                    }
                }
            }
        }
        *bits = largest;
    }
}

/// Inner products of the columns of B `[length, rank]`: the lower triangle of `[stride, stride]`, in tiles of eight.
struct ColumnProducts<'m> {
    b: StoredFactor<'m>,
    rank: usize,
    block: &'m mut [f32],
    gram: &'m mut [f64],
    bits: &'m mut u32,
}

impl VectorKernel for ColumnProducts<'_> {
    #[inline(always)]
    fn run<V: Vector8>(self, vector: V) {
        let Self { b, rank, block, gram, bits } = self;
        let (length, stride) = (b.len() / rank, rank.next_multiple_of(LANES));
        let mut largest = 0;
        for first in (0..length).step_by(ROWS) {
            let count = ROWS.min(length - first);
            if rank == stride {
                let part = b.part(first * rank..(first + count) * rank);
                largest = widen(part, largest, &mut block[..count * rank]);
            } else {
                for (row, out) in (first..first + count).zip(block.chunks_exact_mut(stride)) {
                    largest = widen(b.part(row * rank..(row + 1) * rank), largest, &mut out[..rank]);
                }
            }
            for i in (0..stride).step_by(LANES) {
                for j in (0..=i).step_by(LANES) {
                    let mut sums = [vector.splat(0.0); LANES];
                    for row in block[..count * stride].chunks_exact(stride) {
                        let (Some(left), Some(right)) = (row[i..].first_chunk(), row[j..].first_chunk()) else {
                            continue;
                        };
                        let left: &[f32; LANES] = left;
                        let right = vector.load(right);
                        for (sum, left) in sums.iter_mut().zip(left) {
                            *sum = vector.mul_add(vector.splat(*left), right, *sum);
                        }
                    }
                    for (row, sums) in sums.iter().enumerate() {
                        let gram = &mut gram[(i + row) * stride + j..][..LANES];
                        for (gram, sum) in gram.iter_mut().zip(vector.to_array(*sums)) {
                            *gram += f64::from(sum);
                        }
                    }
                }
            }
        }
        *bits = largest;
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::{FactorMeasure, FactorMeter};
    use crate::backend::{FactorType, StoredFactor};
    use crate::cpu::level::SimdLevel;

    fn round(value: f32, dtype: FactorType) -> f32 {
        match dtype {
            FactorType::Bf16 => bf16::from_f32(value).to_f32(),
            FactorType::F16 => f16::from_f32(value).to_f32(),
            FactorType::F32 => value,
        }
    }

    fn bytes(values: &[f32], dtype: FactorType) -> Vec<u8> {
        match dtype {
            FactorType::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
            FactorType::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
            FactorType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }

    fn measure(level: SimdLevel, a: &[f32], b: &[f32], rank: usize, dtype: FactorType) -> FactorMeasure {
        let (a, b) = (bytes(a, dtype), bytes(b, dtype));
        let [a, b] = [&a, &b].map(|bytes| StoredFactor { dtype, bytes });
        FactorMeter::new(level).measure(a, b, rank)
    }

    fn values(count: usize, mut seed: u64) -> Vec<f32> {
        let mut next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    fn reference(a: &[f32], b: &[f32], rank: usize) -> f64 {
        let input = a.len() / rank;
        let mut square = 0.0;
        for row in b.chunks_exact(rank) {
            for column in 0..input {
                let element: f64 = (0..rank).map(|r| f64::from(row[r]) * f64::from(a[r * input + column])).sum();
                square += element * element;
            }
        }
        square.sqrt()
    }

    #[test]
    fn norms_are_those_of_the_product() {
        let shapes = [
            (1, 1, 1),
            (2, 3, 130),
            (3, 257, 5),
            (4, 256, 128),
            (5, 700, 64),
            (8, 40, 300),
            (16, 300, 530),
            (17, 33, 40),
            (64, 96, 80),
            (100, 120, 110),
        ];
        for level in SimdLevel::available() {
            for dtype in [FactorType::Bf16, FactorType::F16, FactorType::F32] {
                for (rank, input, output) in shapes {
                    let rounded = |count, seed, scale: f32| -> Vec<f32> {
                        values(count, seed).into_iter().map(|value| round(value * scale, dtype)).collect()
                    };
                    let (a, b) = (rounded(rank * input, 3, 0.03), rounded(output * rank, 5, 2.0));
                    let found = measure(level, &a, &b, rank, dtype);
                    let norm = found.product_norm.unwrap();
                    let wanted = reference(&a, &b, rank);
                    assert!((norm - wanted).abs() <= 1e-5 * wanted, "{level} {dtype:?} {rank}: {norm} not {wanted}");
                    let largest = |values: &[f32]| values.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
                    assert_eq!((found.largest_a, found.largest_b), (largest(&a), largest(&b)));
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_is_the_largest() {
        for level in SimdLevel::available() {
            for dtype in [FactorType::Bf16, FactorType::F16, FactorType::F32] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    for position in [0, 5, 299] {
                        let (mut a, mut b) = (values(300, 1), values(300, 2));
                        a[position] = bad;
                        let found = measure(level, &a, &b, 3, dtype);
                        assert!(!found.largest_a.is_finite() && found.largest_b <= 1.0 && found.product_norm.is_none());
                        a[position] = 0.5;
                        b[position] = bad;
                        let found = measure(level, &a, &b, 3, dtype);
                        assert!(found.largest_a <= 1.0 && !found.largest_b.is_finite() && found.product_norm.is_none());
                    }
                }
            }
        }
    }

    #[test]
    fn norms_that_f32_cannot_tell_are_left_open() {
        for level in SimdLevel::available() {
            let norm = |a: &[f32], b: &[f32]| measure(level, a, b, 2, FactorType::F32).product_norm;
            assert_eq!(norm(&[1.0, -2.0, 3.0, 4.0], &[0.0; 6]), Some(0.0), "a zero B has no effect");
            assert_eq!(norm(&[-0.0; 4], &[1.0; 6]), Some(0.0));
            assert_eq!(norm(&[1.0, 2.0, 1.0, 2.0], &[3.0, -3.0, 5.0, -5.0]), None, "the ranks cancel each other");
            assert_eq!(norm(&[1e-30; 4], &[1.0; 6]), None);
            assert_eq!(norm(&[1.0; 4], &[1e30; 6]), None);
        }
    }
}
