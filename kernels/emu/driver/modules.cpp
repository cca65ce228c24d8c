// See modules.h. A launch that a card would refuse is refused here.
#include "modules.h"

#include <map>
#include <mutex>

#include "calls.h"
#include "device.h"
#include "settings.h"

namespace emu {

namespace {

struct Module {
    std::map<std::string, std::unique_ptr<Function>> functions;
};

struct Modules {
    std::mutex lock;
    std::map<void*, std::unique_ptr<Module>> loaded;
};

Modules& modules() {
    static auto* instance = new Modules;
    return *instance;
}

bool is_image(const void* image) {
    const auto* bytes = static_cast<const u8*>(image);
    const u8 fatbin[] = {0x50, 0xed, 0x55, 0xba};
    const u8 elf[] = {0x7f, 'E', 'L', 'F'};
    // Byte by byte: a short image must not be read beyond its end.
    const auto starts = [&](const u8* magic, size_t count) {
        for (size_t i = 0; i < count; ++i) {
            if (bytes[i] != magic[i]) return false;
        }
        return true;
    };
    return starts(fatbin, 4) || starts(elf, 4) || starts(reinterpret_cast<const u8*>("EMU"), 3);
}

} // namespace

Status load_module(const void* image, void*& handle) {
    if (image == nullptr) return invalid_value;
    if (!is_image(image)) return invalid_image;
    Modules& m = modules();
    const std::lock_guard<std::mutex> guard(m.lock);
    auto module = std::make_unique<Module>();
    handle = module.get();
    m.loaded[handle] = std::move(module);
    return success;
}

Status unload_module(void* handle) {
    Modules& m = modules();
    const std::lock_guard<std::mutex> guard(m.lock);
    return m.loaded.erase(handle) == 1 ? success : invalid_handle;
}

Status find_function(void* module, const char* name, void*& handle) {
    Modules& m = modules();
    const std::lock_guard<std::mutex> guard(m.lock);
    const auto at = m.loaded.find(module);
    if (at == m.loaded.end()) return invalid_handle;
    if (name == nullptr) return invalid_value;
    const KernelEntry* kernel = find_kernel(name);
    if (kernel == nullptr) return not_found;
    auto& function = at->second->functions[name];
    if (function == nullptr) {
        function = std::make_unique<Function>(Function{kernel, 0, 0});
    }
    handle = function.get();
    return success;
}

Function* function_of(void* handle) {
    Modules& m = modules();
    const std::lock_guard<std::mutex> guard(m.lock);
    for (const auto& [key, module] : m.loaded) {
        for (const auto& [name, function] : module->functions) {
            if (function.get() == handle) return function.get();
        }
    }
    return nullptr;
}

size_t shared_limit(const Function& function) {
    return attribute(function.dynamic_shared_limit == 0 ? max_shared_per_block : max_shared_opt_in);
}

size_t live_modules() {
    const std::lock_guard<std::mutex> guard(modules().lock);
    return modules().loaded.size();
}

void reset_modules() {
    const std::lock_guard<std::mutex> guard(modules().lock);
    modules().loaded.clear();
}

namespace {

// The arguments of one launch, kept until it has run (in a graph: as long as the graph).
struct Arguments {
    std::vector<u64> storage;
    std::vector<void*> pointers;
};

Arguments copy_arguments(const KernelEntry& kernel, void** parameters) {
    Arguments copy;
    copy.storage.resize(kernel.parameter_count);
    for (size_t i = 0; i < kernel.parameter_count; ++i) {
        std::memcpy(&copy.storage[i], parameters[i], kernel.parameters[i].size);
    }
    for (u64& value : copy.storage) copy.pointers.push_back(&value);
    return copy;
}

Status carry_out(Function& function, const LaunchShape& shape, const Arguments& arguments) {
    Launch launch;
    launch.kernel = function.kernel;
    launch.grid = shape.grid;
    launch.size = shape.block;
    launch.dynamic_shared = shape.dynamic_shared;
    launch.arguments = arguments.pointers.data();
    launch.settings.order = settings().order;
    launch.settings.seed = settings().seed;
    launch.settings.preempt = settings().preempt;
    launch.settings.static_shared_limit = attribute(max_shared_per_block);
    launch.settings.shared_limit = shared_limit(function);
    std::string report;
    size_t static_shared = 0;
    const bool ok = run_launch(launch, report, static_shared);
    if (static_shared > function.static_shared) function.static_shared = static_shared;
    if (ok) return success;
    set_sticky_error(launch_failed, report);
    return launch_failed;
}

} // namespace

Status make_launch(Function& function, const LaunchShape& shape, void** parameters, Operation& operation) {
    const KernelEntry& kernel = *function.kernel;
    const dim3& grid = shape.grid;
    const dim3& block = shape.block;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0) return invalid_value;
    if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) return invalid_value;
    if (block.x > 1024 || block.y > 1024 || block.z > 64) return invalid_value;
    const u64 threads = static_cast<u64>(block.x) * block.y * block.z;
    if (threads > max_block_threads) return invalid_value;
    if (threads > kernel.launch_bound) return launch_out_of_resources;
    if (function.static_shared + shape.dynamic_shared > shared_limit(function)) return invalid_value;
    const size_t raised = function.dynamic_shared_limit;
    if (raised != 0 && shape.dynamic_shared > raised) return invalid_value;
    if (kernel.parameter_count > 0 && parameters == nullptr) return invalid_value;
    for (size_t i = 0; i < kernel.parameter_count; ++i) {
        if (parameters[i] == nullptr) return invalid_value;
    }
    auto arguments = std::make_shared<Arguments>(copy_arguments(kernel, parameters));
    Function* target = &function;
    operation = {[target, shape, arguments] { return carry_out(*target, shape, *arguments); }, kernel.name};
    return success;
}

} // namespace emu
