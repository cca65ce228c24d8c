// Entry points: modules, functions, launches, occupancy.
#include <cstdio>
#include <fstream>
#include <iterator>

#include "calls.h"
#include "device.h"
#include "modules.h"

namespace emu {

namespace {

template <typename Body> Status with_function(const char* name, void* handle, Body&& body) {
    return call(name, Needs::Context, [&]() -> Status {
        Function* function = function_of(handle);
        return function == nullptr ? invalid_handle : body(*function);
    });
}

enum FunctionAttribute {
    max_threads = 0,
    static_shared_bytes = 1,
    const_bytes = 2,
    local_bytes = 3,
    registers = 4,
    ptx_version = 5,
    binary_version = 6,
    max_dynamic_shared = 8,
    shared_carveout = 9,
};

Status launch(Function& function, const LaunchShape& shape, void* stream_handle, void** parameters, void** extra) {
    const std::shared_ptr<Stream> stream = stream_of(stream_handle);
    if (stream == nullptr) return invalid_handle;
    if (extra != nullptr) return not_supported;
    Operation operation;
    if (const Status status = make_launch(function, shape, parameters, operation); status != success) return status;
    return submit(stream, std::move(operation));
}

} // namespace

EMU_API Status cuModuleLoadData(void** module, const void* image) {
    return call(__func__, Needs::Context,
                [&] { return module == nullptr ? invalid_value : load_module(image, *module); });
}

EMU_API Status cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) {
    return call(__func__, Needs::Context,
                [&] { return module == nullptr ? invalid_value : load_module(image, *module); });
}

EMU_API Status cuModuleLoad(void** module, const char* path) {
    return call(__func__, Needs::Context, [&]() -> Status {
        if (module == nullptr || path == nullptr) return invalid_value;
        std::ifstream file(path, std::ios::binary);
        if (!file) return file_not_found;
        const std::string image((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        return load_module(image.c_str(), *module);
    });
}

EMU_API Status cuModuleUnload(void* module) {
    return call(__func__, Needs::Context, [&] {
        finish_all();
        return unload_module(module);
    });
}

EMU_API Status cuModuleGetFunction(void** function, void* module, const char* name) {
    return call(__func__, Needs::Context,
                [&] { return function == nullptr ? invalid_value : find_function(module, name, *function); });
}

EMU_API Status cuModuleGetGlobal_v2(u64*, size_t*, void*, const char*) {
    return call(__func__, Needs::Context, [&] { return not_found; });
}

EMU_API Status cuFuncGetAttribute(int* value, int number, void* handle) {
    return with_function(__func__, handle, [&](Function& function) -> Status {
        if (value == nullptr) return invalid_value;
        switch (number) {
        case max_threads: *value = static_cast<int>(function.kernel->launch_bound); break;
        case static_shared_bytes: *value = static_cast<int>(function.static_shared); break;
        case const_bytes:
        case local_bytes: *value = 0; break;
        case registers: *value = 32; break;
        case ptx_version:
        case binary_version:
            *value = static_cast<int>(attribute(compute_capability_major) * 10 + attribute(compute_capability_minor));
            break;
        case max_dynamic_shared:
            *value = static_cast<int>(function.dynamic_shared_limit);
            if (*value == 0) *value = static_cast<int>(shared_limit(function) - function.static_shared);
            break;
        case shared_carveout: *value = -1; break;
        default: return invalid_value;
        }
        return success;
    });
}

EMU_API Status cuFuncSetAttribute(void* handle, int number, int value) {
    return with_function(__func__, handle, [&](Function& function) -> Status {
        if (number == shared_carveout) return success;
        if (number != max_dynamic_shared || value < 0) return invalid_value;
        if (static_cast<size_t>(value) + function.static_shared > attribute(max_shared_opt_in)) return invalid_value;
        // A smaller value than the default does not lower what a block gets without asking.
        const size_t otherwise = attribute(max_shared_per_block) - function.static_shared;
        if (static_cast<size_t>(value) > otherwise) function.dynamic_shared_limit = static_cast<size_t>(value);
        return success;
    });
}

EMU_API Status cuFuncSetCacheConfig(void* handle, int) {
    return with_function(__func__, handle, [](Function&) -> Status { return success; });
}

EMU_API Status cuFuncGetName(const char** name, void* handle) {
    return with_function(__func__, handle, [&](Function& function) -> Status {
        if (name == nullptr) return invalid_value;
        *name = function.kernel->name;
        return success;
    });
}

EMU_API Status cuFuncGetParamInfo(void* handle, size_t index, size_t* offset, size_t* size) {
    return with_function(__func__, handle, [&](Function& function) -> Status {
        if (index >= function.kernel->parameter_count || offset == nullptr) return invalid_value;
        *offset = function.kernel->parameters[index].offset;
        if (size != nullptr) *size = function.kernel->parameters[index].size;
        return success;
    });
}

EMU_API Status cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                              unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** parameters,
                              void** extra) {
    return with_function(__func__, handle, [&](Function& function) -> Status {
        const LaunchShape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared};
        return launch(function, shape, stream, parameters, extra);
    });
}

namespace {
// The layout of CUlaunchConfig. Its attributes (dependent launches, priorities) change no result here.
struct LaunchConfiguration {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared;
    void* stream;
    void* attributes;
    unsigned attribute_count;
};
} // namespace

EMU_API Status cuLaunchKernelEx(const LaunchConfiguration* wanted, void* handle, void** parameters, void** extra) {
    return with_function(__func__, handle, [&](Function& function) -> Status {
        if (wanted == nullptr) return invalid_value;
        const auto& [gx, gy, gz] = wanted->grid;
        const auto& [bx, by, bz] = wanted->block;
        return launch(function, {{gx, gy, gz}, {bx, by, bz}, wanted->shared}, wanted->stream, parameters, extra);
    });
}

namespace {

int resident_blocks(const Function& function, int threads, size_t dynamic_shared) {
    if (threads < 1 || static_cast<u32>(threads) > function.kernel->launch_bound) return 0;
    const size_t shared = function.static_shared + dynamic_shared + 1024;
    const auto by_threads = static_cast<int>(2048 / static_cast<u32>((threads + 31) / 32 * 32));
    const auto by_shared = static_cast<int>(167936 / shared);
    const int least = by_threads < by_shared ? by_threads : by_shared;
    return least < 32 ? least : 32;
}

} // namespace

EMU_API Status cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* handle, int threads, size_t shared) {
    return with_function(__func__, handle, [&](Function& function) -> Status {
        if (blocks == nullptr) return invalid_value;
        *blocks = resident_blocks(function, threads, shared);
        return success;
    });
}

EMU_API Status cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, void* handle, int threads,
                                                                    size_t shared, unsigned) {
    return with_function(__func__, handle, [&](Function& function) -> Status {
        if (blocks == nullptr) return invalid_value;
        *blocks = resident_blocks(function, threads, shared);
        return success;
    });
}

} // namespace emu
