// What happens to device memory outside kernels, as the checker needs to know it. Nothing in other builds.
#pragma once

#include <cstddef>

namespace emu {

#ifdef EMU_CHECK
void hook_heap_reserved(const void* base, size_t bytes);
void hook_allocated(const void* p, size_t bytes);
void hook_released(const void* p, size_t bytes);
// The host, a copy or a library wrote these bytes.
void hook_written(const void* p, size_t bytes);
// As many bytes went from one place of the device to another: initialised where the source was.
void hook_copied(const void* to, const void* from, size_t bytes);
// Whether all bytes are initialised; what a library reads must be.
bool hook_initialised(const void* p, size_t bytes);
#else
inline void hook_heap_reserved(const void*, size_t) {}
inline void hook_allocated(const void*, size_t) {}
inline void hook_released(const void*, size_t) {}
inline void hook_written(const void*, size_t) {}
inline void hook_copied(const void*, const void*, size_t) {}
inline bool hook_initialised(const void*, size_t) { return true; }
#endif

} // namespace emu
