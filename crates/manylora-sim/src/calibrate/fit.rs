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
const ROUNDS: usize = 6;
/// Relative deviations below so many times their median count fully (Huber).
const TOLERATED: f64 = 1.5;

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

/// Least squares of relative deviations, with Huber's weights, scaled so that the sums of measured and fitted are equal.
fn robust<const N: usize>(rows: &[([f64; N], f64)]) -> Vec<f64> {
    let mut weights = vec![1.0; rows.len()];
    let mut found = vec![0.0; N];
    for _ in 0..ROUNDS {
        let mut problem = LeastSquares::new(N);
        for ((row, seconds), weight) in rows.iter().zip(&weights) {
            problem.add(&row.map(|quantity| quantity / seconds), 1.0, *weight);
        }
        found = problem.solve();
        let deviations: Vec<f64> = rows.iter().map(|row| (fitted(row, &found) / row.1 - 1.0).abs()).collect();
        let mut sorted = deviations.clone();
        sorted.sort_by(f64::total_cmp);
        let Some(&median) = sorted.get(sorted.len() / 2) else { break };
        let tolerated = (TOLERATED * median).max(1e-9);
        for (weight, deviation) in weights.iter_mut().zip(&deviations) {
            *weight = (tolerated / deviation.max(tolerated)).min(1.0);
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
