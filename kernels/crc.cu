// Computes the CRC-32 of many ranges, equal to crc32fast's: polynomial 0x04c11db7, reflected, all ones in and
// out.
//
// Nearly all of the work needs no tables. Over GF(2), squaring is done term by term, so P(x)^512 = P(x^512).
// Modulo P, one bit is equivalent to 14 of the 32 bits after it; one row of 512 bits is therefore equivalent
// to 14 of the 32 rows after it. Sixteen lanes, a team, read rows of 64 bytes, four bytes per lane. They
// eliminate each row by adding it to 14 of the 32 rows after it, until only the last 32 rows remain. Horner's
// rule sums those with weights x^512, and the lanes' sums are added with weights x^32.
//
// The last 32 rows cost more than all other rows of a short chunk. Fewer lanes per team make many short
// chunks faster and a few long ones slower. Measured on an H200, relative to a kernel that only reads: with
// 32 lanes, chunks of 16 KiB reached 75 % of its bandwidth and chunks of 64 KiB 94 %; with 8 lanes, 91 % and
// 89 %; with the current 16 lanes, 86 to 89 % and 89 to 91 %.
//
// A word represents a reflected polynomial: bit 31 is the coefficient of x^0. The remainder of a chunk M of n
// bytes is M x^32 mod P, plus x^8n times the initial ones if it is the first.
//
// Grid: `crc_chunks` assigns a chunk to a team, eight teams per block of 128 threads. `crc_combine` assigns a
// source of several chunks to a block of 256 threads.
//
// Owner: the first thread of a team, or of a block, writes the four bytes of its row. No other thread writes.
//
// Why the result is deterministic: exclusive-or gives the same sum in any order, and a team always adds the
// same words.
//
// Checked before: all ranges are within their memory; no chunk is longer than CRC_CHUNK_LEN, and only the
// first of a source is shorter. Remainders are aligned to 4 bytes. Checksums may have any alignment, because
// they are written to host memory.
//
// Bytes moved: each byte is read once, with loads of four bytes per lane, and 2 KiB of a team in flight at a
// time. If the source does not end at a multiple of four bytes, up to three single bytes are added.

#include "common.cuh"

// The remainder of x^32 modulo P, reflected.
constexpr u32 P = 0xedb88320u;
constexpr u32 ONE = 0x80000000u;

// Multiplies by x. Reflected, this is a shift toward bit 0, and the bit shifted out represents x^32.
__host__ __device__ constexpr u32 times_x(u32 a) {
    return a >> 1 ^ ((a & 1) != 0 ? P : 0);
}

// Multiplies two polynomials modulo P. This takes 32 steps, so the device computes few products: one per
// lane, and one for each chunk that is combined.
__host__ __device__ constexpr u32 product(u32 a, u32 b) {
    u32 sum = 0;
    for (u32 bit = 0; bit < 32; bit++) {
        sum ^= (b >> (31 - bit) & 1) != 0 ? a : 0;
        a = times_x(a);
    }
    return sum;
}

// Returns x^(2^n) modulo P, by squaring n times.
__host__ __device__ constexpr u32 x_squared(u32 n) {
    u32 power = ONE >> 1;
    for (u32 i = 0; i < n; i++) {
        power = product(power, power);
    }
    return power;
}

// Lanes of a team. A half warp is a compromise between the two measurements above.
constexpr u32 TEAM = 16;
// Length of a row: one word per lane, so that a team reads it in one access of 64 bytes.
constexpr u32 ROW_LEN = 4 * TEAM;
constexpr u32 BLOCK_THREADS = 128;
constexpr u32 COMBINE_THREADS = 256;

constexpr u32 X_32 = x_squared(5);
constexpr u32 X_ROW = x_squared(9);
static_assert(8 * ROW_LEN == 1u << 9, "X_ROW");
// The factor of a chunk's remainder for each chunk after it: 2^13 bytes are 2^16 bits. It is a single
// constant because all chunks except a source's first have the same length.
constexpr u32 X_CHUNK = x_squared(16);
constexpr u32 X_CHUNK_A_THREAD = x_squared(24);
static_assert(8ull * CRC_CHUNK_LEN == 1ull << 16, "X_CHUNK");
static_assert(8ull * CRC_CHUNK_LEN * COMBINE_THREADS == 1ull << 24, "X_CHUNK_A_THREAD");

// The products of x^512 with each value of each of the eight nibbles of a word: 8 times 16 words, 512 bytes.
struct Nibbles {
    u32 product_of[8][16];
};

__host__ __device__ constexpr Nibbles nibbles_by_x_row() {
    Nibbles nibbles = {};
    for (u32 nibble = 0; nibble < 8; nibble++) {
        for (u32 value = 0; value < 16; value++) {
            nibbles.product_of[nibble][value] = product(value << (4 * nibble), X_ROW);
        }
    }
    return nibbles;
}

// The weights factor^(COUNT - 1 - index), times `last`.
template <u32 COUNT>
struct Weights {
    u32 of[COUNT];
};

template <u32 COUNT>
__host__ __device__ constexpr Weights<COUNT> weights(u32 factor, u32 last) {
    Weights<COUNT> weights = {};
    for (u32 index = COUNT; index-- > 0;) {
        weights.of[index] = last;
        last = product(last, factor);
    }
    return weights;
}

// In global memory: constant memory serves one address per warp at a time, and each lane reads a different
// one.
__device__ const Nibbles NIBBLES = nibbles_by_x_row();
__device__ const Weights<TEAM> WORD_WEIGHTS = weights<TEAM>(X_32, X_32);
__device__ const Weights<COMBINE_THREADS> CHUNK_WEIGHTS = weights<COMBINE_THREADS>(X_CHUNK, ONE);

// Multiplies by x^512 with eight lookups in shared memory and no branch.
//
// Each of the eight tables occupies sixteen adjacent banks: lanes with different values read different banks,
// and lanes with the same value share a read.
__device__ __forceinline__ u32 times_x_row(const Nibbles &nibbles, u32 a) {
    u32 sum = 0;
#pragma unroll
    for (u32 nibble = 0; nibble < 8; nibble++) {
        sum ^= nibbles.product_of[nibble][a >> (4 * nibble) & 15];
    }
    return sum;
}

// Appends `len` bytes to a remainder, bit by bit. Used for at most seven bytes.
__device__ u32 append_bytes(u32 remainder, const u8 *bytes, u32 len) {
    for (u32 i = 0; i < len; i++) {
        remainder ^= bytes[i];
        for (u32 bit = 0; bit < 8; bit++) {
            remainder = times_x(remainder);
        }
    }
    return remainder;
}

// Returns the sum of the values of `LANES` adjacent lanes, in all of them.
//
// The whole warp takes part, so a team without a row must also call this. Both teams of a warp are summed at
// the same time: with distances below `LANES`, no value leaves its team.
template <u32 LANES>
__device__ __forceinline__ u32 sum_of_lanes(u32 value) {
#pragma unroll
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) {
        value ^= __shfl_xor_sync(FULL_WARP, value, distance);
    }
    return value;
}

// Returns the word at `address`, with bytes before `begin` as 0. If `first`, the initial ones are added to
// the first four bytes from `begin`.
//
// Bytes before `begin` are not read, because they may be outside the memory. A word before `begin + 4` is
// assembled from single bytes; all others take one load.
__device__ u32 word_near_begin(u64 address, u64 begin, bool first) {
    if (address >= begin + 4) {
        return *ptr_at<u32>(address);
    }
    u32 word = 0;
    for (u32 i = 0; i < 4; i++) {
        if (address + i < begin) {
            continue;
        }
        const u32 byte = *ptr_at<u8>(address + i) ^ (first && address + i < begin + 4 ? 0xffu : 0u);
        word |= byte << (8 * i);
    }
    return word;
}

// Distances from an eliminated row to the rows to which it is added: 32 - k for each term x^k of P except
// x^32.
constexpr u32 DISTANCES[14] = {6, 9, 10, 16, 20, 21, 22, 24, 25, 27, 28, 30, 31, 32};

// Returns the lane's share of the remainder of the bytes from `begin` to `end`, which must be at least four.
// `end` must be a multiple of 4.
//
// The last row ends at `end`. The first row begins before `begin`, as far as necessary for whole blocks of 32
// rows; bytes before `begin` count as 0, because leading zeros change nothing. The number of rows therefore
// depends only on the length, and no row is a special case. Each row except the last 32 is eliminated:
//
//              lane 0   lane 1   ...  lane 15
//     row 0    0..4     4..8     ...  60..64     `row`: a block of 32 rows, one word of each row per lane
//     row 1    64..68   68..72   ...  124..128
//     ...
//     row 32                                     `next`: the block being loaded; to row 32 are added the
//     ...                                        rows 32 - 6, 32 - 9, 32 - 10, ..., 32 - 32
//     last                       ...  ..end
//
// A block of 32 rows stays in registers, one word of each row per lane, while the next one is loaded: 64 of
// the 95 registers.
__device__ u32 remainder_of_words(const Nibbles &nibbles, u64 begin, u64 end, bool first, u32 lane) {
    constexpr u32 BLOCK = 32 * ROW_LEN;
    const u32 blocks = u32((end - begin + BLOCK - 1) / BLOCK);
    u64 address = end - u64(blocks) * BLOCK + 4 * lane;
    u32 row[32], next[32];
#pragma unroll
    for (u32 r = 0; r < 32; r++) {
        row[r] = 0;
        next[r] = word_near_begin(address + ROW_LEN * r, begin, first);
    }
    for (u32 block = 1; block < blocks; block++) {
        // A row of the block before is still in its position until its successor replaces it.
#pragma unroll
        for (u32 r = 0; r < 32; r++) {
            u32 sum = next[r];
#pragma unroll
            for (u32 d = 0; d < 14; d++) {
                sum ^= row[(r + 32 - DISTANCES[d]) % 32];
            }
            row[r] = sum;
        }
        address += BLOCK;
        // The first four bytes may end in the second block's first word.
        next[0] = word_near_begin(address, begin, first);
#pragma unroll
        for (u32 r = 1; r < 32; r++) {
            next[r] = ptr_at<u32>(address)[TEAM * r];
        }
    }
    // Rows of the last block remain, so only rows of the block before are added to them.
#pragma unroll
    for (u32 r = 0; r < 32; r++) {
        u32 sum = next[r];
#pragma unroll
        for (u32 d = 0; d < 14; d++) {
            sum ^= DISTANCES[d] > r ? row[r + 32 - DISTANCES[d]] : 0;
        }
        row[r] = sum;
    }
    // Horner's rule over the 32 remaining rows, from first to last.
    u32 sum = row[0];
#pragma unroll
    for (u32 r = 1; r < 32; r++) {
        sum = times_x_row(nibbles, sum) ^ row[r];
    }
    return product(sum, WORD_WEIGHTS.of[lane]);
}

// Writes a word to any address. A checksum is written directly to the memory that the host reads; going
// through scratch would take another launch.
__device__ void put_word(u64 address, u32 word) {
    if (aligned(address, 0, 4)) {
        *ptr_at<u32>(address) = word;
        return;
    }
    for (u32 i = 0; i < 4; i++) {
        ptr_at<u8>(address)[i] = u8(word >> (8 * i));
    }
}

// Computes the checksums or remainders of chunks, one per team.
//
// A multiprocessor fits five blocks of 128 threads if a thread uses at most 96 registers.
// `compiled/record.txt` lists 95 and no spills.
extern "C" __global__ void __launch_bounds__(128, 5) crc_chunks(const CrcRow *rows, u32 row_count) {
    __shared__ Nibbles nibbles;
    // Each thread copies one entry of the tables; the barrier makes all of them visible to the block.
    static_assert(sizeof(Nibbles) == BLOCK_THREADS * sizeof(u32), "one entry a thread");
    (&nibbles.product_of[0][0])[threadIdx.x] = (&NIBBLES.product_of[0][0])[threadIdx.x];
    __syncthreads();
    const u32 index = (BLOCK_THREADS / TEAM) * blockIdx.x + threadIdx.x / TEAM;
    const u32 lane = threadIdx.x % TEAM;
    // A team without a row stays with its warp, because the whole warp sums together.
    const CrcRow row = index < row_count ? rows[index] : CrcRow{0, 0, 0, 0};
    const bool first = (row.flags & CRC_FIRST) != 0;
    // With fewer bytes, the initial ones would extend beyond the words.
    const bool by_words = row.len >= 8;
    const u64 end = row.source + row.len;
    const u32 tail = by_words ? end & 3 : row.len;
    const u32 share = by_words ? remainder_of_words(nibbles, row.source, end - tail, first, lane) : 0;
    u32 remainder = sum_of_lanes<TEAM>(share);
    if (lane != 0 || index >= row_count) {
        // One thread appends the bytes after the last whole word. A row that is a whole source is inverted
        // here; the remainder of one chunk of several stays as it is, for `crc_combine`.
        return;
    }
    remainder = append_bytes(by_words || !first ? remainder : 0xffffffffu, ptr_at<u8>(end - tail), tail);
    put_word(row.target, row.flags == (CRC_FIRST | CRC_LAST) ? ~remainder : remainder);
}

// Computes the checksum of each source of several chunks from their remainders.
//
// A thread sums every 256th chunk by Horner's rule, with a weight of 256 chunks between two. A table gives
// its weight among the threads. A source of n chunks therefore takes n / 256 rounds, and adjacent threads
// read adjacent remainders.
extern "C" __global__ void __launch_bounds__(256) crc_combine(const CombineRow *rows, u32 row_count) {
    __shared__ u32 sum_of_warp[COMBINE_THREADS / 32];
    const CombineRow row = rows[blockIdx.x];
    const u32 *remainders = ptr_at<u32>(row.remainders);
    // Whole rounds of one chunk per thread, padded with zeros in front. Leading zeros change nothing, so the
    // last thread gets the last chunk, as the weights require.
    const u32 missing = -row.count % COMBINE_THREADS;
    u32 sum = 0;
    for (u32 chunk = threadIdx.x; chunk < row.count + missing; chunk += COMBINE_THREADS) {
        sum = product(sum, X_CHUNK_A_THREAD) ^ (chunk < missing ? 0 : remainders[chunk - missing]);
    }
    sum = sum_of_lanes<32>(product(sum, CHUNK_WEIGHTS.of[threadIdx.x]));
    // Eight warps, one sum each; one thread adds them.
    if (threadIdx.x % 32 == 0) {
        sum_of_warp[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 warp = 1; warp < COMBINE_THREADS / 32; warp++) {
            sum ^= sum_of_warp[warp];
        }
        put_word(row.target, ~sum);
    }
}
