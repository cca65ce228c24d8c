// Greedy pick: the token with the largest logit of each row, the lowest id among equals. Value and token are one key of
// which the largest wins, so the order of the search does not matter; NaN has no key.
#include "include/logits.cuh"

namespace {

// Orders by value, then by the lower token. 0 is below every key.
__device__ __forceinline__ u64 key(float value, u32 token) {
    if (value != value) return 0;
    return static_cast<u64>(ordered_bits(value)) << 32 | static_cast<u64>(~token);
}

__device__ __forceinline__ u64 warp_largest(u64 best) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, offset));
    return best;
}

} // namespace

KERNEL(SEARCH_THREADS, argmax_f32)(const i32* header, i32 count, const f32* logits, i32 stride, i32 vocabulary,
                                   u32* out) {
    KSHARED(u64, warp_best, [SEARCH_WARPS]);
    const i32 rows = header[count];
    for (i32 row = blockIdx.x; row < rows; row += gridDim.x) {
        const f32* values = logits + static_cast<size_t>(row) * stride;
        u64 best = 0;
        visit_row(values, stride, vocabulary, [&](f32 value, u32 token) { best = max(best, key(value, token)); });
        best = warp_largest(best);
        if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = best;
        __syncthreads();
        if (threadIdx.x < 32) {
            best = warp_largest(warp_best[threadIdx.x]);
            if (threadIdx.x == 0) out[row] = best == 0 ? 0 : ~static_cast<u32>(best);
        }
        __syncthreads();
    }
}
KERNEL_EXPORT(argmax_f32)
