// What the paged attention and its reduction share: how the keys are cut into partitions, what a partial result looks
// like, and how one is added to another. A decode row whose partitions went to different blocks and a prompt's row whose
// partitions one block went through one after the other must get the same bits, so both add them up by `merge`.
#pragma once

#include "rows.cuh"

// Keys of a partition; partitions begin at multiples of it.
constexpr i32 PARTITION = 256;
// Places before the accumulator of a partial result: maximum, sum of weights, and two to keep it aligned.
constexpr i32 PARTIAL_HEAD = 4;

__device__ __forceinline__ float* partial_place(float* partials, i32 slot, i32 heads, i32 head, i32 head_dim) {
    return partials + (static_cast<size_t>(slot) * heads + head) * (head_dim + PARTIAL_HEAD);
}

// A row's maximum score (in units of log 2) and the sum of its weights relative to it.
struct SoftmaxState {
    float maximum;
    float sum;
};

__device__ __forceinline__ SoftmaxState empty_state() { return {-INFINITY, 0.0f}; }

// Factors on the two sums that are added. Nothing at all (a maximum of -inf) has the factor 0, and leaves the other as
// it is: its factor is 2^0.
struct MergeFactors {
    float running;
    float added;
};

__device__ __forceinline__ MergeFactors merge(SoftmaxState& running, const SoftmaxState& added) {
    const float maximum = fmaxf(running.maximum, added.maximum);
    const float base = maximum == -INFINITY ? 0.0f : maximum;
    const MergeFactors factors = {exp2f(running.maximum - base), exp2f(added.maximum - base)};
    running.sum = fmaf(added.sum, factors.added, rounded_product(running.sum, factors.running));
    running.maximum = maximum;
    return factors;
}

__device__ __forceinline__ float merged(float running, float added, const MergeFactors& factors) {
    return fmaf(added, factors.added, rounded_product(running, factors.running));
}
