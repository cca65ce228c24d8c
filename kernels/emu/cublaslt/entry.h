// How the cuBLASLt stand-in reaches the emulated device, which lives in the libcuda.so that it is linked to: calls are
// counted and made to fail there, and products run there as work of a stream.
#pragma once

#include "objects.h"

#define EMU_API extern "C" __attribute__((visibility("default")))

extern "C" {
int emu_enter(const char* function);
int emu_device_holds(const void* p, size_t bytes);
int emu_device_initialised(const void* p, size_t bytes);
void emu_device_written(const void* p, size_t bytes);
void emu_fault(const char* report);
int emu_submit(void* stream, const char* launch, void (*run)(void*), void (*drop)(void*), void* data);
}

namespace emu {

template <typename Body> BlasStatus entry(const char* function, Body&& body) {
    if (const int injected = emu_enter(function); injected != 0) return static_cast<BlasStatus>(injected);
    return body();
}

} // namespace emu
