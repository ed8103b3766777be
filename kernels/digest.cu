// Computes digests of chunks: sixteen bytes under a random key, so that any two contents of a chunk have the
// same digest with a probability below 2^-100. `src/device/digests.rs` contains the definition and the proof.
//
// A chunk is 4096 vectors of sixteen bytes: 256 columns of sixteen vectors. Thread t processes column t:
// vectors t, t + 256, t + 512 and so on, in two sums of products (NH), which need 34 key words shared by all
// threads. The block then adds the columns' sums as the coefficients of two polynomials modulo 2^61 - 1, for
// which each thread has a precomputed power in the key. No thread communicates with another one before its
// sixteen vectors are done.
//
// Grid: a block of 256 threads for each row, which it processes chunk by chunk.
//
// Owner: the first thread of a block writes the digests of its row. No other thread writes.
//
// Why the result is deterministic: sums modulo 2^128 and modulo 2^61 - 1 are the same in any order.
//
// Checked before: the range is within its memory; the key is complete; key and digests are aligned to 8
// bytes.
//
// Bytes moved: each byte of the range is read once, with loads of sixteen bytes if the range is aligned to
// them and of single bytes otherwise. Each block reads the 4.4 KiB of the key, which the caches hold. An H100
// digests at the rate at which a kernel reads: 3.17 TB/s with rows of one chunk, 3.08 TB/s with rows of
// eight.

#include "common.cuh"

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / 32;
// Vectors per column.
constexpr u32 DEPTH = DIGEST_CHUNK_LEN / 16 / THREADS;
// Vectors that a thread has in flight at a time: first the loads, then the sums.
constexpr u32 AT_ONCE = 8;
constexpr u32 PASSES = 2;
constexpr u64 PRIME = (1ull << 61) - 1;

// The key's layout in memory.
struct DigestKey {
    // Pass n begins at word 2 n.
    u64 words[2 * DEPTH + 2 * (PASSES - 1)];
    struct {
        // The point r at which the polynomial is evaluated, and r^(3 t + 1) for each column t.
        u64 point;
        u64 powers[THREADS];
    } passes[PASSES];
};
static_assert(sizeof(DigestKey) == DIGEST_KEY_LEN, "DigestKey");

// A sum modulo 2^128.
struct Sum128 {
    u64 low;
    u64 high;

    __device__ __forceinline__ void add_product(u64 one, u64 other) {
        const u64 product = one * other;
        low += product;
        high += __umul64hi(one, other) + (low < product);
    }
};

// Reduces a number to one below 2^62 that is congruent modulo 2^61 - 1.
__device__ __forceinline__ u64 folded(u64 number) {
    return (number & PRIME) + (number >> 61);
}

// Returns the product modulo 2^61 - 1, below 2^62. Both factors must be below 2^62.
__device__ __forceinline__ u64 times(u64 one, u64 other) {
    const u64 low = one * other, high = __umul64hi(one, other);
    // Below 2^61 and 2^63.
    return folded((low & PRIME) + (low >> 61 | high << 3));
}

// Returns a column's contribution: its sum in limbs of sixty bits as coefficients, times the column's power.
__device__ __forceinline__ u64 column(const Sum128 &sum, u64 point, u64 power) {
    constexpr u64 LIMB = (1ull << 60) - 1;
    const u64 limbs[3] = {sum.low & LIMB, (sum.low >> 60 | sum.high << 4) & LIMB, sum.high >> 56};
    const u64 inner = folded(times(limbs[2], point) + limbs[1]);
    return times(folded(times(inner, point) + limbs[0]), power);
}

// Returns the sum of one number of each lane, modulo 2^61 - 1, in lane 0.
__device__ __forceinline__ u64 over_warp(u64 number) {
    for (u32 distance = 16; distance > 0; distance /= 2) {
        const u32 low = __shfl_down_sync(FULL_WARP, u32(number), distance);
        const u32 high = __shfl_down_sync(FULL_WARP, u32(number >> 32), distance);
        number = folded(number + (u64(high) << 32 | low));
    }
    return number;
}

// Loads a vector of a range that may begin at any address and end within the vector, which is padded with
// zeros.
__device__ __forceinline__ Bytes16 load_bytes(const u8 *bytes, u64 begin, u64 len) {
    Bytes16 vector = {};
#pragma unroll
    for (u32 byte = 0; byte < 16; byte++) {
        if (begin + byte < len) {
            vector.word[byte / 4] |= u32(bytes[begin + byte]) << (8 * (byte % 4));
        }
    }
    return vector;
}

// Adds the vector of this row to both sums.
__device__ __forceinline__ void add_vector(Sum128 (&found)[PASSES], const u64 *words, u32 row, const Bytes16 &vector) {
    const u64 left = u64(vector.word[1]) << 32 | vector.word[0], right = u64(vector.word[3]) << 32 | vector.word[2];
#pragma unroll
    for (u32 pass = 0; pass < PASSES; pass++) {
        const u32 word = 2 * (row + pass);
        found[pass].add_product(left + words[word], right + words[word + 1]);
    }
}

// Digests one chunk with the whole block.
__device__ __forceinline__ void digest_chunk(const u8 *chunk, u32 len, const DigestKey &key, const u64 *words,
                                             u64 (&sums)[PASSES][WARPS], u64 *target) {
    const u32 thread = threadIdx.x;
    Sum128 found[PASSES] = {};
    const u32 whole = aligned(reinterpret_cast<u64>(chunk), 0, 16) ? len / 16 : 0;
    const Bytes16 *vectors = reinterpret_cast<const Bytes16 *>(chunk);
    for (u32 first = 0; first * THREADS + thread < whole; first += AT_ONCE) {
        Bytes16 loaded[AT_ONCE];
        // All loads first: a thread has eight vectors in flight before the first product.
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++) {
            const u32 vector = (first + k) * THREADS + thread;
            if (vector < whole) {
                loaded[k] = vectors[vector];
            }
        }
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++) {
            if ((first + k) * THREADS + thread < whole) {
                add_vector(found, words, first + k, loaded[k]);
            }
        }
    }
    // The misaligned vectors, and the end of aligned ones.
    const u32 count = (len + 15) / 16;
    for (u32 vector = whole / THREADS * THREADS + thread; vector < count; vector += THREADS) {
        if (vector >= whole) {
            add_vector(found, words, vector / THREADS, load_bytes(chunk, 16ull * vector, len));
        }
    }
#pragma unroll
    for (u32 pass = 0; pass < PASSES; pass++) {
        const u64 sum = over_warp(column(found[pass], key.passes[pass].point, key.passes[pass].powers[thread]));
        if (thread % 32 == 0) {
            sums[pass][thread / 32] = sum;
        }
    }
    __syncthreads();
    if (thread == 0) {
        for (u32 pass = 0; pass < PASSES; pass++) {
            // The length is the constant term of the polynomial.
            u64 sum = len;
            for (u32 warp = 0; warp < WARPS; warp++) {
                sum = folded(sum + sums[pass][warp]);
            }
            sum = folded(sum);
            target[pass] = sum >= PRIME ? sum - PRIME : sum;
        }
    }
    // From here on, the next chunk uses the sums.
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(256) digest(const DigestRow *rows, u32 row_count) {
    __shared__ u64 words[2 * DEPTH + 2 * (PASSES - 1)];
    __shared__ u64 sums[PASSES][WARPS];
    const DigestRow row = rows[blockIdx.x];
    const DigestKey &key = *ptr_at<const DigestKey>(row.key);
    if (threadIdx.x < sizeof(words) / sizeof(u64)) {
        words[threadIdx.x] = key.words[threadIdx.x];
    }
    __syncthreads();
    for (u32 begin = 0; begin < row.len; begin += DIGEST_CHUNK_LEN) {
        const u32 len = u32(min_len(DIGEST_CHUNK_LEN, row.len - begin));
        u64 *target = ptr_at<u64>(row.target) + PASSES * (begin / DIGEST_CHUNK_LEN);
        digest_chunk(ptr_at<const u8>(row.source) + begin, len, key, words, sums, target);
    }
}
