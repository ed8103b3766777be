"""Weights that vLLM receives: those of exactly the named version, with changes layer by layer."""

from __future__ import annotations

import importlib.metadata
import shutil
import time
from types import SimpleNamespace
from typing import Any

import pytest
import stand_ins

import remanent

torch = pytest.importorskip("torch")
HOST = stand_ins.vllm_weights()

from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory  # noqa: E402

from remanent.integrations.vllm_weights import (  # noqa: E402
    RemanentInitInfo,
    RemanentTrainerInitInfo,
    RemanentUpdateInfo,
    RemanentWeightEngine,
    register,
)
from remanent.weights import Publisher  # noqa: E402


class Model:
    """A model that loads weights like those of vLLM."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        self.loaded: list[str] = []
        self.fails_at: str | None = None

    def load_weights(self, weights: Any) -> None:
        self.loaded = []
        for name, tensor in weights:
            if name == self.fails_at:
                raise KeyError(name)
            self.loaded.append(name)
            self.weights[name] = tensor.clone()


def trained() -> dict[str, Any]:
    layers = {f"model.layers.{layer}.{part}": torch.full((40, 30), float(layer), dtype=torch.bfloat16)
              for layer in range(3) for part in ("q", "v")}
    return layers | {"model.embed": torch.arange(50.0), "lm_head": torch.ones(9)}


def worker() -> RemanentWeightEngine:
    config = SimpleNamespace(parallel_config=None, model_config=SimpleNamespace(dtype=torch.bfloat16))
    return RemanentWeightEngine(SimpleNamespace(backend="remanent"), config, torch.device("cpu"), Model())


@pytest.fixture
def engine() -> RemanentWeightEngine:
    return worker()


def same(model: Model, tensors: dict[str, Any]) -> bool:
    return model.weights.keys() == tensors.keys() and all(torch.equal(model.weights[name], tensors[name])
                                                          for name in tensors)


def test_update_loads_changed_layers_of_named_version(directory: str, engine: RemanentWeightEngine) -> None:
    tensors = trained()
    with Publisher(directory) as publisher:
        first = publisher.publish(tensors, 1)
        first.wait()
        engine.init_transfer_engine(RemanentInitInfo(directory))
        engine.receive_weights(RemanentUpdateInfo(first.lsn))
        assert same(engine.model, tensors) and len(engine.model.loaded) == 8

        before = {name: tensor.clone() for name, tensor in tensors.items()}
        tensors["model.layers.1.q"][3, 7] = 5
        second = publisher.publish(tensors, 2)
        later = {name: tensor + 1 for name, tensor in tensors.items()}
        third = publisher.publish(later, 3)
        third.wait()
        engine.receive_weights(RemanentUpdateInfo(second.lsn))
        assert same(engine.model, tensors)
        assert sorted(engine.model.loaded) == ["model.layers.1.q", "model.layers.1.v"], "a layer is loaded whole"
        engine.receive_weights(RemanentUpdateInfo(second.lsn))
        assert engine.model.loaded == []
        engine.receive_weights(RemanentUpdateInfo(third.lsn))
        assert same(engine.model, later)
        assert not same(engine.model, before)


def test_next_update_recovers_from_failed_one(directory: str, engine: RemanentWeightEngine) -> None:
    tensors = trained()
    with pytest.raises(RuntimeError, match="call init_weight_transfer_engine first"):
        engine.receive_weights(RemanentUpdateInfo(1))
    with Publisher(directory) as publisher:
        ticket = publisher.publish(tensors, 1)
        ticket.wait()
        engine.init_transfer_engine(RemanentInitInfo(directory))
        with pytest.raises(remanent.NoStateError):
            engine.receive_weights(RemanentUpdateInfo(ticket.lsn + 1, timeout=0.1))
        engine.receive_weights(RemanentUpdateInfo(ticket.lsn))
        tensors["lm_head"] += 1
        tensors["model.layers.2.v"] += 1
        ticket = publisher.publish(tensors, 2)
        ticket.wait()
        engine.model.fails_at = "model.layers.2.v"
        with pytest.raises(KeyError):
            engine.receive_weights(RemanentUpdateInfo(ticket.lsn))
        engine.model.fails_at = None
        engine.receive_weights(RemanentUpdateInfo(ticket.lsn))
        assert same(engine.model, tensors) and len(engine.model.loaded) == 8


def test_model_has_weights_of_named_version(directory: str, engine: RemanentWeightEngine) -> None:
    def take(publisher: Publisher, tensors: dict[str, Any], step: int) -> int:
        ticket = publisher.publish(tensors, step)
        ticket.wait()
        engine.receive_weights(RemanentUpdateInfo(ticket.lsn))
        assert same(engine.model, tensors)
        return ticket.lsn

    engine.init_transfer_engine(RemanentInitInfo(directory))
    shared = torch.arange(16.0)
    with Publisher(directory) as publisher:
        first = take(publisher, {"embed": shared, "head": shared[:8]}, 1)
        engine.model.weights.clear()
        # The offset of a tensor in its page also belongs to the version.
        take(publisher, {"embed": shared, "head": shared[8:]}, 2)
        take(publisher, {"embed": shared, "head": shared[8:], "new": shared[2:4]}, 3)
        engine.model.weights.clear()
        engine.receive_weights(RemanentUpdateInfo(first))
        assert same(engine.model, {"embed": shared, "head": shared[:8]}), "an earlier version"
    shutil.rmtree(directory)
    engine.model.weights.clear()
    with Publisher(directory) as publisher:
        for step in range(5):
            publisher.publish({"embed": shared + 1}, step)
        take(publisher, {"embed": shared + 1}, 5)


def test_unretained_version_is_rejected_immediately(directory: str, engine: RemanentWeightEngine) -> None:
    with Publisher(directory, log_kept=0) as publisher:
        tickets = [publisher.publish({"a": torch.full((100_000,), float(step))}, step) for step in range(4)]
        tickets[-1].wait()
        for _ in range(3):
            publisher.store.snapshot()
        publisher.store.prune(snapshots_kept=1)
        engine.init_transfer_engine(RemanentInitInfo(directory))
        began = time.monotonic()
        with pytest.raises(remanent.NoStateError):
            engine.receive_weights(RemanentUpdateInfo(tickets[0].lsn, timeout=60))
        assert time.monotonic() - began < 30


def test_update_waits_for_version_not_logged_yet(directory: str, engine: RemanentWeightEngine) -> None:
    import threading

    tensors = trained()
    with Publisher(directory) as publisher:
        publisher.publish(tensors, 1).wait()
        engine.init_transfer_engine(RemanentInitInfo(directory))
        update = threading.Thread(target=lambda: engine.receive_weights(RemanentUpdateInfo(2, timeout=60)))
        update.start()
        tensors["lm_head"] *= 3
        assert publisher.publish(tensors, 2).lsn == 2
        update.join()
        assert same(engine.model, tensors)


def test_vllm_finds_engine_by_name() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    for _ in range(2):
        register()
    assert WeightTransferEngineFactory._registry["remanent"]() is RemanentWeightEngine
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins", name="remanent")
    assert [plugin.value for plugin in plugins] == ["remanent.integrations.vllm_weights:register"]
    assert next(iter(plugins)).load() is register


class Workers:
    """Some workers, called as a client of vLLM calls them."""

    def __init__(self, engines: list[RemanentWeightEngine]) -> None:
        self.engines = engines

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.init_transfer_engine(RemanentInitInfo(**init_info))

    def start_weight_update(self) -> None:
        for engine in self.engines:
            engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.receive_weights(RemanentUpdateInfo(**update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        for engine in self.engines:
            engine.finish_weight_update()


def test_trainer_sends_weights_to_all_workers(directory: str) -> None:
    trained = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])})
    workers = Workers([worker(), worker()])
    first, helper = (WeightTransferTrainerFactory.trainer_init(
        RemanentTrainerInitInfo(directory, rank=rank), client=workers, source=ModuleSource(trained)) for rank in (0, 1))

    def sent() -> None:
        helper.send_weights()
        first.send_weights()
        for engine in workers.engines:
            assert same(engine.model, dict(trained.named_parameters()))

    sent()
    with torch.no_grad():
        trained["layers"][1].bias[3] = 5
    sent()
    assert sorted(workers.engines[0].model.loaded) == ["layers.1.bias", "layers.1.weight"]
    # A new worker loads all weights, and so does a worker whose trainer was started again.
    workers.engines.append(worker())
    workers.engines[-1].init_transfer_engine(RemanentInitInfo(directory))
    with torch.no_grad():
        trained["layers"][2].weight.add_(1)
    sent()
    first.shutdown()
    helper.shutdown()
    first = WeightTransferTrainerFactory.trainer_init(
        RemanentTrainerInitInfo(directory, rank=0), client=workers, source=ModuleSource(trained))
    with torch.no_grad():
        trained["layers"][0].weight.add_(1)
    sent()
    assert first._publisher.store.root["step"] == 4
    first.shutdown()


def test_trainer_without_whole_weights_is_rejected(directory: str) -> None:
    info = RemanentTrainerInitInfo(directory, rank=0)
    with pytest.raises(remanent.RefusedError, match="a WeightSource with `iter_full`"):
        WeightTransferTrainerFactory.trainer_init(info, client=Workers([]))
    source = ModuleSource(torch.nn.Linear(2, 2))
    source.owned_names = lambda rank: ["weight"]
    with pytest.raises(remanent.RefusedError, match="the first rank does not have all"):
        WeightTransferTrainerFactory.trainer_init(info, client=Workers([]), source=source)


def test_trainer_retries_until_workers_exist(directory: str) -> None:
    class Late(Workers):
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            raise ConnectionError("no server yet")

    info, source = RemanentTrainerInitInfo(directory, rank=0), ModuleSource(torch.nn.Linear(2, 2))
    with pytest.raises(ConnectionError) as held:
        WeightTransferTrainerFactory.trainer_init(info, client=Late([]), source=source)
    assert held.value.__traceback__ is not None
    WeightTransferTrainerFactory.trainer_init(info, client=Workers([]), source=source).shutdown()
