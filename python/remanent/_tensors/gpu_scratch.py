"""Temporary GPU memory, into which pages are read and verified before the tensors of a run change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from remanent._tensors.conversion import is_cuda

# The alignment of each page. Copies of aligned memory are fastest.
_ALIGN = 256
# The share of a GPU's free memory that remains free.
_FREE_PARTS = 4


class Scratch:
    """Memory for pages on a GPU. It is allocated outside of torch's cache, and `free` returns it to the GPU.

    :param lengths: the length of each page in bytes, by key.
    """

    def __init__(self, device: torch.device, lengths: Mapping[str, int]) -> None:
        self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool()
        with torch.inference_mode(False), torch.cuda.device(device), torch.cuda.use_mem_pool(self._pool):
            self._divide(torch.empty(_size(lengths), dtype=torch.uint8, device=device), lengths)

    def _divide(self, memory: torch.Tensor, lengths: Mapping[str, int]) -> None:
        #: The memory of all pages, in the order of `lengths`.
        self.memory = memory
        #: The memory of each page, by key.
        self.pages: dict[str, torch.Tensor] = {}
        self._starts: dict[str, int] = {}
        at = 0
        for key, length in lengths.items():
            self.pages[key] = memory[at:at + length]
            self._starts[key] = at
            at += _aligned(length)

    def span(self, keys: Sequence[str]) -> torch.Tensor:
        """Returns the memory from the first of these consecutive pages to the end of the last one."""
        return self.memory[self._starts[keys[0]]:self._starts[keys[-1]] + self.pages[keys[-1]].numel()]

    def copy_to(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Copies all pages to `memory`, on the current stream."""
        with torch.no_grad():
            torch._foreach_copy_([memory[key] for key in self.pages], list(self.pages.values()))

    def free(self) -> None:
        """Returns the memory to the GPU, after the queued copies."""
        # The pool keeps memory that is still in use when the pool is deleted.
        self.pages = {}
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._pool = None


def scratch_for(device: torch.device, lengths: Mapping[str, int]) -> Scratch | None:
    """Returns memory for pages on `device`, or None if it is not a CUDA GPU with plenty of free memory."""
    if not is_cuda(device) or not hasattr(torch.cuda, "MemPool"):
        return None
    free, _ = torch.cuda.mem_get_info(device)
    if _size(lengths) > free - free // _FREE_PARTS:
        return None
    try:
        return Scratch(device, lengths)
    except torch.cuda.OutOfMemoryError:
        # Another process took the memory.
        return None


def _aligned(length: int) -> int:
    return (length + _ALIGN - 1) // _ALIGN * _ALIGN


def _size(lengths: Mapping[str, int]) -> int:
    return sum(map(_aligned, lengths.values()))
