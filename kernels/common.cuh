// The rows that kernels and host agree on, and the few functions that every kernel builds on. The host's half
// is `src/device/cuda/abi.rs`, which says what each field means; a test compares the two.
//
// All rows are multiples of eight bytes without holes, so that both compilers lay them out alike. The asserts
// here and in the host's half fail the build where they do not. Addresses are the device's own, as numbers.
//
// No headers are included, so that the offline compiler alone builds it; the tests compile the same files as
// C++.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// One delta, fill or copy. All work that moves bytes is a piece, so one launch serves many commands.
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

// Kinds of a piece. Kinds and flags are never stored: a launch is their whole life.
constexpr u32 PIECE_DENSE = 0;
constexpr u32 PIECE_MASKED = 1;
constexpr u32 PIECE_SPARSE = 2;
constexpr u32 PIECE_FILL = 3;
constexpr u32 PIECE_PICK = 4;

// Consecutive pieces, or a cut of one, for one warp or one block: the unit of ownership of `apply.cu`.
struct PartRow {
    u32 piece_first;
    u32 piece_count;
    u64 begin;
    u64 end;
};
static_assert(sizeof(PartRow) == 24, "PartRow");

// Cuts of a masked piece lie at multiples of this number of elements. That is 16 bytes of the bitmap, and
// whole vectors of sixteen bytes at every width, so two parts share neither.
constexpr u64 MASK_STEPS = 128;

// One chunk of a source to sum up. Chunks are cut from the source's end, so that only the first is shorter.
struct CrcRow {
    u64 source;
    u64 target;
    u32 len;
    u32 flags;
};
static_assert(sizeof(CrcRow) == 24, "CrcRow");

// Marks of a source's first and last chunk: initial ones are added to the first, the result inverted after
// the last.
constexpr u32 CRC_FIRST = 1;
constexpr u32 CRC_LAST = 2;
constexpr u32 CRC_CHUNK_LEN = 8 << 10;

// A source of several chunks, whose remainders become one checksum.
struct CombineRow {
    u64 remainders;
    u64 target;
    u32 count;
    u32 reserved;
};
static_assert(sizeof(CombineRow) == 24, "CombineRow");

// Two ranges, or cuts of longer ones, to compare.
struct DiffRow {
    u64 left;
    u64 right;
    u64 target;
    u32 len;
    u32 width;
};
static_assert(sizeof(DiffRow) == 32, "DiffRow");

// A bitmap, or a cut of one, whose set bits are counted and numbered.
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

// The numbers of one bitmap's rows, to be summed up.
struct ScanRow {
    u64 numbers;
    u64 target;
    u32 count;
    u32 reserved;
};
static_assert(sizeof(ScanRow) == 24, "ScanRow");

// Indices, or a cut of a longer list, to be proven.
struct IndexRow {
    u64 indices;
    u64 seen;
    u64 target;
    u64 bound;
    u64 count;
};
static_assert(sizeof(IndexRow) == 40, "IndexRow");

// Chunks to digest, one after the other, and the key to do it with.
struct DigestRow {
    u64 source;
    u64 key;
    u64 target;
    u32 len;
    u32 reserved;
};
static_assert(sizeof(DigestRow) == 32, "DigestRow");

constexpr u32 DIGEST_CHUNK_LEN = 64 << 10;
constexpr u32 DIGEST_KEY_LEN = 4384;

// The verdict on indices, a sum of these.
constexpr u32 OUT_OF_BOUNDS = 1;
constexpr u32 TWICE = 2;

// The mask of all lanes of a warp. Every shuffle uses it, so every lane must reach every shuffle.
constexpr u32 EVERYONE = ~0u;

// Sixteen bytes, the widest access that a thread makes: with it a warp takes 512 bytes at a time.
struct __align__(16) Bytes16 {
    u32 word[4];
};

// An address of a row as a pointer.
template <typename T>
__device__ __forceinline__ T *at(u64 address) {
    return reinterpret_cast<T *>(address);
}

// The smaller of two lengths.
__device__ __forceinline__ u64 least(u64 one, u64 other) {
    return one < other ? one : other;
}

// Whether each of the addresses is a multiple of `to`, a power of two. An access off its boundary ends the
// launch.
__device__ __forceinline__ bool aligned(u64 one, u64 other, u64 to) {
    return ((one | other) & (to - 1)) == 0;
}
