// Shared memory of the block that runs, and asynchronous copies into it. A slot is found by its declaration, poisoned
// with NaN when a block starts, and kept apart from its neighbours, so that what a kernel forgot to write or to bound
// shows.
#include <sys/mman.h>

#include "hooks.h"
#include "runtime.h"
#include "sanitizer.h"

namespace emu {

namespace {

constexpr size_t arena_bytes = 512 * 1024;
constexpr size_t slot_gap = 64;

void* make_slot(Executor& state, const char* tag, const char* name, size_t bytes, size_t alignment) {
    Block& block = state.block;
    const size_t offset = (block.shared_used + slot_gap + alignment - 1) / alignment * alignment;
    block.shared_used = offset + bytes;
    if (block.shared_used + slot_gap > state.arena_bytes) fail("shared memory of more than the emulator's arena");
    void* memory = state.arena + offset;
    unpoison(memory, bytes);
    std::memset(memory, 0xff, bytes);
    block.slots.push_back({tag, name, offset, bytes});
    hook_slot(state, block.slots.back());
    return memory;
}

} // namespace

void begin_shared_memory(Executor& state) {
    if (state.arena == nullptr) {
        void* memory =
            mmap(nullptr, arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) std::abort();
        state.arena = static_cast<char*>(memory);
        state.arena_bytes = arena_bytes;
        poison(state.arena, state.arena_bytes);
    }
    state.block.slots.clear();
    state.block.shared_used = 0;
    state.block.static_shared = 0;
    if (state.launch->dynamic_shared > 0) {
        make_slot(state, nullptr, "dynamic shared memory", state.launch->dynamic_shared, 128);
    }
}

void end_shared_memory(Executor& state) { poison(state.arena, state.block.shared_used + slot_gap); }

void* shared_slot(const char* tag, size_t bytes, size_t alignment, const char* name) {
    Executor& state = *executor;
    Block& block = state.block;
    for (const SharedSlot& slot : block.slots) {
        if (slot.tag == tag) return state.arena + slot.offset;
    }
    block.static_shared += (bytes + 15) / 16 * 16;
    const LaunchSettings& settings = state.launch->settings;
    if (block.static_shared > settings.static_shared_limit) {
        fail("static shared memory of " + std::to_string(block.static_shared) + " bytes; nvcc allows " +
             std::to_string(settings.static_shared_limit));
    }
    const size_t both = block.static_shared + state.launch->dynamic_shared;
    if (both > settings.shared_limit) {
        fail("static and dynamic shared memory of " + std::to_string(both) + " bytes; the function's limit is " +
             std::to_string(settings.shared_limit));
    }
    if (block.static_shared > state.static_shared_seen) state.static_shared_seen = block.static_shared;
    return make_slot(state, tag, name, bytes, alignment);
}

void* dynamic_shared() {
    Executor& state = *executor;
    if (state.launch->dynamic_shared == 0) fail("the kernel uses dynamic shared memory, the launch gave none");
    return state.arena + state.block.slots.front().offset;
}

void misaligned(const void* p, size_t bytes, Site site) {
    char address[32];
    std::snprintf(address, sizeof(address), "%p", p);
    fail("misaligned access of " + std::to_string(bytes) + " bytes to " + address + " at " + describe(site));
}

namespace {

void carry_out(AsyncCopy& copy) {
    if (copy.valid) {
        std::memcpy(copy.shared, copy.global, 16);
    } else {
        std::memset(copy.shared, 0, 16);
    }
    copy.done = true;
}

bool copies_early(Executor& state) {
    const Order order = state.launch->settings.order;
    return order == Order::Descending || (order == Order::Random && (random_number(state) & 1) != 0);
}

} // namespace

void copy_async16(void* shared, const void* global, bool valid, Site site) {
    Executor& state = *executor;
    Fiber& fiber = this_fiber();
    const auto to = reinterpret_cast<uintptr_t>(shared);
    if (to % 16 != 0) misaligned(shared, 16, site);
    if (valid && reinterpret_cast<uintptr_t>(global) % 16 != 0) misaligned(global, 16, site);
    const auto arena = reinterpret_cast<uintptr_t>(state.arena);
    if (to < arena || to + 16 > arena + state.block.shared_used) {
        fail("asynchronous copy to something that is not shared memory at " + describe(site));
    }
    fiber.copies.push_back({shared, global, valid, false, fiber.committed_groups, site});
    hook_copy_issued(fiber.copies.back());
    if (copies_early(state)) carry_out(fiber.copies.back());
}

void copy_async_commit() { ++this_fiber().committed_groups; }

void copy_async_wait(int pending) {
    Fiber& fiber = this_fiber();
    size_t kept = 0;
    for (AsyncCopy& copy : fiber.copies) {
        // The last `pending` groups may stay open; so does what was never committed.
        if (copy.group + static_cast<u32>(pending) < fiber.committed_groups) {
            if (!copy.done) carry_out(copy);
            hook_copy_completed(copy);
        } else {
            fiber.copies[kept++] = copy;
        }
    }
    fiber.copies.resize(kept);
}

#ifndef EMU_CHECK
// Blocks run one after the other: only the checker asks whether there was a fence.
void fence() {}
#endif

void check_copies_done(Fiber& fiber) {
    if (!fiber.copies.empty()) {
        fail("leaves the kernel without having waited for the asynchronous copy of " +
             describe(fiber.copies.front().site));
    }
}

} // namespace emu
