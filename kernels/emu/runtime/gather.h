// The one way in which lanes of a warp do something together.
#pragma once

#include "runtime.h"

namespace emu {

// Waits until all lanes of `mask` are here with their requests; the last one to come carries out `combine`.
void gather(u32 mask, void* request, Combine combine, Site site);

} // namespace emu
