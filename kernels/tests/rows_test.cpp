// The kernels that work row by row (norms, rotary embedding and KV write, activation, gathers, biases, greedy pick)
// against float64.
#include <algorithm>
#include <limits>

#include "check.h"
#include "device.h"

namespace {

using check::Case;
using check::Random;
using device::Buffer;

std::vector<int> header_of(int rows, int sample_rows) {
    std::vector<int> header(16, 0);
    header[0] = rows;
    header[4] = sample_rows;
    return header;
}

struct F32 {
    static constexpr const char* name = "f32";
    static constexpr double rounding = 3e-7;
    float number;
    static F32 from(float value) { return {value}; }
    float value() const { return number; }
};

template <typename T> std::string with_type(const char* kernel) { return std::string(kernel) + "_" + T::name; }

template <typename T> void test_norm(int width, bool add, bool picked) {
    Case test(with_type<T>("rms_norm") + " of " + std::to_string(width) + (add ? " with residual" : "") + (picked ? " picked" : ""));
    Random random(width);
    const int rows = 5, stride = width + 8;
    const std::vector<uint32_t> index = {4, 0, 3};
    const int wanted = picked ? 3 : rows;
    const auto input = check::random_vector<float>(random, rows * stride, 2);
    const auto added = check::random_vector<float>(random, rows * stride, 1);
    const auto weight = check::random_vector<float>(random, width, 1);
    const Buffer<int> header(header_of(rows, 3));
    const Buffer<uint32_t> index_memory(index);
    const Buffer<float> input_memory(input), added_memory(added), weight_memory(weight);
    const Buffer<T> out(size_t(wanted) * stride);
    device::launch(with_type<T>("rms_norm"), {2}, 256, header, picked ? 4 : 0,
                   static_cast<const uint32_t*>(picked ? index_memory.get() : nullptr), input_memory, stride,
                   static_cast<const float*>(add ? added_memory.get() : nullptr), weight_memory, 1e-5f, width, out, stride);
    const auto results = out.read();
    const auto after = input_memory.read();
    for (int row = 0; row < wanted; ++row) {
        const size_t from = size_t(picked ? index[row] : row) * stride;
        std::vector<float> values(input.begin() + from, input.begin() + from + width);
        double sum = 0;
        for (int i = 0; i < width; ++i) {
            if (add) values[i] += added[from + i];
            test.expect(after[from + i] == values[i], "the residual stream is not what it should be");
            sum += double(values[i]) * double(values[i]);
        }
        const double factor = 1 / std::sqrt(sum / width + 1e-5);
        for (int i = 0; i < width; ++i) {
            const double want = values[i] * factor * double(weight[i]);
            test.near("out", row * stride + i, results[size_t(row) * stride + i].value(), want,
                      T::rounding * std::abs(want) + 1e-6 * std::abs(want) + 1e-7);
        }
    }
    for (int row = 0; row < wanted; ++row) {
        test.add_hash(std::vector<T>(results.begin() + row * stride, results.begin() + row * stride + width));
    }
}

void test_norm_groups(int groups, int width) {
    Case test("rms_norm_groups_f32 of " + std::to_string(groups) + " x " + std::to_string(width));
    Random random(width);
    const int rows = 3, stride = groups * width + 8;
    const auto input = check::random_vector<float>(random, rows * stride, 2);
    const auto weight = check::random_vector<float>(random, width, 1);
    const Buffer<int> header(header_of(rows, 0));
    const Buffer<float> values(input), weight_memory(weight);
    device::launch("rms_norm_groups_f32", {2}, 128, header, values, stride, weight_memory, 1e-6f, groups, width);
    const auto results = values.read();
    for (int row = 0; row < rows; ++row) {
        for (int group = 0; group < groups; ++group) {
            const size_t first = size_t(row) * stride + group * width;
            double sum = 0;
            for (int i = 0; i < width; ++i) sum += double(input[first + i]) * double(input[first + i]);
            const double factor = 1 / std::sqrt(sum / width + 1e-6);
            for (int i = 0; i < width; ++i) {
                const double want = input[first + i] * factor * double(weight[i]);
                test.near("out", first + i, results[first + i], want, 1e-6 * std::abs(want) + 1e-7);
            }
        }
    }
    test.add_hash(results);
}

struct RopeShape {
    int heads, kv_heads, head_dim;
    bool bias, norm;
};

template <typename T> void test_rope(const RopeShape& shape) {
    Case test(with_type<T>("rope_kv_write") + " " + std::to_string(shape.heads) + "/" + std::to_string(shape.kv_heads) + " x " +
              std::to_string(shape.head_dim) + (shape.bias ? " bias" : "") + (shape.norm ? " norm" : ""));
    Random random(shape.head_dim);
    const int rows = 5, positions = 40, slots = 23, dim = shape.head_dim, half = dim / 2;
    const int q_width = shape.heads * dim, kv_width = shape.kv_heads * dim;
    const int q_stride = q_width + 8, kv_stride = kv_width + 16;
    const auto cos = check::random_vector<float>(random, positions * half, 0.5);
    const auto sin = check::random_vector<float>(random, positions * half, 0.5);
    const auto q = check::random_vector<float>(random, rows * q_stride, 1);
    const auto k = check::random_vector<float>(random, rows * kv_stride, 1);
    const auto v = check::random_vector<float>(random, rows * kv_stride, 1);
    const auto q_bias = check::random_vector<float>(random, q_width, 1);
    const auto k_bias = check::random_vector<float>(random, kv_width, 1);
    const auto v_bias = check::random_vector<float>(random, kv_width, 1);
    const auto q_norm = check::random_vector<float>(random, dim, 1);
    const auto k_norm = check::random_vector<float>(random, dim, 1);
    const std::vector<uint32_t> position = {0, 39, 7, 8, 20}, slot = {22, 0, 5, 11, 4};
    const Buffer<int> header(header_of(rows, 0));
    const Buffer<uint32_t> position_memory(position), slot_memory(slot);
    const Buffer<float> cos_memory(cos), sin_memory(sin), q_memory(q), k_memory(k), v_memory(v), q_bias_memory(q_bias),
        k_bias_memory(k_bias), v_bias_memory(v_bias), q_norm_memory(q_norm), k_norm_memory(k_norm);
    const Buffer<T> k_cache(std::vector<T>(size_t(slots) * kv_width, T::from(7)));
    const Buffer<T> v_cache(std::vector<T>(size_t(slots) * kv_width, T::from(7)));
    const auto bias = [&](const Buffer<float>& memory) { return static_cast<const float*>(shape.bias ? memory.get() : nullptr); };
    const auto norm = [&](const Buffer<float>& memory) { return static_cast<const float*>(shape.norm ? memory.get() : nullptr); };
    device::launch(with_type<T>("rope_kv_write"), {2, 2}, 128, header, position_memory, slot_memory, cos_memory, sin_memory,
                   q_memory, q_stride, k_memory, kv_stride, v_memory, kv_stride, bias(q_bias_memory), bias(k_bias_memory),
                   bias(v_bias_memory), norm(q_norm_memory), norm(k_norm_memory), 1e-6f, shape.heads, shape.kv_heads, dim,
                   k_cache, v_cache);
    const auto q_out = q_memory.read();
    const auto k_out = k_cache.read(), v_out = v_cache.read();
    // A head in float64.
    const auto head = [&](const float* from, const float* with_bias, const float* with_norm, int row, bool rotate) {
        std::vector<double> x(from, from + dim);
        double sum = 0;
        for (int i = 0; i < dim; ++i) {
            if (with_bias != nullptr) x[i] += double(with_bias[i]);
            sum += x[i] * x[i];
        }
        if (with_norm != nullptr) {
            for (int i = 0; i < dim; ++i) x[i] *= double(with_norm[i]) / std::sqrt(sum / dim + 1e-6);
        }
        std::vector<double> y = x;
        for (int i = 0; rotate && i < half; ++i) {
            const double c = cos[position[row] * half + i], s = sin[position[row] * half + i];
            y[i] = x[i] * c - x[i + half] * s;
            y[i + half] = x[i + half] * c + x[i] * s;
        }
        return y;
    };
    for (int row = 0; row < rows; ++row) {
        for (int h = 0; h < shape.heads; ++h) {
            const size_t at = size_t(row) * q_stride + h * dim;
            const auto want = head(q.data() + at, shape.bias ? q_bias.data() + h * dim : nullptr,
                                   shape.norm ? q_norm.data() : nullptr, row, true);
            for (int i = 0; i < dim; ++i) test.near("q", at + i, q_out[at + i], want[i], 3e-6);
        }
        for (int h = 0; h < shape.kv_heads; ++h) {
            const size_t from = size_t(row) * kv_stride + h * dim, to = (size_t(slot[row]) * shape.kv_heads + h) * dim;
            const auto want_k = head(k.data() + from, shape.bias ? k_bias.data() + h * dim : nullptr,
                                     shape.norm ? k_norm.data() : nullptr, row, true);
            const auto want_v = head(v.data() + from, shape.bias ? v_bias.data() + h * dim : nullptr, nullptr, row, false);
            for (int i = 0; i < dim; ++i) {
                test.near("k", to + i, k_out[to + i].value(), want_k[i], T::rounding * std::abs(want_k[i]) + 3e-6);
                test.near("v", to + i, v_out[to + i].value(), want_v[i], T::rounding * std::abs(want_v[i]) + 3e-6);
            }
        }
    }
    int untouched = 0;
    for (const T& value : k_out) untouched += value.value() == 7;
    test.expect(untouched >= (slots - rows) * kv_width, "wrote to a slot that is no row's");
    test.add_hash(q_out);
    test.add_hash(k_out);
    test.add_hash(v_out);
}

template <typename T> void test_activation(int width) {
    Case test(with_type<T>("gated_activation") + " of " + std::to_string(width));
    Random random(width);
    const int rows = 3, gate_stride = width + 8, up_stride = width + 16, stride = width + 24;
    const auto gate = check::random_vector<float>(random, rows * gate_stride, 4);
    const auto up = check::random_vector<float>(random, rows * up_stride, 1);
    const Buffer<int> header(header_of(rows, 0));
    const Buffer<float> gate_memory(gate), up_memory(up);
    const Buffer<T> out(std::vector<T>(rows * stride, T::from(7))), narrow(std::vector<T>(rows * stride, T::from(7)));
    device::launch(with_type<T>("gated_activation"), {1, 2}, 128, header, gate_memory, gate_stride, up_memory, up_stride, width,
                   out, stride);
    device::launch(with_type<T>("convert"), {2, 1}, 128, header, 0, gate_memory, gate_stride, width, narrow, stride);
    const auto results = out.read(), narrowed = narrow.read();
    for (int row = 0; row < rows; ++row) {
        for (int i = 0; i < stride; ++i) {
            const size_t at = size_t(row) * stride + i;
            if (i >= width) {
                test.expect(results[at].value() == 7 && narrowed[at].value() == 7, "wrote beside a row");
                continue;
            }
            const double g = gate[row * gate_stride + i];
            const double want = g / (1 + std::exp(-g)) * double(up[row * up_stride + i]);
            test.near("out", at, results[at].value(), want, T::rounding * std::abs(want) + 1e-6);
            test.expect(narrowed[at].value() == T::from(gate[row * gate_stride + i]).value(), "convert does not round to nearest");
        }
    }
    test.add_hash(results);
}

void test_gather_and_bias() {
    Case test("gather_rows_f32 and bias_add_f32");
    Random random(1);
    const int rows = 6, width = 72, stride = 80;
    const auto input = check::random_vector<float>(random, rows * stride, 1);
    const std::vector<uint32_t> index = {5, 0, 2, 2};
    const Buffer<int> header(header_of(rows, 4));
    const Buffer<float> input_memory(input), gathered(4 * width);
    device::launch("gather_rows_f32", {3}, 128, header, Buffer<uint32_t>(index), input_memory, stride, width, gathered, width);
    const auto picked = gathered.read();
    for (int row = 0; row < 4; ++row) {
        for (int i = 0; i < width; ++i) test.expect(picked[row * width + i] == input[index[row] * stride + i], "a gathered row differs");
    }
    const auto bias_0 = check::random_vector<float>(random, width, 1), bias_2 = check::random_vector<float>(random, 13, 1);
    const Buffer<float> bias_0_memory(bias_0), bias_2_memory(bias_2);
    const Buffer<float> first(input), second(input), third(std::vector<float>(rows * 13, 0.5f));
    const float* const none = nullptr;
    device::launch("bias_add_f32", {1, 2, 3}, 128, header, 0, 3, first, stride, width, bias_0_memory, second, stride, width, none,
                   third, 13, 13, bias_2_memory);
    const auto sums = first.read(), untouched = second.read(), narrow = third.read();
    test.expect(untouched == input, "a null bias was added");
    for (int row = 0; row < rows; ++row) {
        for (int i = 0; i < stride; ++i) {
            const float want = input[row * stride + i] + (i < width ? bias_0[i] : 0.0f);
            test.expect(sums[row * stride + i] == want, "a sum differs");
        }
        for (int i = 0; i < 13; ++i) test.expect(narrow[row * 13 + i] == 0.5f + bias_2[i], "a narrow sum differs");
    }
    test.add_hash(sums);
}

void test_argmax(int vocabulary) {
    Case test("argmax_f32 of " + std::to_string(vocabulary));
    Random random(vocabulary);
    const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
    const int rows = 8, last = vocabulary - 1;
    std::vector<float> logits = check::random_vector<float>(random, size_t(rows) * vocabulary, 1);
    std::vector<uint32_t> want(rows);
    const auto row = [&](int r) { return logits.data() + size_t(r) * vocabulary; };
    want[0] = random.below(vocabulary), row(0)[want[0]] = 50;
    // Ties, far apart; then the two zeros.
    want[1] = vocabulary / 3, row(1)[want[1]] = 50, row(1)[last] = 50;
    std::fill(row(2), row(2) + vocabulary, 0.0f), row(2)[0] = -0.0f, want[2] = 0;
    std::fill(row(3), row(3) + vocabulary, nan), want[3] = 0;
    std::fill(row(4), row(4) + vocabulary, nan), row(4)[last] = -infinity, want[4] = last;
    std::fill(row(5), row(5) + vocabulary, -infinity), want[5] = 0;
    row(6)[0] = nan, row(6)[last] = infinity, want[6] = last;
    std::fill(row(7), row(7) + vocabulary, -3.0f), row(7)[last / 2] = -2.0f, want[7] = last / 2;
    const Buffer<int> header(header_of(1, rows));
    const Buffer<float> logits_memory(logits);
    const Buffer<uint32_t> out(rows);
    device::launch("argmax_f32", {3}, 1024, header, 4, logits_memory, vocabulary, vocabulary, out);
    const auto results = out.read();
    for (int r = 0; r < rows; ++r) {
        test.expect(results[r] == want[r], "row " + std::to_string(r) + " picks " + std::to_string(results[r]) + ", not " +
                                               std::to_string(want[r]));
    }
    test.add_hash(results);
}

template <typename T> void test_type() {
    for (int width : {8, 72, 896, 2056}) test_norm<T>(width, false, false);
    test_norm<T>(1032, true, false);
    test_norm<T>(264, false, true);
    for (int width : {8, 1048, 2048}) test_activation<T>(width);
    test_rope<T>({4, 2, 64, false, false});
    test_rope<T>({3, 1, 128, true, false});
    test_rope<T>({2, 2, 80, false, true});
    test_rope<T>({2, 1, 256, true, true});
    test_rope<T>({1, 1, 8, false, false});
}

const check::Family family("rows", [](check::Grid) {
    test_type<check::Bf16>();
    test_type<check::F16>();
    test_norm<F32>(72, false, false);
    test_norm<F32>(1032, true, false);
    test_norm_groups(3, 64);
    test_norm_groups(2, 200);
    test_gather_and_bias();
    for (int vocabulary : {2, 63, 1000, 4099, 32000}) test_argmax(vocabulary);
});

} // namespace
