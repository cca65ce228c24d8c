// paged_attention and its reduction against float64, over head sizes, groups, windows, block sizes and ways of cutting the
// work; and the promise that a row gets the same bits however the work is cut.
#include <algorithm>

#include "check.h"
#include "device.h"

namespace {

using check::Case;
using check::Grid;
using check::Random;

constexpr int PARTITION = 256;
// The cache has several layers; the one that is read is neither its first nor its last.
constexpr int LAYERS = 3, LAYER = 1;

struct Sequence {
    int position; // of its first row
    int rows;
};

struct Shape {
    int heads, kv_heads, head_dim, block_size, window;
};

// The lists that the engine's lowering makes.
struct Work {
    std::vector<int> sequence, first, rows, partition, partitions, partial;
    std::vector<int> reduce_row, reduce_first, reduce_count;
    int slots = 0;
};

// Rows `rows_of_item` at a time; with `split`, single rows go to one item per `together` partitions.
Work cut(const std::vector<Sequence>& sequences, int rows_of_item, bool split, int together) {
    Work work;
    int row = 0;
    for (size_t s = 0; s < sequences.size(); ++s) {
        for (int first = 0; first < sequences[s].rows; first += rows_of_item) {
            const int rows = std::min(rows_of_item, sequences[s].rows - first);
            const int partitions = (sequences[s].position + first + rows + PARTITION - 1) / PARTITION;
            const bool parts = split && rows == 1;
            const int step = parts ? together : partitions;
            if (parts) {
                work.reduce_row.push_back(row + first);
                work.reduce_first.push_back(work.slots);
                work.reduce_count.push_back(partitions);
            }
            for (int partition = 0; partition < partitions; partition += step) {
                work.sequence.push_back(static_cast<int>(s));
                work.first.push_back(first);
                work.rows.push_back(rows);
                work.partition.push_back(partition);
                work.partitions.push_back(std::min(step, partitions - partition));
                work.partial.push_back(parts ? work.slots + partition : -1);
            }
            if (parts) work.slots += partitions;
        }
        row += sequences[s].rows;
    }
    return work;
}

template <typename T> struct Problem {
    Shape shape;
    std::vector<Sequence> sequences;
    std::vector<int> sequence_row, sequence_position, sequence_table;
    std::vector<uint32_t> tables;
    int rows = 0;
    int blocks = 0;
    std::vector<T> cache;
    std::vector<float> q;
    int q_stride, out_stride;
    float scale;

    Problem(Random& random, const Shape& shape, std::vector<Sequence> given) : shape(shape), sequences(std::move(given)) {
        q_stride = shape.heads * shape.head_dim + 8;
        out_stride = shape.heads * shape.head_dim + 16;
        scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
        for (const Sequence& sequence : sequences) {
            sequence_row.push_back(rows);
            sequence_position.push_back(sequence.position);
            sequence_table.push_back(static_cast<int>(tables.size()));
            rows += sequence.rows;
            const int count = (sequence.position + sequence.rows + shape.block_size - 1) / shape.block_size;
            for (int i = 0; i < count; ++i) tables.push_back(blocks++);
        }
        blocks += 3;
        for (size_t i = tables.size(); i > 1; --i) std::swap(tables[i - 1], tables[random.below(static_cast<int>(i))]);
        for (uint32_t& block : tables) block = (blocks - 1 - block) * 2 * LAYERS * shape.block_size;
        cache.resize(size_t(blocks) * 2 * LAYERS * shape.block_size * width());
        // What is not a key of a sequence is NaN: to touch it shows.
        std::memset(cache.data(), 0xff, cache.size() * 2);
        for (size_t s = 0; s < sequences.size(); ++s) {
            for (int key = 0; key < sequences[s].position + sequences[s].rows; ++key) {
                for (size_t i = 0; i < width(); ++i) {
                    cache[keys() + place(s, key) * width() + i] = T::from(random.normal());
                    cache[values() + place(s, key) * width() + i] = T::from(random.normal());
                }
            }
        }
        q = check::random_vector<float>(random, size_t(rows) * q_stride, 1.5);
    }

    size_t width() const { return size_t(shape.kv_heads) * shape.head_dim; }
    // Where the layer's keys and values start in the cache.
    size_t keys() const { return size_t(2 * LAYER) * shape.block_size * width(); }
    size_t values() const { return keys() + shape.block_size * width(); }
    size_t place(size_t s, int key) const {
        return size_t(tables[sequence_table[s] + key / shape.block_size]) + key % shape.block_size;
    }

    std::vector<T> run(const Work& work, unsigned grid) const {
        std::vector<int> header(16, 0);
        header[0] = rows;
        header[7] = static_cast<int>(work.sequence.size());
        header[9] = static_cast<int>(work.reduce_row.size());
        using device::Buffer;
        const Buffer<int> header_memory(header), sequence(work.sequence), first(work.first), item_rows(work.rows),
            partition(work.partition), partitions(work.partitions), partial(work.partial), row(sequence_row),
            position(sequence_position), table(sequence_table), reduce_row(work.reduce_row),
            reduce_first(work.reduce_first), reduce_count(work.reduce_count);
        const Buffer<uint32_t> table_memory(tables);
        const Buffer<float> q_memory(q), partials(size_t(work.slots) * shape.heads * (shape.head_dim + 4));
        const Buffer<T> cache_memory(cache);
        const T* const key_memory = cache_memory.get() + keys();
        const T* const value_memory = cache_memory.get() + values();
        // Left as it is where no row writes.
        const Buffer<T> out(std::vector<T>(size_t(rows) * out_stride, T::from(7)));
        const std::string bucket = shape.head_dim <= 64 ? "64" : shape.head_dim <= 128 ? "128" : "256";
        device::launch("paged_attention_" + bucket + "_" + T::name, {grid, grid, 1}, 128, header_memory, sequence, first,
                       item_rows, partition, partitions, partial, row, position, table, table_memory, q_memory, q_stride,
                       key_memory, value_memory, out, out_stride, partials, shape.heads, shape.kv_heads, shape.head_dim,
                       shape.block_size, scale, shape.window);
        device::launch(std::string("paged_attention_reduce_") + T::name, {grid, grid, 1}, 128, header_memory, reduce_row,
                       reduce_first, reduce_count, partials, out, out_stride, shape.heads, shape.head_dim);
        return out.read();
    }

    void compare(Case& test, const std::vector<T>& results) const {
        const int group = shape.heads / shape.kv_heads;
        for (size_t s = 0; s < sequences.size(); ++s) {
            for (int i = 0; i < sequences[s].rows; ++i) {
                const int row = sequence_row[s] + i;
                const int position = sequences[s].position + i;
                const int begin = shape.window == 0 ? 0 : std::max(0, position - shape.window + 1);
                for (int head = 0; head < shape.heads; ++head) {
                    const size_t column = size_t(head / group) * shape.head_dim;
                    std::vector<double> weights;
                    double largest = -1e300;
                    for (int key = begin; key <= position; ++key) {
                        double score = 0;
                        for (int d = 0; d < shape.head_dim; ++d) {
                            // The kernel takes q as T.
                            const float query = T::from(q[size_t(row) * q_stride + head * shape.head_dim + d]).value();
                            score += double(query) * double(cache[keys() + place(s, key) * width() + column + d].value());
                        }
                        weights.push_back(score * double(scale));
                        largest = std::max(largest, weights.back());
                    }
                    double sum = 0;
                    for (double& weight : weights) sum += weight = std::exp(weight - largest);
                    for (int d = 0; d < shape.head_dim; ++d) {
                        double want = 0, size = 0;
                        for (int key = begin; key <= position; ++key) {
                            const T value = cache[values() + place(s, key) * width() + column + d];
                            const double term = weights[key - begin] / sum * double(value.value());
                            want += term;
                            size += std::abs(term);
                        }
                        // Weights are rounded to T once, and so is the result.
                        const double bound = T::rounding * (size + std::abs(want)) + 1e-4 * size;
                        const size_t index = size_t(row) * out_stride + head * shape.head_dim + d;
                        test.near("out", index, results[index].value(), want, bound);
                    }
                }
                for (int i = shape.heads * shape.head_dim; i < out_stride; ++i) {
                    test.expect(results[size_t(row) * out_stride + i].value() == 7, "wrote beside a row");
                }
            }
        }
    }
};

template <typename T> bool same(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <typename T> void test_shape(const Shape& shape, const std::vector<Sequence>& sequences) {
    Case test("attention " + std::string(T::name) + " heads " + std::to_string(shape.heads) + "/" +
              std::to_string(shape.kv_heads) + " x " + std::to_string(shape.head_dim) + ", blocks of " +
              std::to_string(shape.block_size) + ", window " + std::to_string(shape.window) + ", " +
              std::to_string(sequences.size()) + " sequences");
    Random random(shape.head_dim + shape.heads);
    const Problem<T> problem(random, shape, sequences);
    const auto results = problem.run(cut(sequences, 8, true, 1), 64);
    problem.compare(test, results);
    test.add_hash(results);
    test.expect(same(problem.run(cut(sequences, 8, false, 1), 2), results), "split and whole contexts differ");
    test.expect(same(problem.run(cut(sequences, 1, true, 2), 1), results), "rows alone and in chunks differ");
    test.expect(same(problem.run(cut(sequences, 1000, false, 1), 3), results), "small and large chunks differ");
}

template <typename T> void test_all(Grid grid) {
    // A decode row with a short and a long context, a whole prompt, a chunk in the middle of one.
    const std::vector<Sequence> mixed = {{9, 1}, {600, 1}, {0, 21}, {250, 13}};
    test_shape<T>({4, 2, 64, 16, 0}, mixed);
    // The other format is the same code, but for how numbers are read and written.
    if (grid == Grid::Small && !std::is_same_v<T, check::Bf16>) return;
    test_shape<T>({14, 2, 64, 16, 0}, {{300, 1}, {0, 9}});
    test_shape<T>({3, 3, 128, 16, 0}, {{513, 1}, {60, 10}});
    test_shape<T>({4, 1, 96, 8, 0}, {{270, 2}, {0, 5}});
    test_shape<T>({2, 1, 256, 32, 0}, {{255, 3}, {0, 5}, {256, 1}});
    test_shape<T>({4, 2, 32, 5, 0}, {{255, 1}, {254, 4}, {0, 1}});
    test_shape<T>({2, 2, 8, 16, 0}, {{40, 2}});
    test_shape<T>({2, 1, 200, 16, 0}, {{70, 2}});
    // More query heads to a KV head than a block takes at once.
    test_shape<T>({40, 1, 64, 16, 0}, {{300, 1}, {3, 3}});
    // Windows: shorter than a tile, across partitions, longer than the context.
    test_shape<T>({4, 2, 64, 16, 1}, {{300, 1}, {0, 5}});
    test_shape<T>({4, 2, 64, 16, 50}, {{600, 1}, {0, 70}, {250, 20}});
    test_shape<T>({2, 1, 128, 16, 300}, {{700, 1}, {500, 6}, {20, 3}});
    if (grid != Grid::Deep) return;
    for (int head_dim : {32, 64, 80, 96, 128, 256}) {
        for (int group : {1, 3, 7, 8}) {
            for (int window : {0, 130}) {
                test_shape<T>({2 * group, 2, head_dim, 16, window}, {{1100, 1}, {0, 100}, {400, 37}, {511, 1}, {0, 1}});
            }
        }
    }
}

const check::Family family("attention", [](Grid grid) {
    test_all<check::Bf16>(grid);
    test_all<check::F16>(grid);
});

} // namespace
