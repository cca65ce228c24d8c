// Each allocation ends, but for its alignment, at the end of a page, and pages around it cannot be touched: in every
// build a kernel that runs far out of bounds, or uses freed memory, faults at once instead of reading a neighbour.
#include "device_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "../runtime/memory_hooks.h"
#include "../runtime/sanitizer.h"
#include "settings.h"

namespace emu {

namespace {

constexpr size_t page = 4096;
constexpr size_t alignment = 256;
constexpr size_t granule = 512; // what a driver rounds sizes up to

struct Allocation {
    size_t bytes;
    char* first_page;
    size_t pages_bytes; // accessible; a page without access follows
};

struct Heap {
    std::mutex lock;
    char* base = nullptr;
    size_t bytes = 0;
    std::map<char*, Allocation> allocations;    // by address
    std::map<char*, size_t> holes;              // free ranges of pages, by address
    std::map<char*, size_t> pinned;
    MemoryCounts counts;
    bool open = true;
};

Heap& heap() {
    static auto* instance = new Heap;
    return *instance;
}

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

void reserve(Heap& h) {
    h.bytes = round_up(settings().memory_bytes * 2 + (size_t{4} << 30), page);
    void* memory = mmap(nullptr, h.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    h.base = static_cast<char*>(memory);
    h.holes[h.base] = h.bytes;
    h.open = !settings().protect;
    hook_heap_reserved(h.base, h.bytes);
}

void set_access(Heap& h, const Allocation& a) {
    mprotect(a.first_page, a.pages_bytes, h.open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void release(Heap& h, std::map<char*, Allocation>::iterator at) {
    const Allocation a = at->second;
    hook_released(at->first, a.bytes);
    unpoison(a.first_page, a.pages_bytes);
    // New zero pages without access: the memory goes back to the system.
    mmap(a.first_page, a.pages_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    h.counts.bytes -= round_up(a.bytes, granule);
    --h.counts.allocations;
    char* low = a.first_page;
    size_t length = a.pages_bytes + page;
    h.allocations.erase(at);
    const auto next = h.holes.lower_bound(low);
    if (next != h.holes.end() && next->first == low + length) {
        length += next->second;
        h.holes.erase(next);
    }
    const auto after = h.holes.lower_bound(low);
    if (after != h.holes.begin()) {
        const auto before = std::prev(after);
        if (before->first + before->second == low) {
            before->second += length;
            return;
        }
    }
    h.holes[low] = length;
}

const std::pair<char* const, Allocation>* find(Heap& h, const void* p) {
    char* address = static_cast<char*>(const_cast<void*>(p));
    auto at = h.allocations.upper_bound(address);
    if (at == h.allocations.begin()) return nullptr;
    --at;
    return address < at->first + at->second.bytes ? &*at : nullptr;
}

} // namespace

bool in_device_range(const void* p) {
    const Heap& h = heap();
    return h.base != nullptr && p >= h.base && p < h.base + h.bytes;
}

void* device_allocate(size_t bytes) {
    Heap& h = heap();
    const std::lock_guard<std::mutex> guard(h.lock);
    if (h.base == nullptr) reserve(h);
    const size_t charged = round_up(bytes, granule);
    if (charged < bytes || h.counts.bytes + charged > settings().memory_bytes) return nullptr;
    const size_t pages_bytes = round_up(bytes, page);
    auto hole = h.holes.begin();
    while (hole != h.holes.end() && hole->second < pages_bytes + page) ++hole;
    if (hole == h.holes.end()) return nullptr;
    char* first = hole->first;
    const size_t left = hole->second - pages_bytes - page;
    h.holes.erase(hole);
    if (left > 0) h.holes[first + pages_bytes + page] = left;
    const Allocation a{bytes, first, pages_bytes};
    mprotect(first, pages_bytes, PROT_READ | PROT_WRITE);
    std::memset(first, 0xff, pages_bytes);
    char* address = first + pages_bytes - round_up(bytes, alignment);
    poison(first, pages_bytes);
    unpoison(address, bytes);
    h.allocations[address] = a;
    h.counts.bytes += charged;
    ++h.counts.allocations;
    if (h.counts.bytes > h.counts.peak) h.counts.peak = h.counts.bytes;
    hook_allocated(address, bytes);
    if (!h.open) set_access(h, a);
    return address;
}

bool device_release(void* p) {
    Heap& h = heap();
    const std::lock_guard<std::mutex> guard(h.lock);
    const auto at = h.allocations.find(static_cast<char*>(p));
    if (at == h.allocations.end()) return false;
    release(h, at);
    return true;
}

void device_release_all() {
    Heap& h = heap();
    const std::lock_guard<std::mutex> guard(h.lock);
    while (!h.allocations.empty()) release(h, h.allocations.begin());
}

bool device_holds(const void* p, size_t bytes) {
    Heap& h = heap();
    const std::lock_guard<std::mutex> guard(h.lock);
    const auto* at = find(h, p);
    if (at == nullptr) return false;
    return bytes <= static_cast<size_t>(at->first + at->second.bytes - static_cast<const char*>(p));
}

bool device_range(const void* p, u64& base, size_t& bytes) {
    Heap& h = heap();
    const std::lock_guard<std::mutex> guard(h.lock);
    const auto* at = find(h, p);
    if (at == nullptr) return false;
    base = reinterpret_cast<u64>(at->first);
    bytes = at->second.bytes;
    return true;
}

size_t device_free_bytes() {
    Heap& h = heap();
    const std::lock_guard<std::mutex> guard(h.lock);
    return settings().memory_bytes > h.counts.bytes ? settings().memory_bytes - h.counts.bytes : 0;
}

MemoryCounts device_counts() {
    Heap& h = heap();
    const std::lock_guard<std::mutex> guard(h.lock);
    return h.counts;
}

void device_reset_peak() {
    Heap& h = heap();
    const std::lock_guard<std::mutex> guard(h.lock);
    h.counts.peak = h.counts.bytes;
}

void open_device_memory() {
    if (!settings().protect) return;
    Heap& h = heap();
    const std::lock_guard<std::mutex> guard(h.lock);
    h.open = true;
    for (const auto& [address, a] : h.allocations) set_access(h, a);
}

void close_device_memory() {
    if (!settings().protect) return;
    Heap& h = heap();
    const std::lock_guard<std::mutex> guard(h.lock);
    h.open = false;
    for (const auto& [address, a] : h.allocations) set_access(h, a);
}

void* pinned_allocate(size_t bytes) {
    void* p = std::aligned_alloc(page, round_up(bytes, page));
    if (p == nullptr) return nullptr;
    std::memset(p, 0xff, bytes);
    Heap& h = heap();
    const std::lock_guard<std::mutex> guard(h.lock);
    h.pinned[static_cast<char*>(p)] = bytes;
    return p;
}

bool pinned_release(void* p) {
    Heap& h = heap();
    {
        const std::lock_guard<std::mutex> guard(h.lock);
        if (h.pinned.erase(static_cast<char*>(p)) == 0) return false;
    }
    std::free(p);
    return true;
}

bool pinned_holds(const void* p, size_t bytes) {
    Heap& h = heap();
    const std::lock_guard<std::mutex> guard(h.lock);
    char* address = static_cast<char*>(const_cast<void*>(p));
    auto at = h.pinned.upper_bound(address);
    if (at == h.pinned.begin()) return false;
    --at;
    return address + bytes <= at->first + at->second;
}

size_t pinned_count() {
    Heap& h = heap();
    const std::lock_guard<std::mutex> guard(h.lock);
    return h.pinned.size();
}

} // namespace emu
