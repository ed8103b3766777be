"""Handles torch's global settings and modes, so that the package behaves the same under all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from remanent._store.errors import RefusedError


def refuse_fake_tensors() -> None:
    """Raises an error while a torch mode creates tensors without elements.

    :raises RefusedError: such a mode is active, for example `FakeTensorMode` while a program is traced.
    """
    kind = type(torch.empty(0, dtype=torch.uint8, device="cpu"))
    if kind is not torch.Tensor:
        raise RefusedError(f"a torch mode is active in which new tensors are of type {kind.__name__} and have no elements",
                           remedy="save and restore outside of the mode")


@contextlib.contextmanager
def parameters_in_place() -> Iterator[None]:
    """Makes `load_state_dict` copy into a module's tensors, regardless of `set_swap_module_params_on_conversion`."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
