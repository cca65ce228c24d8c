//! Eight-lane vectors in portable Rust: the readable reference, and what processors without a SIMD level run.
#![expect(clippy::inline_always, reason = "inlined into the function that switches the level's instructions on")]

use half::bf16;

use crate::cpu::vector::{LANES, Vector8};

/// Needs nothing of the processor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

/// `[f(a[0], b[0]), ..]`
#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    for lane in 0..LANES {
        out[lane] = f(a[lane], b[lane]);
    }
    out
}

impl Vector8 for Portable {
    type Lanes = [f32; LANES];

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Lanes {
        [value; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::Lanes {
        *from
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::Lanes {
        from.map(|value| f32::from_bits(u32::from(value.to_bits()) << 16))
    }

    #[inline(always)]
    fn store(self, value: Self::Lanes, to: &mut [f32; LANES]) {
        *to = value;
    }

    #[inline(always)]
    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        zip(a, b, |a, b| a / b)
    }

    // Two roundings: `f32::mul_add` would call the C library on processors that are built for without FMA.
    #[inline(always)]
    fn mul_add(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
        zip(zip(a, b, |a, b| a * b), c, |product, c| product + c)
    }

    #[inline(always)]
    fn max(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn zero_below(self, x: Self::Lanes, bound: Self::Lanes, value: Self::Lanes) -> Self::Lanes {
        let mut out = value;
        for lane in 0..LANES {
            if x[lane] < bound[lane] {
                out[lane] = 0.0;
            }
        }
        out
    }

    #[inline(always)]
    fn half_power_of_two(self, bits: Self::Lanes) -> Self::Lanes {
        bits.map(|bits| f32::from_bits((bits.to_bits() << 23).wrapping_add(126 << 23)))
    }
}
