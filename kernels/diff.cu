// Finds the elements that differ between two ranges: one bit per element.
//
// Grid: a block of 256 threads per row. The launcher splits long ranges into rows of up to 64 KiB, so that
// enough blocks share them.
//
// Owner: each thread writes whole bytes of the bitmap, and rows share none. No byte therefore needs a
// read-modify-write or an atomic.
//
// Why the result is deterministic: each bit depends only on its own element. The kernels of `select.cu`
// number the differing elements afterwards. An earlier kernel, which recorded the first difference,
// serialized its threads at one atomic: 3.2 ms if all elements differed, 44 us after the fix.
//
// Checked before: all ranges are within their memory; lengths are whole elements; all rows of a range except
// the last end at a multiple of eight elements.
//
// Bytes moved: both ranges are read once, with four vectors of sixteen bytes of each range per thread in
// flight, and the bitmap is written. On an H200, with 1 % changed, this reaches 92 % of a kernel that only
// reads. Ranges that are not aligned to sixteen bytes are read by elements. The bitmap is in the GPU's own
// memory and is copied to the host: storing bits one by one over the bus took longer than the comparison.

#include "common.cuh"

constexpr u32 THREADS = 256;

// Returns one bit for each of the four bytes, 1 if the byte is not 0.
__device__ __forceinline__ u32 bytes_set(u32 word) {
    // Adding 0x7f to a byte's lower seven bits carries into its highest bit if one of them is set, and never
    // further.
    const u32 high = (word | ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu)) & 0x80808080u;
    // Moves bits 0, 8, 16 and 24 to 24, 25, 26 and 27, where no other partial product lands.
    return (high >> 7) * 0x01020408u >> 24 & 15;
}

// Returns one bit for each element of a vector, 1 if the elements differ. Lowest bit first, as in every
// bitmap of the format.
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

// Returns whether an element differs, at any alignment: compares single bytes, because the device rejects
// misaligned wider loads.
template <u32 WIDTH>
__device__ __forceinline__ bool element_differs(const u8 *left, const u8 *right) {
    u32 different = 0;
#pragma unroll
    for (u32 byte = 0; byte < WIDTH; byte++) {
        different |= left[byte] ^ right[byte];
    }
    return different != 0;
}

// Writes the bits of one vector per lane. Lanes that share a byte send their bits to the first of them, which
// writes the byte, so each byte of the bitmap has one writer.
//
// The whole warp takes part in the shuffles, including lanes beyond `vectors`, whose bits are 0.
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
    // Each round doubles the number of bits that the first lane of a byte has gathered.
#pragma unroll
    for (u32 have = ELEMENTS; have < 8; have *= 2) {
        bits |= __shfl_down_sync(FULL_WARP, bits, have / ELEMENTS) << have;
    }
    constexpr u32 LANES = 8 / ELEMENTS == 0 ? 1 : 8 / ELEMENTS;
    if (vector % LANES == 0 && vector < vectors) {
        bitmap[vector / LANES] = u8(bits);
    }
}

// Writes byte `first` and all later bytes of the bitmap, element by element; a thread fills whole bytes.
//
// Bits beyond the last element are 0, so the bitmap's last byte does not depend on its old contents.
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

// Writes the bits of one row: whole vectors if both ranges are aligned, the rest by elements.
template <u32 WIDTH>
__device__ void diff_range(const DiffRow &row) {
    const u8 *left = ptr_at<u8>(row.left), *right = ptr_at<u8>(row.right);
    u8 *bitmap = ptr_at<u8>(row.target);
    const u64 count = row.len / WIDTH;
    if (!aligned(row.left, row.right, 16)) {
        diff_elements<WIDTH>(left, right, bitmap, 0, count);
        return;
    }
    // Vectors that fill whole bytes of the bitmap; at most seven elements or fifteen bytes remain.
    const u64 vectors = count / 8 * 8 * WIDTH / 16;
    const Bytes16 *lefts = ptr_at<Bytes16>(row.left), *rights = ptr_at<Bytes16>(row.right);
    constexpr u32 AT_ONCE = 4;
    // The bound is the same for the whole block, so that every lane reaches the shuffles in `write_bits`.
    for (u64 begin = 0; begin < vectors; begin += AT_ONCE * THREADS) {
        u32 bits[AT_ONCE];
        Bytes16 one[AT_ONCE], other[AT_ONCE];
        // All loads first: a thread has eight vectors in flight before the first comparison.
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

// A block per row. The width is a template argument, so that comparing a vector needs no loop over its
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
