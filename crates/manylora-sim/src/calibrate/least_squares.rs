//! Least squares with coefficients that are not negative: more work never takes less time.

/// A problem that rows are added to, one by one; memory is that of its columns, squared.
#[derive(Clone, Debug)]
pub(super) struct LeastSquares {
    columns: usize,
    /// The matrix's product with itself, row by row, and with the right side.
    products: Vec<f64>,
    right: Vec<f64>,
}

/// What is added to the diagonal of unit columns, so that columns that say the same have one solution.
const RIDGE: f64 = 1e-12;
/// A gradient of unit columns below this share of the right side is none.
const FLAT: f64 = 1e-10;

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

    /// The coefficients, by the active sets of Lawson and Hanson (1974, chapter 23): columns come in one by one, that of the
    /// steepest descent first, and leave again where their coefficient would be negative.
    pub(super) fn solve(&self) -> Vec<f64> {
        let n = self.columns;
        let scale: Vec<f64> = (0..n).map(|i| self.products[i * n + i].sqrt()).collect();
        let used: Vec<usize> = (0..n).filter(|&i| scale[i] > 0.0).collect();
        let product =
            |i: usize, j: usize| self.products[i * n + j] / (scale[i] * scale[j]) + if i == j { RIDGE } else { 0.0 };
        let right: Vec<f64> = (0..n).map(|i| if scale[i] > 0.0 { self.right[i] / scale[i] } else { 0.0 }).collect();
        let flat = FLAT * right.iter().fold(0.0_f64, |most, value| most.max(value.abs()));
        let mut x = vec![0.0; n];
        let mut inside: Vec<usize> = Vec::new();
        // Those that went as they came, because others say the same.
        let mut barred: Vec<usize> = Vec::new();
        // Each turn lowers the sum of squares; the bound is for what rounding could keep turning.
        for _ in 0..10 * n {
            let gradient = |i: usize| right[i] - inside.iter().map(|&j| product(i, j) * x[j]).sum::<f64>();
            let outside = used.iter().filter(|i| !inside.contains(i) && !barred.contains(i));
            let steep = outside.map(|&i| (gradient(i), i)).filter(|one| one.0 > flat);
            let Some((_, next)) = steep.max_by(|a, b| a.0.total_cmp(&b.0)) else { break };
            inside.push(next);
            loop {
                let wanted = solve_positive(inside.len(), |i, j| product(inside[i], inside[j]), |i| right[inside[i]]);
                // How far each may go towards what is wanted before it is negative.
                let room = |place: usize| {
                    let (x, wanted) = (x[inside[place]], wanted[place]);
                    if wanted > 0.0 { f64::INFINITY } else { x / (x - wanted).max(f64::MIN_POSITIVE) }
                };
                let rooms: Vec<f64> = (0..inside.len()).map(room).collect();
                let share = rooms.iter().copied().fold(1.0, f64::min);
                for (&i, wanted) in inside.iter().zip(&wanted) {
                    x[i] += share * (wanted - x[i]);
                }
                let goes = |place: usize| rooms[place] <= share;
                if !(0..inside.len()).any(goes) {
                    break;
                }
                for place in (0..inside.len()).rev().filter(|&place| goes(place)) {
                    x[inside.remove(place)] = 0.0;
                }
            }
            if inside.contains(&next) {
                barred.clear();
            } else {
                barred.push(next);
            }
        }
        x.iter().zip(&scale).map(|(x, scale)| if *scale > 0.0 { x / scale } else { 0.0 }).collect()
    }
}

/// Solves a system whose matrix is symmetric and positive, by Cholesky's factors.
fn solve_positive(n: usize, matrix: impl Fn(usize, usize) -> f64, right: impl Fn(usize) -> f64) -> Vec<f64> {
    let mut factor = vec![0.0; n * n];
    let mut x = vec![0.0; n];
    for i in 0..n {
        for j in 0..=i {
            let sum: f64 = (0..j).map(|k| factor[i * n + k] * factor[j * n + k]).sum();
            let rest = matrix(i, j) - sum;
            // Rounding can leave nothing of a column that others make up.
            factor[i * n + j] = if i == j { rest.max(RIDGE).sqrt() } else { rest / factor[j * n + j] };
        }
        let sum: f64 = (0..i).map(|k| factor[i * n + k] * x[k]).sum();
        x[i] = (right(i) - sum) / factor[i * n + i];
    }
    for i in (0..n).rev() {
        let sum: f64 = (i + 1..n).map(|k| factor[k * n + i] * x[k]).sum();
        x[i] = (x[i] - sum) / factor[i * n + i];
    }
    x
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

    #[test]
    fn columns_that_say_the_same_share_what_they_say() {
        let mut problem = LeastSquares::new(4);
        for number in 1..30 {
            let (a, b) = (f64::from(number), f64::from(number * number % 13));
            problem.add(&[a, 2.0 * a, 0.0, b], 4.0 * a + b, 1.0);
        }
        let found = problem.solve();
        assert!(found.iter().all(|&one| one >= 0.0) && found[2] == 0.0, "{found:?}");
        assert!((found[0] + 2.0 * found[1] - 4.0).abs() < 1e-6 && (found[3] - 1.0).abs() < 1e-6, "{found:?}");
    }
}
