"""Implements `safe_open`, which reads parts of a version, conversion to safetensors bytes, and loading of models."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from types import EllipsisType, TracebackType
from typing import Any, Self

import torch

from remanent._state import page_tree
from remanent._state.modules import LiveModule
from remanent._store import _native
from remanent._store._native import ArrayLayout
from remanent._store.errors import (
    DeviceError,
    ForeignDirectoryError,
    InvalidError,
    MismatchError,
    NoStoreError,
    RefusedError,
    UnknownKeyError,
)
from remanent._tensors.conversion import DTYPE
from remanent._tensors.storages import extents_there
from remanent._tensors.torch_modes import parameters_in_place, refuse_fake_tensors
from remanent._versions.retention import ListedVersion, at_of
from remanent._versions.run_versions import whole

_Path = str | os.PathLike[str]
_Index = int | slice | EllipsisType | None
# The entry of `metadata` with the module versions that torch keeps with a state.
_MODULES = "torch module versions"


def checked_tensors(tensors: object) -> dict[str, torch.Tensor]:
    """Returns `tensors` as a dict. Raises `RefusedError` for anything but a dict of tensors by name."""
    if not isinstance(tensors, Mapping):
        kind = type(tensors).__name__
        raise _refused(f"tensors must be a dict of tensors by name, not {_a(kind)}", "pass {name: tensor}")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            kind = type(name).__name__
            raise _refused(f"tensors: the name {name!r} must be a str, not {_a(kind)}", f"use the name {str(name)!r}")
        if not isinstance(tensor, torch.Tensor):
            raise _refused(f"{name}: {_a(type(tensor).__name__)} is not a tensor", _instead(tensor))
    return dict(tensors)


def _instead(value: object) -> str:
    """Returns advice on how to save a value that is not a tensor."""
    if isinstance(value, Mapping):
        return "save its tensors under names such as 'outer.inner', or use `Checkpointer`"
    if type(value).__module__ == "numpy":
        return "convert it with `torch.from_numpy`"
    return "save it as text in `metadata`, convert it with `torch.tensor`, or use `Checkpointer`"


def _refused(message: str, remedy: str) -> RefusedError:
    return RefusedError(f"{message}; {remedy}", remedy=remedy)


def _a(kind: str) -> str:
    return f"an {kind}" if kind[:1].lower() in "aeiou" else f"a {kind}"


def checked_metadata(metadata: object) -> dict[str, str] | None:
    """Returns `metadata` as a dict. Raises `RefusedError` for anything but None or a dict of text by name."""
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise _refused(f"metadata must be a dict of text by name, not {_a(type(metadata).__name__)}", "pass {name: text}")
    for name, text in metadata.items():
        for what in (name, text):
            if type(what) is not str:
                raise _refused(f"metadata: {what!r} in {name!r} must be a str, not {_a(type(what).__name__)}",
                               f"convert it to text, such as {str(what)!r}")
    return dict(metadata)


def refuse_file(path: _Path, *, loads: bool) -> None:
    """Raises an error if `path` is a file, because versions are saved in a directory."""
    if not os.path.isfile(path):
        return
    if not loads:
        remedy = "use another path, or remove the file"
        raise ForeignDirectoryError(f"{os.fspath(path)} is a file, but versions are saved to a directory; {remedy}",
                                    remedy=remedy, path=os.fspath(path))
    with open(path, "rb") as file:
        is_safetensors = file.read(9)[8:] == b"{"
    kind = "a safetensors file" if is_safetensors else "a file"
    remedy = f"run `remanent import DIRECTORY {os.fspath(path)}` and load DIRECTORY, or call " \
             "`safetensors.torch.load_file`, which verifies no checksums" if is_safetensors else \
             "pass a directory that `save_file` created"
    raise NoStoreError(f"{os.fspath(path)} is {kind}, not a directory of versions; {remedy}", remedy=remedy,
                       path=os.fspath(path))


def checked_device(device: str | int | torch.device) -> torch.device:
    """Returns `device` as a `torch.device`. Raises an error if this torch cannot create tensors on that device."""
    try:
        found = torch.device(f"cuda:{device}" if type(device) is int else device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidError(f"device: {device!r} is not a torch device", remedy="pass 'cpu', 'cuda' or 'cuda:N'"
                           ) from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"device: {found} does not exist; torch sees {torch.cuda.device_count()} GPUs",
                          remedy="pass device='cpu', or use a machine with a GPU")
    return found


def chosen(names: Iterable[str] | None, pages: Mapping[str, page_tree.Arrays]) -> dict[str, page_tree.Arrays]:
    """Returns the pages that contain the named tensors, each with only these tensors. None selects all tensors."""
    if names is None:
        return dict(pages)
    if isinstance(names, str):
        raise InvalidError(f"names must be a list, not the str {names!r}", remedy=f"pass a list, such as [{names!r}]")
    wanted = set(names)
    known = {array.name for arrays in pages.values() for array in arrays}
    for name in wanted - known:
        raise unknown(name, known)
    found = {key: tuple(array for array in arrays if array.name in wanted) for key, arrays in pages.items()}
    return {key: arrays for key, arrays in found.items() if arrays}


def unknown(name: object, known: Iterable[str]) -> UnknownKeyError:
    """Returns the error for a tensor name that a version does not contain."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, 3) or names[:3]
    return UnknownKeyError(f"the version has no tensor named {name!r}; the most similar of its {len(names)} names are "
                           f"{', '.join(map(repr, near)) or 'none'}", remedy="use one of `safe_open(…).keys()`", key=name)


class TensorSlice:
    """A tensor of a version that is read by indexing. Created by `safe_open.get_slice`."""

    def __init__(self, view: _native.View, key: str, array: ArrayLayout, device: torch.device) -> None:
        self._view, self._key, self._array, self._device = view, key, array, device

    def __repr__(self) -> str:
        return f"TensorSlice({self._array.name!r}, dtype={self._array.dtype!r}, shape={self.get_shape()})"

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor."""
        return list(self._array.shape)

    def get_dtype(self) -> str:
        """Returns the name of the element type in safetensors files, such as "F32" or "BF16"."""
        return self._array.dtype

    @torch.inference_mode(False)
    def __getitem__(self, index: _Index | tuple[_Index, ...]) -> torch.Tensor:
        """Reads the elements that an index selects. The index may contain ints, slices, None and `...`.

        The read needs memory for all elements between the first and the last selected one. The first read of a tensor
        verifies the whole tensor.

        :raises InvalidError: the index contains another value.
        :raises DamagedError: bytes on disk differ from the bytes that were written.
        """
        refuse_fake_tensors()
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            if not (part is None or part is ... or isinstance(part, (int, slice))) or isinstance(part, bool):
                raise InvalidError(f"{self._array.name}: {_a(type(part).__name__)} cannot be used as an index",
                                   remedy="use ints, slices, None or ..., or read the tensor and index the result")
        array = self._array
        dtype = DTYPE.get(array.dtype)
        if dtype is None:
            raise RefusedError(f"{array.name}: this torch has no element type {array.dtype}", remedy="use a newer torch")
        stride = page_tree.contiguous_stride(array.shape) if array.stride is None else array.stride
        # A tensor without memory shows the location of the part's elements.
        with torch.device("meta"):
            picked = torch.empty_strided(array.shape, stride, dtype=dtype)[index]
        size = dtype.itemsize
        count = 1 + sum((length - 1) * step for length, step in zip(picked.shape, picked.stride(), strict=True))
        count = count if picked.numel() else 0
        held = torch.empty(count * size, dtype=torch.uint8, device="cpu")
        if count:
            self._view.read_into(self._key, held, array.offset + int(picked.storage_offset()) * size)
        found = torch.empty(0, dtype=dtype, device="cpu")
        found.set_(held.untyped_storage(), 0, picked.shape, picked.stride())
        return found.contiguous().to(self._device)


class safe_open:
    """Opens a version to read single tensors or parts of tensors, like `safetensors.safe_open`.

    Every byte is verified by a checksum before it is returned. No lock is taken. A writer can continue concurrently,
    and the opened version does not change until `close` is called. Each call returns a separate copy, so tensors that
    shared memory when they were saved do not share it here.

    :param directory: a directory that `save_file` or `remanent import` created.
    :param framework: "pt", the only supported framework.
    :param device: the device of the returned tensors: "cpu", "cuda", a GPU number or a `torch.device`.
    :param at: the version, as for `load_file`; None opens the newest.
    :raises NoStoreError: `directory` contains no store.
    :raises NoStateError: the version does not exist.
    :raises DamagedError: a file of the store is damaged.

    >>> import torch, remanent.torch
    >>> w = torch.arange(6.0).reshape(3, 2)
    >>> _ = remanent.torch.save_file({"w": w}, directory, metadata={"format": "pt"})
    >>> with remanent.torch.safe_open(directory) as version:
    ...     part = version.get_slice("w")
    ...     version.keys(), version.metadata(), part.get_shape(), part[1:, 0]
    (['w'], {'format': 'pt'}, [3, 2], tensor([2., 4.]))
    """

    def __init__(self, directory: _Path, framework: str = "pt", device: str | int | torch.device = "cpu", *,
                 at: int | str | ListedVersion | None = None) -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise InvalidError(f"framework: {framework!r} is not supported", remedy="use 'pt' and convert the tensors")
        refuse_file(directory, loads=True)
        self._device = checked_device(device)
        self._view = _native.View(directory, at_of(at))
        try:
            manifest = page_tree.read_manifest(whole(self._view))
        except BaseException:
            self._view.close()
            raise
        self._metadata = manifest.metadata
        self._found = {array.name: (key, array) for key, arrays in manifest.pages.items() for array in arrays}

    def __repr__(self) -> str:
        return f"safe_open({self._view!r}, tensors={len(self._found)})"

    def keys(self) -> list[str]:
        """Returns the names of the tensors, sorted."""
        return sorted(self._found)

    def offset_keys(self) -> list[str]:
        """Returns the names of the tensors in the order in which they were saved."""
        return list(self._found)

    def metadata(self) -> dict[str, str] | None:
        """Returns the `metadata` that was saved with the tensors, or None."""
        return None if self._metadata is None else dict(self._metadata)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Reads a whole tensor and returns it on the device of `safe_open`.

        :raises UnknownKeyError: the version has no tensor of this name.
        """
        key, array = self._place(name)
        part = TensorSlice(self._view, key, array, self._device)
        return part[...]

    def get_tensors(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Reads several tensors and returns them by name. If `names` is None, reads all tensors.

        :raises UnknownKeyError: the version has no tensor of one of these names.
        """
        return {name: self.get_tensor(name) for name in (self.keys() if names is None else names)}

    def get_slice(self, name: str) -> TensorSlice:
        """Returns a `TensorSlice`, which reads parts of a tensor by indexing.

        :raises UnknownKeyError: the version has no tensor of this name.
        """
        key, array = self._place(name)
        return TensorSlice(self._view, key, array, self._device)

    def _place(self, name: str) -> tuple[str, ArrayLayout]:
        if name not in self._found:
            raise unknown(name, self._found)
        return self._found[name]

    def close(self) -> None:
        """Closes the version. Its slices can no longer be read."""
        self._view.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()


def save(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns the bytes of a safetensors file with these tensors, like `safetensors.torch.save`. The package
    `safetensors` must be installed.

    The bytes have no checksums. `save_file` instead stores tensors with checksums and versions, including tensors that
    share memory.

    :raises RefusedError: a safetensors file cannot contain a value unchanged. This applies to tensors that share
        memory, to `complex128`, and to values that are not plain tensors.

    >>> import torch, remanent.torch
    >>> data = remanent.torch.save({"w": torch.ones(2)}, {"format": "pt"})
    >>> remanent.torch.load(data)
    {'w': tensor([1., 1.])}
    """
    from safetensors.torch import save as encode

    refuse_fake_tensors()
    found = extents_there(checked_tensors(tensors))
    for group in _native.extents_by_page(found):
        if len(group) > 1:
            names = ", ".join(sorted(each.name for each in group))
            raise RefusedError(f"{names}: these tensors share memory, which a safetensors file cannot represent",
                               remedy="use `save_file`, or save clones of the tensors")
    for each in found:
        if each.tensor.dtype == torch.complex128:
            raise RefusedError(f"{each.name}: a safetensors file cannot contain elements of type torch.complex128",
                               remedy="use `save_file`")
    held = {each.name: each.tensor.contiguous() for each in found}
    return bytes(encode(held, checked_metadata(metadata)))


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Returns the tensors in the bytes of a safetensors file, like `safetensors.torch.load`. The package `safetensors`
    must be installed.

    A safetensors file has no checksums, so the tensors are not verified.

    :raises InvalidError: `data` is not the contents of a safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as decode

    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise RefusedError(f"data must be bytes, not {_a(type(data).__name__)}",
                           remedy="call `load_file` for a directory")
    try:
        return dict(decode(bytes(data)))
    except (SafetensorError, KeyError) as error:
        raise InvalidError(f"data: {len(data)} bytes are not a valid safetensors file: {error}",
                           remedy="pass the whole contents of a file") from error


def model_state(model: torch.nn.Module, metadata: Mapping[str, str] | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the state that `save_model` saves, and `metadata` extended by the versions of the model's modules."""
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise RefusedError(f"{name}: the model's extra state is {_a(type(value).__name__)}, not a tensor",
                               remedy="save the model with `Checkpointer`")
    modules = {name: said for name, said in getattr(state, "_metadata", {}).items() if set(said) - {"version"}
               or said.get("version") not in (None, 1)}
    said = checked_metadata(metadata) or {}
    try:
        return dict(state), said | ({_MODULES: json.dumps(modules)} if modules else {})
    except TypeError as error:
        raise RefusedError(f"the versions of the model's modules cannot be converted to JSON: {error}",
                           remedy="save the model with `Checkpointer`") from error


def load_into(model: torch.nn.Module, loaded: dict[str, torch.Tensor], metadata: Mapping[str, str] | None,
              strict: bool) -> tuple[list[str], list[str]]:
    """Loads tensors into a model. Returns the names of the model's tensors that are missing in `loaded`, and the names
    in `loaded` that the model does not have.

    If a tensor does not fit, an error is raised and nothing changes.
    """
    from collections import OrderedDict

    live = LiveModule(model)
    own = live.state
    missing, unexpected = [name for name in own if name not in loaded], [name for name in loaded if name not in own]
    if strict and (missing or unexpected):
        raise MismatchError(f"the version and the model differ in {len(missing) + len(unexpected)} names: missing "
                            f"{missing[:5]}, unexpected {unexpected[:5]}", remedy="load into a model with the saved names, "
                            "or use strict=False")
    for name in own.keys() & loaded.keys():
        there, saved = own[name], loaded[name]
        if not isinstance(there, torch.Tensor):
            continue
        if there.is_meta:
            raise MismatchError(f"{name}: the model's tensor is on the meta device and has no elements",
                                remedy="call `model.to_empty(device=…)` first")
        if (reason := live.refused_plain(name)) is not None:
            raise MismatchError(f"{name}: {reason}", remedy="load into a model with plain tensors, then convert it")
        if (there.shape, there.dtype) != (saved.shape, saved.dtype):
            raise MismatchError(f"{name}: the version has {saved.dtype} of shape {tuple(saved.shape)}, but the model has "
                                f"{there.dtype} of shape {tuple(there.shape)}", remedy="create the model as it was saved, "
                                "or convert the tensors that `load_file` returns")
    state: OrderedDict[str, torch.Tensor] = OrderedDict(loaded)
    modules = {name: {"version": 1} for name, _ in model.named_modules()}
    state._metadata = modules | json.loads((metadata or {}).get(_MODULES, "{}"))  # type: ignore[attr-defined]
    with parameters_in_place():
        model.load_state_dict(state, strict=False)
    return missing, unexpected
