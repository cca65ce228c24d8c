// The hooks that the compiler puts before every load and store of code built with -fsanitize=thread. Its own library is
// not linked: these take its place.
#ifdef EMU_HOOKS
#include "touch.h"

#include <dlfcn.h>

#include <cstdio>

// Bounds of this library, given by the linker.
extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" const char _end[] __attribute__((visibility("hidden")));

namespace emu {

namespace {

bool within(const void* p, const void* low, const void* high) { return p >= low && p < high; }

void touch_plain(const void* p, size_t bytes, bool write, bool aligned, const void* code) {
    if (current == nullptr) return;
    if (aligned && reinterpret_cast<uintptr_t>(p) % bytes != 0) {
        char address[32];
        std::snprintf(address, sizeof(address), "%p", p);
        fail("misaligned access of " + std::to_string(bytes) + " bytes to " + address + " at " + place_of(code));
    }
    touched({p, bytes, write, false, Space::Any, {nullptr, 0}, code});
}

} // namespace

bool in_library(const void* p) { return within(p, __ehdr_start, _end); }

bool in_shared_memory(const Executor& state, const void* p) {
    return within(p, state.arena, state.arena + state.arena_bytes);
}

bool is_private(const Executor& state, const Touch& touch) {
    const Fiber& fiber = this_fiber();
    const void* p = touch.address;
    if (within(p, fiber.stack_low, fiber.stack_high)) return true;
    if (touch.write) return false;
    if (within(p, state.fibers.data(), state.fibers.data() + state.fibers.size())) return true;
    return within(p, &state, &state + 1) || p == static_cast<const void*>(&current) || in_library(p);
}

std::string place_of(const void* code) {
    Dl_info information;
    if (dladdr(code, &information) == 0 || information.dli_fname == nullptr) return "an unknown place";
    // A return address is behind the access.
    const char* base = static_cast<const char*>(information.dli_fbase);
    const size_t offset = static_cast<size_t>(static_cast<const char*>(code) - base) - 1;
    char command[512];
    std::snprintf(command, sizeof(command), "addr2line -s -e '%s' 0x%zx 2>/dev/null", information.dli_fname, offset);
    std::string text;
    if (FILE* pipe = popen(command, "r"); pipe != nullptr) {
        char line[256];
        if (std::fgets(line, sizeof(line), pipe) != nullptr) text = line;
        pclose(pipe);
    }
    text = text.substr(0, text.find(" (discriminator"));
    while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
    if (!text.empty() && text[0] != '?') return text;
    char fallback[64];
    std::snprintf(fallback, sizeof(fallback), "code offset 0x%zx", offset);
    return fallback;
}

std::string place_of(const Touch& touch) {
    return touch.site.file != nullptr ? describe(touch.site) : place_of(touch.code);
}

void access(const void* p, size_t bytes, bool write, Space space, Site site) {
    if (current != nullptr) touched({p, bytes, write, false, space, site, __builtin_return_address(0)});
}

void atomic_access(const void* p, size_t bytes, Site site) {
    if (current != nullptr) touched({p, bytes, true, true, Space::Any, site, __builtin_return_address(0)});
}

} // namespace emu

#define EMU_TOUCH(name, bytes, write, aligned)                                             \
    extern "C" void name(void* p) {                                                        \
        ::emu::touch_plain(p, bytes, write, aligned, __builtin_return_address(0));         \
    }
#define EMU_TOUCHES(bytes)                                                                 \
    EMU_TOUCH(__tsan_read##bytes, bytes, false, true)                                      \
    EMU_TOUCH(__tsan_write##bytes, bytes, true, true)                                      \
    EMU_TOUCH(__tsan_volatile_read##bytes, bytes, false, true)                             \
    EMU_TOUCH(__tsan_volatile_write##bytes, bytes, true, true)                             \
    EMU_TOUCH(__tsan_unaligned_read##bytes, bytes, false, false)                           \
    EMU_TOUCH(__tsan_unaligned_write##bytes, bytes, true, false)                           \
    EMU_TOUCH(__tsan_unaligned_volatile_read##bytes, bytes, false, false)                  \
    EMU_TOUCH(__tsan_unaligned_volatile_write##bytes, bytes, true, false)
EMU_TOUCHES(1)
EMU_TOUCHES(2)
EMU_TOUCHES(4)
EMU_TOUCHES(8)
EMU_TOUCHES(16)

extern "C" void __tsan_read_range(void* p, size_t bytes) {
    ::emu::touch_plain(p, bytes, false, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* p, size_t bytes) {
    ::emu::touch_plain(p, bytes, true, false, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_read(void**) {}
extern "C" void __tsan_vptr_update(void**, void*) {}
#endif // EMU_HOOKS
