// Products with the base's weights, out = x W^T, by a kernel of our own: for machines without cuBLASLt, and for steps
// whose rows get the same bits whatever other rows there are, which no library promises.
//
// One arithmetic, in both shapes of tile. The columns of the input are cut into units of 32, and the units into 8 slices
// of equal length; how many units follows from the input's width alone. Within a slice an element's sum goes from unit
// to unit, two steps of mma.m16n8k16 each, which start from 0; the sums of the slices are added up in order. What is
// beyond the input is 0. W lives in the M side of the mma and rows of x in its N side, so that one row pads to 8 and no
// more. As in the shrink, a lane takes 8 consecutive columns by one 16-byte load and spends them on both steps: the order
// within a dot product is free as long as both sides share it.
//
// Few rows (decode steps) wait for the weights: every warp of a block reads one slice of the same 16 or 32 rows of W from
// global memory straight to registers, which keeps enough bytes under way, and the slices meet in shared memory. Many rows
// (prompts) wait for the tensor cores: a block keeps 64 outputs x 128 rows, stages a unit of both operands by
// asynchronous copies, four units deep, and goes through the slices one after the other.
#include "include/rows.cuh"

namespace {

constexpr i32 UNIT = 32;
constexpr i32 SLICES = 8;

template <typename T> struct Product {
    const T* x;
    i32 x_stride;
    i32 rows;
    const T* weight; // [output][input]
    i32 input;
    i32 output;
    float* out;
    i32 out_stride;
    bool add;
};

// Units of a slice; the last slices may have fewer, or none.
__device__ __forceinline__ i32 slice_units(i32 input) { return divide_up(divide_up(input, UNIT), SLICES); }

template <typename T>
__device__ __forceinline__ void finish(const Product<T>& product, i32 row, i32 column, float sum) {
    float* place = product.out + static_cast<size_t>(row) * product.out_stride + column;
    *place = product.add ? *place + sum : sum;
}

// One unit of a tile of 16 outputs x 8 rows: `w` are the 8 columns of outputs (lane / 4) and (lane / 4 + 8), `x` of row
// (lane / 4).
template <typename T>
__device__ __forceinline__ void multiply_unit(float (&sums)[4], const uint4 (&w)[2], const uint4& x) {
    const u32 w_low[4] = {w[0].x, w[1].x, w[0].y, w[1].y};
    const u32 w_high[4] = {w[0].z, w[1].z, w[0].w, w[1].w};
    const u32 x_low[2] = {x.x, x.y};
    const u32 x_high[2] = {x.z, x.w};
    mma_m16n8k16<T>(sums, w_low, x_low);
    mma_m16n8k16<T>(sums, w_high, x_high);
}

// --- few rows

constexpr i32 FEW_THREADS = SLICES * 32;
// Rows of a block, and outputs where there are more than 8 rows: then x, too, is worth reading less often.
constexpr i32 FEW_ROWS = 32;
constexpr i32 FEW_OUTPUTS = 32;
// Outputs of a tile in shared memory, padded so that the stores of a fragment hit 32 banks.
constexpr i32 SLICE_STRIDE = 16 + 4;
constexpr i32 SLICE_SIZE = FEW_OUTPUTS / 16 * FEW_ROWS * SLICE_STRIDE;

// Outputs from `first` on of `count` rows from `row` on. `slices` holds [slice][16 outputs][row][output].
template <typename T, int OutputTiles, int RowTiles, int Unroll>
__device__ __forceinline__ void multiply_few(const Product<T>& product, i32 row, i32 count, i32 first, float* slices) {
    const i32 warp = threadIdx.x / 32;
    const i32 group = threadIdx.x % 32 / 4;
    const i32 place = threadIdx.x % 4;
    const i32 columns = slice_units(product.input) * UNIT;
    const i32 column_first = warp * columns;
    const i32 column_end = min(column_first + columns, product.input);

    const T* w_rows[OutputTiles][2];
#pragma unroll
    for (int tile = 0; tile < OutputTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const i32 output = min(first + tile * 16 + half * 8 + group, product.output - 1);
            w_rows[tile][half] = product.weight + static_cast<size_t>(output) * product.input;
        }
    }
    const T* x_rows[RowTiles];
    bool x_valid[RowTiles];
#pragma unroll
    for (int tile = 0; tile < RowTiles; ++tile) {
        x_valid[tile] = tile * 8 + group < count;
        x_rows[tile] = product.x + static_cast<size_t>(row + min(tile * 8 + group, count - 1)) * product.x_stride;
    }

    float sums[OutputTiles][RowTiles][4] = {};
    for (i32 start = column_first; start < column_end; start += UNIT * Unroll) {
        uint4 w[Unroll][OutputTiles][2];
        uint4 x[Unroll][RowTiles];
#pragma unroll
        for (int step = 0; step < Unroll; ++step) {
            const i32 at = start + step * UNIT + place * 8;
            const bool inside = at < column_end;
#pragma unroll
            for (int tile = 0; tile < OutputTiles; ++tile) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    w[step][tile][half] = inside ? ldg16_once(w_rows[tile][half] + at) : make_uint4(0, 0, 0, 0);
                }
            }
#pragma unroll
            for (int tile = 0; tile < RowTiles; ++tile) {
                x[step][tile] = inside && x_valid[tile] ? ldg16(x_rows[tile] + at) : make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int step = 0; step < Unroll; ++step) {
            if (start + step * UNIT >= column_end) break;
#pragma unroll
            for (int row_tile = 0; row_tile < RowTiles; ++row_tile) {
                if (row_tile * 8 >= count) break;
#pragma unroll
                for (int tile = 0; tile < OutputTiles; ++tile) {
                    multiply_unit<T>(sums[tile][row_tile], w[step][tile], x[step][row_tile]);
                }
            }
        }
    }

    constexpr i32 TILE_SIZE = FEW_ROWS * SLICE_STRIDE;
#pragma unroll
    for (int tile = 0; tile < OutputTiles; ++tile) {
#pragma unroll
        for (int row_tile = 0; row_tile < RowTiles; ++row_tile) {
            float* to = slices + warp * SLICE_SIZE + tile * TILE_SIZE + (row_tile * 8 + place * 2) * SLICE_STRIDE + group;
            to[0] = sums[tile][row_tile][0];
            to[SLICE_STRIDE] = sums[tile][row_tile][1];
            to[8] = sums[tile][row_tile][2];
            to[SLICE_STRIDE + 8] = sums[tile][row_tile][3];
        }
    }
    __syncthreads();
    constexpr i32 OUTPUTS = OutputTiles * 16;
    for (i32 index = threadIdx.x; index < count * OUTPUTS; index += FEW_THREADS) {
        const i32 output = index % OUTPUTS;
        const float* from = slices + output / 16 * TILE_SIZE + index / OUTPUTS * SLICE_STRIDE + output % 16;
        float sum = 0.0f;
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) sum += from[slice * SLICE_SIZE];
        if (first + output < product.output) finish(product, row + index / OUTPUTS, first + output, sum);
    }
    __syncthreads();
}

template <typename T> __device__ __forceinline__ void matmul_few_rows(const Product<T>& product) {
    KSHARED(float, slices, [SLICES * SLICE_SIZE]);
    for (i32 row = blockIdx.x * FEW_ROWS; row < product.rows; row += gridDim.x * FEW_ROWS) {
        const i32 count = min(product.rows - row, FEW_ROWS);
        const i32 outputs = count <= 8 ? 16 : FEW_OUTPUTS;
        for (i32 first = blockIdx.y * outputs; first < product.output; first += gridDim.y * outputs) {
            if (count <= 8) {
                multiply_few<T, 1, 1, 4>(product, row, count, first, slices);
            } else {
                multiply_few<T, 2, 4, 2>(product, row, count, first, slices);
            }
        }
    }
}

// --- many rows

constexpr i32 MANY_THREADS = 128;
constexpr i32 MANY_ROWS = 128;
constexpr i32 MANY_OUTPUTS = 64;
constexpr i32 STAGES = 4;
// Rows of W, then rows of x. A row of a unit is 64 bytes, so two of them fill all banks: as 16-byte loads take them.
constexpr i32 STAGE_ROWS = MANY_OUTPUTS + MANY_ROWS;
constexpr i32 STAGE_SIZE = STAGE_ROWS * UNIT;
// What a warp keeps: a half of the block's outputs and a half of its rows.
constexpr i32 WARP_OUTPUT_TILES = MANY_OUTPUTS / 2 / 16;
constexpr i32 WARP_ROW_TILES = MANY_ROWS / 2 / 8;

// One unit of the block's operands on its way to shared memory.
template <typename T>
__device__ __forceinline__ void stage_unit(const Product<T>& product, i32 row, i32 first, i32 unit, T* stage) {
    const i32 at = unit * UNIT + threadIdx.x % 4 * 8;
    const bool inside = at < product.input;
    const i32 column = inside ? at : 0;
#pragma unroll
    for (int index = threadIdx.x / 4, step = 0; step < STAGE_ROWS / (MANY_THREADS / 4); ++step) {
        T* to = stage + (index + step * (MANY_THREADS / 4)) * UNIT + threadIdx.x % 4 * 8;
        const i32 of_block = index + step * (MANY_THREADS / 4);
        if (step < MANY_OUTPUTS / (MANY_THREADS / 4)) {
            const i32 output = min(first + of_block, product.output - 1);
            cp_async16_or_zero(to, product.weight + static_cast<size_t>(output) * product.input + column, inside);
        } else {
            const i32 wanted = row + of_block - MANY_OUTPUTS;
            const i32 there = min(wanted, product.rows - 1);
            cp_async16_or_zero(to, product.x + static_cast<size_t>(there) * product.x_stride + column,
                               inside && wanted < product.rows);
        }
    }
}

template <typename T>
__device__ __forceinline__ void multiply_many(const Product<T>& product, i32 row, i32 first, T* stages) {
    const i32 warp = threadIdx.x / 32;
    const i32 group = threadIdx.x % 32 / 4;
    const i32 place = threadIdx.x % 4;
    const i32 warp_output = warp % 2 * (MANY_OUTPUTS / 2);
    const i32 warp_row = warp / 2 * (MANY_ROWS / 2);
    const bool idle = row + warp_row >= product.rows || first + warp_output >= product.output;
    const i32 units = divide_up(product.input, UNIT);
    const i32 of_slice = slice_units(product.input);

    float totals[WARP_OUTPUT_TILES][WARP_ROW_TILES][4] = {};
    float sums[WARP_OUTPUT_TILES][WARP_ROW_TILES][4] = {};
#pragma unroll
    for (int unit = 0; unit < STAGES - 1; ++unit) {
        if (unit < units) stage_unit(product, row, first, unit, stages + unit * STAGE_SIZE);
        cp_async_commit();
    }
    i32 slice_end = of_slice;
    for (i32 unit = 0; unit < units; ++unit) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        const i32 next = unit + STAGES - 1;
        // Its place is that of the unit before this one, which everybody has left.
        if (next < units) stage_unit(product, row, first, next, stages + next % STAGES * STAGE_SIZE);
        cp_async_commit();
        if (idle) continue;
        const T* stage = stages + unit % STAGES * STAGE_SIZE + group * UNIT + place * 8;
        uint4 w[WARP_OUTPUT_TILES][2];
#pragma unroll
        for (int tile = 0; tile < WARP_OUTPUT_TILES; ++tile) {
            w[tile][0] = lds16(stage + (warp_output + tile * 16) * UNIT);
            w[tile][1] = lds16(stage + (warp_output + tile * 16 + 8) * UNIT);
        }
#pragma unroll
        for (int row_tile = 0; row_tile < WARP_ROW_TILES; ++row_tile) {
            const uint4 x = lds16(stage + (MANY_OUTPUTS + warp_row + row_tile * 8) * UNIT);
#pragma unroll
            for (int tile = 0; tile < WARP_OUTPUT_TILES; ++tile) multiply_unit<T>(sums[tile][row_tile], w[tile], x);
        }
        if (unit + 1 < slice_end && unit + 1 < units) continue;
        slice_end += of_slice;
#pragma unroll
        for (int tile = 0; tile < WARP_OUTPUT_TILES; ++tile) {
#pragma unroll
            for (int row_tile = 0; row_tile < WARP_ROW_TILES; ++row_tile) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    totals[tile][row_tile][i] += sums[tile][row_tile][i];
                    sums[tile][row_tile][i] = 0.0f;
                }
            }
        }
    }
    const auto for_each_place = [&](auto use) {
#pragma unroll
        for (int tile = 0; tile < WARP_OUTPUT_TILES; ++tile) {
#pragma unroll
            for (int row_tile = 0; row_tile < WARP_ROW_TILES; ++row_tile) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const i32 to_row = row + warp_row + row_tile * 8 + place * 2 + i % 2;
                    const i32 to_column = first + warp_output + tile * 16 + i / 2 * 8 + group;
                    if (to_row < product.rows && to_column < product.output) {
                        use(product.out + static_cast<size_t>(to_row) * product.out_stride + to_column,
                            sums[tile][row_tile][i], totals[tile][row_tile][i]);
                    }
                }
            }
        }
    };
    // All that is there is asked for before the first store, so that the waits are one.
    if (product.add) {
        for_each_place([](const float* from, float& before, float&) { before = *from; });
        for_each_place([](const float*, float& before, float& total) { total = before + total; });
    }
    for_each_place([](float* to, float&, float& total) { *to = total; });
    // The next tile of the block fills the stages anew.
    __syncthreads();
}

template <typename T> __device__ __forceinline__ void matmul(const Product<T>& product) {
    KSHARED(T, stages, [STAGES * STAGE_SIZE]);
    for (i32 first = blockIdx.y * MANY_OUTPUTS; first < product.output; first += gridDim.y * MANY_OUTPUTS) {
        for (i32 row = blockIdx.x * MANY_ROWS; row < product.rows; row += gridDim.x * MANY_ROWS) {
            multiply_many(product, row, first, stages);
        }
    }
}

} // namespace

#define MATMUL(threads, name, multiply, T)                                                                               \
    KERNEL_BLOCKS(threads, 2, name)(const i32* header, i32 count, const T* x, i32 x_stride, const T* weight, i32 input,  \
                                    i32 output, f32* out, i32 out_stride, i32 add) {                                     \
        multiply<T>({x, x_stride, header[count], weight, input, output, out, out_stride, add != 0});                     \
    }                                                                                                                    \
    KERNEL_EXPORT(name)

MATMUL(FEW_THREADS, matmul_few_rows_bf16, matmul_few_rows, bf16)
MATMUL(FEW_THREADS, matmul_few_rows_f16, matmul_few_rows, f16)
MATMUL(MANY_THREADS, matmul_bf16, matmul, bf16)
MATMUL(MANY_THREADS, matmul_f16, matmul, f16)
