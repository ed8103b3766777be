"""Tensors of torch as pages, and back: which bytes of which storage a page holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from remanent import _native, _pages
from remanent._errors import RefusedError
from remanent._native import ArrayLayout, Block, Extent
from remanent._overlaps import Part, bits, expanded_stride, squeezed, together_or_apart
from remanent._pages import Arrays

# Bytes that a load reads by one call, of which the pages are shorter: on the host, and on a GPU, whose bus is idle
# where one call begins and where it ends.
_TOGETHER = 256 << 20
_TOGETHER_ON_GPU = 2 << 30

# Names of kinds as the store has them, for every kind of torch's that a store can hold.
SHORT: dict[torch.dtype, str] = {}
for _name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
              "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz",
              "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"):
    if hasattr(torch, _name):
        SHORT[getattr(torch, _name)] = _native.dtype(_name)[1]
DTYPE = {short: dtype for dtype, short in SHORT.items()}
# Types of tensors that are no more than their elements.
PLAIN_TYPES: frozenset[type] = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))


def plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if it is one whose elements lie in one storage as they are; else it is refused by its name."""
    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        raise RefusedError(f"{name}: it has no shape and no elements yet", remedy="run the model once before the save")
    if kind not in PLAIN_TYPES:
        raise RefusedError(f"{name}: a {kind.__module__}.{kind.__name__} cannot be stored: it is more than its "
                           "elements", remedy="store the plain tensors that it is made of")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise RefusedError(f"{name}: a tensor that a transform such as vmap or grad has wrapped cannot be stored",
                           remedy="save outside of the transform")
    if tensor.is_quantized or tensor.dtype not in SHORT:
        raise RefusedError(f"{name}: elements of {tensor.dtype} cannot be stored: the store has no such kind",
                           remedy="store tensor.view(torch.uint8), or of a quantized tensor int_repr() and its scales")
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise RefusedError(f"{name}: a tensor of layout {layout} cannot be stored",
                           remedy="store the plain tensors that it is made of, or make it dense first")
    if tensor.is_meta:
        raise RefusedError(f"{name}: a tensor on the meta device has no elements", remedy="give the model memory first")
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


class _Kinds(NamedTuple):
    """What `_native.extents` knows of torch."""

    tensor: type
    strided: torch.layout
    # Elements that no view conjugates.
    real: frozenset[torch.dtype]
    plain: Callable[[str, torch.Tensor], torch.Tensor]


_KINDS = _Kinds(torch.Tensor, torch.strided, frozenset(dtype for dtype in SHORT if not dtype.is_complex), plain)


def extents(tensors: dict[str, torch.Tensor]) -> list[Extent]:
    """What is to be stored. What cannot be is refused by its name."""
    return _native.extents(tensors, _KINDS)


def blocks(found: Iterable[Extent], *, on_host: bool = True) -> Iterator[Block]:
    """The pages that hold these tensors: tensors that overlap in memory share one, so that they share memory again.

    Their bytes lie on the host, or where the tensors are.
    """
    for group in _native.extents_by_page(list(found)):
        if not group[0].nbytes:
            yield Block((_array(group[0]),), b"", 0)
        elif len(group) == 1:
            yield _block_of_one(group[0], on_host)
        else:
            for part in together_or_apart(group):
                yield _block_of_one(part.extents[0], on_host) if len(part.extents) == 1 else _block(part, on_host)


def blocks_in_place(found: list[Extent]) -> Iterator[Block]:
    """As `blocks`, but of tensors on a GPU of CUDA's the bytes stay there, for the commit to copy. Tensors whose
    elements had to be put in a row first come to the host: there is more room."""
    held = {each.storage for each in found}
    for block in blocks(found, on_host=False):
        data = block.data
        if isinstance(data, torch.Tensor) and not data.device.type == "cpu":
            is_as_it_lies = (data.device, data.untyped_storage().data_ptr()) in held
            if not (is_as_it_lies and is_cuda(data.device)):
                block = block.moved(data.cpu())
        yield block


def is_cuda(device: torch.device) -> bool:
    """Whether it is a GPU of CUDA's: other kinds call themselves so, too."""
    return device.type == "cuda" and torch.version.hip is None


def _array(extent: Extent) -> ArrayLayout:
    """The tensor as the only one of its page."""
    return ArrayLayout(extent.name, SHORT[extent.tensor.dtype], extent.tensor.shape)


def _block_of_one(extent: Extent, on_host: bool) -> Block:
    """The page of a tensor that shares memory with no other one."""
    tensor = extent.tensor
    if tensor.is_contiguous():
        return Block((_array(extent),), bytes_of(tensor, on_host), extent.nbytes)
    # Each element once, of those that `expand` repeated.
    once = squeezed(tensor)
    if extent.end - extent.start <= once.nbytes:
        return _block(Part((extent,), None), on_host)
    if _has_shared_elements(once):
        return _block(Part((extent,), None), on_host)
    # A tensor that uses little of its extent is stored without the rest.
    stride = None if once is tensor else expanded_stride(tensor, _pages.contiguous_stride(once.shape))
    return Block((ArrayLayout(extent.name, SHORT[tensor.dtype], tensor.shape, stride),),
                 bytes_of(_packed(once), on_host), once.nbytes)


def _has_shared_elements(tensor: torch.Tensor) -> bool:
    """Whether elements of one tensor have one place, as those of overlapping windows have."""
    reached = 0
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if step <= reached:
                steps = [torch.arange(count, device="cpu") * each
                         for count, each in zip(tensor.shape, tensor.stride(), strict=True)]
                places = functools.reduce(torch.add, torch.meshgrid(*steps, indexing="ij"))
                return len(set(places.reshape(-1).tolist())) < tensor.numel()
            reached += (length - 1) * step
    return False


def _block(part: Part, on_host: bool) -> Block:
    """The page of tensors that share memory, or of one whose elements lie in another order."""
    group = part.extents
    first = group[0]
    if part.places is not None:
        data = part.packed()
        places, length = part.places, data.numel()
    else:
        # A boundary of the widest elements, so that each tensor begins at a whole element of its own.
        start = first.start - first.start % 16
        places = {each.name: (each.start - start, each.tensor.stride()) for each in group}
        length = max(each.end for each in group) - start
        # Storages of one address, one of which may be longer.
        storage = max((each.tensor.untyped_storage() for each in group), key=lambda storage: storage.nbytes())
        data = torch.empty(0, dtype=torch.uint8, device=first.tensor.device).set_(storage, start, (length,), (1,))
    # In the order of names, so that the page is found again whichever tensor comes first in memory.
    arrays = tuple(ArrayLayout(each.name, SHORT[each.tensor.dtype], each.tensor.shape, places[each.name][1],
                               places[each.name][0]) for each in sorted(group, key=lambda each: each.name))
    return Block(arrays, data.cpu() if on_host else data, length)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements row by row: a copy if they do not lie so, made on the current stream."""
    packed = tensor if tensor.is_contiguous() else bits(tensor).contiguous()
    if packed is not tensor and tensor.is_cuda:
        # Its owner may free it before the copy has run.
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return packed


def bytes_of(tensor: torch.Tensor, on_host: bool = True) -> torch.Tensor:
    """A contiguous tensor's bytes, on the host or where they are."""
    # A dimension of one element may have any stride.
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return flat.cpu() if on_host else flat


def tensor_of(content: bytes | memoryview) -> torch.Tensor:
    """A copy of bytes, on the host."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def read_page(reader: _native.Reader, key: str) -> torch.Tensor:
    page = torch.empty(reader.info(key).length, dtype=torch.uint8, device="cpu")
    if page.numel():
        reader.read_into(key, page)
    return page


def load_pages(view: _native.View, pages: Mapping[str, Arrays],
               device: torch.device = torch.device("cpu")) -> Iterator[tuple[torch.Tensor, Arrays]]:
    """The bytes of pages, in their order: on `device` if that is a GPU of CUDA's, else on the host. Some are read
    ahead of the caller."""
    lengths = {key: view.info(key).length for key in pages}
    there, name = torch.device("cpu"), "host"
    if is_cuda(device):
        there = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        name = str(there)
    for keys in together(lengths, there):
        # In inference mode they would be tensors that no training can use.
        with torch.inference_mode(False):
            memory = {key: torch.empty(lengths[key], dtype=torch.uint8, device=there) for key in keys}
        view.load(memory, name)
        for key in keys:
            yield memory.pop(key), pages[key]


def together(lengths: Mapping[str, int], device: torch.device = torch.device("cpu")) -> Iterator[list[str]]:
    """Pages that are read by one call to a device, or proven: up to a number of bytes, or a longer one alone."""
    at_once = _TOGETHER_ON_GPU if is_cuda(device) else _TOGETHER
    group: list[str] = []
    held = 0
    for key, length in lengths.items():
        if group and held + length > at_once:
            yield group
            group, held = [], 0
        group.append(key)
        held += length
    if group:
        yield group


@torch.inference_mode(False)
def tensors_of(page: torch.Tensor, arrays: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
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
