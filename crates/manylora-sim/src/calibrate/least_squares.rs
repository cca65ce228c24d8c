//! Least squares with coefficients that are not negative: more work never takes less time.

/// A problem that rows are added to, one by one; memory is that of its columns, squared.
#[derive(Clone, Debug)]
pub(super) struct LeastSquares {
    columns: usize,
    /// The matrix's product with itself, row by row, and with the right side.
    products: Vec<f64>,
    right: Vec<f64>,
}

/// Sweeps over all columns; each brings the sum of squares down.
const SWEEPS: usize = 20_000;

impl LeastSquares {
    pub(super) fn new(columns: usize) -> Self {
        Self { columns, products: vec![0.0; columns * columns], right: vec![0.0; columns] }
    }

    /// Adds `row . x = value`, counted `weight` times.
    pub(super) fn add(&mut self, row: &[f64], value: f64, weight: f64) {
        for (i, &a) in row.iter().enumerate() {
            self.right[i] += weight * a * value;
            for (j, &b) in row.iter().enumerate() {
                self.products[i * self.columns + j] += weight * a * b;
            }
        }
    }

    /// The coefficients, by coordinate descent: each in turn takes the value that is best for it as the others are, or 0. That
    /// ends at the one lowest sum of squares, because the set of coefficients and the sum are convex.
    pub(super) fn solve(&self) -> Vec<f64> {
        let n = self.columns;
        let mut x = vec![0.0; n];
        for _ in 0..SWEEPS {
            let mut moved = 0.0_f64;
            for i in 0..n {
                let diagonal = self.products[i * n + i];
                if diagonal <= 0.0 {
                    continue;
                }
                let row = &self.products[i * n..(i + 1) * n];
                let sum: f64 = row.iter().zip(&x).map(|(a, x)| a * x).sum();
                let next = (x[i] + (self.right[i] - sum) / diagonal).max(0.0);
                // How far it moves in the unit of what is fitted.
                moved = moved.max((next - x[i]).abs() * diagonal.sqrt());
                x[i] = next;
            }
            let scale = self.right.iter().zip(&x).map(|(b, x)| b * x).sum::<f64>().sqrt();
            if moved <= 1e-12 * scale {
                break;
            }
        }
        x
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_data_gives_its_coefficients() {
        let mut problem = LeastSquares::new(3);
        for number in 0..40 {
            let (a, b) = (f64::from(number % 7), f64::from(number * number % 11));
            problem.add(&[1.0, a, b], 0.5 + 2.0 * a + 0.25 * b, 1.0 + a);
        }
        for (found, wanted) in problem.solve().iter().zip([0.5, 2.0, 0.25]) {
            assert!((found - wanted).abs() < 1e-6, "{found} {wanted}");
        }
    }

    #[test]
    fn what_would_be_negative_is_zero_and_the_rest_is_best_without_it() {
        let mut problem = LeastSquares::new(2);
        for number in 1..20 {
            let a = f64::from(number);
            problem.add(&[a, f64::from(number % 3)], 3.0 * a - f64::from(number % 3), 1.0);
        }
        let found = problem.solve();
        assert_eq!(found[1], 0.0);
        let (over, under) = (1..20).fold((0.0, 0.0), |(over, under), number| {
            let (a, b) = (f64::from(number), f64::from(number % 3));
            (over + a * (3.0 * a - b), under + a * a)
        });
        assert!((found[0] - over / under).abs() < 1e-9);
        assert_eq!(LeastSquares::new(2).solve(), [0.0, 0.0]);
    }
}
