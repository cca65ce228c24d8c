//! The size of an adapter's effect on a module: the Frobenius norm of scale x B A.

/// Columns (of A) or rows (of B) that are widened to f64 at a time.
const BLOCK: usize = 128;
/// Vectors whose products with others are summed together, so that each load serves several.
const TILE: usize = 4;

/// `||B A||_F` of row-major A `[rank, input]` and B `[output, rank]`, in f64.
///
/// The product is never formed: `||B A||_F^2 = sum of (B^T B) o (A A^T)`, two matrices of `[rank, rank]`.
pub(super) fn product_norm(a: &[f32], b: &[f32], rank: usize) -> f64 {
    let stride = rank.next_multiple_of(TILE);
    let gram_a = gram_of_rows(a, rank, stride);
    let gram_b = gram_of_columns(b, rank, stride);
    let mut square = 0.0;
    for i in 0..rank {
        let products = |j: usize| gram_a[i * stride + j] * gram_b[i * stride + j];
        square += products(i) + 2.0 * (0..i).map(products).sum::<f64>();
    }
    square.max(0.0).sqrt()
}

/// Inner products of the rows of `[rank, length]`: a lower triangle of tiles, rows padded to `stride`.
fn gram_of_rows(values: &[f32], rank: usize, stride: usize) -> Vec<f64> {
    let length = values.len() / rank;
    let mut gram = vec![0.0; stride * stride];
    let mut block = vec![0.0_f64; stride * BLOCK];
    for first in (0..length).step_by(BLOCK) {
        let width = BLOCK.min(length - first);
        let padded = width.next_multiple_of(TILE);
        for (row, values) in block.chunks_exact_mut(BLOCK).zip(values.chunks_exact(length)) {
            for (out, value) in row.iter_mut().zip(&values[first..first + width]) {
                *out = f64::from(*value);
            }
            row[width..padded].fill(0.0);
        }
        let row = |index: usize| &block[index * BLOCK..index * BLOCK + padded];
        for i in (0..stride).step_by(2) {
            for j in (0..=i).step_by(2) {
                let sums = dots([row(i), row(i + 1)], [row(j), row(j + 1)]);
                for (row, sums) in sums.iter().enumerate() {
                    for (column, sum) in sums.iter().enumerate() {
                        gram[(i + row) * stride + j + column] += sum;
                    }
                }
            }
        }
    }
    gram
}

/// Inner products of two vectors with two others, each in four partial sums; lengths are multiples of four.
fn dots(left: [&[f64]; 2], right: [&[f64]; 2]) -> [[f64; 2]; 2] {
    let mut sums = [[[0.0; TILE]; 2]; 2];
    let left = left[0].as_chunks::<TILE>().0.iter().zip(left[1].as_chunks::<TILE>().0);
    let right = right[0].as_chunks::<TILE>().0.iter().zip(right[1].as_chunks::<TILE>().0);
    for ((l0, l1), (r0, r1)) in left.zip(right) {
        for lane in 0..TILE {
            sums[0][0][lane] += l0[lane] * r0[lane];
            sums[0][1][lane] += l0[lane] * r1[lane];
            sums[1][0][lane] += l1[lane] * r0[lane];
            sums[1][1][lane] += l1[lane] * r1[lane];
        }
    }
    sums.map(|row| row.map(|lanes| lanes.iter().sum()))
}

/// Inner products of the columns of `[length, rank]`: a lower triangle of tiles, rows padded to `stride`.
fn gram_of_columns(values: &[f32], rank: usize, stride: usize) -> Vec<f64> {
    let mut gram = vec![0.0; stride * stride];
    let mut block = vec![0.0_f64; stride * BLOCK];
    for rows in values.chunks(rank * BLOCK) {
        let count = rows.len() / rank;
        for (out, row) in block.chunks_exact_mut(stride).zip(rows.chunks_exact(rank)) {
            for (out, value) in out.iter_mut().zip(row) {
                *out = f64::from(*value);
            }
        }
        for i in (0..stride).step_by(TILE) {
            for j in (0..=i).step_by(TILE) {
                let mut sums = [[0.0; TILE]; TILE];
                for row in block[..count * stride].chunks_exact(stride) {
                    let (Some(left), Some(right)) = (row[i..].first_chunk(), row[j..].first_chunk()) else { continue };
                    add_products(&mut sums, left, right);
                }
                for (row, sums) in sums.iter().enumerate() {
                    for (column, sum) in sums.iter().enumerate() {
                        gram[(i + row) * stride + j + column] += sum;
                    }
                }
            }
        }
    }
    gram
}

#[inline]
fn add_products(sums: &mut [[f64; TILE]; TILE], left: &[f64; TILE], right: &[f64; TILE]) {
    for (sums, left) in sums.iter_mut().zip(left) {
        for (sum, right) in sums.iter_mut().zip(right) {
            *sum += left * right;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::product_norm;

    #[test]
    fn norms_are_those_of_the_product() {
        for (rank, input, output) in [(1, 1, 1), (2, 3, 130), (3, 257, 5), (5, 128, 64), (16, 300, 40), (33, 7, 9)] {
            let value = |index: usize| ((index * 7919 % 1000) as f32 - 499.5) / 500.0;
            let a: Vec<f32> = (0..rank * input).map(value).collect();
            let b: Vec<f32> = (0..output * rank).map(|index| value(index + 13)).collect();
            let mut square = 0.0;
            for row in 0..output {
                for column in 0..input {
                    let element: f64 =
                        (0..rank).map(|r| f64::from(b[row * rank + r]) * f64::from(a[r * input + column])).sum();
                    square += element * element;
                }
            }
            let norm = product_norm(&a, &b, rank);
            assert!((norm - square.sqrt()).abs() <= 1e-11 * norm, "{rank} {input} {output}: {norm}");
        }
        assert!(product_norm(&[1.0, -2.0], &[0.0; 6], 2) <= 0.0, "a zero B has no effect");
    }
}
