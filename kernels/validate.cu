// Proves indices that only the device has seen: below the range's end, and no two alike.
//
// Grid: a block a row. The launcher cuts long lists into rows of up to 16,384 indices; rows of one list share
// bits and verdict.
//
// Owner: bits of `seen` and of the verdict are only ever set, so their final value is the same in any order.
// Which of two equal indices is the second one depends on the order, and is not told.
//
// Why atomics are right here: the kernel gives a verdict and no bytes of a page. The host refuses the batch
// by it, before anything is logged.
//
// Checked before: the list lies within its memory; `seen` has a bit for each element, all 0.
//
// Bytes moved: four an index, and for each a word of `seen` read and written.

#include "common.cuh"

constexpr u32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(256) validate(const IndexRow *rows, u32 row_count) {
    const IndexRow row = rows[blockIdx.x];
    const u32 *indices = at<u32>(row.indices);
    u32 *seen = at<u32>(row.seen);
    u32 verdict = 0;
    for (u64 i = threadIdx.x; i < row.count; i += THREADS) {
        const u32 index = indices[i];
        // An index out of bounds has no bit in `seen`: setting one would write outside of it.
        if (index >= row.bound) {
            verdict |= OUT_OF_BOUNDS;
            continue;
        }
        const u32 bit = 1u << (index % 32);
        if ((atomicOr(&seen[index / 32], bit) & bit) != 0) {
            verdict |= TWICE;
        }
    }
    // Nearly every thread has nothing to tell, so the verdict of a sound list is never contended.
    if (verdict != 0) {
        atomicOr(at<u32>(row.target), verdict);
    }
}
