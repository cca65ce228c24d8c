// Bugs of addresses and of memory that nobody wrote. All take (in, out, n), n = threads of the block; where nothing is
// said, the kernel without its bug gives out[t] = in[t].
#include "include/compat.cuh"

KERNEL(256, shared_out_of_bounds)(const float* in, float* out, u32) {
    KSHARED(float, stage, [64]);
    KSHARED(float, other, [64]);
    const u32 t = threadIdx.x;
    other[t % 64] = 0.0f;
    stage[t + 1] = in[t];
    __syncthreads();
    out[t] = stage[t + 1];
}
KERNEL_EXPORT(shared_out_of_bounds)

KERNEL(256, dynamic_shared_out_of_bounds)(const float* in, float* out, u32) {
    KSHARED_DYN(float, stage);
    const u32 t = threadIdx.x;
    stage[t + 1] = in[t];
    __syncthreads();
    out[t] = stage[t + 1];
}
KERNEL_EXPORT(dynamic_shared_out_of_bounds)

KERNEL(256, good_dynamic_shared)(const float* in, float* out, u32) {
    KSHARED_DYN(float, stage);
    const u32 t = threadIdx.x;
    stage[t] = in[t];
    __syncthreads();
    out[t] = stage[t];
}
KERNEL_EXPORT(good_dynamic_shared)

KERNEL(256, global_write_out_of_bounds)(const float* in, float* out, u32 n) {
    const u32 t = threadIdx.x;
    out[t] = in[t];
    if (t == n - 1) out[n] = 1.0f;
}
KERNEL_EXPORT(global_write_out_of_bounds)

KERNEL(256, global_read_out_of_bounds)(const float* in, float* out, u32 n) {
    const u32 t = threadIdx.x;
    const float next = in[t + 1];
    out[t] = t == n ? next : in[t];
    if (next == 123.0f) out[t] = next;
}
KERNEL_EXPORT(global_read_out_of_bounds)

KERNEL(256, global_write_far_out_of_bounds)(const float* in, float* out, u32 n) {
    const u32 t = threadIdx.x;
    out[t] = in[t];
    if (t == n - 1) out[n + 1024] = 1.0f;
}
KERNEL_EXPORT(global_write_far_out_of_bounds)

KERNEL(256, misaligned_load)(const float* in, float* out, u32 n) {
    const u32 t = threadIdx.x;
    out[t] = in[t];
    if (t == 0 && n > 8) out[0] = __uint_as_float(ldg16(in + 1).w);
}
KERNEL_EXPORT(misaligned_load)

// out[t] = in[t], four at a time through all of the wide loads and stores.
KERNEL(256, good_wide_accesses)(const float* in, float* out, u32 n) {
    KSHARED(float, stage, [256]);
    const u32 t = threadIdx.x * 4;
    if (t < n) sts16(stage + t, ldg16(in + t));
    __syncthreads();
    if (t < n) {
        const uint4 all = lds16(stage + t);
        const uint2 low = lds8(stage + t);
        stg16(out + t, make_uint4(low.x, low.y, all.z, ldg4(in + t + 3)));
    }
}
KERNEL_EXPORT(good_wide_accesses)

KERNEL(256, uninitialised_shared)(const float* in, float* out, u32 n) {
    KSHARED(float, stage, [256]);
    const u32 t = threadIdx.x;
    if (t != n / 2) stage[t] = in[t];
    __syncthreads();
    out[t] = stage[t];
}
KERNEL_EXPORT(uninitialised_shared)

// out[0] is read before anything was written to it; the launch gives out of fresh memory.
KERNEL(256, uninitialised_global)(const float* in, float* out, u32) {
    const u32 t = threadIdx.x;
    out[t] = in[t] + (out[t] - out[t]);
}
KERNEL_EXPORT(uninitialised_global)

// Every block writes its number + in[t]: the last one wins, whichever that is. With one block it is right.
KERNEL(256, two_blocks_write_one_address)(const float* in, float* out, u32) {
    const u32 t = threadIdx.x;
    out[t] = in[t];
}
KERNEL_EXPORT(two_blocks_write_one_address)

// Block 0 writes what block 1 reads: the order of blocks decides.
KERNEL(256, block_reads_another_blocks_result)(const float* in, float* out, u32 n) {
    const u32 t = threadIdx.x;
    if (blockIdx.x == 0) out[t] = in[t];
    if (blockIdx.x == 1 && out[t] != 0.0f) out[n + t] = in[t];
}
KERNEL_EXPORT(block_reads_another_blocks_result)

// The last block to finish adds up what all blocks wrote: out[0] = sum of in over 4 blocks. out[n..] holds the partial
// sums, the counter is behind them.
template <bool Fence> __device__ void sum_by_last_block(const float* in, float* out, u32 n) {
    KSHARED(u32, last, );
    float* partial = out + n;
    u32* counter = reinterpret_cast<u32*>(out + 2 * n);
    const u32 t = threadIdx.x;
    const float sum = warp_sum(in[blockIdx.x * 32 + t]);
    if (t == 0) {
        partial[blockIdx.x] = sum;
        if (Fence) __threadfence();
        last = atomicAdd(counter, 1u) == gridDim.x - 1 ? 1 : 0;
    }
    __syncthreads();
    if (last != 0 && t == 0) {
        float total = 0.0f;
        for (u32 i = 0; i < gridDim.x; ++i) total += __uint_as_float(ldcg4(partial + i));
        out[0] = total;
    }
}
KERNEL(32, good_last_block)(const float* in, float* out, u32 n) { sum_by_last_block<true>(in, out, n); }
KERNEL_EXPORT(good_last_block)
KERNEL(32, last_block_without_fence)(const float* in, float* out, u32 n) { sum_by_last_block<false>(in, out, n); }
KERNEL_EXPORT(last_block_without_fence)

// What the wrappers for 8-, 4- and 2-byte parameters must agree with.
KERNEL(32, many_parameters)(const float* in, float* out, u32 n, f32 factor, u64 wide, i32 narrow) {
    const float sum = static_cast<float>(wide) + static_cast<float>(narrow);
    if (threadIdx.x < n) out[threadIdx.x] = in[threadIdx.x] * factor + sum;
}
KERNEL_EXPORT(many_parameters)
