// Entry points that make, change and end descriptors, and choose an algorithm (there is one).
#include "objects.h"

#include <cstring>
#include <mutex>
#include <unordered_set>

#include "entry.h"

namespace emu {

namespace {

struct Alive {
    std::mutex lock;
    std::unordered_set<const void*> objects;
};

Alive& alive() {
    static auto* instance = new Alive;
    return *instance;
}

template <typename T> BlasStatus make(void** out, const T& value) {
    if (out == nullptr) return blas_invalid_value;
    auto* object = new T(value);
    add_object(object);
    *out = object;
    return blas_success;
}

template <typename T> BlasStatus end(void* object) {
    if (!remove_object(object)) return blas_invalid_value;
    delete static_cast<T*>(object);
    return blas_success;
}

template <typename To> BlasStatus set(To& to, const void* from, size_t bytes) {
    if (from == nullptr || bytes < sizeof(To)) return blas_invalid_value;
    std::memcpy(&to, from, sizeof(To));
    return blas_success;
}

bool known_number(int number) { return number == 0 || number == 2 || number == 14; }

} // namespace

bool is_alive(const void* object) {
    const std::lock_guard<std::mutex> guard(alive().lock);
    return alive().objects.count(object) == 1;
}

void add_object(const void* object) {
    const std::lock_guard<std::mutex> guard(alive().lock);
    alive().objects.insert(object);
}

bool remove_object(const void* object) {
    const std::lock_guard<std::mutex> guard(alive().lock);
    return alive().objects.erase(object) == 1;
}

// Of the stand-in's own: handles and descriptors that are alive.
EMU_API size_t emu_cublaslt_objects() {
    const std::lock_guard<std::mutex> guard(alive().lock);
    return alive().objects.size();
}

EMU_API BlasStatus cublasLtCreate(void** handle) {
    return entry(__func__, [&] { return make(handle, 0); });
}

EMU_API BlasStatus cublasLtDestroy(void* handle) {
    return entry(__func__, [&] { return end<int>(handle); });
}

EMU_API size_t cublasLtGetVersion() { return 130000; }

EMU_API BlasStatus cublasLtMatrixLayoutCreate(void** layout, int number, u64 rows, u64 columns, i64 leading) {
    return entry(__func__, [&] {
        if (!known_number(number)) return blas_not_supported;
        return make(layout, MatrixLayout{static_cast<Number>(number), rows, columns, leading, 0, 1, 0});
    });
}

EMU_API BlasStatus cublasLtMatrixLayoutDestroy(void* layout) {
    return entry(__func__, [&] { return end<MatrixLayout>(layout); });
}

EMU_API BlasStatus cublasLtMatrixLayoutSetAttribute(void* object, int attribute, const void* value, size_t bytes) {
    return entry(__func__, [&] {
        if (!is_alive(object)) return blas_invalid_value;
        auto& layout = *static_cast<MatrixLayout*>(object);
        switch (attribute) {
        case 0: return set(layout.number, value, bytes);
        case 1: return set(layout.row_major, value, bytes);
        case 2: return set(layout.rows, value, bytes);
        case 3: return set(layout.columns, value, bytes);
        case 4: return set(layout.leading, value, bytes);
        case 5: return set(layout.batches, value, bytes);
        case 6: return set(layout.batch_stride, value, bytes);
        default: return blas_not_supported;
        }
    });
}

EMU_API BlasStatus cublasLtMatmulDescCreate(void** description, int compute, int scale) {
    return entry(__func__, [&] {
        // 32-bit float accumulation, strict or by faster formats.
        const bool known = compute == 68 || compute == 69 || compute == 74 || compute == 75 || compute == 77;
        if (!known || scale != 0) return blas_not_supported;
        return make(description, MatmulDescription{compute, scale, 0, 0, 0, 1, nullptr, 0, -1});
    });
}

EMU_API BlasStatus cublasLtMatmulDescDestroy(void* description) {
    return entry(__func__, [&] { return end<MatmulDescription>(description); });
}

EMU_API BlasStatus cublasLtMatmulDescSetAttribute(void* object, int attribute, const void* value, size_t bytes) {
    return entry(__func__, [&] {
        if (!is_alive(object)) return blas_invalid_value;
        auto& description = *static_cast<MatmulDescription*>(object);
        int ignored = 0;
        switch (attribute) {
        case 0: return set(description.compute, value, bytes);
        case 1: return set(description.scale, value, bytes);
        case 2: return set(description.pointer_mode, value, bytes);
        case 3: return set(description.transpose_a, value, bytes);
        case 4: return set(description.transpose_b, value, bytes);
        case 7: return set(description.epilogue, value, bytes);
        case 8: return set(description.bias, value, bytes);
        case 10: return set(description.bias_batch_stride, value, bytes);
        case 15: return set(ignored, value, bytes); // how many multiprocessors to use
        case 26: return set(description.bias_number, value, bytes);
        default: return blas_not_supported;
        }
    });
}

EMU_API BlasStatus cublasLtMatmulPreferenceCreate(void** preference) {
    return entry(__func__, [&] { return make(preference, MatmulPreference{0}); });
}

EMU_API BlasStatus cublasLtMatmulPreferenceDestroy(void* preference) {
    return entry(__func__, [&] { return end<MatmulPreference>(preference); });
}

EMU_API BlasStatus cublasLtMatmulPreferenceSetAttribute(void* object, int attribute, const void* value, size_t bytes) {
    return entry(__func__, [&] {
        if (!is_alive(object)) return blas_invalid_value;
        // All others narrow a choice that is not there.
        if (attribute != 1) return blas_success;
        return set(static_cast<MatmulPreference*>(object)->workspace_bytes, value, bytes);
    });
}

} // namespace emu
