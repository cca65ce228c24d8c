// The first half of a LoRA delta: s = A x for every entry of the row-adapter plan, in one launch for up to three sites
// that share x, whatever mix of adapters, ranks and segment lengths the plan holds.
//
// A block takes one tile of entries (at most 32, one adapter), 16 ranks of one site and one split of the input; where a
// tile has more than 8 rows, up to three such runs of ranks, of any of the sites, so that q, k and v read x once. A
// lives in the M side of mma.m16n8k16 and rows of x in the N side, so a single decode row pads to 8 and rank 16 to
// nothing. The order of a dot product is free as long as both sides share it: a lane takes 8 consecutive columns by one
// 16-byte load and spends them on two mma steps, so both operands go from global memory to registers without shared
// memory in between. The four warps take every fourth run of 32 columns; their sums are added in warp order, and the
// splits stay apart in `s` for the expand to add up in order. That order follows from (input, rank) alone: a lone row
// and a row in a full tile get the same bits. No atomics, no counters, no second launch.
#include "include/lora_plan.cuh"

namespace {

constexpr i32 WARPS = 4;
constexpr i32 THREADS = WARPS * 32;
// Ranks of a unit in shared memory, padded so that the stores of a fragment hit 32 banks.
constexpr i32 PARTIAL_STRIDE = RANK_TILE + 4;
// Rank tiles of a unit where there are rows enough for the loads of x to matter.
constexpr i32 MANY_RANK_TILES = 3;
constexpr i32 PARTIAL_SIZE = WARPS * MANY_RANK_TILES * TILE_ROWS * PARTIAL_STRIDE;

// Up to 16 ranks of one site.
template <typename T> struct RankTile {
    const T* a;  // first of its rows
    i32 ranks;   // rows that are there
    float* s;    // of the tile's first entry and the unit's split
};

template <typename T, int RankTiles> struct ShrinkTask {
    RankTile<T> rank_tiles[RankTiles];
    i32 rank_tile_count;
    const T* x;
    i32 x_stride;
    const i32* entry_row; // of the tile's first entry
    size_t entry_stride;  // between the entries of `s`
    i32 count;
    i32 input;
    i32 column_first;
    i32 column_end;
};

template <typename T, int RankTiles, int RowTiles, int Unroll>
__device__ __forceinline__ void shrink(const ShrinkTask<T, RankTiles>& task, float* partial) {
    const i32 warp = threadIdx.x / 32;
    const i32 group = threadIdx.x % 32 / 4;
    const i32 column = threadIdx.x % 4 * 8;

    const T* a_rows[RankTiles][2];
    bool a_valid[RankTiles][2];
#pragma unroll
    for (int tile = 0; tile < RankTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const i32 rank = half * 8 + group;
            a_valid[tile][half] = tile < task.rank_tile_count && rank < task.rank_tiles[tile].ranks;
            a_rows[tile][half] = task.rank_tiles[tile].a + static_cast<size_t>(rank) * task.input;
        }
    }
    const T* x_rows[RowTiles];
    bool x_valid[RowTiles];
#pragma unroll
    for (int tile = 0; tile < RowTiles; ++tile) {
        const i32 entry = tile * 8 + group;
        x_valid[tile] = entry < task.count;
        const i32 row = __ldg(task.entry_row + min(entry, task.count - 1));
        x_rows[tile] = task.x + static_cast<size_t>(row) * task.x_stride;
    }

    float sums[RankTiles][RowTiles][4] = {};
    for (i32 first = task.column_first + warp * 32; first < task.column_end; first += INPUT_UNIT * Unroll) {
        uint4 a[Unroll][RankTiles][2];
        uint4 x[Unroll][RowTiles];
#pragma unroll
        for (int step = 0; step < Unroll; ++step) {
            const i32 at = first + step * INPUT_UNIT + column;
            const bool inside = at < task.column_end;
#pragma unroll
            for (int tile = 0; tile < RankTiles; ++tile) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    a[step][tile][half] = make_uint4(0, 0, 0, 0);
                    if (inside && a_valid[tile][half]) a[step][tile][half] = ldg16(a_rows[tile][half] + at);
                }
            }
#pragma unroll
            for (int tile = 0; tile < RowTiles; ++tile) {
                x[step][tile] = make_uint4(0, 0, 0, 0);
                if (inside && x_valid[tile]) x[step][tile] = ldg16(x_rows[tile] + at);
            }
        }
#pragma unroll
        for (int step = 0; step < Unroll; ++step) {
            if (first + step * INPUT_UNIT >= task.column_end) break;
#pragma unroll
            for (int row_tile = 0; row_tile < RowTiles; ++row_tile) {
                if (row_tile * 8 >= task.count) break;
                const u32 low[2] = {x[step][row_tile].x, x[step][row_tile].y};
                const u32 high[2] = {x[step][row_tile].z, x[step][row_tile].w};
#pragma unroll
                for (int rank_tile = 0; rank_tile < RankTiles; ++rank_tile) {
                    if (rank_tile >= task.rank_tile_count) break;
                    const uint4 top = a[step][rank_tile][0];
                    const uint4 bottom = a[step][rank_tile][1];
                    const u32 a_low[4] = {top.x, bottom.x, top.y, bottom.y};
                    const u32 a_high[4] = {top.z, bottom.z, top.w, bottom.w};
                    mma_m16n8k16<T>(sums[rank_tile][row_tile], a_low, low);
                    mma_m16n8k16<T>(sums[rank_tile][row_tile], a_high, high);
                }
            }
        }
    }

    // One warp's sums: [rank tile][entry][rank].
    constexpr i32 WARP_SIZE = RankTiles * RowTiles * 8 * PARTIAL_STRIDE;
#pragma unroll
    for (int rank_tile = 0; rank_tile < RankTiles; ++rank_tile) {
#pragma unroll
        for (int row_tile = 0; row_tile < RowTiles; ++row_tile) {
            const i32 entry = (rank_tile * RowTiles + row_tile) * 8 + threadIdx.x % 4 * 2;
            float* place = partial + warp * WARP_SIZE + entry * PARTIAL_STRIDE + group;
            place[0] = sums[rank_tile][row_tile][0];
            place[PARTIAL_STRIDE] = sums[rank_tile][row_tile][1];
            place[8] = sums[rank_tile][row_tile][2];
            place[PARTIAL_STRIDE + 8] = sums[rank_tile][row_tile][3];
        }
    }
    __syncthreads();
    // All 16 ranks of a tile are written: beyond the adapter's rank the sums are 0, and the expand reads whole tiles.
#pragma unroll
    for (int rank_tile = 0; rank_tile < RankTiles; ++rank_tile) {
        if (rank_tile >= task.rank_tile_count) break;
        for (i32 index = threadIdx.x; index < task.count * RANK_TILE; index += THREADS) {
            const i32 entry = index / RANK_TILE;
            const i32 rank = index % RANK_TILE;
            const float* place = partial + (rank_tile * RowTiles * 8 + entry) * PARTIAL_STRIDE + rank;
            float sum = place[0];
#pragma unroll
            for (int other = 1; other < WARPS; ++other) sum += place[other * WARP_SIZE];
            task.rank_tiles[rank_tile].s[entry * task.entry_stride + rank] = sum;
        }
    }
    __syncthreads();
}

// What the units of one tile of entries have in common.
template <typename T> struct EntryTile {
    const u64* a_pointers; // of the tile's adapter and the first site
    const i32* ranks;
    i32 parts;
    const i32* entry_row;
    i32 count;
    const T* x;
    i32 x_stride;
    i32 input;
    float* s;
    i32 s_stride;
};

template <typename T>
__device__ __forceinline__ RankTile<T> rank_tile_of(const EntryTile<T>& tile, i32 part, i32 rank_first, i32 split) {
    const i32 rank = tile.ranks[part];
    const T* a = reinterpret_cast<const T*>(tile.a_pointers[part]);
    return {a + static_cast<size_t>(rank_first) * tile.input, min(rank - rank_first, RANK_TILE),
            tile.s + static_cast<size_t>(part) * tile.s_stride + split * round_up(rank, RANK_TILE) + rank_first};
}

template <typename T, int RankTiles>
__device__ __forceinline__ ShrinkTask<T, RankTiles> task_of(const EntryTile<T>& tile, const InputSplit& split, i32 index) {
    ShrinkTask<T, RankTiles> task;
    task.rank_tile_count = 0;
    task.x = tile.x;
    task.x_stride = tile.x_stride;
    task.entry_row = tile.entry_row;
    task.entry_stride = static_cast<size_t>(tile.parts) * tile.s_stride;
    task.count = tile.count;
    task.input = tile.input;
    task.column_first = index * split.columns;
    task.column_end = min(task.column_first + split.columns, tile.input);
    return task;
}

// Units of one rank tile each, site after site.
template <typename T> __device__ __forceinline__ void shrink_one_by_one(const EntryTile<T>& tile, float* partial) {
    i32 unit = blockIdx.x;
    for (i32 part = 0; part < tile.parts; ++part) {
        const i32 rank = tile.ranks[part];
        if (rank == 0) continue;
        const InputSplit split = input_split(tile.input, rank);
        const i32 units = split.count * divide_up(rank, RANK_TILE);
        for (; unit < units; unit += gridDim.x) {
            const i32 index = unit % split.count;
            ShrinkTask<T, 1> task = task_of<T, 1>(tile, split, index);
            task.rank_tile_count = 1;
            task.rank_tiles[0] = rank_tile_of(tile, part, unit / split.count * RANK_TILE, index);
            if (tile.count <= 8) {
                shrink<T, 1, 1, 4>(task, partial);
            } else {
                shrink<T, 1, 4, 2>(task, partial);
            }
        }
        unit -= units;
    }
}

// Units of several rank tiles, which may be of different sites: their inputs are cut alike.
template <typename T>
__device__ __forceinline__ void shrink_together(const EntryTile<T>& tile, i32 rank_tiles, i32 rank, float* partial) {
    const InputSplit split = input_split(tile.input, rank);
    const i32 units = split.count * divide_up(rank_tiles, MANY_RANK_TILES);
    for (i32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const i32 index = unit % split.count;
        ShrinkTask<T, MANY_RANK_TILES> task = task_of<T, MANY_RANK_TILES>(tile, split, index);
        const i32 first = unit / split.count * MANY_RANK_TILES;
        task.rank_tile_count = min(MANY_RANK_TILES, rank_tiles - first);
#pragma unroll
        for (int i = 0; i < MANY_RANK_TILES; ++i) {
            i32 place = min(first + i, rank_tiles - 1);
            i32 part = 0;
            for (i32 of_part = divide_up(tile.ranks[0], RANK_TILE); place >= of_part;) {
                place -= of_part;
                of_part = divide_up(tile.ranks[++part], RANK_TILE);
            }
            task.rank_tiles[i] = rank_tile_of(tile, part, place * RANK_TILE, index);
        }
        shrink<T, MANY_RANK_TILES, 4, 1>(task, partial);
    }
}

template <typename T>
__device__ __forceinline__ void lora_shrink(const i32* header, const i32* tile_slot, const i32* tile_first,
                                            const i32* tile_count, const i32* entry_row, const u64* a_pointers,
                                            const i32* ranks, i32 sites, i32 site, i32 parts, const T* x, i32 x_stride,
                                            i32 input, float* s) {
    KSHARED(float, partial, [PARTIAL_SIZE]);
    const i32 tiles = header[HEADER_TILES];
    const i32 s_stride = header[HEADER_SHRINK_STRIDE];
    for (i32 index = blockIdx.y; index < tiles; index += gridDim.y) {
        const i32 first = tile_first[index];
        const i32 table = tile_slot[index] * sites + site;
        const EntryTile<T> tile = {a_pointers + table, ranks + table, parts, entry_row + first, tile_count[index],
                                   x, x_stride, input, s + static_cast<size_t>(first) * parts * s_stride, s_stride};
        i32 rank_tiles = 0;
        i32 rank = 0;
        bool alike = true;
        for (i32 part = 0; part < parts; ++part) {
            const i32 of_part = tile.ranks[part];
            if (of_part == 0) continue;
            alike = alike && (rank == 0 || input_split(input, of_part).count == input_split(input, rank).count);
            rank_tiles += divide_up(of_part, RANK_TILE);
            rank = of_part;
        }
        if (tile.count > 8 && alike && rank_tiles > 1) {
            shrink_together(tile, rank_tiles, rank, partial);
        } else {
            shrink_one_by_one(tile, partial);
        }
    }
}

} // namespace

// Two blocks to a multiprocessor at least, so that none spills to get a third.
#define LORA_SHRINK(name, T)                                                                                               \
    KERNEL_BLOCKS(THREADS, 2, name)(const i32* header, const i32* tile_slot, const i32* tile_first, const i32* tile_count, \
                          const i32* entry_row, const u64* a_pointers, const i32* ranks, i32 sites, i32 site,              \
                          i32 parts, const T* x, i32 x_stride, i32 input, f32* s) {                                        \
        lora_shrink<T>(header, tile_slot, tile_first, tile_count, entry_row, a_pointers, ranks, sites, site, parts, x,     \
                       x_stride, input, s);                                                                                \
    }                                                                                                                      \
    KERNEL_EXPORT(name)

LORA_SHRINK(lora_shrink_bf16, bf16)
LORA_SHRINK(lora_shrink_f16, f16)
