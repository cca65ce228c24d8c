// One access of a kernel, as the checker and the profiler see it: from the compiler's hooks, from compat.cuh's loads
// and stores, and from asynchronous copies.
#pragma once

#include "runtime.h"

namespace emu {

struct Touch {
    const void* address;
    size_t bytes;
    bool write;
    bool atomic;
    Space space;
    Site site;      // file null: not known, `code` is
    const void* code;
};

// Implemented by the checker or by the profiler.
void touched(const Touch& touch);

// Whether an access concerns only the thread that makes it, or nobody: its stack, the emulator's own variables, the
// library's constants.
bool is_private(const Executor& state, const Touch& touch);
bool in_library(const void* p);
bool in_shared_memory(const Executor& state, const void* p);

// `file:line` of an access.
std::string place_of(const Touch& touch);
std::string place_of(const void* code);

} // namespace emu
