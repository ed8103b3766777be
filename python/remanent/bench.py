"""Measures saves and loads of tensors on your own disk and GPU, and compares them with those of other libraries.

    python -m remanent.bench DIR [--device cuda:0] [--gib 1] [--rounds 3] [--json] [--plot FILE.svg]

Each method saves the same random tensors to a new folder in DIR. Each round measures all methods, so that other load on
the machine affects them equally. A save ends when all of its bytes are on the disk. If a library does not sync its
files, they are synced within the measured time. A load ends when the tensors are on the device; comparing them with the
saved tensors is not measured. `raw` is a loop of four threads that only writes and syncs, and shows the limit of the
disk. Libraries that are not installed are listed and skipped.

Remanent verifies every loaded byte by a checksum; the other methods verify nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from remanent.torch import Checkpointer, load_file, save_file

_TENSORS = 64
_RAW_THREADS = 4
_MIB = 1 << 20
# The share of the tensors' elements that change before the save of a mostly unchanged state.
_CHANGED_PARTS = 10

_State = dict[str, torch.Tensor]


def _sync(folder: Path) -> None:
    """Makes all files below a folder, and their names, durable."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Way:
    """A method to save tensors. `save` returns once the tensors are durable."""

    name = ""
    package = "torch"

    def __init__(self, folder: Path, state: _State) -> None:
        self.folder, self.state = folder, state

    def save(self) -> None:
        raise NotImplementedError

    def load(self) -> _State | None:
        """Loads and returns the tensors. Returns None if this method only saves."""
        return None

    def close(self) -> None:
        """Closes the files in the folder."""


class _Raw(_Way):
    name = "raw, 4 threads"

    def save(self) -> None:
        arrays: list[Any] = [each.cpu().numpy() for each in self.state.values()]
        host = [memoryview(each) for each in arrays]

        def write(thread: int) -> None:
            with open(self.folder / f"{thread}.bin", "wb", buffering=0) as file:
                for data in host[thread::_RAW_THREADS]:
                    at = 0
                    while at < len(data):
                        at += file.write(data[at:at + 4 * _MIB]) or 0
                os.fsync(file.fileno())

        with concurrent.futures.ThreadPoolExecutor(_RAW_THREADS) as pool:
            list(pool.map(write, range(_RAW_THREADS)))
        _sync(self.folder)


class _SaveFile(_Way):
    name = "remanent: save_file"

    def save(self) -> None:
        save_file(self.state, self.folder, progress=False)

    def load(self) -> _State:
        return load_file(self.folder, device=next(iter(self.state.values())).device, progress=False)


class _Checkpointer(_Way):
    name = "remanent: Checkpointer"

    def __init__(self, folder: Path, state: _State) -> None:
        super().__init__(folder, state)
        parameters = {name: torch.nn.Parameter(each, requires_grad=False) for name, each in state.items()}
        self._run = Checkpointer(folder, torch.nn.ParameterDict(parameters), rng=False)
        self._step = 0

    def save(self) -> None:
        self._step += 1
        self._run.save(self._step, progress=False)

    def load(self) -> _State:
        self._run.restore(progress=False)
        return self.state

    def close(self) -> None:
        self._run.close()


class _TorchSave(_Way):
    name = "torch.save"

    def save(self) -> None:
        torch.save(self.state, self.folder / "state.pt")
        _sync(self.folder)

    def load(self) -> _State:
        device = next(iter(self.state.values())).device
        loaded: _State = torch.load(self.folder / "state.pt", map_location=device, weights_only=True)
        return loaded


class _Safetensors(_Way):
    name = "safetensors"
    package = "safetensors"

    def save(self) -> None:
        from safetensors.torch import save_file as save

        save(self.state, self.folder / "state.safetensors")
        _sync(self.folder)

    def load(self) -> _State:
        from safetensors.torch import load_file as load

        return load(self.folder / "state.safetensors", device=str(next(iter(self.state.values())).device))


class _Dcp(_Way):
    name = "torch.distributed.checkpoint"

    def save(self) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = FileSystemWriter(self.folder, thread_count=8, sync_files=True, overwrite=True)
        save(dict(self.state), storage_writer=writer, no_dist=True)
        _sync(self.folder)

    def load(self) -> _State:
        from torch.distributed.checkpoint.state_dict_loader import load

        loaded: dict[str, Any] = {name: torch.empty_like(each) for name, each in self.state.items()}
        load(loaded, checkpoint_id=self.folder, no_dist=True)
        return loaded


class _Orbax(_Way):
    name = "orbax"
    package = "orbax.checkpoint"

    def save(self) -> None:
        import orbax.checkpoint

        target = self.folder / "state"
        shutil.rmtree(target, ignore_errors=True)
        with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(target.absolute(), {name: each.cpu().numpy() for name, each in self.state.items()})
        _sync(self.folder)


_WAYS: tuple[type[_Way], ...] = (_Raw, _SaveFile, _Checkpointer, _TorchSave, _Safetensors, _Dcp, _Orbax)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _change(state: _State, part: int) -> None:
    """Fills the first 1/`part` of each tensor with new random bytes."""
    for each in state.values():
        with torch.no_grad():
            each[: len(each) // part].random_(0, 256)


def _measured(make: type[_Way], folder: Path, state: _State, device: torch.device) -> dict[str, float]:
    """Returns the seconds that each operation of a method takes in one round, by row."""
    folder.mkdir()
    way = make(folder, state)
    seconds = {}
    try:
        _change(state, 1)
        seconds["save, first"] = _seconds(device, way.save)
        _change(state, 1)
        seconds["save, all changed"] = _seconds(device, way.save)
        _change(state, _CHANGED_PARTS)
        seconds["save, a tenth changed"] = _seconds(device, way.save)
        saved = {name: each.clone() for name, each in state.items()}
        with torch.no_grad():
            for each in state.values():
                each.zero_()
        loaded: list[_State | None] = []
        took = _seconds(device, lambda: loaded.append(way.load()))
        if loaded[0] is not None:
            seconds["load, warm"] = took
            if any(not torch.equal(each, loaded[0][name]) for name, each in saved.items()):
                raise RuntimeError(f"{way.name} loaded bytes that differ from those it saved")
    finally:
        way.close()
        shutil.rmtree(folder, ignore_errors=True)
    return seconds


def run(directory: str | os.PathLike[str], *, device: str = "cpu", gib: float = 1.0, rounds: int = 3,
        report: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Runs the measurements and returns the results as plain values.

    :param directory: an existing directory with room for about three times `gib`. The files are in a new folder in this
        directory, which is removed at the end.
    :param device: the device of the tensors: "cpu", "cuda" or "cuda:N".
    :param gib: the size of all tensors in GiB.
    :param rounds: the number of rounds. Results are medians over the rounds.
    :param report: called with a line of progress before each measurement.
    :returns: a dict with "bytes", "device", "missing" (the packages that are not installed) and "rows". For each row
        and method, "rows" contains the median rate in bytes per second and the rates of all rounds.

    >>> import remanent.bench
    >>> results = remanent.bench.run(directory, gib=1 / 1024, rounds=1)
    >>> results["rows"]["save, first"]["remanent: save_file"]["median"] > 0
    True
    """
    where = torch.device(device)
    nbytes = max(1, int(gib * (1 << 30)) // _TENSORS) * _TENSORS
    state = {f"t{number}": torch.empty(nbytes // _TENSORS, dtype=torch.uint8, device=where) for number in range(_TENSORS)}
    ways = [way for way in _WAYS if _is_installed(way.package)]
    rates: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="remanent-bench-", dir=directory) as root:
        for number in range(rounds):
            for way in ways:
                report(f"round {number + 1} of {rounds}: {way.name}")
                for row, seconds in _measured(way, Path(root) / "state", state, where).items():
                    rates.setdefault(row, {}).setdefault(way.name, []).append(nbytes / seconds)
    rows = {row: {way: {"median": statistics.median(each), "rounds": each} for way, each in of_row.items()}
            for row, of_row in rates.items()}
    missing = sorted({way.package for way in _WAYS} - {way.package for way in ways})
    return {"bytes": nbytes, "device": str(where), "missing": missing, "rows": rows}


def _table(results: dict[str, Any]) -> str:
    lines = [f"{results['bytes'] / 1e9:.2f} GB in {_TENSORS} tensors on {results['device']}, GB/s, medians"]
    for row, ways in results["rows"].items():
        lines.append(f"\n{row}")
        best = max(rate["median"] for rate in ways.values())
        for way, rate in ways.items():
            bar = "#" * round(24 * rate["median"] / best)
            lines.append(f"  {way:30}{rate['median'] / 1e9:8.2f}  {bar}")
    if results["missing"]:
        lines.append(f"\nnot installed: {', '.join(results['missing'])}")
    return "\n".join(lines)


def _plot(results: dict[str, Any]) -> str:
    """Returns the results as an SVG image with one group of bars per row, readable on light and dark pages."""
    width, bar, gap, left = 720, 16, 28, 230
    parts, at = [], 30
    for row, ways in results["rows"].items():
        parts.append(f'<text x="10" y="{at}" font-weight="bold">{row}, GB/s</text>')
        at += 10
        best = max(rate["median"] for rate in ways.values())
        for way, rate in ways.items():
            length = (width - left - 70) * rate["median"] / best
            color = "#d95f02" if way.startswith("remanent") else "#7f8c8d"
            parts.append(f'<text x="20" y="{at + 12}">{way}</text><rect x="{left}" y="{at}" width="{length:.1f}" '
                         f'height="{bar - 3}" fill="{color}"/><text x="{left + length + 6:.1f}" y="{at + 12}">'
                         f'{rate["median"] / 1e9:.2f}</text>')
            at += bar
        at += gap
    style = "text{font:12px sans-serif;fill:#222}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{at}" viewBox="0 0 {width} {at}">'
            f"<style>{style}</style>{''.join(parts)}</svg>\n")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 2 for a usage error."""
    parser = argparse.ArgumentParser(prog="python -m remanent.bench", description=(__doc__ or "").split("\n\n")[0],
                                     epilog="Example: python -m remanent.bench /mnt/nvme --device cuda:0 --gib 4")
    parser.add_argument("directory", metavar="DIR", help="an existing directory on the disk to measure")
    parser.add_argument("--device", default="cpu", help="device of the tensors: cpu or cuda:N (default: cpu)")
    parser.add_argument("--gib", type=float, default=1.0, help="total size of the tensors in GiB (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; the results are medians (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--plot", metavar="FILE", help="also write a plot as an SVG file")
    given = parser.parse_args(arguments)
    if not os.path.isdir(given.directory):
        parser.error(f"DIR: {given.directory} is not a directory")
    if given.gib <= 0 or given.rounds < 1:
        parser.error("--gib and --rounds must be positive")
    is_shown = sys.stderr.isatty()
    with warnings.catch_warnings():
        # DCP warns of every save by a single process.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        results = run(given.directory, device=given.device, gib=given.gib, rounds=given.rounds,
                      report=lambda line: print(line, file=sys.stderr) if is_shown else None)
    print(json.dumps(results) if given.json else _table(results))
    if given.plot:
        Path(given.plot).write_text(_plot(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
