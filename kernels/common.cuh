// The rows shared by kernels and host, and the few functions that every kernel uses. The host's declarations
// are in `src/device/cuda/abi.rs`, which documents each field; a test compares the two.
//
// All rows are multiples of eight bytes without gaps, so that both compilers use the same layout. The asserts
// here and on the host's side fail the build otherwise. Addresses are device addresses, as numbers.
//
// No headers are included, so that the offline compiler alone can build the kernels; the tests compile the
// same files as C++.

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

// Kinds of a piece. Kinds and flags are never stored: they live only as long as a launch.
constexpr u32 PIECE_DENSE = 0;
constexpr u32 PIECE_MASKED = 1;
constexpr u32 PIECE_SPARSE = 2;
constexpr u32 PIECE_FILL = 3;
constexpr u32 PIECE_PICK = 4;

// Consecutive pieces, or a section of one, for one warp or one block: the unit of ownership in `apply.cu`.
struct PartRow {
    u32 piece_first;
    u32 piece_count;
    u64 begin;
    u64 end;
};
static_assert(sizeof(PartRow) == 24, "PartRow");

// Masked pieces are split at multiples of this number of elements. That is 16 bytes of the bitmap, and whole
// 16-byte vectors at every width, so two parts share neither.
constexpr u64 MASK_STEPS = 128;

// One chunk of a source to checksum. Chunks are split from the source's end, so that only the first is
// shorter.
struct CrcRow {
    u64 source;
    u64 target;
    u32 len;
    u32 flags;
};
static_assert(sizeof(CrcRow) == 24, "CrcRow");

// Flags for a source's first and last chunk: the initial ones are added to the first, and the result is
// inverted after the last.
constexpr u32 CRC_FIRST = 1;
constexpr u32 CRC_LAST = 2;
constexpr u32 CRC_CHUNK_LEN = 8 << 10;

// A source of several chunks, whose remainders are combined into one checksum.
struct CombineRow {
    u64 remainders;
    u64 target;
    u32 count;
    u32 reserved;
};
static_assert(sizeof(CombineRow) == 24, "CombineRow");

// Two ranges, or sections of longer ones, to compare.
struct DiffRow {
    u64 left;
    u64 right;
    u64 target;
    u32 len;
    u32 width;
};
static_assert(sizeof(DiffRow) == 32, "DiffRow");

// A bitmap, or a section of one, whose set bits are counted and numbered.
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

// The counts of one bitmap's rows, to be summed.
struct ScanRow {
    u64 numbers;
    u64 target;
    u32 count;
    u32 reserved;
};
static_assert(sizeof(ScanRow) == 24, "ScanRow");

// Indices, or a section of a longer list, to be checked.
struct IndexRow {
    u64 indices;
    u64 seen;
    u64 target;
    u64 bound;
    u64 count;
};
static_assert(sizeof(IndexRow) == 40, "IndexRow");

// Consecutive chunks to digest, and the key.
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

// The flags of the verdict on indices.
constexpr u32 OUT_OF_BOUNDS = 1;
constexpr u32 TWICE = 2;

// The mask of all lanes of a warp. Every shuffle uses it, so every lane must reach every shuffle.
constexpr u32 FULL_WARP = ~0u;

// Sixteen bytes, the widest access of a thread: a warp accesses 512 bytes at a time.
struct __align__(16) Bytes16 {
    u32 word[4];
};

// Converts an address in a row to a pointer.
template <typename T>
__device__ __forceinline__ T *ptr_at(u64 address) {
    return reinterpret_cast<T *>(address);
}

// Returns the smaller of two lengths.
__device__ __forceinline__ u64 min_len(u64 one, u64 other) {
    return one < other ? one : other;
}

// Returns whether both addresses are multiples of `to`, a power of two. A misaligned access ends the launch.
__device__ __forceinline__ bool aligned(u64 one, u64 other, u64 to) {
    return ((one | other) & (to - 1)) == 0;
}
