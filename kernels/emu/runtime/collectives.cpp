// Barriers, shuffles and votes: operations that several threads do together. Each checks that all of them came to the
// same place in the source, because on a card divergence there is a hang or a wrong value.
#include "gather.h"
#include "hooks.h"
#include "runtime.h"

namespace emu {

namespace {

bool same(Site a, Site b) { return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0); }

u32 lanes_of(const Block& block, u32 warp) {
    const u32 left = block.threads - warp * warp_size;
    return left >= warp_size ? 0xffffffffu : (1u << left) - 1;
}

Gathering& find_gathering(Warp& warp, u32 mask) {
    for (u32 i = 0; i < warp.gatherings_used; ++i) {
        if (warp.gatherings[i].mask == mask) return warp.gatherings[i];
    }
    // Emptied ones are taken again, so that the list stays short.
    for (u32 i = 0; i < warp.gatherings_used; ++i) {
        if (warp.gatherings[i].arrived == 0) {
            warp.gatherings[i].mask = mask;
            return warp.gatherings[i];
        }
    }
    Gathering& gathering = warp.gatherings[warp.gatherings_used++];
    gathering.mask = mask;
    gathering.arrived = 0;
    return gathering;
}

} // namespace

void gather(u32 mask, void* request, Combine combine, Site site) {
    Executor& state = *executor;
    Fiber& fiber = this_fiber();
    Warp& warp = state.warps[fiber.warp];
    const u32 bit = 1u << fiber.lane;
    if ((mask & bit) == 0) fail("the lane is not in the mask that it gives at " + describe(site));
    if ((mask & ~lanes_of(state.block, fiber.warp)) != 0) {
        fail("the mask names lanes that the block does not have at " + describe(site));
    }
    Gathering& gathering = find_gathering(warp, mask);
    if (gathering.arrived == 0) {
        gathering.site = site;
        gathering.combine = combine;
    } else if (gathering.combine != combine || !same(gathering.site, site)) {
        fail("the warp has come apart: this lane is at " + describe(site) + ", another waits at " +
             describe(gathering.site));
    }
    gathering.requests[fiber.lane] = request;
    gathering.arrived |= bit;
    if (gathering.arrived != mask) {
        wait_here(Waiting::Warp, site);
        return;
    }
    gathering.arrived = 0;
    combine(mask, gathering.requests);
    const bool descending = state.launch->settings.order == Order::Descending;
    for (u32 i = 0; i < warp_size; ++i) {
        const u32 lane = descending ? warp_size - 1 - i : i;
        if ((mask >> lane & 1) != 0 && lane != fiber.lane) make_ready(state.fibers[fiber.warp * warp_size + lane]);
    }
    hook_warp_operation_ends();
}

namespace {

struct ShuffleRequest {
    u64 bits;
    u64 result;
    int argument;
    int width;
    Shuffle kind;
};

void combine_shuffle(u32 mask, void* const* requests) {
    for (int lane = 0; lane < static_cast<int>(warp_size); ++lane) {
        if ((mask >> lane & 1) == 0) continue;
        auto& request = *static_cast<ShuffleRequest*>(requests[lane]);
        const int first = lane & ~(request.width - 1);
        int source = lane;
        switch (request.kind) {
        case Shuffle::Index: source = first + (request.argument & (request.width - 1)); break;
        case Shuffle::Up: source = lane - request.argument; break;
        case Shuffle::Down: source = lane + request.argument; break;
        case Shuffle::Xor: source = lane ^ request.argument; break;
        }
        // Outside its group a lane keeps its own value.
        const bool outside = request.kind == Shuffle::Xor ? source >= first + request.width
                                                          : source < first || source >= first + request.width;
        if (outside) source = lane;
        if (source < 0 || (mask >> source & 1) == 0) {
            fail("lane " + std::to_string(lane) + " reads lane " + std::to_string(source) +
                 ", which is not in the shuffle's mask");
        }
        request.result = static_cast<ShuffleRequest*>(requests[source])->bits;
    }
}

struct VoteRequest {
    bool predicate;
    u32 result;
};

void combine_vote(u32 mask, void* const* requests) {
    u32 votes = 0;
    for (u32 lane = 0; lane < warp_size; ++lane) {
        if ((mask >> lane & 1) != 0 && static_cast<VoteRequest*>(requests[lane])->predicate) votes |= 1u << lane;
    }
    for (u32 lane = 0; lane < warp_size; ++lane) {
        if ((mask >> lane & 1) != 0) static_cast<VoteRequest*>(requests[lane])->result = votes;
    }
}

// Orders the accesses of a whole warp; a part of a warp is not followed that closely.
void combine_warp_barrier(u32 mask, void* const*) {
    const u32 warp = this_fiber().warp;
    if (mask == lanes_of(executor->block, warp)) ++executor->warps[warp].epoch;
}

struct ButterflyRequest {
    float value;
    int width;
    bool maximum;
};

// The same additions in the same order as the shuffles of compat.cuh.
void combine_butterfly(u32, void* const* requests) {
    float values[warp_size];
    const auto& first = *static_cast<ButterflyRequest*>(requests[0]);
    for (u32 lane = 0; lane < warp_size; ++lane) values[lane] = static_cast<ButterflyRequest*>(requests[lane])->value;
    for (u32 offset = static_cast<u32>(first.width) / 2; offset > 0; offset /= 2) {
        float next[warp_size];
        for (u32 lane = 0; lane < warp_size; ++lane) {
            const float mine = values[lane];
            const float other = values[lane ^ offset];
            next[lane] = first.maximum ? fmaxf(mine, other) : mine + other;
        }
        std::memcpy(values, next, sizeof(values));
    }
    for (u32 lane = 0; lane < warp_size; ++lane) static_cast<ButterflyRequest*>(requests[lane])->value = values[lane];
}

} // namespace

u64 shuffle(u32 mask, u64 bits, int argument, int width, Shuffle kind, Site site) {
    if (width < 1 || width > 32 || (width & (width - 1)) != 0) fail("shuffle of a width that is no power of two");
    ShuffleRequest request{bits, 0, argument, width, kind};
    gather(mask, &request, combine_shuffle, site);
    return request.result;
}

u32 ballot(u32 mask, bool predicate, Site site) {
    VoteRequest request{predicate, 0};
    gather(mask, &request, combine_vote, site);
    return request.result;
}

void warp_barrier(u32 mask, Site site) {
    gather(mask, nullptr, combine_warp_barrier, site);
}

float butterfly(float value, int width, bool maximum, Site site) {
    ButterflyRequest request{value, width, maximum};
    gather(0xffffffffu, &request, combine_butterfly, site);
    return request.value;
}

u32 block_barrier(u32 value, Site site) {
    Executor& state = *executor;
    Block& block = state.block;
    if (block.barrier_arrived == 0) {
        block.barrier_site = site;
    } else if (!same(block.barrier_site, site)) {
        fail("two barriers at once: this thread is at " + describe(site) + ", another waits at " +
             describe(block.barrier_site));
    }
    block.barrier_sum += value;
    if (++block.barrier_arrived != block.threads) {
        wait_here(Waiting::Block, site);
        return block.barrier_result;
    }
    block.barrier_result = block.barrier_sum;
    block.barrier_arrived = block.barrier_sum = 0;
    ++block.epoch;
    const Fiber& self = this_fiber();
    const bool descending = state.launch->settings.order == Order::Descending;
    for (u32 i = 0; i < block.threads; ++i) {
        Fiber& fiber = state.fibers[descending ? block.threads - 1 - i : i];
        if (&fiber != &self) make_ready(fiber);
    }
    return block.barrier_result;
}

} // namespace emu
