// See device.h.
#include "device.h"

#include <dlfcn.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>

namespace device {

namespace {

struct Driver {
    int (*init)(unsigned);
    int (*device_get)(int*, int);
    int (*context_retain)(void**, int);
    int (*context_set)(void*);
    int (*synchronize)();
    int (*module_load)(void**, const void*);
    int (*module_function)(void**, void*, const char*);
    int (*allocate)(uint64_t*, size_t);
    int (*release)(uint64_t);
    int (*upload)(uint64_t, const void*, size_t);
    int (*download)(void*, uint64_t, size_t);
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
};

Driver driver;
std::vector<void*> modules;
std::map<std::string, void*> functions;

void check(int status, const std::string& what) {
    if (status != 0) throw std::runtime_error(what + " failed with status " + std::to_string(status));
}

template <typename Function> void find(void* library, Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) throw std::runtime_error(std::string("the driver has no `") + name + "`");
}

void load(const std::string& image) {
    void* module = nullptr;
    check(driver.module_load(&module, image.c_str()), "cuModuleLoadData");
    modules.push_back(module);
}

} // namespace

void open(const std::string& name, const std::string& images) {
    void* library = dlopen(name.c_str(), RTLD_NOW);
    if (library == nullptr) throw std::runtime_error("cannot open `" + name + "`: " + dlerror());
    find(library, driver.init, "cuInit");
    find(library, driver.device_get, "cuDeviceGet");
    find(library, driver.context_retain, "cuDevicePrimaryCtxRetain");
    find(library, driver.context_set, "cuCtxSetCurrent");
    find(library, driver.synchronize, "cuCtxSynchronize");
    find(library, driver.module_load, "cuModuleLoadData");
    find(library, driver.module_function, "cuModuleGetFunction");
    find(library, driver.allocate, "cuMemAlloc_v2");
    find(library, driver.release, "cuMemFree_v2");
    find(library, driver.upload, "cuMemcpyHtoD_v2");
    find(library, driver.download, "cuMemcpyDtoH_v2");
    find(library, driver.launch, "cuLaunchKernel");
    check(driver.init(0), "cuInit");
    int card = 0;
    check(driver.device_get(&card, 0), "cuDeviceGet");
    void* context = nullptr;
    check(driver.context_retain(&context, card), "cuDevicePrimaryCtxRetain");
    check(driver.context_set(context), "cuCtxSetCurrent");
    // The emulated device has the kernels in itself and takes any image that says so.
    if (images.empty()) return load("EMU");
    for (const auto& entry : std::filesystem::directory_iterator(images)) {
        if (entry.path().extension() != ".fatbin") continue;
        std::ifstream file(entry.path(), std::ios::binary);
        load(std::string(std::istreambuf_iterator<char>(file), {}));
    }
    if (modules.empty()) throw std::runtime_error("no fatbin in `" + images + "`; `make fatbin OUT=" + images + "` makes them");
}

void* allocate(size_t bytes) {
    uint64_t place = 0;
    check(driver.allocate(&place, bytes), "cuMemAlloc of " + std::to_string(bytes) + " bytes");
    return reinterpret_cast<void*>(place);
}

void release(void* p) {
    // In a destructor after a failed launch this fails too: the first error is the one that counts.
    driver.release(reinterpret_cast<uint64_t>(p));
}

void upload(void* to, const void* from, size_t bytes) {
    check(driver.upload(reinterpret_cast<uint64_t>(to), from, bytes), "cuMemcpyHtoD");
}

void download(void* to, const void* from, size_t bytes) {
    check(driver.synchronize(), "cuCtxSynchronize");
    check(driver.download(to, reinterpret_cast<uint64_t>(from), bytes), "cuMemcpyDtoH");
}

void launch_raw(const std::string& kernel, Grid grid, unsigned block, void** arguments) {
    void*& function = functions[kernel];
    for (size_t i = 0; i < modules.size() && function == nullptr; ++i) {
        if (driver.module_function(&function, modules[i], kernel.c_str()) != 0) function = nullptr;
    }
    if (function == nullptr) throw std::runtime_error("no image has a kernel `" + kernel + "`");
    check(driver.launch(function, grid.x, grid.y, grid.z, block, 1, 1, 0, nullptr, arguments, nullptr),
          "launching `" + kernel + "`");
}

} // namespace device
