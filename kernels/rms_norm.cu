// RMSNorm with f32 sums: of whole rows, with a residual added first and rows picked by an index where wanted, and of the
// heads of a row by themselves. A row belongs to one block (a head to one warp), so its bits depend on its width only.
#include "include/rows.cuh"

namespace {

constexpr i32 WARPS = 8;
constexpr i32 THREADS = WARPS * 32;
constexpr i32 GROUP_WARPS = 4;
constexpr i32 GROUP_THREADS = GROUP_WARPS * 32;

__device__ __forceinline__ void store_normed(float* out, float4 value) { store_f32x4(out, value); }

template <typename T> __device__ __forceinline__ void store_normed(T* out, float4 value) {
    stg8(out, make_uint2(pack2<T>(value.x, value.y), pack2<T>(value.z, value.w)));
}

__device__ __forceinline__ float4 scaled(float4 value, float factor, float4 weight) {
    return make_float4(value.x * factor * weight.x, value.y * factor * weight.y, value.z * factor * weight.z,
                       value.w * factor * weight.w);
}

__device__ __forceinline__ float sum_of_squares(float sum, float4 value) {
    sum = fmaf(value.x, value.x, sum);
    sum = fmaf(value.y, value.y, sum);
    sum = fmaf(value.z, value.z, sum);
    return fmaf(value.w, value.w, sum);
}

__device__ __forceinline__ float inverse_root_mean(float sum, i32 width, float epsilon) {
    return 1.0f / sqrtf(sum / static_cast<float>(width) + epsilon);
}

template <typename O>
__device__ __forceinline__ void rms_norm(const i32* header, i32 count, const u32* row_index, float* input,
                                         i32 input_stride, const float* add, const float* weight, float epsilon,
                                         i32 width, O* out, i32 out_stride) {
    KSHARED(float, warp_sums, [WARPS]);
    const i32 rows = header[count];
    for (i32 row = blockIdx.x; row < rows; row += gridDim.x) {
        const size_t input_row = row_index == nullptr ? static_cast<size_t>(row) : row_index[row];
        float* values = input + input_row * input_stride;
        float sum = 0.0f;
        if (add != nullptr) {
            const float* added = add + input_row * input_stride;
            for (i32 column = threadIdx.x * 4; column < width; column += THREADS * 4) {
                float4 value = load_f32x4(values + column);
                const float4 other = load_constant_f32x4(added + column);
                value = make_float4(value.x + other.x, value.y + other.y, value.z + other.z, value.w + other.w);
                store_f32x4(values + column, value);
                sum = sum_of_squares(sum, value);
            }
        } else {
#pragma unroll 4
            for (i32 column = threadIdx.x * 4; column < width; column += THREADS * 4) {
                sum = sum_of_squares(sum, load_f32x4(values + column));
            }
        }
        const float factor = inverse_root_mean(block_sum<WARPS>(sum, warp_sums), width, epsilon);
        O* normed = out + static_cast<size_t>(row) * out_stride;
        // A thread reads again what it read or wrote itself: it comes from L1.
#pragma unroll 4
        for (i32 column = threadIdx.x * 4; column < width; column += THREADS * 4) {
            store_normed(normed + column,
                         scaled(load_f32x4(values + column), factor, load_constant_f32x4(weight + column)));
        }
        __syncthreads();
    }
}

} // namespace

#define RMS_NORM(name, O)                                                                                              \
    KERNEL(THREADS, name)(const i32* header, i32 count, const u32* row_index, f32* input, i32 input_stride,            \
                          const f32* add, const f32* weight, f32 epsilon, i32 width, O* out, i32 out_stride) {         \
        rms_norm<O>(header, count, row_index, input, input_stride, add, weight, epsilon, width, out, out_stride);      \
    }                                                                                                                  \
    KERNEL_EXPORT(name)

RMS_NORM(rms_norm_bf16, bf16)
RMS_NORM(rms_norm_f16, f16)
RMS_NORM(rms_norm_f32, f32)

KERNEL(GROUP_THREADS, rms_norm_groups_f32)
(const i32* header, f32* values, i32 stride, const f32* weight, f32 epsilon, i32 groups, i32 width) {
    const i32 total = header[HEADER_ROWS] * groups;
    for (i32 index = blockIdx.x * GROUP_WARPS + threadIdx.x / 32; index < total; index += gridDim.x * GROUP_WARPS) {
        float* group = values + static_cast<size_t>(index / groups) * stride + static_cast<size_t>(index % groups) * width;
        float sum = 0.0f;
        for (i32 column = threadIdx.x % 32 * 4; column < width; column += 128) {
            sum = sum_of_squares(sum, load_f32x4(group + column));
        }
        const float factor = inverse_root_mean(warp_sum(sum), width, epsilon);
        for (i32 column = threadIdx.x % 32 * 4; column < width; column += 128) {
            store_f32x4(group + column,
                        scaled(load_f32x4(group + column), factor, load_constant_f32x4(weight + column)));
        }
    }
}
KERNEL_EXPORT(rms_norm_groups_f32)
