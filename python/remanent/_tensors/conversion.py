"""Converts torch tensors to pages and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from remanent._state import page_tree
from remanent._state.page_tree import Arrays
from remanent._store import _native
from remanent._store._native import ArrayLayout, Block, Extent
from remanent._store.errors import RefusedError
from remanent._tensors.overlaps import Part, bits, expanded_stride, squeezed, together_or_apart

# The largest number of bytes that a load reads with one call, unless a single page is longer. Long calls are faster on
# a GPU, because its bus is idle at the start and the end of each call.
_TOGETHER = 256 << 20
_TOGETHER_ON_GPU = 2 << 30

# The store's names of element types, for every torch type that a store can hold.
SHORT: dict[torch.dtype, str] = {}
for _name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
              "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz",
              "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"):
    if hasattr(torch, _name):
        SHORT[getattr(torch, _name)] = _native.dtype(_name)[1]
DTYPE = {short: dtype for dtype, short in SHORT.items()}
# The types of tensors that have no state in addition to their elements.
PLAIN_TYPES: frozenset[type] = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))


def plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor if its elements are stored unchanged in one storage. Raises `RefusedError` for any other
    tensor."""
    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        raise RefusedError(f"{name}: the tensor is uninitialized", remedy="run the model once before the save")
    if kind not in PLAIN_TYPES:
        raise RefusedError(f"{name}: a {kind.__module__}.{kind.__name__} cannot be stored, because it has state in "
                           "addition to its elements", remedy="store the plain tensors that it consists of")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise RefusedError(f"{name}: a tensor wrapped by a transform such as vmap or grad cannot be stored",
                           remedy="save outside of the transform")
    if tensor.is_quantized or tensor.dtype not in SHORT:
        raise RefusedError(f"{name}: elements of type {tensor.dtype} cannot be stored",
                           remedy="store tensor.view(torch.uint8); for a quantized tensor, store int_repr() and its scales")
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise RefusedError(f"{name}: a tensor of layout {layout} cannot be stored",
                           remedy="store the plain tensors that it consists of, or convert it to a dense tensor")
    if tensor.is_meta:
        raise RefusedError(f"{name}: a tensor on the meta device has no elements",
                           remedy="allocate memory for the model first, for example with to_empty")
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


class _Kinds(NamedTuple):
    """The torch types and functions that `_native.extents` uses."""

    tensor: type
    strided: torch.layout
    # Element types that no view conjugates.
    real: frozenset[torch.dtype]
    plain: Callable[[str, torch.Tensor], torch.Tensor]


_KINDS = _Kinds(torch.Tensor, torch.strided, frozenset(dtype for dtype in SHORT if not dtype.is_complex), plain)


def extents(tensors: dict[str, torch.Tensor]) -> list[Extent]:
    """Returns the memory extents of tensors. Raises `RefusedError` for a tensor that cannot be stored."""
    return _native.extents(tensors, _KINDS)


def blocks(found: Iterable[Extent], *, on_host: bool = True) -> Iterator[Block]:
    """Yields the pages of tensors. Tensors that overlap in memory share a page, so that they share memory again after a
    load.

    :param on_host: whether to copy the bytes of tensors on other devices to the host.
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
    """Yields the pages of tensors. The bytes of tensors on CUDA GPUs stay there until the commit copies them. Tensors
    whose elements had to be reordered are copied to the host, which has more memory."""
    held = {each.storage for each in found}
    for block in blocks(found, on_host=False):
        data = block.data
        if isinstance(data, torch.Tensor) and not data.device.type == "cpu":
            is_as_it_lies = (data.device, data.untyped_storage().data_ptr()) in held
            if not (is_as_it_lies and is_cuda(data.device)):
                block = block.moved(data.cpu())
        yield block


def is_cuda(device: torch.device) -> bool:
    """Returns whether the device is a CUDA GPU. Torch uses the name "cuda" for ROCm devices, too."""
    return device.type == "cuda" and torch.version.hip is None


def device_name(device: torch.device) -> str:
    """Returns the name of a device for the engine: that of a CUDA GPU, or "host"."""
    return str(device) if is_cuda(device) else "host"


def _array(extent: Extent) -> ArrayLayout:
    """Returns the layout of a tensor that has a page of its own."""
    return ArrayLayout(extent.name, SHORT[extent.tensor.dtype], extent.tensor.shape)


def _block_of_one(extent: Extent, on_host: bool) -> Block:
    """Returns the page of a tensor that shares no memory with other tensors."""
    tensor = extent.tensor
    if tensor.is_contiguous():
        return Block((_array(extent),), bytes_of(tensor, on_host), extent.nbytes)
    # The tensor without the repetitions of `expand`.
    once = squeezed(tensor)
    if extent.end - extent.start <= once.nbytes:
        return _block(Part((extent,), None), on_host)
    if _has_shared_elements(once):
        return _block(Part((extent,), None), on_host)
    # A tensor that uses little of its extent is stored without the rest.
    stride = None if once is tensor else expanded_stride(tensor, page_tree.contiguous_stride(once.shape))
    return Block((ArrayLayout(extent.name, SHORT[tensor.dtype], tensor.shape, stride),),
                 bytes_of(_packed(once), on_host), once.nbytes)


def _has_shared_elements(tensor: torch.Tensor) -> bool:
    """Returns whether several elements of a tensor share a memory location, as in overlapping windows."""
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
    """Returns the page of tensors that share memory, or of one tensor whose elements are not in row-major order."""
    group = part.extents
    first = group[0]
    if part.places is not None:
        data = part.packed()
        places, length = part.places, data.numel()
    else:
        # The start is aligned to the widest elements, so that each tensor begins at a multiple of its element size.
        start = first.start - first.start % 16
        places = {each.name: (each.start - start, each.tensor.stride()) for each in group}
        length = max(each.end for each in group) - start
        # The storages have the same address, but one may be longer.
        storage = max((each.tensor.untyped_storage() for each in group), key=lambda storage: storage.nbytes())
        data = torch.empty(0, dtype=torch.uint8, device=first.tensor.device).set_(storage, start, (length,), (1,))
    # The arrays are ordered by name, so that the page is found again regardless of which tensor is first in memory.
    arrays = tuple(ArrayLayout(each.name, SHORT[each.tensor.dtype], each.tensor.shape, places[each.name][1],
                               places[each.name][0]) for each in sorted(group, key=lambda each: each.name))
    return Block(arrays, data.cpu() if on_host else data, length)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's elements in row-major order, copied on the current stream if the order differs."""
    packed = tensor if tensor.is_contiguous() else bits(tensor).contiguous()
    if packed is not tensor and tensor.is_cuda:
        # The owner may free the tensor before the copy has run.
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return packed


def bytes_of(tensor: torch.Tensor, on_host: bool = True) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor, as a view or as a copy on the host."""
    # A dimension of one element may have any stride.
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return flat.cpu() if on_host else flat


def tensor_of(content: bytes | memoryview) -> torch.Tensor:
    """Returns a copy of `content` as a tensor on the host."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def read_page(reader: _native.Reader, key: str) -> torch.Tensor:
    page = torch.empty(reader.info(key).length, dtype=torch.uint8, device="cpu")
    if page.numel():
        reader.read_into(key, page)
    return page


def load_pages(view: _native.View, pages: Mapping[str, Arrays],
               device: torch.device = torch.device("cpu")) -> Iterator[tuple[torch.Tensor, Arrays]]:
    """Yields the bytes of pages in order, on `device` if it is a CUDA GPU and otherwise on the host. Pages that fit are
    read several at a time."""
    lengths = {key: view.info(key).length for key in pages}
    there, name = torch.device("cpu"), "host"
    if is_cuda(device):
        there = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        name = str(there)
    for keys in together(lengths, there):
        # Tensors created in inference mode could not be used in training.
        with torch.inference_mode(False):
            memory = {key: torch.empty(lengths[key], dtype=torch.uint8, device=there) for key in keys}
        view.load(memory, name)
        for key in keys:
            yield memory.pop(key), pages[key]


def together(lengths: Mapping[str, int], device: torch.device = torch.device("cpu")) -> Iterator[list[str]]:
    """Yields groups of pages to read or verify with one call."""
    return in_groups(lengths, _TOGETHER_ON_GPU if is_cuda(device) else _TOGETHER)


def in_groups(lengths: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Yields groups of consecutive pages. A group has at most `limit` bytes, or is a single longer page."""
    group: list[str] = []
    held = 0
    for key, length in lengths.items():
        if group and held + length > limit:
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
            raise RefusedError(f"{array.name}: this torch has no element type {array.dtype}", remedy="use a newer torch")
        tensor = torch.empty(0, dtype=dtype, device=device)
        stride = page_tree.contiguous_stride(array.shape) if array.stride is None else array.stride
        # All tensors use one storage, so that those that shared memory share it again.
        tensor.set_(page.untyped_storage(), array.offset // tensor.element_size(), array.shape, stride)
        loaded[array.name] = tensor
    return loaded
