"""Applies a restore to the parts of a run, in an order in which most failures leave everything unchanged."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch

from remanent._state.modules import LiveModule, ModuleLoad
from remanent._state.optimizers import OptimizerLoad
from remanent._state.rng import RngLoad
from remanent._store.errors import Error, RestoreFailedError


class _Change(NamedTuple):
    """A change of one part, and a function that reverts the change, or None if it cannot be reverted."""

    part: str
    do: Callable[[], object]
    undo: Callable[[], object] | None = None


class PutBack:
    """All changes of a restore. The constructor checks, as far as possible, that each part accepts its state.

    1. Parts with their own `load_state_dict`, and dicts, are loaded. If one of them fails, no tensor of a model has
      changed.
    2. Bytes are read from the files into the run's own tensors.
    3. Modules and optimizers are loaded. Hooks of modules and optimizers find the new values in these tensors.
    4. Random states are loaded last, because the previous steps may use random numbers.

    If a step fails, the previous steps are reverted as far as that is possible without a copy of the tensors.

    :param states: the version's state of each part and of `rng`.
    :param modules: the modules, each with the names of its tensors into which bytes are read.
    :param in_place: the parts with tensors into which bytes are read.
    :raises InvalidError: a part does not accept its state. Nothing changed.
    """

    def __init__(self, parts: Mapping[str, Any], states: Mapping[str, Any],
                 modules: Mapping[str, tuple[LiveModule, set[str]]], in_place: set[str], *, cast: bool) -> None:
        self._in_place = in_place
        self._first: list[_Change] = []
        self._then: list[_Change] = []
        for name, part in parts.items():
            state = states[name]
            if isinstance(part, MutableMapping):
                self._first.append(_of_mapping(name, part, state))
            elif name in modules and isinstance(state, Mapping):
                live, names = modules[name]
                load = ModuleLoad(name, live, dict(state), names, getattr(state, "_metadata", None))
                self._then.append(_Change(name, load.load))
            elif isinstance(part, torch.optim.Optimizer) and isinstance(state, dict):
                of_optimizer = OptimizerLoad(name, part, state, cast=cast)
                self._then.append(_Change(name, of_optimizer.load, of_optimizer.undo))
            elif isinstance(part, torch.nn.Module):
                # A module with its own load method may read its tensors, so it is loaded after the bytes are read.
                self._then.append(_of_object(name, part, state))
            else:
                self._first.append(_of_object(name, part, state))
        self._rng = RngLoad(states["rng"]) if "rng" in states else None

    def run(self, load: Callable[[], None]) -> None:
        """Makes the changes in order.

        :param load: reads the bytes into the run's own tensors.
        :raises RestoreFailedError: a part could not load its state. Errors of `load` are raised unchanged, with a note
            that names the changed parts.
        """
        started: list[_Change] = []
        is_loading = False
        try:
            for change in self._first:
                started.append(change)
                change.do()
            is_loading = True
            load()
            for change in self._then:
                started.append(change)
                change.do()
            if self._rng is not None:
                started.append(_Change("rng", self._rng.load, self._rng.undo))
                self._rng.load()
        except BaseException as error:
            self._fail(error, started, is_loading)

    def _fail(self, error: BaseException, started: list[_Change], is_loading: bool) -> None:
        changed = set(self._in_place) if is_loading else set()
        for change in reversed(started):
            try:
                if change.undo is None:
                    changed.add(change.part)
                else:
                    change.undo()
            except Exception as failure:
                changed.add(change.part)
                error.add_note(f"{change.part}: restoring its previous state also failed: {failure}")
        # An optimizer's values may have been copied into its tensors.
        changed |= {change.part for change in started if change in self._then and change.undo is not None}
        names = ", ".join(sorted(changed))
        effect = f"changed completely or partly: {names}" if changed else "nothing changed"
        if isinstance(error, Error) or not isinstance(error, Exception):
            error.add_note(f"{effect}; restore a version again before the run continues" if changed else effect)
            raise error
        part = started[-1].part if started else "restore"
        raise RestoreFailedError(f"{part}: loading its state failed with {type(error).__name__}: {error}; {effect}",
                                 remedy="correct the part, then restore again" if changed else
                                 "create the part as it was when the version was saved", part=part,
                                 changed=tuple(sorted(changed))
                                 ) from error


def _of_mapping(name: str, part: MutableMapping[Any, Any], state: Mapping[Any, Any]) -> _Change:
    before = dict(part)

    def fill(values: Mapping[Any, Any]) -> None:
        part.clear()
        part.update(values)

    return _Change(name, lambda: fill(state), lambda: fill(before))


def _of_object(name: str, part: Any, state: Any) -> _Change:
    return _Change(name, lambda: part.load_state_dict(state), _undo_of(part))


def _undo_of(part: Any) -> Callable[[], object] | None:
    """Returns a function that restores the current state of a small torch object, such as a scheduler or gradient
    scaler. Returns None for other objects, whose states may be large and have side effects when read."""
    if isinstance(part, torch.nn.Module) or type(part).__module__.split(".")[0] != "torch":
        return None
    with contextlib.suppress(Exception):
        before = copy.deepcopy(part.state_dict())
        return lambda: part.load_state_dict(before)
    return None
