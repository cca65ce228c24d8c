// Modules, functions and launches. A module's image is only looked at to see that it is one; its kernels are those that
// are compiled into this library.
#pragma once

#include "../runtime/runtime.h"
#include "streams.h"

namespace emu {

struct Function {
    const KernelEntry* kernel;
    size_t dynamic_shared_limit; // 0 until cuFuncSetAttribute raises it: what static shared memory leaves of 48 KiB
    size_t static_shared;        // as far as launches have shown
};

Status load_module(const void* image, void*& handle);
Status unload_module(void* handle);
Status find_function(void* module, const char* name, void*& handle);
Function* function_of(void* handle);
// Static and dynamic shared memory that a block of the function may have together.
size_t shared_limit(const Function& function);
size_t live_modules();
void reset_modules();

struct LaunchShape {
    dim3 grid;
    dim3 block;
    size_t dynamic_shared;
};

// Checks a launch as a driver does and copies its arguments.
Status make_launch(Function& function, const LaunchShape& shape, void** parameters, Operation& operation);

} // namespace emu
