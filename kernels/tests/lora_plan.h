// Row-adapter plans and adapter tables for the LoRA tests, laid out as ABI.md says: what the engine's lowering does, written
// again in a few lines.
#pragma once

#include <algorithm>
#include <memory>
#include <tuple>

#include "check.h"
#include "device.h"

namespace lora {

struct Entry {
    int row;
    int slot;
    float scale;
    int order = 0;
};

// The entries of a step, in the order of requests: those of one row follow each other.
struct Plan {
    int rows = 0;
    std::vector<Entry> entries;
    std::vector<int> tile_slot, tile_first, tile_count, row_first, row_entries;
    int first_order_tiles = 0;

    void push(int row, int slot, float scale) {
        const bool again = !entries.empty() && entries.back().row == row;
        entries.push_back({row, slot, scale, again ? entries.back().order + 1 : 0});
    }

    void finish() {
        std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
            return std::tie(a.order, a.slot, a.row) < std::tie(b.order, b.slot, b.row);
        });
        row_first.assign(rows + 1, 0);
        row_entries.assign(entries.size(), -1);
        for (const Entry& entry : entries) ++row_first[entry.row + 1];
        for (int row = 0; row < rows; ++row) row_first[row + 1] += row_first[row];
        for (size_t i = 0; i < entries.size(); ++i) {
            const Entry& entry = entries[i];
            row_entries[row_first[entry.row] + entry.order] = static_cast<int>(i);
            const bool same = i > 0 && entries[i - 1].slot == entry.slot && entries[i - 1].order == entry.order;
            if (same && tile_count.back() < 32) {
                ++tile_count.back();
                continue;
            }
            tile_slot.push_back(entry.slot);
            tile_first.push_back(static_cast<int>(i));
            tile_count.push_back(1);
            if (entry.order == 0) ++first_order_tiles;
        }
    }
};

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// The plan on the device.
struct DevicePlan {
    device::Buffer<int> header, tile_slot, tile_first, tile_count, entry_row, entry_slot, row_first, row_entries;
    device::Buffer<float> entry_scale;

    template <typename Value, typename Get> static std::vector<Value> column(const Plan& plan, Get get) {
        std::vector<Value> values;
        for (const Entry& entry : plan.entries) values.push_back(get(entry));
        return values;
    }
    static std::vector<int> header_of(const Plan& plan, int s_stride) {
        std::vector<int> header(16, 0);
        header[0] = plan.rows;
        header[1] = static_cast<int>(plan.entries.size());
        header[5] = static_cast<int>(plan.tile_slot.size());
        header[6] = plan.first_order_tiles;
        header[8] = s_stride;
        return header;
    }
    DevicePlan(const Plan& plan, int s_stride)
        : header(header_of(plan, s_stride)), tile_slot(plan.tile_slot), tile_first(plan.tile_first),
          tile_count(plan.tile_count), entry_row(column<int>(plan, [](const Entry& e) { return e.row; })),
          entry_slot(column<int>(plan, [](const Entry& e) { return e.slot; })), row_first(plan.row_first),
          row_entries(plan.row_entries), entry_scale(column<float>(plan, [](const Entry& e) { return e.scale; })) {}
};

// Adapters with one rank per (slot, part): 0 where an adapter does not touch a part.
template <typename T> struct Adapters {
    static constexpr int SITE = 1;
    int slots, parts, input;
    int sites() const { return parts + 2; }
    std::vector<int> outputs;
    std::vector<int> ranks;
    std::vector<float> scales;
    // Exactly as many elements as the kernels may read.
    std::vector<std::vector<T>> a, b;
    std::vector<std::unique_ptr<device::Buffer<T>>> a_memory, b_memory;
    std::unique_ptr<device::Buffer<uint64_t>> a_pointers, b_pointers;
    std::unique_ptr<device::Buffer<int>> device_ranks;
    std::unique_ptr<device::Buffer<float>> device_scales;

    // `gathered`: A is [input][rank rounded up to 8], as the embedding's.
    Adapters(check::Random& random, std::vector<int> ranks_, int input, std::vector<int> outputs_, bool gathered = false)
        : slots(static_cast<int>(ranks_.size() / outputs_.size())), parts(static_cast<int>(outputs_.size())),
          input(input), outputs(std::move(outputs_)), ranks(std::move(ranks_)) {
        std::vector<uint64_t> a_places, b_places;
        const int fused = parts;
        // Sites that are not looked at stand before and after the fused ones; to use what is there would fault.
        const auto table = [&](const auto& values, auto other) {
            std::vector<decltype(other)> all;
            for (size_t i = 0; i < values.size(); ++i) {
                if (i % fused == 0) all.push_back(other);
                all.push_back(values[i]);
                if (int(i % fused) == fused - 1) all.push_back(other);
            }
            return all;
        };
        for (size_t i = 0; i < ranks.size(); ++i) {
            const int rank = ranks[i];
            const int padded = round_up(rank, 8);
            const int output = outputs[i % parts];
            scales.push_back(0.25f + 0.125f * static_cast<float>(random.below(16)));
            const double deviation = 1.0 / std::sqrt(static_cast<double>(input));
            a.push_back(check::random_vector<T>(random, size_t(gathered ? padded : rank) * input, gathered ? 1 : deviation));
            b.push_back(check::random_vector<T>(random, size_t(padded) * output, 1.0 / std::sqrt(rank + 1.0)));
            for (size_t j = 0; j < b.back().size(); ++j) {
                if (int(j % padded) >= rank) b.back()[j] = T::from(0);
            }
            for (size_t j = 0; gathered && j < a.back().size(); ++j) {
                if (int(j % padded) >= rank) a.back()[j] = T::from(0);
            }
            a_memory.push_back(std::make_unique<device::Buffer<T>>(a.back()));
            b_memory.push_back(std::make_unique<device::Buffer<T>>(b.back()));
            // Where there is no adapter, nothing must be read.
            a_places.push_back(rank == 0 ? 0 : reinterpret_cast<uint64_t>(a_memory.back()->get()));
            b_places.push_back(rank == 0 ? 0 : reinterpret_cast<uint64_t>(b_memory.back()->get()));
        }
        a_pointers = std::make_unique<device::Buffer<uint64_t>>(table(a_places, uint64_t{16}));
        b_pointers = std::make_unique<device::Buffer<uint64_t>>(table(b_places, uint64_t{16}));
        device_ranks = std::make_unique<device::Buffer<int>>(table(ranks, 40));
        device_scales = std::make_unique<device::Buffer<float>>(table(scales, 1e30f));
    }

    int s_stride(const Plan& plan) const {
        int stride = 128;
        for (const Entry& entry : plan.entries) {
            for (int part = 0; part < parts; ++part) stride = std::max(stride, round_up(ranks[entry.slot * parts + part], 16));
        }
        return stride;
    }
};

} // namespace lora
