// Bugs with asynchronous copies and tensor-core tiles, and shapes of access for the profiler.
#include "include/compat.cuh"

// out[t] = in[t] by way of an asynchronous copy of four floats per thread of the first n / 4.
template <bool Commit, bool Wait> __device__ void copy(const float* in, float* out, u32 n) {
    KSHARED(float, stage, [256]);
    const u32 t = threadIdx.x;
    if (t < n / 4) cp_async16(stage + t * 4, in + t * 4);
    if (Commit) cp_async_commit();
    if (Wait) cp_async_wait<0>();
    __syncthreads();
    out[t] = stage[t];
}
KERNEL(256, good_async_copy)(const float* in, float* out, u32 n) { copy<true, true>(in, out, n); }
KERNEL_EXPORT(good_async_copy)
KERNEL(256, async_copy_without_wait)(const float* in, float* out, u32 n) { copy<true, false>(in, out, n); }
KERNEL_EXPORT(async_copy_without_wait)
KERNEL(256, async_copy_without_commit)(const float* in, float* out, u32 n) { copy<false, true>(in, out, n); }
KERNEL_EXPORT(async_copy_without_commit)

// One warp: out (16 x 8, f32) = A (16 x 64, bf16) B (8 x 64, bf16)^T, A and B one after the other at `in`. Slices of 16
// columns go through two buffers; without the tail barrier a buffer is filled again while lanes still read it.
template <bool TailBarrier> __device__ void multiply(const float* in, float* out) {
    KSHARED(bf16, a, [2][16 * 16]);
    KSHARED(bf16, b, [2][8 * 16]);
    const bf16* a_global = reinterpret_cast<const bf16*>(in);
    const bf16* b_global = a_global + 16 * 64;
    const u32 lane = threadIdx.x % 32;
    const bool loads = threadIdx.x < 32;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 slice = 0; slice < 5; ++slice) {
        if (slice < 4 && loads) {
            const u32 row = lane / 2;
            const u32 half = lane % 2 * 8;
            cp_async16(&a[slice % 2][row * 16 + half], a_global + row * 64 + slice * 16 + half);
            if (row < 8) cp_async16(&b[slice % 2][row * 16 + half], b_global + row * 64 + slice * 16 + half);
        }
        cp_async_commit();
        if (slice > 0) {
            cp_async_wait<1>();
            __syncthreads();
            u32 a_tile[4];
            u32 b_tile[2];
            ldmatrix_x4(a_tile, &a[(slice - 1) % 2][lane % 16 * 16 + lane / 16 * 8]);
            ldmatrix_x2(b_tile, &b[(slice - 1) % 2][lane % 8 * 16 + lane / 8 % 2 * 8]);
            mma_m16n8k16<bf16>(sums, a_tile, b_tile);
            if (TailBarrier) __syncthreads();
        }
    }
    cp_async_wait<0>();
    if (threadIdx.x < 32) {
        for (u32 i = 0; i < 4; ++i) out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
    } else {
        const u32 row = lane / 4;
        for (u32 i = 0; i < 4; ++i) out[128 + (row + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
    }
}
KERNEL(64, good_multiply)(const float* in, float* out, u32) { multiply<true>(in, out); }
KERNEL_EXPORT(good_multiply)
KERNEL(64, multiply_without_tail_barrier)(const float* in, float* out, u32) { multiply<false>(in, out); }
KERNEL_EXPORT(multiply_without_tail_barrier)

// out (32 x 32) = in transposed; columns of an unpadded tile all lie in one bank.
template <u32 Width> __device__ void transpose(const float* in, float* out) {
    KSHARED(float, tile, [32 * Width]);
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32;
    for (u32 row = warp; row < 32; row += blockDim.x / 32) tile[row * Width + lane] = in[row * 32 + lane];
    __syncthreads();
    for (u32 row = warp; row < 32; row += blockDim.x / 32) out[row * 32 + lane] = tile[lane * Width + row];
}
KERNEL(256, transpose_padded)(const float* in, float* out, u32) { transpose<33>(in, out); }
KERNEL_EXPORT(transpose_padded)
KERNEL(256, transpose_unpadded)(const float* in, float* out, u32) { transpose<32>(in, out); }
KERNEL_EXPORT(transpose_unpadded)

// out[t] = in[t stride]: twice the sectors for a stride of 2.
KERNEL(256, read_with_stride)(const float* in, float* out, u32 stride) { out[threadIdx.x] = in[threadIdx.x * stride]; }
KERNEL_EXPORT(read_with_stride)
