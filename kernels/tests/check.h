// What the kernel tests share: random numbers, the two storage formats, comparison with float64 references, and hashes
// of outputs (which must not depend on the order in which the emulated device runs threads).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace check {

// Numbers that are the same on every machine.
class Random {
  public:
    explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15u + 1) {}
    uint64_t bits() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return state * 0x2545f4914f6cdd1du;
    }
    // 0..end
    int below(int end) { return static_cast<int>((bits() >> 33) % static_cast<uint64_t>(end)); }
    // Roughly normal, of deviation 1: the sum of four uniforms.
    float normal() {
        double sum = 0;
        for (int i = 0; i < 4; ++i) sum += static_cast<double>(bits() >> 11) * 0x1p-53 - 0.5;
        return static_cast<float>(sum * 1.7320508);
    }

  private:
    uint64_t state;
};

struct Bf16 {
    static constexpr const char* name = "bf16";
    // Half the distance of neighbouring numbers, relative.
    static constexpr double rounding = 0x1p-8;
    uint16_t bits;
    static Bf16 from(float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
    }
    float value() const {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    }
};

struct F16 {
    static constexpr const char* name = "f16";
    static constexpr double rounding = 0x1p-11;
    _Float16 half;
    static F16 from(float value) { return {static_cast<_Float16>(value)}; }
    float value() const { return static_cast<float>(half); }
};

template <typename T> std::vector<T> random_vector(Random& random, size_t count, double deviation) {
    std::vector<T> values(count);
    for (T& value : values) {
        const float drawn = static_cast<float>(random.normal() * deviation);
        if constexpr (std::is_same_v<T, float>) {
            value = drawn;
        } else {
            value = T::from(drawn);
        }
    }
    return values;
}

template <typename T> uint64_t hash(const std::vector<T>& values, uint64_t start = 0xcbf29ce484222325u) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(T); ++i) start = (start ^ bytes[i]) * 0x100000001b3u;
    return start;
}

// One test case: collects what is wrong and prints one line at its end.
class Case {
  public:
    explicit Case(std::string name) : name(std::move(name)) {}
    ~Case();
    // `error` must not exceed `bound`; the largest quotient of the case is printed.
    void near(const std::string& what, size_t index, double got, double want, double bound);
    void expect(bool holds, const std::string& what);
    template <typename T> void add_hash(const std::vector<T>& values) { digest = hash(values, digest); }

  private:
    std::string name;
    double worst = 0;
    uint64_t digest = 0xcbf29ce484222325u;
    int wrong = 0;
};

// How much is tried: `Small` is what the checkers can take in each run of the suite, `Deep` what a night can.
enum class Grid { Small, Usual, Deep };

// Registers the tests of one family.
struct Family {
    Family(const char* name, void (*run)(Grid grid));
};

} // namespace check
