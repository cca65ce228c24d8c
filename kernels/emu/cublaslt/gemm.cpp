// See gemm.h. Both operands are widened to f32 panels in which the summed axis is contiguous, so that one dot product
// serves every layout.
#pragma GCC optimize("O3")
#include "gemm.h"

#include <algorithm>
#include <vector>

#include "../vectors.h"

#include "../calls.h"

namespace emu {

namespace {

float read(const void* data, Number number, i64 at) {
    switch (number) {
    case Number::F32: return static_cast<const float*>(data)[at];
    case Number::F16: return float_from_half(static_cast<const u16*>(data)[at]);
    case Number::Bf16: return reinterpret<float>(static_cast<u32>(static_cast<const u16*>(data)[at]) << 16);
    }
    return 0.0f;
}

void write(void* data, Number number, i64 at, float value) {
    switch (number) {
    case Number::F32: static_cast<float*>(data)[at] = value; break;
    case Number::F16: static_cast<u16*>(data)[at] = half_from_float(value); break;
    case Number::Bf16: static_cast<u16*>(data)[at] = brain_from_float(value); break;
    }
}

// Partial sums side by side, added up in a fixed tree at the end.
constexpr i64 lanes = 16;
constexpr i64 tile = 4;

// `length` elements from `at` on, `stride` apart, widened, then zeros up to a multiple of `lanes`.
void widen(const Matrix& from, i64 at, i64 stride, i64 length, i64 padded, float* to) {
    if (from.number == Number::Bf16 && stride == 1) {
        const u16* values = static_cast<const u16*>(from.data) + at;
        for (i64 i = 0; i < length; ++i) to[i] = reinterpret<float>(static_cast<u32>(values[i]) << 16);
    } else {
        for (i64 i = 0; i < length; ++i) to[i] = read(from.data, from.number, at + i * stride);
    }
    for (i64 i = length; i < padded; ++i) to[i] = 0.0f;
}

// Dot products of one vector with `tile` others; each sum is formed as if it were alone.
void dots(const float* x, const float* y, i64 y_stride, i64 length, float* sums) {
    float partial[tile][lanes] = {};
    for (i64 k = 0; k < length; k += lanes) {
        for (i64 j = 0; j < tile; ++j) {
            for (i64 i = 0; i < lanes; ++i) partial[j][i] += x[k + i] * y[j * y_stride + k + i];
        }
    }
    for (i64 j = 0; j < tile; ++j) {
        for (i64 half = lanes / 2; half > 0; half /= 2) {
            for (i64 i = 0; i < half; ++i) partial[j][i] += partial[j][i + half];
        }
        sums[j] = partial[j][0];
    }
}

float activate(float value, Activation activation) {
    if (activation == Activation::Relu) return value > 0.0f ? value : 0.0f;
    if (activation == Activation::Gelu) {
        return 0.5f * value * (1.0f + tanhf(0.7978845608f * (value + 0.044715f * value * value * value)));
    }
    return value;
}

void finish(const Product& p, i64 row, i64 column, float sum) {
    float value = p.alpha * sum;
    // With beta = 0, C is not read: it may hold NaN.
    if (p.beta != 0.0f) value += p.beta * read(p.c.data, p.c.number, row * p.c.row_stride + column * p.c.column_stride);
    if (p.bias != nullptr) value += read(p.bias, p.bias_number, row);
    write(p.d.data, p.d.number, row * p.d.row_stride + column * p.d.column_stride, activate(value, p.activation));
}

} // namespace

size_t number_bytes(Number number) { return number == Number::F32 ? 4 : 2; }

void multiply(const Product& p) {
    const i64 padded = (p.depth + lanes - 1) / lanes * lanes;
    const i64 part = (padded / lanes + p.parts - 1) / p.parts * lanes;
    const i64 columns = (p.columns + tile - 1) / tile * tile;
    std::vector<float> b(static_cast<size_t>(columns * padded), 0.0f);
    std::vector<float> a(static_cast<size_t>(padded));
    for (i64 column = 0; column < p.columns; ++column) {
        float* to = &b[static_cast<size_t>(column * padded)];
        widen(p.b, column * p.b.column_stride, p.b.row_stride, p.depth, padded, to);
    }
    for (i64 row = 0; row < p.rows; ++row) {
        widen(p.a, row * p.a.row_stride, p.a.column_stride, p.depth, padded, a.data());
        for (i64 column = 0; column < p.columns; column += tile) {
            float sums[tile] = {};
            for (i64 first = 0; first < padded; first += part) {
                float partial[tile];
                const float* panel = &b[static_cast<size_t>(column * padded + first)];
                dots(a.data() + first, panel, padded, std::min(part, padded - first), partial);
                for (i64 j = 0; j < tile; ++j) sums[j] += partial[j];
            }
            for (i64 j = 0; j < tile && column + j < p.columns; ++j) finish(p, row, column + j, sums[j]);
        }
    }
}

} // namespace emu
