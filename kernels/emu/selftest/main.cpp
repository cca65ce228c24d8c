// Runs kernels with injected bugs on one build of the emulated device and fails unless that build finds those that it
// must find, and leaves the kernels without a bug alone, in every order of threads. Each run has a process of its own,
// because a fault spoils the context for good.
//   selftest VARIANT libcuda.so libcublasLt.so
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>

#include "device.h"

namespace selftest {

void* driver_library;
void* blas_library;

void* start_device() {
    void* context = nullptr;
    void* module = nullptr;
    EXPECT(driver("cuInit", 0u) == 0);
    EXPECT(driver("cuDevicePrimaryCtxRetain", &context, 0) == 0);
    EXPECT(driver("cuCtxSetCurrent", context) == 0);
    EXPECT(driver("cuModuleLoadData", &module, static_cast<const void*>("EMU")) == 0);
    return module;
}

void* find_function(void* module, const char* name) {
    void* function = nullptr;
    EXPECT(driver("cuModuleGetFunction", &function, module, name) == 0);
    return function;
}

u64 allocate(size_t bytes) {
    u64 address = 0;
    EXPECT(driver("cuMemAlloc_v2", &address, bytes) == 0);
    return address;
}

int launch(void* function, unsigned blocks, unsigned threads, unsigned shared, void* stream, void** parameters) {
    return driver("cuLaunchKernel", function, blocks, 1u, 1u, threads, 1u, 1u, shared, stream, parameters,
                  static_cast<void**>(nullptr));
}

namespace {

enum Variant : unsigned { plain = 1, asan = 2, check = 4, every = 7 };

struct Case {
    const char* kernel;
    unsigned found_by; // 0: there is nothing to find
    unsigned blocks, threads, shared, n;
    unsigned inputs, outputs; // elements
    bool zeroed;              // the output is, before the launch
    float (*expected)(unsigned i);
};

float copied(unsigned i) { return static_cast<float>(i + 1); }
float reversed(unsigned i) { return static_cast<float>(64 - i); }
float reversed_thrice(unsigned i) { return 3.0f * static_cast<float>(64 - i) + 3.0f; }
float swapped(unsigned i) { return static_cast<float>((i ^ 1) + 1); }
float warps(unsigned i) { return 2.0f * static_cast<float>(i + 1) + 21.0f; }
float anything(unsigned) { return NAN; } // the output says nothing
float summed(unsigned i) { return i == 0 ? 8256.0f : NAN; } // 1 + 2 + .. + 128
float transposed(unsigned i) { return static_cast<float>(i % 32 * 32 + i / 32 + 1); }

int matrix_a(unsigned row, unsigned k) { return static_cast<int>((row * 3 + k) % 7) - 3; }
int matrix_b(unsigned column, unsigned k) { return static_cast<int>((column * 5 + k * 2) % 5) - 2; }

float multiplied(unsigned i) {
    int sum = 0;
    for (unsigned k = 0; k < 64; ++k) sum += matrix_a(i % 128 / 8, k) * matrix_b(i % 8, k);
    return static_cast<float>(sum);
}

const Case cases[] = {
    {"good_reverse", 0, 1, 64, 0, 64, 64, 64, false, reversed},
    {"missing_barrier", every, 1, 64, 0, 64, 64, 64, false, reversed},
    {"good_reverse_thrice", 0, 1, 64, 0, 64, 64, 64, false, reversed_thrice},
    {"buffer_filled_again_too_early", every, 1, 64, 0, 64, 64, 64, false, reversed_thrice},
    {"good_swap_pairs", 0, 1, 64, 0, 64, 64, 64, false, swapped},
    {"missing_syncwarp", every, 1, 64, 0, 64, 64, 64, false, swapped},
    {"barrier_in_a_branch", every, 1, 64, 0, 64, 64, 64, false, reversed},
    {"two_barriers", every, 1, 64, 0, 64, 64, 64, false, reversed},
    {"exit_before_barrier", every, 1, 64, 0, 64, 64, 64, false, reversed},
    {"shuffle_in_a_branch", every, 1, 64, 0, 64, 64, 64, false, anything},
    {"shuffle_from_a_lane_outside_the_mask", every, 1, 64, 0, 64, 64, 64, false, anything},
    {"good_warps", 0, 1, 64, 0, 64, 64, 64, false, warps},
    {"good_uniform_return", 0, 3, 64, 0, 64, 64, 64, false, reversed},
    {"shared_out_of_bounds", asan | check, 1, 64, 0, 64, 64, 64, false, copied},
    {"dynamic_shared_out_of_bounds", asan | check, 1, 64, 256, 64, 64, 64, false, copied},
    {"good_dynamic_shared", 0, 1, 64, 256, 64, 64, 64, false, copied},
    {"global_write_out_of_bounds", asan | check, 1, 60, 0, 60, 60, 60, false, copied},
    {"global_read_out_of_bounds", asan | check, 1, 60, 0, 60, 60, 60, false, copied},
    {"global_write_far_out_of_bounds", every, 1, 60, 0, 60, 60, 60, false, copied},
    {"misaligned_load", every, 1, 64, 0, 64, 64, 64, false, copied},
    {"good_wide_accesses", 0, 1, 64, 0, 64, 64, 64, false, copied},
    {"uninitialised_shared", every, 1, 64, 0, 64, 64, 64, false, copied},
    {"uninitialised_global", every, 1, 64, 0, 64, 64, 64, false, copied},
    {"two_blocks_write_one_address", check, 2, 64, 0, 64, 64, 64, false, copied},
    {"block_reads_another_blocks_result", check, 2, 64, 0, 64, 64, 128, true, anything},
    {"good_last_block", 0, 4, 32, 0, 32, 128, 65, true, summed},
    {"last_block_without_fence", check, 4, 32, 0, 32, 128, 65, true, summed},
    {"good_async_copy", 0, 1, 64, 0, 64, 64, 64, false, copied},
    {"async_copy_without_wait", every, 1, 64, 0, 64, 64, 64, false, copied},
    {"async_copy_without_commit", every, 1, 64, 0, 64, 64, 64, false, copied},
    {"good_multiply", 0, 1, 64, 0, 0, 0, 256, false, multiplied},
    {"multiply_without_tail_barrier", every, 1, 64, 0, 0, 0, 256, false, multiplied},
    {"transpose_padded", 0, 1, 256, 0, 0, 1024, 1024, false, transposed},
    {"transpose_unpadded", 0, 1, 256, 0, 0, 1024, 1024, false, transposed},
};

std::vector<char> input_of(const Case& c) {
    if (c.inputs == 0) { // two matrices of bf16
        std::vector<u16> values;
        const auto add = [&](int value) {
            const float wide = static_cast<float>(value);
            u32 bits = 0;
            std::memcpy(&bits, &wide, 4);
            values.push_back(static_cast<u16>(bits >> 16));
        };
        for (unsigned i = 0; i < 16 * 64; ++i) add(matrix_a(i / 64, i % 64));
        for (unsigned i = 0; i < 8 * 64; ++i) add(matrix_b(i / 64, i % 64));
        const char* bytes = reinterpret_cast<const char*>(values.data());
        return std::vector<char>(bytes, bytes + values.size() * 2);
    }
    std::vector<float> values(c.inputs);
    for (unsigned i = 0; i < c.inputs; ++i) values[i] = static_cast<float>(i + 1);
    const char* bytes = reinterpret_cast<const char*>(values.data());
    return std::vector<char>(bytes, bytes + values.size() * 4);
}

enum Outcome { right = 0, wrong = 10, refused = 11, broken = 3 };

int run_case(const Case& c, bool loud) {
    void* function = find_function(start_device(), c.kernel);
    const std::vector<char> input = input_of(c);
    u64 in = allocate(input.size());
    u64 out = allocate(c.outputs * 4);
    EXPECT(driver("cuMemcpyHtoD_v2", in, static_cast<const void*>(input.data()), input.size()) == 0);
    if (c.zeroed) EXPECT(driver("cuMemsetD8_v2", out, static_cast<u8>(0), static_cast<size_t>(c.outputs * 4)) == 0);
    unsigned n = c.n;
    void* parameters[] = {&in, &out, &n};
    int status = launch(function, c.blocks, c.threads, c.shared, nullptr, parameters);
    if (status == 0) status = driver("cuCtxSynchronize");
    if (status != 0) {
        if (loud) std::printf("    %s\n", report().c_str());
        return report().empty() ? broken : refused;
    }
    std::vector<float> result(c.outputs);
    EXPECT(driver("cuMemcpyDtoH_v2", static_cast<void*>(result.data()), out, result.size() * 4) == 0);
    for (unsigned i = 0; i < c.outputs; ++i) {
        const float expected = c.expected(i);
        if (!std::isnan(expected) && result[i] != expected) {
            if (loud) std::printf("    out[%u] is %g, not %g\n", i, result[i], expected);
            return wrong;
        }
    }
    return right;
}

// The outcome of a function in a child process; `broken` + 100 if a signal or a sanitizer ended it.
template <typename Body> int in_child(Body&& body) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        const int outcome = body();
        std::fflush(stdout);
        _exit(outcome);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status)) return broken + 100;
    const int code = WEXITSTATUS(status);
    return code == right || code == wrong || code == refused || code == broken ? code : broken + 100;
}

struct ThreadOrder {
    int order;
    u64 seed;
    int preempt;
};

const ThreadOrder orders[] = {{0, 1, 0}, {1, 1, 0}, {2, 1, 0}, {2, 2, 0}, {2, 3, 1}, {2, 4, 1}};

bool test_case(const Case& c, unsigned variant, bool loud) {
    bool found = false;
    for (const ThreadOrder& o : orders) {
        const int outcome = in_child([&] {
            driver("emu_set_order", o.order, o.seed);
            driver("emu_set_preempt", o.preempt);
            return run_case(c, loud);
        });
        if (outcome == broken) {
            std::printf("FAILED  %s: the test itself broke down\n", c.kernel);
            return false;
        }
        // The checker must say what is wrong; a wrong result alone is luck.
        found = found || (variant == check ? outcome == refused : outcome != right);
        if (c.found_by == 0 && outcome != right) {
            std::printf("FAILED  %s: no bug, yet outcome %d in order %d\n", c.kernel, outcome, o.order);
            return false;
        }
        if (found) break;
    }
    if ((c.found_by & variant) != 0 && !found) {
        std::printf("FAILED  %s: not found\n", c.kernel);
        return false;
    }
    return true;
}

} // namespace
} // namespace selftest

int main(int count, char** arguments) {
    using namespace selftest;
    if (count < 4) {
        std::printf("selftest VARIANT libcuda.so libcublasLt.so [-v]\n");
        return 2;
    }
    setenv("EMU_QUIET", "1", 1);
    setenv("EMU_MEMORY", "16777216", 1);
    const bool loud = count > 4;
    const std::string name = arguments[1];
    unsigned variant = 0; // the profiler finds no bugs
    if (name == "plain") variant = plain;
    if (name == "asan") variant = asan;
    if (name == "check") variant = check;
    driver_library = dlopen(arguments[2], RTLD_NOW);
    blas_library = driver_library == nullptr ? nullptr : dlopen(arguments[3], RTLD_NOW);
    if (blas_library == nullptr) {
        std::printf("%s\n", dlerror());
        return 1;
    }
    // A sanitizer's own report of a bug that it is to find is no news.
    if (variant == asan && !loud && std::freopen("/dev/null", "w", stderr) == nullptr) return 1;
    int failures = 0;
    int tests = 0;
    for (const Case& c : cases) {
        if (loud) std::printf("  %s\n", c.kernel);
        failures += test_case(c, variant, loud) ? 0 : 1;
        ++tests;
    }
    for (const DeviceTest& test : device_tests()) {
        if (loud) std::printf("  %s\n", test.name);
        const int outcome = in_child([&] {
            test.run();
            return 0;
        });
        if (outcome != 0) std::printf("FAILED  %s\n", test.name);
        failures += outcome == 0 ? 0 : 1;
        ++tests;
    }
    std::printf("emulated device, %s build: %d of %d tests passed\n", name.c_str(), tests - failures, tests);
    return failures == 0 ? 0 : 1;
}
