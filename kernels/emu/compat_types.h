// The integer names of compat.cuh, for the emulator's own files, which are not kernels and do not include it.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef float f32;
