"""A weight transfer engine for vLLM. Between two steps, workers load the weights that a trainer publishes.

The engines of the workers and of the trainer are registered with vLLM under the name "remanent". vLLM's own processes
register the engines if the package is installed in their environment. The trainer's process registers the engines when
it imports this module. In the workers' process:

    llm = LLM(model, weight_transfer_config={"backend": "remanent"})

In each rank of the trainer, with a vLLM client that can reach the workers (such as `HTTPVLLMWeightSyncClient`):

    engine = WeightTransferTrainerFactory.trainer_init(
        RemanentTrainerInitInfo(directory, rank=rank), client=client, source=ModuleSource(model))
    engine.send_weights()                               # after each step; returns once workers have loaded it

The trainer's first rank logs the changes since the previous step. Each worker reads the changes from the directory,
which all workers must be able to access. Changes are verified by checksums and belong to exactly one version, so all
ranks have the same weights. A worker that was started later, or that failed, loads the whole version. A trainer that
controls the workers itself publishes with `remanent.weights.Publisher`:

    llm.init_weight_transfer_engine({"init_info": {"directory": directory}})

    ticket = publisher.publish(trained, step)
    llm.start_weight_update()
    llm.update_weights({"update_info": {"lsn": ticket.lsn}})
    llm.finish_weight_update()

Names, shapes and types must be those of the model's checkpoint, as for vLLM's own loader.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from remanent._state import page_tree
from remanent._store._native import ArrayLayout, View
from remanent._store.errors import NoStateError, RefusedError
from remanent._tensors import conversion
from remanent.integrations import _hosts
from remanent.weights import Publisher

with _hosts.importing(_hosts.VLLM):
    from vllm.distributed.weight_transfer.base import (
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        VLLMWeightSyncClient,
        WeightSource,
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
        layerwise_groups,
    )

__all__ = ["RemanentInitInfo", "RemanentTrainerEngine", "RemanentTrainerInitInfo", "RemanentUpdateInfo",
           "RemanentWeightEngine"]

# The time in seconds between two checks for a version that is not logged yet.
_LOOK_AGAIN = 0.02


def __dir__() -> list[str]:
    return __all__


@dataclass
class RemanentInitInfo(WeightTransferInitInfo):
    """The path of the publisher's directory in the workers' file system."""

    directory: str


@dataclass
class RemanentUpdateInfo(WeightTransferUpdateInfo):
    """The version to load: `lsn` is the Lsn of the ticket that `publish` returned.

    If the version is not logged yet, the update waits up to `timeout` seconds for it. A version that is no longer in
    the publisher's log is rejected with `NoStateError`.
    """

    lsn: int
    timeout: float = 60.0


@dataclass
class _Loaded:
    """A loaded version: its store, its Lsn, and the page and layout of each tensor."""

    store: str
    lsn: int
    lies: dict[str, tuple[str, ArrayLayout]]


class RemanentWeightEngine(WeightTransferEngine[RemanentInitInfo, RemanentUpdateInfo]):
    """The engine that vLLM creates in each worker for the backend "remanent"."""

    init_info_cls = RemanentInitInfo
    update_info_cls = RemanentUpdateInfo
    # Changes since the last update are tracked for a single model.
    supports_draft_weight_update = False

    _directory: str | None = None
    # The version that the model contains; None if that is unknown.
    _loaded: _Loaded | None = None

    def init_transfer_engine(self, init_info: RemanentInitInfo) -> None:
        self._directory = os.path.abspath(init_info.directory)
        self._loaded = None

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: RemanentUpdateInfo) -> None:
        """Loads all layers in which a weight changed since the last update. Called by vLLM."""
        if self._directory is None:
            raise RuntimeError("the publisher's directory is unknown; call init_weight_transfer_engine first")
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        before, self._loaded = self._loaded, None
        with _version(self._directory, update_info) as view, disable_mtp_completeness_check():
            pages = page_tree.read_manifest(view).pages
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
        """Does nothing, because the engine has no connection to close."""


def _version(directory: str, update: RemanentUpdateInfo) -> View:
    until = time.monotonic() + update.timeout
    is_past = False
    while True:
        try:
            return View(directory, f"lsn:{update.lsn}")
        except NoStateError:
            # If the version was logged after the failed attempt, the next attempt finds the version.
            if is_past or time.monotonic() >= until:
                raise
            with View(directory) as newest:
                is_past = newest.lsn >= update.lsn
            if not is_past:
                time.sleep(_LOOK_AGAIN)


def _layers_of(changed: set[str], view: View, pages: dict[str, page_tree.Arrays],
               device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all tensors of each layer in which a tensor changed, because vLLM processes whole layers."""
    names = sorted(array.name for arrays in pages.values() for array in arrays)
    wanted = {name for group in layerwise_groups(names) if changed & set(group) for name in group}
    read = {key: arrays for key, arrays in pages.items() if any(array.name in wanted for array in arrays)}
    for page, arrays in conversion.load_pages(view, read, device):
        yield from conversion.tensors_of(page, tuple(array for array in arrays if array.name in wanted), device).items()


@dataclass
class RemanentTrainerInitInfo(TrainerInitInfo):
    """The trainer's directory and options; see `remanent.weights.Publisher`.

    :param directory: the publisher's directory, which trainer and workers must see under the same path.
    :param device: "host", or the GPU that contains all weights and compares them.
    :param options: other options of `Publisher`.
    """

    backend: ClassVar[str] = "remanent"
    directory: str
    device: str = "host"
    options: dict[str, Any] = field(default_factory=dict)


class RemanentTrainerEngine(TrainerWeightTransferEngine[RemanentTrainerInitInfo]):
    """The trainer's side of the weight transfer, in each of its ranks. The first rank publishes, and the other ranks
    help to gather sharded tensors.

    The first rank holds gathered tensors, such as those of FSDP, in full until they are compared. Gathered tensors
    are held on the host unless `device` is a GPU. Each tensor that the source yields must stay unchanged until the
    source has yielded all tensors.
    """

    init_info_cls = RemanentTrainerInitInfo
    _publisher: Publisher | None = None
    _on_host = True

    @classmethod
    def trainer_init(cls, init_info: RemanentTrainerInitInfo, *, client: VLLMWeightSyncClient,
                     source: WeightSource | None = None) -> RemanentTrainerEngine:
        if source is None or not source.implements_iter_full():
            raise RefusedError("source must be a WeightSource with `iter_full`, because whole weights are published",
                               remedy="pass `source=ModuleSource(model)`")
        if len(source.owned_names(0)) != len(source.metadata):
            raise RefusedError("the first rank does not have all weights, for example because of pipeline parallelism",
                               remedy="pass a source that gathers all weights on the first rank")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        if engine.is_sender:
            engine._publisher = Publisher(init_info.directory, device=init_info.device, **init_info.options)
            engine._on_host = init_info.device == "host"
            try:
                client.init_weight_transfer_engine({"directory": init_info.directory})
            except BaseException:
                # The caller may try again.
                engine.shutdown()
                raise
        return engine

    def send_weights(self) -> None:
        """Publishes the source's weights as the next step, and waits until the workers have loaded them."""
        assert self.source is not None
        if self._publisher is None:
            for _ in self.source.iter_full():
                pass
            return
        gathered = {name: self._held(tensor) for name, tensor in self.source.iter_full()}
        ticket = self._publisher.publish(gathered, self._publisher.store.root.get("step", 0) + 1)
        self.client.start_weight_update()
        self.client.update_weights({"lsn": ticket.lsn})
        self.client.finish_weight_update()

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        return tensor.cpu() if self._on_host else tensor

    def shutdown(self) -> None:
        """Closes the publisher's store. Workers keep their weights."""
        if self._publisher is not None:
            self._publisher.close()


def register() -> None:
    """Registers the engines of both sides with vLLM. vLLM calls this function in each of its own processes."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, name in ((WeightTransferEngineFactory, "RemanentWeightEngine"),
                          (WeightTransferTrainerFactory, "RemanentTrainerEngine")):
        if "remanent" not in factory._registry:
            factory.register_engine("remanent", __name__, name)


register()
