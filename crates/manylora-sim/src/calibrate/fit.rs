//! The fits: of steps, and of loads.

use super::LoadSeconds;
use super::features::{COUNT, STRETCHES, features};
use super::least_squares::LeastSquares;
use crate::cost::StepWork;

/// A measured step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepSample {
    pub(super) work: StepWork,
    pub(super) seconds: f64,
}

/// A measured load.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadSample {
    pub(super) bytes: u64,
    pub(super) again: bool,
    pub(super) seconds: f64,
}

/// How often weights are found anew.
const ROUNDS: usize = 10;
/// Relative deviations up to this count fully, others the less the further: a step that took more than twice its time was held up
/// by something else. A lower bound would fit medians, and steps whose times vary much (those with prompts) would be paid
/// for by those that do not.
const TOLERATED: f64 = 1.0;

/// Coefficients of steps.
pub(super) fn steps(samples: &[StepSample]) -> [f64; COUNT] {
    let rows: Vec<([f64; COUNT], f64)> = samples
        .iter()
        .filter(|sample| sample.seconds > 0.0)
        .map(|sample| (features(&sample.work), sample.seconds))
        .collect();
    let mut found = [0.0; COUNT];
    found.copy_from_slice(&robust(&rows));
    // Steps with more rows than any that was seen go on as those with the most did.
    let seen = (0..STRETCHES).rev().find(|&place| rows.iter().any(|(row, _)| row[place] > 0.0)).unwrap_or(0);
    let slope = found[..=seen].iter().rev().copied().find(|&slope| slope > 0.0).unwrap_or(0.0);
    found[seen + 1..STRETCHES].fill(slope);
    found
}

/// First and later loads. Where one kind was not measured, it is taken for the other.
pub(super) fn loads(samples: &[LoadSample]) -> (LoadSeconds, LoadSeconds) {
    let of = |again| {
        let own = samples.iter().filter(|sample| sample.again == again && sample.seconds > 0.0);
        let rows: Vec<([f64; 2], f64)> = own.map(|sample| ([1.0, sample.bytes as f64], sample.seconds)).collect();
        if rows.is_empty() {
            return None;
        }
        let found = robust(&rows);
        Some(LoadSeconds { each: found[0], per_byte: found[1] })
    };
    match (of(false), of(true)) {
        (Some(first), Some(later)) => (first, later),
        (Some(only), None) | (None, Some(only)) => (only, only),
        (None, None) => (LoadSeconds::default(), LoadSeconds::default()),
    }
}

/// Least squares of relative deviations, of which great ones count less, scaled so that the sums of measured and fitted are equal.
///
/// Deviations are relative to what was fitted the time before, as where the standard deviation is a share of the mean. Relative to
/// what was measured, long times would count for less than short ones that are as far off, and kinds of steps whose times
/// vary much would come out too short beside the others.
fn robust<const N: usize>(rows: &[([f64; N], f64)]) -> Vec<f64> {
    let mut weights = vec![1.0; rows.len()];
    let mut units: Vec<f64> = rows.iter().map(|row| row.1).collect();
    let mut found = vec![0.0; N];
    for _ in 0..ROUNDS {
        let mut problem = LeastSquares::new(N);
        for ((row, seconds), (weight, unit)) in rows.iter().zip(weights.iter().zip(&units)) {
            problem.add(&row.map(|quantity| quantity / unit), seconds / unit, *weight);
        }
        found = problem.solve();
        for (unit, row) in units.iter_mut().zip(rows) {
            let fitted = fitted(row, &found);
            *unit = if fitted > 0.0 { fitted } else { row.1 };
        }
        for ((weight, unit), row) in weights.iter_mut().zip(&units).zip(rows) {
            *weight = (TOLERATED / (row.1 / unit - 1.0).abs().max(TOLERATED)).powi(2);
        }
    }
    let measured: f64 = rows.iter().map(|row| row.1).sum();
    let sum: f64 = rows.iter().map(|row| fitted(row, &found)).sum();
    if sum > 0.0 {
        for seconds in &mut found {
            *seconds *= measured / sum;
        }
    }
    found
}

fn fitted<const N: usize>((row, _): &([f64; N], f64), found: &[f64]) -> f64 {
    row.iter().zip(found).map(|(quantity, seconds)| quantity * seconds).sum()
}
