// What kernels share in reading rows: the step's header, eight elements at a time in any format, and sums over a block.
#pragma once

#include "compat.cuh"

// Places in the step's header of 16 i32; ABI.md lists them all.
constexpr i32 HEADER_ROWS = 0;
constexpr i32 HEADER_SAMPLE_ROWS = 4;
constexpr i32 HEADER_TILES = 5;
constexpr i32 HEADER_FIRST_ORDER_TILES = 6;
constexpr i32 HEADER_ATTENTION_ITEMS = 7;
constexpr i32 HEADER_SHRINK_STRIDE = 8;
constexpr i32 HEADER_REDUCE_ROWS = 9;

__device__ __forceinline__ i32 round_up(i32 value, i32 multiple) { return (value + multiple - 1) / multiple * multiple; }

__device__ __forceinline__ i32 divide_up(i32 value, i32 divisor) { return (value + divisor - 1) / divisor; }

// A product that stays one: the compiler may not merge it with an addition that follows, so that all instances of a
// template round alike.
__device__ __forceinline__ float rounded_product(float a, float b) { return fmaf(a, b, 0.0f); }

// Four consecutive f32 at a 16-byte aligned place that this launch writes too.
__device__ __forceinline__ float4 load_f32x4(const float* p) { return *reinterpret_cast<const float4*>(p); }

__device__ __forceinline__ void store_f32x4(float* p, float4 value) { *reinterpret_cast<float4*>(p) = value; }

// Four consecutive f32 that nobody writes during the launch.
__device__ __forceinline__ float4 load_constant_f32x4(const float* p) {
    const uint4 bits = ldg16(p);
    return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                       __uint_as_float(bits.w));
}

template <typename T> __device__ __forceinline__ void widen8(uint4 packed, float (&out)[8]) {
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack2<T>(words[i]);
        out[2 * i] = pair.x;
        out[2 * i + 1] = pair.y;
    }
}

template <typename T> __device__ __forceinline__ uint4 narrow8(const float (&values)[8]) {
    return make_uint4(pack2<T>(values[0], values[1]), pack2<T>(values[2], values[3]), pack2<T>(values[4], values[5]),
                      pack2<T>(values[6], values[7]));
}

// Eight f32 that nobody writes during the launch, from a 16-byte aligned place.
__device__ __forceinline__ void load_constant_f32x8(const float* p, float (&out)[8]) {
    const float4 low = load_constant_f32x4(p);
    const float4 high = load_constant_f32x4(p + 4);
    out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
    out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}

// Sum over a block of `Warps` warps, the same bits in every thread. `shared` holds `Warps` f32; the caller puts a
// barrier before it is used again.
template <int Warps> __device__ __forceinline__ float block_sum(float value, float* shared) {
    const float sum = warp_sum(value);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Warps; ++warp) total += shared[warp];
    return total;
}
