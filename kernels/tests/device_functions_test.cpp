// The device's own functions (formats, tiles, warps, math, atomics) against references.
#include <algorithm>
#include <limits>

#include "check.h"
#include "device.h"

namespace {

using check::Bf16;
using check::Case;
using check::F16;
using check::Random;
using device::Buffer;

template <typename T> std::string with_type(const char* kernel) { return std::string(kernel) + "_" + T::name; }

template <typename T> uint16_t bits_of(T value) {
    uint16_t bits;
    std::memcpy(&bits, &value, 2);
    return bits;
}

template <typename T> bool same(T got, T want) {
    // Which NaN is a matter of taste.
    return std::isnan(want.value()) ? std::isnan(got.value()) : bits_of(got) == bits_of(want);
}

template <typename T> void test_formats() {
    Case test(with_type<T>("device_formats"));
    std::vector<T> patterns(1 << 16);
    for (size_t i = 0; i < patterns.size(); ++i) {
        const auto bits = static_cast<uint16_t>(i);
        std::memcpy(&patterns[i], &bits, 2);
    }
    Random random(3);
    std::vector<float> values;
    for (int exponent = -30; exponent < 30; ++exponent) {
        for (int i = 0; i < 50; ++i) values.push_back(std::ldexp(random.normal(), exponent));
    }
    // Halfway between neighbours, to even; beyond the range; what is too small.
    for (float value : {1.00390625f, 1.01171875f, 1.00048828125f, 1.00146484375f, 65504.f, 65519.f, 65520.f, 3e38f, 3.4e38f,
                        1e-8f, 5.9e-8f, 2.9e-8f, 0.f, -0.f}) {
        values.push_back(value), values.push_back(-value);
    }
    const auto numbers = static_cast<int>(values.size());
    const Buffer<T> patterns_memory(patterns), narrow(values.size());
    const Buffer<float> wide(patterns.size()), values_memory(values);
    const Buffer<uint32_t> pairs(values.size());
    device::launch(with_type<T>("device_formats"), {8}, 128, patterns_memory, wide, 1 << 16, values_memory, narrow, pairs,
                   numbers);
    const auto got_wide = wide.read();
    for (size_t i = 0; i < patterns.size(); ++i) {
        const float want = patterns[i].value();
        test.expect(std::isnan(want) ? std::isnan(got_wide[i]) : got_wide[i] == want, "pattern " + std::to_string(i) + " widened");
    }
    const auto got = narrow.read();
    const auto got_pairs = pairs.read();
    for (int i = 0; i < numbers; ++i) {
        const T low = T::from(values[i]), high = T::from(values[numbers - 1 - i]);
        test.expect(same(got[i], low), std::to_string(values[i]) + " narrowed");
        test.expect(got_pairs[i] == (uint32_t(bits_of(high)) << 16 | bits_of(low)), std::to_string(values[i]) + " in a pair");
    }
    test.add_hash(got);
}

template <typename T> void test_tiles() {
    Case test(with_type<T>("device_tiles"));
    Random random(5);
    const auto a = check::random_vector<T>(random, 256, 1), b = check::random_vector<T>(random, 128, 1);
    std::vector<T> a_transposed(256), b_transposed(128);
    for (int k = 0; k < 16; ++k) {
        for (int m = 0; m < 16; ++m) a_transposed[k * 16 + m] = a[m * 16 + k];
        for (int n = 0; n < 8; ++n) b_transposed[k * 8 + n] = b[n * 16 + k];
    }
    const Buffer<T> a_memory(a), b_memory(b), at_memory(a_transposed), bt_memory(b_transposed);
    const Buffer<float> d(288);
    device::launch(with_type<T>("device_tiles"), {1}, 32, a_memory, b_memory, at_memory, bt_memory, d);
    const auto got = d.read();
    for (int m = 0; m < 16; ++m) {
        for (int n = 0; n < 8; ++n) {
            double want = 0, size = 0;
            for (int k = 0; k < 16; ++k) {
                const double product = double(a[m * 16 + k].value()) * double(b[n * 16 + k].value());
                want += product, size += std::abs(product);
            }
            test.near("a b", m * 8 + n, got[m * 8 + n], want, 1e-6 * size + 1e-7);
            test.near("twice a b", m * 8 + n, got[128 + m * 8 + n], 2 * want, 2e-6 * size + 1e-7);
        }
    }
    for (int i = 0; i < 32; ++i) test.expect(got[256 + i] == 0, "what is not valid is zero");
}

void test_warp() {
    Case test("device_warp");
    Random random(9);
    const auto in = check::random_vector<float>(random, 32, 3);
    const Buffer<float> in_memory(in), out(224);
    const Buffer<uint32_t> votes(64);
    device::launch("device_warp", {1}, 32, in_memory, out, votes);
    const auto got = out.read();
    const auto voted = votes.read();
    double sum = 0;
    uint32_t positive = 0;
    for (int lane = 0; lane < 32; ++lane) sum += in[lane], positive |= uint32_t(in[lane] > 0) << lane;
    for (int lane = 0; lane < 32; ++lane) {
        double eight = 0;
        for (int i = 0; i < 8; ++i) eight += in[lane / 8 * 8 + i];
        test.near("sum", lane, got[lane], sum, 2e-5);
        test.near("sum of 8", lane, got[32 + lane], eight, 1e-5);
        test.expect(got[lane] == got[0] && got[32 + lane] == got[32 + lane / 8 * 8], "sums are the same bits in all lanes");
        test.expect(got[64 + lane] == *std::max_element(in.begin(), in.end()), "largest");
        test.expect(got[96 + lane] == in[(lane * 5 + 3) % 32], "shuffle");
        test.expect(got[128 + lane] == in[lane ^ 9], "shuffle by xor");
        test.expect(got[160 + lane] == in[lane < 3 ? lane : lane - 3], "shuffle up");
        test.expect(got[192 + lane] == in[lane + 7 < 32 ? lane + 7 : lane], "shuffle down");
        test.expect(voted[lane] == positive, "ballot");
        test.expect(voted[32 + lane] == static_cast<uint32_t>(__builtin_popcount(positive)), "population count");
    }
    test.add_hash(got);
}

void test_math() {
    Case test("device_math");
    Random random(11);
    auto in = check::random_vector<float>(random, 1000, 4);
    for (float value : {0.f, 1.f, -1.f, 20.f, -20.f, 60.f, -60.f, 1e-6f}) in.push_back(value);
    const Buffer<float> in_memory(in), out(in.size() * 11);
    device::launch("device_math", {4}, 128, in_memory, out, static_cast<int>(in.size()));
    const auto got = out.read();
    for (size_t i = 0; i < in.size(); ++i) {
        const double x = in[i], size = double(std::abs(in[i]) + 0.001f);
        const float* at = got.data() + i * 11;
        const auto near = [&](const char* what, int index, double want, double relative, double absolute) {
            test.near(what, i, at[index], want, relative * std::abs(want) + absolute);
        };
        near("expf", 0, std::exp(x), 3e-7, 1e-30);
        near("exp2f", 1, std::exp2(x), 3e-7, 1e-30);
        near("logf", 2, std::log(size), 3e-7, 1e-7);
        near("log2f", 3, std::log2(size), 3e-7, 1e-7);
        near("tanhf", 4, std::tanh(x), 4e-7, 1e-9);
        near("rsqrtf", 5, 1 / std::sqrt(size), 3e-7, 0);
        near("sqrtf", 6, std::sqrt(size), 2e-7, 0);
        // Two units and one more for each of x, as the manufacturer promises.
        near("__expf", 7, std::exp(x), 1.2e-7 * (4 + 1.2 * std::abs(x)), 1e-30);
        near("__logf", 8, std::log(size), 5e-7, 5e-7);
        near("__fdividef", 9, x / size, 4e-7, 1e-30);
        near("fmaf", 10, x * size - x, 1.2e-7, 1e-30);
    }
}

void test_atomics() {
    Case test("device_atomics");
    const Buffer<uint32_t> counters(std::vector<uint32_t>{0, 0, 1u << 30, 0, 0, 0, 0, 0});
    device::launch("device_atomics", {20}, 128, counters);
    const auto got = counters.read();
    const uint32_t threads = 20 * 128;
    test.expect(got[0] == threads * (threads - 1) / 2, "sum");
    test.expect(got[1] == threads - 1 && got[2] == 0, "largest and smallest");
    for (uint32_t i = 0; i < 5; ++i) test.expect(got[3 + i] == (threads - i + 4) / 5, "counts");
}

void run(check::Grid) {
    test_formats<Bf16>();
    test_formats<F16>();
    test_tiles<Bf16>();
    test_tiles<F16>();
    test_warp();
    test_math();
    test_atomics();
}

const check::Family family("device", run);

} // namespace
