//! The exponential function, to about 1 unit in the last place, the same in every lane.
#![expect(clippy::inline_always, reason = "inlined into the function that switches the level's instructions on")]

use super::vector::Vector8;

/// 1.5 x 2^23: adding it rounds to the nearest integer and leaves that integer in the low bits.
const ROUNDING: f32 = 12_582_912.0;
/// ln 2 = `LN2_HIGH` + `LN2_LOW`; the high part has nine bits, so its product with any exponent is exact.
pub(super) const LN2_HIGH: f32 = 355.0 / 512.0;
pub(super) const LN2_LOW: f32 = -2.121_944_4e-4;
/// Below this the result (under 2^-125) is flushed to 0.
pub(super) const SMALLEST: f32 = -86.6;
/// Above 88.72 the result is infinite; the argument need not be larger for that.
pub(super) const LARGEST: f32 = 89.0;
/// (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2 as a polynomial in r, interpolated at Chebyshev nodes: error 1.1e-8.
pub(super) const COEFFICIENTS: [f32; 5] = [0.5, 0.166_665_76, 0.041_666_552, 0.008_363_233, 0.001_392_625];

/// `e^x` in each lane. NaN stays NaN; e^-inf = 0; e^inf = inf.
#[inline(always)]
pub(crate) fn exp<V: Vector8>(vector: V, x: V::Lanes) -> V::Lanes {
    let smallest = vector.splat(SMALLEST);
    // Operand order matters: a NaN in `x` must come out of both.
    let clamped = vector.min(vector.splat(LARGEST), vector.max(smallest, x));
    let shifted = vector.mul_add(clamped, vector.splat(std::f32::consts::LOG2_E), vector.splat(ROUNDING));
    let n = vector.sub(shifted, vector.splat(ROUNDING));
    let r = vector.mul_add(n, vector.splat(-LN2_HIGH), clamped);
    let r = vector.mul_add(n, vector.splat(-LN2_LOW), r);
    let mut polynomial = vector.splat(COEFFICIENTS[4]);
    for coefficient in [COEFFICIENTS[3], COEFFICIENTS[2], COEFFICIENTS[1], COEFFICIENTS[0]] {
        polynomial = vector.mul_add(polynomial, r, vector.splat(coefficient));
    }
    // 1 + (r + r^2 p): the small terms are summed before the large one.
    let fraction = vector.mul_add(vector.mul(r, r), polynomial, r);
    let fraction = vector.add(fraction, vector.splat(1.0));
    // 2^n as 2^(n-1) x 2, since 2^128 is not a number but e^88.6 is.
    let result = vector.mul(vector.mul(fraction, vector.half_power_of_two(shifted)), vector.splat(2.0));
    vector.zero_below(x, smallest, result)
}

#[cfg(test)]
mod tests {
    use super::exp;
    use crate::cpu::level::SimdLevel;
    use crate::cpu::vector::{self, Vector8, VectorKernel, for_each_vector};

    struct Exponentials<'a>(&'a mut [f32]);

    impl VectorKernel for Exponentials<'_> {
        #[inline(always)]
        fn run<V: Vector8>(self, vector: V) {
            for_each_vector!(vector, self.0, |lanes| exp(vector, lanes));
        }
    }

    fn exponentials(level: SimdLevel, values: &[f32]) -> Vec<f32> {
        let mut values = values.to_vec();
        vector::run(level, Exponentials(&mut values));
        values
    }

    /// Distance to the true value in units of the last place of an f32 of its size.
    fn error(result: f32, expected: f64) -> f64 {
        let exponent = expected.log2().floor().max(-126.0);
        (f64::from(result) - expected).abs() / (exponent - 23.0).exp2()
    }

    #[test]
    fn is_right_to_two_units_in_the_last_place() {
        let values: Vec<f32> = (0..1_000_003).map(|step| -86.6 + 175.3 * step as f32 / 1_000_003.0).collect();
        for level in SimdLevel::available() {
            for (&x, y) in values.iter().zip(exponentials(level, &values)) {
                let off = error(y, f64::from(x).exp());
                assert!(off <= 2.0, "{level}: e^{x} = {y}, off by {off}");
            }
        }
    }

    #[test]
    fn ends_of_the_range() {
        for level in SimdLevel::available() {
            let x =
                [f32::NEG_INFINITY, f32::MIN, -1000.0, -87.0, -0.0, 0.0, 88.72, 88.73, 1e30, f32::INFINITY, f32::NAN];
            let y = exponentials(level, &x);
            assert_eq!(y[..6], [0.0, 0.0, 0.0, 0.0, 1.0, 1.0], "{level}");
            assert!(y[6].is_finite() && y[6] > 3.3e38, "{level}: {}", y[6]);
            assert_eq!(y[7..10], [f32::INFINITY; 3], "{level}");
            assert!(y[10].is_nan(), "{level}");
        }
    }

    #[test]
    fn lanes_and_tails_agree_bit_for_bit() {
        let values: Vec<f32> = (0..103_u8).map(|step| f32::from(step) * 0.731 - 60.0).collect();
        for level in SimdLevel::available() {
            let whole = exponentials(level, &values);
            for start in 0..9 {
                for end in 95..103 {
                    let part = exponentials(level, &values[start..end]);
                    assert!(part.iter().zip(&whole[start..end]).all(|(a, b)| a.to_bits() == b.to_bits()), "{level}");
                }
            }
        }
    }
}
