// The profiler: lines up the accesses that the lanes of a warp make with one instruction, and counts what a card would
// need for them: passes over the 32 banks of shared memory, and 32-byte sectors of global memory.
#ifdef EMU_PROFILE
#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "hooks.h"
#include "touch.h"

namespace emu {

namespace {

// An instruction: its place in the source where compat.cuh gives it, its address otherwise.
struct Instruction {
    const char* kernel;
    const void* code;
    const char* file;
    int line;
    bool shared;
    bool write;

    bool operator<(const Instruction& other) const {
        return std::tie(kernel, code, file, line, shared, write) <
               std::tie(other.kernel, other.code, other.file, other.line, other.shared, other.write);
    }
};

struct Totals {
    u64 requests = 0;
    u64 used = 0;  // wavefronts or sectors
    u64 least = 0; // that the same bytes need at best
};

struct Request {
    u64 addresses[warp_size];
    u32 mask;
    u32 bytes;
};

// Of the block that runs: the k-th time that a warp came to an instruction.
struct BlockRecord {
    std::map<std::pair<const Instruction*, u32>, std::vector<Request>> requests; // by instruction and warp
    std::map<std::pair<const Instruction*, u32>, u32> times;                     // by instruction and thread
};

BlockRecord block_record;
std::mutex totals_lock;
std::map<Instruction, Totals> totals;

void count_shared(const Request& request, Totals& to) {
    // Wide accesses go by parts of the warp that together touch 128 bytes.
    const u32 lanes = request.bytes <= 4 ? 32 : 128 / request.bytes;
    for (u32 first = 0; first < warp_size; first += lanes) {
        std::vector<u64> words[32]; // distinct words, by bank
        bool active = false;
        for (u32 lane = first; lane < first + lanes; ++lane) {
            if ((request.mask >> lane & 1) == 0) continue;
            active = true;
            const u64 address = request.addresses[lane];
            for (u64 word = address / 4; word <= (address + request.bytes - 1) / 4; ++word) {
                auto& bank = words[word % 32];
                if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
            }
        }
        size_t passes = 0;
        for (const auto& bank : words) passes = std::max(passes, bank.size());
        to.used += passes;
        to.least += active ? 1 : 0;
    }
}

void count_global(const Request& request, Totals& to) {
    std::vector<u64> sectors;
    std::vector<u64> addresses;
    for (u32 lane = 0; lane < warp_size; ++lane) {
        if ((request.mask >> lane & 1) == 0) continue;
        const u64 address = request.addresses[lane];
        if (std::find(addresses.begin(), addresses.end(), address) == addresses.end()) addresses.push_back(address);
        for (u64 sector = address / 32; sector <= (address + request.bytes - 1) / 32; ++sector) {
            if (std::find(sectors.begin(), sectors.end(), sector) == sectors.end()) sectors.push_back(sector);
        }
    }
    to.used += sectors.size();
    to.least += (addresses.size() * request.bytes + 31) / 32;
}

// Sectors as for a request of 128 bytes, passes as for one that needs one.
double average(const Instruction& instruction, const Totals& t) {
    const double ratio = t.least == 0 ? 0.0 : static_cast<double>(t.used) / static_cast<double>(t.least);
    return instruction.shared ? ratio : 4.0 * ratio;
}

std::string place(const Instruction& instruction) {
    if (instruction.file == nullptr) return place_of(instruction.code);
    return describe(Site{instruction.file, instruction.line});
}

} // namespace

void touched(const Touch& touch) {
    Executor& state = *executor;
    if (is_private(state, touch) || touch.atomic) return;
    const bool shared = in_shared_memory(state, touch.address);
    const void* code = touch.site.file != nullptr ? nullptr : touch.code;
    const Instruction wanted{state.launch->kernel->name, code, touch.site.file, touch.site.line, shared, touch.write};
    const Instruction* instruction = nullptr;
    {
        const std::lock_guard<std::mutex> guard(totals_lock);
        instruction = &totals.try_emplace(wanted).first->first;
    }
    const Fiber& fiber = this_fiber();
    const u32 time = block_record.times[{instruction, fiber.index}]++;
    auto& requests = block_record.requests[{instruction, fiber.warp}];
    if (requests.size() <= time) requests.resize(time + 1);
    Request& request = requests[time];
    request.addresses[fiber.lane] = reinterpret_cast<u64>(touch.address);
    request.mask |= 1u << fiber.lane;
    request.bytes = static_cast<u32>(touch.bytes);
}

void hook_launch_begins(Executor&) {}
void hook_launch_ends(Executor&) {}
void hook_block_begins(Executor&) { block_record = {}; }

void hook_block_ends(Executor&) {
    const std::lock_guard<std::mutex> guard(totals_lock);
    for (const auto& [key, requests] : block_record.requests) {
        Totals& to = totals[*key.first];
        for (const Request& request : requests) {
            ++to.requests;
            if (key.first->shared) {
                count_shared(request, to);
            } else {
                count_global(request, to);
            }
        }
    }
    block_record = {};
}

void hook_warp_operation_ends() {}
void hook_slot(Executor&, const SharedSlot&) {}

void hook_copy_issued(const AsyncCopy& copy) {
    if (copy.valid) touched({copy.global, 16, false, false, Space::Global, copy.site, nullptr});
    touched({copy.shared, 16, true, false, Space::Shared, copy.site, nullptr});
}

void hook_copy_completed(const AsyncCopy&) {}

void hook_matrix_row(const void* row, Site site) { touched({row, 16, false, false, Space::Shared, site, nullptr}); }

// One line for each instruction: kernel, place, what it does, requests, average.
std::string profile_report() {
    const std::lock_guard<std::mutex> guard(totals_lock);
    std::string text;
    for (const auto& [instruction, t] : totals) {
        char line[512];
        std::snprintf(line, sizeof(line), "%s %s %s %s requests=%llu %s=%.2f\n", instruction.kernel,
                      place(instruction).c_str(), instruction.shared ? "shared" : "global",
                      instruction.write ? "write" : "read", t.requests, instruction.shared ? "wavefronts" : "sectors",
                      average(instruction, t));
        text += line;
    }
    return text;
}

// `shared_wavefronts` or `global_sectors` of a kernel's worst instruction; 0 if it has none.
double profile_figure(const std::string& kernel, const std::string& figure) {
    const std::lock_guard<std::mutex> guard(totals_lock);
    double worst = 0.0;
    for (const auto& [instruction, t] : totals) {
        if (kernel != instruction.kernel || instruction.shared != (figure == "shared_wavefronts")) continue;
        worst = std::max(worst, average(instruction, t));
    }
    return worst;
}

void profile_reset() {
    const std::lock_guard<std::mutex> guard(totals_lock);
    totals.clear();
}

} // namespace emu
#endif // EMU_PROFILE
