// CRC-32 of many ranges, the same as crc32fast's: polynomial 0x04c11db7, reflected, all ones in and out.
//
// Without tables for the bulk of the work. Over GF(2), squaring goes term by term, so P(x)^512 = P(x^512): what
// P says of bits, that one bit counts as much as 14 of the 32 behind it, holds for rows of 512 bits too. Sixteen
// lanes, a team, read rows of 64 bytes, four bytes a lane, and replace each row by adding it to 14 of the 32
// behind it, until the last 32 rows are left. These are summed up with weights x^512 by Horner's rule, and the
// lanes' sums with weights x^32. The last 32 rows cost more than all others of a short chunk, so fewer lanes make
// many short chunks faster and a few long ones slower: with 32, chunks of 16 KiB reached 75 % of the bandwidth
// of reading and chunks of 64 KiB 94 %; with 8, 91 % and 89 %.
//
// A word holds a polynomial reflected: bit 31 is the coefficient of x^0. The remainder of a chunk M of n
// bytes is M x^32 mod P, plus x^8n times the initial ones if it is the first.
//
// Grid: a team a chunk (`crc_chunks`), and a block a source of several chunks (`crc_combine`).
// Owner: the first thread of a team, or of a block, writes the four bytes of its row.
// Why the result is deterministic: exclusive-or in any order is the same sum.
// Checked before: all ranges lie within their memory.
// Bytes moved: each byte is read once, by loads of four bytes a lane, 2 KiB a team on their way at a time;
// sources whose end is not on a boundary of four bytes add up to three single bytes.

#include "common.cuh"

// x^32 mod P, reflected.
constexpr u32 P = 0xedb88320u;
constexpr u32 ONE = 0x80000000u;

__host__ __device__ constexpr u32 times_x(u32 a) {
    return a >> 1 ^ ((a & 1) != 0 ? P : 0);
}

// The product modulo P.
__host__ __device__ constexpr u32 product(u32 a, u32 b) {
    u32 sum = 0;
    for (u32 bit = 0; bit < 32; bit++) {
        sum ^= (b >> (31 - bit) & 1) != 0 ? a : 0;
        a = times_x(a);
    }
    return sum;
}

// x to the power of 2^n.
__host__ __device__ constexpr u32 x_squared(u32 n) {
    u32 power = ONE >> 1;
    for (u32 i = 0; i < n; i++) {
        power = product(power, power);
    }
    return power;
}

constexpr u32 TEAM = 16;
constexpr u32 ROW_LEN = 4 * TEAM;
constexpr u32 BLOCK_THREADS = 128;
constexpr u32 COMBINE_THREADS = 256;

constexpr u32 X_32 = x_squared(5);
constexpr u32 X_ROW = x_squared(9);
static_assert(8 * ROW_LEN == 1u << 9, "X_ROW");
// What a chunk's remainder is multiplied by for each chunk behind it: 2^16 bytes are 2^19 bits.
constexpr u32 X_CHUNK = x_squared(19);
constexpr u32 X_CHUNK_A_THREAD = x_squared(27);
static_assert(8ull * CRC_CHUNK_LEN == 1ull << 19, "X_CHUNK");
static_assert(8ull * CRC_CHUNK_LEN * COMBINE_THREADS == 1ull << 27, "X_CHUNK_A_THREAD");

// The product of x^512 and each value of each of the eight nibbles of a word.
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

// factor^(COUNT - 1 - index), times `last`.
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

// In global memory: constant memory serves one address a warp at a time.
__device__ const Nibbles NIBBLES = nibbles_by_x_row();
__device__ const Weights<TEAM> WORD_WEIGHTS = weights<TEAM>(X_32, X_32);
__device__ const Weights<COMBINE_THREADS> CHUNK_WEIGHTS = weights<COMBINE_THREADS>(X_CHUNK, ONE);

// The product with x^512. In each of the eight tables sixteen neighbouring banks serve a warp's 32 lanes.
__device__ __forceinline__ u32 times_x_row(const Nibbles &nibbles, u32 a) {
    u32 sum = 0;
#pragma unroll
    for (u32 nibble = 0; nibble < 8; nibble++) {
        sum ^= nibbles.product_of[nibble][a >> (4 * nibble) & 15];
    }
    return sum;
}

// The remainder with `len` more bytes behind it.
__device__ u32 append_bytes(u32 remainder, const u8 *bytes, u32 len) {
    for (u32 i = 0; i < len; i++) {
        remainder ^= bytes[i];
        for (u32 bit = 0; bit < 8; bit++) {
            remainder = times_x(remainder);
        }
    }
    return remainder;
}

// The sum of the values of `LANES` neighbouring lanes, in all of them. The whole warp takes part.
template <u32 LANES>
__device__ __forceinline__ u32 sum_of_lanes(u32 value) {
#pragma unroll
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) {
        value ^= __shfl_xor_sync(EVERYONE, value, distance);
    }
    return value;
}

// The word at `address`, of which bytes before `begin` count as 0, with the initial ones added to the first
// four bytes from `begin` on if `first`.
__device__ u32 word_near_begin(u64 address, u64 begin, bool first) {
    if (address >= begin + 4) {
        return *at<u32>(address);
    }
    u32 word = 0;
    for (u32 i = 0; i < 4; i++) {
        if (address + i < begin) {
            continue;
        }
        const u32 byte = *at<u8>(address + i) ^ (first && address + i < begin + 4 ? 0xffu : 0u);
        word |= byte << (8 * i);
    }
    return word;
}

// How far behind it a row is added when it is replaced: 32 - k for each term x^k of P but the first.
constexpr u32 DISTANCES[14] = {6, 9, 10, 16, 20, 21, 22, 24, 25, 27, 28, 30, 31, 32};

// The lane's share of the remainder of the words from `begin` to `end`, a multiple of 4; at least four bytes.
//
// Rows end at `end` and begin so far before `begin` that they are whole blocks of 32; what lies before `begin`
// counts as 0, as leading zeros change nothing. Each row but the last 32 is replaced.
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
        // A row of the block before is still in its place where its successor has not come yet.
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
            next[r] = at<u32>(address)[TEAM * r];
        }
    }
    // Rows of the last block stay, so only those of the block before are added to them.
#pragma unroll
    for (u32 r = 0; r < 32; r++) {
        u32 sum = next[r];
#pragma unroll
        for (u32 d = 0; d < 14; d++) {
            sum ^= DISTANCES[d] > r ? row[r + 32 - DISTANCES[d]] : 0;
        }
        row[r] = sum;
    }
    u32 sum = row[0];
#pragma unroll
    for (u32 r = 1; r < 32; r++) {
        sum = times_x_row(nibbles, sum) ^ row[r];
    }
    return product(sum, WORD_WEIGHTS.of[lane]);
}

extern "C" __global__ void __launch_bounds__(128, 5) crc_chunks(const CrcRow *rows, u32 row_count) {
    __shared__ Nibbles nibbles;
    static_assert(sizeof(Nibbles) == BLOCK_THREADS * sizeof(u32), "one entry a thread");
    (&nibbles.product_of[0][0])[threadIdx.x] = (&NIBBLES.product_of[0][0])[threadIdx.x];
    __syncthreads();
    const u32 index = (BLOCK_THREADS / TEAM) * blockIdx.x + threadIdx.x / TEAM;
    const u32 lane = threadIdx.x % TEAM;
    // Teams without a row stay with their warp, which adds up together.
    const CrcRow row = index < row_count ? rows[index] : CrcRow{0, 0, 0, 0};
    const bool first = (row.flags & CRC_FIRST) != 0;
    // With fewer bytes the initial ones would reach beyond the words.
    const bool by_words = row.len >= 8;
    const u64 end = row.source + row.len;
    const u32 tail = by_words ? end & 3 : row.len;
    const u32 share = by_words ? remainder_of_words(nibbles, row.source, end - tail, first, lane) : 0;
    u32 remainder = sum_of_lanes<TEAM>(share);
    if (lane != 0 || index >= row_count) {
        return;
    }
    remainder = append_bytes(by_words || !first ? remainder : 0xffffffffu, at<u8>(end - tail), tail);
    *at<u32>(row.target) = row.flags == (CRC_FIRST | CRC_LAST) ? ~remainder : remainder;
}

extern "C" __global__ void __launch_bounds__(256) crc_combine(const CombineRow *rows, u32 row_count) {
    __shared__ u32 sum_of_warp[COMBINE_THREADS / 32];
    const CombineRow row = rows[blockIdx.x];
    const u32 *remainders = at<u32>(row.remainders);
    // Whole rounds of a chunk a thread, filled up with zeros in front.
    const u32 missing = -row.count % COMBINE_THREADS;
    u32 sum = 0;
    for (u32 chunk = threadIdx.x; chunk < row.count + missing; chunk += COMBINE_THREADS) {
        sum = product(sum, X_CHUNK_A_THREAD) ^ (chunk < missing ? 0 : remainders[chunk - missing]);
    }
    sum = sum_of_lanes<32>(product(sum, CHUNK_WEIGHTS.of[threadIdx.x]));
    if (threadIdx.x % 32 == 0) {
        sum_of_warp[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 warp = 1; warp < COMBINE_THREADS / 32; warp++) {
            sum ^= sum_of_warp[warp];
        }
        *at<u32>(row.target) = ~sum;
    }
}
