// The table of device attributes.
#include "device.h"

#include <string>

#include "settings.h"

namespace emu {

namespace {

struct Attribute {
    int number;
    u32 value;
};

constexpr Attribute table[] = {
    {1, 1024},        // threads per block
    {2, 1024},        {3, 1024},  {4, 64},        // block dimensions
    {5, 0x7fffffff},  {6, 65535}, {7, 65535},     // grid dimensions
    {8, 49152},       // shared memory per block
    {9, 65536},       // constant memory
    {10, 32},         // warp size
    {11, 0x7fffffff}, // pitch
    {12, 65536},      // registers per block
    {13, 1410000},    // clock, kHz
    {14, 512},        // texture alignment
    {15, 1},          // copies overlap with kernels
    {16, 8},          // multiprocessors: few, so that launches sized by them stay small
    {17, 0},          {18, 0},    {19, 1},        {20, 0}, {31, 1}, {32, 1},
    {33, 1},          {34, 0},    {35, 0},
    {36, 1215000},    // memory clock, kHz
    {37, 5120},       // memory bus, bits
    {38, 4194304},    // L2 bytes
    {39, 2048},       // threads per multiprocessor
    {40, 2},          // copy engines
    {41, 1},          {50, 0},
    {75, 8},          {76, 0},    // compute capability
    {78, 1},          {79, 1},    {80, 1},
    {81, 167936},     // shared memory per multiprocessor
    {82, 65536},      // registers per multiprocessor
    {83, 1},          {84, 0},    {85, 0},        {86, 0}, {87, 2}, {88, 0},
    {89, 1},          {90, 1},    {91, 1},        {92, 1}, {93, 1}, {94, 1},
    {95, 0},          // no cooperative launches here
    {97, 166912},     // shared memory per block, opt in
    {98, 1},          {99, 1},    {100, 0},       {101, 0}, {102, 0}, {103, 0},
    {106, 32},        // blocks per multiprocessor
    {107, 0},         {108, 0},   {109, 0},       {110, 0},
    {111, 1024},      // shared memory that the system takes of each block
    {115, 1},         // memory pools
    {119, 0},         {120, 0},
};

constexpr int attributes = 160;

// Read once: launches ask for some of these.
struct Values {
    u32 value[attributes + 1] = {};

    Values() {
        for (const Attribute& entry : table) value[entry.number] = entry.value;
        for (int i = 1; i <= attributes; ++i) {
            value[i] = static_cast<u32>(environment_number(("EMU_ATTRIBUTE_" + std::to_string(i)).c_str(), value[i]));
        }
    }
};

} // namespace

bool attribute_known(int number) { return number >= 1 && number <= attributes; }

u32 attribute(int number) {
    static const Values values;
    return attribute_known(number) ? values.value[number] : 0;
}

} // namespace emu
