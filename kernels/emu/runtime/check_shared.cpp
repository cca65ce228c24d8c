// The checker's half for shared memory: for every two bytes who wrote and who read them last, and after which barriers.
#ifdef EMU_CHECK
#include "check.h"

namespace emu {

namespace {

struct Granule {
    u32 initialised_in; // serial of a block
    u32 write_epoch;    // of the block's barriers
    u32 write_warp_epoch;
    u32 read_epoch;
    u32 read_warp_epoch;
    u16 writer;
    u16 reader;
    bool many_warps;   // have read since the last barrier
    bool many_in_warp; // lanes of the reader's warp have read since the warp's last barrier
    bool pending;      // an asynchronous copy is under way
};

constexpr size_t granule_bytes = 2;

struct Shadow {
    std::vector<Granule> granules;
    std::vector<u16> slot_of; // index into the block's slots, by granule
    std::vector<u32> slot_serial;
};

Shadow& shadow(const Executor& state) {
    static Shadow* instance = nullptr; // one thread runs launches
    if (instance == nullptr) {
        instance = new Shadow;
        const size_t count = state.arena_bytes / granule_bytes;
        instance->granules.resize(count);
        instance->slot_of.resize(count);
        instance->slot_serial.resize(count);
    }
    return *instance;
}

std::string name_of(const Executor& state, const SharedSlot& slot, const void* p) {
    const auto offset = static_cast<const char*>(p) - (state.arena + slot.offset);
    return std::string("`") + slot.name + "` + " + std::to_string(offset) + " bytes";
}

std::string thread_name(const Executor& state, u16 index) { return describe(state.fibers[index]); }

[[noreturn]] void fail_outside(const Executor& state, const SharedSlot& slot, const Touch& touch) {
    fail_touch(touch, "out of the bounds of shared memory: " + name_of(state, slot, touch.address) + ", which has " +
                          std::to_string(slot.bytes) + " bytes");
}

const SharedSlot& slot_at(Executor& state, const Touch& touch) {
    Shadow& s = shadow(state);
    const size_t offset = static_cast<size_t>(static_cast<const char*>(touch.address) - state.arena);
    const size_t granule = offset / granule_bytes;
    if (s.slot_serial[granule] != state.block.serial) {
        // Name the slot that lies before: it is the one that was left.
        for (size_t i = state.block.slots.size(); i > 0; --i) {
            const SharedSlot& slot = state.block.slots[i - 1];
            if (slot.offset <= offset) fail_outside(state, slot, touch);
        }
        fail_touch(touch, "out of the bounds of shared memory");
    }
    const SharedSlot& slot = state.block.slots[s.slot_of[granule]];
    if (offset < slot.offset || offset + touch.bytes > slot.offset + slot.bytes) fail_outside(state, slot, touch);
    return slot;
}

struct Accessor {
    u16 thread;
    u32 warp;
    u32 epoch;
    u32 warp_epoch;
};

bool conflicts_with_write(const Granule& g, const Accessor& me) {
    if (g.write_epoch != me.epoch || g.writer == me.thread) return false;
    return g.writer / warp_size != me.warp || g.write_warp_epoch == me.warp_epoch;
}

bool conflicts_with_reads(const Granule& g, const Accessor& me) {
    if (g.read_epoch != me.epoch) return false;
    if (g.many_warps || g.reader / warp_size != me.warp) return true;
    return (g.many_in_warp || g.reader != me.thread) && g.read_warp_epoch == me.warp_epoch;
}

void note_read(Granule& g, const Accessor& me) {
    if (g.read_epoch != me.epoch) {
        g.many_warps = g.many_in_warp = false;
    } else if (g.reader / warp_size != me.warp) {
        g.many_warps = true;
    } else if (g.read_warp_epoch != me.warp_epoch) {
        g.many_in_warp = false;
    } else if (g.reader != me.thread) {
        g.many_in_warp = true;
    }
    g.reader = me.thread;
    g.read_epoch = me.epoch;
    g.read_warp_epoch = me.warp_epoch;
}

void note_write(Granule& g, const Accessor& me, u32 serial) {
    g.writer = me.thread;
    g.write_epoch = me.epoch;
    g.write_warp_epoch = me.warp_epoch;
    g.initialised_in = serial;
}

} // namespace

void shared_slot_begins(Executor& state, const SharedSlot& slot) {
    Shadow& s = shadow(state);
    const auto index = static_cast<u16>(state.block.slots.size() - 1);
    for (size_t g = slot.offset / granule_bytes; g <= (slot.offset + slot.bytes - 1) / granule_bytes; ++g) {
        s.slot_of[g] = index;
        s.slot_serial[g] = state.block.serial;
        s.granules[g].pending = false;
    }
}

void shared_copy_pending(Executor& state, const AsyncCopy& copy, bool pending) {
    Shadow& s = shadow(state);
    const size_t first = static_cast<size_t>(static_cast<char*>(copy.shared) - state.arena) / granule_bytes;
    for (size_t g = first; g < first + 16 / granule_bytes; ++g) s.granules[g].pending = pending;
}

void check_shared(Executor& state, const Touch& touch) {
    const SharedSlot& slot = slot_at(state, touch);
    const Fiber& fiber = this_fiber();
    const Accessor me{static_cast<u16>(fiber.index), fiber.warp, state.block.epoch, state.warps[fiber.warp].epoch};
    const size_t offset = static_cast<size_t>(static_cast<const char*>(touch.address) - state.arena);
    // Neighbouring single bytes share a granule, so their order is not followed.
    const bool ordered = touch.bytes >= granule_bytes && !touch.atomic;
    for (size_t i = offset / granule_bytes; i <= (offset + touch.bytes - 1) / granule_bytes; ++i) {
        Granule& g = shadow(state).granules[i];
        if (g.pending) {
            fail_touch(touch, name_of(state, slot, touch.address) + " is the target of an asynchronous copy of " +
                                  thread_name(state, g.writer) + " that nobody has waited for");
        }
        if ((!touch.write || touch.atomic) && g.initialised_in != state.block.serial) {
            fail_touch(touch, name_of(state, slot, touch.address) + " was not written before");
        }
        if (ordered && conflicts_with_write(g, me)) {
            fail_touch(touch, "race in shared memory: " + name_of(state, slot, touch.address) + " was written by " +
                                  thread_name(state, g.writer) + " with no barrier since");
        }
        if (ordered && touch.write && conflicts_with_reads(g, me)) {
            const bool itself = g.reader == me.thread; // and others, one of which is the trouble
            fail_touch(touch, "race in shared memory: " + name_of(state, slot, touch.address) + " was read by " +
                                  (itself ? "other threads" : thread_name(state, g.reader)) + " with no barrier since");
        }
        if (touch.write) {
            note_write(g, me, state.block.serial);
        } else {
            note_read(g, me);
        }
    }
}

} // namespace emu
#endif // EMU_CHECK
