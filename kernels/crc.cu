// CRC-32 of many ranges, the same as crc32fast's: polynomial 0x04c11db7, reflected, all ones in and out.
//
// Without tables for the bulk of the work. Over GF(2), squaring goes term by term, so P(x)^1024 = P(x^1024):
// for a polynomial P of 15 terms the relation that lets one bit be replaced by 14 earlier ones holds for
// whole rows of 1024 bits too. A warp reads rows of 128 bytes, lane by lane four bytes, and replaces each row
// by its sum with 14 of the 32 rows before it; what is left in the end are the last 32 rows. They are summed
// up with weights x^1024 by Horner's rule, and the lanes' sums with weights x^32.
//
// A word holds a polynomial reflected: bit 31 is the coefficient of x^0. The remainder of a chunk M of n
// bytes is M x^32 mod P, plus x^8n times the initial ones if it is the first.
//
// Grid: a warp a chunk (`crc_chunks`), and a warp a source of several chunks (`crc_combine`).
// Owner: lane 0 of a warp writes the four bytes of its row. Exclusive-or in any order is the same sum.
// Checked before: all ranges lie within their memory.
// Bytes moved: each byte is read once, by loads of four bytes a lane, 4 KiB a warp on their way at a time;
// sources whose end is not on a boundary of four bytes add up to three single bytes.

#include "common.cuh"

// x^32 mod P, reflected.
constexpr u32 P = 0xedb88320u;
constexpr u32 ONE = 0x80000000u;
constexpr u32 EVERYONE = 0xffffffffu;

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

constexpr u32 X_32 = x_squared(5);
constexpr u32 X_1024 = x_squared(10);
// What a chunk's remainder is multiplied by for each chunk that follows: 2^16 bytes are 2^19 bits.
constexpr u32 X_CHUNK = x_squared(19);
constexpr u32 X_32_CHUNKS = x_squared(24);
static_assert(CRC_CHUNK_LEN == 1u << 16, "X_CHUNK");

// The product of x^1024 and each value of each of the eight nibbles of a word.
struct Nibbles {
    u32 product_of[8][16];
};

__host__ __device__ constexpr Nibbles nibbles_by_x_1024() {
    Nibbles nibbles = {};
    for (u32 nibble = 0; nibble < 8; nibble++) {
        for (u32 value = 0; value < 16; value++) {
            nibbles.product_of[nibble][value] = product(value << (4 * nibble), X_1024);
        }
    }
    return nibbles;
}

// factor^(31 - lane), times `last`.
struct Weights {
    u32 of_lane[32];
};

__host__ __device__ constexpr Weights weights(u32 factor, u32 last) {
    Weights weights = {};
    for (u32 lane = 32; lane-- > 0;) {
        weights.of_lane[lane] = last;
        last = product(last, factor);
    }
    return weights;
}

__constant__ const Nibbles NIBBLES = nibbles_by_x_1024();
__constant__ const Weights WORD_WEIGHTS = weights(X_32, X_32);
__constant__ const Weights CHUNK_WEIGHTS = weights(X_CHUNK, ONE);

// The product with x^1024. In each of the eight tables sixteen neighbouring banks serve a warp's 32 lanes.
__device__ __forceinline__ u32 times_x_1024(const Nibbles &nibbles, u32 a) {
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

// The sum of all lanes' values, in all lanes.
__device__ __forceinline__ u32 sum_of_lanes(u32 value) {
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) {
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

// The remainder of the words from `begin` to `end`, a multiple of 4; at least four bytes.
//
// Rows end at `end` and begin so far before `begin` that they are whole blocks of 32; what lies before `begin`
// counts as 0, as leading zeros change nothing. Each row but the last 32 is replaced.
__device__ u32 remainder_of_words(const Nibbles &nibbles, u64 begin, u64 end, bool first, u32 lane) {
    constexpr u32 BLOCK = 32 * 128;
    const u32 blocks = u32((end - begin + BLOCK - 1) / BLOCK);
    u64 address = end - u64(blocks) * BLOCK + 4 * lane;
    u32 row[32], next[32];
#pragma unroll
    for (u32 r = 0; r < 32; r++) {
        row[r] = 0;
        next[r] = word_near_begin(address + 128 * r, begin, first);
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
            next[r] = at<u32>(address)[32 * r];
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
        sum = times_x_1024(nibbles, sum) ^ row[r];
    }
    return sum_of_lanes(product(sum, WORD_WEIGHTS.of_lane[lane]));
}

extern "C" __global__ void __launch_bounds__(128, 5) crc_chunks(const CrcRow *rows, u32 row_count) {
    __shared__ Nibbles nibbles;
    (&nibbles.product_of[0][0])[threadIdx.x] = (&NIBBLES.product_of[0][0])[threadIdx.x];
    static_assert(sizeof(Nibbles) == 128 * sizeof(u32), "one entry a thread");
    __syncthreads();
    const u32 index = 4 * blockIdx.x + threadIdx.x / 32;
    if (index >= row_count) {
        return;
    }
    const u32 lane = threadIdx.x % 32;
    const CrcRow row = rows[index];
    const bool first = (row.flags & CRC_FIRST) != 0;
    const u64 end = row.source + row.len;
    const u32 tail = end & 3;
    u32 remainder = first ? 0xffffffffu : 0;
    if (row.len < 8) {
        // The initial ones would reach beyond the words.
        remainder = append_bytes(remainder, at<u8>(row.source), row.len);
    } else {
        remainder = remainder_of_words(nibbles, row.source, end - tail, first, lane);
        remainder = append_bytes(remainder, at<u8>(end - tail), tail);
    }
    if (lane == 0) {
        *at<u32>(row.target) = row.flags == (CRC_FIRST | CRC_LAST) ? ~remainder : remainder;
    }
}

extern "C" __global__ void __launch_bounds__(128) crc_combine(const CombineRow *rows, u32 row_count) {
    const u32 index = 4 * blockIdx.x + threadIdx.x / 32;
    if (index >= row_count) {
        return;
    }
    const u32 lane = threadIdx.x % 32;
    const CombineRow row = rows[index];
    const u32 *remainders = at<u32>(row.remainders);
    // Rows of 32 chunks, filled up with zeros in front.
    const u32 missing = -row.count % 32;
    u32 sum = 0;
    for (u32 chunk = lane; chunk < row.count + missing; chunk += 32) {
        sum = product(sum, X_32_CHUNKS) ^ (chunk < missing ? 0 : remainders[chunk - missing]);
    }
    sum = sum_of_lanes(product(sum, CHUNK_WEIGHTS.of_lane[lane]));
    if (lane == 0) {
        *at<u32>(row.target) = ~sum;
    }
}
