// Entry points of the stand-in's own, which tests find with dlsym: counts, injected failures, settings. None of them
// counts as a call. A text is written as far as `size` allows, ended with a zero; the result is the size that it would
// need.
#include <cstring>
#include <string>

#include "../runtime/memory_hooks.h"
#include "../runtime/runtime.h"
#include "calls.h"
#include "device_memory.h"
#include "modules.h"
#include "settings.h"
#include "streams.h"

namespace emu {

size_t live_graphs();
void reset_graphs();
#ifdef EMU_PROFILE
std::string profile_report();
double profile_figure(const std::string& kernel, const std::string& figure);
void profile_reset();
#endif

namespace {

size_t give(const std::string& text, char* out, size_t size) {
    if (out != nullptr && size > 0) {
        const size_t count = text.size() < size - 1 ? text.size() : size - 1;
        std::memcpy(out, text.data(), count);
        out[count] = 0;
    }
    return text.size() + 1;
}

} // namespace

// `plain`, `check`, `asan` or `profile`.
EMU_API const char* emu_build() {
#if defined(EMU_CHECK)
    return "check";
#elif defined(EMU_PROFILE)
    return "profile";
#elif defined(__SANITIZE_ADDRESS__)
    return "asan";
#else
    return "plain";
#endif
}

// Calls of an entry point by its exact name (`cuMemAlloc_v2`); all of them as lines `name count`.
EMU_API u64 emu_call_count(const char* function) { return call_count(function); }
EMU_API size_t emu_calls(char* out, size_t size) { return give(call_counts(), out, size); }

// Launches by kernel name, replayed graph nodes and matrix products (`cublasLtMatmul`) included; null or empty: all.
EMU_API u64 emu_launch_count(const char* kernel) { return launch_count(kernel == nullptr ? "" : kernel); }
EMU_API size_t emu_launches(char* out, size_t size) { return give(launch_counts(), out, size); }
EMU_API void emu_reset_counts() { reset_counts(); }

// The nth call from now (1 is the next) of a function (`*`: any) returns `status` and does nothing.
EMU_API void emu_fail_call(const char* function, u64 nth, int status) { fail_call(function, nth, status); }
EMU_API void emu_forget_failures() { forget_failures(); }

// What is alive.
EMU_API size_t emu_allocations() { return device_counts().allocations; }
EMU_API size_t emu_allocated_bytes() { return device_counts().bytes; }
EMU_API size_t emu_peak_bytes() { return device_counts().peak; }
EMU_API void emu_reset_peak() { device_reset_peak(); }
EMU_API size_t emu_pinned_allocations() { return pinned_count(); }
EMU_API size_t emu_streams() { return live_streams(); }
EMU_API size_t emu_events() { return live_events(); }
EMU_API size_t emu_modules() { return live_modules(); }
EMU_API size_t emu_graphs() { return live_graphs(); }

// What went wrong last (also on standard error, unless EMU_QUIET=1); empty if nothing did.
EMU_API size_t emu_report(char* out, size_t size) { return give(last_report(), out, size); }

// Settings that the environment gives at start (EMU_ORDER, EMU_SEED, EMU_PREEMPT, EMU_SCHEDULE, EMU_MEMORY).
EMU_API void emu_set_order(int order, u64 seed) {
    settings().order = order == 0 ? Order::Ascending : order == 1 ? Order::Descending : Order::Random;
    settings().seed = seed;
}
EMU_API void emu_set_preempt(int on) { settings().preempt = on != 0; }
// 0 deferred, 1 eager, 2 background
EMU_API void emu_set_schedule(int schedule) {
    finish_all();
    settings().schedule = schedule == 0 ? Schedule::Deferred : schedule == 1 ? Schedule::Eager : Schedule::Background;
}
EMU_API void emu_set_memory(size_t bytes) { settings().memory_bytes = bytes; }

// The device as it was at start: no memory, no objects, no fault. Handles from before are invalid.
EMU_API void emu_reset() {
    finish_all();
    reset_streams();
    reset_graphs();
    reset_modules();
    device_release_all();
    clear_sticky_error();
    forget_failures();
    reset_counts();
}

// Names of the kernels that are compiled in, one a line.
EMU_API size_t emu_kernels(char* out, size_t size) {
    std::string names;
    for (const KernelEntry& kernel : all_kernels()) names += std::string(kernel.name) + "\n";
    return give(names, out, size);
}

// For the stand-in of cuBLASLt, which is a library of its own.
EMU_API int emu_enter(const char* function) { return enter(function, Needs::Nothing); }
EMU_API int emu_device_holds(const void* p, size_t bytes) { return device_holds(p, bytes) ? 1 : 0; }
EMU_API int emu_device_initialised(const void* p, size_t bytes) { return hook_initialised(p, bytes) ? 1 : 0; }
EMU_API void emu_device_written(const void* p, size_t bytes) { hook_written(p, bytes); }
EMU_API void emu_fault(const char* report) { set_sticky_error(illegal_address, report); }
EMU_API int emu_submit(void* stream_handle, const char* launch, void (*run)(void*), void (*drop)(void*), void* data) {
    const std::shared_ptr<void> owned(data, drop);
    const std::shared_ptr<Stream> stream = stream_of(stream_handle);
    if (stream == nullptr) return invalid_handle;
    return submit(stream, {[run, owned] {
                               run(owned.get());
                               return sticky_error();
                           },
                           launch});
}

#ifdef EMU_PROFILE
// Bank conflicts and coalescing since the last reset; `figure` is one of those in the text, for one kernel.
EMU_API size_t emu_profile(char* out, size_t size) { return give(profile_report(), out, size); }
EMU_API double emu_profile_figure(const char* kernel, const char* figure) { return profile_figure(kernel, figure); }
EMU_API void emu_profile_reset() { profile_reset(); }
#endif

} // namespace emu
