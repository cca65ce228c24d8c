// The checker: every access of a kernel must lie within its block's shared memory, an allocation of the device, its own
// stack or the library's constants, read only what was written, and be ordered with the accesses of other threads and
// blocks.
#ifdef EMU_CHECK
#include "check.h"

#include "hooks.h"

namespace emu {

namespace {

const char* foreign(const Executor& state, const void* p) {
    for (const Fiber& fiber : state.fibers) {
        if (p >= fiber.stack_low && p < fiber.stack_high) return "the local memory of another thread";
    }
    if (in_library(p)) return "a variable of the library (a kernel has only constants of its own)";
    return "memory that is neither the device's nor the block's (a host pointer?)";
}

} // namespace

void fail_touch(const Touch& touch, const std::string& what) {
    char address[32];
    std::snprintf(address, sizeof(address), "%p", touch.address);
    const char* verb = touch.atomic ? "changes" : touch.write ? "writes" : "reads";
    fail(std::string(verb) + " " + std::to_string(touch.bytes) + " bytes at " + address + ": " + what + "; at " +
         place_of(touch));
}

void touched(const Touch& touch) {
    Executor& state = *executor;
    if (is_private(state, touch)) return;
    if (state.launch->settings.preempt && random_number(state) % 8 == 0) let_others_run();
    if (in_shared_memory(state, touch.address)) {
        if (touch.space == Space::Global) fail_touch(touch, "a load or store of global memory meets shared memory");
        check_shared(state, touch);
    } else if (in_device_memory(touch.address)) {
        if (touch.space == Space::Shared) fail_touch(touch, "a load or store of shared memory meets global memory");
        check_device(state, touch);
    } else {
        fail_touch(touch, foreign(state, touch.address));
    }
}

void hook_launch_begins(Executor& state) { device_launch_begins(state); }
void hook_launch_ends(Executor&) {}
void hook_block_begins(Executor& state) { device_block_begins(state); }
void hook_block_ends(Executor&) {}
void hook_warp_operation_ends() {}
void hook_slot(Executor& state, const SharedSlot& slot) { shared_slot_begins(state, slot); }

void hook_matrix_row(const void* row, Site site) {
    touched({row, 16, false, false, Space::Shared, site, nullptr});
}

void hook_copy_issued(const AsyncCopy& copy) {
    if (copy.valid) touched({copy.global, 16, false, false, Space::Global, copy.site, nullptr});
    // Counts as a write now and again when it is waited for: in between nobody may look.
    touched({copy.shared, 16, true, false, Space::Shared, copy.site, nullptr});
    shared_copy_pending(*executor, copy, true);
}

void hook_copy_completed(const AsyncCopy& copy) {
    shared_copy_pending(*executor, copy, false);
    touched({copy.shared, 16, true, false, Space::Shared, copy.site, nullptr});
}

} // namespace emu
#endif // EMU_CHECK
