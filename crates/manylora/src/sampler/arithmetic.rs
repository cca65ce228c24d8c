//! Exponential, logarithm, sums and maxima of a row of logits, the same to the last bit on every machine.
//!
//! A platform's `exp` and `ln` may differ between machines and between its own SIMD variants, and a sum depends on its
//! order. Logprobs and draws must not (promise P3), so both functions are written out here from additions,
//! multiplications and one division, and every sum runs over eight lanes in blocks of [`BLOCK`], joined in one order.
//! The loops are free of branches, so that the compiler can use whatever vector width the build has.

/// Elements whose weights are summed as one block.
pub(super) const BLOCK: usize = 256;
const LANES: usize = 8;

/// Below this, `exp` is taken as 0: e^-87 is the last power whose exponent fits a normal `f32`.
pub(super) const EXP_LOWEST: f32 = -87.0;
/// 1.5 * 2^23: adding it rounds a small number to an integer that stands in the low bits.
const ROUND_TO_INTEGER: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has zeros at its end, so that its product with a small integer is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// e^x for x <= 0 within two units in the last place; 0 below [`EXP_LOWEST`] and for NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7, whose remainder is below 6e-9.
#[inline]
pub(super) fn exp(x: f32) -> f32 {
    let rounded = x * std::f32::consts::LOG2_E + ROUND_TO_INTEGER;
    let n = rounded - ROUND_TO_INTEGER;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;
    let mut polynomial = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        polynomial = polynomial * r + coefficient;
    }
    // The low bits of `rounded` hold n; moved to the exponent's place and biased they are 2^n.
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    let value = polynomial * power;
    if x >= EXP_LOWEST { value } else { 0.0 }
}

/// ln x for positive, finite, normal x within two units in the last place of `f64`.
///
/// x = m 2^e with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh((m - 1) / (m + 1)) by its power series.
pub(super) fn ln(x: f64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    let mut exponent = ((x.to_bits() >> 52) & 0x7ff) as i64 - 1023;
    let mut m = f64::from_bits((x.to_bits() & MANTISSA) | 1.0_f64.to_bits());
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        exponent += 1;
    }
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let mut series = 0.0;
    for denominator in (1..=21).rev().step_by(2) {
        series = series * square + 1.0 / f64::from(denominator);
    }
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * s * series
}

/// The largest value of a row; minus infinity when there is none. NaN never counts.
pub(super) fn maximum(logits: &[f32]) -> f32 {
    let larger = |best: f32, value: f32| if value > best { value } else { best };
    let mut lanes = [f32::NEG_INFINITY; 4 * LANES];
    let (chunks, rest) = logits.as_chunks::<{ 4 * LANES }>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, value);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |best, &value| larger(best, value))
}

/// The index of the largest value, the lowest one of several; None when no value is above minus infinity.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let best = maximum(logits);
    if best == f32::NEG_INFINITY {
        return None;
    }
    logits.iter().position(|&value| value == best).map(|index| index as u32)
}

/// `exp((logit - maximum) * inverse_temperature)` of a block of at most [`BLOCK`] logits; zeros behind its end.
fn block_weights(block: &[f32], maximum: f32, inverse_temperature: f32) -> [f32; BLOCK] {
    let mut weights = [0.0; BLOCK];
    for (weight, logit) in weights.iter_mut().zip(block) {
        *weight = exp((logit - maximum) * inverse_temperature);
    }
    weights
}

/// The sum of a block's weights.
pub(super) fn block_mass(block: &[f32], maximum: f32, inverse_temperature: f32) -> f64 {
    // Weights and sum in two loops, because only one without the sum's dependence becomes vector code.
    let weights = block_weights(block, maximum, inverse_temperature);
    let mut lanes = [0.0_f64; LANES];
    for chunk in weights.as_chunks::<LANES>().0 {
        for (lane, &weight) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(weight);
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// The sum of `exp(logit - maximum)` over a row whose maximum is finite.
pub(super) fn mass(logits: &[f32], maximum: f32) -> f64 {
    logits.chunks(BLOCK).map(|block| block_mass(block, maximum, 1.0)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0_f64;
        for step in 0..=870_000 {
            let x = -(step as f32) * 1e-4;
            let expected = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / expected - 1.0).abs());
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn exp_of_what_underflows_or_is_no_number_is_zero() {
        for x in [-87.1, -1e4, -1e30, f32::MIN, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(exp(x), 0.0, "{x}");
        }
        assert!(exp(-87.0) > 0.0);
    }

    #[test]
    fn ln_agrees_with_the_platform() {
        let mut x = 1e-300_f64;
        while x < 1e300 {
            let tolerance = 1e-15 * x.ln().abs().max(1.0);
            assert!((ln(x) - x.ln()).abs() <= tolerance, "{x:e}");
            x *= 1.000_937;
        }
        for step in -1000..=1000 {
            let x = 1.0 + f64::from(step) * 1e-5;
            assert!((ln(x) - x.ln()).abs() <= 1e-16, "{x}");
        }
        assert_eq!(ln(1.0), 0.0);
    }

    #[test]
    fn the_lowest_of_equal_maxima_wins_and_nan_never_does() {
        let mut row = vec![0.0_f32; 1000];
        row[3] = f32::NAN;
        row[517] = 2.0;
        row[998] = 2.0;
        assert_eq!(argmax(&row), Some(517));
        row[999] = f32::INFINITY;
        assert_eq!(argmax(&row), Some(999));
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY]), None);
        assert_eq!(argmax(&[]), None);
        assert_eq!(argmax(&[-0.0, 0.0]), Some(0));
    }

    #[test]
    fn mass_agrees_with_float64() {
        let row: Vec<f32> = (0..49_153).map(|i| ((i * 7919) % 10_007) as f32 * 2e-3 - 9.0).collect();
        let top = maximum(&row);
        let expected: f64 = row.iter().map(|&l| (f64::from(l) - f64::from(top)).exp()).sum();
        assert!((mass(&row, top) / expected - 1.0).abs() < 1e-7);
    }
}
