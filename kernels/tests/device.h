// The little of the CUDA driver's API that the kernel tests need, had by dlopen: so one test program runs on a card with
// the real driver and on any machine with the emulated device of ../emu.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace device {

struct Grid {
    unsigned x = 1, y = 1, z = 1;
};

// Opens the driver's library and loads every fatbin of a folder; without a folder, the kernels that the emulated device
// has in itself. Throws std::runtime_error with what to do.
void open(const std::string& library, const std::string& images);

void* allocate(size_t bytes);
void release(void* p);
void upload(void* to, const void* from, size_t bytes);
void download(void* to, const void* from, size_t bytes);
void launch_raw(const std::string& kernel, Grid grid, unsigned block, void** arguments);

// Device memory with the content of a vector.
template <typename T> class Buffer {
  public:
    explicit Buffer(const std::vector<T>& values) : count(values.size()), place(allocate(bytes())) {
        if (count > 0) upload(place, values.data(), count * sizeof(T));
    }
    // Not written: a kernel that reads it before it writes it is wrong.
    explicit Buffer(size_t count) : count(count), place(allocate(bytes())) {}
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { release(place); }

    T* get() const { return static_cast<T*>(place); }
    std::vector<T> read() const {
        std::vector<T> values(count);
        if (count > 0) download(values.data(), place, count * sizeof(T));
        return values;
    }
    void write(const std::vector<T>& values) {
        if (!values.empty()) upload(place, values.data(), values.size() * sizeof(T));
    }

  private:
    size_t bytes() const { return count == 0 ? 1 : count * sizeof(T); }
    size_t count;
    void* place;
};

template <typename T> T* argument(const Buffer<T>& buffer) { return buffer.get(); }
template <typename T, typename = std::enable_if_t<std::is_scalar_v<T>>> T argument(T value) { return value; }

// Launches a kernel with arguments of exactly the types of its parameters, and waits for nothing.
template <typename... Arguments>
void launch(const std::string& kernel, Grid grid, unsigned block, const Arguments&... arguments) {
    auto values = std::make_tuple(argument(arguments)...);
    std::apply(
        [&](auto&... value) {
            void* pointers[] = {const_cast<void*>(static_cast<const void*>(&value))...};
            launch_raw(kernel, grid, block, pointers);
        },
        values);
}

} // namespace device
