// Entry points: initialization, the device and its context, error names.
#include <cstring>

#include "calls.h"
#include "device.h"
#include "device_memory.h"
#include "settings.h"
#include "streams.h"

namespace emu {

namespace {

// One device, one primary context.
struct Context {
    int retained = 0;
    unsigned flags = 0;
};
Context primary;

int device_count() { return static_cast<int>(environment_number("EMU_DEVICES", 1)) > 0 ? 1 : 0; }

} // namespace

EMU_API Status cuInit(unsigned flags) {
    return call(__func__, Needs::Nothing, [&] {
        if (flags != 0) return invalid_value;
        if (device_count() == 0) return no_device;
        set_initialized();
        return success;
    });
}

EMU_API Status cuDriverGetVersion(int* version) {
    return call(__func__, Needs::Nothing, [&] {
        if (version == nullptr) return invalid_value;
        *version = static_cast<int>(environment_number("EMU_DRIVER_VERSION", 13000));
        return success;
    });
}

EMU_API Status cuGetErrorName(int error, const char** text) {
    if (text == nullptr) return invalid_value;
    *text = status_name(error);
    return *text == nullptr ? invalid_value : success;
}

EMU_API Status cuGetErrorString(int error, const char** text) {
    if (text == nullptr) return invalid_value;
    *text = status_text(error);
    return *text == nullptr ? invalid_value : success;
}

EMU_API Status cuDeviceGetCount(int* count) {
    return call(__func__, Needs::Initialization, [&] {
        if (count == nullptr) return invalid_value;
        *count = device_count();
        return success;
    });
}

EMU_API Status cuDeviceGet(int* device, int ordinal) {
    return call(__func__, Needs::Initialization, [&] {
        if (device == nullptr) return invalid_value;
        if (ordinal < 0 || ordinal >= device_count()) return invalid_device;
        *device = ordinal;
        return success;
    });
}

EMU_API Status cuDeviceGetName(char* name, int length, int device) {
    return call(__func__, Needs::Initialization, [&] {
        if (name == nullptr || length < 1) return invalid_value;
        if (device != 0) return invalid_device;
        std::strncpy(name, "Emulated device", static_cast<size_t>(length));
        name[length - 1] = 0;
        return success;
    });
}

namespace {
Status give_uuid(char* uuid, int device) {
    if (uuid == nullptr) return invalid_value;
    if (device != 0) return invalid_device;
    std::memcpy(uuid, "emulated device", 16);
    return success;
}
} // namespace

EMU_API Status cuDeviceGetUuid(char* uuid, int device) {
    return call(__func__, Needs::Initialization, [&] { return give_uuid(uuid, device); });
}

EMU_API Status cuDeviceGetUuid_v2(char* uuid, int device) {
    return call(__func__, Needs::Initialization, [&] { return give_uuid(uuid, device); });
}

EMU_API Status cuDeviceTotalMem_v2(size_t* bytes, int device) {
    return call(__func__, Needs::Initialization, [&] {
        if (bytes == nullptr) return invalid_value;
        if (device != 0) return invalid_device;
        *bytes = settings().memory_bytes;
        return success;
    });
}

EMU_API Status cuDeviceGetAttribute(int* value, int number, int device) {
    return call(__func__, Needs::Initialization, [&] {
        if (value == nullptr || !attribute_known(number)) return invalid_value;
        if (device != 0) return invalid_device;
        *value = static_cast<int>(attribute(number));
        return success;
    });
}

EMU_API Status cuDevicePrimaryCtxRetain(void** context, int device) {
    return call(__func__, Needs::Initialization, [&] {
        if (context == nullptr) return invalid_value;
        if (device != 0) return invalid_device;
        ++primary.retained;
        *context = &primary;
        return success;
    });
}

EMU_API Status cuDevicePrimaryCtxRelease_v2(int device) {
    return call(__func__, Needs::Initialization, [&] {
        if (device != 0) return invalid_device;
        if (primary.retained == 0) return invalid_context;
        // The last release would end the context and all it holds; here what is still alive stays visible to the
        // tests that count it.
        if (--primary.retained == 0) finish_all();
        return success;
    });
}

EMU_API Status cuDevicePrimaryCtxReset_v2(int device) {
    return call(__func__, Needs::Initialization, [&] { return device != 0 ? invalid_device : success; });
}

EMU_API Status cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    return call(__func__, Needs::Initialization, [&] {
        if (device != 0) return invalid_device;
        if (flags == nullptr || active == nullptr) return invalid_value;
        *flags = primary.flags;
        *active = primary.retained > 0 ? 1 : 0;
        return success;
    });
}

EMU_API Status cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) {
    return call(__func__, Needs::Initialization, [&] {
        if (device != 0) return invalid_device;
        primary.flags = flags;
        return success;
    });
}

EMU_API Status cuCtxSetCurrent(void* context) {
    return call(__func__, Needs::Initialization, [&] {
        if (context != nullptr && context != &primary) return invalid_context;
        current_context() = context;
        return success;
    });
}

EMU_API Status cuCtxGetCurrent(void** context) {
    return call(__func__, Needs::Initialization, [&] {
        if (context == nullptr) return invalid_value;
        *context = current_context();
        return success;
    });
}

EMU_API Status cuCtxGetDevice(int* device) {
    return call(__func__, Needs::Context, [&] {
        if (device == nullptr) return invalid_value;
        *device = 0;
        return success;
    });
}

EMU_API Status cuCtxSynchronize() {
    return call(__func__, Needs::Context, [&] {
        const Status status = refuse_in_capture();
        return status == success ? finish_all() : status;
    });
}

EMU_API Status cuCtxSetFlags(unsigned flags) {
    return call(__func__, Needs::Context, [&] {
        primary.flags = flags;
        return success;
    });
}

EMU_API Status cuCtxGetLimit(size_t* value, int) {
    return call(__func__, Needs::Context, [&] {
        if (value == nullptr) return invalid_value;
        *value = 1024;
        return success;
    });
}

EMU_API Status cuCtxSetLimit(int, size_t) {
    return call(__func__, Needs::Context, [&] { return success; });
}

EMU_API Status cuCtxGetCacheConfig(int* configuration) {
    return call(__func__, Needs::Context, [&] {
        if (configuration == nullptr) return invalid_value;
        *configuration = 0;
        return success;
    });
}

EMU_API Status cuCtxSetCacheConfig(int) {
    return call(__func__, Needs::Context, [&] { return success; });
}

EMU_API Status cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return call(__func__, Needs::Context, [&] {
        if (least != nullptr) *least = 0;
        if (greatest != nullptr) *greatest = -5;
        return success;
    });
}

EMU_API Status cuProfilerStart() {
    return call(__func__, Needs::Context, [&] { return success; });
}

EMU_API Status cuProfilerStop() {
    return call(__func__, Needs::Context, [&] { return success; });
}

// For tests (see control.cpp): how often the context is retained and not released.
EMU_API size_t emu_contexts() { return static_cast<size_t>(primary.retained); }

} // namespace emu
