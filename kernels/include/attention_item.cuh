// What a block of the paged attention is told to do, and what its threads share while they do it.
#pragma once

#include "attention.cuh"

constexpr i32 WARPS = 4;
constexpr i32 THREADS = WARPS * 32;
constexpr i32 KEYS = 64;
constexpr i32 NO_SLOT = -1;
// Padded so that the lanes of a fragment's load hit different banks.
constexpr i32 WEIGHT_STRIDE = KEYS + 8;
constexpr i32 QUERY_PAD = 32;
constexpr float LOG2_E = 1.44269504088896340736f;

struct Attention {
    const i32* header;
    const i32* item_sequence;
    const i32* item_first;
    const i32* item_rows;
    const i32* item_partition;
    const i32* item_partitions;
    const i32* item_partial;
    const i32* sequence_row;
    const i32* sequence_position;
    const i32* sequence_table;
    const u32* block_tables;
    const float* q;
    i32 q_stride;
    i32 out_stride;
    float* partials;
    i32 heads;
    i32 kv_heads;
    i32 head_dim;
    i32 block_size;
    float scale;
    i32 window;
};

// (row, head) pairs of a block, and what its threads share about them.
template <typename T, int Tiles, int Dimensions> struct Shared {
    T query[Tiles * 16 * (Dimensions + QUERY_PAD)];
    T weight[Tiles * 16 * WEIGHT_STRIDE];
    float maximum[WARPS][Tiles * 16];
    // Place of each key of the partition in the layer's cache; NO_SLOT: no row sees it.
    i32 slot[PARTITION];
};

// Some (row, head) pairs of an item: those of one call.
struct Chunk {
    i32 first;    // pair
    i32 end;      // pair
    i32 group;    // query heads of a KV head
    i32 position; // of the item's first row
    i32 row;      // of the batch, the item's first
    i32 kv_head;
    const u32* table;
    i32 key_begin;
    i32 key_end;
    i32 partition;
    i32 partition_end;
    i32 item_partition;
    i32 partial;
};

// Elements of a lane's words that stand for two neighbouring dimensions, paired by key.
__device__ __forceinline__ u32 pair_low(u32 first, u32 second) { return (first & 0xffffu) | second << 16; }
__device__ __forceinline__ u32 pair_high(u32 first, u32 second) { return first >> 16 | (second & 0xffff0000u); }

// A lane's dimensions of one key of V: 2, 4 or 8 of them, two to a word.
__device__ __forceinline__ void load_value(u32 (&out)[1], const void* p) { out[0] = ldg4(p); }
__device__ __forceinline__ void load_value(u32 (&out)[2], const void* p) {
    const uint2 v = ldg8(p);
    out[0] = v.x, out[1] = v.y;
}
__device__ __forceinline__ void load_value(u32 (&out)[4], const void* p) {
    const uint4 v = ldg16(p);
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}
