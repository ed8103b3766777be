"""Tensors of torch that survive: files of tensors with versions, and checkpoints of a training run.

    save_file(tensors, directory, note=…)      load_file(directory, device=…, at=…)      safe_open(directory)
    versions(directory)      prune(directory, keep=…)      save_model(model, directory)      load_model(model, directory)
    Checkpointer(directory, model, optimizer, …).save(step)      .restore(at=…)
    diff(directory, before, after)      blame(directory, name, index)      and those of a Checkpointer

Both keep state in a store: durable, in versions, with only the changed elements of a version logged, and proven by
checksums on the way back. Nothing is pickled: tensors are pages, all other values are typed, and what cannot be
stored faithfully is refused by its name. What is saved lies on disk, and in no memory beside the tensors themselves.
`save_file` holds copies of those that are not contiguous until all is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from remanent import _native, _pages
from remanent._checkpointer import Checkpointer
from remanent._history import Difference, ElementChange, blame, diff
from remanent._kept_versions import KEEP_DEFAULT, KeptVersions, ListedVersion, at_of, prune, versions
from remanent._progress import Bar
from remanent._saved import Saved
from remanent._storages import extents_there
from remanent._tensor_files import (
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
from remanent._tensors import blocks_in_place, load_pages, tensors_of
from remanent._torch_modes import refuse_fake_tensors
from remanent._versions import Version, whole

__all__ = [
    "Checkpointer", "Difference", "ElementChange", "ListedVersion", "Saved", "TensorSlice", "Version", "blame", "diff",
    "load", "load_file", "load_model", "prune", "safe_open", "save", "save_file", "save_model", "versions",
]

_Path = str | os.PathLike[str]
_At = int | str | ListedVersion | None


def save_file(tensors: Mapping[str, torch.Tensor], directory: _Path, metadata: Mapping[str, str] | None = None, *,
              note: str | None = None, name: str | None = None, durable: bool = True, keep: int | None = KEEP_DEFAULT,
              keep_for: float | None = None, keep_bytes: int | None = None, progress: bool | None = None) -> int:
    """Makes `tensors` the newest version in `directory`, whole or not at all; returns its Lsn.

    The directory is a store, made if there is none. Only elements that differ from the version before are logged, up
    to 512 MiB of them with the memory that they take until a snapshot; a tensor of which a quarter or more changed is
    written whole. Tensors that are gone are deleted. Tensors that overlap in memory (tied weights, views) are stored once
    and overlap again when they are loaded. Any shape and stride, empty and scalar tensors, all kinds of elements up to
    `complex128`.

    Disk usage is at most 1.5 × `keep` + 2 times the bytes of all tensors, 32 times by default, if all of them change
    in each version; as much less as less of them changes. Versions with a name take their space in addition.

    :param metadata: text by name, which `safe_open(directory).metadata()` returns and `remanent export` writes.
    :param note: a remark of up to 64 KiB that stays with the version in the log.
    :param name: a name of 1 to 64 bytes, which keeps the version until `prune` gives it up.
    :param durable: whether the call returns once the version survives a power cut; else once it survives the death
        of the process.
    :param keep: how many of the newest versions are kept; None keeps all. Older ones without a name are removed by
        this save or the next ones, from one snapshot to the next: up to half as many may stay in addition.
    :param keep_for: seconds for which versions are kept beyond that.
    :param keep_bytes: bytes of disk that the directory may take. Once it takes more, the oldest versions are removed,
        whatever `keep` and `keep_for` say; the newest one and those with names stay. During a save the directory takes
        what the new version writes in addition.
    :param progress: False draws no bar; None draws one for long work if standard error is a terminal and tqdm is
        installed.
    :raises RefusedError: for what is no plain tensor: other values, sparse and quantized tensors, a subclass such as
        DTensor; for a name or metadata that is no str. Nothing is saved.
    :raises TakenError: if another version has the name. Nothing is saved.
    :raises ForeignDirectoryError: if `directory` is a file, or holds something else. Nothing is saved.
    :raises LockedError: if another process has the store open.

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
    # Of tensors that share memory each counts here, so the bar may end early.
    with Bar(sum(each.nbytes for each in found), "saving", progress) as bar:
        return _pages.save(directory, bar.counting(blocks_in_place(found)), note=note, name=name, durable=durable,
                           kept=kept, metadata=said)


def load_file(directory: _Path, device: str | int | torch.device = "cpu", *, names: Iterable[str] | None = None,
              at: _At = None, progress: bool | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a version in `directory`, by name; each byte is proven by checksums before it is returned.

    Takes no lock: a writer may go on meanwhile, and the tensors are all of one version. Loads what `save_file` and
    `remanent import` saved.

    :param device: where the tensors are to lie: "cpu", "cuda", a number of a GPU, a `torch.device`.
    :param names: the tensors to load; all if None. `safe_open` reads parts of one.
    :param at: the version: an Lsn, "lsn:N", "snapshot:N", a version's name, or one of `versions`; the newest if None.
    :param progress: as for `save_file`.
    :raises NoStoreError: if there is no store, or `directory` is a file, such as a safetensors file.
    :raises NoStateError: if it holds no tensors, or the version is not kept.
    :raises UnknownKeyError: for a name that no tensor has.
    :raises DamagedError: if bytes on disk are not what was written.

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
        return _loaded(view, _pages.read_manifest(whole(view)), where, names, progress)


def _loaded(view: _native.View, manifest: _pages.Manifest, where: torch.device, names: Iterable[str] | None,
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
    """Saves the state of a model as `save_file` does, tied weights once; returns the version's Lsn.

    :param options: those of `save_file`: `note`, `name`, `keep`, …
    :raises RefusedError: for extra state that is no tensor, and as for `save_file`. Nothing is saved.

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
    """Loads a version into a model; returns the names of tensors that the version lacks, and that the model lacks.

    :param strict: whether a difference in names is refused.
    :param device: where the tensors lie before they are copied to the model's.
    :raises MismatchError: if names, a shape or a kind of elements differ, or the model is on the meta device. Nothing
        changes.
    :raises NoStoreError, NoStateError, DamagedError: as for `load_file`. Nothing changes.
    """
    refuse_fake_tensors()
    refuse_file(directory, loads=True)
    where = checked_device(device)
    with _native.View(directory, at_of(at)) as view:
        manifest = _pages.read_manifest(whole(view))
        loaded = _loaded(view, manifest, where, None, False)
    return load_into(model, loaded, manifest.metadata, strict)
