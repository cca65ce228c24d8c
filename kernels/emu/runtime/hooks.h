// Events of a launch that the checker and the profiler follow. The plain and the AddressSanitizer build compile them to
// nothing. (The accesses themselves come through the compiler's hooks and `access` of calls.h.)
#pragma once

#include "runtime.h"

namespace emu {

#ifdef EMU_HOOKS
void hook_launch_begins(Executor& state);
void hook_launch_ends(Executor& state);
void hook_block_begins(Executor& state);
void hook_block_ends(Executor& state);
void hook_warp_operation_ends();
void hook_slot(Executor& state, const SharedSlot& slot);
void hook_copy_issued(const AsyncCopy& copy);
void hook_copy_completed(const AsyncCopy& copy);
void hook_matrix_row(const void* row, Site site);
#else
inline void hook_launch_begins(Executor&) {}
inline void hook_launch_ends(Executor&) {}
inline void hook_block_begins(Executor&) {}
inline void hook_block_ends(Executor&) {}
inline void hook_warp_operation_ends() {}
inline void hook_slot(Executor&, const SharedSlot&) {}
inline void hook_copy_issued(const AsyncCopy&) {}
inline void hook_copy_completed(const AsyncCopy&) {}
inline void hook_matrix_row(const void*, Site) {}
#endif

} // namespace emu
