// What compiled kernels call in the emulator's runtime: collectives, copies, checked accesses, and the registry that
// finds kernels by name. Seen by kernels through device.h; implemented by the runtime's own files.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// Reads and writes that the checker is told of by other means are compiled without its hooks.
#define EMU_UNCHECKED __attribute__((no_sanitize("thread"), noinline))

namespace emu {

// A place in a kernel's source.
struct Site {
    const char* file;
    int line;
};

struct BlockIdentity {
    uint3 index;
    dim3 size;
    dim3 grid;
};

struct ThreadIdentity {
    uint3 thread;
    const BlockIdentity* block;
};

// The thread of the grid that runs now. Plain __thread: `extern thread_local` would go through a wrapper at each use.
extern __thread ThreadIdentity* current __attribute__((tls_model("initial-exec")));

enum class Space { Any, Global, Shared };
enum class Shuffle { Index, Up, Down, Xor };

// --- the registry

struct Parameter {
    size_t offset;
    size_t size;
};

struct KernelEntry {
    const char* name;
    u32 launch_bound;
    const Parameter* parameters;
    size_t parameter_count;
    void (*function)();
    void (*invoke)(void (*function)(), void* const* arguments);
};

void register_kernel(const KernelEntry& entry);

template <typename... Arguments> struct KernelSignature {
    static constexpr size_t count = sizeof...(Arguments);

    template <typename T>
    static constexpr bool allowed = std::is_pointer_v<T> || std::is_same_v<T, i32> || std::is_same_v<T, u32> ||
                                    std::is_same_v<T, i64> || std::is_same_v<T, u64> || std::is_same_v<T, f32>;
    static_assert((allowed<Arguments> && ...), "a kernel's parameters are i32, u32, i64, u64, f32 and pointers");

    // One more than needed, so that a kernel without parameters has a table too.
    static const Parameter* table() {
        static Parameter entries[count + 1];
        const size_t sizes[count + 1] = {sizeof(Arguments)..., 0};
        size_t offset = 0;
        for (size_t i = 0; i < count; ++i) {
            offset = (offset + sizes[i] - 1) / sizes[i] * sizes[i];
            entries[i] = {offset, sizes[i]};
            offset += sizes[i];
        }
        return entries;
    }

    template <size_t... Index>
    EMU_UNCHECKED static void call(void (*function)(), void* const* arguments, std::index_sequence<Index...>) {
        (void)arguments;
        reinterpret_cast<void (*)(Arguments...)>(function)(*static_cast<Arguments*>(arguments[Index])...);
    }

    EMU_UNCHECKED static void invoke(void (*function)(), void* const* arguments) {
        call(function, arguments, std::index_sequence_for<Arguments...>{});
    }
};

struct KernelRegistration {
    template <typename... Arguments>
    KernelRegistration(const char* name, u32 launch_bound, void (*function)(Arguments...)) {
        using Signature = KernelSignature<Arguments...>;
        register_kernel({name, launch_bound, Signature::table(), Signature::count,
                         reinterpret_cast<void (*)()>(function), Signature::invoke});
    }
};

// --- shared memory and asynchronous copies

void* shared_slot(const char* tag, size_t bytes, size_t alignment, const char* name);
void* dynamic_shared();
void copy_async16(void* shared, const void* global, bool valid, Site site);
void copy_async_commit();
void copy_async_wait(int pending);

// --- collectives

u64 shuffle(u32 mask, u64 bits, int argument, int width, Shuffle kind, Site site);
u32 ballot(u32 mask, bool predicate, Site site);
void warp_barrier(u32 mask, Site site);
u32 block_barrier(u32 value, Site site);
float butterfly(float value, int width, bool maximum, Site site);
void ldmatrix(u32* out, const void* row, int matrices, bool transposed, Site site);
void mma(float* d, const u32* a, const u32* b, bool brain, Site site);

template <typename T> inline T shuffle_value(u32 mask, T value, int argument, int width, Shuffle kind, Site site) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    u64 bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = shuffle(mask, bits, argument, width, kind, site);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

// --- memory accesses that a kernel makes through compat.cuh

[[noreturn]] void misaligned(const void* p, size_t bytes, Site site);
void fence();
#ifdef EMU_HOOKS
void access(const void* p, size_t bytes, bool write, Space space, Site site);
void atomic_access(const void* p, size_t bytes, Site site);
#else
inline void access(const void*, size_t, bool, Space, Site) {}
inline void atomic_access(const void*, size_t, Site) {}
#endif

inline void aligned_access(const void* p, size_t bytes, bool write, Space space, Site site) {
    if (reinterpret_cast<uintptr_t>(p) % bytes != 0) misaligned(p, bytes, site);
    access(p, bytes, write, space, site);
}

#ifdef EMU_HOOKS
#define EMU_ACCESSOR EMU_UNCHECKED
#else
#define EMU_ACCESSOR inline
#endif

template <typename T> EMU_ACCESSOR T load(const void* p, Space space, Site site) {
    aligned_access(p, sizeof(T), false, space, site);
    return *static_cast<const T*>(p);
}

template <typename T> EMU_ACCESSOR void store(void* p, T value, Space space, Site site) {
    aligned_access(p, sizeof(T), true, space, site);
    *static_cast<T*>(p) = value;
}

template <typename T, typename Change> EMU_ACCESSOR T atomic(T* p, Site site, Change change) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0) misaligned(p, sizeof(T), site);
    atomic_access(p, sizeof(T), site);
    const T old = *p;
    *p = change(old);
    return old;
}

template <typename To, typename From> inline To reinterpret(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

// --- number formats, by bits, so that every host gives the same result

inline u16 brain_from_float(float value) {
    const u32 bits = reinterpret<u32>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float float_from_half(u16 half) {
    const u32 sign = static_cast<u32>(half & 0x8000u) << 16;
    const u32 exponent = half >> 10 & 0x1fu;
    const u32 fraction = half & 0x3ffu;
    if (exponent == 31) return reinterpret<float>(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return reinterpret<float>(sign | (exponent + 112u) << 23 | fraction << 13);
    // Subnormal or zero: fraction x 2^-24 is exact in f32.
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
}

inline u16 half_from_float(float value) {
    const u32 bits = reinterpret<u32>(value);
    const u32 sign = bits >> 16 & 0x8000u;
    const u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
    // 65520 and above round to infinity.
    if (magnitude >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u);
    if (magnitude >= 0x38800000u) {
        const u32 rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
        return static_cast<u16>(sign | (rounded - 0x38000000u) >> 13);
    }
    // Subnormal: adding 1/2 leaves the result, rounded to nearest even in steps of 2^-24, in the low bits of the sum.
    const float shifted = reinterpret<float>(magnitude) + 0.5f;
    return static_cast<u16>(sign | (reinterpret<u32>(shifted) - 0x3f000000u));
}

} // namespace emu
