// Merges deltas, fills and copies, the pieces of a table, into page memory.
//
// Grid: one warp (`apply_by_warp`, four warps per block) or one block of 256 threads (`apply_by_block`)
// processes each part. A part is a run of consecutive pieces, or a section of one long piece. Both kernels
// use the same template and differ only in the number of threads. The launcher assigns a part to a warp if it
// moves up to 16 KiB: on an H200, 65,536 pieces of 16 KiB took 541 us with warps and 687 us with blocks,
// while a device copy of the same bytes took 509 us. A block waits longer for its rows than it copies.
//
// Owner: every byte of a target belongs to one part of a launch. Overlapping pieces are in one part, which
// applies them in order with a barrier between two, or in consecutive launches. Within a piece, each thread
// writes bytes of its own, because the indices of a sparse piece are all different.
//
// Why the result is deterministic: no two threads write the same byte between two barriers, and no kernel
// uses an atomic. The only read-modify-write covers sixteen bytes at a time, and only where all sixteen
// belong to the part. A shorter access widened to sixteen bytes could write back a neighbor's old bytes.
//
// Checked before: all ranges are within their memory; indices are below the end of the range and different;
// no payload is in a range that the same launch writes.
//
// Bytes moved: a dense piece moves twice its length, a fill its length. A masked piece moves its bitmap; for
// every sixteen bytes with a bit set it moves their values, their old contents unless all bits are set, and
// their new contents. A sparse piece moves four bytes per index, the values, and at worst one sector of 32
// bytes read and written for each element. A pick moves the same, except that the sector is only read.
//
// Measured on an H100, relative to a device copy in the same run: a dense merge of 1 GiB reaches 95 %, a
// masked one with half of the 16-bit elements set 98 % of the bytes accessed, and a gather of 16 KiB pieces
// 95 %.

#include "common.cuh"

// Synchronizes the `THREADS` threads, one warp or one block, that work on one part.
//
// Afterwards, each of them sees the writes of the others. A piece of a part may overlap the one before it, so
// without the barrier an old piece could overwrite a newer one.
template <u32 THREADS>
__device__ __forceinline__ void sync_owner() {
    if (THREADS == 32) {
        __syncwarp();
    } else {
        __syncthreads();
    }
}

// Copies vectors of sixteen bytes; both sides must be aligned.
//
// Adjacent threads copy adjacent vectors, so a warp reads 512 bytes in one access. A thread has four loads in
// flight before its first store. With one at a time, memory latency rather than bandwidth would limit the
// speed.
template <u32 THREADS>
__device__ __forceinline__ void copy_vectors(Bytes16 *target, const Bytes16 *source, u64 count, u32 thread) {
    u64 i = thread;
    for (; i + 3 * THREADS < count; i += 4 * THREADS) {
        Bytes16 moved[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            moved[k] = source[i + k * THREADS];
        }
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            target[i + k * THREADS] = moved[k];
        }
    }
    // The last vectors, fewer than four per thread.
    for (; i < count; i += THREADS) {
        target[i] = source[i];
    }
}

// Returns sixteen bytes that begin `WORDS` words and `bits` bits after the start of `low`, and end within
// `high`.
//
// `WORDS` is a template argument, so that the index into `word` is a compile-time constant. A run-time index
// would move the array from registers to local memory.
template <u32 WORDS>
__device__ __forceinline__ Bytes16 shifted(const Bytes16 &low, const Bytes16 &high, u32 bits) {
    const u32 word[8] = {low.word[0],  low.word[1],  low.word[2],  low.word[3],
                         high.word[0], high.word[1], high.word[2], high.word[3]};
    Bytes16 result;
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        result.word[k] = __funnelshift_r(word[k + WORDS], word[k + WORDS + 1], bits);
    }
    return result;
}

// Copies to vectors `first` to `end` of the target: vector i is built from vectors i and i + 1 of the source.
//
// The target is aligned and the source is not. Reading whole vectors of the source and shifting them keeps
// every access sixteen bytes wide. Each vector is read twice, but by adjacent threads at the same time, so
// the cache serves the second read.
template <u32 THREADS, u32 WORDS>
__device__ __forceinline__ void copy_shifted(Bytes16 *target, const Bytes16 *source, u64 first, u64 end, u32 bits, u32 thread) {
    u64 i = first + thread;
    for (; i + THREADS < end; i += 2 * THREADS) {
        const Bytes16 low = source[i], high = source[i + 1];
        const Bytes16 next_low = source[i + THREADS], next_high = source[i + THREADS + 1];
        target[i] = shifted<WORDS>(low, high, bits);
        target[i + THREADS] = shifted<WORDS>(next_low, next_high, bits);
    }
    if (i < end) {
        target[i] = shifted<WORDS>(source[i], source[i + 1], bits);
    }
}

// Copies bytes of any alignment. Vectors are aligned to the target, because a store that straddles two
// vectors would write bytes that another part may own. Up to fifteen bytes before the first boundary (the
// head) and after the last one (the tail) are copied one per thread.
template <u32 THREADS>
__device__ __forceinline__ void copy_bytes(u8 *target, const u8 *source, u64 len, u32 thread) {
    const u32 head = min_len(-u64(target) & 15, len);
    if (thread < head) {
        target[thread] = source[thread];
    }
    target += head;
    source += head;
    len -= head;
    const u64 count = len / 16;
    const u32 tail = len & 15;
    if (thread < tail) {
        target[16 * count + thread] = source[16 * count + thread];
    }
    Bytes16 *vectors = reinterpret_cast<Bytes16 *>(target);
    const u32 shift = u64(source) & 15;
    // Both sides have the same alignment: no shift is needed.
    if (shift == 0) {
        copy_vectors<THREADS>(vectors, reinterpret_cast<const Bytes16 *>(source), count, thread);
        return;
    }
    if (count == 0) {
        return;
    }
    // Only whole vectors of the source are read, and a vector that extends beyond the range may extend beyond
    // the memory. Such vectors are copied as single bytes: the first one if fewer than `shift` bytes precede
    // it, the last one if too few bytes follow it.
    const u64 first = head < shift ? 1 : 0;
    const u64 end = tail + shift < 16 ? count - 1 : count;
    if (first == 1 && thread < 16) {
        target[thread] = source[thread];
    }
    if (end < count && thread < 16) {
        target[16 * end + thread] = source[16 * end + thread];
    }
    const Bytes16 *around = reinterpret_cast<const Bytes16 *>(source - shift);
    // A shift by whole words is a template argument; the rest is a funnel shift by `bits`.
    const u32 bits = 8 * (shift & 3);
    switch (shift / 4) {
    case 0: return copy_shifted<THREADS, 0>(vectors, around, first, end, bits, thread);
    case 1: return copy_shifted<THREADS, 1>(vectors, around, first, end, bits, thread);
    case 2: return copy_shifted<THREADS, 2>(vectors, around, first, end, bits, thread);
    default: return copy_shifted<THREADS, 3>(vectors, around, first, end, bits, thread);
    }
}

// Returns byte `at` of the infinite repetition of a sixteen-byte pattern.
__device__ __forceinline__ u8 pattern_byte(u64 low, u64 high, u64 at) {
    return (at & 8 ? high : low) >> (8 * (at & 7));
}

// Fills `begin` to `end` with the pattern, which repeats from byte 0 of the *piece* rather than of the part.
// The bytes therefore do not depend on where the launcher split the piece. Every element width divides
// sixteen, so a sixteen-byte pattern serves all widths.
template <u32 THREADS>
__device__ __forceinline__ void fill(u8 *target, u64 low, u64 high, u64 begin, u64 end, u32 thread) {
    const u64 head = min_len(-u64(target + begin) & 15, end - begin);
    if (thread < head) {
        target[begin + thread] = pattern_byte(low, high, begin + thread);
    }
    begin += head;
    const u64 count = (end - begin) / 16;
    const u64 rest = begin + 16 * count;
    if (rest + thread < end) {
        target[rest + thread] = pattern_byte(low, high, rest + thread);
    }
    // The pattern as seen from an aligned address. It is the same for every vector, because vectors are
    // sixteen bytes apart.
    u64 turned[2] = {0, 0};
#pragma unroll
    for (u32 byte = 0; byte < 16; byte++) {
        turned[byte / 8] |= u64(pattern_byte(low, high, begin + byte)) << (8 * (byte % 8));
    }
    const Bytes16 tile = {u32(turned[0]), u32(turned[0] >> 32), u32(turned[1]), u32(turned[1] >> 32)};
    Bytes16 *vectors = reinterpret_cast<Bytes16 *>(target + begin);
    for (u64 i = thread; i < count; i += THREADS) {
        vectors[i] = tile;
    }
}

// Copies with one load and one store of the width of `T`.
template <typename T>
__device__ __forceinline__ void copy_as(u8 *target, const u8 *source) {
    *reinterpret_cast<T *>(target) = *reinterpret_cast<const T *>(source);
}

// Copies an element of any alignment. A misaligned element is copied byte by byte, because the device rejects
// misaligned accesses. No byte outside the element is accessed, because it may belong to another thread.
template <u32 WIDTH>
__device__ __forceinline__ void copy_element(u8 *target, const u8 *source) {
    if (!aligned(u64(target), u64(source), WIDTH)) {
#pragma unroll
        for (u32 byte = 0; byte < WIDTH; byte++) {
            target[byte] = source[byte];
        }
        return;
    }
    switch (WIDTH) {
    case 1: return copy_as<u8>(target, source);
    case 2: return copy_as<u16>(target, source);
    case 4: return copy_as<u32>(target, source);
    case 8: return copy_as<u64>(target, source);
    default: return copy_as<Bytes16>(target, source);
    }
}

// Returns 32 bits of a bitmap starting at bit `first`, a multiple of 32. Bits from `end` on are 0.
//
// No byte of the bitmap beyond `end` is read, because the memory may end there. The word is read as a whole
// only if it is aligned and all of its bits are before `end`.
__device__ __forceinline__ u32 bits_from(const u8 *bitmap, u64 first, u64 end) {
    if (first >= end) {
        return 0;
    }
    const u8 *bytes = bitmap + first / 8;
    if (end - first >= 32 && aligned(u64(bytes), 0, 4)) {
        return *reinterpret_cast<const u32 *>(bytes);
    }
    const u32 count = min_len(end - first, 32);
    u32 bits = 0;
#pragma unroll 1
    for (u32 byte = 0; 8 * byte < count; byte++) {
        bits |= u32(bytes[byte]) << (8 * byte);
    }
    return count < 32 ? bits & ((1u << count) - 1) : bits;
}

// Returns the bits of word `word` of a vector that belong to elements whose bit is 1.
//
// An element of 8 or 16 bytes covers several words: with 8 bytes, words 0 and 1 share a bit. With 16 bytes, a
// vector has a single bit, so its bits are either 0 or all set, and the vector is not passed to this
// function.
__device__ __forceinline__ u32 word_mask(u32 bits, u32 word, u32 width) {
    switch (width) {
    case 1: {
        // Four bits, spread to the lowest bit of four bytes; no partial product affects another.
        const u32 spread = ((bits >> (4 * word) & 15) * 0x00204081u) & 0x01010101u;
        return spread * 0xffu;
    }
    case 2: {
        const u32 two = bits >> (2 * word) & 3;
        return (two & 1) * 0x0000ffffu | (two >> 1) * 0xffff0000u;
    }
    case 4: return -(bits >> word & 1);
    default: return -(bits >> (word / 2) & 1);
    }
}

// Merges `COUNT` vectors per lane, starting at `vector`; adjacent lanes have adjacent vectors.
//
// All necessary loads are in flight before the first store. A vector without a set bit moves no bytes, and
// one with all bits set is not read from the target, which saves a third of its traffic.
template <u32 COUNT>
__device__ __forceinline__ void merge_vectors(Bytes16 *target, const Bytes16 *values, u64 vector,
                                              const u32 (&bits)[COUNT], u32 all, u32 width) {
    Bytes16 merged[COUNT], old[COUNT];
#pragma unroll
    for (u32 k = 0; k < COUNT; k++) {
        if (bits[k] != 0) {
            merged[k] = values[vector + 32 * k];
        }
        if (bits[k] != 0 && bits[k] != all) {
            old[k] = target[vector + 32 * k];
        }
    }
#pragma unroll
    for (u32 k = 0; k < COUNT; k++) {
        if (bits[k] == 0) {
            continue;
        }
        if (bits[k] != all) {
            // The vector belongs to this lane alone, so reading it and writing it back loses no other
            // thread's bytes.
#pragma unroll
            for (u32 word = 0; word < 4; word++) {
                const u32 mask = word_mask(bits[k], word, width);
                merged[k].word[word] = (merged[k].word[word] & mask) | (old[k].word[word] & ~mask);
            }
        }
        target[vector + 32 * k] = merged[k];
    }
}

// Merges elements `begin` to `end`: whole vectors of sixteen bytes; both sides must be aligned.
//
// A warp processes 1024 elements per round. In each round, a lane reads one word of the bitmap, 32 elements;
// the words of four rounds are loaded together. If no lane has a bit set, the warp skips all of their bytes.
// With an all-zero bitmap, this is twice as fast as checking each vector's bits.
//
// The lanes then exchange their words with shuffles, so that adjacent lanes merge adjacent vectors and an
// access of the warp covers 512 contiguous bytes. Without the exchange, each lane would merge the vectors of
// its own word, `2 * width` vectors away from its neighbor's. For 16-bit elements, where a word covers four
// vectors:
//
//     vector           0   1   2   3    4   5   6   7   ...  32  33  34  35   ...  124 125 126 127
//     word loaded by   lane 0           lane 1          ...  lane 8           ...  lane 31
//     merged by lane   0   1   2   3    4   5   6   7   ...  0   1   2   3    ...  28  29  30  31
//     in step k + j    0   0   0   0    0   0   0   0   ...  1   1   1   1    ...  3   3   3   3
template <u32 THREADS>
__device__ __forceinline__ void merge_whole_vectors(Bytes16 *target, const u8 *bitmap, const Bytes16 *values,
                                                    u64 begin, u64 end, u32 width, u32 thread) {
    // Vectors, of those that the warp's words describe, that a lane merges at a time. Each takes eight
    // registers for its values and its old contents.
    constexpr u32 COUNT = 2;
    constexpr u32 ROUND = 32 * THREADS;
    const u32 elements = 16 / width;
    const u32 vectors = 2 * width;
    const u32 all = (1u << elements) - 1;
    const u32 lane = thread % 32;
    // All lanes of a warp have the same bounds: every lane takes part in the shuffles, and lanes beyond `end`
    // have words of 0.
    for (u64 first = begin + 32 * (thread - lane); first < end; first += 4 * ROUND) {
        u32 word[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            word[i] = bits_from(bitmap, first + i * ROUND + 32 * lane, end);
        }
#pragma unroll 1
        for (u32 i = 0; i < 4; i++) {
            // A selection among four names instead of an index keeps `word` in registers.
            const u32 own = i < 2 ? (i == 0 ? word[0] : word[1]) : (i == 2 ? word[2] : word[3]);
            if (!__any_sync(FULL_WARP, own != 0)) {
                continue;
            }
            const u64 vector = (first + i * ROUND) / elements + lane;
#pragma unroll 1
            for (u32 k = 0; k < vectors; k += COUNT) {
                u32 bits[COUNT];
#pragma unroll
                for (u32 j = 0; j < COUNT; j++) {
                    // The bits of one vector, from the lane that holds them. A vector's bits are always
                    // within one word.
                    const u32 bit = (32 * (k + j) + lane) * elements;
                    bits[j] = __shfl_sync(FULL_WARP, own, bit / 32) >> (bit % 32) & all;
                }
                merge_vectors<COUNT>(target, values, vector + 32 * k, bits, all, width);
            }
        }
    }
}

// Merges elements `begin` to `end` one by one.
//
// A thread processes a whole byte of the bitmap, so that no two threads read the same bit. The first and the
// last byte may contain bits of an adjacent part, which the comparison excludes.
template <u32 THREADS, u32 WIDTH>
__device__ __forceinline__ void merge_elements(u8 *target, const u8 *bitmap, const u8 *values, u64 begin, u64 end,
                                               u32 thread) {
    for (u64 byte = begin / 8 + thread; 8 * byte < end; byte += THREADS) {
        for (u32 bits = bitmap[byte], bit = 0; bits != 0; bits >>= 1, bit++) {
            const u64 element = 8 * byte + bit;
            if ((bits & 1) != 0 && element >= begin && element < end) {
                copy_element<WIDTH>(target + element * WIDTH, values + element * WIDTH);
            }
        }
    }
}

// Scatters elements; elements and indices must be aligned.
//
// Four of each are in flight before the first store. The stores of a warp generally access different sectors:
// on an H200, 5.4 million elements of 2 bytes take 239 us with rising indices and 339 us with shuffled ones.
// The indices are all different, so the order of the stores does not matter.
template <u32 THREADS, typename T>
__device__ __forceinline__ void scatter_aligned(T *target, const u32 *indices, const T *values, u64 begin, u64 end, u32 thread) {
    u64 i = begin + thread;
    for (; i + 3 * THREADS < end; i += 4 * THREADS) {
        u32 index[4];
        T value[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            index[k] = indices[i + k * THREADS];
            value[k] = values[i + k * THREADS];
        }
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            target[index[k]] = value[k];
        }
    }
    for (; i < end; i += THREADS) {
        target[indices[i]] = values[i];
    }
}

// Scatters elements of any alignment. Misaligned indices are assembled byte by byte.
template <u32 THREADS, u32 WIDTH, typename T>
__device__ __forceinline__ void merge_sparse(u8 *target, const u8 *indices, const u8 *values, u64 begin, u64 end, u32 thread) {
    if (aligned(u64(target), u64(values), WIDTH) && aligned(u64(indices), 0, 4)) {
        scatter_aligned<THREADS>(reinterpret_cast<T *>(target), reinterpret_cast<const u32 *>(indices),
                                 reinterpret_cast<const T *>(values), begin, end, thread);
        return;
    }
    for (u64 i = begin + thread; i < end; i += THREADS) {
        const u8 *bytes = indices + 4 * i;
        const u64 index = bytes[0] | u32(bytes[1]) << 8 | u32(bytes[2]) << 16 | u32(bytes[3]) << 24;
        copy_element<WIDTH>(target + index * WIDTH, values + i * WIDTH);
    }
}

// Applies a masked piece: whole vectors if target and values have the same alignment, the rest by elements.
template <u32 THREADS>
__device__ __forceinline__ void apply_masked(const PieceRow &piece, u64 begin, u64 end, u32 thread) {
    u8 *target = ptr_at<u8>(piece.target);
    const u8 *bitmap = ptr_at<u8>(piece.payload), *values = ptr_at<u8>(piece.values);
    if (aligned(piece.target, piece.values, 16)) {
        // `begin` is a multiple of MASK_STEPS, so it is a whole number of vectors and of bytes of the bitmap.
        // Two parts of one piece therefore share neither a vector nor a byte of the bitmap.
        const u64 whole = end * piece.width / 16 * 16 / piece.width;
        merge_whole_vectors<THREADS>(reinterpret_cast<Bytes16 *>(target), bitmap,
                                     reinterpret_cast<const Bytes16 *>(values), begin, whole, piece.width, thread);
        begin = whole;
    }
    // The rest: fewer than sixteen bytes, or the whole part if the alignments differ. The width is a template
    // argument, so that an element is one access rather than a loop.
    switch (piece.width) {
    case 1: return merge_elements<THREADS, 1>(target, bitmap, values, begin, end, thread);
    case 2: return merge_elements<THREADS, 2>(target, bitmap, values, begin, end, thread);
    case 4: return merge_elements<THREADS, 4>(target, bitmap, values, begin, end, thread);
    case 8: return merge_elements<THREADS, 8>(target, bitmap, values, begin, end, thread);
    default: return merge_elements<THREADS, 16>(target, bitmap, values, begin, end, thread);
    }
}

// Applies a sparse piece. An index counts elements of the piece's width.
template <u32 THREADS>
__device__ __forceinline__ void apply_sparse(const PieceRow &piece, u64 begin, u64 end, u32 thread) {
    u8 *target = ptr_at<u8>(piece.target);
    const u8 *indices = ptr_at<u8>(piece.payload), *values = ptr_at<u8>(piece.values);
    switch (piece.width) {
    case 1: return merge_sparse<THREADS, 1, u8>(target, indices, values, begin, end, thread);
    case 2: return merge_sparse<THREADS, 2, u16>(target, indices, values, begin, end, thread);
    case 4: return merge_sparse<THREADS, 4, u32>(target, indices, values, begin, end, thread);
    case 8: return merge_sparse<THREADS, 8, u64>(target, indices, values, begin, end, thread);
    default: return merge_sparse<THREADS, 16, Bytes16>(target, indices, values, begin, end, thread);
    }
}

// Copies elements to `begin` to `end` of the target, each from the position given by its index.
//
// The target is written in order and the source read at random. The loop is not unrolled, so that picking
// adds no registers to the apply kernels.
template <u32 THREADS, u32 WIDTH>
__device__ __forceinline__ void pick_elements(u8 *target, const u8 *indices, const u8 *source, u64 begin, u64 end,
                                              u32 thread) {
    const bool whole = aligned(u64(indices), 0, 4);
#pragma unroll 1
    for (u64 i = begin + thread; i < end; i += THREADS) {
        const u8 *bytes = indices + 4 * i;
        const u64 index = whole ? *reinterpret_cast<const u32 *>(bytes)
                                : bytes[0] | u32(bytes[1]) << 8 | u32(bytes[2]) << 16 | u32(bytes[3]) << 24;
        copy_element<WIDTH>(target + i * WIDTH, source + index * WIDTH);
    }
}

// Applies a pick. Its source may be page memory and its target staging, which gathers a delta that only the
// device has seen.
template <u32 THREADS>
__device__ __forceinline__ void pick(const PieceRow &piece, u64 begin, u64 end, u32 thread) {
    u8 *target = ptr_at<u8>(piece.target);
    const u8 *indices = ptr_at<u8>(piece.payload), *source = ptr_at<u8>(piece.values);
    switch (piece.width) {
    case 1: return pick_elements<THREADS, 1>(target, indices, source, begin, end, thread);
    case 2: return pick_elements<THREADS, 2>(target, indices, source, begin, end, thread);
    case 4: return pick_elements<THREADS, 4>(target, indices, source, begin, end, thread);
    case 8: return pick_elements<THREADS, 8>(target, indices, source, begin, end, thread);
    default: return pick_elements<THREADS, 16>(target, indices, source, begin, end, thread);
    }
}

// Applies the pieces of one part in order, each with all threads of the warp or block.
//
// All threads read the same row and take the same branches, so no thread misses a barrier and no lane misses
// a shuffle.
template <u32 THREADS>
__device__ __forceinline__ void apply(const PartRow &part, const PieceRow *pieces, u32 thread) {
    for (u32 i = 0; i < part.piece_count; i++) {
        // The piece before may overlap this one (see `sync_owner`).
        if (i > 0) {
            sync_owner<THREADS>();
        }
        const PieceRow piece = pieces[part.piece_first + i];
        // A section of a long piece has one piece. In a part of several, `begin` is 0 and `end` is beyond all
        // of them.
        const u64 begin = part.begin, end = min_len(part.end, piece.steps);
        if (begin >= end) {
            continue;
        }
        switch (piece.kind) {
        case PIECE_DENSE:
            copy_bytes<THREADS>(ptr_at<u8>(piece.target) + begin, ptr_at<u8>(piece.payload) + begin, end - begin, thread);
            break;
        case PIECE_MASKED: apply_masked<THREADS>(piece, begin, end, thread); break;
        case PIECE_SPARSE: apply_sparse<THREADS>(piece, begin, end, thread); break;
        case PIECE_PICK: pick<THREADS>(piece, begin, end, thread); break;
        default: fill<THREADS>(ptr_at<u8>(piece.target), piece.payload, piece.values, begin, end, thread); break;
        }
    }
}

// One warp per part, four parts per block. A multiprocessor fits six blocks of 128 threads if a thread uses
// at most 80 registers. `compiled/record.txt` lists 64 and no spills.
//
// A warp without a part returns immediately: no barrier here spans more than one warp.
extern "C" __global__ void __launch_bounds__(128, 6)
    apply_by_warp(const PartRow *parts, u32 part_count, const PieceRow *pieces) {
    const u32 row = 4 * blockIdx.x + threadIdx.x / 32;
    if (row < part_count) {
        apply<32>(parts[row], pieces, threadIdx.x % 32);
    }
}

// One block per part: 256 threads, and three blocks per multiprocessor, which is the same number of threads
// as above.
extern "C" __global__ void __launch_bounds__(256, 3)
    apply_by_block(const PartRow *parts, u32 part_count, const PieceRow *pieces) {
    apply<256>(parts[blockIdx.x], pieces, threadIdx.x);
}
