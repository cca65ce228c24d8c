// The only file that knows which compiler builds a kernel: nvcc for a card, or g++ with -DCUDA_EMU for the emulated
// device of `emu/`. Everything that is not plain C++ or one of CUDA's own names listed below goes through it.
//
// How to write a kernel
//   #include "include/compat.cuh"                     // and nothing of CUDA, nor <cstdint> or <cmath>
//   template <typename T> __device__ void scale_rows(T* rows, u32 count) { ... }
//   KERNEL(256, scale_rows_bf16)(bf16* rows, u32 count) { scale_rows<bf16>(rows, count); }
//   KERNEL_EXPORT(scale_rows_bf16)
//
// KERNEL(threads, name)       extern "C" kernel, with `threads` as its launch bound; KERNEL_EXPORT(name) follows it
// KERNEL_BLOCKS(threads, blocks, name)   the same, with a wanted number of resident blocks per multiprocessor
// KSHARED(T, name, [N][M])    static shared memory, 16-byte aligned; at a function's top level, reached by all threads.
//                             A device function (or one instance of a template) has one such array, as under nvcc.
// KSHARED_DYN(T, name)        `T* name`: the launch's dynamic shared memory, 16-byte aligned
// Parameters are i32, u32, i64, u64, f32 and pointers only.
//
// Types    u8 u16 i32 u32 i64 u64 f32; bf16 and f16 (two bytes, member `bits`, no arithmetic of their own);
//          CUDA's int2 int4 uint2 uint4 float2 float4 dim3 and make_*; INFINITY
// Formats  to_f32(x); from_f32<T>(x) (to nearest even); pack2<T>(low, high) -> u32; unpack2<T>(u32) -> float2
// Loads    ldg16/ldg8/ldg4(p): global memory that nobody writes during the launch (uint4, uint2, u32)
//          ldg16_once(p): the same for what is read only once (weights): does not stay in L1
//          ldcg16/ldcg4(p): global memory that another block of this launch wrote (past L1; after a counter says so)
//          lds16/lds8(p), sts16/sts8(p, v): shared memory; stg16/stg8(p, v): global stores
// Copies   cp_async16(shared, global), cp_async16_or_zero(shared, global, valid), cp_async_commit(), cp_async_wait<N>()
// Tiles    ldmatrix_x4/_x2(out, row), ldmatrix_x4_transposed/_x2_transposed(out, row) (row: one 16-byte row per lane);
//          mma_m16n8k16<T>(d, a, b): d += a b, f32 accumulate, T is bf16 or f16, PTX's register layout
// Warp     __shfl_sync __shfl_up_sync __shfl_down_sync __shfl_xor_sync (any 4- or 8-byte scalar), __ballot_sync
//          __any_sync __all_sync __syncwarp; warp_sum<Width>(x), warp_max<Width>(x): butterfly over groups of Width
//          lanes, the same bits in every lane
// Block    __syncthreads, __syncthreads_or/_and/_count; threadIdx blockIdx blockDim gridDim
// Atomics  atomicAdd (i32 u32 u64), atomicMax atomicMin atomicExch atomicCAS (i32 u32); __threadfence. No float atomics:
//          their order is not reproducible
// Chains   grid_dependency_wait(), grid_dependency_launch(): programmatic dependent launch; nothing before sm_90
// Math     fmaf fmaxf fminf fabsf sqrtf rsqrtf expf exp2f logf log2f tanhf floorf __expf __logf __fdividef min max
//          __float_as_uint __uint_as_float __float_as_int __int_as_float __popc __clz __ffs
#pragma once

#include "integers.h"

struct alignas(2) bf16 {
    u16 bits;
};
struct alignas(2) f16 {
    u16 bits;
};

#ifdef CUDA_EMU
#include "../emu/device.h"
#else

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

#define KERNEL(threads, name) extern "C" __global__ void __launch_bounds__(threads) name
#define KERNEL_BLOCKS(threads, blocks, name) extern "C" __global__ void __launch_bounds__(threads, blocks) name
#define KERNEL_EXPORT(name)
#define KSHARED(T, name, dimensions) __shared__ __align__(16) T name dimensions
#define KSHARED_DYN(T, name)                                      \
    extern __shared__ __align__(16) u8 kernel_dynamic_shared[];   \
    T* name = reinterpret_cast<T*>(kernel_dynamic_shared)

// --- formats

__device__ __forceinline__ float to_f32(bf16 value) { return __uint_as_float(static_cast<u32>(value.bits) << 16); }

__device__ __forceinline__ float to_f32(f16 value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}

template <typename T> __device__ __forceinline__ T from_f32(float value);

template <> __device__ __forceinline__ bf16 from_f32<bf16>(float value) {
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

template <> __device__ __forceinline__ f16 from_f32<f16>(float value) {
    f16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

template <typename T> __device__ __forceinline__ u32 pack2(float low, float high);

template <> __device__ __forceinline__ u32 pack2<bf16>(float low, float high) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

template <> __device__ __forceinline__ u32 pack2<f16>(float low, float high) {
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

// --- loads and stores

__device__ __forceinline__ uint4 ldg16(const void* p) { return __ldg(static_cast<const uint4*>(p)); }
__device__ __forceinline__ uint2 ldg8(const void* p) { return __ldg(static_cast<const uint2*>(p)); }
__device__ __forceinline__ u32 ldg4(const void* p) { return __ldg(static_cast<const u32*>(p)); }

__device__ __forceinline__ uint4 ldg16_once(const void* p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(__cvta_generic_to_global(p)));
    return v;
}

__device__ __forceinline__ uint4 ldcg16(const void* p) { return __ldcg(static_cast<const uint4*>(p)); }
__device__ __forceinline__ u32 ldcg4(const void* p) { return __ldcg(static_cast<const u32*>(p)); }
__device__ __forceinline__ uint4 lds16(const void* p) { return *static_cast<const uint4*>(p); }
__device__ __forceinline__ uint2 lds8(const void* p) { return *static_cast<const uint2*>(p); }
__device__ __forceinline__ void sts16(void* p, uint4 value) { *static_cast<uint4*>(p) = value; }
__device__ __forceinline__ void sts8(void* p, uint2 value) { *static_cast<uint2*>(p) = value; }
__device__ __forceinline__ void stg16(void* p, uint4 value) { *static_cast<uint4*>(p) = value; }
__device__ __forceinline__ void stg8(void* p, uint2 value) { *static_cast<uint2*>(p) = value; }

// --- asynchronous copies to shared memory

__device__ __forceinline__ void cp_async16_or_zero(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<u32>(__cvta_generic_to_shared(shared))),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(shared))),
                 "l"(__cvta_generic_to_global(global))
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int Pending> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// --- tiles on tensor cores

#define COMPAT_LDMATRIX_X4(name, form)                                                        \
    __device__ __forceinline__ void name(u32 (&out)[4], const void* row) {                    \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" form ".shared.b16 {%0, %1, %2, %3}, [%4];" \
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])                 \
                     : "r"(static_cast<u32>(__cvta_generic_to_shared(row)))                   \
                     : "memory");                                                             \
    }
#define COMPAT_LDMATRIX_X2(name, form)                                                \
    __device__ __forceinline__ void name(u32 (&out)[2], const void* row) {            \
        asm volatile("ldmatrix.sync.aligned.m8n8.x2" form ".shared.b16 {%0, %1}, [%2];" \
                     : "=r"(out[0]), "=r"(out[1])                                     \
                     : "r"(static_cast<u32>(__cvta_generic_to_shared(row)))           \
                     : "memory");                                                     \
    }
COMPAT_LDMATRIX_X4(ldmatrix_x4, "")
COMPAT_LDMATRIX_X4(ldmatrix_x4_transposed, ".trans")
COMPAT_LDMATRIX_X2(ldmatrix_x2, "")
COMPAT_LDMATRIX_X2(ldmatrix_x2_transposed, ".trans")
#undef COMPAT_LDMATRIX_X4
#undef COMPAT_LDMATRIX_X2

template <typename T> __device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);

#define COMPAT_MMA(T, format)                                                                                        \
    template <>                                                                                                      \
    __device__ __forceinline__ void mma_m16n8k16<T>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {           \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." format "." format ".f32 {%0, %1, %2, %3}, "            \
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                                 \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                            \
    }
COMPAT_MMA(bf16, "bf16")
COMPAT_MMA(f16, "f16")
#undef COMPAT_MMA

// --- chains of launches

__device__ __forceinline__ void grid_dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void grid_dependency_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif // CUDA_EMU

// --- what both compilers build from the above

template <typename T> __device__ __forceinline__ float2 unpack2(u32 pair) {
    const T low = {static_cast<u16>(pair)};
    const T high = {static_cast<u16>(pair >> 16)};
    return make_float2(to_f32(low), to_f32(high));
}

// The emulated device does a whole butterfly in one step, which gives the same bits in half the time; its sanitizer
// build keeps the shuffles.
#ifndef EMU_FAST_REDUCTIONS
template <int Width = 32> __device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = Width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

template <int Width = 32> __device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = Width / 2; offset > 0; offset /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    }
    return value;
}
#endif
