// Causal attention over the paged KV cache, for decode rows and prompt chunks in one launch.
//
// A block takes some rows of one sequence with all query heads of one KV head: 16 or 32 (row, head) pairs are the M side
// of the mma tiles, so grouped heads share each load of K and V and a lone decode row pads to 16. It walks the keys in
// tiles of 64: each warp scores 16 of them, the weights meet in shared memory, and each warp then sums its own quarter
// of the head's dimensions over all 64. K goes from global memory to registers: a lane takes 8 consecutive dimensions by one
// 16-byte load and spends them on two mma steps. So does V: a lane takes the same few dimensions of neighbouring keys and
// pairs them by moving halves of registers; which dimension a column of the tile stands for is free. V is asked for
// before the softmax needs its barriers.
//
// The softmax starts anew at every partition of 256 positions and partitions are added up in order, whether one block
// does all of them or one each (include/attention.cuh). A tile that a row does not see leaves its sums as they are, bit
// for bit; so a row's result depends on its own context only, not on who shares its block.
#include "include/attention_worker.cuh"

namespace {

template <typename T, int Lane>
__device__ __forceinline__ void paged_attention(const Attention& attention, const T* k_cache, const T* v_cache, T* out) {
    // Two tiles of the largest heads would not fit the registers.
    constexpr int MANY = Lane < 8 ? 2 : 1;
    using Large = Worker<T, Lane, MANY>;
    KSHARED(typename Large::Memory, memory, [1]);
    const i32 items = attention.header[HEADER_ATTENTION_ITEMS];
    const i32 group = attention.heads / attention.kv_heads;
    for (i32 item = blockIdx.x; item < items; item += gridDim.x) {
        const i32 sequence = attention.item_sequence[item];
        const i32 first = attention.item_first[item];
        Chunk chunk;
        chunk.group = group;
        chunk.row = attention.sequence_row[sequence] + first;
        chunk.position = attention.sequence_position[sequence] + first;
        chunk.table = attention.block_tables + attention.sequence_table[sequence];
        chunk.item_partition = attention.item_partition[item];
        chunk.partial = attention.item_partial[item];
        const i32 pairs = attention.item_rows[item] * group;
        const i32 partition_end = chunk.item_partition + attention.item_partitions[item];
        for (chunk.kv_head = blockIdx.y; chunk.kv_head < attention.kv_heads; chunk.kv_head += gridDim.y) {
            for (chunk.first = 0; chunk.first < pairs; chunk.first += MANY * 16) {
                chunk.end = min(pairs, chunk.first + MANY * 16);
                // Keys that any pair sees.
                const i32 low = chunk.position + chunk.first / group;
                chunk.key_begin = attention.window == 0 ? 0 : max(0, low - attention.window + 1);
                chunk.key_end = chunk.position + (chunk.end - 1) / group + 1;
                chunk.partition = chunk.item_partition;
                chunk.partition_end = partition_end;
                if (chunk.partial < 0) {
                    chunk.partition = max(chunk.partition, chunk.key_begin / PARTITION);
                    chunk.partition_end = min(chunk.partition_end, divide_up(chunk.key_end, PARTITION));
                }
                if (MANY == 1 || chunk.end - chunk.first > 16) {
                    Large worker = {attention, chunk, memory[0], k_cache, v_cache, out, {}, {}};
                    worker.run();
                } else {
                    using Small = Worker<T, Lane, 1>;
                    Small worker = {attention, chunk, reinterpret_cast<typename Small::Memory&>(memory[0]),
                                    k_cache,   v_cache, out, {}, {}};
                    worker.run();
                }
            }
        }
    }
}

} // namespace

// Two blocks to a multiprocessor at least, so that none spills to get a third.
#define PAGED_ATTENTION(name, T, lane)                                                                                        \
    KERNEL_BLOCKS(THREADS, 2, name)(const i32* header, const i32* item_sequence, const i32* item_first, const i32* item_rows, \
                          const i32* item_partition, const i32* item_partitions, const i32* item_partial,                     \
                          const i32* sequence_row, const i32* sequence_position, const i32* sequence_table,                   \
                          const u32* block_tables, const f32* q, i32 q_stride, const T* k_cache, const T* v_cache,            \
                          T* out, i32 out_stride, f32* partials, i32 heads, i32 kv_heads, i32 head_dim,                       \
                          i32 block_size, f32 scale, i32 window) {                                                            \
        const Attention attention = {header,       item_sequence, item_first,        item_rows,      item_partition,          \
                                     item_partitions, item_partial, sequence_row,    sequence_position, sequence_table,       \
                                     block_tables, q,             q_stride,          out_stride,     partials,                \
                                     heads,        kv_heads,      head_dim,          block_size,     scale,   window};        \
        paged_attention<T, lane>(attention, k_cache, v_cache, out);                                                           \
    }                                                                                                                         \
    KERNEL_EXPORT(name)

PAGED_ATTENTION(paged_attention_64_bf16, bf16, 2)
PAGED_ATTENTION(paged_attention_64_f16, f16, 2)
PAGED_ATTENTION(paged_attention_128_bf16, bf16, 4)
PAGED_ATTENTION(paged_attention_128_f16, f16, 4)
PAGED_ATTENTION(paged_attention_256_bf16, bf16, 8)
PAGED_ATTENTION(paged_attention_256_f16, f16, 8)
