// Checks indices that only the device has seen: all must be below the end of the range and different.
//
// Grid: a block per row. The launcher splits long lists into rows of up to 16,384 indices; rows of one list
// share bits and verdict.
//
// Owner: bits of `seen` and of the verdict are only ever set, so their final value is the same in any order.
// The order decides which of two equal indices is the second one, but this is not reported.
//
// Why atomics are correct here: the kernel produces a verdict and no bytes of a page. The host uses it to
// reject the batch before anything is logged.
//
// Checked before: the list is within its memory; `seen` has a bit for each element, all 0.
//
// Bytes moved: four per index, and for each a word of `seen` read and written.

#include "common.cuh"

constexpr u32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(256) validate(const IndexRow *rows, u32 row_count) {
    const IndexRow row = rows[blockIdx.x];
    const u32 *indices = ptr_at<u32>(row.indices);
    u32 *seen = ptr_at<u32>(row.seen);
    u32 verdict = 0;
    for (u64 i = threadIdx.x; i < row.count; i += THREADS) {
        const u32 index = indices[i];
        // An index out of bounds has no bit in `seen`: setting one would write beyond its end.
        if (index >= row.bound) {
            verdict |= OUT_OF_BOUNDS;
            continue;
        }
        const u32 bit = 1u << (index % 32);
        if ((atomicOr(&seen[index / 32], bit) & bit) != 0) {
            verdict |= TWICE;
        }
    }
    // Almost no thread sets a flag, so there is no contention for the verdict of a valid list.
    if (verdict != 0) {
        atomicOr(ptr_at<u32>(row.target), verdict);
    }
}
