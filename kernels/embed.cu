// Rows picked by an index: token embeddings, the adapters' part in them (whose first factor is gathered by token id, not
// multiplied), and the rows whose logits are wanted.
#include "include/lora_plan.cuh"

namespace {

constexpr i32 WARPS = 4;
constexpr i32 THREADS = WARPS * 32;

template <typename T>
__device__ __forceinline__ void embed(const i32* header, const u32* tokens, const T* weight, i32 width, float* out,
                                      i32 out_stride) {
    const i32 rows = header[HEADER_ROWS];
    for (i32 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* source = weight + static_cast<size_t>(tokens[row]) * width;
        float* target = out + static_cast<size_t>(row) * out_stride;
        for (i32 column = threadIdx.x * 8; column < width; column += THREADS * 8) {
            float values[8];
            widen8<T>(ldg16(source + column), values);
            store_f32x4(target + column, make_float4(values[0], values[1], values[2], values[3]));
            store_f32x4(target + column + 4, make_float4(values[4], values[5], values[6], values[7]));
        }
    }
}

// A warp takes an entry. Ranks up to the end of the last mma tile are written, for the expand reads whole tiles.
template <typename T>
__device__ __forceinline__ void lora_embed(const i32* header, const i32* tile_slot, const i32* tile_first,
                                           const i32* tile_count, const i32* entry_row, const u32* tokens,
                                           const u64* a_pointers, const i32* ranks, i32 sites, i32 site, float* s) {
    const i32 tiles = header[HEADER_TILES];
    const i32 s_stride = header[HEADER_SHRINK_STRIDE];
    for (i32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const i32 table = tile_slot[tile] * sites + site;
        const i32 rank = ranks[table];
        if (rank == 0) continue;
        const i32 a_stride = round_up(rank, 8);
        const T* a = reinterpret_cast<const T*>(a_pointers[table]);
        for (i32 place = threadIdx.x / 32; place < tile_count[tile]; place += WARPS) {
            const i32 entry = tile_first[tile] + place;
            const T* source = a + static_cast<size_t>(tokens[entry_row[entry]]) * a_stride;
            float* target = s + static_cast<size_t>(entry) * s_stride;
            for (i32 k = threadIdx.x % 32; k < round_up(rank, RANK_TILE); k += 32) {
                float value = 0.0f;
                if (k < rank) value = to_f32(source[k]);
                target[k] = value;
            }
        }
    }
}

} // namespace

#define EMBED(name, T)                                                                                       \
    KERNEL(THREADS, name)(const i32* header, const u32* tokens, const T* weight, i32 width, f32* out, i32 out_stride) { \
        embed<T>(header, tokens, weight, width, out, out_stride);                                            \
    }                                                                                                        \
    KERNEL_EXPORT(name)

EMBED(embed_bf16, bf16)
EMBED(embed_f16, f16)

#define LORA_EMBED(name, T)                                                                                           \
    KERNEL(THREADS, name)(const i32* header, const i32* tile_slot, const i32* tile_first, const i32* tile_count,      \
                          const i32* entry_row, const u32* tokens, const u64* a_pointers, const i32* ranks, i32 sites, \
                          i32 site, f32* s) {                                                                         \
        lora_embed<T>(header, tile_slot, tile_first, tile_count, entry_row, tokens, a_pointers, ranks, sites, site, s); \
    }                                                                                                                 \
    KERNEL_EXPORT(name)

LORA_EMBED(lora_embed_bf16, bf16)
LORA_EMBED(lora_embed_f16, f16)

KERNEL(THREADS, gather_rows_f32)
(const i32* header, const u32* row_index, const f32* input, i32 input_stride, i32 width, f32* out, i32 out_stride) {
    const i32 rows = header[HEADER_SAMPLE_ROWS];
    for (i32 row = blockIdx.x; row < rows; row += gridDim.x) {
        const f32* source = input + static_cast<size_t>(row_index[row]) * input_stride;
        f32* target = out + static_cast<size_t>(row) * out_stride;
        for (i32 column = threadIdx.x * 4; column < width; column += THREADS * 4) {
            store_f32x4(target + column, load_constant_f32x4(source + column));
        }
    }
}
KERNEL_EXPORT(gather_rows_f32)
