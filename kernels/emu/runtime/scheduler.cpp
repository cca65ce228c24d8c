// Runs a launch: blocks one after the other, the threads of a block as fibers that change places at collectives. The
// order of both is a setting, because a missing barrier shows only in some orders.
#include <sys/mman.h>

#include <algorithm>
#include <numeric>

#include <pthread.h>

#include "hooks.h"
#include "runtime.h"
#include "sanitizer.h"

namespace emu {

__thread ThreadIdentity* current __attribute__((tls_model("initial-exec"))) = nullptr;
__thread Executor* executor __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t stack_bytes = 256 * 1024;
#else
constexpr size_t stack_bytes = 64 * 1024;
#endif
constexpr size_t guard_bytes = 4096;

Executor& this_executor() {
    if (executor == nullptr) {
        executor = new Executor;
        executor->ready.resize(max_block_threads);
        executor->fibers.reserve(max_block_threads);
        pthread_attr_t attributes;
        if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
            void* low = nullptr;
            pthread_attr_getstack(&attributes, &low, &executor->main_stack_bytes);
            executor->main_stack_low = low;
            pthread_attr_destroy(&attributes);
        }
    }
    return *executor;
}

void grow_fibers(Executor& state, u32 threads) {
    while (state.fibers.size() < threads) {
        void* memory = mmap(nullptr, stack_bytes + guard_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) std::abort();
        mprotect(memory, guard_bytes, PROT_NONE);
        Fiber fiber{};
        fiber.stack_low = static_cast<char*>(memory) + guard_bytes;
        fiber.stack_high = fiber.stack_low + stack_bytes;
        fiber.index = static_cast<u32>(state.fibers.size());
        fiber.lane = fiber.index % warp_size;
        fiber.warp = fiber.index / warp_size;
        state.fibers.push_back(fiber);
    }
    state.warps.resize(max_block_threads / warp_size);
}

u32 take_ready(Executor& state) {
    const u32 mask = max_block_threads - 1;
    if (state.launch->settings.order == Order::Random && state.ready_count > 1) {
        const u32 pick = state.ready_first + static_cast<u32>(random_number(state) % state.ready_count);
        std::swap(state.ready[state.ready_first & mask], state.ready[pick & mask]);
    }
    const u32 index = state.ready[state.ready_first & mask];
    ++state.ready_first;
    --state.ready_count;
    return index;
}

void go_to(Executor& state, Fiber& from, Fiber& to, bool for_good) {
    current = &to;
    before_switch(for_good ? nullptr : &from.fake_stack, to.stack_low, stack_bytes);
    switch_context(from.context, to.context);
    after_switch(from.fake_stack);
    (void)state;
}

void go_to_main(Executor& state, Fiber& from) {
    current = nullptr;
    before_switch(nullptr, state.main_stack_low, state.main_stack_bytes);
    switch_context(from.context, state.main);
}

std::string deadlock(Executor& state) {
    std::string text = "threads wait for others that never come:";
    int shown = 0;
    for (u32 i = 0; i < state.block.threads && shown < 4; ++i) {
        const Fiber& fiber = state.fibers[i];
        if (fiber.waiting != Waiting::Block && fiber.waiting != Waiting::Warp) continue;
        const char* what = fiber.waiting == Waiting::Block ? " at the barrier " : " at the warp operation ";
        text += " " + describe(fiber) + what + describe(fiber.site) + ";";
        ++shown;
    }
    return text + " " + std::to_string(state.block.exited) + " of " + std::to_string(state.block.threads) +
           " threads have left the kernel";
}

__attribute__((no_sanitize("address"))) void fiber_main() {
    after_switch(nullptr);
    Executor& state = *executor;
    state.launch->kernel->invoke(state.launch->kernel->function, state.launch->arguments);
    Fiber& fiber = this_fiber();
    check_copies_done(fiber);
    fiber.waiting = Waiting::Exited;
    if (++state.block.exited == state.block.threads) {
        go_to_main(state, fiber);
    } else if (state.ready_count == 0) {
        fail(deadlock(state));
    } else {
        go_to(state, fiber, state.fibers[take_ready(state)], true);
    }
    std::abort(); // nobody switches to a fiber that has left
}

void start_block(Executor& state, uint3 index) {
    Block& block = state.block;
    block.index = index;
    block.barrier_arrived = block.barrier_sum = block.exited = 0;
    ++block.epoch;
    ++block.serial;
    for (u32 w = 0; w * warp_size < block.threads; ++w) {
        state.warps[w].gatherings_used = 0;
        ++state.warps[w].epoch;
    }
    state.ready_first = state.ready_count = 0;
    for (u32 i = 0; i < block.threads; ++i) {
        Fiber& fiber = state.fibers[i];
        fiber.thread = {i % block.size.x, i / block.size.x % block.size.y, i / (block.size.x * block.size.y)};
        fiber.block = &block;
        fiber.waiting = Waiting::Nothing;
        fiber.committed_groups = 0;
        fiber.copies.clear();
        // Tops of stacks at different cache sets, or all fibers would evict each other's first lines.
        prepare_context(fiber.context, fiber.stack_low, fiber.stack_high - (i * 5 % 64) * 64, fiber_main);
    }
    for (u32 i = 0; i < block.threads; ++i) {
        const bool descending = state.launch->settings.order == Order::Descending;
        make_ready(state.fibers[descending ? block.threads - 1 - i : i]);
    }
}

void run_block(Executor& state, uint3 index) {
    start_block(state, index);
    begin_shared_memory(state);
    hook_block_begins(state);
    Fiber& first = state.fibers[take_ready(state)];
    current = &first;
    before_switch(&state.main_fake_stack, first.stack_low, stack_bytes);
    switch_context(state.main, first.context);
    after_switch(state.main_fake_stack);
    current = nullptr;
    if (state.failed) {
        for (Fiber& fiber : state.fibers) unpoison(fiber.stack_low, stack_bytes);
    } else {
        hook_block_ends(state);
    }
    end_shared_memory(state);
}

std::vector<u64> block_order(Executor& state, u64 count) {
    std::vector<u64> order(count);
    std::iota(order.begin(), order.end(), u64{0});
    if (state.launch->settings.order == Order::Descending) std::reverse(order.begin(), order.end());
    if (state.launch->settings.order == Order::Random) {
        for (u64 i = count; i > 1; --i) std::swap(order[i - 1], order[random_number(state) % i]);
    }
    return order;
}

} // namespace

u64 random_number(Executor& state) {
    u64 z = state.random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

void make_ready(Fiber& fiber) {
    Executor& state = *executor;
    fiber.waiting = Waiting::Nothing;
    state.ready[(state.ready_first + state.ready_count) & (max_block_threads - 1)] = fiber.index;
    ++state.ready_count;
}

void wait_here(Waiting reason, Site site) {
    Executor& state = *executor;
    Fiber& fiber = this_fiber();
    fiber.waiting = reason;
    fiber.site = site;
    if (state.ready_count == 0) fail(deadlock(state));
    go_to(state, fiber, state.fibers[take_ready(state)], false);
}

void let_others_run() {
    Executor& state = *executor;
    Fiber& fiber = this_fiber();
    make_ready(fiber);
    Fiber& next = state.fibers[take_ready(state)];
    if (&next != &fiber) go_to(state, fiber, next, false);
}

std::string describe(Site site) {
    const char* file = site.file;
    for (const char* p = file; *p != 0; ++p) {
        if (*p == '/') file = p + 1;
    }
    return std::string(file) + ":" + std::to_string(site.line);
}

std::string describe(const Fiber& fiber) {
    const uint3& t = fiber.thread;
    return "thread (" + std::to_string(t.x) + "," + std::to_string(t.y) + "," + std::to_string(t.z) + ")";
}

std::string describe_place(const Fiber& fiber) {
    const uint3& b = fiber.block->index;
    return std::string("kernel `") + executor->launch->kernel->name + "`, block (" + std::to_string(b.x) + "," +
           std::to_string(b.y) + "," + std::to_string(b.z) + "), " + describe(fiber);
}

void fail(const std::string& text) {
    Executor& state = *executor;
    Fiber& fiber = this_fiber();
    if (!state.failed) {
        state.failed = true;
        state.report = describe_place(fiber) + ": " + text;
    }
    go_to_main(state, fiber);
    std::abort(); // the fibers of a failed launch never run again
}

bool run_launch(const Launch& launch, std::string& report, size_t& static_shared) {
    Executor& state = this_executor();
    Block& block = state.block;
    state.launch = &launch;
    state.failed = false;
    state.report.clear();
    state.static_shared_seen = 0;
    state.random_state = launch.settings.seed;
    block.grid = launch.grid;
    block.size = launch.size;
    block.threads = launch.size.x * launch.size.y * launch.size.z;
    state.first_serial = block.serial + 1;
    grow_fibers(state, block.threads);
    hook_launch_begins(state);
    const u64 blocks = static_cast<u64>(launch.grid.x) * launch.grid.y * launch.grid.z;
    for (const u64 i : block_order(state, blocks)) {
        run_block(state, {static_cast<u32>(i % launch.grid.x), static_cast<u32>(i / launch.grid.x % launch.grid.y),
                          static_cast<u32>(i / launch.grid.x / launch.grid.y)});
        if (state.failed) break;
    }
    hook_launch_ends(state);
    state.launch = nullptr;
    report = state.report;
    static_shared = state.static_shared_seen;
    return !state.failed;
}

} // namespace emu
