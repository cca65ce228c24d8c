// The second half of a LoRA delta: out += scale x B s for every entry of the row-adapter plan, in one launch for up to
// three sites with their own outputs, whatever mix of adapters, ranks and segment lengths the plan holds.
//
// A block takes one tile of entries (at most 32, one adapter) and 256 columns of one output; a warp takes 64 columns.
// B lives in the M side of mma.m16n8k16 and rows of s in the N side. Which column of the output an M row stands for is
// free: a lane's are chosen so that it adds four consecutive columns by one 16-byte access. The partial sums of the
// shrink are added in order, scaled in f32 and split into two T numbers whose sum keeps 16 bits (bf16) or 22 (f16) of
// them, so that a delta is not rounded to T before it meets the f32 output. f16 has a narrow range, so there a row of s
// is first scaled by a power of two, which is exact.
//
// A row with several entries is taken by the tile of its first one: the same thread then adds the others in the request's
// order, so no two blocks meet at an output element and no atomics are needed.
#include "include/lora_plan.cuh"

namespace {

constexpr i32 WARPS = 4;
constexpr i32 THREADS = WARPS * 32;
constexpr i32 WARP_COLUMNS = 64;
constexpr i32 BLOCK_COLUMNS = WARPS * WARP_COLUMNS;
// Runs of 32 columns of a warp; each is two mma tiles.
constexpr i32 RUNS = WARP_COLUMNS / 32;
// Ranks whose s is in shared memory at a time, in rows padded by 32 bytes: 8-byte loads of half a warp hit different
// banks.
constexpr i32 RANK_CHUNK = 128;
constexpr i32 CHUNK_STRIDE = RANK_CHUNK + 16;

template <typename T> constexpr bool NARROW_RANGE = false;
template <> constexpr bool NARROW_RANGE<f16> = true;

// What the threads of a block share about the rows of its tile.
template <typename T> struct TileRows {
    T high[TILE_ROWS * CHUNK_STRIDE];
    T low[TILE_ROWS * CHUNK_STRIDE];
    i32 row[TILE_ROWS];
    // The entry of each row that is added now; only those of active rows are read.
    i32 entry[TILE_ROWS];
    // What a row's delta is multiplied with, where the range of T is narrow.
    float unscale[TILE_ROWS];
};

struct Plan {
    const i32* header;
    const i32* tile_slot;
    const i32* tile_first;
    const i32* tile_count;
    const i32* entry_row;
    const i32* entry_slot;
    const float* entry_scale;
    const i32* row_first;
    const i32* row_entries;
    const u64* b_pointers;
    const i32* ranks;
    const float* scales;
    i32 sites;
    i32 site;
    i32 parts;
    i32 input;
};

struct Output {
    float* out;
    i32 stride;
    i32 width;
};

template <typename T> struct ExpandTask {
    const T* b;
    const float* s; // of entry 0 and the task's site
    size_t entry_stride;
    const float* entry_scale;
    float scale;
    i32 rank;
    i32 splits;
    Output output;
    i32 column; // first of the warp
};

// One element of scale x A x.
template <typename T> __device__ __forceinline__ float shrunk(const ExpandTask<T>& task, i32 entry, i32 rank) {
    const i32 split_stride = round_up(task.rank, RANK_TILE);
    const float* place = task.s + entry * task.entry_stride + rank;
    float sum = place[0];
    for (i32 split = 1; split < task.splits; ++split) sum += place[split * split_stride];
    return rounded_product(sum, task.scale * task.entry_scale[entry]);
}

// For each row the power of two at or below its largest element.
template <typename T> __device__ __forceinline__ void find_row_scales(const ExpandTask<T>& task, TileRows<T>& rows, u32 active) {
    for (i32 row = threadIdx.x / 32; row < TILE_ROWS; row += WARPS) {
        if ((active >> row & 1u) == 0) continue;
        const i32 entry = rows.entry[row];
        float most = 0.0f;
        for (i32 rank = threadIdx.x % 32; rank < task.rank; rank += 32) {
            most = fmaxf(most, fabsf(shrunk(task, entry, rank)));
        }
        most = warp_max(most);
        // Bounded so that its inverse is a normal number too.
        const u32 exponent = min(max(__float_as_uint(most) >> 23, 2u), 252u);
        if (threadIdx.x % 32 == 0) rows.unscale[row] = __uint_as_float(exponent << 23);
    }
    __syncthreads();
}

// Puts `ranks` ranks of s from `chunk` on into shared memory; rows without an entry are 0.
template <typename T>
__device__ __forceinline__ void fill_chunk(const ExpandTask<T>& task, TileRows<T>& rows, u32 active, i32 chunk, i32 ranks) {
    for (i32 index = threadIdx.x; index < TILE_ROWS * ranks; index += THREADS) {
        const i32 row = index / ranks;
        const i32 rank = index % ranks;
        // Eight rows are one mma tile; a tile without an entry is never read.
        if ((active >> (row / 8 * 8) & 0xffu) == 0) continue;
        float value = 0.0f;
        if (active >> row & 1u) {
            value = shrunk(task, rows.entry[row], chunk + rank);
            if constexpr (NARROW_RANGE<T>) {
                const u32 inverse = 0x7f000000u - __float_as_uint(rows.unscale[row]);
                value = rounded_product(value, __uint_as_float(inverse));
            }
        }
        const T high = from_f32<T>(value);
        rows.high[row * CHUNK_STRIDE + rank] = high;
        rows.low[row * CHUNK_STRIDE + rank] = from_f32<T>(value - to_f32(high));
    }
}

// B of a lane for 16 ranks: of each run four columns, of each four consecutive ranks.
template <typename T>
__device__ __forceinline__ void load_b(const ExpandTask<T>& task, i32 rank, uint2 (&b)[RUNS][4]) {
    const i32 b_stride = round_up(task.rank, 8);
    const i32 at = rank + threadIdx.x % 4 * 4;
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i32 column = task.column + run * 32 + threadIdx.x % 32 / 4 * 4 + i;
            b[run][i] = make_uint2(0, 0);
            if (column < task.output.width && at < b_stride) {
                b[run][i] = ldg8(task.b + static_cast<size_t>(column) * b_stride + at);
            }
        }
    }
}

__device__ __forceinline__ void add_columns(const Output& output, i32 row, i32 column, float4 delta) {
    float* place = output.out + static_cast<size_t>(row) * output.stride + column;
    if (output.stride % 4 == 0 && column + 3 < output.width) {
        float4 value = load_f32x4(place);
        value.x += delta.x;
        value.y += delta.y;
        value.z += delta.z;
        value.w += delta.w;
        store_f32x4(place, value);
    } else {
        if (column < output.width) place[0] += delta.x;
        if (column + 1 < output.width) place[1] += delta.y;
        if (column + 2 < output.width) place[2] += delta.z;
        if (column + 3 < output.width) place[3] += delta.w;
    }
}

// Adds the delta of one adapter to the rows in `active`, all of them below 8 x RowTiles.
template <typename T, int RowTiles>
__device__ __forceinline__ void expand(const ExpandTask<T>& task, TileRows<T>& rows, u32 active) {
    uint2 next[RUNS][4];
    load_b(task, 0, next);
    if constexpr (NARROW_RANGE<T>) find_row_scales(task, rows, active);

    float sums[RUNS][2][RowTiles][4] = {};
    for (i32 chunk = 0; chunk < task.rank; chunk += RANK_CHUNK) {
        const i32 ranks = min(RANK_CHUNK, round_up(task.rank - chunk, RANK_TILE));
        fill_chunk(task, rows, active, chunk, ranks);
        __syncthreads();
        for (i32 rank = 0; rank < ranks; rank += RANK_TILE) {
            uint2 b[RUNS][4];
#pragma unroll
            for (int run = 0; run < RUNS; ++run) {
#pragma unroll
                for (int i = 0; i < 4; ++i) b[run][i] = next[run][i];
            }
            if (chunk + rank + RANK_TILE < task.rank) load_b(task, chunk + rank + RANK_TILE, next);
#pragma unroll
            for (int tile = 0; tile < RowTiles; ++tile) {
                if ((active >> (tile * 8) & 0xffu) == 0) continue;
                const i32 at = (tile * 8 + threadIdx.x % 32 / 4) * CHUNK_STRIDE + rank + threadIdx.x % 4 * 4;
                const uint2 s_high = lds8(rows.high + at);
                const uint2 s_low = lds8(rows.low + at);
                const u32 high[2] = {s_high.x, s_high.y};
                const u32 low[2] = {s_low.x, s_low.y};
#pragma unroll
                for (int run = 0; run < RUNS; ++run) {
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair) {
                        const uint2 even = b[run][2 * pair];
                        const uint2 odd = b[run][2 * pair + 1];
                        const u32 columns[4] = {even.x, odd.x, even.y, odd.y};
                        mma_m16n8k16<T>(sums[run][pair][tile], columns, high);
                        mma_m16n8k16<T>(sums[run][pair][tile], columns, low);
                    }
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int tile = 0; tile < RowTiles; ++tile) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const i32 place = tile * 8 + threadIdx.x % 4 * 2 + side;
            if ((active >> place & 1u) == 0) continue;
            const float unscale = NARROW_RANGE<T> ? rows.unscale[place] : 1.0f;
#pragma unroll
            for (int run = 0; run < RUNS; ++run) {
                const float4 delta = make_float4(
                    rounded_product(sums[run][0][tile][side], unscale),
                    rounded_product(sums[run][0][tile][side + 2], unscale),
                    rounded_product(sums[run][1][tile][side], unscale),
                    rounded_product(sums[run][1][tile][side + 2], unscale));
                add_columns(task.output, rows.row[place], task.column + run * 32 + threadIdx.x % 32 / 4 * 4, delta);
            }
        }
    }
}

// Adds the delta of the adapter in `slot` to the rows in `active`. All threads of the block call it, after a barrier.
template <typename T>
__device__ __forceinline__ void add_adapter(const Plan& plan, const float* s, const Output& output, i32 part,
                                            i32 column, i32 slot, i32 count, u32 active, TileRows<T>& rows) {
    const i32 table = slot * plan.sites + plan.site + part;
    const i32 rank = plan.ranks[table];
    if (rank == 0) return;
    const i32 s_stride = plan.header[HEADER_SHRINK_STRIDE];
    ExpandTask<T> task;
    task.b = reinterpret_cast<const T*>(plan.b_pointers[table]);
    task.s = s + static_cast<size_t>(part) * s_stride;
    task.entry_stride = static_cast<size_t>(plan.parts) * s_stride;
    task.entry_scale = plan.entry_scale;
    task.scale = plan.scales[table];
    task.rank = rank;
    task.splits = plan.input == 0 ? 1 : input_split(plan.input, rank).count;
    task.output = output;
    task.column = column + threadIdx.x / 32 * WARP_COLUMNS;
    if (count <= 8) {
        expand<T, 1>(task, rows, active);
    } else {
        expand<T, 4>(task, rows, active);
    }
}

// One tile and 256 columns of one output. Every warp keeps the tile's rows in its lanes, so all agree on what comes next.
template <typename T>
__device__ __forceinline__ void expand_tile(const Plan& plan, const float* s, const Output& output, i32 part,
                                            i32 column, i32 tile, TileRows<T>& rows) {
    const i32 count = plan.tile_count[tile];
    const i32 lane = threadIdx.x % 32;
    i32 entry = -1;
    i32 slot = -1;
    i32 next = 0;
    i32 end = 0;
    i32 row = 0;
    if (lane < count) {
        entry = plan.tile_first[tile] + lane;
        slot = plan.tile_slot[tile];
        row = plan.entry_row[entry];
        next = plan.row_first[row];
        end = plan.row_first[row + 1];
    }
    u32 remaining = __ballot_sync(0xffffffffu, entry >= 0);
    while (remaining != 0) {
        // The first row left leads those that have the same adapter at this order.
        const i32 leader_slot = __shfl_sync(0xffffffffu, slot, __ffs(remaining) - 1);
        const u32 active = __ballot_sync(0xffffffffu, entry >= 0 && slot == leader_slot);
        __syncthreads();
        if (threadIdx.x < TILE_ROWS) {
            rows.row[lane] = row;
            rows.entry[lane] = entry;
        }
        __syncthreads();
        add_adapter(plan, s, output, part, column, leader_slot, count, active, rows);
        remaining &= ~active;
        if (remaining == 0) {
            ++next;
            entry = -1;
            if (next < end) {
                entry = plan.row_entries[next];
                slot = plan.entry_slot[entry];
            }
            remaining = __ballot_sync(0xffffffffu, entry >= 0);
        }
    }
}

template <typename T>
__device__ __forceinline__ void lora_expand(const Plan& plan, const float* s, const Output& first, const Output& second,
                                            const Output& third) {
    KSHARED(TileRows<T>, rows, [1]);
    const i32 tiles = plan.header[HEADER_FIRST_ORDER_TILES];
    const i32 first_blocks = divide_up(first.width, BLOCK_COLUMNS);
    const i32 second_blocks = first_blocks + (plan.parts > 1 ? divide_up(second.width, BLOCK_COLUMNS) : 0);
    const i32 blocks = second_blocks + (plan.parts > 2 ? divide_up(third.width, BLOCK_COLUMNS) : 0);
    for (i32 block = blockIdx.x; block < blocks; block += gridDim.x) {
        const i32 part = block < first_blocks ? 0 : block < second_blocks ? 1 : 2;
        const Output output = part == 0 ? first : part == 1 ? second : third;
        const i32 column = (part == 0 ? block : part == 1 ? block - first_blocks : block - second_blocks) * BLOCK_COLUMNS;
        for (i32 tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
            expand_tile(plan, s, output, part, column, tile, rows[0]);
        }
    }
}

} // namespace

#define LORA_EXPAND(name, T)                                                                                               \
    KERNEL(THREADS, name)(const i32* header, const i32* tile_slot, const i32* tile_first, const i32* tile_count,           \
                          const i32* entry_row, const i32* entry_slot, const f32* entry_scale, const i32* row_first,       \
                          const i32* row_entries, const u64* b_pointers, const i32* ranks, const f32* scales,              \
                          i32 sites, i32 site, i32 parts, i32 input, const f32* s, f32* out_0, i32 stride_0,               \
                          i32 width_0, f32* out_1, i32 stride_1, i32 width_1, f32* out_2, i32 stride_2, i32 width_2) {     \
        const Plan plan = {header,      tile_slot,  tile_first, tile_count, entry_row, entry_slot, entry_scale, row_first, \
                           row_entries, b_pointers, ranks,      scales,     sites,     site,       parts,       input};    \
        lora_expand<T>(plan, s, {out_0, stride_0, width_0}, {out_1, stride_1, width_1}, {out_2, stride_2, width_2});       \
    }                                                                                                                      \
    KERNEL_EXPORT(name)

LORA_EXPAND(lora_expand_bf16, bf16)
LORA_EXPAND(lora_expand_f16, f16)
