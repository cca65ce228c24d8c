// What kernels share that search rows of logits: a block for each row, which it reads in one way.
#pragma once

#include "rows.cuh"

constexpr i32 SEARCH_WARPS = 32;
constexpr i32 SEARCH_THREADS = SEARCH_WARPS * 32;

// Calls `visit(value, token)` for the thread's part of the row.
template <typename Visit>
__device__ __forceinline__ void visit_row(const f32* values, i32 stride, i32 vocabulary, const Visit& visit) {
    i32 vectors = 0;
    if (stride % 4 == 0) {
        vectors = vocabulary / 4;
#pragma unroll 4
        for (i32 index = threadIdx.x; index < vectors; index += SEARCH_THREADS) {
            const float4 four = load_constant_f32x4(values + index * 4);
            const u32 token = static_cast<u32>(index) * 4;
            visit(four.x, token);
            visit(four.y, token + 1);
            visit(four.z, token + 2);
            visit(four.w, token + 3);
        }
    }
    for (i32 token = vectors * 4 + threadIdx.x; token < vocabulary; token += SEARCH_THREADS) {
        visit(__ldg(values + token), static_cast<u32>(token));
    }
}

// A number's bits so that larger numbers have larger ones, at least 0x007fffff (minus infinity); the two zeros tie. Not
// for NaN.
__device__ __forceinline__ u32 ordered_bits(float value) {
    // -0 + 0 is 0.
    const u32 bits = __float_as_uint(value + 0.0f);
    return bits >> 31 == 0 ? bits | 0x80000000u : ~bits;
}
