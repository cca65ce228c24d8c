// The driver's entry points as the self-test calls them: from a library given by path, every call checked by its
// caller.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../../include/integers.h"

namespace selftest {

extern void* driver_library;
extern void* blas_library;

template <typename... Arguments> int call_in(void* library, const char* name, Arguments... arguments) {
    using Function = int (*)(Arguments...);
    const auto function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) {
        std::printf("no `%s` in the library\n", name);
        std::exit(3);
    }
    return function(arguments...);
}

template <typename... Arguments> int driver(const char* name, Arguments... arguments) {
    return call_in(driver_library, name, arguments...);
}

template <typename... Arguments> int blas(const char* name, Arguments... arguments) {
    return call_in(blas_library, name, arguments...);
}

inline std::string report() {
    char text[1024];
    driver("emu_report", static_cast<char*>(text), sizeof(text));
    return text;
}

// Ends the child with a message if a condition does not hold.
#define EXPECT(condition)                                                          \
    do {                                                                           \
        if (!(condition)) {                                                        \
            std::printf("  %s:%d: %s\n", __FILE__, __LINE__, #condition);          \
            std::exit(3);                                                          \
        }                                                                          \
    } while (false)

// cuInit, a context current on this thread, the module that holds the kernels.
void* start_device();
void* find_function(void* module, const char* name);
u64 allocate(size_t bytes);
int launch(void* function, unsigned blocks, unsigned threads, unsigned shared, void* stream, void** parameters);

// Tests of the device itself, each run in a process of its own.
struct DeviceTest {
    const char* name;
    void (*run)();
};
const std::vector<DeviceTest>& device_tests();

} // namespace selftest
