// The k largest logits of each row, with all that tie with the k-th, in the order of tokens: what random sampling under
// top_k needs of a row.
//
// Every thread finds the largest of its part of the row. The k-th largest of these is a lower bound of the row's own k-th,
// and a sharp one, because large logits are rarely one thread's: what is not below it are few candidates, which are
// gathered in shared memory, and the search ends there. Where they are too many (most of all: ties), the k-th is
// searched for in the row itself. Candidates come in any order; their places in the list follow from their tokens.
#include "include/logits.cuh"

namespace {

// One for each thread.
constexpr u32 MOST_CANDIDATES = SEARCH_THREADS;

// NaN and minus infinity are below every other value, and never listed.
__device__ __forceinline__ u32 key_of(float value) { return value > -INFINITY ? ordered_bits(value) : 0; }

// Calls `visit(key, token)` for the thread's part of the row.
template <typename Visit>
__device__ __forceinline__ void visit_keys(const f32* values, i32 stride, i32 vocabulary, const Visit& visit) {
    visit_row(values, stride, vocabulary, [&](f32 value, u32 token) { visit(key_of(value), token); });
}

// The k-th largest key, from `count(key)`: how many are at least it, the same in all threads. 1 where there are fewer
// than k: all that are not 0 then.
template <typename Count> __device__ __forceinline__ u32 kth_largest(i32 k, const Count& count) {
    u32 found = 0;
#pragma unroll 1
    for (u32 bit = 0x80000000u; bit != 0; bit >>= 1) {
        if (count(found | bit) >= k) found |= bit;
    }
    return max(found, 1u);
}

// The sum of the threads' numbers. `shared` is one number.
__device__ __forceinline__ u32 block_total(u32 number, u32* shared) {
    if (threadIdx.x == 0) *shared = 0;
    __syncthreads();
    if (number > 0) atomicAdd(shared, number);
    __syncthreads();
    const u32 total = *shared;
    __syncthreads();
    return total;
}

// Gathers, in any order, the tokens whose keys are at least `least`, as far as there is room; how many there are.
__device__ __forceinline__ u32 gather(const f32* values, i32 stride, i32 vocabulary, u32 least, u64* candidates,
                                      u32* shared) {
    if (threadIdx.x == 0) *shared = 0;
    __syncthreads();
    visit_keys(values, stride, vocabulary, [&](u32 key, u32 token) {
        if (key < least) return;
        const u32 place = atomicAdd(shared, 1u);
        if (place < MOST_CANDIDATES) candidates[place] = static_cast<u64>(key) << 32 | token;
    });
    __syncthreads();
    const u32 found = *shared;
    __syncthreads();
    return found;
}

} // namespace

KERNEL(SEARCH_THREADS, largest_f32)(const i32* header, i32 count, const f32* logits, i32 stride, i32 vocabulary, i32 k,
                             i32 capacity, u32* out) {
    KSHARED(u64, candidates, [MOST_CANDIDATES]);
    KSHARED(u32, shared, [1]);
    const i32 rows = header[count];
    for (i32 row = blockIdx.x; row < rows; row += gridDim.x) {
        const f32* values = logits + static_cast<size_t>(row) * stride;
        u32* list = out + static_cast<size_t>(row) * (1 + 2 * capacity);
        u32 best = 0;
        visit_keys(values, stride, vocabulary, [&](u32 key, u32) { best = max(best, key); });
        u32 least = kth_largest(k, [&](u32 key) { return __syncthreads_count(best >= key); });
        u32 found = gather(values, stride, vocabulary, least, candidates, shared);
        if (found > MOST_CANDIDATES) {
            least = kth_largest(k, [&](u32 key) {
                u32 mine = 0;
                visit_keys(values, stride, vocabulary, [&](u32 other, u32) { mine += other >= key; });
                return static_cast<i32>(block_total(mine, shared));
            });
            found = gather(values, stride, vocabulary, least, candidates, shared);
        }
        if (found <= MOST_CANDIDATES) {
            const u64 mine = threadIdx.x < found ? candidates[threadIdx.x] : 0;
            const u32 key = static_cast<u32>(mine >> 32), token = static_cast<u32>(mine);
            least = kth_largest(k, [&](u32 other) { return __syncthreads_count(key >= other); });
            const u32 gathered = found;
            found = __syncthreads_count(key >= least);
            if (key >= least && found <= static_cast<u32>(capacity)) {
                u32 place = 0;
                for (u32 other = 0; other < gathered; ++other) {
                    const u64 candidate = candidates[other];
                    place += candidate >> 32 >= least && static_cast<u32>(candidate) < token;
                }
                // The row's own bits: a key has lost the sign of zero.
                list[1 + place] = __float_as_uint(__ldg(values + token));
                list[1 + capacity + place] = token;
            }
        }
        if (threadIdx.x == 0) list[0] = found;
        __syncthreads();
    }
}
KERNEL_EXPORT(largest_f32)
