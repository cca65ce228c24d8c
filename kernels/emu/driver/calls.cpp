// Counts, injected failures and the state that spoils a context.
#include "calls.h"

#include <cstdio>
#include <map>
#include <mutex>
#include <vector>

#include "settings.h"

namespace emu {

namespace {

struct Failure {
    std::string function;
    u64 calls_left;
    int status;
};

struct Gate {
    std::mutex lock;
    bool initialized = false;
    Status sticky = success;
    std::string report;
    std::map<std::string, u64> calls;
    std::map<std::string, u64> launches;
    std::vector<Failure> failures;
};

// EMU_FAIL=function:nth:status[,...]
void read_failures(Gate& gate) {
    std::string text = environment("EMU_FAIL", "");
    while (!text.empty()) {
        const size_t end = text.find(',');
        const std::string one = text.substr(0, end);
        text = end == std::string::npos ? "" : text.substr(end + 1);
        char name[128];
        unsigned long long nth = 0;
        int status = 0;
        if (std::sscanf(one.c_str(), "%127[^:]:%llu:%d", name, &nth, &status) == 3 && nth > 0) {
            gate.failures.push_back({name, nth, status});
        } else {
            std::fprintf(stderr, "emulated device: EMU_FAIL has `%s`, expected function:nth:status\n", one.c_str());
        }
    }
}

Gate& gate() {
    static Gate* instance = [] {
        auto* fresh = new Gate;
        read_failures(*fresh);
        return fresh;
    }();
    return *instance;
}

std::string lines(const std::map<std::string, u64>& counts) {
    std::string text;
    for (const auto& [name, count] : counts) text += name + " " + std::to_string(count) + "\n";
    return text;
}

} // namespace

void*& current_context() {
    static thread_local void* context = nullptr;
    return context;
}

Status enter(const char* function, Needs needs) {
    Gate& g = gate();
    const std::lock_guard<std::mutex> guard(g.lock);
    ++g.calls[function];
    int injected = success;
    for (auto failure = g.failures.begin(); failure != g.failures.end();) {
        const bool meant = failure->function == "*" || failure->function == function;
        if (meant && --failure->calls_left == 0) {
            injected = failure->status;
            failure = g.failures.erase(failure);
        } else {
            ++failure;
        }
    }
    if (injected != success) return static_cast<Status>(injected);
    if (needs == Needs::Nothing) return success;
    if (!g.initialized) return not_initialized;
    if (needs == Needs::Initialization) return success;
    if (current_context() == nullptr) return invalid_context;
    return g.sticky;
}

void set_initialized() {
    const std::lock_guard<std::mutex> guard(gate().lock);
    gate().initialized = true;
}

Status sticky_error() {
    const std::lock_guard<std::mutex> guard(gate().lock);
    return gate().sticky;
}

void set_sticky_error(Status status, const std::string& report) {
    Gate& g = gate();
    const std::lock_guard<std::mutex> guard(g.lock);
    if (g.sticky == success) g.sticky = status;
    g.report = report;
    if (!settings().quiet) std::fprintf(stderr, "emulated device: %s\n", report.c_str());
}

void clear_sticky_error() {
    Gate& g = gate();
    const std::lock_guard<std::mutex> guard(g.lock);
    g.sticky = success;
    g.report.clear();
}

std::string last_report() {
    const std::lock_guard<std::mutex> guard(gate().lock);
    return gate().report;
}

u64 call_count(const std::string& function) {
    Gate& g = gate();
    const std::lock_guard<std::mutex> guard(g.lock);
    const auto at = g.calls.find(function);
    return at == g.calls.end() ? 0 : at->second;
}

std::string call_counts() {
    const std::lock_guard<std::mutex> guard(gate().lock);
    return lines(gate().calls);
}

void count_launch(const std::string& kernel) {
    const std::lock_guard<std::mutex> guard(gate().lock);
    ++gate().launches[kernel];
}

u64 launch_count(const std::string& kernel) {
    Gate& g = gate();
    const std::lock_guard<std::mutex> guard(g.lock);
    u64 sum = 0;
    for (const auto& [name, count] : g.launches) {
        if (kernel.empty() || kernel == name) sum += count;
    }
    return sum;
}

std::string launch_counts() {
    const std::lock_guard<std::mutex> guard(gate().lock);
    return lines(gate().launches);
}

void reset_counts() {
    const std::lock_guard<std::mutex> guard(gate().lock);
    gate().calls.clear();
    gate().launches.clear();
}

void fail_call(const std::string& function, u64 nth, int status) {
    const std::lock_guard<std::mutex> guard(gate().lock);
    if (nth > 0) gate().failures.push_back({function, nth, status});
}

void forget_failures() {
    const std::lock_guard<std::mutex> guard(gate().lock);
    gate().failures.clear();
}

} // namespace emu
