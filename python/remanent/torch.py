"""Saves torch tensors durably, as versions in a directory, and checkpoints of training runs.

    save_file(tensors, directory, note=…)      load_file(directory, device=…, at=…)      safe_open(directory)
    versions(directory)      prune(directory, keep=…)      save_model(model, directory)      load_model(model, directory)
    Checkpointer(directory, model, optimizer, …).save(step)      .restore(at=…)
    diff(directory, before, after)      blame(directory, name, index)      also methods of a Checkpointer

State is kept in a store as durable versions. Each version logs only the changed elements, and loads are verified by
checksums. Nothing is pickled: tensors are pages, and all other values have explicit types. A value that cannot be
restored exactly is rejected by name. Saved state is on disk and needs no memory in addition to the tensors themselves,
except that `save_file` holds copies of non-contiguous tensors until they are written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from remanent._checkpoint.checkpointer import Checkpointer
from remanent._checkpoint.saves import Saved
from remanent._state import page_tree
from remanent._store import _native
from remanent._tensors.conversion import blocks_in_place, load_pages, tensors_of
from remanent._tensors.storages import extents_there
from remanent._tensors.tensor_files import (
    TensorSlice,
    checked_device,
    checked_metadata,
    checked_tensors,
    chosen,
    load,
    load_into,
    model_state,
    refuse_file,
    safe_open,
    save,
)
from remanent._tensors.torch_modes import refuse_fake_tensors
from remanent._util.progress import Bar
from remanent._versions.history import Difference, Divergence, ElementChange, blame, diff
from remanent._versions.retention import KEEP_DEFAULT, KeptVersions, ListedVersion, at_of, prune, versions
from remanent._versions.run_versions import Version, whole

__all__ = [
    "Checkpointer", "Difference", "Divergence", "ElementChange", "ListedVersion", "Saved", "TensorSlice", "Version",
    "blame", "diff", "load", "load_file", "load_model", "prune", "safe_open", "save", "save_file", "save_model",
    "versions",
]

_Path = str | os.PathLike[str]
_At = int | str | ListedVersion | None


def __dir__() -> list[str]:
    return __all__


def save_file(tensors: Mapping[str, torch.Tensor], directory: _Path, metadata: Mapping[str, str] | None = None, *,
              note: str | None = None, name: str | None = None, durable: bool = True, keep: int | None = KEEP_DEFAULT,
              keep_for: float | None = None, keep_bytes: int | None = None, progress: bool | None = None) -> int:
    """Saves `tensors` as the newest version in `directory`, completely or not at all, and returns the Lsn of the
    version.

    The directory contains a store, which is created if it does not exist. Only elements that differ from the previous
    version are logged. Logged changes occupy memory until a snapshot, up to 512 MiB. A tensor of which a quarter or
    more changed is written completely. Tensors of the previous version that are not in `tensors` are deleted. Tensors
    that overlap in memory (tied weights, views) are stored once, and overlap again after a load. Tensors of any shape
    and stride are supported, including empty and scalar tensors, with all element types up to `complex128`.

    If all tensors change in each version, disk usage is at most (1.5 × `keep` + 2) times the bytes of all tensors,
    which is 32 times by default. Disk usage is lower if fewer tensors change. Named versions use additional space.

    :param metadata: text by name, which `safe_open(directory).metadata()` returns and `remanent export` writes to the
        file.
    :param note: a remark of up to 64 KiB that is stored with the version in the log.
    :param name: a name of 1 to 64 bytes that keeps the version until `prune` removes the name (`give_up`).
    :param durable: whether to return only after the version survives a power cut. If False, the call returns once the
        version survives the death of the process.
    :param keep: the number of newest versions to keep; None keeps all. Older unnamed versions are removed by this save
        or a later one. All versions between two snapshots are removed together, so up to half as many additional
        versions may remain.
    :param keep_for: versions younger than this many seconds are also kept.
    :param keep_bytes: the disk space in bytes that the directory may use. Beyond that, the oldest versions are removed
        regardless of `keep` and `keep_for`, except for the newest version and named versions. During a save, the
        directory also contains the data of the new version.
    :param progress: False disables the progress bar. None shows it for long saves if standard error is a terminal and
        tqdm is installed.
    :raises RefusedError: a value is not a plain tensor, for example a sparse or quantized tensor or a DTensor; or a
        name or a value of `metadata` is not a str. Nothing is saved.
    :raises TakenError: another version has this name. Nothing is saved.
    :raises ForeignDirectoryError: `directory` is a file or contains something other than a store. Nothing is saved.
    :raises LockedError: another process has the store open.

    >>> import torch, remanent.torch
    >>> tied = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    >>> first = remanent.torch.save_file({"embed": tied, "head": tied.T}, directory, note="step 1")
    >>> tied[0, 0] = 7
    >>> second = remanent.torch.save_file({"embed": tied, "head": tied.T}, directory, note="step 2")
    >>> remanent.torch.load_file(directory)["head"][0, 0]
    tensor(7., dtype=torch.bfloat16)
    >>> remanent.torch.load_file(directory, at=first)["embed"][0, 0]
    tensor(0., dtype=torch.bfloat16)
    """
    refuse_fake_tensors()
    kept = KeptVersions(keep, keep_for, keep_bytes)
    held, metadata_text = checked_tensors(tensors), checked_metadata(metadata)
    refuse_file(directory, loads=False)
    found = extents_there(held)
    # Tensors that share memory are all counted, so the bar may end early.
    with Bar(sum(each.nbytes for each in found), "saving", progress) as bar:
        return page_tree.save(directory, bar.counting(blocks_in_place(found)), note=note, name=name, durable=durable,
                              kept=kept, metadata=metadata_text)


def load_file(directory: _Path, device: str | int | torch.device = "cpu", *, names: Iterable[str] | None = None,
              at: _At = None, progress: bool | None = None) -> dict[str, torch.Tensor]:
    """Loads the tensors of a version in `directory` and returns them by name. Each byte is verified by a checksum
    before it is returned.

    The version can be one of `save_file` or of `remanent import`. No lock is taken, so a writer can continue
    concurrently. All tensors are from the same version.

    :param device: the device of the loaded tensors: "cpu", "cuda", a GPU number or a `torch.device`.
    :param names: the names of the tensors to load; None loads all. `safe_open` reads parts of a tensor.
    :param at: the version: an Lsn, "lsn:N", "snapshot:N", the name of a version or an entry of `versions`; None loads
        the newest version.
    :param progress: as for `save_file`.
    :raises NoStoreError: `directory` contains no store, or is a file, such as a safetensors file.
    :raises NoStateError: the store contains no tensors, or the version does not exist.
    :raises UnknownKeyError: the version has no tensor with one of the names.
    :raises DamagedError: bytes on disk differ from the bytes that were written.

    >>> import torch, remanent.torch
    >>> lsn = remanent.torch.save_file({"w": torch.ones(2, 2), "empty": torch.empty(0, 3)}, directory, name="start")
    >>> loaded = remanent.torch.load_file(directory, at="name:start")
    >>> {name: tuple(tensor.shape) for name, tensor in sorted(loaded.items())}
    {'empty': (0, 3), 'w': (2, 2)}
    >>> list(remanent.torch.load_file(directory, names=["w"]))
    ['w']
    """
    refuse_fake_tensors()
    refuse_file(directory, loads=True)
    where = checked_device(device)
    with _native.View(directory, at_of(at)) as view:
        return _loaded(view, page_tree.read_manifest(whole(view)), where, names, progress)


def _loaded(view: _native.View, manifest: page_tree.Manifest, where: torch.device, names: Iterable[str] | None,
            progress: bool | None) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = {}
    pages = chosen(names, manifest.pages)
    with Bar(sum(view.info(key).length for key in pages), "loading", progress) as bar:
        for page, arrays in load_pages(view, pages, where):
            loaded |= tensors_of(page, arrays, where)
            bar.add(page.numel())
    return loaded


def save_model(model: torch.nn.Module, directory: _Path, metadata: Mapping[str, str] | None = None, **options: Any
               ) -> int:
    """Saves the state of a model as `save_file` does, and returns the Lsn of the version. Tied weights are stored once.

    :param options: keyword arguments of `save_file`, such as `note`, `name` and `keep`.
    :raises RefusedError: the model has extra state that is not a tensor, or `save_file` raises this error. Nothing is
        saved.

    >>> import torch, remanent.torch
    >>> model = torch.nn.Linear(2, 1)
    >>> _ = remanent.torch.save_model(model, directory)
    >>> remanent.torch.load_model(torch.nn.Linear(2, 1), directory)
    ([], [])
    """
    state, metadata_text = model_state(model, metadata)
    return save_file(state, directory, metadata_text or None, **options)


def load_model(model: torch.nn.Module, directory: _Path, strict: bool = True, device: str | int | torch.device = "cpu",
               *, at: _At = None) -> tuple[list[str], list[str]]:
    """Loads a version into a model. Returns the names of the model's tensors that the version does not contain, and the
    names of the version's tensors that the model does not have.

    :param strict: whether to raise an error if such names exist.
    :param device: the device to which tensors are loaded before they are copied to the model's tensors.
    :raises MismatchError: a shape or element type differs, the model is on the meta device, or names differ and
        `strict` is True. Nothing changes.
    :raises NoStoreError: `directory` contains no store. Nothing changes.
    :raises NoStateError: the version does not exist. Nothing changes.
    :raises DamagedError: bytes on disk differ from the bytes that were written. Nothing changes.
    """
    refuse_fake_tensors()
    refuse_file(directory, loads=True)
    where = checked_device(device)
    with _native.View(directory, at_of(at)) as view:
        manifest = page_tree.read_manifest(whole(view))
        loaded = _loaded(view, manifest, where, None, False)
    return load_into(model, loaded, manifest.metadata, strict)
