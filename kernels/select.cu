// The numbers of the bits that are set in bitmaps, rising: `select_count`, `select_scan` and `select_emit`,
// one after the other in a stream.
//
// A capture needs the indices of changed elements. Before these kernels, the host fetched a bit for every
// element: 75 MB for 1.2 GB of 16-bit elements, of which 1 % had changed. Now the shorter of the two, bitmap
// or indices, goes to the host.
//
// Grid: a block of 256 threads a row; in `select_scan` a block a bitmap. The launcher cuts long bitmaps into
// rows of up to 8 KiB.
//
// Owner: each row has one number. `select_count` makes it the number of the row's set bits, and `select_scan`
// the number of set bits in the rows before it. From there on each thread writes the indices of its own word.
// Every place is known before anything is written.
//
// Why the result is deterministic: a place follows from the bits before it, never from an atomic counter. It
// does not matter which block runs first.
//
// Checked before: bitmaps and numbers lie within their memory; numbers are on boundaries of four bytes.
//
// Bytes moved: the bitmap is read twice, and four bytes are written for each set bit.

#include "common.cuh"

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / 32;

// Thirty-two bits at any alignment; bits past the bitmap's end are 0. No byte past the end is read: the
// bitmap may end with its memory.
__device__ __forceinline__ u32 word_at(const u8 *bits, u32 begin, u32 len) {
    const u8 *from = bits + begin;
    if (begin + 4 <= len && ((u64)from & 3) == 0) {
        return *reinterpret_cast<const u32 *>(from);
    }
    u32 word = 0;
#pragma unroll
    for (u32 byte = 0; byte < 4; byte++) {
        if (begin + byte < len) {
            word |= u32(from[byte]) << (8 * byte);
        }
    }
    return word;
}

// A sum over the block: over the threads before this one, and over all.
struct Sum {
    u32 before;
    u32 all;
};

// Sums up over the block. Every thread of the block comes here, and `sum_of_warp` is shared by them.
//
// A warp sums up by shuffles in five steps. The sums of the eight warps then go through shared memory, where
// each thread adds up those before its own.
__device__ __forceinline__ Sum sum_over_block(u32 own, u32 *sum_of_warp) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 up_to = own;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(EVERYONE, up_to, distance);
        up_to += lane >= distance ? other : 0;
    }
    // A thread that still reads the sums of the round before does so first.
    __syncthreads();
    if (lane == 31) {
        sum_of_warp[warp] = up_to;
    }
    __syncthreads();
    Sum sum = {up_to - own, 0};
#pragma unroll
    for (u32 other = 0; other < WARPS; other++) {
        sum.before += other < warp ? sum_of_warp[other] : 0;
        sum.all += sum_of_warp[other];
    }
    return sum;
}

// The number of set bits of each row. It goes to a place of its own, so that blocks need not wait for each
// other.
extern "C" __global__ void __launch_bounds__(256) select_count(const SelectRow *rows, u32 row_count) {
    __shared__ u32 sum_of_warp[WARPS];
    const SelectRow row = rows[blockIdx.x];
    u32 own = 0;
    for (u32 begin = 4 * threadIdx.x; begin < row.len; begin += 4 * THREADS) {
        own += __popc(word_at(at<u8>(row.bits), begin, row.len));
    }
    const Sum sum = sum_over_block(own, sum_of_warp);
    if (threadIdx.x == 0) {
        *at<u32>(row.before) = sum.all;
    }
}

// From the number of set bits in each row to the number before it, and the bitmap's total to `target`.
//
// One block works through a bitmap, 256 rows a round: with rows of 8 KiB a round covers 2 MiB of bits. So a
// scan over several blocks, which would have to wait for each other, is not needed.
extern "C" __global__ void __launch_bounds__(256) select_scan(const ScanRow *rows, u32 row_count) {
    __shared__ u32 sum_of_warp[WARPS];
    const ScanRow row = rows[blockIdx.x];
    u32 *numbers = at<u32>(row.numbers);
    // Set bits in all rounds before; the same in every thread, as every thread adds the same sums.
    u32 before = 0;
    for (u32 begin = 0; begin < row.count; begin += THREADS) {
        const u32 i = begin + threadIdx.x;
        const Sum sum = sum_over_block(i < row.count ? numbers[i] : 0, sum_of_warp);
        if (i < row.count) {
            numbers[i] = before + sum.before;
        }
        before += sum.all;
    }
    if (threadIdx.x == 0) {
        *at<u32>(row.target) = before;
    }
}

// The indices of the set bits of each row, from the row's place on.
extern "C" __global__ void __launch_bounds__(256) select_emit(const SelectRow *rows, u32 row_count) {
    __shared__ u32 sum_of_warp[WARPS];
    const SelectRow row = rows[blockIdx.x];
    u32 *target = at<u32>(row.target);
    u32 before = *at<u32>(row.before);
    // If no room is left nothing is written. The whole block sees it alike, so no thread misses the barriers.
    for (u32 begin = 0; begin < row.len && before < row.room; begin += 4 * THREADS) {
        const u32 own_begin = begin + 4 * threadIdx.x;
        u32 word = word_at(at<u8>(row.bits), own_begin, row.len);
        const Sum sum = sum_over_block(__popc(word), sum_of_warp);
        // Lowest bit first: indices rise within a thread's word, from thread to thread, and from round to
        // round.
        for (u32 slot = before + sum.before; word != 0 && slot < row.room; slot++) {
            target[slot] = row.first + 8 * own_begin + __ffs(word) - 1;
            word &= word - 1;
        }
        before += sum.all;
    }
}
