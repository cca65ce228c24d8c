// The emulated device's memory: one reserved range of addresses, so that a pointer's kind is known from its value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "../../include/integers.h"

namespace emu {

struct MemoryCounts {
    size_t bytes = 0; // alive, each allocation rounded up as a driver does
    size_t peak = 0;
    size_t allocations = 0;
};

// Whether p is an address of the device at all, allocated or not.
bool in_device_range(const void* p);

// Null if the device's memory does not suffice. Filled with 0xFF: NaN in every float format.
void* device_allocate(size_t bytes);
// False if nothing was allocated there.
bool device_release(void* p);
// Whether [p, p + bytes) lies within one allocation.
bool device_holds(const void* p, size_t bytes);
// Start and size of the allocation that holds p; false if there is none.
bool device_range(const void* p, u64& base, size_t& bytes);
size_t device_free_bytes();
MemoryCounts device_counts();
void device_reset_peak();
void device_release_all();

// With EMU_PROTECT, host code that touches device memory outside these faults.
void open_device_memory();
void close_device_memory();

// Page-locked host memory: asynchronous copies read and write it late.
void* pinned_allocate(size_t bytes);
bool pinned_release(void* p);
bool pinned_holds(const void* p, size_t bytes);
size_t pinned_count();

} // namespace emu
