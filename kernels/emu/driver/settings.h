// What the environment asks of the emulated device, read once, and what tests change while they run.
#pragma once

#include <cstddef>
#include <cstdlib>

#include "../runtime/runtime.h"

namespace emu {

// When queued work runs: only once somebody waits for it (finds hosts that read too early or change a source too
// early), at once (finds nothing, is easy to follow), or on its own in the background.
enum class Schedule { Deferred, Eager, Background };

struct Settings {
    size_t memory_bytes = size_t{1} << 30; // EMU_MEMORY
    Schedule schedule = Schedule::Deferred; // EMU_SCHEDULE=deferred|eager|background; EMU_EAGER=1 is eager
    Order order = Order::Ascending;         // EMU_ORDER=0|1|2
    u64 seed = 1;                           // EMU_SEED
    bool preempt = false;                   // EMU_PREEMPT=1, checker build only
    bool protect = false;                   // EMU_PROTECT=1
    bool quiet = false;                     // EMU_QUIET=1: reports do not go to standard error
};

Settings& settings();
const char* environment(const char* name, const char* otherwise);
u64 environment_number(const char* name, u64 otherwise);

} // namespace emu
