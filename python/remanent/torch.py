"""Tensors of torch that survive: files of tensors with versions, and checkpoints of a training run.

    save_file(tensors, directory, note=…)      load_file(directory, device=…, at=…)
    Checkpointer(directory, model, optimizer, …).save(step)      .restore(at=…)
    diff(directory, before, after)      blame(directory, name, index)      and those of a Checkpointer

Both keep state in a store: durable, in versions, with only the changed elements of a version logged, and proven by
checksums on the way back. Nothing is pickled: tensors are pages, all other values are typed, and what cannot be
stored faithfully is refused by its name. What is saved lies on disk, and in no memory beside the tensors themselves.
`save_file` holds copies of those that are not contiguous until all is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from remanent import _native, _pages
from remanent._checkpointer import Checkpointer
from remanent._history import Difference, ElementChange, blame, diff
from remanent._progress import Bar
from remanent._saved import Saved
from remanent._storages import extents_there
from remanent._tensors import blocks_in_place, load_pages, tensors_of
from remanent._torch_modes import refuse_fake_tensors
from remanent._versions import Version, whole

__all__ = ["Checkpointer", "Difference", "ElementChange", "Saved", "Version", "blame", "diff", "load_file", "save_file"]

_Path = str | os.PathLike[str]


def save_file(tensors: Mapping[str, torch.Tensor], directory: _Path, *, note: str | None = None,
              name: str | None = None, durable: bool = True, progress: bool | None = None) -> int:
    """Makes `tensors` the newest version in `directory`, whole or not at all; returns its Lsn.

    The directory is a store, made if there is none. Only what differs from the version before is logged; tensors that
    are gone are deleted. Tensors that overlap in memory (tied weights, views) are stored once and overlap again when
    they are loaded. Any shape and stride, empty and scalar tensors, all kinds of elements up to `complex128`.

    :param note: a remark of up to 64 KiB that stays with the version in the log.
    :param name: a name of 1 to 64 bytes, which keeps the version until it is given up (`Store.prune`). Versions
        without a name can be loaded as long as the log from a kept snapshot on is there.
    :param durable: whether the call returns once the version survives a power cut; else once it survives the death
        of the process.
    :param progress: False draws no bar; None draws one for long work if standard error is a terminal and tqdm is
        installed.
    :raises RefusedError: for a tensor that is not plain: sparse, quantized, a subclass such as DTensor. Nothing is
        saved.
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
    found = extents_there(dict(tensors))
    # Of tensors that share memory each counts here, so the bar may end early.
    with Bar(sum(each.nbytes for each in found), "saving", progress) as bar:
        return _pages.save(directory, bar.counting(blocks_in_place(found)), note=note, name=name, durable=durable)


def load_file(directory: _Path, *, device: str | torch.device = "cpu",
              at: int | str | None = None, progress: bool | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a version in `directory`, by name; each byte is proven by checksums before it is returned.

    Takes no lock: a writer may go on meanwhile, and the tensors are all of one version. Loads what `save_file` and
    `remanent import` saved.

    :param device: where the tensors are to lie.
    :param at: the version: an Lsn, "lsn:N", "snapshot:N" or a version's name; the newest if None.
    :param progress: as for `save_file`.
    :raises NoStoreError: if there is no store.
    :raises NoStateError: if it holds no tensors, or the version is not kept.
    :raises DamagedError: if bytes on disk are not what was written.

    >>> import torch, remanent.torch
    >>> lsn = remanent.torch.save_file({"w": torch.ones(2, 2), "empty": torch.empty(0, 3)}, directory, name="start")
    >>> loaded = remanent.torch.load_file(directory, at="name:start")
    >>> {name: tuple(tensor.shape) for name, tensor in sorted(loaded.items())}
    {'empty': (0, 3), 'w': (2, 2)}
    """
    refuse_fake_tensors()
    where = torch.device(device)
    with _native.View(directory, at) as view:
        whole(view)
        loaded: dict[str, torch.Tensor] = {}
        pages = _pages.read_manifest(view).pages
        with Bar(sum(view.info(key).length for key in pages), "loading", progress) as bar:
            for page, arrays in load_pages(view, pages, where):
                loaded |= tensors_of(page, arrays, where)
                bar.add(page.numel())
        return loaded
