// The base product against float64, over shapes, formats, stored and added; and the promise that an element gets the same
// bits from both kernels, on any grid, in any company.
#include "check.h"
#include "device.h"

namespace {

using check::Case;
using check::Grid;
using check::Random;
using device::Buffer;

struct Shape {
    int output, input;
};

constexpr int ROWS = 65;
constexpr const char* KERNELS[] = {"matmul_few_rows_", "matmul_"};
constexpr unsigned THREADS[] = {256, 128};

template <typename T> struct Problem {
    Shape shape;
    int x_stride, out_stride;
    std::vector<T> x, weight;
    std::vector<float> base; // [ROWS][out_stride]
    Buffer<T> x_memory, weight_memory;

    Problem(Random& random, Shape shape)
        : shape(shape), x_stride(shape.input + 8), out_stride(shape.output + 3),
          x(check::random_vector<T>(random, size_t(ROWS) * x_stride, 1)),
          weight(check::random_vector<T>(random, size_t(shape.output) * shape.input, 1 / std::sqrt(shape.input))),
          base(check::random_vector<float>(random, size_t(ROWS) * out_stride, 1)), x_memory(x), weight_memory(weight) {}

    // All of `out` after the product of `rows` rows from `first` on; as many again stand there that it must leave alone.
    std::vector<float> run(int kernel, int first, int rows, bool add, device::Grid grid) const {
        std::vector<float> before(base.begin() + size_t(first) * out_stride, base.end());
        // What is stored over is not read.
        for (int row = 0; row < rows && !add; ++row) {
            for (int column = 0; column < shape.output; ++column) before[size_t(row) * out_stride + column] = NAN;
        }
        const Buffer<float> out(before);
        std::vector<int> header(16, 1000);
        const int count = first % 2 * 4;
        header[count] = rows;
        const Buffer<int> header_memory(header);
        const T* from = x_memory.get() + size_t(first) * x_stride;
        device::launch(std::string(KERNELS[kernel]) + T::name, grid, THREADS[kernel], header_memory, count, from, x_stride,
                       weight_memory, shape.input, shape.output, out, out_stride, int(add));
        return out.read();
    }

    void compare(Case& test, const std::vector<float>& results, bool add) const {
        for (int row = 0; row < ROWS; ++row) {
            for (int column = 0; column < out_stride; ++column) {
                const size_t index = size_t(row) * out_stride + column;
                if (column >= shape.output) {
                    test.expect(results[index] == base[index], "a column beyond the result changed");
                    continue;
                }
                double want = add ? base[index] : 0, size = std::abs(want);
                for (int k = 0; k < shape.input; ++k) {
                    const double part = double(x[size_t(row) * x_stride + k].value()) *
                                        double(weight[size_t(column) * shape.input + k].value());
                    want += part;
                    size += std::abs(part);
                }
                test.near("out", index, results[index], want, 2e-6 * size + 1e-30);
            }
        }
    }

    // Rows from `first` on have the bits that `all` has, and what follows them is as it was.
    void same(Case& test, const std::vector<float>& results, const std::vector<float>& all, int first, int rows) const {
        const size_t start = size_t(first) * out_stride, written = size_t(rows) * out_stride;
        test.expect(std::memcmp(results.data(), all.data() + start, written * 4) == 0,
                    std::to_string(rows) + " rows from " + std::to_string(first) + " on have other bits than in company");
        test.expect(std::memcmp(results.data() + written, base.data() + start + written, (results.size() - written) * 4) == 0,
                    "rows beyond the last changed");
    }
};

template <typename T> void test_matmul(Shape shape) {
    Case test(std::string("matmul_") + T::name + " of " + std::to_string(shape.output) + " x " + std::to_string(shape.input));
    Random random(shape.output * 31 + shape.input);
    const Problem<T> problem(random, shape);
    for (const bool add : {false, true}) {
        const auto all = problem.run(1, 0, ROWS, add, {1, 2, 1});
        problem.compare(test, all, add);
        problem.same(test, problem.run(0, 0, ROWS, add, {3, 2, 1}), all, 0, ROWS);
        const auto part = [&](int kernel, int first, int rows, device::Grid grid) {
            problem.same(test, problem.run(kernel, first, rows, add, grid), all, first, rows);
        };
        part(0, 64, 1, {1, 1, 1}), part(1, 64, 1, {2, 3, 1});
        part(0, 2, 1, {1, 40, 1}), part(0, 1, 8, {1, 2, 1});
        part(0, 3, 9, {1, 1, 1}), part(1, 3, 9, {1, 1, 1});
        part(0, 30, 32, {1, 3, 1}), part(0, 20, 33, {1, 1, 1});
        part(1, 31, 33, {1, 5, 1});
        test.add_hash(all);
    }
}

template <typename T> void test_type(Grid grid) {
    for (const Shape& shape : {Shape{8, 8}, {1, 40}, {83, 72}, {16, 256}, {65, 520}}) test_matmul<T>(shape);
    if (grid != Grid::Deep) return;
    for (const Shape& shape : {Shape{576, 1536}, {131, 1096}, {300, 64}, {128, 2056}}) test_matmul<T>(shape);
}

// More rows than a block takes, of both kernels.
void test_many_rows() {
    Case test("matmul_bf16 of 300 rows");
    Random random(11);
    const int rows = 300, output = 72, input = 104;
    const auto x = check::random_vector<check::Bf16>(random, size_t(rows) * input, 1);
    const auto weight = check::random_vector<check::Bf16>(random, size_t(output) * input, 0.1);
    const Buffer<check::Bf16> x_memory(x), weight_memory(weight);
    std::vector<int> header(16, 0);
    header[0] = rows;
    const Buffer<int> header_memory(header);
    std::vector<std::vector<float>> results;
    for (const int kernel : {0, 1}) {
        const Buffer<float> out(size_t(rows) * output);
        device::launch(std::string(KERNELS[kernel]) + "bf16", {2, 1, 1}, THREADS[kernel], header_memory, 0, x_memory, input,
                       weight_memory, input, output, out, output, 0);
        results.push_back(out.read());
    }
    for (int row = 0; row < rows; ++row) {
        for (int column = 0; column < output; ++column) {
            double want = 0, size = 0;
            for (int k = 0; k < input; ++k) {
                const double part = double(x[row * input + k].value()) * double(weight[column * input + k].value());
                want += part, size += std::abs(part);
            }
            test.near("out", row * output + column, results[1][row * output + column], want, 2e-6 * size + 1e-30);
        }
    }
    test.expect(std::memcmp(results[0].data(), results[1].data(), results[0].size() * 4) == 0, "the kernels differ");
    test.add_hash(results[0]);
}

const check::Family family("matmul", [](Grid grid) {
    test_type<check::Bf16>(grid);
    test_type<check::F16>(grid);
    test_many_rows();
});

} // namespace
