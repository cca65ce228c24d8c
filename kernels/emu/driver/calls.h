// The gate that every entry point passes: it counts the call, lets a test make it fail, and refuses what a real driver
// refuses (no context, a context that a fault has spoilt).
#pragma once

#include <string>

#include "../../include/integers.h"
#include "status.h"

#define EMU_API extern "C" __attribute__((visibility("default")))

namespace emu {

enum class Needs {
    Nothing,        // not even cuInit
    Initialization, // cuInit has been called
    Context,        // a context is current on this thread, and no fault has spoilt it
};

Status enter(const char* function, Needs needs);

template <typename Body> Status call(const char* function, Needs needs, Body&& body) {
    if (const Status status = enter(function, needs); status != success) return status;
    return body();
}

// Whether cuInit was called.
void set_initialized();

// The context current on this thread (null if none), and what every later call returns after a fault.
void*& current_context();
Status sticky_error();
void set_sticky_error(Status status, const std::string& report);
void clear_sticky_error();
std::string last_report();

// Counts.
u64 call_count(const std::string& function);
std::string call_counts();
void count_launch(const std::string& kernel);
u64 launch_count(const std::string& kernel);
std::string launch_counts();
void reset_counts();
// The `nth` call of `function` from now on (1 is the next; "*" is any function) returns `status` and does nothing.
void fail_call(const std::string& function, u64 nth, int status);
void forget_failures();

} // namespace emu
