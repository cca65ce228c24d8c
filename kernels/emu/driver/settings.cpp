// Reads the environment of the emulated device.
#include "settings.h"

#include <cstring>

namespace emu {

const char* environment(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return value == nullptr ? otherwise : value;
}

u64 environment_number(const char* name, u64 otherwise) {
    const char* value = std::getenv(name);
    return value == nullptr || *value == 0 ? otherwise : std::strtoull(value, nullptr, 0);
}

namespace {

Settings read() {
    Settings read;
    read.memory_bytes = environment_number("EMU_MEMORY", read.memory_bytes);
    const char* schedule = environment("EMU_SCHEDULE", "deferred");
    if (std::strcmp(schedule, "eager") == 0 || environment_number("EMU_EAGER", 0) != 0) {
        read.schedule = Schedule::Eager;
    } else if (std::strcmp(schedule, "background") == 0) {
        read.schedule = Schedule::Background;
    }
    const u64 order = environment_number("EMU_ORDER", 0);
    read.order = order == 0 ? Order::Ascending : order == 1 ? Order::Descending : Order::Random;
    read.seed = environment_number("EMU_SEED", read.seed);
    read.preempt = environment_number("EMU_PREEMPT", 0) != 0;
    read.protect = environment_number("EMU_PROTECT", 0) != 0;
    read.quiet = environment_number("EMU_QUIET", 0) != 0;
    return read;
}

} // namespace

Settings& settings() {
    static Settings current = read();
    return current;
}

} // namespace emu
