"""Functions that convert checkpoints of `remanent.dcp` to and from other file formats."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from remanent._store.errors import ForeignDirectoryError, InvalidError, NoStateError, RefusedError, TakenError
from remanent._store.options import ArchiveOptions
from remanent._tensors.tensor_files import checked_tensors
from remanent._util import durable_files

_Path = str | os.PathLike[str]


def dcp_to_torch_save(checkpoint: _Path, path: _Path) -> None:
    """Converts a checkpoint of `StorageWriter` to a `torch.save` file, like DCP's function of the same name.

    The whole state is held in host memory. The file replaces any existing file atomically, and is durable when the call
    returns.

    :raises CheckpointException: the checkpoint cannot be read; see `StorageReader`. Nothing is written.

    >>> import torch, torch.distributed.checkpoint as dcp
    >>> from remanent.dcp import StorageWriter, dcp_to_torch_save, torch_save_to_dcp
    >>> state = {"model": {"w": torch.ones(2)}, "step": 3}
    >>> _ = dcp.save(state, storage_writer=StorageWriter(directory + "/step-3"), no_dist=True)
    >>> dcp_to_torch_save(directory + "/step-3", directory + "/step-3.pt")
    >>> torch.load(directory + "/step-3.pt", weights_only=True)
    {'model': {'w': tensor([1., 1.])}, 'step': 3}
    >>> torch_save_to_dcp(directory + "/step-3.pt", directory + "/again")
    """
    state = _read(_ours(checkpoint))
    _published(Path(path), lambda temporary: torch.save(state, temporary))


def torch_save_to_dcp(path: _Path, checkpoint: _Path, *, archive: ArchiveOptions | None = None) -> None:
    """Converts a `torch.save` file to a checkpoint of `StorageWriter`, like DCP's function of the same name.

    The file is loaded with `weights_only=True`, so no code in the file is run, and files with objects of other classes
    are rejected. The whole state is held in host memory.

    :param archive: the archive of the checkpoints, as for `StorageWriter`.
    :raises TakenError: `checkpoint` already contains a checkpoint.
    :raises UnpicklingError: the file contains objects of other classes. Raised by torch.
    """
    _check_free(checkpoint)
    _write(torch.load(path, map_location="cpu", weights_only=True), checkpoint, archive)


def dcp_to_remanent(source: _Path, checkpoint: _Path, *, archive: ArchiveOptions | None = None) -> None:
    """Converts a checkpoint of DCP's own `FileSystemWriter` to one of `StorageWriter`. DCP unpickles the source's
    metadata, so the source must be trusted.

    :param archive: the archive of the checkpoints, as for `StorageWriter`.
    :raises TakenError: `checkpoint` already contains a checkpoint.

    >>> import torch, torch.distributed.checkpoint as dcp
    >>> from remanent.dcp import dcp_to_remanent, is_of_dcp, remanent_to_dcp
    >>> _ = dcp.save({"w": torch.ones(2)}, checkpoint_id=directory + "/theirs", no_dist=True)
    >>> dcp_to_remanent(directory + "/theirs", directory + "/ours")
    >>> remanent_to_dcp(directory + "/ours", directory + "/again")
    >>> is_of_dcp(directory + "/ours"), is_of_dcp(directory + "/again")
    (False, True)
    """
    _check_free(checkpoint)
    _write(_read(FileSystemReader(source)), checkpoint, archive)


def remanent_to_dcp(checkpoint: _Path, target: _Path) -> None:
    """Converts a checkpoint of `StorageWriter` to one of DCP's own `FileSystemWriter`.

    :raises ForeignDirectoryError: `target` is not empty.
    """
    state = _read(_ours(checkpoint))
    if os.path.isfile(target) or os.path.isdir(target) and os.listdir(target):
        raise ForeignDirectoryError(f"{os.fspath(target)} is not empty", remedy="use a new directory",
                                    path=os.fspath(target))
    state_dict_saver.save(state, storage_writer=FileSystemWriter(target), no_dist=True)


def dcp_to_safetensors(checkpoint: _Path, path: _Path, *, key: str | None = None,
                       metadata: dict[str, str] | None = None) -> None:
    """Writes the tensors of a checkpoint to a safetensors file, unsharded.

    The result is that of DCP's `HuggingFaceStorageWriter` with `consolidate_safetensors_files`, in one step and without
    pickle. The package `safetensors` must be installed.

    :param key: the entry of the state to write, such as "model"; None writes the whole state. A tensor's name consists
        of the keys below this entry, joined by ".".
    :param metadata: text by name, for the metadata in the file's header.
    :raises RefusedError: a value is not a tensor. Nothing is written.
    :raises NoStateError: the state has no entry `key`.

    >>> import torch, torch.distributed.checkpoint as dcp
    >>> from remanent.dcp import StorageWriter, dcp_to_safetensors, safetensors_to_dcp
    >>> state = {"model": {"w": torch.ones(2)}, "step": 3}
    >>> _ = dcp.save(state, storage_writer=StorageWriter(directory + "/step-3"), no_dist=True)
    >>> dcp_to_safetensors(directory + "/step-3", directory + "/model.safetensors", key="model")
    >>> safetensors_to_dcp(directory + "/model.safetensors", directory + "/again", key="model")
    """
    from safetensors.torch import save_file

    state: Any = _read(_ours(checkpoint))
    if key is not None:
        if key not in state:
            raise NoStateError(f"the checkpoint has no entry {key!r}", remedy=f"use one of {sorted(map(str, state))}")
        state = state[key]
    tensors: dict[str, Any] = {}
    _flatten("", state, tensors)
    held = {name: tensor.contiguous() for name, tensor in checked_tensors(tensors).items()}
    _published(Path(path), lambda temporary: save_file(held, temporary, metadata))


def safetensors_to_dcp(path: _Path, checkpoint: _Path, *, key: str | None = None,
                       archive: ArchiveOptions | None = None) -> None:
    """Converts a safetensors file to a checkpoint of `StorageWriter`. A directory of such files, with or without an
    index as used by Hugging Face, is also accepted. The package `safetensors` must be installed.

    :param key: the entry of the state that receives the tensors, such as "model"; None stores them at the top level.
        The tensors keep their names.
    :param archive: the archive of the checkpoints, as for `StorageWriter`.
    :raises NoStateError: `path` contains no safetensors file.
    :raises InvalidError: two files contain a tensor of the same name.
    :raises TakenError: `checkpoint` already contains a checkpoint.
    """
    from safetensors.torch import load_file

    _check_free(checkpoint)
    files = sorted(Path(path).glob("*.safetensors")) if os.path.isdir(path) else [Path(path)]
    if not files or not files[0].exists():
        raise NoStateError(f"there is no safetensors file in {os.fspath(path)}", remedy="pass the path of a file, or "
                           "of a directory with files named *.safetensors")
    state: dict[str, Any] = {}
    for file in files:
        found = load_file(file)
        for name in found.keys() & state.keys():
            raise InvalidError(f"{name}: {file.name} and another file contain a tensor of this name",
                               remedy="pass a directory with the files of one model")
        state |= found
    _write(state if key is None else {key: state}, checkpoint, archive)


def _flatten(path: str, value: object, into: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _flatten(f"{path}.{key}" if path else str(key), each, into)
    elif path in into:
        raise RefusedError(f"{path}: two tensors of the state have this name", remedy="select one entry with `key`")
    else:
        into[path] = value


def _ours(checkpoint: _Path) -> Any:
    from remanent.dcp import StorageReader

    return StorageReader(checkpoint)


def _check_free(checkpoint: _Path) -> None:
    from remanent.dcp import _metadata_files

    if _metadata_files(Path(checkpoint)):
        raise TakenError(f"{os.fspath(checkpoint)} already contains a checkpoint",
                         remedy="remove it, or use another path")


def _read(reader: Any) -> dict[str, Any]:
    """Returns the whole state of a checkpoint, nested as it was saved."""
    state: dict[str, Any] = {}
    # DCP's own converters load with this call: the public one only fills an existing state.
    planner: Any = default_planner._EmptyStateDictLoadPlanner
    state_dict_loader._load_state_dict(state, storage_reader=reader, planner=planner(), no_dist=True)
    return state


def _write(state: dict[str, Any], checkpoint: _Path, archive: ArchiveOptions | None) -> None:
    from remanent.dcp import StorageWriter

    writer = StorageWriter(checkpoint, overwrite=False, archive=archive)
    state_dict_saver.save(state, storage_writer=writer, no_dist=True)


def _published(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file under a temporary name and renames it to `path` atomically. The file is durable when the call
    returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    durable_files.sync_folder(path.absolute().parent)
