// CUDA's names as a kernel sees them, on the emulated device: included by compat.cuh when g++ compiles a kernel.
// Threads of a block are fibers of one OS thread; whatever meets other threads goes to the runtime through runtime.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Before vectors.h, which needs none of them, and after <cmath>, which declares __expf and __logf itself.
#define __global__
#define __device__ inline
#define __host__
#define __constant__ static const
// What g++ takes: as nvcc inlines, one kernel would be many times its code, and take minutes to compile with sanitizers.
#define __forceinline__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#include "vectors.h"

#include "calls.h"

#define threadIdx (::emu::current->thread)
#define blockIdx (::emu::current->block->index)
#define blockDim (::emu::current->block->size)
#define gridDim (::emu::current->block->grid)

#define KERNEL(threads, name) KERNEL_BLOCKS(threads, 1, name)
#define KERNEL_BLOCKS(threads, blocks, name)               \
    static constexpr u32 name##_launch_bound = (threads);  \
    extern "C" __attribute__((visibility("hidden"))) void name
#define KERNEL_EXPORT(name) \
    static const ::emu::KernelRegistration name##_registration(#name, name##_launch_bound, name);
#define KSHARED(T, name, dimensions)                          \
    typedef T name##_shared dimensions;                       \
    static char name##_slot;                                  \
    name##_shared& name = *static_cast<name##_shared*>(       \
        ::emu::shared_slot(&name##_slot, sizeof(name##_shared), alignof(T) > 16 ? alignof(T) : 16, #name))
#define KSHARED_DYN(T, name) T* name = reinterpret_cast<T*>(::emu::dynamic_shared())

// A collective's place in the source, taken where the kernel calls it.
#define EMU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMU_HERE (::emu::Site{file, line})

// --- formats

inline float to_f32(bf16 value) {
    const u32 bits = static_cast<u32>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}
inline float to_f32(f16 value) { return ::emu::float_from_half(value.bits); }

template <typename T> inline T from_f32(float value);
template <> inline bf16 from_f32<bf16>(float value) { return {::emu::brain_from_float(value)}; }
template <> inline f16 from_f32<f16>(float value) { return {::emu::half_from_float(value)}; }

template <typename T> inline u32 pack2(float low, float high) {
    return static_cast<u32>(from_f32<T>(low).bits) | static_cast<u32>(from_f32<T>(high).bits) << 16;
}

// --- loads and stores: alignment is checked here in every build

#define EMU_LOAD(name, type, kind)                                                                      \
    inline type name(const void* p, EMU_SITE) {                                                         \
        return ::emu::load<type>(p, ::emu::Space::kind, EMU_HERE);                                      \
    }
EMU_LOAD(ldg16, uint4, Global)
EMU_LOAD(ldg16_once, uint4, Global)
EMU_LOAD(ldcg16, uint4, Global)
EMU_LOAD(ldg8, uint2, Global)
EMU_LOAD(ldg4, u32, Global)
EMU_LOAD(ldcg4, u32, Global)
EMU_LOAD(lds16, uint4, Shared)
EMU_LOAD(lds8, uint2, Shared)
#undef EMU_LOAD

inline void sts16(void* p, uint4 value, EMU_SITE) { ::emu::store(p, value, ::emu::Space::Shared, EMU_HERE); }
inline void sts8(void* p, uint2 value, EMU_SITE) { ::emu::store(p, value, ::emu::Space::Shared, EMU_HERE); }
inline void stg16(void* p, uint4 value, EMU_SITE) { ::emu::store(p, value, ::emu::Space::Global, EMU_HERE); }
inline void stg8(void* p, uint2 value, EMU_SITE) { ::emu::store(p, value, ::emu::Space::Global, EMU_HERE); }

// --- asynchronous copies to shared memory

inline void cp_async16(void* shared, const void* global, EMU_SITE) {
    ::emu::copy_async16(shared, global, true, EMU_HERE);
}
inline void cp_async16_or_zero(void* shared, const void* global, bool valid, EMU_SITE) {
    ::emu::copy_async16(shared, global, valid, EMU_HERE);
}
inline void cp_async_commit() { ::emu::copy_async_commit(); }
template <int Pending> inline void cp_async_wait() { ::emu::copy_async_wait(Pending); }

// --- tiles on tensor cores

inline void ldmatrix_x4(u32 (&out)[4], const void* row, EMU_SITE) { ::emu::ldmatrix(out, row, 4, false, EMU_HERE); }
inline void ldmatrix_x2(u32 (&out)[2], const void* row, EMU_SITE) { ::emu::ldmatrix(out, row, 2, false, EMU_HERE); }
inline void ldmatrix_x4_transposed(u32 (&out)[4], const void* row, EMU_SITE) {
    ::emu::ldmatrix(out, row, 4, true, EMU_HERE);
}
inline void ldmatrix_x2_transposed(u32 (&out)[2], const void* row, EMU_SITE) {
    ::emu::ldmatrix(out, row, 2, true, EMU_HERE);
}

template <typename T> inline void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], EMU_SITE);
template <>
inline void mma_m16n8k16<bf16>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const char* file, int line) {
    ::emu::mma(d, a, b, true, EMU_HERE);
}
template <>
inline void mma_m16n8k16<f16>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const char* file, int line) {
    ::emu::mma(d, a, b, false, EMU_HERE);
}

// --- warps and blocks

#define EMU_SHUFFLE(name, kind, operand)                                                                       \
    template <typename T> inline T name(u32 mask, T value, operand, int width = 32, EMU_SITE) {                \
        return ::emu::shuffle_value(mask, value, static_cast<int>(argument), width, ::emu::Shuffle::kind, EMU_HERE); \
    }
EMU_SHUFFLE(__shfl_sync, Index, int argument)
EMU_SHUFFLE(__shfl_up_sync, Up, u32 argument)
EMU_SHUFFLE(__shfl_down_sync, Down, u32 argument)
EMU_SHUFFLE(__shfl_xor_sync, Xor, int argument)
#undef EMU_SHUFFLE

inline u32 __ballot_sync(u32 mask, int predicate, EMU_SITE) { return ::emu::ballot(mask, predicate != 0, EMU_HERE); }
inline int __any_sync(u32 mask, int predicate, EMU_SITE) { return ::emu::ballot(mask, predicate != 0, EMU_HERE) != 0; }
inline int __all_sync(u32 mask, int predicate, EMU_SITE) {
    return ::emu::ballot(mask, predicate != 0, EMU_HERE) == mask;
}
inline void __syncwarp(u32 mask = 0xffffffffu, EMU_SITE) { ::emu::warp_barrier(mask, EMU_HERE); }
inline void __syncthreads(EMU_SITE) { ::emu::block_barrier(0, EMU_HERE); }
inline int __syncthreads_count(int predicate, EMU_SITE) {
    return static_cast<int>(::emu::block_barrier(predicate != 0, EMU_HERE));
}
inline int __syncthreads_or(int predicate, EMU_SITE) { return ::emu::block_barrier(predicate != 0, EMU_HERE) != 0; }
inline int __syncthreads_and(int predicate, EMU_SITE) {
    return ::emu::block_barrier(predicate == 0, EMU_HERE) == 0;
}

#ifdef EMU_FAST_REDUCTIONS
template <int Width = 32> inline float warp_sum(float value, EMU_SITE) {
    return ::emu::butterfly(value, Width, false, EMU_HERE);
}
template <int Width = 32> inline float warp_max(float value, EMU_SITE) {
    return ::emu::butterfly(value, Width, true, EMU_HERE);
}
#endif

// --- atomics: one OS thread runs all fibers of a launch, so a plain read and write is atomic here

#define EMU_ATOMIC(name, T, result)                       \
    inline T name(T* p, T value, EMU_SITE) {              \
        return ::emu::atomic(p, EMU_HERE, [=](T old) -> T { \
            (void)old;                                    \
            return result;                                \
        });                                               \
    }
EMU_ATOMIC(atomicAdd, i32, static_cast<i32>(static_cast<u32>(old) + static_cast<u32>(value)))
EMU_ATOMIC(atomicAdd, u32, old + value)
EMU_ATOMIC(atomicAdd, u64, old + value)
EMU_ATOMIC(atomicMax, i32, old > value ? old : value)
EMU_ATOMIC(atomicMax, u32, old > value ? old : value)
EMU_ATOMIC(atomicMin, i32, old < value ? old : value)
EMU_ATOMIC(atomicMin, u32, old < value ? old : value)
EMU_ATOMIC(atomicExch, i32, value)
EMU_ATOMIC(atomicExch, u32, value)
#undef EMU_ATOMIC

template <typename T> inline T atomicCAS(T* p, T expected, T value, EMU_SITE) {
    return ::emu::atomic(p, EMU_HERE, [=](T old) { return old == expected ? value : old; });
}
inline void __threadfence() { ::emu::fence(); }
inline void __threadfence_block() {}

inline void grid_dependency_wait() {}
inline void grid_dependency_launch() {}

// --- arithmetic

#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __exp2f(x) exp2f(x)
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdividef(float x, float y) { return x / y; }
template <typename T> inline T __ldg(const T* p, EMU_SITE) { return ::emu::load<T>(p, ::emu::Space::Global, EMU_HERE); }
template <typename T> inline T __ldcg(const T* p, EMU_SITE) { return ::emu::load<T>(p, ::emu::Space::Global, EMU_HERE); }
inline u32 __float_as_uint(float x) { return ::emu::reinterpret<u32>(x); }
inline i32 __float_as_int(float x) { return ::emu::reinterpret<i32>(x); }
inline float __uint_as_float(u32 x) { return ::emu::reinterpret<float>(x); }
inline float __int_as_float(i32 x) { return ::emu::reinterpret<float>(x); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __clz(i32 x) { return x == 0 ? 32 : __builtin_clz(static_cast<u32>(x)); }
inline int __ffs(i32 x) { return __builtin_ffs(x); }

#define EMU_MIN_MAX(T)                                        \
    inline T min(T a, T b) { return b < a ? b : a; }          \
    inline T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(i32)
EMU_MIN_MAX(u32)
EMU_MIN_MAX(i64)
EMU_MIN_MAX(u64)
#undef EMU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
