"""Weights that a trainer publishes, taken over by vLLM between two steps: a weight transfer engine.

The trainer publishes with `remanent.weights.Publisher`. Each worker of vLLM reads from the publisher's directory what
changed since its last update: proven by checksums, and of exactly the version that is named, so that all ranks have the
same weights. vLLM knows the engine by the name "remanent" once this package is installed beside it:

    llm = LLM(model, weight_transfer_config={"backend": "remanent"})
    llm.init_weight_transfer_engine({"init_info": {"directory": directory}})

    ticket = publisher.publish(trained, step)           # in the trainer
    llm.start_weight_update()
    llm.update_weights({"update_info": {"lsn": ticket.lsn}})
    llm.finish_weight_update()

Names, shapes and types are those of the model's checkpoint, as vLLM's own loader knows them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    layerwise_groups,
)

from remanent import _pages, _tensors
from remanent._errors import NoStateError
from remanent._native import View

if TYPE_CHECKING:
    import torch

__all__ = ["RemanentInitInfo", "RemanentUpdateInfo", "RemanentWeightEngine"]

# Seconds between two looks for a version that is not logged yet.
_LOOK_AGAIN = 0.02


@dataclass
class RemanentInitInfo(WeightTransferInitInfo):
    """Where the publisher's directory is, as the workers see it."""

    directory: str


@dataclass
class RemanentUpdateInfo(WeightTransferUpdateInfo):
    """Which version the weights are to have: `lsn`, that of the ticket of `publish`.

    If it is not logged yet, the update waits up to `timeout` seconds for it. One that the publisher's log does not hold
    any more is refused (`NoStateError`).
    """

    lsn: int
    timeout: float = 60.0


@dataclass
class _Loaded:
    """A version: of which store, and where each tensor lies in it."""

    store: str
    lsn: int
    lies: dict[str, tuple[str, _pages.Array]]


class RemanentWeightEngine(WeightTransferEngine[RemanentInitInfo, RemanentUpdateInfo]):
    """The engine that vLLM makes in each worker, by the name "remanent"."""

    init_info_cls = RemanentInitInfo
    update_info_cls = RemanentUpdateInfo
    # What changed since the last update is known of one model.
    supports_draft_weight_update = False

    _directory: str | None = None
    # What the model has; None if that may be anything.
    _loaded: _Loaded | None = None

    def init_transfer_engine(self, init_info: RemanentInitInfo) -> None:
        self._directory = init_info.directory
        self._loaded = None

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: RemanentUpdateInfo) -> None:
        """Loads all layers in which a weight changed since the last update."""
        if self._directory is None:
            raise RuntimeError("no directory to take weights from: call init_weight_transfer_engine first")
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        before, self._loaded = self._loaded, None
        with _version(self._directory, update_info) as view, disable_mtp_completeness_check():
            pages = _pages.read_manifest(view).pages
            lies = {array.name: (key, array) for key, arrays in pages.items() for array in arrays}
            if before is None or before.store != view.id or before.lsn > update_info.lsn:
                changed = set(lies)
            else:
                lsns = {key: view.info(key).lsn for key in pages}
                changed = {name for name, (key, array) in lies.items()
                           if lsns[key] > before.lsn or before.lies.get(name) != (key, array)}
            self.model.load_weights(_layers_of(changed, view, pages, self.device))
            self._loaded = _Loaded(view.id, update_info.lsn, lies)

    def shutdown(self) -> None:
        """There is nothing to end: no connection is held."""


def _version(directory: str, update: RemanentUpdateInfo) -> View:
    until = time.monotonic() + update.timeout
    is_past = False
    while True:
        try:
            return View(directory, f"lsn:{update.lsn}")
        except NoStateError:
            # What came between a try and a look at the newest is there at the next try.
            if is_past or time.monotonic() >= until:
                raise
            with View(directory) as newest:
                is_past = newest.lsn >= update.lsn
            if not is_past:
                time.sleep(_LOOK_AGAIN)


def _layers_of(changed: set[str], view: View, pages: dict[str, list[_pages.Array]],
               device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of each layer that has one which changed: vLLM processes whole layers."""
    names = sorted(array.name for arrays in pages.values() for array in arrays)
    wanted = {name for group in layerwise_groups(names) if changed & set(group) for name in group}
    read = {key: arrays for key, arrays in pages.items() if any(array.name in wanted for array in arrays)}
    for page, arrays in _tensors.read_pages(view, read):
        yield from _tensors.tensors_of(page, [array for array in arrays if array.name in wanted], device).items()


def register() -> None:
    """Makes the engine known to vLLM, which calls this in each of its processes."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if "remanent" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("remanent", __name__, "RemanentWeightEngine")
