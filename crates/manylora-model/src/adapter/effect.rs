//! The size of an adapter's effect on a module: the Frobenius norm of scale x B A.

/// Columns (of A) or rows (of B) that are widened to f64 at a time.
const BLOCK: usize = 256;

/// `||B A||_F` of row-major A `[rank, input]` and B `[output, rank]`, in f64.
///
/// The product is never formed: `||B A||_F^2 = sum of (B^T B) o (A A^T)`, two matrices of `[rank, rank]`.
pub(super) fn product_norm(a: &[f32], b: &[f32], rank: usize) -> f64 {
    let (input, output) = (a.len() / rank, b.len() / rank);
    let gram_a = gram(rank, input, |r, column| a[r * input + column]);
    let gram_b = gram(rank, output, |r, row| b[row * rank + r]);
    let mut square = 0.0;
    for i in 0..rank {
        let products = |j: usize| gram_a[i * rank + j] * gram_b[i * rank + j];
        square += products(i) + 2.0 * (0..i).map(products).sum::<f64>();
    }
    square.max(0.0).sqrt()
}

/// Lower triangle of the inner products of `rank` vectors of `length` elements.
fn gram(rank: usize, length: usize, element: impl Fn(usize, usize) -> f32) -> Vec<f64> {
    let mut gram = vec![0.0; rank * rank];
    let mut block = vec![0.0_f64; rank * BLOCK];
    for first in (0..length).step_by(BLOCK) {
        let width = BLOCK.min(length - first);
        for (r, row) in block.chunks_exact_mut(BLOCK).enumerate() {
            row[..width].iter_mut().enumerate().for_each(|(i, value)| *value = element(r, first + i).into());
        }
        for i in 0..rank {
            let left = &block[i * BLOCK..i * BLOCK + width];
            for j in 0..=i {
                gram[i * rank + j] += dot(left, &block[j * BLOCK..j * BLOCK + width]);
            }
        }
    }
    gram
}

/// Inner product in four partial sums, so that it runs at the speed of the loads.
fn dot(left: &[f64], right: &[f64]) -> f64 {
    let mut sums = [0.0; 4];
    let (left_fours, right_fours) = (left.chunks_exact(4), right.chunks_exact(4));
    let rest: f64 = left_fours.remainder().iter().zip(right_fours.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in left_fours.zip(right_fours) {
        for lane in 0..4 {
            sums[lane] += x[lane] * y[lane];
        }
    }
    sums.iter().sum::<f64>() + rest
}
