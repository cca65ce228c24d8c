// Each function of compat.cuh that the compilers implement differently, alone in a kernel: so a card that disagrees with
// its reference says which one it is. Built for tests only.
#include "../include/compat.cuh"

// Every 16-bit pattern widened; numbers narrowed, alone and in pairs.
template <typename T>
__device__ void formats(const T* patterns, f32* wide, i32 count, const f32* values, T* narrow, u32* pairs, i32 numbers) {
    const i32 first = blockIdx.x * blockDim.x + threadIdx.x;
    for (i32 i = first; i < count; i += gridDim.x * blockDim.x) wide[i] = to_f32(patterns[i]);
    for (i32 i = first; i < numbers; i += gridDim.x * blockDim.x) {
        narrow[i] = from_f32<T>(values[i]);
        pairs[i] = pack2<T>(values[i], values[numbers - 1 - i]);
    }
}

#define DEVICE_FORMATS(T)                                                                                              \
    KERNEL(128, device_formats_##T)(const T* patterns, f32* wide, i32 count, const f32* values, T* narrow, u32* pairs, \
                                    i32 numbers) {                                                                     \
        formats<T>(patterns, wide, count, values, narrow, pairs, numbers);                                             \
    }                                                                                                                  \
    KERNEL_EXPORT(device_formats_##T)
DEVICE_FORMATS(bf16)
DEVICE_FORMATS(f16)

// d = a b^T: asynchronous copies, then tiles read as they lie (first 16 x 8 results) and transposed (the next).
// a [16][16], b [8][16], a_transposed [16][16], b_transposed [16][8], one warp.
template <typename T>
__device__ void tiles(const T* a, const T* b, const T* a_transposed, const T* b_transposed, f32* d) {
    KSHARED(T, sa, [16][16]);
    KSHARED(T, sb, [16][16]);
    KSHARED(T, sat, [16][16]);
    KSHARED(T, sbt, [16][8]);
    const i32 lane = threadIdx.x;
    const bool half = lane < 16;
    cp_async16(&sa[lane / 2][lane % 2 * 8], a + lane * 8);
    cp_async16_or_zero(&sb[lane / 2][lane % 2 * 8], half ? b + lane * 8 : b, half);
    cp_async_commit();
    cp_async16(&sat[lane / 2][lane % 2 * 8], a_transposed + lane * 8);
    if (half) cp_async16(&sbt[lane][0], b_transposed + lane * 8);
    cp_async_commit();
    cp_async_wait<1>();
    __syncwarp();
    u32 fa[4], fb[2];
    float sums[4] = {0, 0, 0, 0};
    ldmatrix_x4(fa, &sa[lane % 16][lane / 16 * 8]);
    ldmatrix_x2(fb, &sb[lane % 8][lane / 8 % 2 * 8]);
    mma_m16n8k16<T>(sums, fa, fb);
    for (i32 i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
    // What was not valid has become zeros.
    d[256 + lane] = to_f32(sb[8 + lane / 4][lane % 4 * 4]);
    cp_async_wait<0>();
    __syncwarp();
    ldmatrix_x4_transposed(fa, &sat[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
    ldmatrix_x2_transposed(fb, &sbt[lane % 16][0]);
    // On top of the first product: the accumulator is read too.
    mma_m16n8k16<T>(sums, fa, fb);
    for (i32 i = 0; i < 4; ++i) d[128 + (lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

#define DEVICE_TILES(T)                                                                                          \
    KERNEL(32, device_tiles_##T)(const T* a, const T* b, const T* a_transposed, const T* b_transposed, f32* d) { \
        tiles<T>(a, b, a_transposed, b_transposed, d);                                                           \
    }                                                                                                            \
    KERNEL_EXPORT(device_tiles_##T)
DEVICE_TILES(bf16)
DEVICE_TILES(f16)

// Nine numbers for each lane of a warp.
KERNEL(32, device_warp)(const f32* in, f32* out, u32* votes) {
    const i32 lane = threadIdx.x;
    const f32 x = in[lane];
    out[lane] = warp_sum(x);
    out[32 + lane] = warp_sum<8>(x);
    out[64 + lane] = warp_max(x);
    out[96 + lane] = __shfl_sync(0xffffffffu, x, (lane * 5 + 3) % 32);
    out[128 + lane] = __shfl_xor_sync(0xffffffffu, x, 9);
    out[160 + lane] = __shfl_up_sync(0xffffffffu, x, 3);
    out[192 + lane] = __shfl_down_sync(0xffffffffu, x, 7);
    const u32 positive = __ballot_sync(0xffffffffu, x > 0);
    votes[lane] = positive;
    votes[32 + lane] = __popc(positive);
}
KERNEL_EXPORT(device_warp)

// Eleven functions of each number.
KERNEL(128, device_math)(const f32* in, f32* out, i32 count) {
    for (i32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const f32 x = in[i], size = fabsf(x) + 0.001f;
        f32* at = out + i * 11;
        at[0] = expf(x);
        at[1] = exp2f(x);
        at[2] = logf(size);
        at[3] = log2f(size);
        at[4] = tanhf(x);
        at[5] = rsqrtf(size);
        at[6] = sqrtf(size);
        at[7] = __expf(x);
        at[8] = __logf(size);
        at[9] = __fdividef(x, size);
        at[10] = fmaf(x, size, -x);
    }
}
KERNEL_EXPORT(device_math)

// Whole numbers added, compared and counted by all threads of many blocks.
KERNEL(128, device_atomics)(u32* counters) {
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&counters[0], thread);
    atomicMax(&counters[1], thread);
    atomicMin(&counters[2], thread);
    atomicAdd(&counters[3 + thread % 5], 1u);
}
KERNEL_EXPORT(device_atomics)
