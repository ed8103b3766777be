// The elements that differ between two ranges: one bit an element.
//
// Grid: a block of 256 threads a row. The launcher cuts long ranges into rows of up to 64 KiB, so that enough
// blocks share them.
//
// Owner: each thread writes whole bytes of the bitmap, and rows share none. So no byte is read, changed and
// written back, and no atomic is needed.
//
// Why the result is deterministic: each bit depends on its own element and on nothing else. Which elements
// differ is numbered afterwards by the kernels of `select.cu`. An earlier kernel, which noted the first
// difference, queued its threads at one atomic: 3.2 ms where all elements differ, 44 us after that was
// mended.
//
// Checked before: all ranges lie within their memory; lengths are whole elements; rows but the last of a
// range end after a multiple of eight elements.
//
// Bytes moved: both ranges are read once, with four vectors of sixteen bytes of each a thread under way at a
// time, and the bitmap is written. On an H200, with 1 % changed, that reaches 92 % of a kernel that only
// reads. Ranges that are not on boundaries of sixteen bytes are read by elements. The bitmap lies in the
// GPU's own memory and is copied to the host: bits stored one by one over the bus took longer than the
// comparison.

#include "common.cuh"

constexpr u32 THREADS = 256;

// One bit for each of the four bytes, 1 where it is not 0.
__device__ __forceinline__ u32 bytes_set(u32 word) {
    // Adding 0x7f to a byte's lower seven bits carries into its highest bit if one of them is set, and never
    // further.
    const u32 high = (word | ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu)) & 0x80808080u;
    // Bits 0, 8, 16 and 24 go to 24, 25, 26 and 27; no other product lands there.
    return (high >> 7) * 0x01020408u >> 24 & 15;
}

// One bit for each element of a vector, 1 where the two differ. Lowest bit first, as in every bitmap of the
// format.
template <u32 WIDTH>
__device__ __forceinline__ u32 differing(const Bytes16 &left, const Bytes16 &right) {
    u32 word[4], bits = 0;
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        word[k] = left.word[k] ^ right.word[k];
    }
    switch (WIDTH) {
    case 1:
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            bits |= bytes_set(word[k]) << (4 * k);
        }
        return bits;
    case 2:
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            bits |= (u32((word[k] & 0xffffu) != 0) | u32(word[k] >> 16 != 0) << 1) << (2 * k);
        }
        return bits;
    case 4:
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            bits |= u32(word[k] != 0) << k;
        }
        return bits;
    case 8: return u32((word[0] | word[1]) != 0) | u32((word[2] | word[3]) != 0) << 1;
    default: return u32((word[0] | word[1] | word[2] | word[3]) != 0);
    }
}

// Whether one element differs, at any alignment: by single bytes, as a wider load may be refused.
template <u32 WIDTH>
__device__ __forceinline__ bool element_differs(const u8 *left, const u8 *right) {
    u32 different = 0;
#pragma unroll
    for (u32 byte = 0; byte < WIDTH; byte++) {
        different |= left[byte] ^ right[byte];
    }
    return different != 0;
}

// Writes the bits of one vector a lane. Lanes that share a byte send their bits to the first of them, which
// writes the byte: a byte of the bitmap has one writer.
//
// The whole warp takes part in the shuffles, also lanes past `vectors`, whose bits are 0.
template <u32 WIDTH>
__device__ __forceinline__ void write_bits(u8 *bitmap, u64 vector, u64 vectors, u32 bits) {
    constexpr u32 ELEMENTS = 16 / WIDTH;
    // A vector of sixteen elements fills two bytes of the bitmap by itself.
    if (ELEMENTS == 16) {
        if (vector < vectors) {
            bitmap[2 * vector] = u8(bits);
            bitmap[2 * vector + 1] = u8(bits >> 8);
        }
        return;
    }
    // Each round doubles how many bits the first lane of a byte has gathered.
#pragma unroll
    for (u32 have = ELEMENTS; have < 8; have *= 2) {
        bits |= __shfl_down_sync(EVERYONE, bits, have / ELEMENTS) << have;
    }
    constexpr u32 LANES = 8 / ELEMENTS == 0 ? 1 : 8 / ELEMENTS;
    if (vector % LANES == 0 && vector < vectors) {
        bitmap[vector / LANES] = u8(bits);
    }
}

// Bytes `first` and later of the bitmap, element by element; a thread fills whole bytes.
//
// Bits past the last element stay 0, so the bitmap's last byte is the same whatever lay there before.
template <u32 WIDTH>
__device__ void diff_elements(const u8 *left, const u8 *right, u8 *bitmap, u64 first, u64 count) {
    for (u64 byte = first + threadIdx.x; 8 * byte < count; byte += THREADS) {
        u32 bits = 0;
        for (u32 bit = 0; bit < 8 && 8 * byte + bit < count; bit++) {
            const u64 begin = (8 * byte + bit) * WIDTH;
            bits |= u32(element_differs<WIDTH>(left + begin, right + begin)) << bit;
        }
        bitmap[byte] = u8(bits);
    }
}

// The bits of one row: whole vectors where both ranges lie on boundaries, the rest by elements.
template <u32 WIDTH>
__device__ void diff_range(const DiffRow &row) {
    const u8 *left = at<u8>(row.left), *right = at<u8>(row.right);
    u8 *bitmap = at<u8>(row.target);
    const u64 count = row.len / WIDTH;
    if (!aligned(row.left, row.right, 16)) {
        diff_elements<WIDTH>(left, right, bitmap, 0, count);
        return;
    }
    // Vectors that fill whole bytes of the bitmap; at most seven elements or fifteen bytes are left.
    const u64 vectors = count / 8 * 8 * WIDTH / 16;
    const Bytes16 *lefts = at<Bytes16>(row.left), *rights = at<Bytes16>(row.right);
    constexpr u32 AT_ONCE = 4;
    // The bound is the same for the whole block, so that every lane comes to the shuffles in `write_bits`.
    for (u64 begin = 0; begin < vectors; begin += AT_ONCE * THREADS) {
        u32 bits[AT_ONCE];
        Bytes16 one[AT_ONCE], other[AT_ONCE];
        // All loads first: eight vectors of a thread are under way before the first comparison.
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++) {
            const u64 vector = begin + k * THREADS + threadIdx.x;
            if (vector < vectors) {
                one[k] = lefts[vector];
                other[k] = rights[vector];
            }
        }
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++) {
            const u64 vector = begin + k * THREADS + threadIdx.x;
            bits[k] = vector < vectors ? differing<WIDTH>(one[k], other[k]) : 0;
            write_bits<WIDTH>(bitmap, vector, vectors, bits[k]);
        }
    }
    diff_elements<WIDTH>(left, right, bitmap, vectors * 16 / WIDTH / 8, count);
}

// A block a row. The width is a template argument, so that comparing a vector takes no loop over its
// elements.
extern "C" __global__ void __launch_bounds__(256) diff(const DiffRow *rows, u32 row_count) {
    const DiffRow row = rows[blockIdx.x];
    switch (row.width) {
    case 1: return diff_range<1>(row);
    case 2: return diff_range<2>(row);
    case 4: return diff_range<4>(row);
    case 8: return diff_range<8>(row);
    default: return diff_range<16>(row);
    }
}
