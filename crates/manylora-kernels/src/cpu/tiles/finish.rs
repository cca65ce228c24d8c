//! A panel's sums into the result: bias, and onto what is there where the caller says so; or the gated activation of two
//! panels, which are never written themselves.
#![expect(unsafe_code, reason = "SIMD intrinsics over pointers")]

use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_div_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_mul_ps, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_sub_ps,
};

use super::exp::exponential;

/// Where a panel's sums go.
pub(in crate::cpu) struct Finish {
    /// `[rows][width]`, of which `count` columns count.
    pub(in crate::cpu) sums: *const f32,
    pub(in crate::cpu) width: usize,
    pub(in crate::cpu) rows: usize,
    pub(in crate::cpu) count: usize,
    /// The first column's bias; null: none.
    pub(in crate::cpu) bias: *const f32,
    /// The first row's first column, and values from one row to the next.
    pub(in crate::cpu) out: *mut f32,
    pub(in crate::cpu) out_width: usize,
    /// Add to what is there.
    pub(in crate::cpu) add: bool,
}

impl Finish {
    /// # Safety
    /// The pointers are valid for what the job says, and the processor has AVX-512.
    #[target_feature(enable = "avx512f")]
    pub(in crate::cpu) unsafe fn run(&self) {
        for column in (0..self.count).step_by(16) {
            let mask = ((1u32 << (self.count - column).min(16)) - 1) as u16;
            // SAFETY: masks select columns that are there.
            unsafe {
                let bias = if self.bias.is_null() {
                    _mm512_setzero_ps()
                } else {
                    _mm512_maskz_loadu_ps(mask, self.bias.add(column))
                };
                for row in 0..self.rows {
                    let sums = _mm512_maskz_loadu_ps(mask, self.sums.add(row * self.width + column));
                    let out = self.out.add(row * self.out_width + column);
                    let mut value = if self.bias.is_null() { sums } else { _mm512_add_ps(sums, bias) };
                    if self.add {
                        value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), value);
                    }
                    _mm512_mask_storeu_ps(out, mask, value);
                }
            }
        }
    }
}

/// Where the gated activation of a panel of gates and one of ups goes: `silu(gate + bias) * (up + bias)`.
pub(in crate::cpu) struct FinishGated {
    /// Of gates and ups: `[rows][width]`, of which `count` columns count.
    pub(in crate::cpu) sums: [*const f32; 2],
    pub(in crate::cpu) width: usize,
    pub(in crate::cpu) rows: usize,
    pub(in crate::cpu) count: usize,
    /// The first column's bias of each; null: none.
    pub(in crate::cpu) bias: [*const f32; 2],
    /// The first row's first column, and values from one row to the next.
    pub(in crate::cpu) out: *mut f32,
    pub(in crate::cpu) out_width: usize,
}

impl FinishGated {
    /// # Safety
    /// The pointers are valid for what the job says, and the processor has AVX-512.
    #[target_feature(enable = "avx512f")]
    pub(in crate::cpu) unsafe fn run(&self) {
        for column in (0..self.count).step_by(16) {
            let mask = ((1u32 << (self.count - column).min(16)) - 1) as u16;
            // SAFETY: masks select columns that are there.
            unsafe {
                let bias = self.bias.map(|bias| {
                    if bias.is_null() { _mm512_setzero_ps() } else { _mm512_maskz_loadu_ps(mask, bias.add(column)) }
                });
                for row in 0..self.rows {
                    let sums = |part: usize| -> __m512 {
                        _mm512_maskz_loadu_ps(mask, self.sums[part].add(row * self.width + column))
                    };
                    let (gate, up) = (_mm512_add_ps(sums(0), bias[0]), _mm512_add_ps(sums(1), bias[1]));
                    let decay = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
                    let open = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0), decay));
                    let out = self.out.add(row * self.out_width + column);
                    _mm512_mask_storeu_ps(out, mask, _mm512_mul_ps(open, up));
                }
            }
        }
    }
}
