// What the emulated card says of itself: the figures of an sm_80 card, each of which EMU_ATTRIBUTE_<number> overrides.
#pragma once

#include "../../include/integers.h"

namespace emu {

constexpr int max_shared_per_block = 8;
constexpr int compute_capability_major = 75;
constexpr int compute_capability_minor = 76;
constexpr int max_shared_opt_in = 97;
constexpr int memory_pools_supported = 115;

bool attribute_known(int number);
// 0 for one that is not known.
u32 attribute(int number);

} // namespace emu
