//! Rotary tables: cosines and sines of every position, computed in f64 once and rounded to f32.

use std::f64::consts::PI;

use rayon::prelude::*;

use crate::spec::{RopeScaling, RopeSpec};

/// Frequencies (radians per position) of the `head_dim / 2` rotated pairs, scaling applied.
///
/// Sources: Su et al. 2021 (default), Meta's Llama 3.1 reference (llama3), Peng et al. 2023 (yarn); each as
/// transformers computes it.
pub fn frequencies(rope: &RopeSpec, head_dim: usize) -> Vec<f64> {
    let pairs = head_dim / 2;
    let base = (0..pairs).map(|pair| rope.theta.powf(-(2.0 * pair as f64) / head_dim as f64));
    match &rope.scaling {
        RopeScaling::Default => base.collect(),
        RopeScaling::Linear { factor } => base.map(|frequency| frequency / factor).collect(),
        &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
            let original = original_max_position as f64;
            base.map(|frequency| {
                let wavelength = 2.0 * PI / frequency;
                if wavelength > original / low_freq_factor {
                    frequency / factor
                } else if wavelength < original / high_freq_factor {
                    frequency
                } else {
                    let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            })
            .collect()
        }
        &RopeScaling::Yarn { factor, original_max_position, beta_fast, beta_slow, truncate, .. } => {
            // The pair that turns `rotations` times over the trained context.
            let pair_of = |rotations: f64| {
                head_dim as f64 * (original_max_position as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * rope.theta.ln())
            };
            let (mut low, mut high) = (pair_of(beta_fast), pair_of(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, mut high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
            if low == high {
                high += 0.001;
            }
            base.enumerate()
                .map(|(pair, frequency)| {
                    let interpolated = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    frequency / factor * interpolated + frequency * (1.0 - interpolated)
                })
                .collect()
        }
        RopeScaling::Factors { divisors } => {
            base.zip(divisors).map(|(frequency, divisor)| frequency / f64::from(*divisor)).collect()
        }
    }
}

/// Factor on cosines and sines (yarn's attention factor).
pub const fn magnitude(rope: &RopeSpec) -> f64 {
    match rope.scaling {
        RopeScaling::Yarn { attention_factor, .. } => attention_factor,
        _ => 1.0,
    }
}

/// Positions that a thread computes at least.
const POSITIONS: usize = 256;

/// Cosines and sines, each `[positions, head_dim / 2]`.
pub fn tables(rope: &RopeSpec, head_dim: usize, positions: usize) -> (Vec<f32>, Vec<f32>) {
    let frequencies = frequencies(rope, head_dim);
    let magnitude = magnitude(rope);
    let pairs = frequencies.len().max(1);
    let (mut cosines, mut sines) = (vec![0.0; positions * frequencies.len()], vec![0.0; positions * frequencies.len()]);
    // A million of them take as long as packing a twentieth of a small model.
    let rows = cosines.par_chunks_exact_mut(pairs).zip(sines.par_chunks_exact_mut(pairs)).with_min_len(POSITIONS);
    rows.enumerate().for_each(|(position, (cosines, sines))| {
        for ((frequency, cosine_out), sine_out) in frequencies.iter().zip(cosines).zip(sines) {
            let (sine, cosine) = (position as f64 * frequency).sin_cos();
            *cosine_out = (cosine * magnitude) as f32;
            *sine_out = (sine * magnitude) as f32;
        }
    });
    (cosines, sines)
}
