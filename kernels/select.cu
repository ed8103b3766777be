// The numbers of the bits that are set in bitmaps, rising: `select_count`, `select_scan` and `select_emit`, one
// after the other in a stream.
//
// Grid: a block a row; in `select_scan` a block a bitmap. Long bitmaps are cut into rows by the launcher.
// Owner: each row has one number, that of its set bits, which the scan makes the number of those before it. From
// there on each thread writes what its own word holds, so places are known before anything is written, and no
// result depends on which block runs first.
// Checked before: bitmaps and numbers lie within their memory; numbers are on boundaries of four bytes.
// Bytes moved: the bitmap is read twice, and four bytes written a set bit.

#include "common.cuh"

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / 32;

// Thirty-two bits, those past the bitmap's end 0; any alignment.
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

// Every thread of the block comes here; `sum_of_warp` is shared by them.
__device__ __forceinline__ Sum sum_over_block(u32 own, u32 *sum_of_warp) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 up_to = own;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(EVERYONE, up_to, distance);
        up_to += lane >= distance ? other : 0;
    }
    // Whoever still reads the sums of the round before does so first.
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

extern "C" __global__ void __launch_bounds__(256) select_scan(const ScanRow *rows, u32 row_count) {
    __shared__ u32 sum_of_warp[WARPS];
    const ScanRow row = rows[blockIdx.x];
    u32 *numbers = at<u32>(row.numbers);
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

extern "C" __global__ void __launch_bounds__(256) select_emit(const SelectRow *rows, u32 row_count) {
    __shared__ u32 sum_of_warp[WARPS];
    const SelectRow row = rows[blockIdx.x];
    u32 *target = at<u32>(row.target);
    u32 before = *at<u32>(row.before);
    // Where there is no room left nothing is written: the whole block sees it alike.
    for (u32 begin = 0; begin < row.len && before < row.room; begin += 4 * THREADS) {
        const u32 own_begin = begin + 4 * threadIdx.x;
        u32 word = word_at(at<u8>(row.bits), own_begin, row.len);
        const Sum sum = sum_over_block(__popc(word), sum_of_warp);
        for (u32 slot = before + sum.before; word != 0 && slot < row.room; slot++) {
            target[slot] = row.first + 8 * own_begin + __ffs(word) - 1;
            word &= word - 1;
        }
        before += sum.all;
    }
}
