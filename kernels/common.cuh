// What the kernels and the host agree on, and what every kernel builds on. The host's half, with what each
// field means, is `src/device/cuda/abi.rs`; a test compares the two.
//
// No headers, so that the offline compiler alone builds it; the tests compile the same files as C++.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(16) PieceRow {
    u64 target;
    u64 payload;
    u64 values;
    u64 steps;
    u32 kind;
    u32 width;
    u64 reserved;
};
static_assert(sizeof(PieceRow) == 48, "PieceRow");

constexpr u32 PIECE_DENSE = 0;
constexpr u32 PIECE_MASKED = 1;
constexpr u32 PIECE_SPARSE = 2;
constexpr u32 PIECE_FILL = 3;
constexpr u32 PIECE_PICK = 4;

struct PartRow {
    u32 piece_first;
    u32 piece_count;
    u64 begin;
    u64 end;
};
static_assert(sizeof(PartRow) == 24, "PartRow");

constexpr u64 MASK_STEPS = 128;

struct CrcRow {
    u64 source;
    u64 target;
    u32 len;
    u32 flags;
};
static_assert(sizeof(CrcRow) == 24, "CrcRow");

constexpr u32 CRC_FIRST = 1;
constexpr u32 CRC_LAST = 2;
constexpr u32 CRC_CHUNK_LEN = 64 << 10;

struct CombineRow {
    u64 remainders;
    u64 target;
    u32 count;
    u32 reserved;
};
static_assert(sizeof(CombineRow) == 24, "CombineRow");

struct DiffRow {
    u64 left;
    u64 right;
    u64 target;
    u32 len;
    u32 width;
};
static_assert(sizeof(DiffRow) == 32, "DiffRow");

struct SelectRow {
    u64 bits;
    u64 target;
    u64 before;
    u32 len;
    u32 first;
    u32 room;
    u32 reserved;
};
static_assert(sizeof(SelectRow) == 40, "SelectRow");

struct ScanRow {
    u64 numbers;
    u64 target;
    u32 count;
    u32 reserved;
};
static_assert(sizeof(ScanRow) == 24, "ScanRow");

struct IndexRow {
    u64 indices;
    u64 seen;
    u64 target;
    u64 bound;
    u64 count;
};
static_assert(sizeof(IndexRow) == 40, "IndexRow");

constexpr u32 OUT_OF_BOUNDS = 1;
constexpr u32 TWICE = 2;

// All lanes of a warp.
constexpr u32 EVERYONE = ~0u;

// Sixteen bytes, the widest access that a thread makes.
struct __align__(16) Bytes16 {
    u32 word[4];
};

// An address of a row as a pointer.
template <typename T>
__device__ __forceinline__ T *at(u64 address) {
    return reinterpret_cast<T *>(address);
}

__device__ __forceinline__ u64 least(u64 one, u64 other) {
    return one < other ? one : other;
}

// Whether each of the addresses is a multiple of `to`, a power of two.
__device__ __forceinline__ bool aligned(u64 one, u64 other, u64 to) {
    return ((one | other) & (to - 1)) == 0;
}
