// Tensor-core tiles: ldmatrix and mma.m16n8k16 in PTX's register layout, done once for a whole warp. Sums go over k in
// rising order in f32; a card's own order is not documented, so results are compared with tolerances there.
#include "gather.h"
#include "hooks.h"

namespace emu {

namespace {

struct MatrixRequest {
    u32* out;
    const void* row;
    int matrices;
    bool transposed;
};

void combine_ldmatrix(u32, void* const* requests) {
    const auto& first = *static_cast<MatrixRequest*>(requests[0]);
    for (int matrix = 0; matrix < first.matrices; ++matrix) {
        u16 elements[8][8];
        for (int row = 0; row < 8; ++row) {
            std::memcpy(elements[row], static_cast<MatrixRequest*>(requests[matrix * 8 + row])->row, 16);
        }
        for (int lane = 0; lane < static_cast<int>(warp_size); ++lane) {
            const int row = lane / 4;
            const int column = lane % 4 * 2;
            const u16 low = first.transposed ? elements[column][row] : elements[row][column];
            const u16 high = first.transposed ? elements[column + 1][row] : elements[row][column + 1];
            static_cast<MatrixRequest*>(requests[lane])->out[matrix] = low | static_cast<u32>(high) << 16;
        }
    }
}

struct MultiplyRequest {
    float* d;
    const u32* a;
    const u32* b;
};

template <bool Brain> float widen(u32 bits) {
    if (Brain) return reinterpret<float>(bits << 16);
    return float_from_half(static_cast<u16>(bits));
}

template <bool Brain> void combine_mma(u32, void* const* requests) {
    float a[16][16]; // [row][k]
    float b[16][8];  // [k][column]
    float d[16][8];
    for (int lane = 0; lane < static_cast<int>(warp_size); ++lane) {
        const auto& request = *static_cast<MultiplyRequest*>(requests[lane]);
        const int group = lane / 4;
        const int pair = lane % 4 * 2;
        for (int i = 0; i < 4; ++i) {
            float* to = &a[group + (i & 1) * 8][pair + (i >> 1) * 8];
            to[0] = widen<Brain>(request.a[i] & 0xffffu);
            to[1] = widen<Brain>(request.a[i] >> 16);
        }
        for (int i = 0; i < 2; ++i) {
            b[pair + i * 8][group] = widen<Brain>(request.b[i] & 0xffffu);
            b[pair + i * 8 + 1][group] = widen<Brain>(request.b[i] >> 16);
        }
        for (int i = 0; i < 4; ++i) d[group + (i >> 1) * 8][pair + (i & 1)] = request.d[i];
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 16; ++k) {
            for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
        }
    }
    for (int lane = 0; lane < static_cast<int>(warp_size); ++lane) {
        const auto& request = *static_cast<MultiplyRequest*>(requests[lane]);
        for (int i = 0; i < 4; ++i) request.d[i] = d[lane / 4 + (i >> 1) * 8][lane % 4 * 2 + (i & 1)];
    }
}

} // namespace

void ldmatrix(u32* out, const void* row, int matrices, bool transposed, Site site) {
    const Fiber& fiber = this_fiber();
    // Lanes beyond the matrices' rows give addresses that nobody reads.
    if (fiber.lane < static_cast<u32>(matrices) * 8) {
        const Executor& state = *executor;
        const auto address = reinterpret_cast<uintptr_t>(row);
        const auto arena = reinterpret_cast<uintptr_t>(state.arena);
        if (address % 16 != 0) misaligned(row, 16, site);
        if (address < arena || address + 16 > arena + state.block.shared_used) {
            fail("ldmatrix of a row that is not in shared memory at " + describe(site));
        }
        hook_matrix_row(row, site);
    }
    MatrixRequest request{out, row, matrices, transposed};
    gather(0xffffffffu, &request, combine_ldmatrix, site);
}

void mma(float* d, const u32* a, const u32* b, bool brain, Site site) {
    MultiplyRequest request{d, a, b};
    gather(0xffffffffu, &request, brain ? combine_mma<true> : combine_mma<false>, site);
}

} // namespace emu
