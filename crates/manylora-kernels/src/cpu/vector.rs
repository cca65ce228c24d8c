//! Eight-lane vectors: what attention and the element-wise kernels are written over, once for all SIMD levels.
//!
//! A kernel is a [`VectorKernel`]: code generic over [`Vector8`]. [`run`] picks the implementation of the level and
//! enters it with that level's instructions enabled, so the whole kernel is compiled for it. Every lane does the same
//! arithmetic whatever its index, and tails go through zero-padded vectors, so an element's bits never depend on
//! where it stood in a vector.
#![expect(clippy::inline_always, reason = "inlined into the function that switches the level's instructions on")]

use half::bf16;

use super::level::SimdLevel;
use super::portable::vector::Portable;
#[cfg(target_arch = "x86_64")]
use super::x86::vector::Avx2;

/// Lanes of a vector, at every level.
pub(crate) const LANES: usize = 8;

/// The operations of an eight-lane f32 vector. A value of the implementing type is the proof that the processor has
/// the instructions.
pub(crate) trait Vector8: Copy {
    /// Eight f32.
    type Lanes: Copy;

    /// The same value in every lane.
    fn splat(self, value: f32) -> Self::Lanes;
    /// Eight values from memory.
    fn load(self, from: &[f32; LANES]) -> Self::Lanes;
    /// Eight bfloat16 values from memory, widened.
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::Lanes;
    /// Eight values to memory.
    fn store(self, value: Self::Lanes, to: &mut [f32; LANES]);
    /// `a + b`
    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a - b`
    fn sub(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a * b`
    fn mul(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a / b`
    fn div(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a * b + c`, fused where the level has it.
    fn mul_add(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;
    /// `if a > b { a } else { b }`: `b` where either is NaN.
    fn max(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `if a < b { a } else { b }`: `b` where either is NaN.
    fn min(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `value`, but 0 where `x < bound`.
    fn zero_below(self, x: Self::Lanes, bound: Self::Lanes, value: Self::Lanes) -> Self::Lanes;
    /// 2^(n - 1), where the low bits of each lane hold the integer n in -125..=128.
    fn half_power_of_two(self, bits: Self::Lanes) -> Self::Lanes;

    /// The lanes as an array.
    #[inline(always)]
    fn to_array(self, value: Self::Lanes) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(value, &mut lanes);
        lanes
    }

    /// Up to eight values, the missing ones 0.
    #[inline(always)]
    fn load_padded(self, from: &[f32]) -> Self::Lanes {
        let mut lanes = [0.0; LANES];
        lanes[..from.len()].copy_from_slice(from);
        self.load(&lanes)
    }

    /// The first `to.len()` lanes, at most eight.
    #[inline(always)]
    fn store_prefix(self, value: Self::Lanes, to: &mut [f32]) {
        let lanes = self.to_array(value);
        to.copy_from_slice(&lanes[..to.len()]);
    }

    /// Sum of the lanes, as a fixed tree.
    #[inline(always)]
    fn sum(self, value: Self::Lanes) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.to_array(value);
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }

    /// Largest lane; lanes that are NaN do not count.
    #[inline(always)]
    fn largest(self, value: Self::Lanes) -> f32 {
        let mut best = f32::NEG_INFINITY;
        for lane in self.to_array(value) {
            if lane > best {
                best = lane;
            }
        }
        best
    }
}

/// A number as it is stored in the KV cache.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// Eight of them, as f32.
    fn load<V: Vector8>(vector: V, from: &[Self; LANES]) -> V::Lanes;
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
    /// Widens, exactly.
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn load<V: Vector8>(vector: V, from: &[Self; LANES]) -> V::Lanes {
        vector.load(from)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn load<V: Vector8>(vector: V, from: &[Self; LANES]) -> V::Lanes {
        vector.load_bf16(from)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return Self::from_bits((bits >> 16) as u16 | 0x40);
        }
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        Self::from_bits((rounded >> 16) as u16)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

/// Code over eight-lane vectors. Mark `run`, and everything it calls, `#[inline(always)]`.
pub(crate) trait VectorKernel {
    /// Does the work.
    fn run<V: Vector8>(self, vector: V);
}

/// Runs `kernel` at `level`. Levels above AVX2 use the AVX2 vectors: these kernels are bound by memory.
#[inline]
pub(crate) fn run<K: VectorKernel>(level: SimdLevel, kernel: K) {
    match level {
        SimdLevel::Portable => enter_portable(kernel),
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 | SimdLevel::Avx512Bf16 | SimdLevel::Amx => Avx2::run(level, kernel),
        #[cfg(not(target_arch = "x86_64"))]
        _ => enter_portable(kernel),
    }
}

/// As a level's `enter`: the kernel's code exists once, not in every caller that it would be inlined into (which made
/// compiling attention ten times as long).
#[inline(never)]
fn enter_portable<K: VectorKernel>(kernel: K) {
    kernel.run(Portable);
}

/// Calls `body` for whole vectors of the slices and once for the padded tail. The closure must be inlined by the
/// kernel that uses this, so it is a macro.
macro_rules! for_each_vector {
    ($vector:expr, $values:expr, |$lanes:ident| $body:expr) => {{
        let (whole, tail) = $values.as_chunks_mut::<{ $crate::cpu::vector::LANES }>();
        for chunk in whole {
            let $lanes = $vector.load(chunk);
            let result = $body;
            $vector.store(result, chunk);
        }
        if !tail.is_empty() {
            let $lanes = $vector.load_padded(tail);
            let result = $body;
            $vector.store_prefix(result, tail);
        }
    }};
}
pub(crate) use for_each_vector;
