// Turns a memory fault of a kernel into the failure of its launch.
#pragma once

namespace emu {

// For the calling thread, which runs launches. AddressSanitizer's own handler is left in place.
void catch_faults();

} // namespace emu
