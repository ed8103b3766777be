"""Makes torch's wheel from PyPI importable on machines without the CUDA libraries that it links to.

PyPI has no CPU-only build of torch for this platform, and the CUDA libraries take 5 GB. This script creates a stand-in
for each of them in torch's own folder: it has every function that torch looks up, and each reports that there is no
GPU. Run it with the interpreter of the environment that contains torch. Needs a C compiler with `readelf` and `nm`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

# Libraries whose symbols have no version, by the prefixes of their functions' names.
BY_PREFIX = {
    "nccl": "libnccl.so.2",
    "nvrtc": "libnvrtc.so.13",
    "cupti": "libcupti.so.13",
    "cudnn": "libcudnn.so.9",
    "nvshmem": "libnvshmem_host.so.3",
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
}
NO_DEVICE = 100  # cudaErrorNoDevice


def output_of(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def body(function: str) -> str:
    """Returns the body of a C function which reports that there is no GPU."""
    if function == "cudaGetDeviceCount":
        return f"int {function}(int *count) {{ if (count) *count = 0; return {NO_DEVICE}; }}"
    if function == "__cudaRegisterFatBinary":
        return f"static void *handle[4]; void *{function}(void *binary) {{ return handle; }}"
    if function.startswith("__cuda") or function in ("cudaGetLastError", "cudaPeekAtLastError"):
        return f"int {function}() {{ return 0; }}"
    if re.search(r"Get(Last)?Error(String|Name)?$|GetStatusString$", function):
        return f'const char *{function}() {{ return "no CUDA: a stand-in library"; }}'
    if function in ("cudaDriverGetVersion", "cudaRuntimeGetVersion"):
        return f"int {function}(int *version) {{ if (version) *version = 0; return 0; }}"
    return f"int {function}() {{ return {NO_DEVICE}; }}"


def main() -> None:
    lib = Path(sysconfig.get_path("platlib")) / "torch" / "lib"
    needed: set[str] = set()
    undefined: set[tuple[str, str]] = set()
    defined: set[str] = set()
    library_of: dict[str, str] = {}
    for so in lib.glob("*.so*"):
        if not so.name.startswith(("libtorch", "libc10", "libcaffe2", "libshm")):
            continue
        needed |= set(re.findall(r"NEEDED.*\[(.*?)\]", "\n".join(output_of("readelf", "-dW", str(so)))))
        library = None
        for line in output_of("readelf", "-VW", str(so)):
            if found := re.search(r"File: (\S+)\s+Cnt", line):
                library = found[1]
            elif library and (found := re.search(r"Name: (\S+)\s+Flags", line)):
                library_of[found[1]] = library
        for line in output_of("nm", "-D", str(so)):
            *_, kind, symbol = line.split()
            name, _, version = symbol.replace("@@", "@").partition("@")
            if kind in "Uw":
                undefined.add((name, version))
            else:
                defined.add(name)
    missing = sorted(name for name in needed if re.match(r"lib(cu|nccl|nv)", name) and name != "libcuda.so.1")
    functions: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, version in undefined:
        if name in defined:
            continue
        if version:
            if library_of.get(version) in missing:
                functions[library_of[version]][version].add(name)
        elif re.match(r"(cu|nccl|nv)", name):
            library = next((library for prefix, library in BY_PREFIX.items() if name.startswith(prefix)), "libcudart.so.13")
            functions[library][""].add(name)
    with tempfile.TemporaryDirectory() as folder:
        for library in missing:
            versions = functions[library]
            source, target = Path(folder) / f"{library}.c", lib / library
            names = sorted(set().union(*versions.values()))
            source.write_text("\n".join(body(name) for name in names) + "\n")
            command = ["cc", "-w", "-shared", "-fPIC", "-O1", "-o", str(target), f"-Wl,-soname,{library}", str(source)]
            if any(versions):
                script = Path(folder) / f"{library}.map"
                script.write_text("\n".join(f"{version} {{ global: {' '.join(f'{name};' for name in sorted(listed))} }};"
                                            for version, listed in versions.items() if version) + "\n")
                command.append(f"-Wl,--version-script={script}")
            subprocess.run(command, check=True)
    print(f"{len(missing)} stand-ins for libraries of CUDA in {lib}", file=sys.stderr)


if __name__ == "__main__":
    main()
