// One block's attention over the keys of some (row, head) pairs: scores, softmax and sums, tile by tile and partition by
// partition. paged_attention.cu says how the tiles lie on warps and lanes, and why a row's bits are its own.
#pragma once

#include "attention_item.cuh"

// `Lane` dimensions of V belong to a lane, so a head has at most 32 x Lane; `Tiles` tiles of 16 pairs are worked at once.
template <typename T, int Lane, int Tiles> struct Worker {
    static constexpr i32 DIMENSIONS = 32 * Lane;
    static constexpr i32 CHUNKS = DIMENSIONS / 32;
    static constexpr i32 QUERY_STRIDE = DIMENSIONS + QUERY_PAD;
    // The largest heads have no registers to spare for asking early.
    static constexpr bool EARLY = Lane < 8;
    using Memory = Shared<T, Tiles, DIMENSIONS>;

    const Attention& attention;
    const Chunk& chunk;
    Memory& memory;
    const T* k_cache;
    const T* v_cache;
    T* out;

    // Of the partition: sums of weights x V of pairs (lane / 4) and (lane / 4 + 8) of each tile.
    float sums[Tiles][Lane][4];
    SoftmaxState state[Tiles][2];

    __device__ __forceinline__ i32 lane_group() const { return threadIdx.x % 32 / 4; }
    __device__ __forceinline__ i32 lane_place() const { return threadIdx.x % 4; }
    __device__ __forceinline__ i32 warp() const { return threadIdx.x / 32; }
    __device__ __forceinline__ i32 pair_of(int tile, int half) const {
        return chunk.first + tile * 16 + half * 8 + lane_group();
    }

    __device__ __forceinline__ void load_queries() {
        const i32 eights = DIMENSIONS / 8;
        for (i32 index = threadIdx.x; index < Tiles * 16 * eights; index += THREADS) {
            const i32 pair = chunk.first + index / eights;
            const i32 column = index % eights * 8;
            uint4 packed = make_uint4(0, 0, 0, 0);
            if (pair < chunk.end && column < attention.head_dim) {
                const size_t row = chunk.row + pair / chunk.group;
                const i32 head = chunk.kv_head * chunk.group + pair % chunk.group;
                float values[8];
                load_constant_f32x8(attention.q + row * attention.q_stride + head * attention.head_dim + column, values);
                packed = narrow8<T>(values);
            }
            sts16(memory.query + index / eights * QUERY_STRIDE + column, packed);
        }
    }

    __device__ __forceinline__ void load_slots(i32 partition) {
        for (i32 index = threadIdx.x; index < PARTITION; index += THREADS) {
            const i32 key = partition * PARTITION + index;
            i32 slot = NO_SLOT;
            if (key >= chunk.key_begin && key < chunk.key_end) {
                slot = static_cast<i32>(__ldg(chunk.table + key / attention.block_size)) + key % attention.block_size;
            }
            memory.slot[index] = slot;
        }
    }

    __device__ __forceinline__ size_t cache_place(i32 slot) const {
        return (static_cast<size_t>(slot) * attention.kv_heads + chunk.kv_head) * attention.head_dim;
    }

    // Scores of the warp's 16 keys, from `first` on within the partition.
    __device__ __forceinline__ void score(i32 first, float (&scores)[Tiles][2][4]) const {
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
            const i32 slot = memory.slot[first + eight * 8 + lane_group()];
            const T* key = k_cache + (slot == NO_SLOT ? 0 : cache_place(slot));
            uint4 keys[CHUNKS];
#pragma unroll
            for (int part = 0; part < CHUNKS; ++part) {
                const i32 column = part * 32 + lane_place() * 8;
                keys[part] = make_uint4(0, 0, 0, 0);
                if (slot != NO_SLOT && column < attention.head_dim) keys[part] = ldg16(key + column);
            }
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
                for (int i = 0; i < 4; ++i) scores[tile][eight][i] = 0.0f;
            }
#pragma unroll
            for (int part = 0; part < CHUNKS; ++part) {
                if (part * 32 >= attention.head_dim) break;
                const u32 low[2] = {keys[part].x, keys[part].y};
                const u32 high[2] = {keys[part].z, keys[part].w};
#pragma unroll
                for (int tile = 0; tile < Tiles; ++tile) {
                    const T* place = memory.query + (tile * 16 + lane_group()) * QUERY_STRIDE + part * 32 + lane_place() * 8;
                    const uint4 top = lds16(place);
                    const uint4 bottom = lds16(place + 8 * QUERY_STRIDE);
                    const u32 query_low[4] = {top.x, bottom.x, top.y, bottom.y};
                    const u32 query_high[4] = {top.z, bottom.z, top.w, bottom.w};
                    mma_m16n8k16<T>(scores[tile][eight], query_low, low);
                    mma_m16n8k16<T>(scores[tile][eight], query_high, high);
                }
            }
        }
    }

    // Scales, hides what a pair does not see, and leaves each pair's largest in shared memory.
    __device__ __forceinline__ void mask(i32 first_key, float (&scores)[Tiles][2][4]) const {
        const float scale = attention.scale * LOG2_E;
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const i32 pair = pair_of(tile, half);
                const i32 position = pair < chunk.end ? chunk.position + pair / chunk.group : -1;
                float largest = -INFINITY;
#pragma unroll
                for (int eight = 0; eight < 2; ++eight) {
#pragma unroll
                    for (int side = 0; side < 2; ++side) {
                        const i32 key = first_key + eight * 8 + lane_place() * 2 + side;
                        const bool seen = key <= position && (attention.window == 0 || key > position - attention.window);
                        float& value = scores[tile][eight][half * 2 + side];
                        value = seen ? rounded_product(value, scale) : -INFINITY;
                        largest = fmaxf(largest, value);
                    }
                }
                largest = warp_max<4>(largest);
                if (lane_place() == 0) memory.maximum[warp()][tile * 16 + half * 8 + lane_group()] = largest;
            }
        }
    }

    // Turns scores into weights relative to the new maximum, in shared memory, and brings the sums to that maximum.
    __device__ __forceinline__ void weigh(const float (&scores)[Tiles][2][4]) {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const i32 place = tile * 16 + half * 8 + lane_group();
                float maximum = state[tile][half].maximum;
#pragma unroll
                for (int other = 0; other < WARPS; ++other) maximum = fmaxf(maximum, memory.maximum[other][place]);
                const float base = maximum == -INFINITY ? 0.0f : maximum;
                const float correction = exp2f(state[tile][half].maximum - base);
                state[tile][half].maximum = maximum;
                state[tile][half].sum = rounded_product(state[tile][half].sum, correction);
#pragma unroll
                for (int i = 0; i < Lane; ++i) {
                    sums[tile][i][half * 2] *= correction;
                    sums[tile][i][half * 2 + 1] *= correction;
                }
                T* weights = memory.weight + place * WEIGHT_STRIDE + warp() * 16 + lane_place() * 2;
#pragma unroll
                for (int eight = 0; eight < 2; ++eight) {
                    *reinterpret_cast<u32*>(weights + eight * 8) =
                        pack2<T>(exp2f(scores[tile][eight][half * 2] - base), exp2f(scores[tile][eight][half * 2 + 1] - base));
                }
            }
        }
    }

    // V of 16 keys, from `first` on within the partition: the lane's dimensions of keys 2 p, 2 p + 1, 2 p + 8, 2 p + 9.
    __device__ __forceinline__ void load_values(i32 first, u32 (&values)[4][Lane / 2]) const {
        const i32 column = (warp() * 8 + lane_group()) * Lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i32 slot = memory.slot[first + lane_place() * 2 + i / 2 * 8 + i % 2];
#pragma unroll
            for (int word = 0; word < Lane / 2; ++word) values[i][word] = 0;
            if (slot != NO_SLOT && column < attention.head_dim) load_value(values[i], v_cache + cache_place(slot) + column);
        }
    }

    __device__ __forceinline__ void load_tile_values(i32 first, u32 (&values)[4][4][Lane / 2]) const {
#pragma unroll
        for (int step = 0; step < 4; ++step) load_values(first + step * 16, values[step]);
    }

    // Adds weights x V of 16 keys, from `first` on within the tile, and the weights to `added`.
    __device__ __forceinline__ void add_values(i32 first, const u32 (&values)[4][Lane / 2], float (&added)[Tiles][2]) {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
            const T* place = memory.weight + (tile * 16 + lane_group()) * WEIGHT_STRIDE + first + lane_place() * 2;
            const u32 weights[4] = {*reinterpret_cast<const u32*>(place),
                                    *reinterpret_cast<const u32*>(place + 8 * WEIGHT_STRIDE),
                                    *reinterpret_cast<const u32*>(place + 8),
                                    *reinterpret_cast<const u32*>(place + 8 * WEIGHT_STRIDE + 8)};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 low = unpack2<T>(weights[half]);
                const float2 high = unpack2<T>(weights[half + 2]);
                added[tile][half] += (low.x + low.y) + (high.x + high.y);
            }
#pragma unroll
            for (int word = 0; word < Lane / 2; ++word) {
                const u32 even[2] = {pair_low(values[0][word], values[1][word]), pair_low(values[2][word], values[3][word])};
                const u32 odd[2] = {pair_high(values[0][word], values[1][word]), pair_high(values[2][word], values[3][word])};
                mma_m16n8k16<T>(sums[tile][2 * word], weights, even);
                mma_m16n8k16<T>(sums[tile][2 * word + 1], weights, odd);
            }
        }
    }

    __device__ __forceinline__ void take_tile(i32 partition, i32 first) {
        u32 values[EARLY ? 4 : 1][4][Lane / 2];
        float scores[Tiles][2][4];
        // A decode row waits for memory: it has the registers to ask for V along with K.
        if constexpr (EARLY && Tiles == 1) load_tile_values(first, values);
        score(first + warp() * 16, scores);
        if constexpr (EARLY && Tiles > 1) load_tile_values(first, values);
        mask(partition * PARTITION + first + warp() * 16, scores);
        __syncthreads();
        weigh(scores);
        __syncthreads();
        float added[Tiles][2] = {};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            if constexpr (!EARLY) load_values(first + step * 16, values[0]);
            add_values(step * 16, values[EARLY ? step : 0], added);
        }
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) state[tile][half].sum += warp_sum<4>(added[tile][half]);
        }
    }

    __device__ __forceinline__ void take_partition(i32 partition) {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
            state[tile][0] = empty_state();
            state[tile][1] = empty_state();
#pragma unroll
            for (int i = 0; i < Lane; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[tile][i][j] = 0.0f;
            }
        }
        __syncthreads();
        load_slots(partition);
        __syncthreads();
#pragma unroll 1
        for (i32 first = 0; first < PARTITION; first += KEYS) {
            const i32 key = partition * PARTITION + first;
            if (key < chunk.key_end && key + KEYS > chunk.key_begin) take_tile(partition, first);
        }
    }

    // A lane's results of a pair are 2 x Lane neighbouring dimensions; `store(element, four)` takes four of them.
    template <typename Store> __device__ __forceinline__ void for_each_four(const float (&from)[Lane][4], int half, Store store) const {
        const i32 column = (warp() * 8 + lane_place() * 2) * Lane;
#pragma unroll
        for (int four = 0; four < Lane / 2; ++four) {
            float values[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int element = four * 4 + i;
                values[i] = from[element % Lane][half * 2 + element / Lane];
            }
            if (column + four * 4 < attention.head_dim) {
                store(column + four * 4, make_float4(values[0], values[1], values[2], values[3]));
            }
        }
    }

    // Every partition by itself, to be reduced by another kernel.
    __device__ __forceinline__ void write_partials() {
        for (i32 partition = chunk.partition; partition < chunk.partition_end; ++partition) {
            take_partition(partition);
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const i32 pair = pair_of(tile, half);
                    if (pair >= chunk.end) continue;
                    const i32 head = chunk.kv_head * chunk.group + pair % chunk.group;
                    float* place = partial_place(attention.partials, chunk.partial + partition - chunk.item_partition,
                                                 attention.heads, head, attention.head_dim);
                    if (threadIdx.x / 32 == 0 && lane_place() == 0) {
                        place[0] = state[tile][half].maximum;
                        place[1] = state[tile][half].sum;
                    }
                    for_each_four(sums[tile], half,
                                  [=](i32 column, float4 four) { store_f32x4(place + PARTIAL_HEAD + column, four); });
                }
            }
        }
    }

    // All partitions, added up in order.
    __device__ __forceinline__ void write_rows() {
        float total[Tiles][Lane][4] = {};
        SoftmaxState running[Tiles][2];
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) running[tile][0] = running[tile][1] = empty_state();
#pragma unroll 1
        for (i32 partition = chunk.partition; partition < chunk.partition_end; ++partition) {
            take_partition(partition);
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const MergeFactors factors = merge(running[tile][half], state[tile][half]);
#pragma unroll
                    for (int i = 0; i < Lane; ++i) {
#pragma unroll
                        for (int side = 0; side < 2; ++side) {
                            float& value = total[tile][i][half * 2 + side];
                            value = merged(value, sums[tile][i][half * 2 + side], factors);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const i32 pair = pair_of(tile, half);
                if (pair >= chunk.end) continue;
                const float inverse = 1.0f / running[tile][half].sum;
                const i32 head = chunk.kv_head * chunk.group + pair % chunk.group;
                T* place = out + static_cast<size_t>(chunk.row + pair / chunk.group) * attention.out_stride +
                           head * attention.head_dim;
                for_each_four(total[tile], half, [=](i32 column, float4 four) {
                    stg8(place + column, make_uint2(pack2<T>(four.x * inverse, four.y * inverse),
                                                    pack2<T>(four.z * inverse, four.w * inverse)));
                });
            }
        }
    }

    __device__ __forceinline__ void run() {
        __syncthreads();
        load_queries();
        if (chunk.partial < 0) {
            write_rows();
        } else {
            write_partials();
        }
    }
};
