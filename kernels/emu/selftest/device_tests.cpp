// The device around the kernels: what a driver refuses, what is late, what a capture does and what the profiler counts.
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace selftest {

namespace {

std::string build() {
    using Function = const char* (*)();
    return reinterpret_cast<Function>(dlsym(driver_library, "emu_build"))();
}

// A vector on the device, and one to write to, with parameters for kernels of the form (in, out, n).
struct Vectors {
    u64 in, out;
    unsigned n;
    std::vector<float> host;
    void* parameters[3];

    explicit Vectors(unsigned count) : in(allocate(count * 4)), out(allocate(count * 4)), n(count), host(count) {
        for (unsigned i = 0; i < count; ++i) host[i] = static_cast<float>(i + 1);
        const size_t bytes = host.size() * 4;
        EXPECT(driver("cuMemcpyHtoD_v2", in, static_cast<const void*>(host.data()), bytes) == 0);
        parameters[0] = &in;
        parameters[1] = &out;
        parameters[2] = &n;
    }
    Vectors(const Vectors&) = delete;

    std::vector<float> result() const {
        std::vector<float> values(n);
        EXPECT(driver("cuMemcpyDtoH_v2", static_cast<void*>(values.data()), out, static_cast<size_t>(n) * 4) == 0);
        return values;
    }
};

void* new_stream() {
    void* stream = nullptr;
    EXPECT(driver("cuStreamCreate", &stream, 1u) == 0);
    return stream;
}

void launches_that_a_card_refuses() {
    void* module = start_device();
    void* function = find_function(module, "good_reverse");
    Vectors v(64);
    EXPECT(launch(function, 0, 64, 0, nullptr, v.parameters) == 1);
    EXPECT(launch(function, 1, 0, 0, nullptr, v.parameters) == 1);
    EXPECT(launch(function, 1, 288, 0, nullptr, v.parameters) == 701);
    EXPECT(launch(function, 1, 2048, 0, nullptr, v.parameters) == 1);
    EXPECT(launch(function, 1, 64, 60000, nullptr, v.parameters) == 1);
    EXPECT(launch(function, 1, 64, 0, nullptr, nullptr) == 1);
    EXPECT(driver("cuFuncSetAttribute", function, 8, 60000) == 0);
    EXPECT(launch(function, 1, 64, 60000, nullptr, v.parameters) == 0);
    EXPECT(driver("cuFuncSetAttribute", function, 8, 1000000) == 1);
    void* missing = nullptr;
    EXPECT(driver("cuModuleGetFunction", &missing, module, "no_such_kernel") == 500);
    EXPECT(driver("cuModuleLoadData", &missing, static_cast<const void*>("nonsense")) == 200);
    EXPECT(driver("cuCtxSynchronize") == 0);
    EXPECT(v.result()[0] == 64.0f);
}

void parameters_are_told() {
    void* function = find_function(start_device(), "many_parameters");
    const size_t offsets[] = {0, 8, 16, 20, 24, 32};
    const size_t sizes[] = {8, 8, 4, 4, 8, 4};
    size_t offset = 0;
    size_t size = 0;
    for (size_t i = 0; i < 6; ++i) {
        EXPECT(driver("cuFuncGetParamInfo", function, i, &offset, &size) == 0);
        EXPECT(offset == offsets[i] && size == sizes[i]);
    }
    EXPECT(driver("cuFuncGetParamInfo", function, size_t{6}, &offset, &size) == 1);
}

void a_fault_spoils_the_context() {
    void* function = find_function(start_device(), "exit_before_barrier");
    Vectors v(64);
    EXPECT(launch(function, 1, 64, 0, nullptr, v.parameters) == 0);
    EXPECT(driver("cuCtxSynchronize") == 719);
    EXPECT(report().find("exit_before_barrier") != std::string::npos);
    EXPECT(driver("cuMemFree_v2", v.in) == 719);
    driver("emu_reset");
    EXPECT(driver("cuCtxSynchronize") == 0);
}

void freed_memory_faults() {
    void* function = find_function(start_device(), "good_reverse");
    Vectors v(64);
    EXPECT(driver("cuMemFree_v2", v.out) == 0);
    EXPECT(launch(function, 1, 64, 0, nullptr, v.parameters) == 0);
    EXPECT(driver("cuCtxSynchronize") == 719);
}

// Kernels and copies still reach memory that is closed to the host.
void protected_memory_faults_for_the_host() {
    setenv("EMU_PROTECT", "1", 1);
    std::signal(SIGSEGV, [](int) { _exit(0); });
    void* function = find_function(start_device(), "good_reverse");
    Vectors v(64);
    EXPECT(launch(function, 1, 64, 0, nullptr, v.parameters) == 0);
    EXPECT(v.result()[0] == 64.0f);
    *reinterpret_cast<volatile float*>(v.in) = 1.0f;
    EXPECT(false);
}

void host_pointers_fault_in_the_checker() {
    void* function = find_function(start_device(), "good_reverse");
    Vectors v(64);
    v.in = reinterpret_cast<u64>(v.host.data());
    EXPECT(launch(function, 1, 64, 0, nullptr, v.parameters) == 0);
    EXPECT(driver("cuCtxSynchronize") == (build() == "check" ? 719 : 0));
}

void page_locked_copies_are_late() {
    start_device();
    Vectors v(64);
    void* stream = new_stream();
    void* pinned = nullptr;
    EXPECT(driver("cuMemHostAlloc", &pinned, size_t{256}, 0u) == 0);
    auto* values = static_cast<float*>(pinned);
    values[0] = 5.0f;
    EXPECT(driver("cuMemcpyHtoDAsync_v2", v.in, static_cast<const void*>(pinned), size_t{256}, stream) == 0);
    values[0] = 6.0f; // too early: the copy has not run
    EXPECT(driver("cuStreamQuery", stream) == 600);
    EXPECT(driver("cuStreamSynchronize", stream) == 0);
    values[1] = 0.0f;
    EXPECT(driver("cuMemcpyDtoHAsync_v2", pinned, v.in, size_t{256}, stream) == 0);
    EXPECT(values[1] == 0.0f);
    EXPECT(driver("cuStreamSynchronize", stream) == 0);
    EXPECT(values[0] == 6.0f);
    EXPECT(driver("cuMemFreeHost", pinned) == 0);
    EXPECT(driver("cuStreamDestroy_v2", stream) == 0);
    EXPECT(driver("emu_streams") == 0 && driver("emu_pinned_allocations") == 0);
}

void streams_meet_only_through_events() {
    void* module = start_device();
    void* function = find_function(module, "good_reverse");
    Vectors v(64);
    void* copies = new_stream();
    void* work = new_stream();
    void* event = nullptr;
    EXPECT(driver("cuEventCreate", &event, 2u) == 0);
    std::vector<float> other(64, 7.0f);
    EXPECT(driver("cuMemcpyHtoDAsync_v2", v.in, static_cast<const void*>(other.data()), size_t{256}, copies) == 0);
    EXPECT(launch(function, 1, 64, 0, work, v.parameters) == 0);
    EXPECT(driver("cuStreamSynchronize", work) == 0);
    EXPECT(v.result()[0] == 64.0f); // nobody made the work wait
    EXPECT(driver("cuEventRecord", event, copies) == 0);
    EXPECT(driver("cuStreamWaitEvent", work, event, 0u) == 0);
    EXPECT(launch(function, 1, 64, 0, work, v.parameters) == 0);
    EXPECT(driver("cuStreamSynchronize", work) == 0);
    EXPECT(v.result()[0] == 7.0f);
    EXPECT(driver("cuEventQuery", event) == 0);
    EXPECT(driver("cuEventDestroy_v2", event) == 0);
    EXPECT(driver("cuEventDestroy_v2", event) == 400);
}

void captures_replay() {
    void* module = start_device();
    void* function = find_function(module, "good_reverse");
    Vectors v(64);
    Vectors second(64);
    void* stream = new_stream();
    void* side = new_stream();
    void *fork = nullptr, *join = nullptr, *graph = nullptr, *executable = nullptr;
    EXPECT(driver("cuEventCreate", &fork, 2u) == 0 && driver("cuEventCreate", &join, 2u) == 0);
    EXPECT(driver("cuStreamBeginCapture_v2", stream, 1) == 0);
    EXPECT(launch(function, 1, 64, 0, stream, v.parameters) == 0);
    EXPECT(driver("cuEventRecord", fork, stream) == 0);
    EXPECT(driver("cuStreamWaitEvent", side, fork, 0u) == 0);
    EXPECT(launch(function, 1, 64, 0, side, second.parameters) == 0);
    EXPECT(driver("cuEventRecord", join, side) == 0);
    EXPECT(driver("cuStreamWaitEvent", stream, join, 0u) == 0);
    EXPECT(launch(function, 1, 64, 0, stream, second.parameters) == 0);
    EXPECT(driver("cuStreamEndCapture", stream, &graph) == 0);
    EXPECT(driver("emu_launch_count", static_cast<const char*>("good_reverse")) == 0);
    EXPECT(driver("cuGraphInstantiateWithFlags", &executable, graph, u64{0}) == 0);
    for (int i = 0; i < 3; ++i) EXPECT(driver("cuGraphLaunch", executable, stream) == 0);
    EXPECT(driver("cuStreamSynchronize", stream) == 0);
    EXPECT(driver("emu_launch_count", static_cast<const char*>("good_reverse")) == 9);
    EXPECT(v.result()[0] == 64.0f && second.result()[63] == 1.0f);
    EXPECT(driver("cuGraphExecDestroy", executable) == 0 && driver("cuGraphDestroy", graph) == 0);
    EXPECT(driver("emu_graphs") == 0);
}

void captures_refuse() {
    void* function = find_function(start_device(), "good_reverse");
    Vectors v(64);
    void* stream = new_stream();
    void* side = new_stream();
    void *graph = nullptr, *event = nullptr;
    u64 address = 0;
    EXPECT(driver("cuEventCreate", &event, 2u) == 0);
    // An allocation voids it.
    EXPECT(driver("cuStreamBeginCapture_v2", stream, 1) == 0);
    EXPECT(driver("cuMemAlloc_v2", &address, size_t{64}) == 900);
    EXPECT(driver("cuStreamEndCapture", stream, &graph) == 901 && graph == nullptr);
    // So does waiting.
    EXPECT(driver("cuStreamBeginCapture_v2", stream, 1) == 0);
    EXPECT(driver("cuStreamSynchronize", stream) == 900);
    EXPECT(driver("cuStreamEndCapture", stream, &graph) == 901);
    // Work outside of it, and a side that never joins.
    EXPECT(driver("cuEventRecord", event, side) == 0);
    EXPECT(driver("cuStreamBeginCapture_v2", stream, 1) == 0);
    EXPECT(driver("cuStreamWaitEvent", stream, event, 0u) == 905);
    EXPECT(driver("cuStreamEndCapture", stream, &graph) == 901);
    EXPECT(driver("cuStreamBeginCapture_v2", stream, 1) == 0);
    EXPECT(launch(function, 1, 64, 0, stream, v.parameters) == 0);
    EXPECT(driver("cuEventRecord", event, stream) == 0);
    EXPECT(driver("cuStreamWaitEvent", side, event, 0u) == 0);
    EXPECT(launch(function, 1, 64, 0, side, v.parameters) == 0);
    EXPECT(driver("cuStreamEndCapture", stream, &graph) == 904);
    EXPECT(launch(function, 1, 64, 0, side, v.parameters) == 0);
    EXPECT(driver("cuCtxSynchronize") == 0);
}

void memory_is_counted_and_bounded() {
    start_device();
    size_t free = 0;
    size_t total = 0;
    EXPECT(driver("cuMemGetInfo_v2", &free, &total) == 0 && free == total && total == 16777216);
    u64 address = 0;
    EXPECT(driver("cuMemAlloc_v2", &address, total + 1) == 2);
    EXPECT(driver("cuMemAlloc_v2", &address, total) == 0);
    u64 more = 0;
    EXPECT(driver("cuMemAlloc_v2", &more, size_t{1}) == 2);
    EXPECT(driver("cuMemFree_v2", address) == 0 && driver("cuMemFree_v2", address) == 1);
    EXPECT(driver("emu_allocations") == 0 && driver("emu_peak_bytes") == 16777216);
    const u64 small = allocate(100);
    char byte = 0;
    EXPECT(driver("cuMemcpyHtoD_v2", small + 100, static_cast<const void*>(&byte), size_t{1}) == 1);
    std::vector<u8> bytes(100);
    EXPECT(driver("cuMemcpyDtoH_v2", static_cast<void*>(bytes.data()), small, size_t{100}) == 0);
    for (const u8 value : bytes) EXPECT(value == 0xff);
}

void calls_can_be_made_to_fail() {
    start_device();
    driver("emu_reset_counts");
    driver("emu_fail_call", "cuMemAlloc_v2", u64{2}, 2);
    u64 address = 0;
    EXPECT(driver("cuMemAlloc_v2", &address, size_t{64}) == 0);
    EXPECT(driver("cuMemAlloc_v2", &address, size_t{64}) == 2);
    EXPECT(driver("cuMemAlloc_v2", &address, size_t{64}) == 0);
    EXPECT(driver("emu_call_count", "cuMemAlloc_v2") == 3 && driver("emu_allocations") == 2);
}

float product_entry(unsigned row, unsigned k) {
    return static_cast<float>(static_cast<int>((row * 7 + k * 3) % 11) - 5);
}

void matrix_products_are_right() {
    start_device();
    const unsigned rows = 5, outputs = 7, depth = 24;
    std::vector<u16> x, w;
    const auto add = [](std::vector<u16>& to, float value) {
        u32 bits = 0;
        std::memcpy(&bits, &value, 4);
        to.push_back(static_cast<u16>(bits >> 16));
    };
    for (unsigned i = 0; i < rows * depth; ++i) add(x, product_entry(i / depth, i % depth));
    for (unsigned i = 0; i < outputs * depth; ++i) add(w, product_entry(i / depth + 3, i % depth));
    const u64 xs = allocate(x.size() * 2), ws = allocate(w.size() * 2), ys = allocate(rows * outputs * 4);
    EXPECT(driver("cuMemcpyHtoD_v2", xs, static_cast<const void*>(x.data()), x.size() * 2) == 0);
    EXPECT(driver("cuMemcpyHtoD_v2", ws, static_cast<const void*>(w.data()), w.size() * 2) == 0);
    void *handle = nullptr, *wl = nullptr, *xl = nullptr, *yl = nullptr, *description = nullptr;
    EXPECT(blas("cublasLtCreate", &handle) == 0);
    EXPECT(blas("cublasLtMatrixLayoutCreate", &wl, 14, u64{depth}, u64{outputs}, i64{depth}) == 0);
    EXPECT(blas("cublasLtMatrixLayoutCreate", &xl, 14, u64{depth}, u64{rows}, i64{depth}) == 0);
    EXPECT(blas("cublasLtMatrixLayoutCreate", &yl, 0, u64{outputs}, u64{rows}, i64{outputs}) == 0);
    EXPECT(blas("cublasLtMatmulDescCreate", &description, 68, 0) == 0);
    const int transposed = 1;
    const void* value = &transposed;
    EXPECT(blas("cublasLtMatmulDescSetAttribute", description, 3, value, size_t{4}) == 0);
    float alpha = 2.0f;
    float beta = 0.0f;
    const auto multiply = [&](void* b_layout) {
        return blas("cublasLtMatmul", handle, description, static_cast<const void*>(&alpha), ws, wl, xs, b_layout,
                    static_cast<const void*>(&beta), ys, yl, ys, yl, static_cast<const void*>(nullptr),
                    static_cast<void*>(nullptr), size_t{0}, static_cast<void*>(nullptr));
    };
    EXPECT(multiply(wl) == 7); // shapes do not fit
    EXPECT(multiply(xl) == 0);
    beta = 1.0f;
    EXPECT(multiply(xl) == 0); // added to the first
    std::vector<float> y(rows * outputs);
    EXPECT(driver("cuMemcpyDtoH_v2", static_cast<void*>(y.data()), ys, y.size() * 4) == 0);
    for (unsigned i = 0; i < rows * outputs; ++i) {
        double sum = 0.0;
        for (unsigned k = 0; k < depth; ++k) sum += product_entry(i / outputs, k) * product_entry(i % outputs + 3, k);
        EXPECT(y[i] == static_cast<float>(4.0 * sum));
    }
    EXPECT(driver("emu_launch_count", static_cast<const char*>("cublasLtMatmul")) == 2);
}

double figure(const char* kernel, const char* name) {
    using Function = double (*)(const char*, const char*);
    return reinterpret_cast<Function>(dlsym(driver_library, "emu_profile_figure"))(kernel, name);
}

void the_profiler_counts() {
    if (build() != "profile") return;
    void* module = start_device();
    Vectors v(1024);
    for (const char* kernel : {"transpose_padded", "transpose_unpadded"}) {
        EXPECT(launch(find_function(module, kernel), 1, 256, 0, nullptr, v.parameters) == 0);
    }
    v.n = 2;
    EXPECT(launch(find_function(module, "read_with_stride"), 1, 64, 0, nullptr, v.parameters) == 0);
    EXPECT(driver("cuCtxSynchronize") == 0);
    EXPECT(figure("transpose_padded", "shared_wavefronts") == 1.0);
    EXPECT(figure("transpose_unpadded", "shared_wavefronts") == 32.0);
    EXPECT(figure("transpose_padded", "global_sectors") == 4.0);
    EXPECT(figure("read_with_stride", "global_sectors") == 8.0);
}

} // namespace

const std::vector<DeviceTest>& device_tests() {
    static const std::vector<DeviceTest> all = [] {
        std::vector<DeviceTest> tests = {
            {"launches_that_a_card_refuses", launches_that_a_card_refuses},
            {"parameters_are_told", parameters_are_told},
            {"a_fault_spoils_the_context", a_fault_spoils_the_context},
            {"protected_memory_faults_for_the_host", protected_memory_faults_for_the_host},
            {"host_pointers_fault_in_the_checker", host_pointers_fault_in_the_checker},
            {"page_locked_copies_are_late", page_locked_copies_are_late},
            {"streams_meet_only_through_events", streams_meet_only_through_events},
            {"captures_replay", captures_replay},
            {"captures_refuse", captures_refuse},
            {"memory_is_counted_and_bounded", memory_is_counted_and_bounded},
            {"calls_can_be_made_to_fail", calls_can_be_made_to_fail},
            {"matrix_products_are_right", matrix_products_are_right},
            {"the_profiler_counts", the_profiler_counts},
        };
        // AddressSanitizer ends the process instead.
        if (build() != "asan") tests.push_back({"freed_memory_faults", freed_memory_faults});
        return tests;
    }();
    return all;
}

} // namespace selftest
