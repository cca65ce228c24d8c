// What happens to rows element by element: the gated activation between the two halves of the MLP, biases, and the
// change of format. Eight columns to a thread.
#include "include/rows.cuh"

namespace {

constexpr i32 THREADS = 128;

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// `write(row, column)` for every row and every eighth column of a matrix.
template <typename Write> __device__ __forceinline__ void for_each_eight(i32 rows, i32 width, Write write) {
    for (i32 row = blockIdx.y; row < rows; row += gridDim.y) {
        for (i32 column = (blockIdx.x * THREADS + threadIdx.x) * 8; column < width; column += gridDim.x * THREADS * 8) {
            write(static_cast<size_t>(row), column);
        }
    }
}

template <typename T>
__device__ __forceinline__ void gated_activation(const i32* header, const float* gate, i32 gate_stride, const float* up,
                                                 i32 up_stride, i32 width, T* out, i32 out_stride) {
    for_each_eight(header[HEADER_ROWS], width, [=](size_t row, i32 column) {
        float gates[8];
        float ups[8];
        load_constant_f32x8(gate + row * gate_stride + column, gates);
        load_constant_f32x8(up + row * up_stride + column, ups);
#pragma unroll
        for (int i = 0; i < 8; ++i) gates[i] = silu(gates[i]) * ups[i];
        stg16(out + row * out_stride + column, narrow8<T>(gates));
    });
}

template <typename T>
__device__ __forceinline__ void convert(const i32* header, i32 count, const float* input, i32 input_stride, i32 width,
                                        T* out, i32 out_stride) {
    for_each_eight(header[count], width, [=](size_t row, i32 column) {
        float values[8];
        load_constant_f32x8(input + row * input_stride + column, values);
        stg16(out + row * out_stride + column, narrow8<T>(values));
    });
}

} // namespace

#define GATED_ACTIVATION(name, T)                                                                            \
    KERNEL(THREADS, name)(const i32* header, const f32* gate, i32 gate_stride, const f32* up, i32 up_stride, \
                          i32 width, T* out, i32 out_stride) {                                               \
        gated_activation<T>(header, gate, gate_stride, up, up_stride, width, out, out_stride);               \
    }                                                                                                        \
    KERNEL_EXPORT(name)

GATED_ACTIVATION(gated_activation_bf16, bf16)
GATED_ACTIVATION(gated_activation_f16, f16)

#define CONVERT(name, T)                                                                                      \
    KERNEL(THREADS, name)(const i32* header, i32 count, const f32* input, i32 input_stride, i32 width, T* out, \
                          i32 out_stride) {                                                                   \
        convert<T>(header, count, input, input_stride, width, out, out_stride);                               \
    }                                                                                                         \
    KERNEL_EXPORT(name)

CONVERT(convert_bf16, bf16)
CONVERT(convert_f16, f16)

// Columns one by one: logits may have any width.
KERNEL(THREADS, bias_add_f32)
(const i32* header, i32 count, i32 parts, f32* out_0, i32 stride_0, i32 width_0, const f32* bias_0, f32* out_1,
 i32 stride_1, i32 width_1, const f32* bias_1, f32* out_2, i32 stride_2, i32 width_2, const f32* bias_2) {
    const i32 rows = header[count];
    for (i32 part = blockIdx.z; part < parts; part += gridDim.z) {
        f32* out = part == 0 ? out_0 : part == 1 ? out_1 : out_2;
        const i32 stride = part == 0 ? stride_0 : part == 1 ? stride_1 : stride_2;
        const i32 width = part == 0 ? width_0 : part == 1 ? width_1 : width_2;
        const f32* bias = part == 0 ? bias_0 : part == 1 ? bias_1 : bias_2;
        if (bias == nullptr) continue;
        for (i32 column = blockIdx.x * THREADS + threadIdx.x; column < width; column += gridDim.x * THREADS) {
            const float value = __ldg(bias + column);
            for (i32 row = blockIdx.y; row < rows; row += gridDim.y) {
                out[static_cast<size_t>(row) * stride + column] += value;
            }
        }
    }
}
KERNEL_EXPORT(bias_add_f32)
