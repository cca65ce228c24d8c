// lora_shrink, lora_expand and lora_embed against float64, over ranks, shapes, formats and plans; and the promise that a
// row gets the same bits alone as in any company.
#include "lora_plan.h"

namespace {

using check::Case;
using check::Grid;
using check::Random;
using lora::Adapters;
using lora::DevicePlan;
using lora::Entry;
using lora::Plan;

// Width of an output's rows beside the output itself: logits may have any, all else multiples of 8.
int stride_of(int width) { return width % 8 == 0 ? width + 8 : width; }

template <typename T> struct Problem {
    Adapters<T> adapters;
    std::vector<T> x;
    int x_stride;
    std::vector<std::vector<float>> base; // per part [rows][stride]
    device::Buffer<T> x_memory;

    Problem(Random& random, std::vector<int> ranks, int input, std::vector<int> outputs, int rows)
        : adapters(random, std::move(ranks), input, std::move(outputs)),
          x(check::random_vector<T>(random, size_t(rows) * (input + 8), 1.0)), x_stride(input + 8), x_memory(x) {
        for (int output : adapters.outputs) {
            base.push_back(check::random_vector<float>(random, size_t(rows) * stride_of(output), 1.0));
        }
    }

    // Outputs after shrink and expand, on grids smaller or larger than the work.
    std::vector<std::vector<float>> run(const Plan& plan, unsigned grid) const {
        const int parts = adapters.parts;
        const int s_stride = adapters.s_stride(plan);
        const DevicePlan device_plan(plan, s_stride);
        const device::Buffer<float> s(plan.entries.size() * parts * s_stride);
        const std::string suffix = std::string("_") + T::name;
        const int sites = adapters.sites(), site = Adapters<T>::SITE;
        device::launch("lora_shrink" + suffix, {grid, grid, 1}, 128, device_plan.header, device_plan.tile_slot,
                       device_plan.tile_first, device_plan.tile_count, device_plan.entry_row, *adapters.a_pointers,
                       *adapters.device_ranks, sites, site, parts, x_memory, x_stride, adapters.input, s);
        std::vector<std::unique_ptr<device::Buffer<float>>> out;
        for (const auto& values : base) out.push_back(std::make_unique<device::Buffer<float>>(values));
        const auto place = [&](int part) { return part < parts ? out[part]->get() : nullptr; };
        const auto stride = [&](int part) { return part < parts ? stride_of(adapters.outputs[part]) : 0; };
        const auto width = [&](int part) { return part < parts ? adapters.outputs[part] : 0; };
        device::launch("lora_expand" + suffix, {grid, grid, 1}, 128, device_plan.header, device_plan.tile_slot,
                       device_plan.tile_first, device_plan.tile_count, device_plan.entry_row, device_plan.entry_slot,
                       device_plan.entry_scale, device_plan.row_first, device_plan.row_entries, *adapters.b_pointers,
                       *adapters.device_ranks, *adapters.device_scales, sites, site, parts, adapters.input, s, place(0),
                       stride(0), width(0), place(1), stride(1), width(1), place(2), stride(2), width(2));
        std::vector<std::vector<float>> results;
        for (const auto& memory : out) results.push_back(memory->read());
        return results;
    }

    struct Shrunk {
        std::vector<double> sums;
        // Of each sum, its terms without their signs: what is lost in adding up is a part of this, however small the sum.
        std::vector<double> sizes;
    };

    // One row's shrink results in float64.
    Shrunk shrink(int row, int slot, int part) const {
        const int rank = adapters.ranks[slot * adapters.parts + part];
        const std::vector<T>& a = adapters.a[slot * adapters.parts + part];
        Shrunk shrunk = {std::vector<double>(rank), std::vector<double>(rank)};
        for (int k = 0; k < rank; ++k) {
            for (int i = 0; i < adapters.input; ++i) {
                const double term =
                    double(a[size_t(k) * adapters.input + i].value()) * double(x[size_t(row) * x_stride + i].value());
                shrunk.sums[k] += term;
                shrunk.sizes[k] += std::abs(term);
            }
        }
        return shrunk;
    }

    void compare(Case& test, const Plan& plan, const std::vector<std::vector<float>>& results) const {
        for (int part = 0; part < adapters.parts; ++part) {
            const int width = adapters.outputs[part];
            const int stride = stride_of(width);
            for (int row = 0; row < plan.rows; ++row) {
                std::vector<double> want(base[part].begin() + row * stride, base[part].begin() + (row + 1) * stride);
                // What an error is measured by: the sum of what was added up.
                std::vector<double> size(stride);
                for (int at = plan.row_first[row]; at < plan.row_first[row + 1]; ++at) {
                    const Entry& entry = plan.entries[plan.row_entries[at]];
                    const int table = entry.slot * adapters.parts + part;
                    const int rank = adapters.ranks[table];
                    if (rank == 0) continue;
                    const Shrunk s = shrink(row, entry.slot, part);
                    const double scale = double(adapters.scales[table]) * double(entry.scale);
                    for (int column = 0; column < width; ++column) {
                        for (int k = 0; k < rank; ++k) {
                            const double b = adapters.b[table][size_t(column) * lora::round_up(rank, 8) + k].value();
                            want[column] += scale * b * s.sums[k];
                            size[column] += std::abs(scale * b) * (std::abs(s.sums[k]) + 0.002 * s.sizes[k]);
                        }
                    }
                }
                for (int column = 0; column < stride; ++column) {
                    const size_t index = size_t(row) * stride + column;
                    const double bound = 1e-5 * size[column] + 3e-7 * std::abs(want[column]);
                    if (size[column] == 0) {
                        test.expect(results[part][index] == base[part][index], "a base element changed");
                    } else {
                        test.near("out", index, results[part][index], want[column], bound);
                    }
                }
            }
        }
    }

    // The rows `wanted` by themselves give the bits that they had in company.
    void compare_alone(Case& test, const Plan& plan, const std::vector<std::vector<float>>& results,
                       const std::vector<int>& wanted) const {
        for (int row : wanted) {
            Plan alone;
            alone.rows = plan.rows;
            for (int at = plan.row_first[row]; at < plan.row_first[row + 1]; ++at) {
                const Entry& entry = plan.entries[plan.row_entries[at]];
                alone.push(row, entry.slot, entry.scale);
            }
            alone.finish();
            const auto again = run(alone, 2);
            for (int part = 0; part < adapters.parts; ++part) {
                const int stride = stride_of(adapters.outputs[part]);
                test.expect(std::memcmp(again[part].data() + row * stride, results[part].data() + row * stride, stride * 4) == 0,
                            "row " + std::to_string(row) + " alone differs from the same row in company");
            }
        }
    }
};

// Segments of these lengths, of slots that follow each other; `base` rows between them have no adapter.
Plan segments(const std::vector<int>& lengths, int slots, int base) {
    Plan plan;
    int slot = 0;
    for (int length : lengths) {
        for (int i = 0; i < length; ++i) plan.push(plan.rows++, slot % slots, 1.0f);
        plan.rows += base;
        ++slot;
    }
    plan.finish();
    return plan;
}

// Every row with 0 to `most` adapters drawn at random, in drawn order, each with a strength of its own.
Plan mixed(Random& random, int rows, int slots, int most) {
    Plan plan;
    plan.rows = rows;
    for (int row = 0; row < rows; ++row) {
        const int count = random.below(most + 1);
        for (int i = 0; i < count; ++i) plan.push(row, random.below(slots), 0.5f + 0.25f * float(random.below(6)));
    }
    plan.finish();
    return plan;
}

template <typename T> void test_plan(const std::string& name, Random& random, std::vector<int> ranks, int input,
                                     std::vector<int> outputs, const Plan& plan, std::vector<int> alone) {
    Case test("lora " + std::string(T::name) + " " + name);
    const Problem<T> problem(random, std::move(ranks), input, std::move(outputs), plan.rows);
    const auto results = problem.run(plan, 40);
    problem.compare(test, plan, results);
    problem.compare_alone(test, plan, results, alone);
    test.expect(problem.run(plan, 1) == results, "the grid's size changes the result");
    for (const auto& result : results) test.add_hash(result);
}

template <typename T> void test_ranks(Grid grid) {
    for (int rank : {1, 2, 3, 5, 8, 12, 16, 24, 64, 128, 512}) {
        Random random(rank);
        test_plan<T>("rank " + std::to_string(rank), random, {rank, rank}, 200, {72}, segments({1, 9, 33}, 2, 1), {0, 2, 14});
        if (grid != Grid::Deep) continue;
        for (int input : {64, 896, 1000, 4096}) {
            test_plan<T>("rank " + std::to_string(rank) + " input " + std::to_string(input), random, {rank, 16, rank}, input,
                         {328}, segments({2, 8, 17, 64}, 3, 1), {0, 3, 13});
        }
    }
}

template <typename T> void test_fused(Grid grid) {
    Random random(7);
    // Ranks that differ by part, and parts that an adapter leaves alone.
    test_plan<T>("three parts", random, {8, 0, 20, 0, 5, 0, 40, 16, 1}, 136, {264, 40, 40}, mixed(random, 24, 3, 1), {0, 5});
    test_plan<T>("three parts alike", random, {16, 12, 9, 40, 48, 33}, 648, {64, 32, 32}, segments({20, 3, 33, 9}, 2, 1), {0, 21, 30});
    test_plan<T>("three parts of high rank", random, {100, 0, 512}, 136, {32, 32, 32}, segments({9, 1}, 1, 1), {0, 10});
    test_plan<T>("two parts", random, {8, 8, 0, 64}, 72, {304, 304}, mixed(random, 19, 2, 1), {3});
    test_plan<T>("no part touched", random, {0, 0}, 64, {40, 40}, segments({3}, 1, 0), {});
    // Logits: any width, so rows that no 16-byte access can take.
    test_plan<T>("odd width", random, {16, 4}, 64, {271}, mixed(random, 12, 2, 2), {1});
    for (int rows : grid == Grid::Deep ? std::vector<int>{1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 64, 200} : std::vector<int>{1, 7, 33, 64}) {
        const std::string suffix = " of " + std::to_string(rows) + " rows";
        test_plan<T>("mixed" + suffix, random, {16, 3, 64, 8}, 136, {96}, mixed(random, rows, 4, 1), {0});
        test_plan<T>("composed" + suffix, random, {16, 3, 64, 8}, 136, {96}, mixed(random, rows, 4, 4), {0, rows / 2});
        Plan distinct;
        std::vector<int> ranks;
        distinct.rows = rows;
        for (int row = 0; row < rows; ++row) {
            distinct.push(rows - 1 - row, row, 1.0f);
            ranks.push_back(1 + random.below(24));
        }
        distinct.finish();
        test_plan<T>("distinct" + suffix, random, ranks, 104, {64}, distinct, {});
    }
    test_plan<T>("ragged prompts", random, {16, 0, 7, 32}, 96, {64}, segments({70, 1, 31, 40, 8, 5}, 4, 2), {69, 75, 110});
    Plan empty;
    empty.rows = 5;
    empty.finish();
    test_plan<T>("empty plan", random, {16}, 96, {64}, empty, {});
}

// Numbers near the ends of T's range survive the way through the shrink result.
template <typename T> void test_range() {
    Case test("lora " + std::string(T::name) + " range");
    Random random(3);
    Plan plan = segments({6}, 1, 0);
    Problem<T> problem(random, {16}, 64, {40}, plan.rows);
    for (int row = 0; row < plan.rows; ++row) {
        // From 2^-20 up to the largest that f16 can hold, so that some results are outside of its range.
        const float factor = std::ldexp(1.0f, -20 + 6 * row);
        for (int i = 0; i < problem.x_stride; ++i) {
            T& value = problem.x[size_t(row) * problem.x_stride + i];
            value = T::from(std::max(-60000.0f, std::min(60000.0f, value.value() * factor * 16)));
        }
        for (int i = 0; i < stride_of(40); ++i) problem.base[0][size_t(row) * stride_of(40) + i] *= factor;
    }
    problem.x_memory.write(problem.x);
    const auto results = problem.run(plan, 3);
    for (int row = 0; row < plan.rows; ++row) {
        const std::vector<double> s = problem.shrink(row, 0, 0).sums;
        double most = 0;
        for (double value : s) most = std::max(most, std::abs(value));
        for (int column = 0; column < 40; ++column) {
            const size_t index = size_t(row) * stride_of(40) + column;
            double want = problem.base[0][index];
            double size = std::abs(want) * 0.01;
            for (int k = 0; k < 16; ++k) {
                const double b = problem.adapters.scales[0] * double(problem.adapters.b[0][column * 16 + k].value());
                want += b * s[k];
                size += std::abs(b) * most;
            }
            test.near("out", index, results[0][index], want, 1e-5 * size);
        }
    }
    test.add_hash(results[0]);
}

template <typename T> void test_embed(int rank, int hidden) {
    Case test("lora embed " + std::string(T::name) + " rank " + std::to_string(rank));
    Random random(rank);
    const int vocabulary = 50;
    const Plan plan = mixed(random, 37, 2, 2);
    const Adapters<T> adapters(random, {rank, 8}, vocabulary, {hidden}, true);
    const std::vector<T> weight = check::random_vector<T>(random, size_t(vocabulary) * hidden, 1);
    std::vector<uint32_t> tokens;
    for (int row = 0; row < plan.rows; ++row) tokens.push_back(random.below(vocabulary));
    const int s_stride = adapters.s_stride(plan);
    const DevicePlan on_device(plan, s_stride);
    const device::Buffer<uint32_t> token_memory(tokens);
    const device::Buffer<T> weight_memory(weight);
    const device::Buffer<float> s(plan.entries.size() * s_stride);
    const device::Buffer<float> out(size_t(plan.rows) * hidden);
    const std::string suffix = std::string("_") + T::name;
    device::launch("embed" + suffix, {8}, 128, on_device.header, token_memory, weight_memory, hidden, out, hidden);
    device::launch("lora_embed" + suffix, {8}, 128, on_device.header, on_device.tile_slot, on_device.tile_first,
                   on_device.tile_count, on_device.entry_row, token_memory, *adapters.a_pointers, *adapters.device_ranks,
                   adapters.sites(), Adapters<T>::SITE, s);
    float* const none = nullptr;
    device::launch("lora_expand" + suffix, {2, 3}, 128, on_device.header, on_device.tile_slot, on_device.tile_first,
                   on_device.tile_count, on_device.entry_row, on_device.entry_slot, on_device.entry_scale,
                   on_device.row_first, on_device.row_entries, *adapters.b_pointers, *adapters.device_ranks,
                   *adapters.device_scales, adapters.sites(), Adapters<T>::SITE, 1, 0, s, out, hidden, hidden, none, 0, 0, none, 0, 0);
    const std::vector<float> results = out.read();
    for (int row = 0; row < plan.rows; ++row) {
        for (int column = 0; column < hidden; ++column) {
            double want = weight[size_t(tokens[row]) * hidden + column].value();
            double size = std::abs(want);
            for (int at = plan.row_first[row]; at < plan.row_first[row + 1]; ++at) {
                const Entry& entry = plan.entries[plan.row_entries[at]];
                const int padded = lora::round_up(adapters.ranks[entry.slot], 8);
                for (int k = 0; k < adapters.ranks[entry.slot]; ++k) {
                    const double term = double(adapters.scales[entry.slot]) * double(entry.scale) *
                                        double(adapters.a[entry.slot][size_t(tokens[row]) * padded + k].value()) *
                                        double(adapters.b[entry.slot][size_t(column) * padded + k].value());
                    want += term;
                    size += std::abs(term);
                }
            }
            test.near("out", size_t(row) * hidden + column, results[size_t(row) * hidden + column], want, 1e-5 * size);
        }
    }
    test.add_hash(results);
}

const check::Family family("lora", [](Grid grid) {
    test_ranks<check::Bf16>(grid);
    test_fused<check::Bf16>(grid);
    // The same code, but for how numbers are read and written.
    if (grid != Grid::Small) test_ranks<check::F16>(grid);
    if (grid != Grid::Small) test_fused<check::F16>(grid);
    test_range<check::Bf16>();
    test_range<check::F16>();
    test_embed<check::Bf16>(16, 72);
    test_embed<check::F16>(5, 264);
});

} // namespace
