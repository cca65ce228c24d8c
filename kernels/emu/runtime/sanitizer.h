// AddressSanitizer must be told of stack switches and of memory that no access may touch; in other builds nothing is
// left of these calls.
#pragma once

#include <cstddef>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emu {

inline void poison(const void* p, size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(p, bytes);
#else
    (void)p, (void)bytes;
#endif
}

inline void unpoison(const void* p, size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(p, bytes);
#else
    (void)p, (void)bytes;
#endif
}

// `keep` is where the stack that is left keeps its state; null if it is left for good.
inline void before_switch(void** keep, const void* stack, size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(keep, stack, bytes);
#else
    (void)keep, (void)stack, (void)bytes;
#endif
}

inline void after_switch(void* kept) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(kept, nullptr, nullptr);
#else
    (void)kept;
#endif
}

} // namespace emu
