// Entry points: the product itself and its algorithms. Shapes and pointers are checked when the call is made, as the
// library does; the work runs when its stream comes to it.
#include <cstring>
#include <string>
#include <utility>

#include "entry.h"

namespace emu {

namespace {

constexpr u64 algorithm_mark = 0x656d75616c676f00u;
constexpr u64 wanted_workspace = 32 * 1024;
// Their ids are 1, 2, 3: so many parts of the summed axis are summed for themselves.
constexpr u64 algorithms = 3;

struct Operands {
    const MatrixLayout* a;
    const MatrixLayout* b;
    const MatrixLayout* c;
    const MatrixLayout* d;
};

struct Shape {
    i64 rows, columns, depth;
};

bool leading_fits(const MatrixLayout& layout) {
    const u64 least = layout.row_major != 0 ? layout.columns : layout.rows;
    return layout.leading >= static_cast<i64>(least) && layout.row_major <= 1;
}

BlasStatus check_shape(const MatmulDescription& description, const Operands& o, Shape& shape) {
    const bool ta = description.transpose_a != 0;
    const bool tb = description.transpose_b != 0;
    shape.rows = static_cast<i64>(ta ? o.a->columns : o.a->rows);
    shape.depth = static_cast<i64>(ta ? o.a->rows : o.a->columns);
    shape.columns = static_cast<i64>(tb ? o.b->rows : o.b->columns);
    const auto depth_b = static_cast<i64>(tb ? o.b->columns : o.b->rows);
    if (depth_b != shape.depth || shape.rows == 0 || shape.columns == 0 || shape.depth == 0) return blas_invalid_value;
    for (const MatrixLayout* output : {o.c, o.d}) {
        if (static_cast<i64>(output->rows) != shape.rows || static_cast<i64>(output->columns) != shape.columns) {
            return blas_invalid_value;
        }
    }
    for (const MatrixLayout* layout : {o.a, o.b, o.c, o.d}) {
        if (!leading_fits(*layout) || layout->batches != o.a->batches) return blas_invalid_value;
    }
    if (o.a->number != o.b->number || o.c->number != o.d->number) return blas_not_supported;
    // f32 inputs give f32; halves give f32 or themselves.
    if (o.d->number != Number::F32 && o.d->number != o.a->number) return blas_not_supported;
    const int epilogue = description.epilogue;
    if (epilogue != 1 && epilogue != 2 && epilogue != 4 && epilogue != 6 && epilogue != 32 && epilogue != 36) {
        return blas_not_supported;
    }
    return blas_success;
}

Matrix place(const MatrixLayout& layout, const void* data, bool transposed) {
    i64 row = layout.row_major != 0 ? layout.leading : 1;
    i64 column = layout.row_major != 0 ? 1 : layout.leading;
    if (transposed) std::swap(row, column);
    return {const_cast<void*>(data), layout.number, row, column};
}

size_t extent(const MatrixLayout& layout) {
    const u64 outer = layout.row_major != 0 ? layout.rows : layout.columns;
    const u64 inner = layout.row_major != 0 ? layout.columns : layout.rows;
    const u64 elements = static_cast<u64>(layout.batches - 1) * static_cast<u64>(layout.batch_stride) +
                         (outer - 1) * static_cast<u64>(layout.leading) + inner;
    return elements * number_bytes(layout.number);
}

struct Work {
    Product product;
    MatrixLayout layouts[4];
    int batches;
    i64 bias_stride;
    const void* alpha_on_device;
    const void* beta_on_device;
    void* workspace;
    size_t workspace_bytes;
};

// Calls `visit(address, bytes)` for each contiguous line of a matrix, until one gives false.
template <typename Visit> bool for_each_line(const MatrixLayout& layout, const void* data, Visit visit) {
    const u64 outer = layout.row_major != 0 ? layout.rows : layout.columns;
    const u64 inner = layout.row_major != 0 ? layout.columns : layout.rows;
    const size_t width = number_bytes(layout.number);
    for (i64 batch = 0; batch < layout.batches; ++batch) {
        for (u64 line = 0; line < outer; ++line) {
            const i64 element = batch * layout.batch_stride + static_cast<i64>(line) * layout.leading;
            if (!visit(static_cast<const char*>(data) + element * static_cast<i64>(width), inner * width)) return false;
        }
    }
    return true;
}

bool fault(const char* matrix, const char* what) {
    emu_fault((std::string("cublasLtMatmul: matrix ") + matrix + " " + what).c_str());
    return false;
}

// When the work runs: what it reads must still be there, and written.
bool operands_ready(const Work& work) {
    const Product& p = work.product;
    const void* data[4] = {p.a.data, p.b.data, p.c.data, p.d.data};
    const char* names[4] = {"A", "B", "C", "D"};
    for (int i = 0; i < 4; ++i) {
        if (i == 2 && p.beta == 0.0f && work.beta_on_device == nullptr) continue;
        if (!emu_device_holds(data[i], extent(work.layouts[i]))) return fault(names[i], "is not within one allocation");
        if (i == 3) continue;
        const auto written = [](const void* line, size_t bytes) { return emu_device_initialised(line, bytes) != 0; };
        if (!for_each_line(work.layouts[i], data[i], written)) return fault(names[i], "is read before it is written");
    }
    return true;
}

void run(void* data) {
    const Work& work = *static_cast<Work*>(data);
    if (!operands_ready(work)) return;
    Product p = work.product;
    if (work.alpha_on_device != nullptr) std::memcpy(&p.alpha, work.alpha_on_device, 4);
    if (work.beta_on_device != nullptr) std::memcpy(&p.beta, work.beta_on_device, 4);
    // Nobody else may keep anything in a product's workspace.
    if (work.workspace_bytes > 0) std::memset(work.workspace, 0xff, work.workspace_bytes);
    for (int batch = 0; batch < work.batches; ++batch) {
        const auto shift = [&](const Matrix& matrix, int which) {
            Matrix moved = matrix;
            const i64 elements = batch * work.layouts[which].batch_stride;
            moved.data = static_cast<char*>(matrix.data) + elements * static_cast<i64>(number_bytes(matrix.number));
            return moved;
        };
        Product one = p;
        one.a = shift(p.a, 0);
        one.b = shift(p.b, 1);
        one.c = shift(p.c, 2);
        one.d = shift(p.d, 3);
        if (p.bias != nullptr) {
            const i64 bytes = work.bias_stride * static_cast<i64>(number_bytes(p.bias_number));
            one.bias = static_cast<const char*>(p.bias) + batch * bytes;
        }
        multiply(one);
    }
    for_each_line(work.layouts[3], p.d.data, [](const void* line, size_t bytes) {
        emu_device_written(line, bytes);
        return true;
    });
}

void drop(void* data) { delete static_cast<Work*>(data); }

// As the library does, it takes another algorithm, which sums in another order, for another number of columns of the result
// (rows of x).
u64 preferred(const Shape& shape) { return shape.columns == 1 ? 1 : shape.columns <= 16 ? 2 : algorithms; }

BlasStatus give_algorithm(u64 id, u64 workspace_limit, HeuristicResult& result) {
    result = {};
    result.algorithm.data[0] = algorithm_mark;
    result.algorithm.data[1] = id;
    result.algorithm.data[2] = workspace_limit < wanted_workspace ? workspace_limit : wanted_workspace;
    result.workspace_bytes = result.algorithm.data[2];
    result.state = blas_success;
    result.waves = 1.0f;
    return blas_success;
}

bool known(const MatmulAlgorithm& algorithm) {
    return algorithm.data[0] == algorithm_mark && algorithm.data[1] >= 1 && algorithm.data[1] <= algorithms;
}

bool all_alive(const void* handle, const void* description, const Operands& o) {
    for (const void* object : {handle, description, static_cast<const void*>(o.a), static_cast<const void*>(o.b),
                               static_cast<const void*>(o.c), static_cast<const void*>(o.d)}) {
        if (!is_alive(object)) return false;
    }
    return true;
}

} // namespace

EMU_API BlasStatus cublasLtMatmulAlgoGetHeuristic(void* handle, const MatmulDescription* description,
                                                  const MatrixLayout* a, const MatrixLayout* b, const MatrixLayout* c,
                                                  const MatrixLayout* d, const MatmulPreference* preference, int wanted,
                                                  HeuristicResult* results, int* found) {
    return entry(__func__, [&] {
        const Operands operands{a, b, c, d};
        if (!all_alive(handle, description, operands) || !is_alive(preference)) return blas_invalid_value;
        if (wanted < 1 || results == nullptr || found == nullptr) return blas_invalid_value;
        *found = 0;
        Shape shape{};
        if (const BlasStatus status = check_shape(*description, operands, shape); status != blas_success) return status;
        *found = 1;
        return give_algorithm(preferred(shape), preference->workspace_bytes, results[0]);
    });
}

EMU_API BlasStatus cublasLtMatmulAlgoGetIds(void* handle, int, int, int, int, int, int, int wanted, int* ids,
                                            int* found) {
    return entry(__func__, [&] {
        if (!is_alive(handle) || ids == nullptr || found == nullptr || wanted < 1) return blas_invalid_value;
        *found = 0;
        for (u64 id = 1; id <= algorithms && *found < wanted; ++id) ids[(*found)++] = static_cast<int>(id);
        return blas_success;
    });
}

EMU_API BlasStatus cublasLtMatmulAlgoInit(void* handle, int, int, int, int, int, int, int id,
                                          MatmulAlgorithm* algorithm) {
    return entry(__func__, [&] {
        if (!is_alive(handle) || algorithm == nullptr || id < 1 || id > static_cast<int>(algorithms)) {
            return blas_invalid_value;
        }
        HeuristicResult result;
        give_algorithm(static_cast<u64>(id), 0, result);
        *algorithm = result.algorithm;
        return blas_success;
    });
}

EMU_API BlasStatus cublasLtMatmulAlgoCheck(void* handle, const MatmulDescription* description, const MatrixLayout* a,
                                           const MatrixLayout* b, const MatrixLayout* c, const MatrixLayout* d,
                                           const MatmulAlgorithm* algorithm, HeuristicResult* result) {
    return entry(__func__, [&] {
        const Operands operands{a, b, c, d};
        if (!all_alive(handle, description, operands)) return blas_invalid_value;
        if (algorithm == nullptr || result == nullptr) return blas_invalid_value;
        if (!known(*algorithm)) return blas_not_supported;
        Shape shape{};
        if (const BlasStatus status = check_shape(*description, operands, shape); status != blas_success) return status;
        give_algorithm(algorithm->data[1], algorithm->data[2], *result);
        return blas_success;
    });
}

EMU_API BlasStatus cublasLtMatmul(void* handle, const MatmulDescription* description, const void* alpha,
                                  const void* a_data, const MatrixLayout* a, const void* b_data, const MatrixLayout* b,
                                  const void* beta, const void* c_data, const MatrixLayout* c, void* d_data,
                                  const MatrixLayout* d, const MatmulAlgorithm* algorithm, void* workspace,
                                  size_t workspace_bytes, void* stream) {
    return entry(__func__, [&] {
        const Operands operands{a, b, c, d};
        if (!all_alive(handle, description, operands) || alpha == nullptr || beta == nullptr) return blas_invalid_value;
        Shape shape{};
        if (const BlasStatus status = check_shape(*description, operands, shape); status != blas_success) return status;
        if (description->pointer_mode != 0 && description->pointer_mode != 1) return blas_not_supported;
        if (algorithm != nullptr && !known(*algorithm)) return blas_not_supported;
        if (algorithm != nullptr && algorithm->data[2] > workspace_bytes) return blas_invalid_value;
        if (workspace_bytes > 0 && !emu_device_holds(workspace, workspace_bytes)) return blas_invalid_value;

        Work work{};
        Product& p = work.product;
        p.rows = shape.rows;
        p.columns = shape.columns;
        p.depth = shape.depth;
        p.parts = static_cast<i64>(algorithm == nullptr ? preferred(shape) : algorithm->data[1]);
        p.a = place(*a, a_data, description->transpose_a != 0);
        p.b = place(*b, b_data, description->transpose_b != 0);
        p.c = place(*c, c_data, false);
        p.d = place(*d, d_data, false);
        if (description->pointer_mode == 0) {
            std::memcpy(&p.alpha, alpha, 4);
            std::memcpy(&p.beta, beta, 4);
        } else {
            if (!emu_device_holds(alpha, 4) || !emu_device_holds(beta, 4)) return blas_invalid_value;
            work.alpha_on_device = alpha;
            work.beta_on_device = beta;
        }
        const int epilogue = description->epilogue;
        if ((epilogue & 4) != 0) p.bias = description->bias;
        p.bias_number = description->bias_number < 0 ? d->number : static_cast<Number>(description->bias_number);
        if ((epilogue & 2) != 0) p.activation = Activation::Relu;
        if ((epilogue & 32) != 0) p.activation = Activation::Gelu;
        const size_t bias_bytes = static_cast<size_t>(p.rows) * number_bytes(p.bias_number);
        if ((epilogue & 4) != 0 && !emu_device_holds(p.bias, bias_bytes)) return blas_invalid_value;
        const MatrixLayout* layouts[4] = {a, b, c, d};
        for (int i = 0; i < 4; ++i) work.layouts[i] = *layouts[i];
        work.batches = a->batches;
        work.bias_stride = description->bias_batch_stride;
        work.workspace = workspace;
        work.workspace_bytes = algorithm == nullptr ? 0 : algorithm->data[2];
        const int status = emu_submit(stream, "cublasLtMatmul", run, drop, new Work(work));
        return status == 0 ? blas_success : blas_execution_failed;
    });
}

} // namespace emu
