// The emulator's own view of a launch: threads as fibers, warps, the block that runs now, and how a fault ends a
// launch. Private to emu/; kernels see calls.h.
#pragma once

#include <string>
#include <vector>

#include "../../include/integers.h"
#include "../vectors.h"

#include "../calls.h"

#include "context.h"

namespace emu {

constexpr u32 warp_size = 32;
constexpr u32 max_block_threads = 1024;

// Which thread runs next. `Ascending` copies asynchronously as late as it may, `Descending` as early as it may,
// `Random` as the seed says; together they bring out missing barriers and missing waits.
enum class Order { Ascending, Descending, Random };

struct LaunchSettings {
    Order order = Order::Ascending;
    u64 seed = 0;
    // Checker only, with `Random`: threads also change between any two accesses.
    bool preempt = false;
    size_t static_shared_limit = 48 * 1024;
    size_t shared_limit = 48 * 1024;
};

struct Launch {
    const KernelEntry* kernel = nullptr;
    dim3 grid;
    dim3 size;
    size_t dynamic_shared = 0;
    void* const* arguments = nullptr;
    LaunchSettings settings;
};

struct AsyncCopy {
    void* shared;
    const void* global;
    bool valid;
    bool done;
    u32 group;
    Site site;
};

enum class Waiting { Nothing, Block, Warp, Exited };

struct Fiber : ThreadIdentity {
    Context context;
    u32 index;
    u32 lane;
    u32 warp;
    Waiting waiting;
    Site site;
    u32 committed_groups;
    std::vector<AsyncCopy> copies;
    char* stack_low;
    char* stack_high;
    void* fake_stack; // of AddressSanitizer
};

// What a warp-wide operation does once all its lanes are there; `requests` has one pointer for each lane of `mask`.
using Combine = void (*)(u32 mask, void* const* requests);

struct Gathering {
    u32 mask;
    u32 arrived;
    Combine combine;
    Site site;
    void* requests[warp_size];
};

struct Warp {
    u32 epoch; // changes when __syncwarp orders the lanes' accesses
    u32 gatherings_used;
    Gathering gatherings[warp_size];
};

struct SharedSlot {
    const char* tag; // null for dynamic shared memory
    const char* name;
    size_t offset;
    size_t bytes;
};

struct Block : BlockIdentity {
    u32 serial; // among all blocks that ever ran
    u32 threads;
    u32 barrier_arrived;
    u32 barrier_sum;
    u32 barrier_result;
    u32 epoch; // changes at each __syncthreads
    Site barrier_site;
    u32 exited;
    std::vector<SharedSlot> slots;
    size_t shared_used;
    size_t static_shared;
};

// Everything that one OS thread needs to run launches.
struct Executor {
    const Launch* launch = nullptr;
    Block block{};
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Context main{};
    void* main_fake_stack = nullptr;
    const void* main_stack_low = nullptr;
    size_t main_stack_bytes = 0;
    std::vector<u32> ready; // ring of fiber indices
    u32 ready_first = 0;
    u32 ready_count = 0;
    u64 random_state = 0;
    u32 first_serial = 0; // of this launch
    bool failed = false;
    std::string report;
    char* arena = nullptr;
    size_t arena_bytes = 0;
    size_t static_shared_seen = 0;
};

extern __thread Executor* executor __attribute__((tls_model("initial-exec")));

inline Fiber& this_fiber() { return *static_cast<Fiber*>(current); }

// Runs a launch to its end on the calling thread. False if it failed; the reason is then in `report`.
bool run_launch(const Launch& launch, std::string& report, size_t& static_shared);

// Ends the launch with a report that names kernel, block and thread.
[[noreturn]] void fail(const std::string& text);
std::string describe(Site site);
std::string describe(const Fiber& fiber);
std::string describe_place(const Fiber& fiber);

// Scheduling, for collectives.
void make_ready(Fiber& fiber);
void wait_here(Waiting reason, Site site);
u64 random_number(Executor& state);
void let_others_run();

// Shared memory of the block that starts now, and its end.
void begin_shared_memory(Executor& state);
void end_shared_memory(Executor& state);
void check_copies_done(Fiber& fiber);

// The registry.
const KernelEntry* find_kernel(const char* name);
const std::vector<KernelEntry>& all_kernels();

} // namespace emu
