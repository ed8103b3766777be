#!/usr/bin/env bash
# NVIDIA H200, driver 580.159.04 (CUDA 13.0), Linux with transparent huge pages on "madvise": pinned host memory from
# `cuMemHostAlloc` takes twice as long as memory of huge pages that the process fills with zeros and then registers.
#
# Seen, 2 GiB, GB/s, two rounds: `cuMemHostAlloc` 2.5 to 3.1, with and without CU_MEMHOSTALLOC_PORTABLE. An anonymous
# mapping with MADV_HUGEPAGE and MADV_POPULATE_WRITE 5.8 to 7.0, then `cuMemHostRegister` 41 to 54: together 5.2 to 6.2.
# With pages of 4 KiB, populating takes 2.4 to 3.8 and registering 22 to 31. Neither more threads that populate (1 to 16)
# nor several threads that register parts of the mapping (4 and 8) are faster. Copies from the GPU reach 55 GB/s into all
# of them. Unregistering takes 50 to 63, `cuMemFreeHost` 7 to 12.
#
# What follows: a program that pins gigabytes at its first save waits for pages of 4 KiB, not for the GPU. Registered
# memory is the process's own, though: it counts toward the memory limit of its control group, and populating it can wake
# the kernel's out-of-memory killer where `cuMemHostAlloc` returns an error.
#
# Needs a GPU and 3 GiB of free memory; without a GPU, it prints a message and ends.
set -euo pipefail
python3 - <<'PYTHON'
import ctypes
import sys
import time

try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    sys.exit(print(f"SKIPPED: no GPU driver: {error}"))
if cuda.cuInit(0):
    sys.exit(print("SKIPPED: no GPU"))
LEN, HUGE = 2 << 30, 2 << 20
POPULATE_WRITE, HUGEPAGE = 23, 14
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def check(code):
    assert code == 0, code


device, context, version = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
check(cuda.cuCtxSetCurrent(context))
check(cuda.cuDriverGetVersion(ctypes.byref(version)))


def by_driver():
    address, start = ctypes.c_void_p(), time.perf_counter()
    check(cuda.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(LEN), 1))
    seconds = time.perf_counter() - start
    check(cuda.cuMemFreeHost(address))
    return seconds


def registered():
    start = time.perf_counter()
    mapping = libc.mmap(None, LEN + HUGE, 3, 0x22, -1, 0)
    memory = (mapping + HUGE - 1) & -HUGE
    check(libc.madvise(memory, LEN, HUGEPAGE))
    check(libc.madvise(memory, LEN, POPULATE_WRITE))
    check(cuda.cuMemHostRegister_v2(ctypes.c_void_p(memory), ctypes.c_size_t(LEN), 1))
    seconds = time.perf_counter() - start
    check(cuda.cuMemHostUnregister(ctypes.c_void_p(memory)))
    check(libc.munmap(mapping, LEN + HUGE))
    return seconds


with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
    assert "[never]" not in file.read(), "transparent huge pages are off"
rounds = [(by_driver(), registered()) for _ in range(5)]
drivers, own = (sorted(times)[2] for times in zip(*rounds))
print(f"CUDA {version.value}: cuMemHostAlloc {LEN / drivers / 1e9:.1f} GB/s, huge pages and register "
      f"{LEN / own / 1e9:.1f} GB/s, ratio {drivers / own:.2f}")
assert drivers / own > 1.4, "as fast as registered huge pages now"
PYTHON
