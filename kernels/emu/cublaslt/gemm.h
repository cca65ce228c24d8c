// The matrix product behind the cuBLASLt stand-in, on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../include/integers.h"

namespace emu {

// Numbers of cudaDataType.
enum class Number : int { F32 = 0, F16 = 2, Bf16 = 14 };

size_t number_bytes(Number number);

struct Matrix {
    void* data;
    Number number;
    // Distance between neighbours along the two axes, in elements.
    i64 row_stride;
    i64 column_stride;
};

enum class Activation { None, Relu, Gelu };

struct Product {
    i64 rows;    // of D
    i64 columns; // of D
    i64 depth;
    i64 parts;   // of the summed axis, each summed for itself
    Matrix a; // [rows][depth], transposition already in the strides
    Matrix b; // [depth][columns]
    Matrix c; // [rows][columns], may be D
    Matrix d;
    float alpha;
    float beta;
    const void* bias; // one for each row of D, or null
    Number bias_number;
    Activation activation;
};

// D = activation(alpha A B + beta C + bias). f32 accumulation; the order of an element's sum depends on `depth` and `parts` only.
void multiply(const Product& product);

} // namespace emu
