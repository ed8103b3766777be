"""Torch's global settings and contexts, under which the package's calls do what they do without them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from remanent._errors import RefusedError


def refuse_fake_tensors() -> None:
    """Refuses a call while a mode of torch makes tensors that have no elements.

    :raises RefusedError: under `FakeTensorMode`, as while a program is traced. Nothing changed.
    """
    kind = type(torch.empty(0, dtype=torch.uint8, device="cpu"))
    if kind is not torch.Tensor:
        raise RefusedError(f"a mode of torch is active in which new tensors are of the type {kind.__name__} and have no "
                           "elements", remedy="save and restore outside of the mode")


@contextlib.contextmanager
def parameters_in_place() -> Iterator[None]:
    """Has `load_state_dict` copy into the tensors of a module, whatever `set_swap_module_params_on_conversion` says."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
