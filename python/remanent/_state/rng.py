"""Saves and loads the states of the random number generators of Python, NumPy, torch and its devices."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from remanent._store.errors import InvalidError

# The device types that have a generator per device.
_DEVICES = ("cuda", "xpu")


def rng_state() -> dict[str, Any]:
    """Returns the states of all generators. States of devices are included only if the process uses the devices."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    for kind in _DEVICES:
        devices = getattr(torch, kind)
        if devices.is_available() and devices.is_initialized():
            state[kind] = list(devices.get_rng_state_all())
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


class RngLoad:
    """States to load into generators. The constructor checks that each generator accepts its state.

    States of devices that this process does not have are skipped, as is the state of NumPy if NumPy is not installed.
    Generators without a state in the version are unchanged.

    :raises InvalidError: a generator would reject its state. Nothing changed.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        # The function that sets a generator's state, the new state, and the current state, for each generator.
        self._sets: list[tuple[Callable[[Any], object], Any, Any]] = []
        self._add("python", random.setstate, state, random.getstate, random.Random().setstate)
        self._add("torch", torch.set_rng_state, state, torch.get_rng_state, torch.Generator("cpu").set_state)
        if "numpy" in state:
            try:
                import numpy
            except ImportError:
                pass
            else:
                trial = numpy.random.RandomState().set_state
                self._add("numpy", numpy.random.set_state, state, numpy.random.get_state, trial)
        for kind in _DEVICES:
            devices = getattr(torch, kind)
            if kind in state and devices.is_available():
                for index, saved in list(enumerate(state[kind]))[: devices.device_count()]:
                    self._add_device(kind, index, saved)
        if "mps" in state and torch.backends.mps.is_available():
            self._add("mps", torch.mps.set_rng_state, state, torch.mps.get_rng_state, lambda saved: None)

    def _add(self, name: str, set_state: Callable[[Any], object], state: dict[str, Any], get: Callable[[], Any],
             trial: Callable[[Any], object]) -> None:
        if name not in state:
            return
        try:
            trial(state[name])
        except Exception as error:
            raise InvalidError(f"rng/{name}: the generator does not accept the version's state: {error}",
                               remedy="restore with the release that saved it, or with Checkpointer(rng=False)"
                               ) from error
        self._sets.append((set_state, state[name], get()))

    def _add_device(self, kind: str, index: int, saved: torch.Tensor) -> None:
        devices = getattr(torch, kind)
        before = None
        if devices.is_initialized():
            before = devices.get_rng_state_all()[index]
            if before.shape != saved.shape or before.dtype != saved.dtype:
                raise InvalidError(f"rng/{kind}/{index}: the version's state has {saved.numel()} bytes, but that of the "
                                   f"generator has {before.numel()}", remedy="restore with Checkpointer(rng=False)")
        self._sets.append((lambda state: devices.set_rng_state(state, index), saved, before))

    def load(self) -> None:
        for set_state, saved, _ in self._sets:
            set_state(saved)

    def undo(self) -> None:
        """Restores the previous states of the generators."""
        for set_state, _, before in self._sets:
            if before is not None:
                set_state(before)
