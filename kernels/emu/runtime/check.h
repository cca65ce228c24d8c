// What the checker's two halves (device memory, shared memory) share.
#pragma once

#include "touch.h"

namespace emu {

// The launch's failure with the access that caused it.
[[noreturn]] void fail_touch(const Touch& touch, const std::string& what);

bool in_device_memory(const void* p);
void check_device(Executor& state, const Touch& touch);
void device_launch_begins(Executor& state);
void device_block_begins(Executor& state);

void check_shared(Executor& state, const Touch& touch);
void shared_slot_begins(Executor& state, const SharedSlot& slot);
void shared_copy_pending(Executor& state, const AsyncCopy& copy, bool pending);

} // namespace emu
