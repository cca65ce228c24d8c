// Kernels by name: what a module's symbol table is on a card.
#include <cstring>

#include "runtime.h"

namespace emu {

namespace {
// Filled by constructors of kernel files, which may run before this file's own.
std::vector<KernelEntry>& entries() {
    static auto* list = new std::vector<KernelEntry>;
    return *list;
}
} // namespace

void register_kernel(const KernelEntry& entry) { entries().push_back(entry); }

const std::vector<KernelEntry>& all_kernels() { return entries(); }

const KernelEntry* find_kernel(const char* name) {
    for (const KernelEntry& entry : entries()) {
        if (std::strcmp(entry.name, name) == 0) return &entry;
    }
    return nullptr;
}

} // namespace emu
