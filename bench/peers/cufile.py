#!/usr/bin/env python3
"""Compares transfers between a file and GPU memory by cuFile (GPUDirect Storage) with plain calls and pinned memory.

    python3 bench/peers/cufile.py DIR [--gib 4] [--seconds 90]

All methods are measured in turn, round by round. Each measurement transfers a gigabyte of the file. Results are printed
as they are obtained, and their medians at the end. A share is relative to the fastest method without cuFile in the same
round. Cold reads use O_DIRECT, and warm reads come from the page cache. Writes go to new files with O_DIRECT and are
synced. The received bytes are compared with the sent bytes, which is not included in the time.

In the plain methods, each thread has a stream and two buffers in pinned memory, and copies one buffer while it reads or
writes the other. Python drives all methods. For each buffer, cuFile needs one call from Python and the plain methods
need four. With warm buffers of 1 MiB, the interpreter limits the plain methods, so compare the results for 16 MiB.

Without nvidia-fs, the cuFile library works like the plain methods (its compat mode). The settings of cuFile are those
of `CUFILE_ENV_PATH_JSON`, or by default its own settings with compat mode allowed.

`--device host` runs everything except cuFile on a machine without a GPU.
"""

import argparse
import ctypes
import ctypes.util
import glob
import itertools
import json
import mmap
import os
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

MIB = 1 << 20
STAMP = 4096
THREADS = [1, 4, 12]
PLAIN_THREADS = [4, 12]
PIECES = [1 * MIB, 16 * MIB]

libc = ctypes.CDLL(None, use_errno=True)
for name in ("pread64", "pwrite64"):
    function = getattr(libc, name)
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]


class Refused(Exception):
    """The error that a library returns for a call."""


def transfer(call, descriptor, address, size, offset):
    moved = call(descriptor, address, size, offset)
    if moved != size:
        number = ctypes.get_errno()
        reason = os.strerror(number) if moved < 0 else f"it moved {moved} bytes"
        raise Refused(f"{call.__name__} of {size} bytes at {offset}: {reason}")


class Host:
    """Host memory that replaces GPU memory."""

    name = "no GPU: memory of the host in its place"

    def __init__(self):
        self.kept = []

    def use(self):
        pass

    def pinned(self, size):
        memory = mmap.mmap(-1, size)
        self.kept.append(memory)
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))

    allocate = pinned

    def stream(self):
        return None

    event = stream

    def up(self, target, source, size, stream):
        ctypes.memmove(target, source, size)

    down = up

    def record(self, event, stream):
        pass

    def wait(self, event):
        pass

    wait_all = wait

    def clear(self, target, size):
        ctypes.memset(target, 0, size)


class Cuda:
    """A GPU, used through the driver API."""

    # The name of a call, and its arguments.
    CALLS = {
        "cuInit": [ctypes.c_uint],
        "cuDeviceGet": [ctypes.c_void_p, ctypes.c_int],
        "cuDeviceGetName": [ctypes.c_void_p, ctypes.c_int, ctypes.c_int],
        "cuDevicePrimaryCtxRetain": [ctypes.c_void_p, ctypes.c_int],
        "cuCtxSetCurrent": [ctypes.c_void_p],
        "cuMemAlloc_v2": [ctypes.c_void_p, ctypes.c_size_t],
        "cuMemHostAlloc": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint],
        "cuStreamCreate": [ctypes.c_void_p, ctypes.c_uint],
        "cuStreamSynchronize": [ctypes.c_void_p],
        "cuEventCreate": [ctypes.c_void_p, ctypes.c_uint],
        "cuEventRecord": [ctypes.c_void_p, ctypes.c_void_p],
        "cuEventSynchronize": [ctypes.c_void_p],
        "cuMemcpyHtoDAsync_v2": [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p],
        "cuMemcpyDtoHAsync_v2": [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p],
        "cuMemsetD8_v2": [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t],
        "cuCtxSynchronize": [],
    }
    NON_BLOCKING = 1
    SLEEP_AND_NO_TIMING = 1 | 2
    PORTABLE = 1

    def __init__(self, number):
        try:
            self.driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Refused(f"there is no CUDA driver: {error}")
        for name, given in self.CALLS.items():
            function = getattr(self.driver, name)
            function.restype, function.argtypes = ctypes.c_int, given
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), number)
        text = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", text, len(text), device)
        self.name = text.value.decode()
        self.context = self.made("cuDevicePrimaryCtxRetain", device)
        self.use()

    def call(self, name, *given):
        code = getattr(self.driver, name)(*given)
        if code != 0:
            raise Refused(f"{name} failed with {code}")

    def made(self, name, *given):
        value = ctypes.c_uint64()
        self.call(name, ctypes.byref(value), *given)
        return value.value

    def use(self):
        """Makes the context current on the calling thread. Required before all other calls."""
        self.call("cuCtxSetCurrent", self.context)

    def pinned(self, size):
        return self.made("cuMemHostAlloc", size, self.PORTABLE)

    def allocate(self, size):
        return self.made("cuMemAlloc_v2", size)

    def stream(self):
        return self.made("cuStreamCreate", self.NON_BLOCKING)

    def event(self):
        return self.made("cuEventCreate", self.SLEEP_AND_NO_TIMING)

    def up(self, target, source, size, stream):
        self.call("cuMemcpyHtoDAsync_v2", target, source, size, stream)

    def down(self, target, source, size, stream):
        self.call("cuMemcpyDtoHAsync_v2", target, source, size, stream)

    def record(self, event, stream):
        self.call("cuEventRecord", event, stream)

    def wait(self, event):
        self.call("cuEventSynchronize", event)

    def wait_all(self, stream):
        self.call("cuStreamSynchronize", stream)

    def clear(self, target, size):
        self.call("cuMemsetD8_v2", target, 0, size)
        self.call("cuCtxSynchronize")


class CuFile:
    """The library, as `cufile.h` declares it."""

    class Error(ctypes.Structure):
        _fields_ = [("code", ctypes.c_int), ("cuda", ctypes.c_int)]

    class Description(ctypes.Structure):
        _fields_ = [("kind", ctypes.c_int), ("descriptor", ctypes.c_uint64), ("operations", ctypes.c_void_p)]

    class Properties(ctypes.Structure):
        _fields_ = [
            ("nvfs_major", ctypes.c_uint),
            ("nvfs_minor", ctypes.c_uint),
            ("poll_threshold", ctypes.c_size_t),
            ("direct_io_max_kib", ctypes.c_size_t),
            ("status_flags", ctypes.c_uint),
            ("control_flags", ctypes.c_uint),
            ("feature_flags", ctypes.c_uint),
            # Further fields, whose number depends on the version of the library.
            ("rest", ctypes.c_uint * 64),
        ]

    OPAQUE_DESCRIPTOR = 1
    ALLOWS_COMPAT = 1 << 1

    def __init__(self):
        path = self.find()
        try:
            self.library = ctypes.CDLL(path, use_errno=True)
        except OSError as error:
            raise Refused(f"{path} does not load: {error}")
        library, of = self.library, ctypes
        for name, given in {
            "cuFileDriverOpen": [],
            "cuFileDriverGetProperties": [of.c_void_p],
            "cuFileHandleRegister": [of.c_void_p, of.c_void_p],
            "cuFileBufRegister": [of.c_void_p, of.c_size_t, of.c_int],
        }.items():
            getattr(library, name).restype, getattr(library, name).argtypes = self.Error, given
        library.cuFileHandleDeregister.restype, library.cuFileHandleDeregister.argtypes = None, [of.c_void_p]
        for name in ("cuFileRead", "cuFileWrite"):
            function = getattr(library, name)
            function.restype = of.c_ssize_t
            function.argtypes = [of.c_void_p, of.c_void_p, of.c_size_t, of.c_int64, of.c_int64]
        self.path = path
        self.call("cuFileDriverOpen")

    @staticmethod
    def find():
        sites = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path}
        places = [f"{site}/nvidia/*/lib" for site in sites if site]
        places += ["/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/x86_64-linux/lib", "/usr/lib/x86_64-linux-gnu"]
        found = [path for place in places for path in sorted(glob.glob(f"{place}/libcufile.so.0"))]
        loaded = ctypes.util.find_library("cufile")
        if not found and not loaded:
            raise Refused(f"there is no libcufile.so.0 in any of {', '.join(places)}")
        return found[0] if found else loaded

    def call(self, name, *given):
        error = getattr(self.library, name)(*given)
        if error.code != 0:
            raise Refused(f"{name} failed with {error.code} (CUfileOpError in cufile.h), CUDA {error.cuda}")

    def mode(self):
        """Returns a line that describes how the library accesses files."""
        properties = self.Properties()
        self.call("cuFileDriverGetProperties", ctypes.byref(properties))
        module = Path("/proc/driver/nvidia-fs/version")
        kernel = module.read_text().strip() if module.exists() else "not loaded"
        compat = "allowed" if properties.control_flags & self.ALLOWS_COMPAT else "not allowed"
        return (
            f"{self.path}; nvidia-fs: {kernel}, {properties.nvfs_major}.{properties.nvfs_minor} to the library; "
            f"compat mode {compat}; status {properties.status_flags:#x}, features {properties.feature_flags:#x}, "
            f"direct transfers up to {properties.direct_io_max_kib} KiB"
        )

    def register(self, memory, size):
        self.call("cuFileBufRegister", memory, size, 0)

    def handle(self, descriptor):
        description = self.Description(self.OPAQUE_DESCRIPTOR, descriptor, None)
        handle = ctypes.c_void_p()
        self.call("cuFileHandleRegister", ctypes.byref(handle), ctypes.byref(description))
        return handle

    def forget(self, handle):
        self.library.cuFileHandleDeregister(handle)

    def transfer(self, name, handle, memory, size, offset, at):
        moved = getattr(self.library, name)(handle, memory, size, offset, at)
        if moved != size:
            reason = os.strerror(ctypes.get_errno()) if moved == -1 else f"it says {moved}"
            raise Refused(f"{name} of {size} bytes at {offset}: {reason}")


def in_threads(count, work):
    """Runs `work(number)` on each of `count` threads. Raises the first error."""
    raised = []

    def run(number):
        try:
            work(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=[number]) for number in range(count)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return time.perf_counter() - started


class PlainThreads:
    """The streams and buffers of the threads of the plain methods, which all measurements share."""

    def __init__(self, gpu, count):
        self.gpu = gpu
        make = lambda: (gpu.stream(), [(gpu.pinned(max(PIECES)), gpu.event()) for _ in range(2)])
        self.members = [make() for _ in range(count)]

    def read(self, threads, piece, descriptor, start, memory, size):
        dealt = itertools.count()

        def work(number):
            self.gpu.use()
            stream, pieces = self.members[number]
            for turn in itertools.count():
                at = next(dealt) * piece
                if at >= size:
                    break
                area, event = pieces[turn % 2]
                if turn >= 2:
                    self.gpu.wait(event)
                transfer(libc.pread64, descriptor, area, piece, start + at)
                self.gpu.up(memory + at, area, piece, stream)
                self.gpu.record(event, stream)
            self.gpu.wait_all(stream)

        return in_threads(threads, work)

    def write(self, threads, piece, descriptor, start, memory, size):
        dealt = itertools.count()

        def work(number):
            self.gpu.use()
            stream, pieces = self.members[number]
            before = None
            for turn in itertools.count():
                at = next(dealt) * piece
                area, event = pieces[turn % 2]
                if at < size:
                    self.gpu.down(area, memory + at, piece, stream)
                    self.gpu.record(event, stream)
                if before:
                    copied, of, where = before
                    self.gpu.wait(copied)
                    transfer(libc.pwrite64, descriptor, of, piece, start + where)
                if at >= size:
                    break
                before = event, area, at

        return in_threads(threads, work)


def by_cufile(gpu, library, name, threads, piece, descriptor, start, memory, size):
    handle = library.handle(descriptor)
    dealt = itertools.count()

    def work(_):
        gpu.use()
        while (at := next(dealt) * piece) < size:
            library.transfer(name, handle, memory, piece, start + at, at)

    try:
        return in_threads(threads, work)
    finally:
        library.forget(handle)


class Files:
    """The file to read. It contains random bytes, and each MiB starts with its number."""

    def __init__(self, folder, size, gpu):
        self.folder, self.size, self.gpu = folder, size, gpu
        self.path = f"{folder}/read"
        self.area = gpu.pinned(MIB)
        self.random = os.urandom(MIB - 8)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        os.posix_fallocate(descriptor, 0, size)
        for number in range(size // MIB):
            ctypes.memmove(self.area, self.block(number), MIB)
            transfer(libc.pwrite64, descriptor, self.area, MIB, number * MIB)
        os.fsync(descriptor)
        os.close(descriptor)

    def block(self, number, size=MIB):
        return number.to_bytes(8, "little") + self.random[: size - 8]

    def put(self, memory, size, start):
        """Copies a part of the file to the GPU."""
        for number in range(size // MIB):
            ctypes.memmove(self.area, self.block(start // MIB + number), MIB)
            self.gpu.up(memory + number * MIB, self.area, MIB, None)
            self.gpu.wait_all(None)

    def check(self, memory, size, start, what):
        """Checks the first bytes of each MiB on the GPU."""
        for number in range(size // MIB):
            self.gpu.down(self.area, memory + number * MIB, STAMP, None)
            self.gpu.wait_all(None)
            self.compare(start // MIB + number, what)

    def check_file(self, descriptor, size, what):
        """Checks the first bytes of each MiB in a file, with direct I/O."""
        for number in range(size // MIB):
            transfer(libc.pread64, descriptor, self.area, STAMP, number * MIB)
            self.compare(number, what)

    def compare(self, number, what):
        if ctypes.string_at(self.area, STAMP) != self.block(number, STAMP):
            raise SystemExit(f"{what}: MiB {number} is not what it should be")


def compare(arguments, folder):
    begun = time.perf_counter()
    gpu = Host() if arguments.device == "host" else Cuda(int(arguments.device.removeprefix("cuda:")))
    print(f"{gpu.name}; {arguments.dir}")
    library = None
    if arguments.device != "host":
        if "CUFILE_ENV_PATH_JSON" not in os.environ:
            settings = Path(folder, "cufile.json")
            logging = {"dir": folder, "level": "ERROR"}
            settings.write_text(json.dumps({"logging": logging, "properties": {"allow_compat_mode": True}}))
            os.environ["CUFILE_ENV_PATH_JSON"] = str(settings)
        try:
            library = CuFile()
            print(f"cuFile: {library.mode()}")
        except Refused as error:
            print(f"cuFile is left out: {error}")
            library = None

    turn = max(PIECES) * int(arguments.turn_gib * 1024 * MIB // max(PIECES))
    parts = max(1, int(arguments.gib / arguments.turn_gib))
    files = Files(folder, turn * parts, gpu)
    memory = gpu.allocate(turn)
    plain_threads = PlainThreads(gpu, max(PLAIN_THREADS))
    if library:
        try:
            library.register(memory, turn)
            print("cuFile: the GPU's memory is registered")
        except Refused as error:
            print(f"cuFile: the GPU's memory is not registered: {error}")
    print(f"{parts * turn / MIB:.0f} MiB are there after {time.perf_counter() - begun:.1f} s", flush=True)

    plain = [(False, threads, piece) for piece in PIECES for threads in PLAIN_THREADS]
    ways = plain + ([(True, threads, piece) for piece in PIECES for threads in THREADS] if library else [])
    rates, left_out = {}, {}

    def moved(group, way, descriptor, start):
        is_cufile, threads, piece = way
        writes = group == "written"
        if is_cufile:
            call = "cuFileWrite" if writes else "cuFileRead"
            return by_cufile(gpu, library, call, threads, piece, descriptor, start, memory, turn)
        move = plain_threads.write if writes else plain_threads.read
        return move(threads, piece, descriptor, start, memory, turn)

    def read(group, way, number):
        flags = os.O_DIRECT if group == "read cold" else 0
        start = number % parts * turn
        gpu.clear(memory, turn)
        descriptor = os.open(files.path, os.O_RDONLY | flags)
        try:
            took = moved(group, way, descriptor, start)
        finally:
            os.close(descriptor)
        files.check(memory, turn, start, f"{group}, {shown(way)}")
        return took

    def write(group, way, number):
        path = f"{folder}/written"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        try:
            os.posix_fallocate(descriptor, 0, turn)
            took = moved(group, way, descriptor, 0)
            started = time.perf_counter()
            os.fsync(descriptor)
            took += time.perf_counter() - started
            files.check_file(descriptor, turn, f"{group}, {shown(way)}")
        finally:
            os.close(descriptor)
            os.unlink(path)
        return took

    def shown(way):
        is_cufile, threads, piece = way
        name = "cuFile" if is_cufile else "plain calls, pinned memory"
        return f"{name}, {threads} thread{'s' * (threads > 1)}, {piece // MIB} MiB"

    def take_turns(group, take, number):
        for way in ways:
            if (group, way) in left_out:
                continue
            if time.perf_counter() - begun > arguments.seconds:
                return
            try:
                rate = turn / take(group, way, number) / 1e9
                rates.setdefault((group, way), {})[number] = rate
                print(f"round {number + 1}: {group}: {shown(way)}: {rate:.2f} GB/s", flush=True)
            except Refused as error:
                left_out[group, way] = str(error)
                print(f"round {number + 1}: {group}: {shown(way)}: left out: {error}", flush=True)

    def warm(number):
        descriptor = os.open(files.path, os.O_RDONLY)
        for at in range(number % parts * turn, (number % parts + 1) * turn, MIB):
            transfer(libc.pread64, descriptor, files.area, MIB, at)
        os.close(descriptor)

    for number in range(arguments.rounds):
        take_turns("read cold", read, number)
        warm(number)
        take_turns("read warm", read, number)
        files.put(memory, turn, 0)
        take_turns("written", write, number)

    print("\n| | " + " | ".join(f"{group}, GB/s | share" for group in GROUPS) + " |")
    print("|---|" + "---|---|" * len(GROUPS))
    for way in ways:
        cells = []
        for group in GROUPS:
            own = rates.get((group, way), {})
            ceilings = {n: max(rates.get((group, other), {}).get(n, 0) for other in plain) for n in own}
            shares = [rate / ceilings[n] for n, rate in own.items() if ceilings[n]]
            if (group, way) in left_out or not own:
                cells.append("left out | ")
            else:
                share = f"{statistics.median(shares):.2f}" if shares else ""
                cells.append(f"{statistics.median(own.values()):.2f} | {share}")
        print(f"| {shown(way)} | {' | '.join(cells)} |")
    for (group, way), reason in left_out.items():
        print(f"\nleft out: {group}: {shown(way)}: {reason}")
    log = Path(folder, "cufile.log")
    if log.exists() and log.stat().st_size:
        print("\nthe end of cuFile's log:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-5:]))


GROUPS = ["read cold", "read warm", "written"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", help="where the files lie; its disk is what is measured")
    parser.add_argument("--gib", type=float, default=4, help="size of the file that is read (4)")
    parser.add_argument("--turn-gib", type=float, default=1, help="how much of it in one turn (1)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=90, help="no turn begins later than that (90)")
    parser.add_argument("--device", default="cuda:0", help="`cuda:0`, or `host`")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            compare(arguments, folder)
    except Refused as error:
        raise SystemExit(str(error))


if __name__ == "__main__":
    main()
