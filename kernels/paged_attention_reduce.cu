// Adds up the partial results of rows whose partitions went to several blocks of paged_attention, in the order of the
// partitions and by the arithmetic that a block uses when it does them all.
#include "include/attention.cuh"

namespace {

constexpr i32 THREADS = 128;

template <typename T>
__device__ __forceinline__ void reduce(const i32* header, const i32* reduce_row, const i32* reduce_first,
                                       const i32* reduce_count, const float* partials, T* out, i32 out_stride, i32 heads,
                                       i32 head_dim) {
    const i32 rows = header[HEADER_REDUCE_ROWS];
    const size_t slot_stride = static_cast<size_t>(heads) * (head_dim + PARTIAL_HEAD);
    for (i32 index = blockIdx.x; index < rows; index += gridDim.x) {
        const i32 count = reduce_count[index];
        for (i32 head = blockIdx.y; head < heads; head += gridDim.y) {
            T* place = out + static_cast<size_t>(reduce_row[index]) * out_stride + head * head_dim;
            for (i32 column = threadIdx.x; column < head_dim; column += THREADS) {
                const float* partial = partials + static_cast<size_t>(reduce_first[index]) * slot_stride +
                                       static_cast<size_t>(head) * (head_dim + PARTIAL_HEAD);
                SoftmaxState running = empty_state();
                float total = 0.0f;
#pragma unroll 4
                for (i32 slot = 0; slot < count; ++slot, partial += slot_stride) {
                    const SoftmaxState added = {__ldg(partial), __ldg(partial + 1)};
                    const MergeFactors factors = merge(running, added);
                    total = merged(total, __ldg(partial + PARTIAL_HEAD + column), factors);
                }
                const float inverse = 1.0f / running.sum;
                place[column] = from_f32<T>(total * inverse);
            }
        }
    }
}

} // namespace

#define PAGED_ATTENTION_REDUCE(name, T)                                                                           \
    KERNEL(THREADS, name)(const i32* header, const i32* reduce_row, const i32* reduce_first,                      \
                          const i32* reduce_count, const f32* partials, T* out, i32 out_stride, i32 heads,        \
                          i32 head_dim) {                                                                         \
        reduce<T>(header, reduce_row, reduce_first, reduce_count, partials, out, out_stride, heads, head_dim);    \
    }                                                                                                             \
    KERNEL_EXPORT(name)

PAGED_ATTENTION_REDUCE(paged_attention_reduce_bf16, bf16)
PAGED_ATTENTION_REDUCE(paged_attention_reduce_f16, f16)
