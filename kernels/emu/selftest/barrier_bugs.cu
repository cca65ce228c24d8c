// Bugs around barriers and warps, each beside the kernel that does it right. All take (in, out, n) with n = threads of
// the block, and out[t] = in[n - 1 - t] unless they say otherwise.
#include "include/compat.cuh"

template <bool Barrier> __device__ void reverse(const float* in, float* out, u32 n) {
    KSHARED(float, stage, [256]);
    const u32 t = threadIdx.x;
    stage[t] = in[t];
    if (Barrier) __syncthreads();
    out[t] = stage[n - 1 - t];
}
KERNEL(256, good_reverse)(const float* in, float* out, u32 n) { reverse<true>(in, out, n); }
KERNEL_EXPORT(good_reverse)
KERNEL(256, missing_barrier)(const float* in, float* out, u32 n) { reverse<false>(in, out, n); }
KERNEL_EXPORT(missing_barrier)

// The sum of three reversals of in, in + 1, in + 2 through one buffer: out[t] = 3 in[n - 1 - t] + 3.
template <bool Barrier> __device__ void reverse_thrice(const float* in, float* out, u32 n) {
    KSHARED(float, stage, [256]);
    const u32 t = threadIdx.x;
    float sum = 0.0f;
    for (u32 i = 0; i < 3; ++i) {
        stage[t] = in[t] + static_cast<float>(i);
        __syncthreads();
        sum += stage[n - 1 - t];
        if (Barrier) __syncthreads();
    }
    out[t] = sum;
}
KERNEL(256, good_reverse_thrice)(const float* in, float* out, u32 n) { reverse_thrice<true>(in, out, n); }
KERNEL_EXPORT(good_reverse_thrice)
KERNEL(256, buffer_filled_again_too_early)(const float* in, float* out, u32 n) { reverse_thrice<false>(in, out, n); }
KERNEL_EXPORT(buffer_filled_again_too_early)

// Within each warp: out[t] = in[t ^ 1].
template <bool Barrier> __device__ void swap_pairs(const float* in, float* out) {
    KSHARED(float, stage, [256]);
    const u32 t = threadIdx.x;
    stage[t] = in[t];
    if (Barrier) __syncwarp();
    out[t] = stage[t ^ 1];
}
KERNEL(256, good_swap_pairs)(const float* in, float* out, u32) { swap_pairs<true>(in, out); }
KERNEL_EXPORT(good_swap_pairs)
KERNEL(256, missing_syncwarp)(const float* in, float* out, u32) { swap_pairs<false>(in, out); }
KERNEL_EXPORT(missing_syncwarp)

KERNEL(256, barrier_in_a_branch)(const float* in, float* out, u32 n) {
    KSHARED(float, stage, [256]);
    const u32 t = threadIdx.x;
    stage[t] = in[t];
    if (t < n / 2) __syncthreads();
    out[t] = stage[n - 1 - t];
}
KERNEL_EXPORT(barrier_in_a_branch)

KERNEL(256, two_barriers)(const float* in, float* out, u32 n) {
    KSHARED(float, stage, [256]);
    const u32 t = threadIdx.x;
    stage[t] = in[t];
    if (t % 2 == 0) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[t] = stage[n - 1 - t];
}
KERNEL_EXPORT(two_barriers)

KERNEL(256, exit_before_barrier)(const float* in, float* out, u32 n) {
    KSHARED(float, stage, [256]);
    const u32 t = threadIdx.x;
    stage[t] = in[t];
    if (t == n - 1) return;
    __syncthreads();
    out[t] = stage[n - 1 - t];
}
KERNEL_EXPORT(exit_before_barrier)

KERNEL(256, shuffle_in_a_branch)(const float* in, float* out, u32) {
    const u32 t = threadIdx.x;
    float value = in[t];
    if (t % 32 < 16) value += __shfl_xor_sync(0xffffffffu, value, 1);
    out[t] = value;
}
KERNEL_EXPORT(shuffle_in_a_branch)

KERNEL(256, shuffle_from_a_lane_outside_the_mask)(const float* in, float* out, u32) {
    const u32 t = threadIdx.x;
    float value = in[t];
    if (t % 32 < 16) value = __shfl_sync(0x0000ffffu, value, 20);
    out[t] = value;
}
KERNEL_EXPORT(shuffle_from_a_lane_outside_the_mask)

// Halves of a warp at operations of their own, votes, all forms of shuffles: out[t] = 2 in[t] + 21, all sums exact.
KERNEL(256, good_warps)(const float* in, float* out, u32 n) {
    const u32 t = threadIdx.x;
    const u32 lane = t % 32;
    float value = in[t];
    if (lane < 16) {
        value += __shfl_xor_sync(0x0000ffffu, in[t], 0);
    } else {
        value += __shfl_sync(0xffff0000u, in[t], static_cast<int>(lane));
    }
    const u32 odd = __ballot_sync(0xffffffffu, static_cast<int>(lane & 1));
    const float sixteen = static_cast<float>(__popc(odd));
    const float ones = warp_sum<4>(1.0f);
    const float most = warp_max(static_cast<float>(lane)) - 30.0f;
    const float up = __shfl_up_sync(0xffffffffu, 7.0f, 1) - __shfl_down_sync(0xffffffffu, 7.0f, 3);
    const int whole = __syncthreads_and(t < n) + __syncthreads_count(1) - static_cast<int>(n) - 1;
    out[t] = value + sixteen + ones + most + up + static_cast<float>(whole);
}
KERNEL_EXPORT(good_warps)

// The whole block leaves early where the count says so: allowed, because all threads do.
KERNEL(256, good_uniform_return)(const float* in, float* out, u32 n) {
    if (blockIdx.x * blockDim.x >= n) return;
    reverse<true>(in, out, n);
}
KERNEL_EXPORT(good_uniform_return)
