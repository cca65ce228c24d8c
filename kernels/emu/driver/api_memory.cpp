// Entry points: device and page-locked memory, copies, fills. All ranges are checked against the allocations that they
// must lie in: a card would corrupt a neighbour instead.
#include <cstdio>
#include <cstring>

#include "../runtime/memory_hooks.h"
#include "calls.h"
#include "device.h"
#include "device_memory.h"
#include "settings.h"
#include "streams.h"

namespace emu {

namespace {

void* pointer(u64 address) { return reinterpret_cast<void*>(address); }

Status outside(const char* function, u64 address, size_t bytes) {
    if (!settings().quiet) {
        constexpr const char* text = "emulated device: %s of %zu bytes at 0x%llx is not within one allocation\n";
        std::fprintf(stderr, text, function, bytes, address);
    }
    return invalid_value;
}

Status allocate(u64* out, size_t bytes) {
    if (out == nullptr || bytes == 0) return invalid_value;
    void* p = device_allocate(bytes);
    if (p == nullptr) {
        // Frees that are still queued give memory back first.
        finish_all();
        p = device_allocate(bytes);
    }
    *out = reinterpret_cast<u64>(p);
    return p == nullptr ? out_of_memory : success;
}

// --- copies, as operations of a stream

Operation upload(u64 to, const void* from, size_t bytes) {
    const auto copy = [to, bytes](const void* source) {
        if (!device_holds(pointer(to), bytes)) return outside("copy to the device", to, bytes);
        std::memcpy(pointer(to), source, bytes);
        hook_written(pointer(to), bytes);
        return success;
    };
    return {[copy, from] { return copy(from); }, ""};
}

Operation download(void* to, u64 from, size_t bytes) {
    return {[=] {
                if (!device_holds(pointer(from), bytes)) return outside("copy from the device", from, bytes);
                std::memcpy(to, pointer(from), bytes);
                return success;
            },
            ""};
}

Operation move(u64 to, u64 from, size_t bytes) {
    return {[=] {
                if (!device_holds(pointer(to), bytes)) return outside("copy within the device", to, bytes);
                if (!device_holds(pointer(from), bytes)) return outside("copy within the device", from, bytes);
                std::memmove(pointer(to), pointer(from), bytes);
                hook_copied(pointer(to), pointer(from), bytes);
                return success;
            },
            ""};
}

template <typename T> Operation fill(u64 to, T value, size_t count) {
    return {[=] {
                if (!device_holds(pointer(to), count * sizeof(T))) return outside("fill", to, count * sizeof(T));
                for (size_t i = 0; i < count; ++i) static_cast<T*>(pointer(to))[i] = value;
                hook_written(pointer(to), count * sizeof(T));
                return success;
            },
            ""};
}

Status check_range(const char* function, u64 address, size_t bytes) {
    return device_holds(pointer(address), bytes) ? success : outside(function, address, bytes);
}

Status submit_to(void* handle, Operation operation) {
    const std::shared_ptr<Stream> stream = stream_of(handle);
    return stream == nullptr ? invalid_handle : submit(stream, std::move(operation));
}

// Through the legacy default stream, waiting for the end: what the calls without `Async` do.
Status at_once(Operation operation) {
    if (const Status status = refuse_in_capture(); status != success) return status;
    const std::shared_ptr<Stream> stream = stream_of(nullptr);
    if (const Status status = submit(stream, std::move(operation)); status != success) return status;
    return finish(stream);
}

Status upload_async(u64 to, const void* from, size_t bytes, void* handle) {
    const std::shared_ptr<Stream> stream = stream_of(handle);
    if (stream == nullptr) return invalid_handle;
    if (stream->capture != nullptr || pinned_holds(from, bytes)) return submit(stream, upload(to, from, bytes));
    // A driver stages pageable memory before it returns.
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                      static_cast<const char*>(from) + bytes);
    const Operation operation = upload(to, staged->data(), bytes);
    return submit(stream, {[operation, staged] { return operation.run(); }, ""});
}

Status download_async(void* to, u64 from, size_t bytes, void* handle) {
    const std::shared_ptr<Stream> stream = stream_of(handle);
    if (stream == nullptr) return invalid_handle;
    const Status status = submit(stream, download(to, from, bytes));
    // A driver returns only when pageable memory has been written.
    if (status != success || stream->capture != nullptr || pinned_holds(to, bytes)) return status;
    return finish(stream);
}

// Wraps what every copy checks first. Nothing to copy is not an error.
template <typename Body> Status copying(const char* function, size_t bytes, Body&& body) {
    return call(function, Needs::Context, [&]() -> Status { return bytes == 0 ? success : body(); });
}

} // namespace

EMU_API Status cuMemGetInfo_v2(size_t* free, size_t* total) {
    return call(__func__, Needs::Context, [&] {
        if (free == nullptr || total == nullptr) return invalid_value;
        *free = device_free_bytes();
        *total = settings().memory_bytes;
        return success;
    });
}

EMU_API Status cuMemAlloc_v2(u64* out, size_t bytes) {
    return call(__func__, Needs::Context, [&]() -> Status {
        const Status status = refuse_in_capture();
        return status == success ? allocate(out, bytes) : status;
    });
}

EMU_API Status cuMemFree_v2(u64 address) {
    return call(__func__, Needs::Context, [&]() -> Status {
        if (address == 0) return success;
        if (const Status status = refuse_in_capture(); status != success) return status;
        finish_all();
        return device_release(pointer(address)) ? success : invalid_value;
    });
}

EMU_API Status cuMemAllocAsync(u64* out, size_t bytes, void* handle) {
    return call(__func__, Needs::Context, [&]() -> Status {
        const std::shared_ptr<Stream> stream = stream_of(handle);
        if (stream == nullptr) return invalid_handle;
        if (attribute(memory_pools_supported) == 0) return not_supported;
        // A real driver would make this a node of the graph; no captured region of ours may allocate.
        if (stream->capture != nullptr) return capture_unsupported;
        return allocate(out, bytes);
    });
}

EMU_API Status cuMemAllocFromPoolAsync(u64* out, size_t bytes, void*, void* handle) {
    return call(__func__, Needs::Context, [&]() -> Status {
        const std::shared_ptr<Stream> stream = stream_of(handle);
        if (stream == nullptr) return invalid_handle;
        return stream->capture != nullptr ? capture_unsupported : allocate(out, bytes);
    });
}

EMU_API Status cuMemFreeAsync(u64 address, void* handle) {
    return call(__func__, Needs::Context, [&]() -> Status {
        const std::shared_ptr<Stream> stream = stream_of(handle);
        if (stream == nullptr) return invalid_handle;
        if (stream->capture != nullptr) return capture_unsupported;
        if (address == 0) return success;
        u64 base = 0;
        size_t bytes = 0;
        if (!device_range(pointer(address), base, bytes) || base != address) return invalid_value;
        return submit(stream, {[address] { return device_release(pointer(address)) ? success : invalid_value; }, ""});
    });
}

EMU_API Status cuMemGetAddressRange_v2(u64* base, size_t* bytes, u64 address) {
    return call(__func__, Needs::Context, [&] {
        u64 found = 0;
        size_t length = 0;
        if (!device_range(pointer(address), found, length)) return not_found;
        if (base != nullptr) *base = found;
        if (bytes != nullptr) *bytes = length;
        return success;
    });
}

EMU_API Status cuMemHostAlloc(void** out, size_t bytes, unsigned) {
    return call(__func__, Needs::Context, [&] {
        if (out == nullptr || bytes == 0) return invalid_value;
        *out = pinned_allocate(bytes);
        return *out == nullptr ? out_of_memory : success;
    });
}

EMU_API Status cuMemFreeHost(void* p) {
    return call(__func__, Needs::Context, [&]() -> Status {
        // Page-locked memory may still be the end of a copy.
        finish_all();
        return pinned_release(p) ? success : invalid_value;
    });
}

EMU_API Status cuMemcpyHtoD_v2(u64 to, const void* from, size_t bytes) {
    return copying(__func__, bytes, [&]() -> Status {
        if (const Status status = check_range("copy to the device", to, bytes); status != success) return status;
        return at_once(upload(to, from, bytes));
    });
}

EMU_API Status cuMemcpyDtoH_v2(void* to, u64 from, size_t bytes) {
    return copying(__func__, bytes, [&]() -> Status {
        if (const Status status = check_range("copy from the device", from, bytes); status != success) return status;
        return at_once(download(to, from, bytes));
    });
}

EMU_API Status cuMemcpyDtoD_v2(u64 to, u64 from, size_t bytes) {
    return copying(__func__, bytes, [&]() -> Status {
        if (const Status status = check_range("copy within the device", to, bytes); status != success) return status;
        if (const Status status = check_range("copy within the device", from, bytes); status != success) return status;
        return at_once(move(to, from, bytes));
    });
}

EMU_API Status cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, void* stream) {
    return copying(__func__, bytes, [&]() -> Status {
        if (const Status status = check_range("copy to the device", to, bytes); status != success) return status;
        return upload_async(to, from, bytes, stream);
    });
}

EMU_API Status cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, void* stream) {
    return copying(__func__, bytes, [&]() -> Status {
        if (const Status status = check_range("copy from the device", from, bytes); status != success) return status;
        return download_async(to, from, bytes, stream);
    });
}

EMU_API Status cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, void* stream) {
    return copying(__func__, bytes, [&]() -> Status {
        if (const Status status = check_range("copy within the device", to, bytes); status != success) return status;
        if (const Status status = check_range("copy within the device", from, bytes); status != success) return status;
        return submit_to(stream, move(to, from, bytes));
    });
}

#define EMU_FILL(name, T)                                                                                 \
    EMU_API Status name##_v2(u64 to, T value, size_t count) {                                             \
        return copying(#name "_v2", count, [&]() -> Status {                                              \
            const Status status = check_range("fill", to, count * sizeof(T));                             \
            return status != success ? status : at_once(fill<T>(to, value, count));                       \
        });                                                                                               \
    }                                                                                                     \
    EMU_API Status name##Async(u64 to, T value, size_t count, void* stream) {                             \
        return copying(#name "Async", count, [&]() -> Status {                                            \
            const Status status = check_range("fill", to, count * sizeof(T));                             \
            return status != success ? status : submit_to(stream, fill<T>(to, value, count));             \
        });                                                                                               \
    }
EMU_FILL(cuMemsetD8, u8)
EMU_FILL(cuMemsetD16, u16)
EMU_FILL(cuMemsetD32, u32)
#undef EMU_FILL

// --- memory pools: one, which keeps nothing

namespace {
int default_pool;
}

EMU_API Status cuDeviceGetDefaultMemPool(void** pool, int device) {
    return call(__func__, Needs::Initialization, [&] {
        if (pool == nullptr) return invalid_value;
        *pool = &default_pool;
        return device == 0 ? success : invalid_device;
    });
}

EMU_API Status cuDeviceGetMemPool(void** pool, int device) {
    return call(__func__, Needs::Initialization, [&] {
        if (pool == nullptr) return invalid_value;
        *pool = &default_pool;
        return device == 0 ? success : invalid_device;
    });
}

EMU_API Status cuDeviceSetMemPool(int device, void* pool) {
    return call(__func__, Needs::Initialization, [&] {
        if (device != 0) return invalid_device;
        return pool == &default_pool ? success : invalid_value;
    });
}

EMU_API Status cuMemPoolSetAttribute(void* pool, int, void*) {
    return call(__func__, Needs::Initialization, [&] { return pool == &default_pool ? success : invalid_value; });
}

EMU_API Status cuMemPoolGetAttribute(void* pool, int, void* value) {
    return call(__func__, Needs::Initialization, [&] {
        if (pool != &default_pool || value == nullptr) return invalid_value;
        *static_cast<u64*>(value) = 0;
        return success;
    });
}

EMU_API Status cuMemPoolTrimTo(void* pool, size_t) {
    return call(__func__, Needs::Initialization, [&] { return pool == &default_pool ? success : invalid_value; });
}

} // namespace emu
