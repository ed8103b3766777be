"""Weights that one process publishes and another follows."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")

from remanent._tensors import live_tensors  # noqa: E402
from remanent._tensors.working_copies import Copies  # noqa: E402
from remanent.weights import Publisher, Subscriber, checksum  # noqa: E402


@pytest.fixture(params=["compared", "captured"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects how changes are found and applied: as on the host, or as on a GPU (working copies and packed bytes)."""
    if request.param == "captured":
        begin = Publisher.__init__

        def begin_with_copies(self: Publisher, *given: Any, **options: Any) -> None:
            begin(self, *given, **options)
            self._copies = Copies(self.store, torch.device("cpu"), "page")

        monkeypatch.setattr(Publisher, "__init__", begin_with_copies)
        monkeypatch.setattr(live_tensors, "_reads_gaps", lambda device: True)
        monkeypatch.setattr(live_tensors, "_GAPS_LEN", 64)
    return str(request.param)


def test_publisher_requires_named_device(directory: str) -> None:
    with pytest.raises(remanent.InvalidError, match="auto"):
        Publisher(directory, device="auto")


def test_publisher_without_check_removes_old_checksum(directory: str) -> None:
    source, target = make(1), make(2)
    with Publisher(directory, check=True) as publisher:
        publisher.publish(source, 1).wait()
    step(source, 2)
    with Publisher(directory) as publisher:
        publisher.publish(source, 2).wait()
        assert Subscriber(directory).apply_to(target) == 2
    assert checksum(target) == checksum(source)


def test_moved_tensors_are_captured(directory: str, way: str) -> None:
    source, target = make(1), make(2)
    source["t"] = torch.arange(60.0).reshape(6, 10).T
    target["t"] = torch.zeros(10, 6)
    with Publisher(directory, check=True) as publisher:
        subscriber = Subscriber(directory)
        for number in range(1, 8):
            step(source, number)
            if number == 3:
                source = {name: tensor.clone() for name, tensor in source.items()}
            elif number == 4:
                source["w"].data = torch.ones_like(source["w"])
            elif number == 5:
                source["b"].set_(torch.full([1000], 5.0))
            elif number == 6:
                # Another writer changes the store for one step.
                publisher.store[publisher.store.info("b").key or ""] = bytes(4000)
                source["n"] = torch.tensor([1, 2])
                target["n"] = torch.tensor([0, 0])
            publisher.publish({**source, "t": source["t"].contiguous()}, number)
            assert subscriber.apply_to(target) == number
            assert checksum(target) == checksum({**source, "t": source["t"].contiguous()})
        if way == "captured":
            assert publisher._copies is not None
            assert publisher._copies._held.keys() == {name for name, tensor in source.items() if tensor.numel()}
            publisher.publish({"w": source["w"]}, 8)
            assert publisher._copies._held.keys() == {"w"}


def make(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "w": torch.randn(300, 100).to(torch.bfloat16),
        "b": torch.randn(1000),
        "z": torch.randn(500, dtype=torch.complex128),
        "f": torch.randn(4000).to(torch.float8_e4m3fn),
        "empty": torch.empty(0),
        "n": torch.tensor(seed),
    }


def step(tensors: dict[str, Any], number: int) -> None:
    torch.manual_seed(number)
    for tensor in tensors.values():
        if tensor.numel():
            flat = tensor.reshape(-1).view(torch.uint8).view(-1, tensor.element_size())
            changed = torch.randint(0, len(flat), (max(1, len(flat) // 50),))
            flat[changed] = torch.randint(0, 256, (len(changed), flat.shape[1]), dtype=torch.uint8)
    tensors["b"][100:400] = number


def test_subscriber_applies_changed_elements(directory: str) -> None:
    source, target = make(1), make(2)
    places = {name: tensor.data_ptr() for name, tensor in target.items()}
    with Publisher(directory, check=True) as publisher:
        subscriber = Subscriber(directory)
        assert subscriber.apply_to(target) is None
        for number in range(1, 20):
            step(source, number)
            publisher.publish(source, number)
            if number % 3:
                assert subscriber.apply_to(target, timeout=10) == number
                assert checksum(target) == checksum(source)
        # One read of all weights at the start, and one for the pages that the first step created.
        assert subscriber.restarts == 2
        assert {name: tensor.data_ptr() for name, tensor in target.items()} == places, "in place"
        assert subscriber.apply_to(target) == 19
        # A new subscriber begins with the newest step.
        late, other = Subscriber(directory), make(3)
        assert late.apply_to(other) == 19 and checksum(other) == checksum(source) and late.restarts == 1
        publisher.store.snapshot()
        step(source, 20)
        publisher.publish(source, 20)
        other = make(4)
        assert Subscriber(directory).apply_to(other) == 20 and checksum(other) == checksum(source)


def test_overtaken_subscriber_restarts(directory: str) -> None:
    source, target = make(1), make(2)
    with Publisher(directory, check=True, log_kept=0, retention={"snapshots_kept": 1},
                   log={"segment_len": 16384, "spare_bytes": 0}) as publisher:
        publisher.publish(source, 0)
        subscriber = Subscriber(directory)
        subscriber.apply_to(target)
        for number in range(1, 40):
            step(source, number)
            publisher.publish(source, number)
            if number % 10 == 0:
                publisher.store.snapshot()
        assert subscriber.apply_to(target) == 39 and checksum(target) == checksum(source)
        assert subscriber.restarts == 2


def test_tied_weights_and_whole_tensors_are_applied(directory: str) -> None:
    def tied(value: float) -> dict[str, Any]:
        weight = torch.full((100, 100), value)
        return {"embed": weight, "head": weight, "row": weight[3]}

    source, target, untied = tied(1), tied(2), {name: tensor.clone() for name, tensor in tied(3).items()}
    with Publisher(directory, check=True, log={"segment_len": 16384}) as publisher:
        publisher.publish(source, 1)
        subscribers = [(Subscriber(directory), target), (Subscriber(directory), untied)]
        for number in range(2, 5):
            source["embed"][number] = number
            if number == 4:
                source["embed"].copy_(torch.randn(100, 100))
            publisher.publish(source, number)
            for subscriber, tensors in subscribers:
                assert subscriber.apply_to(tensors) == number
                assert checksum(tensors) == checksum(source)


def test_sparse_indices_count_from_base() -> None:
    from remanent._store._native import ArrayLayout

    tensor = torch.zeros(6, dtype=torch.int32)
    values = torch.tensor([5, 7], dtype=torch.int32).numpy().tobytes()
    operation = {"width": 4, "base": 8, "indices": torch.tensor([0, 3], dtype=torch.uint32), "values": values}
    changes: Any = live_tensors.Plain(SimpleNamespace(operations=[operation]))
    live = live_tensors.Live({"w": tensor}, live_tensors.Uploads())
    live.scatter((ArrayLayout("w", "I32", (6,)),), changes, operation)
    assert tensor.tolist() == [0, 0, 5, 0, 0, 7]


def test_other_tensors_are_rejected(directory: str) -> None:
    with Publisher(directory) as publisher:
        publisher.publish({"w": torch.ones(4, 2)}, 1)
        for wrong in ({}, {"w": torch.ones(2, 4)}, {"w": torch.ones(4, 2).half()}, {"w": torch.ones(2, 4).T}):
            with pytest.raises(remanent.NoStateError, match="w"):
                Subscriber(directory).apply_to(wrong)
        subscriber, target = Subscriber(directory), {"w": torch.zeros(4, 2)}
        subscriber.apply_to(target)
        publisher.publish({"w": torch.ones(4, 3)}, 2)
        with pytest.raises(remanent.NoStateError):
            subscriber.apply_to(target)
        target = {"w": torch.zeros(4, 3)}
        assert subscriber.apply_to(target) == 2 and target["w"].all()


def test_different_checksum_raises(directory: str) -> None:
    with Publisher(directory, check=True) as publisher:
        source = {"w": torch.zeros(100)}
        publisher.publish(source, 1)
        subscriber, target = Subscriber(directory), {"w": torch.ones(100)}
        subscriber.apply_to(target)
        with publisher.store.batch() as batch:
            batch.set_root("step", 2)
            batch.set_root("weights.crc32", checksum({"w": torch.ones(100)}))
        with pytest.raises(remanent.DivergedError):
            subscriber.apply_to(target)
        source["w"][1] = 1
        publisher.publish(source, 3)
        assert subscriber.apply_to(target) == 3 and torch.equal(target["w"], source["w"])


def test_killed_publisher_continues(directory: str) -> None:
    script = """
        import os, signal, sys, torch
        from remanent.weights import Publisher
        publisher = Publisher(sys.argv[1], check=True)
        first = publisher.store.root.get("step", 0) + 1
        weights = {"w": torch.arange(1000.0) * first}
        for step in range(first, first + 5):
            weights["w"][step * 7 % 1000] += step
            publisher.publish(weights, step)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subscriber, target = Subscriber(directory), {"w": torch.zeros(1000)}
    remanent.Store(directory).close()
    for last in (5, 10, 15):
        subprocess.run([sys.executable, "-c", textwrap.dedent(script), directory])
        assert subscriber.apply_to(target, timeout=10) == last
    assert subscriber.restarts <= 3


def replaced(model: dict[str, Any]) -> None:
    """Replaces the tensors under the names, as if the model had been created again."""
    for name, tensor in model.items():
        model[name] = torch.full_like(tensor, 9)


def cleared(model: dict[str, Any]) -> None:
    for tensor in model.values():
        tensor.zero_()


def reallocated(model: dict[str, Any]) -> None:
    """Frees and allocates the memory again, like an engine that sleeps and wakes up."""
    for tensor in model.values():
        storage = tensor.untyped_storage()
        length = storage.nbytes()
        storage.resize_(0)
        storage.resize_(length)
        tensor.fill_(3)


def changed_past_autograd(model: dict[str, Any]) -> None:
    """Changes one byte through memory that torch does not track."""
    alias = torch.utils.dlpack.from_dlpack(model["row"].detach())
    alias.view(torch.uint8)[17] ^= 1


def moved_to_other_names(model: dict[str, Any]) -> None:
    model["w"].data, model["v"].data = model["v"].data, model["w"].data


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("lose", [replaced, cleared, reallocated, changed_past_autograd, moved_to_other_names])
def test_model_with_other_contents_gets_all_weights(directory: str, check: bool, lose: Any) -> None:
    def weights(value: float) -> dict[str, Any]:
        tied = torch.full((300, 7), value)
        return {"w": torch.arange(20_000.0) * value, "v": torch.ones(20_000) * value, "head": tied, "tied": tied,
                "row": torch.full((1000,), value, dtype=torch.float16)[1:]}

    source, target = weights(1), weights(2)
    with Publisher(directory, check=check) as publisher:
        publisher.publish(source, 1)
        subscriber = Subscriber(directory)
        assert subscriber.apply_to(target) == 1
        source["w"][3] += 1
        publisher.publish(source, 2)
        assert subscriber.apply_to(target) == 2
        restarts = subscriber.restarts
        lose(target)
        source["w"][4] += 1
        publisher.publish(source, 3)
        assert subscriber.apply_to(target, timeout=10) == 3
        assert {name for name in source if not torch.equal(source[name], target[name])} == set()
        assert subscriber.restarts == restarts + 1


def test_new_model_gets_all_weights_without_step(directory: str) -> None:
    source = make(1)
    with Publisher(directory) as publisher:
        publisher.publish(source, 1)
        subscriber, first, second = Subscriber(directory), make(2), make(3)
        assert subscriber.apply_to(first) == 1 and subscriber.apply_to(second) == 1
        assert checksum(first) == checksum(second) == checksum(source)


def test_model_with_freed_memory_is_rejected(directory: str) -> None:
    source, target = make(1), make(2)
    with Publisher(directory) as publisher:
        publisher.publish(source, 1)
        subscriber = Subscriber(directory)
        subscriber.apply_to(target)
        storage = target["w"].untyped_storage()
        length = storage.nbytes()
        storage.resize_(0)
        for follower in (subscriber, Subscriber(directory)):
            with pytest.raises(remanent.NoStateError, match="w: the tensor's storage was freed"):
                follower.apply_to(target)
        storage.resize_(length)
        assert subscriber.apply_to(target) == 1 and checksum(target) == checksum(source)


def test_storages_stay_resizable(directory: str) -> None:
    source, target = make(1), make(2)
    checksum(source)
    with Publisher(directory, check=True) as publisher:
        publisher.publish(source, 1)
        Subscriber(directory).apply_to(target)
    assert [name for tensors in (source, target) for name, tensor in tensors.items()
            if not tensor.untyped_storage().resizable()] == []
