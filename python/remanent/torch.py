"""Durable torch tensors: versioned files of tensors, and checkpoints of training runs.

    save_file(tensors, directory, note=…)      load_file(directory, device=…, at=…)      safe_open(directory)
    versions(directory)      prune(directory, keep=…)      save_model(model, directory)      load_model(model, directory)
    Checkpointer(directory, model, optimizer, …).save(step)      .restore(at=…)
    diff(directory, before, after)      blame(directory, name, index)      and those of a Checkpointer

Both keep state in a store as durable versions. Each version logs only the changed elements, and checksums verify what
is loaded. Nothing is pickled: tensors are pages, all other values are typed, and a value that cannot be stored
faithfully is rejected by name. Saved state is on disk and takes no memory in addition to the tensors themselves, except
that `save_file` holds copies of non-contiguous tensors until everything is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from remanent import _native
from remanent._checkpoint.checkpointer import Checkpointer
from remanent._checkpoint.saves import Saved
from remanent._state import page_tree
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
from remanent._versions.history import Difference, ElementChange, blame, diff
from remanent._versions.retention import KEEP_DEFAULT, KeptVersions, ListedVersion, at_of, prune, versions
from remanent._versions.run_versions import Version, whole

__all__ = [
    "Checkpointer", "Difference", "ElementChange", "ListedVersion", "Saved", "TensorSlice", "Version", "blame", "diff",
    "load", "load_file", "load_model", "prune", "safe_open", "save", "save_file", "save_model", "versions",
]

_Path = str | os.PathLike[str]
_At = int | str | ListedVersion | None


def __dir__() -> list[str]:
    return __all__


def save_file(tensors: Mapping[str, torch.Tensor], directory: _Path, metadata: Mapping[str, str] | None = None, *,
              note: str | None = None, name: str | None = None, durable: bool = True, keep: int | None = KEEP_DEFAULT,
              keep_for: float | None = None, keep_bytes: int | None = None, progress: bool | None = None) -> int:
    """Saves `tensors` as the newest version in `directory`, completely or not at all. Returns the Lsn of the version.

    The directory is a store, which is created if it does not exist. Only elements that differ from the previous version
    are logged, up to 512 MiB including the memory that they take until a snapshot. A tensor of which a quarter or more
    changed is written whole. Tensors that are not in `tensors` are deleted. Tensors that overlap in memory (tied
    weights, views) are stored once and overlap again when they are loaded. Any shape and stride, empty and scalar
    tensors, and all element types up to `complex128` are supported.

    Disk usage is at most 1.5 × `keep` + 2 times the bytes of all tensors, 32 times by default, if all tensors change in
    each version, and less if fewer of them change. Named versions take additional space.

    :param metadata: text by name, which `safe_open(directory).metadata()` returns and `remanent export` writes.
    :param note: a remark of up to 64 KiB that is kept with the version in the log.
    :param name: a name of 1 to 64 bytes, which keeps the version until `prune` gives it up.
    :param durable: whether to return once the version survives a power cut, or else once it survives the death of the
        process.
    :param keep: the number of newest versions to keep; None keeps all. Older ones without a name are removed by this
        save or later ones, from one snapshot to the next: up to half as many may remain in addition.
    :param keep_for: the time in seconds for which versions are kept in addition.
    :param keep_bytes: the bytes of disk that the directory may take. Beyond that, the oldest versions are removed,
        regardless of `keep` and `keep_for`, except the newest one and those with names. During a save, the directory
        takes in addition what the new version writes.
    :param progress: False shows no progress bar; None shows one for long work if standard error is a terminal and tqdm
        is installed.
    :raises RefusedError: a value is not a plain tensor but another type, a sparse or quantized tensor, or a subclass
        such as DTensor; or a name or metadata is not a str. Nothing is saved.
    :raises TakenError: another version has the name. Nothing is saved.
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
    held, said = checked_tensors(tensors), checked_metadata(metadata)
    refuse_file(directory, loads=False)
    found = extents_there(held)
    # Tensors that share memory are all counted, so the bar may end early.
    with Bar(sum(each.nbytes for each in found), "saving", progress) as bar:
        return page_tree.save(directory, bar.counting(blocks_in_place(found)), note=note, name=name, durable=durable,
                              kept=kept, metadata=said)


def load_file(directory: _Path, device: str | int | torch.device = "cpu", *, names: Iterable[str] | None = None,
              at: _At = None, progress: bool | None = None) -> dict[str, torch.Tensor]:
    """Loads the tensors of a version in `directory`, by name. Each byte is verified by checksums before it is returned.

    The call takes no lock: a writer can continue in the meantime, and all tensors are from the same version. It loads
    what `save_file` and `remanent import` saved.

    :param device: the device of the loaded tensors: "cpu", "cuda", a GPU number or a `torch.device`.
    :param names: the names of the tensors to load; None loads all. `safe_open` reads parts of a tensor.
    :param at: the version: an Lsn, "lsn:N", "snapshot:N", the name of a version, or an entry of `versions`; None loads
        the newest.
    :param progress: as for `save_file`.
    :raises NoStoreError: the store does not exist, or `directory` is a file, such as a safetensors file.
    :raises NoStateError: the store contains no tensors, or the version is not kept.
    :raises UnknownKeyError: no tensor has one of the names.
    :raises DamagedError: bytes on disk are not what was written.

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
    """Saves the state of a model as `save_file` does, with tied weights stored once. Returns the Lsn of the version.

    :param options: keyword arguments of `save_file`, such as `note`, `name` and `keep`.
    :raises RefusedError: extra state is not a tensor, or an error of `save_file`. Nothing is saved.

    >>> import torch, remanent.torch
    >>> model = torch.nn.Linear(2, 1)
    >>> _ = remanent.torch.save_model(model, directory)
    >>> remanent.torch.load_model(torch.nn.Linear(2, 1), directory)
    ([], [])
    """
    state, said = model_state(model, metadata)
    return save_file(state, directory, said or None, **options)


def load_model(model: torch.nn.Module, directory: _Path, strict: bool = True, device: str | int | torch.device = "cpu",
               *, at: _At = None) -> tuple[list[str], list[str]]:
    """Loads a version into a model. Returns the names of tensors missing from the version and of tensors missing from
    the model.

    :param strict: whether to reject a difference in names.
    :param device: the device to which tensors are loaded before they are copied to the model's tensors.
    :raises MismatchError: names, a shape or an element type differ, or the model is on the meta device. Nothing
        changes.
    :raises NoStoreError, NoStateError, DamagedError: as for `load_file`. Nothing changes.
    """
    refuse_fake_tensors()
    refuse_file(directory, loads=True)
    where = checked_device(device)
    with _native.View(directory, at_of(at)) as view:
        manifest = page_tree.read_manifest(whole(view))
        loaded = _loaded(view, manifest, where, None, False)
    return load_into(model, loaded, manifest.metadata, strict)
