//! How many directions an adapter uses: the singular values of B A, without B A.
//!
//! With the triangles of two QR decompositions, A^T = Q_a R_a and B = Q_b R_b, B A is Q_b (R_b R_a^T) Q_a^T: its singular
//! values are those of a matrix of `[rank, rank]`. The factors are taken as they are stored and everything is computed in f64,
//! a block of rows at a time, so that values are right to about 1e-15 of the largest.

use serde::Serialize;

/// Rows that a triangle takes up at a time.
const BLOCK: usize = 256;
/// Sums that a product keeps side by side.
const LANES: usize = 8;

/// Singular values of one module's B A, the scale left out, and two ways to count those that matter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spectrum {
    /// Largest first, as many as the least of rank, input and output.
    pub singular_values: Vec<f64>,
    /// How many are above [`Self::tolerance`] times the largest.
    pub numerical_rank: usize,
    /// exp of the entropy of the singular values as shares of their sum (Roy and Vetterli 2007): how many of equal size would
    /// be as spread out. 0 where all are 0.
    pub entropy_rank: f64,
}

impl Spectrum {
    /// Of row-major A `[rank, input]` and B `[output, rank]`.
    pub fn of(a: &[f32], b: &[f32], rank: usize) -> Self {
        let (input, output) = (a.len() / rank, b.len() / rank);
        let wide = triangle(rank, input, |row, column| a[column * input + row]);
        let tall = triangle(rank, output, |row, column| b[row * rank + column]);
        let mut core = Columns::new(rank, rank);
        for column in 0..rank {
            for row in 0..rank {
                let sum = (row.max(column)..rank).map(|k| tall.values[k * rank + row] * wide.values[k * rank + column]);
                core.values[column * rank + row] = sum.sum();
            }
        }
        let mut singular_values = of_bidiagonal(&bidiagonal(core));
        singular_values.truncate(rank.min(input).min(output));
        let largest = singular_values.first().copied().unwrap_or_default();
        let total: f64 = singular_values.iter().sum();
        let least = largest * Self::tolerance(input, output);
        let numerical_rank = singular_values.iter().filter(|&&value| value > least).count();
        let shares = singular_values.iter().map(|value| value / total).filter(|&share| share > 0.0);
        let entropy_rank = if total > 0.0 { (-shares.map(|share| share * share.ln()).sum::<f64>()).exp() } else { 0.0 };
        Self { singular_values, numerical_rank, entropy_rank }
    }

    /// What is below so much of the largest cannot be told from zero in a float32 matrix of `[output, input]`: its larger side
    /// times float32's epsilon, as numpy and torch have it by default.
    pub fn tolerance(input: usize, output: usize) -> f64 {
        input.max(output) as f64 * f64::from(f32::EPSILON)
    }
}

/// A matrix whose columns lie one behind the other.
struct Columns {
    rows: usize,
    values: Vec<f64>,
}

impl Columns {
    fn new(rows: usize, columns: usize) -> Self {
        Self { rows, values: vec![0.0; rows * columns] }
    }

    fn column(&self, index: usize) -> &[f64] {
        &self.values[index * self.rows..(index + 1) * self.rows]
    }

    fn column_mut(&mut self, index: usize) -> &mut [f64] {
        &mut self.values[index * self.rows..(index + 1) * self.rows]
    }
}

fn dot(left: &[f64], right: &[f64]) -> f64 {
    let (left, left_rest) = left.as_chunks::<LANES>();
    let (right, right_rest) = right.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (left, right) in left.iter().zip(right) {
        for lane in 0..LANES {
            sums[lane] += left[lane] * right[lane];
        }
    }
    sums.iter().sum::<f64>() + left_rest.iter().zip(right_rest).map(|(left, right)| left * right).sum::<f64>()
}

fn add_scaled(out: &mut [f64], factor: f64, values: &[f64]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out += factor * value;
    }
}

/// The reflection that takes `(first, rest)` to `(beta, 0)`: tau and beta; `rest` becomes the reflection's vector behind a
/// leading 1. None where there is nothing to take away.
fn reflection(first: f64, rest: &mut [f64]) -> Option<(f64, f64)> {
    let square = dot(rest, rest);
    if square <= 0.0 {
        return None;
    }
    let beta = -(first * first + square).sqrt().copysign(first);
    let pivot = first - beta;
    for value in rest.iter_mut() {
        *value /= pivot;
    }
    Some(((beta - first) / beta, beta))
}

/// R `[rank, rank]` of the QR decomposition of a matrix `[rows, rank]`, which is taken up block by block.
fn triangle(rank: usize, rows: usize, value: impl Fn(usize, usize) -> f32) -> Columns {
    let mut upper = Columns::new(rank, rank);
    let mut block = Columns::new(BLOCK.min(rows), rank);
    let mut vector = Vec::new();
    for first in (0..rows).step_by(BLOCK) {
        let count = BLOCK.min(rows - first);
        for column in 0..rank {
            for (row, out) in block.column_mut(column)[..count].iter_mut().enumerate() {
                *out = f64::from(value(first + row, column));
            }
        }
        for pivot in 0..rank {
            vector.clear();
            vector.extend_from_slice(&block.column(pivot)[..count]);
            let Some((tau, beta)) = reflection(upper.column(pivot)[pivot], &mut vector) else { continue };
            upper.column_mut(pivot)[pivot] = beta;
            for column in pivot + 1..rank {
                let below = &mut block.column_mut(column)[..count];
                let above = &mut upper.column_mut(column)[pivot];
                let product = tau * (*above + dot(&vector, below));
                *above -= product;
                add_scaled(below, -product, &vector);
            }
        }
    }
    upper
}

/// Diagonal and superdiagonal, alternating, of the bidiagonal matrix with the singular values of a square one (Golub and
/// Kahan 1965).
fn bidiagonal(mut matrix: Columns) -> Vec<f64> {
    let size = matrix.rows;
    let mut found = Vec::with_capacity(2 * size);
    let (mut vector, mut sums) = (Vec::new(), Vec::new());
    for step in 0..size {
        let first = matrix.column(step)[step];
        vector.clear();
        vector.extend_from_slice(&matrix.column(step)[step + 1..]);
        let left = reflection(first, &mut vector);
        found.push(left.map_or(first, |(_, beta)| beta));
        if let Some((tau, _)) = left {
            for column in step + 1..size {
                let values = &mut matrix.column_mut(column)[step..];
                let product = tau * (values[0] + dot(&vector, &values[1..]));
                values[0] -= product;
                add_scaled(&mut values[1..], -product, &vector);
            }
        }
        if step + 1 == size {
            break;
        }
        // The same from the right, with the row behind the diagonal.
        let first = matrix.column(step + 1)[step];
        vector.clear();
        vector.extend((step + 2..size).map(|column| matrix.column(column)[step]));
        let right = reflection(first, &mut vector);
        found.push(right.map_or(first, |(_, beta)| beta));
        if let Some((tau, _)) = right {
            sums.clear();
            sums.extend_from_slice(&matrix.column(step + 1)[step + 1..]);
            for (factor, column) in vector.iter().zip(step + 2..) {
                add_scaled(&mut sums, *factor, &matrix.column(column)[step + 1..]);
            }
            add_scaled(&mut matrix.column_mut(step + 1)[step + 1..], -tau, &sums);
            for (factor, column) in vector.iter().zip(step + 2..) {
                add_scaled(&mut matrix.column_mut(column)[step + 1..], -tau * factor, &sums);
            }
        }
    }
    found
}

/// Singular values of a bidiagonal matrix, largest first: they and their negatives are the eigenvalues of the symmetric
/// tridiagonal matrix with a zero diagonal and these entries beside it, which bisection finds one by one.
fn of_bidiagonal(entries: &[f64]) -> Vec<f64> {
    const HALVINGS: usize = 64;
    let size = entries.len().div_ceil(2);
    let squares: Vec<f64> = entries.iter().map(|entry| entry * entry).collect();
    let largest = squares.iter().fold(0.0, |most: f64, square| most.max(*square));
    if largest <= 0.0 {
        return vec![0.0; size];
    }
    let smallest = f64::MIN_POSITIVE * largest.max(1.0);
    // How many are at least `bound`: by Sylvester, as many as the matrix less `bound` has pivots that are not negative.
    let at_least = |bound: f64| {
        let mut pivot = -bound;
        let mut negative = 1;
        for square in &squares {
            if pivot.abs() < smallest {
                pivot = -smallest;
            }
            pivot = -bound - square / pivot;
            negative += usize::from(pivot < 0.0);
        }
        2 * size - negative
    };
    // No eigenvalue is larger than the largest sum of a row's entries.
    let most = 2.0 * largest.sqrt();
    let mut upper = most;
    (1..=size)
        .map(|wanted| {
            let mut lower = 0.0;
            for _ in 0..HALVINGS {
                let middle = f64::midpoint(lower, upper);
                if at_least(middle) >= wanted { lower = middle } else { upper = middle }
            }
            // The next one is no larger than this one can be.
            lower
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::Spectrum;

    /// Singular values by rotations of the columns (one-sided Jacobi) of the whole product: another way, for small matrices.
    fn reference(a: &[f32], b: &[f32], rank: usize) -> Vec<f64> {
        let (input, output) = (a.len() / rank, b.len() / rank);
        let element = |row: usize, column: usize| -> f64 {
            (0..rank).map(|r| f64::from(b[row * rank + r]) * f64::from(a[r * input + column])).sum()
        };
        let mut columns: Vec<Vec<f64>> =
            (0..input).map(|column| (0..output).map(|row| element(row, column)).collect()).collect();
        let product = |one: &[f64], other: &[f64]| -> f64 { one.iter().zip(other).map(|(x, y)| x * y).sum() };
        for _ in 0..40 {
            for p in 0..input {
                for q in p + 1..input {
                    let (alpha, beta) = (product(&columns[p], &columns[p]), product(&columns[q], &columns[q]));
                    let gamma = product(&columns[p], &columns[q]);
                    if gamma.abs() <= 1e-300 {
                        continue;
                    }
                    let zeta = (beta - alpha) / (2.0 * gamma);
                    let tangent = 1.0_f64.copysign(zeta) / (zeta.abs() + (1.0 + zeta * zeta).sqrt());
                    let cosine = 1.0 / (1.0 + tangent * tangent).sqrt();
                    let (before, from_q) = columns.split_at_mut(q);
                    for (one, other) in before[p].iter_mut().zip(&mut from_q[0]) {
                        let (x, y) = (*one, *other);
                        (*one, *other) = (cosine * (x - tangent * y), cosine * (tangent * x + y));
                    }
                }
            }
        }
        let mut values: Vec<f64> = columns.iter().map(|column| product(column, column).sqrt()).collect();
        values.sort_by(|x, y| y.total_cmp(x));
        values.truncate(rank.min(input).min(output));
        values
    }

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        let mut state = seed as u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    fn close(found: &[f64], wanted: &[f64], what: &str) {
        assert_eq!(found.len(), wanted.len(), "{what}");
        for (found, wanted_one) in found.iter().zip(wanted) {
            assert!((found - wanted_one).abs() <= 1e-13 * wanted[0], "{what}: {found} not {wanted_one}");
        }
    }

    #[test]
    fn values_are_those_of_the_product() {
        for (rank, input, output) in
            [(1, 1, 1), (1, 7, 300), (2, 3, 130), (3, 20, 5), (5, 12, 64), (8, 30, 8), (16, 9, 40), (33, 7, 9)]
        {
            let (a, b) = (numbers(rank * input, 3), numbers(output * rank, 4));
            let found = Spectrum::of(&a, &b, rank);
            close(&found.singular_values, &reference(&a, &b, rank), &format!("{rank} {input} {output}"));
            assert!(found.singular_values.is_sorted_by(|one, next| one >= next));
        }
    }

    #[test]
    fn directions_that_are_used_twice_count_once() {
        let (rank, input, output) = (6, 40, 30);
        let (mut a, b) = (numbers(rank * input, 5), numbers(output * rank, 6));
        // Rows 3 and 4 are the first one again, row 5 is nothing.
        for (row, factor) in [(3, 1.0), (4, -2.0), (5, 0.0)] {
            for column in 0..input {
                a[row * input + column] = factor * a[column];
            }
        }
        let found = Spectrum::of(&a, &b, rank);
        close(&found.singular_values, &reference(&a, &b, rank), "rank 3 of 6");
        assert_eq!(found.numerical_rank, 3);
        assert!(found.entropy_rank > 1.0 && found.entropy_rank <= 3.0 + 1e-9, "{}", found.entropy_rank);
    }

    #[test]
    fn equal_directions_and_none() {
        // Four rows and columns of a unit matrix, times 2.
        let (a, b): (Vec<f32>, Vec<f32>) = (0..16).map(|i| if i % 5 == 0 { (1.0, 2.0) } else { (0.0, 0.0) }).unzip();
        let found = Spectrum::of(&a, &b, 4);
        close(&found.singular_values, &[2.0; 4], "twice a unit matrix");
        assert_eq!(found.numerical_rank, 4);
        assert!((found.entropy_rank - 4.0).abs() < 1e-12);
        let none = Spectrum::of(&a, &[0.0; 16], 4);
        assert_eq!((none.singular_values, none.numerical_rank, none.entropy_rank), (vec![0.0; 4], 0, 0.0));
    }
}
