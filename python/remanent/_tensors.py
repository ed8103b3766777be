"""Tensors of torch as pages, and back: which bytes of which storage a page holds."""

from __future__ import annotations

import concurrent.futures
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from remanent import _native, _pages
from remanent._errors import RefusedError
from remanent._pages import Array, Block

# Threads that read for one load.
_THREADS_MAX = 4

# Names of kinds as the store has them, for every kind of torch's that a store can hold.
SHORT: dict[torch.dtype, str] = {}
for _name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
              "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
              "float8_e5m2fnuz", "float8_e8m0fnu"):
    if hasattr(torch, _name):
        SHORT[getattr(torch, _name)] = _native.dtype(_name)[1]
DTYPE = {short: dtype for dtype, short in SHORT.items()}


def plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if it is one whose elements lie in one storage as they are; else it is refused by its name."""
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise RefusedError(f"{name}: a {kind.__name__} is more than its elements: save what it is made of")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise RefusedError(f"{name}: a tensor of layout {tensor.layout} cannot be stored: make it dense first")
    if tensor.device.type == "meta":
        raise RefusedError(f"{name}: a tensor on the meta device has no elements")
    if tensor.dtype not in SHORT:
        raise RefusedError(f"{name}: elements of {tensor.dtype} cannot be stored")
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg()


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of the storage that the tensor uses, and the end of its last one."""
    start = int(tensor.storage_offset())
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    last = start + sum((int(size) - 1) * int(stride) for size, stride in dims)
    return start * tensor.element_size(), (last + 1) * tensor.element_size()


@dataclass
class _Group:
    """Tensors that share memory, from byte `start` of their storage to byte `end`."""

    start: int
    end: int
    tensors: list[tuple[str, torch.Tensor]]


def blocks(tensors: Mapping[str, torch.Tensor], *, on_host: bool = True) -> Iterator[Block]:
    """The pages that hold these tensors: tensors that overlap in memory share one, so that they share memory again.

    Their bytes lie on the host, or where the tensors are.
    """
    by_storage: dict[tuple[str, int], list[tuple[str, torch.Tensor]]] = {}
    alone: list[tuple[str, torch.Tensor]] = []
    for name, given in tensors.items():
        tensor = plain(name, given)
        if tensor.numel() == 0:
            alone.append((name, tensor))
            continue
        where = (str(tensor.device), tensor.untyped_storage().data_ptr())
        by_storage.setdefault(where, []).append((name, tensor))
    for name, tensor in alone:
        yield Block([Array(name, SHORT[tensor.dtype], tuple(tensor.shape))], b"", 0)
    for shared in by_storage.values():
        groups: list[_Group] = []
        for name, tensor in sorted(shared, key=lambda item: extent(item[1])):
            start, end = extent(tensor)
            if groups and start < groups[-1].end:
                groups[-1].end = max(end, groups[-1].end)
                groups[-1].tensors.append((name, tensor))
            else:
                groups.append(_Group(start, end, [(name, tensor)]))
        for group in groups:
            yield _block(group, on_host)


def _block(group: _Group, on_host: bool) -> Block:
    name, tensor = group.tensors[0]
    if len(group.tensors) == 1:
        holes = group.end - group.start > tensor.numel() * tensor.element_size()
        if holes or tensor.is_contiguous():
            # A tensor that uses little of its extent is stored without the rest, and comes back contiguous.
            bytes_ = bytes_of(tensor.contiguous(), on_host)
            return Block([Array(name, SHORT[tensor.dtype], tuple(tensor.shape))], bytes_, bytes_.numel())
    # A boundary of the widest elements, so that each tensor begins at a whole element of its own.
    start = group.start - group.start % 16
    arrays = []
    # In the order of names, so that the page is found again whichever tensor comes first in memory.
    for name, each in sorted(group.tensors, key=lambda item: item[0]):
        offset = int(each.storage_offset()) * each.element_size() - start
        arrays.append(Array(name, SHORT[each.dtype], tuple(each.shape), tuple(each.stride()), offset))
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    whole.set_(tensor.untyped_storage(), start, (group.end - start,), (1,))
    return Block(arrays, whole.cpu() if on_host else whole, group.end - start)


def bytes_of(tensor: torch.Tensor, on_host: bool = True) -> torch.Tensor:
    """A contiguous tensor's bytes, on the host or where they are."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size()
    flat.set_(tensor.untyped_storage(), start, (tensor.numel() * tensor.element_size(),), (1,))
    return flat.cpu() if on_host else flat


def read_page(reader: _native.Reader, key: str) -> torch.Tensor:
    page = torch.empty(reader.info(key).length, dtype=torch.uint8, device="cpu")
    if page.numel():
        reader.read_into(key, page)
    return page


def read_pages(reader: _native.Reader, pages: Mapping[str, list[Array]]) -> Iterator[tuple[torch.Tensor, list[Array]]]:
    """The bytes of pages, in their order: read by several threads, a few pages ahead of the caller."""
    threads = min(_THREADS_MAX, os.cpu_count() or 1)
    coming: deque[tuple[concurrent.futures.Future[torch.Tensor], list[Array]]] = deque()
    with concurrent.futures.ThreadPoolExecutor(threads, "remanent-load") as pool:
        try:
            for key, arrays in pages.items():
                coming.append((pool.submit(read_page, reader, key), arrays))
                if len(coming) > threads:
                    read, of = coming.popleft()
                    yield read.result(), of
            while coming:
                read, of = coming.popleft()
                yield read.result(), of
        finally:
            for read, _ in coming:
                read.cancel()


def tensors_of(page: torch.Tensor, arrays: list[Array], device: torch.device) -> dict[str, torch.Tensor]:
    page = page.to(device)
    loaded = {}
    for array in arrays:
        dtype = DTYPE.get(array.dtype)
        if dtype is None:
            raise RefusedError(f"{array.name}: this torch has no elements of {array.dtype}")
        tensor = torch.empty(0, dtype=dtype, device=device)
        stride = _pages.contiguous_stride(array.shape) if array.stride is None else array.stride
        # Of one storage, so that tensors that shared memory share it again.
        tensor.set_(page.untyped_storage(), array.offset // tensor.element_size(), array.shape, stride)
        loaded[array.name] = tensor
    return loaded
