// Writes the indices of the set bits of bitmaps in rising order: `select_count`, `select_scan` and
// `select_emit`, run one after the other in a stream.
//
// A capture needs the indices of changed elements. Before these kernels, the host fetched a bit for every
// element: 75 MB for 1.2 GB of 16-bit elements, of which 1 % had changed. Now the shorter of the two, bitmap
// or indices, is copied to the host.
//
// Grid: a block of 256 threads per row; in `select_scan`, a block per bitmap. The launcher splits long
// bitmaps into rows of up to 8 KiB.
//
// Owner: each row has one number. `select_count` sets it to the number of the row's set bits, and
// `select_scan` replaces it with the number of set bits in the rows before it. Each thread then writes the
// indices of its own word. Every position is known before anything is written.
//
// Why the result is deterministic: a position depends only on the bits before it, never on an atomic counter,
// so the order of blocks does not matter.
//
// Checked before: bitmaps and indices are within their memory; indices are aligned to four bytes.
//
// Bytes moved: the bitmap is read twice, and four bytes are written for each set bit.

#include "common.cuh"

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / 32;

// Returns 32 bits at any alignment; bits beyond the bitmap's end are 0. No byte beyond the end is read,
// because the memory may end there.
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

// A sum over the threads before this one, and over the whole block.
struct Sum {
    u32 before;
    u32 all;
};

// Sums a value over the block. Every thread of the block must call this with the same shared `sum_of_warp`.
//
// A warp sums with shuffles in five steps. The sums of the eight warps are then exchanged in shared memory,
// where each thread adds those before its own.
__device__ __forceinline__ Sum sum_over_block(u32 own, u32 *sum_of_warp) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 up_to = own;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(FULL_WARP, up_to, distance);
        up_to += lane >= distance ? other : 0;
    }
    // Threads that still read the sums of the previous round finish first.
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

// Counts the set bits of each row. Each count has a position of its own, so that blocks need not wait for
// each other.
extern "C" __global__ void __launch_bounds__(256) select_count(const SelectRow *rows, u32 row_count) {
    __shared__ u32 sum_of_warp[WARPS];
    const SelectRow row = rows[blockIdx.x];
    u32 own = 0;
    for (u32 begin = 4 * threadIdx.x; begin < row.len; begin += 4 * THREADS) {
        own += __popc(word_at(ptr_at<u8>(row.bits), begin, row.len));
    }
    const Sum sum = sum_over_block(own, sum_of_warp);
    if (threadIdx.x == 0) {
        *ptr_at<u32>(row.before) = sum.all;
    }
}

// Replaces the number of set bits in each row with the number before it, and writes the bitmap's total to
// `target`.
//
// One block processes a bitmap, 256 rows per round: with rows of 8 KiB, a round covers 2 MiB of bits. A scan
// over several blocks, which would have to wait for each other, is therefore unnecessary.
extern "C" __global__ void __launch_bounds__(256) select_scan(const ScanRow *rows, u32 row_count) {
    __shared__ u32 sum_of_warp[WARPS];
    const ScanRow row = rows[blockIdx.x];
    u32 *numbers = ptr_at<u32>(row.numbers);
    // Set bits in all previous rounds, the same in every thread, because every thread adds the same sums.
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
        *ptr_at<u32>(row.target) = before;
    }
}

// Writes the indices of the set bits of each row, starting at the row's position.
extern "C" __global__ void __launch_bounds__(256) select_emit(const SelectRow *rows, u32 row_count) {
    __shared__ u32 sum_of_warp[WARPS];
    const SelectRow row = rows[blockIdx.x];
    u32 *target = ptr_at<u32>(row.target);
    u32 before = *ptr_at<u32>(row.before);
    // If no space is left, nothing is written. The condition is the same for the whole block, so no thread
    // misses a barrier.
    for (u32 begin = 0; begin < row.len && before < row.room; begin += 4 * THREADS) {
        const u32 own_begin = begin + 4 * threadIdx.x;
        u32 word = word_at(ptr_at<u8>(row.bits), own_begin, row.len);
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
