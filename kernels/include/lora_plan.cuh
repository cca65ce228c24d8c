// How the shrink and the expand read the row-adapter plan and the adapter table, and how the reduction of a shrink is
// cut. Both must agree on the cut, and it must follow from a weight's shape alone: then what a row gets does not depend on
// how many rows share its adapter.
#pragma once

#include "rows.cuh"

// Most entries of a tile.
constexpr i32 TILE_ROWS = 32;
// Ranks of one mma tile.
constexpr i32 RANK_TILE = 16;
// Columns of the input that the four warps of a block take at once, 32 each.
constexpr i32 INPUT_UNIT = 128;

// How the columns of the input are cut into partial sums.
struct InputSplit {
    i32 count;
    i32 columns;
};

// Small ranks give few tiles, so their input is cut finer; in total a site gives about eight units of work.
__device__ __forceinline__ InputSplit input_split(i32 input, i32 rank) {
    const i32 most = rank <= 16 ? 8 : rank <= 32 ? 4 : rank <= 64 ? 2 : 1;
    const i32 units = divide_up(input, INPUT_UNIT);
    const i32 each = max(divide_up(units, most), 1);
    return {max(divide_up(units, each), 1), each * INPUT_UNIT};
}
