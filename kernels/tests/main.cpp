// Runs the kernel tests: `kernel-tests [--small | --deep] [family...]`. LIBCUDA is the driver's library (default libcuda.so.1), KERNELS
// the folder of the fatbins (default: none, as the emulated device wants it). Each case prints its worst error as a
// fraction of what is allowed and the hash of its outputs.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "check.h"
#include "device.h"

namespace check {

namespace {

struct Entry {
    std::string name;
    void (*run)(Grid);
};

std::vector<Entry>& families() {
    static std::vector<Entry> entries;
    return entries;
}

int passed = 0;
int failed = 0;

} // namespace

Family::Family(const char* name, void (*run)(Grid)) { families().push_back({name, run}); }

void Case::near(const std::string& what, size_t index, double got, double want, double bound) {
    const double quotient = std::abs(got - want) / bound;
    if (quotient > worst) worst = quotient;
    if (quotient <= 1) return;
    // A NaN ends here as well.
    if (++wrong <= 3) {
        std::printf("  %s[%zu] is %.9g, expected %.9g within %.3g\n", what.c_str(), index, got, want, bound);
    }
}

void Case::expect(bool holds, const std::string& what) {
    if (holds) return;
    if (++wrong <= 3) std::printf("  %s\n", what.c_str());
}

Case::~Case() {
    if (wrong == 0) {
        ++passed;
    } else {
        ++failed;
    }
    std::printf("%s %s: worst %.2f, hash %016llx\n", wrong == 0 ? "ok  " : "FAIL", name.c_str(), worst,
                static_cast<unsigned long long>(digest));
}

int run(int count, char** arguments) {
    Grid grid = Grid::Usual;
    std::vector<std::string> wanted;
    for (int i = 1; i < count; ++i) {
        const std::string argument = arguments[i];
        if (argument == "--deep" || argument == "--small") {
            grid = argument == "--deep" ? Grid::Deep : Grid::Small;
        } else {
            wanted.push_back(argument);
        }
    }
    const char* library = std::getenv("LIBCUDA");
    const char* images = std::getenv("KERNELS");
    device::open(library == nullptr ? "libcuda.so.1" : library, images == nullptr ? "" : images);
    bool any = wanted.empty();
    for (const Entry& family : families()) {
        bool run = wanted.empty();
        for (const std::string& name : wanted) run = run || name == family.name;
        if (!run) continue;
        any = true;
        family.run(grid);
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return any && failed == 0 && passed > 0 ? 0 : 1;
}

} // namespace check

int main(int count, char** arguments) {
    try {
        return check::run(count, arguments);
    } catch (const std::exception& error) {
        std::printf("%s\n", error.what());
        return 2;
    }
}
