// The cuBLASLt stand-in's opaque objects, and the way to the device of the other library.
#pragma once

#include "gemm.h"

namespace emu {

enum BlasStatus : int {
    blas_success = 0,
    blas_not_initialized = 1,
    blas_alloc_failed = 3,
    blas_invalid_value = 7,
    blas_execution_failed = 13,
    blas_internal_error = 14,
    blas_not_supported = 15,
};

struct MatrixLayout {
    Number number;
    u64 rows;
    u64 columns;
    i64 leading;
    int row_major;
    int batches;
    i64 batch_stride;
};

struct MatmulDescription {
    int compute;
    int scale;
    int pointer_mode;
    int transpose_a;
    int transpose_b;
    int epilogue;
    const void* bias;
    i64 bias_batch_stride;
    int bias_number; // -1: that of D
};

struct MatmulPreference {
    u64 workspace_bytes;
};

struct MatmulAlgorithm {
    u64 data[8]; // [0] marks it as one of ours, [1] is its id, [2] the workspace that it asks for
};

struct HeuristicResult {
    MatmulAlgorithm algorithm;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

// Objects that are alive: a pointer that is not among them is refused.
bool is_alive(const void* object);
void add_object(const void* object);
bool remove_object(const void* object);

} // namespace emu
