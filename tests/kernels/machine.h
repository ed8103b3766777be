// CUDA extensions of C++, as far as `kernels/*.cu` need them to compile unchanged.
//
// The threads of a block are fibers of one thread (`machine.cpp`), and one block runs at a time, so atomics are plain
// operations and `__shared__` variables are static.

#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static
#define __forceinline__ inline
#define __align__(n) alignas(n)
#define __launch_bounds__(...)

struct Index {
    unsigned x;
};

extern Index threadIdx, blockIdx;

// Barrier of the threads of the block, or of the warp.
void __syncthreads();
void __syncwarp();

// Returns the `value` that lane `lane` of the same warp passes, after every lane has passed one. A lane
unsigned exchange(unsigned value, unsigned lane);

inline unsigned __shfl_xor_sync(unsigned, unsigned value, unsigned distance) {
    return exchange(value, (threadIdx.x % 32) ^ distance);
}

inline unsigned __shfl_up_sync(unsigned, unsigned value, unsigned distance) {
    const unsigned lane = threadIdx.x % 32;
    return exchange(value, lane >= distance ? lane - distance : lane);
}

inline unsigned __shfl_down_sync(unsigned, unsigned value, unsigned distance) {
    return exchange(value, threadIdx.x % 32 + distance);
}

inline unsigned __shfl_sync(unsigned, unsigned value, unsigned lane) {
    return exchange(value, lane % 32);
}

inline bool __any_sync(unsigned, bool value) {
    unsigned any = value;
    for (unsigned distance = 16; distance > 0; distance /= 2) {
        any |= exchange(any, (threadIdx.x % 32) ^ distance);
    }
    return any != 0;
}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
    return unsigned(((unsigned long long)(high) << 32 | low) >> (bits & 31));
}

inline unsigned long long __umul64hi(unsigned long long one, unsigned long long other) {
    return (unsigned long long)((unsigned __int128)(one) * other >> 64);
}

inline unsigned atomicOr(unsigned *target, unsigned bits) {
    const unsigned old = *target;
    *target |= bits;
    return old;
}

inline int __popc(unsigned word) {
    return __builtin_popcount(word);
}

inline int __ffs(unsigned word) {
    return __builtin_ffs(int(word));
}
