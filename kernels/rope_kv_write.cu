// All that happens to q, k and v between the projections and attention, in one launch: bias, per-head norm, rotary
// embedding (half-split pairs, as Hugging Face's rotate_half), and the write of k and v to their places of the paged cache.
// A warp takes one head of one row; a lane keeps its pairs (i, i + head_dim / 2) in registers throughout.
#include "include/rows.cuh"

namespace {

constexpr i32 WARPS = 4;
constexpr i32 THREADS = WARPS * 32;
// Pairs of a lane: head_dim is at most 256.
constexpr i32 PAIRS = 4;

struct HeadPairs {
    float low[PAIRS];
    float high[PAIRS];
};

// A head of `half` pairs, with its bias (null: none); places beyond it are 0.
__device__ __forceinline__ HeadPairs load_head(const float* head, const float* bias, i32 half) {
    HeadPairs pairs;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const i32 at = i * 32 + threadIdx.x % 32;
        pairs.low[i] = 0.0f;
        pairs.high[i] = 0.0f;
        if (at < half) {
            pairs.low[i] = head[at];
            pairs.high[i] = head[at + half];
            if (bias != nullptr) {
                pairs.low[i] += __ldg(bias + at);
                pairs.high[i] += __ldg(bias + at + half);
            }
        }
    }
    return pairs;
}

// The whole warp calls it.
__device__ __forceinline__ void norm_head(HeadPairs& pairs, const float* weight, float epsilon, i32 half) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        sum = fmaf(pairs.low[i], pairs.low[i], sum);
        sum = fmaf(pairs.high[i], pairs.high[i], sum);
    }
    const float factor = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(2 * half) + epsilon);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const i32 at = i * 32 + threadIdx.x % 32;
        if (at < half) {
            pairs.low[i] = pairs.low[i] * factor * __ldg(weight + at);
            pairs.high[i] = pairs.high[i] * factor * __ldg(weight + at + half);
        }
    }
}

__device__ __forceinline__ void rotate_head(HeadPairs& pairs, const float* cos, const float* sin, i32 half) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const i32 at = i * 32 + threadIdx.x % 32;
        if (at < half) {
            const float c = __ldg(cos + at);
            const float s = __ldg(sin + at);
            const float low = pairs.low[i];
            pairs.low[i] = fmaf(low, c, -rounded_product(pairs.high[i], s));
            pairs.high[i] = fmaf(pairs.high[i], c, rounded_product(low, s));
        }
    }
}

template <typename O, typename Convert>
__device__ __forceinline__ void store_head(O* out, const HeadPairs& pairs, i32 half, Convert convert) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const i32 at = i * 32 + threadIdx.x % 32;
        if (at < half) {
            out[at] = convert(pairs.low[i]);
            out[at + half] = convert(pairs.high[i]);
        }
    }
}

template <typename T>
__device__ __forceinline__ void rope_kv_write(const i32* header, const u32* positions, const u32* slot_mapping,
                                              const float* cos, const float* sin, float* q, i32 q_stride,
                                              const float* k, i32 k_stride, const float* v, i32 v_stride,
                                              const float* q_bias, const float* k_bias, const float* v_bias,
                                              const float* q_norm, const float* k_norm, float epsilon, i32 heads,
                                              i32 kv_heads, i32 head_dim, T* k_cache, T* v_cache) {
    const i32 rows = header[HEADER_ROWS];
    const i32 half = head_dim / 2;
    const auto narrow = [](float value) { return from_f32<T>(value); };
    for (i32 row = blockIdx.x; row < rows; row += gridDim.x) {
        const float* row_cos = cos + static_cast<size_t>(positions[row]) * half;
        const float* row_sin = sin + static_cast<size_t>(positions[row]) * half;
        for (i32 index = blockIdx.y * WARPS + threadIdx.x / 32; index < heads + 2 * kv_heads; index += gridDim.y * WARPS) {
            // Heads of q, then those of k, then those of v.
            const bool is_q = index < heads;
            const bool is_v = index >= heads + kv_heads;
            const i32 head = is_q ? index : (index - heads) % kv_heads;
            const i32 column = head * head_dim;
            const float* bias = is_q ? q_bias : is_v ? v_bias : k_bias;
            const float* norm = is_q ? q_norm : is_v ? nullptr : k_norm;
            const float* source = is_q   ? q + static_cast<size_t>(row) * q_stride
                                  : is_v ? v + static_cast<size_t>(row) * v_stride
                                         : k + static_cast<size_t>(row) * k_stride;
            HeadPairs pairs = load_head(source + column, bias == nullptr ? nullptr : bias + column, half);
            if (norm != nullptr) norm_head(pairs, norm, epsilon, half);
            if (!is_v) rotate_head(pairs, row_cos, row_sin, half);
            if (is_q) {
                store_head(q + static_cast<size_t>(row) * q_stride + column, pairs, half, [](float value) { return value; });
            } else {
                const size_t place = (static_cast<size_t>(slot_mapping[row]) * kv_heads + head) * head_dim;
                store_head((is_v ? v_cache : k_cache) + place, pairs, half, narrow);
            }
        }
    }
}

} // namespace

// Eight blocks to a multiprocessor at least, so that none spills to get more.
#define ROPE_KV_WRITE(name, T)                                                                                        \
    KERNEL_BLOCKS(THREADS, 8, name)(const i32* header, const u32* positions, const u32* slot_mapping, const f32* cos, \
                          const f32* sin, f32* q, i32 q_stride, const f32* k, i32 k_stride, const f32* v,             \
                          i32 v_stride, const f32* q_bias, const f32* k_bias, const f32* v_bias, const f32* q_norm,   \
                          const f32* k_norm, f32 epsilon, i32 heads, i32 kv_heads, i32 head_dim, T* k_cache,          \
                          T* v_cache) {                                                                               \
        rope_kv_write<T>(header, positions, slot_mapping, cos, sin, q, q_stride, k, k_stride, v, v_stride, q_bias,    \
                         k_bias, v_bias, q_norm, k_norm, epsilon, heads, kv_heads, head_dim, k_cache, v_cache);       \
    }                                                                                                                 \
    KERNEL_EXPORT(name)

ROPE_KV_WRITE(rope_kv_write_bf16, bf16)
ROPE_KV_WRITE(rope_kv_write_f16, f16)
