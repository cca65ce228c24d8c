// The checker's half for device memory: which bytes are allocated and written, and which blocks of the launch that runs
// have touched them. Blocks have no order, so what one writes no other may touch, unless an atomic counter with a fence
// before it says that the first is done.
#ifdef EMU_CHECK
#include <sys/mman.h>

#include <unordered_map>

#include "check.h"
#include "memory_hooks.h"

namespace emu {

namespace {

enum State : u8 { absent = 0, allocated = 1, initialised = 2 };

constexpr u32 many = 0x80000000u; // more than one block has read
constexpr size_t granule_bytes = 2;

struct Shadow {
    const char* base = nullptr;
    size_t bytes = 0;
    u8* states = nullptr;   // by byte
    u32* writers = nullptr; // serial of a block, by granule
    u32* readers = nullptr;
    // Of the launch that runs: blocks that passed an atomic counter, and those whose passing the present block saw.
    std::unordered_map<const void*, std::vector<u32>> released;
    std::vector<bool> acquired;
    u64 clock = 0;
    u64 last_fence = 0;
    u64 last_write = 0;
};

Shadow shadow;

template <typename T> T* reserve(size_t count) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    return static_cast<T*>(memory);
}

size_t offset_of(const void* p) { return static_cast<size_t>(static_cast<const char*>(p) - shadow.base); }

bool ours(const Executor& state, u32 serial) { return serial >= state.first_serial; }

// Whether what block `serial` did is not ordered before the present block.
bool unordered(const Executor& state, u32 serial) {
    if (!ours(state, serial) || serial == state.block.serial) return false;
    const size_t index = serial - state.first_serial;
    return index >= shadow.acquired.size() || !shadow.acquired[index];
}

void check_bytes(const Touch& touch) {
    const size_t offset = offset_of(touch.address);
    for (size_t i = offset; i < offset + touch.bytes; ++i) {
        u8& state = shadow.states[i];
        if (state == absent) {
            size_t back = 0;
            while (back < 4096 && back < i && shadow.states[i - back] == absent) ++back;
            const std::string how = back > 0 && back < 4096 && back < i
                                        ? "byte " + std::to_string(back) + " beyond the end of an allocation"
                                        : "outside of all allocations (freed?)";
            fail_touch(touch, "device memory " + how);
        }
        if (state == allocated && (!touch.write || touch.atomic)) {
            fail_touch(touch, "device memory that nobody has written");
        }
        if (touch.write) state = initialised;
    }
}

void pass_counter(Executor& state, const void* p) {
    std::vector<u32>& passed = shadow.released[p];
    for (const u32 serial : passed) {
        const size_t index = serial - state.first_serial;
        if (index >= shadow.acquired.size()) shadow.acquired.resize(index + 1, false);
        shadow.acquired[index] = true;
    }
    // Without a fence behind the block's last write, its passing says nothing.
    const bool fenced = shadow.last_write == 0 || shadow.last_fence > shadow.last_write;
    if (fenced && (passed.empty() || passed.back() != state.block.serial)) passed.push_back(state.block.serial);
}

} // namespace

bool in_device_memory(const void* p) {
    return shadow.base != nullptr && p >= shadow.base && p < shadow.base + shadow.bytes;
}

void device_launch_begins(Executor&) { shadow.released.clear(); }

void device_block_begins(Executor&) {
    shadow.acquired.clear();
    shadow.last_fence = shadow.last_write = 0;
}

void fence() {
    shadow.last_fence = ++shadow.clock;
}

void check_device(Executor& state, const Touch& touch) {
    check_bytes(touch);
    if (touch.atomic) {
        pass_counter(state, touch.address);
        return;
    }
    if (touch.write) shadow.last_write = ++shadow.clock;
    if (touch.bytes < granule_bytes) return;
    const u32 me = state.block.serial;
    const size_t offset = offset_of(touch.address);
    for (size_t g = offset / granule_bytes; g <= (offset + touch.bytes - 1) / granule_bytes; ++g) {
        u32& writer = shadow.writers[g];
        u32& reader = shadow.readers[g];
        const u32 last = reader & ~many;
        if (unordered(state, writer)) {
            fail_touch(touch, "race between blocks: block number " + std::to_string(writer - state.first_serial) +
                                  " of this launch wrote it");
        }
        if (touch.write) {
            const bool read_by_others = ours(state, last) && ((reader & many) != 0 || last != me);
            if (read_by_others && unordered(state, last == me ? me - 1 : last)) {
                fail_touch(touch, "race between blocks: another block of this launch read it");
            }
            writer = me;
        } else {
            const bool others = ours(state, last) && (last != me || (reader & many) != 0);
            reader = me | (others ? many : 0);
        }
    }
}

void hook_heap_reserved(const void* base, size_t bytes) {
    shadow.base = static_cast<const char*>(base);
    shadow.bytes = bytes;
    shadow.states = reserve<u8>(bytes);
    shadow.writers = reserve<u32>(bytes / granule_bytes);
    shadow.readers = reserve<u32>(bytes / granule_bytes);
}

void hook_allocated(const void* p, size_t bytes) { std::memset(shadow.states + offset_of(p), allocated, bytes); }
void hook_released(const void* p, size_t bytes) { std::memset(shadow.states + offset_of(p), absent, bytes); }
void hook_written(const void* p, size_t bytes) { std::memset(shadow.states + offset_of(p), initialised, bytes); }

void hook_copied(const void* to, const void* from, size_t bytes) {
    std::memmove(shadow.states + offset_of(to), shadow.states + offset_of(from), bytes);
}

bool hook_initialised(const void* p, size_t bytes) {
    const u8* states = shadow.states + offset_of(p);
    for (size_t i = 0; i < bytes; ++i) {
        if (states[i] != initialised) return false;
    }
    return true;
}

} // namespace emu
#endif // EMU_CHECK
