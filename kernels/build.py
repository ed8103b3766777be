#!/usr/bin/env python3
"""Compiles the kernels, without a GPU and without a CUDA toolkit.

    kernels/build.py            writes kernels/compiled/
    kernels/build.py --check    compiles again and fails if anything differs from what is committed

The compiler is NVRTC of exactly one version, from its wheel on PyPI. The PTX version follows the compiler, and
a driver rejects PTX that is newer than itself, so a newer compiler would exclude older drivers. The wheel is
downloaded once to $REMANENT_NVRTC, or target/nvrtc, and its hash is checked.

Each .cu file is compiled to two files: PTX for the oldest supported architecture, and machine code for the newest.
`record.txt` in the same folder lists the checksums of sources and outputs, and each kernel's registers and spills.
"""

import ctypes
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import zipfile
import zlib

VERSION = "12.4.127"
WHEEL = f"nvidia_cuda_nvrtc_cu12-{VERSION}-py3-none-manylinux2014_x86_64.whl"
WHEEL_SHA256 = "a178759ebb095827bd30ef56598ec182b85547f1508941a3d560eb7ea1fbf338"
PTX_VERSION = "8.4"
PTX_ARCH = "compute_80"
CUBIN_ARCH = "sm_90"
MODULES = ["apply", "crc", "diff", "digest", "select", "validate"]
HEADER = "common.cuh"
OPTIONS = ["--std=c++17"]

KERNELS = pathlib.Path(__file__).resolve().parent
COMPILED = KERNELS / "compiled"


def fetch():
    """Loads the compiler's library, after downloading the wheel if it is missing."""
    cache = pathlib.Path(os.environ.get("REMANENT_NVRTC") or KERNELS.parent / "target" / "nvrtc").resolve()
    wheel = cache / WHEEL
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", "manylinux2014_x86_64", "--dest", str(cache), f"nvidia-cuda-nvrtc-cu12=={VERSION}"]
        subprocess.run(command, check=True)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        sys.exit(f"{wheel}: expected SHA-256 {WHEEL_SHA256}, found {found}")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if "/lib/" in name and ".so" in name:
                target = cache / pathlib.Path(name).name
                if not target.exists():
                    target.write_bytes(archive.read(name))
    # The compiler loads its second library by name, and finds it only if it is already loaded.
    ctypes.CDLL(str(next(cache.glob("libnvrtc-builtins.so.*"))), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(cache / "libnvrtc.so.12"))


def compile_one(nvrtc, name, arch, output):
    """Compiles one file and returns the bytes of `output` ("PTX" or "CUBIN") and the compiler's log."""

    def call(function, *arguments):
        result = getattr(nvrtc, function)(*arguments)
        if result != 0:
            sys.exit(f"{name}.cu: {function} returned {result}\n{log(nvrtc, program)}")

    program = ctypes.c_void_p()
    source = (KERNELS / f"{name}.cu").read_bytes()
    headers = (ctypes.c_char_p * 1)((KERNELS / HEADER).read_bytes())
    header_names = (ctypes.c_char_p * 1)(HEADER.encode())
    file_name = f"{name}.cu".encode()
    call("nvrtcCreateProgram", ctypes.byref(program), source, file_name, 1, headers, header_names)
    options = [*OPTIONS, f"--gpu-architecture={arch}"]
    if output == "CUBIN":
        options.append("--ptxas-options=-v")
    encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    call("nvrtcCompileProgram", program, len(options), encoded)
    size = ctypes.c_size_t()
    call(f"nvrtcGet{output}Size", program, ctypes.byref(size))
    compiled = ctypes.create_string_buffer(size.value)
    call(f"nvrtcGet{output}", program, compiled)
    text = log(nvrtc, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return compiled.raw, text


def log(nvrtc, program):
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode()


def costs(name, text):
    """Returns a line per kernel with its registers, stack and spills, from the assembler's report."""
    pattern = re.compile(
        r"Compiling entry function '(\w+)' for '\w+'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers",
        re.DOTALL,
    )
    found = sorted(pattern.findall(text))
    if len(found) != len(re.findall("Compiling entry function", text)) or not found:
        sys.exit(f"{name}.cu: the assembler's report was not understood\n{text}")
    return [
        f"kernel {kernel} registers {registers} stack {stack} spill_stores {stores} spill_loads {loads}"
        for kernel, stack, stores, loads, registers in found
    ]


def build():
    """Compiles all kernels and returns the contents of each file in `compiled/`, by name."""
    nvrtc = fetch()
    files, lines = {}, [f"nvrtc {VERSION}"]
    for path in [HEADER, *[f"{name}.cu" for name in MODULES]]:
        lines.append(f"source {path} crc32 {zlib.crc32((KERNELS / path).read_bytes()):08x}")
    for name in MODULES:
        ptx, _ = compile_one(nvrtc, name, PTX_ARCH, "PTX")
        ptx = ptx.rstrip(b"\0")
        version = re.search(rb"^\.version (\S+)$", ptx, re.MULTILINE).group(1).decode()
        if version != PTX_VERSION:
            sys.exit(f"{name}.ptx: expected version {PTX_VERSION}, found {version}")
        cubin, text = compile_one(nvrtc, name, CUBIN_ARCH, "CUBIN")
        files[f"{name}.{PTX_ARCH}.ptx"] = ptx
        files[f"{name}.{CUBIN_ARCH}.cubin"] = cubin
        lines += costs(name, text)
    lines += [f"output {path} crc32 {zlib.crc32(files[path]):08x}" for path in sorted(files)]
    files["record.txt"] = ("\n".join(lines) + "\n").encode()
    return files


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    files = build()
    COMPILED.mkdir(exist_ok=True)
    there = {path.name: path.read_bytes() for path in COMPILED.iterdir()}
    if check:
        differing = sorted(name for name in files.keys() | there.keys() if files.get(name) != there.get(name))
        if differing:
            print(files["record.txt"].decode())
            sys.exit(f"not what is committed: {', '.join(differing)}; run kernels/build.py")
        print(f"{len(files)} files are what the compiler makes of the sources")
        return
    for name in there.keys() - files.keys():
        (COMPILED / name).unlink()
    for name, content in files.items():
        (COMPILED / name).write_bytes(content)
    print(files["record.txt"].decode(), end="")


main()
