"""Files of tensors and checkpoints of training runs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import remanent
from remanent._state import page_tree

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402

from remanent._checkpoint import checkpointer  # noqa: E402
from remanent.torch import Checkpointer, Difference, Saved, load_file, save_file  # noqa: E402


def same(left: Any, right: Any) -> bool:
    """Returns whether two tensors have the same type, shape and bits."""
    def bits(tensor: Any) -> bytes:
        return bytes(tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy())

    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


def every_kind() -> dict[str, Any]:
    torch.manual_seed(1)
    tensors = {}
    for name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
                 "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
                 "float8_e5m2fnuz", "float8_e8m0fnu"):
        dtype = getattr(torch, name)
        raw = torch.randint(0, 2 if name == "bool" else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
        tensors[name] = raw.view(dtype).reshape(2, 3)
    return tensors


def test_every_type_and_shape_is_restored(directory: str) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = every_kind() | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5, dtype=torch.bfloat16),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "column": base[:, 1],
        "row": torch.arange(24.0).reshape(4, 6)[2],
        "expanded": torch.arange(3.0).expand(4, 3),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "": torch.ones(1),
        "x" * 300: torch.ones(2),
        "remanent tensors": torch.ones(3),
        "safetensors header": torch.ones(4),
        "ä" * 40: torch.ones(5),
    }
    save_file(tensors, directory)
    loaded = load_file(directory)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(loaded[name], tensor), name
    assert loaded["transposed"].stride() == (1, 3) and loaded["channels_last"].is_contiguous(memory_format=torch.channels_last)
    with remanent.View(directory) as view:
        assert view.info("row").length == 24, "only the part of the storage that the tensor uses"
        assert view.info("column").length == 16


def test_shared_memory_is_stored_once_and_shared_again(directory: str) -> None:
    big = torch.arange(100_000, dtype=torch.float32)
    tensors = {"embed": big.view(100, 1000), "head": big.view(100, 1000), "row": big.view(100, 1000)[7],
               "t": big.view(100, 1000).T, "as_int": big.view(torch.int32)}
    save_file(tensors, directory)
    with remanent.View(directory) as view:
        assert sum(info.length for info in view.pages()) < 402_000
    loaded = load_file(directory)
    for name, tensor in tensors.items():
        assert same(loaded[name], tensor), name
    loaded["head"][7, 3] = -1
    assert loaded["embed"][7, 3] == loaded["row"][3] == loaded["t"][3, 7] == -1
    assert loaded["as_int"][7003] == torch.tensor(-1.0).view(torch.int32)
    # The tensors are no longer tied, so each has its own memory.
    save_file({"embed": big.clone(), "head": big.clone()}, directory)
    loaded = load_file(directory)
    loaded["head"][0] = 5
    assert loaded["embed"][0] == 0 and "row" not in loaded


def test_disjoint_parts_of_storage_have_own_pages(directory: str) -> None:
    flat = torch.arange(1000.0)
    tensors = {f"p{n}": flat[n * 10:(n + 1) * 10] for n in range(100)}
    save_file(tensors, directory)
    with remanent.View(directory) as view:
        assert view.info("p7").length == 40 and view.info("p7").metadata["shape"] == [10]
    assert all(same(tensor, tensors[name]) for name, tensor in load_file(directory).items())


def log_bytes_of(directory: str, save: Any) -> int:
    def total() -> int:
        with remanent.Follower(directory) as follower:
            sizes = 0
            while (batch := follower.next(0)) is not None:
                for operation in batch.operations:
                    sizes += len(operation.get("bytes", b"")) + len(operation.get("values", b""))
                    sizes += operation["length"] if operation["kind"] == "image" else 0
            return sizes
    before = total()
    save()
    return total() - before


def test_only_changed_elements_are_logged(directory: str) -> None:
    tensors = {"a": torch.randn(100_000), "b": torch.randn(100_000), "c": torch.randn(10)}
    first = save_file(tensors, directory)
    assert save_file(tensors, directory) == first, "nothing changed, nothing is committed"
    tensors["a"][::1000] += 1
    logged = log_bytes_of(directory, lambda: save_file(tensors, directory))
    assert 400 <= logged < 800, logged
    tensors["b"] = torch.randn(50_000)
    del tensors["c"]
    logged = log_bytes_of(directory, lambda: save_file(tensors, directory))
    assert 200_000 <= logged < 201_000, logged
    assert load_file(directory).keys() == {"a", "b"}
    with remanent.View(directory) as view:
        assert "c" not in view, "what is gone takes no space"


def test_versions_are_complete_and_kept(directory: str) -> None:
    lsns = [save_file({"w": torch.full((100,), float(n)), "n": torch.tensor(n)}, directory, note=f"v{n}",
                      name="three" if n == 3 else None) for n in range(6)]
    for n, lsn in enumerate(lsns):
        loaded = load_file(directory, at=lsn)
        assert (loaded["w"] == n).all() and loaded["n"] == n
    assert load_file(directory, at="name:three")["n"] == 3
    with pytest.raises(remanent.NoStateError):
        load_file(directory, at="name:four")
    with pytest.raises(remanent.NoStoreError):
        load_file(directory + "x")
    remanent.Store(directory + "y").close()
    with pytest.raises(remanent.NoStateError):
        load_file(directory + "y")


@pytest.mark.filterwarnings("ignore")
def test_unsupported_value_is_rejected_and_saves_nothing(directory: str) -> None:
    class Own(torch.Tensor):
        pass

    refused = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "own": torch.ones(3).as_subclass(Own),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }
    for name, tensor in refused.items():
        with pytest.raises(remanent.RefusedError, match=name):
            save_file({"fine": torch.ones(1), name: tensor}, directory)
        assert not os.path.exists(directory)


def damage(directory: str, needle: bytes) -> None:
    """Flips a bit where these bytes are on disk."""
    damaged = 0
    for path in Path(directory).rglob("*"):
        if path.is_file() and (at := (content := path.read_bytes()).find(needle)) >= 0:
            path.write_bytes(content[:at] + bytes([needle[0] ^ 1]) + content[at + 1:])
            damaged += 1
    assert damaged


def test_damage_is_detected_before_return(directory: str) -> None:
    tensor = torch.randint(0, 256, (8_000_000,), dtype=torch.uint8)
    save_file({"w": tensor}, directory)
    damage(directory, tensor[777_777:777_800].numpy().tobytes())
    with pytest.raises(remanent.DamagedError) as caught:
        load_file(directory)
    assert caught.value.path == directory


def test_tensors_need_neither_numpy_nor_pickle(store: remanent.Store) -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    with store.batch() as batch:
        batch.create(tensor, key="x", metadata={"dtype": "BF16", "shape": [2, 3]})
        with pytest.raises(BufferError):
            batch.create(tensor.T)
    assert same(torch.from_dlpack(store.array("x")), tensor)
    out = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert store.read_into("x", out) == 12 and same(out, tensor)
    with store.lease("x") as lease:
        copied = torch.from_dlpack(lease)
        copied.zero_()
    assert same(torch.from_dlpack(store.array("x")), tensor) and store.audit() == []


def test_command_reads_and_writes_same_tensors(directory: str, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(10.0), "b": torch.ones(2, 3, dtype=torch.bfloat16), "empty": torch.empty(0)}
    save_file(tensors, directory)

    def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "remanent", *arguments], capture_output=True, text=True)

    exported = tool("export", directory, str(tmp_path / "file"))
    assert exported.returncode == 0, exported
    imported = tool("import", str(tmp_path / "again"), str(tmp_path / "file"))
    assert imported.returncode == 0, imported
    loaded = load_file(tmp_path / "again")
    assert loaded.keys() == tensors.keys() and all(same(loaded[name], tensors[name]) for name in tensors)
    tensors["a"][3] = 7
    save_file(tensors, directory)
    differ = tool("diff", directory, "--from", "lsn:1", "--to", "lsn:2")
    assert differ.returncode == 1 and "a" in differ.stdout, differ
    # An imported store also accepts saves.
    save_file(tensors, tmp_path / "again")
    assert load_file(tmp_path / "again")["a"][3] == 7


# Checkpoints.


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        return self.head(self.drop(self.norm(self.embed(x))))


def make(kind: str = "AdamW", **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Model()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(model: Any, optimizer: Any, scheduler: Any, steps: int, loader: dict[str, Any] | None = None) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 20, (16,))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), (x + 1 + random.randrange(2)) % 20)
        loss = loss * (1 + 0.01 * float(np.random.rand()))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if loader is not None:
            loader["position"] = loader["position"] + 16
    return losses


@pytest.mark.parametrize(("kind", "options"), [
    ("AdamW", {}), ("AdamW", {"fused": True}), ("AdamW", {"foreach": True}), ("AdamW", {"amsgrad": True}),
    ("SGD", {"momentum": 0.9}), ("SGD", {}), ("Adagrad", {}), ("RMSprop", {"centered": True}), ("Adafactor", {}),
    ("NAdam", {}), ("Rprop", {}),
])
def test_run_continues_bit_for_bit(directory: str, kind: str, options: dict[str, Any]) -> None:
    model, optimizer, scheduler = make(kind, **options)
    loader = {"position": 0, "files": ["a", "b"]}
    with Checkpointer(directory, model, optimizer, scheduler, extra={"loader": loader}) as run:
        train(model, optimizer, scheduler, 3, loader)
        assert run.save(3).done()
        expected = train(model, optimizer, scheduler, 4, loader)
        assert loader["position"] == 7 * 16
        storages = [parameter.data_ptr() for parameter in model.parameters()]
        assert run.restore() == 3
        assert storages == [parameter.data_ptr() for parameter in model.parameters()], "in place"
        assert model.head.weight is model.embed.weight and loader == {"position": 48, "files": ["a", "b"]}
        assert train(model, optimizer, scheduler, 4, loader) == expected
    # The run also continues in newly created objects.
    model, optimizer, scheduler = make(kind, **options)
    with Checkpointer(directory, model, optimizer, scheduler) as run:
        assert run.restore() == 3
        assert train(model, optimizer, scheduler, 4) == expected


def test_state_before_first_step_is_restored(directory: str) -> None:
    model, optimizer, scheduler = make()
    with Checkpointer(directory, model, optimizer, scheduler) as run:
        with pytest.raises(remanent.NoStateError):
            run.restore()
        run.save(0)
        expected = train(model, optimizer, scheduler, 3)
        run.restore()
        assert not optimizer.state_dict()["state"]
        assert train(model, optimizer, scheduler, 3) == expected


def test_versions_are_kept_by_number_name_and_age(directory: str, tmp_path: Path) -> None:
    model, optimizer, scheduler = make()
    weights = {}
    with Checkpointer(directory, model, optimizer, scheduler, keep=2) as run:
        for step in range(1, 7):
            train(model, optimizer, scheduler, 1)
            weights[step] = model.embed.weight.detach().clone()
            run.save(step, name="good" if step == 2 else None)
        assert [(version.step, version.name) for version in run.versions()] == [(2, "good"), (5, None), (6, None)]
        for at, step in (("good", 2), (5, 5), (None, 6), (6, 6)):
            assert run.restore(at) == step and torch.equal(model.embed.weight, weights[step])
        with pytest.raises(remanent.NoStateError):
            run.restore(3)
        with pytest.raises(remanent.NoStateError):
            run.restore("bad")
        with pytest.raises(remanent.InvalidError):
            run.save(7, name="good")
        run.fork(tmp_path / "fork", "good")
        changed = run.diff("good", 6)
        assert changed["model/embed.weight"] and "model/norm.num_batches_tracked" in changed
        assert run.diff(6) == {}
        run.give_up("good")
        assert [version.step for version in run.versions()] == [5, 6]
        # If a step is saved again, its newest state is kept.
        run.save(6)
        assert [version.step for version in run.versions()] == [5, 6]
    with Checkpointer(tmp_path / "fork", model, optimizer, scheduler) as fork:
        assert fork.restore() == 2 and torch.equal(model.embed.weight, weights[2])
    with Checkpointer(directory, model, optimizer, scheduler, keep=1, keep_for=3600.0) as run:
        for step in (7, 8, 9):
            run.save(step)
        assert [version.step for version in run.versions()] == [5, 6, 7, 8, 9]


def test_background_save_keeps_state_of_call(directory: str) -> None:
    model, optimizer, scheduler = make()
    with Checkpointer(directory, model, optimizer, scheduler) as run:
        train(model, optimizer, scheduler, 1)
        before = model.embed.weight.detach().clone()
        saved = run.save(1, wait=False)
        train(model, optimizer, scheduler, 1)
        assert saved.wait(60) and saved.done()
        run.save(2, wait=False)
        assert run.restore(1) == 1 and torch.equal(model.embed.weight, before)


def test_save_waits_for_previous_save(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, scheduler = make()
    waiting, go_on = threading.Event(), threading.Event()
    with Checkpointer(directory, model, optimizer, scheduler) as run:
        keep, wait = run._versions.keep, Saved.wait

        def held_up(*given: Any) -> None:
            assert go_on.wait(60)
            keep(*given)

        def noted(saved: Saved, timeout: float | None = None) -> bool:
            waiting.set()
            return wait(saved, timeout)

        monkeypatch.setattr(run._versions, "keep", held_up)
        first = run.save(1, wait=False)
        before = model.embed.weight.detach().clone()
        assert not first.wait(0) and not first.done()
        monkeypatch.setattr(Saved, "wait", noted)
        train(model, optimizer, scheduler, 1)
        second = threading.Thread(target=lambda: run.save(2))
        second.start()
        assert waiting.wait(60), "else version 1 would be what the state is by then"
        go_on.set()
        second.join(60)
        assert [version.step for version in run.versions()] == [1, 2]
        assert run.restore(1) == 1 and torch.equal(model.embed.weight, before)


def test_special_numbers_are_stored_as_text() -> None:
    from remanent._state.page_tree import flatten

    long = (1 << 53) + 1
    numbers = [1 << 53, long, -(1 << 53), -long, float("-inf"), -0.0]
    held = [1 << 53, {"$": ["int", str(long)]}, -(1 << 53), {"$": ["int", str(-long)]}, {"$": ["float", "-inf"]}, -0.0]
    assert flatten("", numbers, lambda path, value: None) == held


def test_unsupported_values_are_rejected_by_path(directory: str) -> None:
    model, optimizer, scheduler = make()
    for extra, path in (({"a": {"hook": print}}, "a/hook"), ({"a": {"n": [1, iter(())]}}, "a/n/1"),
                        ({"a": {"t": torch.eye(2).to_sparse()}}, "a/t"),
                        ({"a": {"o": np.array([object()])}}, "a/o")):
        with Checkpointer(directory, model, extra=extra) as run:
            with pytest.raises(remanent.RefusedError, match=path):
                run.save(1)
            assert run.store.lsn == 0
    with pytest.raises(remanent.RefusedError, match="model"):
        Checkpointer(directory, object())
    with pytest.raises(remanent.InvalidError):
        Checkpointer(directory, model, extra={"rng": {}})


def test_plain_values_are_restored_unchanged(directory: str) -> None:
    values = {
        "int": 1 << 80, "negative": -5, "float": 0.1, "inf": float("inf"), "none": None, "bool": True, "text": "ä\n",
        "bytes": b"\0\xff", "tuple": (1, (2.5, None)), "list": [1, [2]], "complex": 1 + 2j, "empty": {},
        "keys": {1: "a", "1": "b", None: "c", (1, 2): "d", True: 0} | {2: 3}, "dollar": {"$": ["int", "5"]},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3), "scalar": np.float32(0.1), "double": np.float64(0.5),
        "dtype": torch.bfloat16, "device": torch.device("cpu"), "size": torch.Size([1, 2]), "tensor": torch.ones(2),
    }
    held = dict(values)
    with Checkpointer(directory, extra={"values": held}, rng=False) as run:
        run.save(1)
        held.clear()
        run.restore()
    assert held.keys() == values.keys()
    for name, value in values.items():
        assert type(held[name]) is type(value), name
        if name in ("array", "tensor"):
            assert (held[name] == value).all() and held[name].dtype == value.dtype
        else:
            assert held[name] == value, name


def test_damaged_version_changes_nothing(directory: str) -> None:
    model, optimizer, scheduler = make()
    model.big = torch.nn.Parameter(torch.randn(1_000_000))
    needle = model.big.detach()[777_777:777_800].numpy().tobytes()
    with Checkpointer(directory, model, optimizer, scheduler) as run:
        run.save(1)
    damage(directory, needle)
    with torch.no_grad():
        model.big.fill_(5)
        model.embed.weight.fill_(6)
    with pytest.raises(remanent.DamagedError):
        with Checkpointer(directory, model, optimizer, scheduler, memory={"load": "on_demand"}) as run:
            run.restore()
    assert (model.big == 5).all() and (model.embed.weight == 6).all()


KILLED = """
    import os, sys, torch, remanent.torch
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    run = remanent.torch.Checkpointer(sys.argv[1], model, optimizer)
    step = 0 if run.store.lsn == 0 else run.restore()
    print("restored", step, float(model.weight.double().sum()), flush=True)
    while True:
        optimizer.zero_grad()
        model(torch.randn(4, 100)).square().mean().backward()
        optimizer.step()
        step += 1
        run.save(step, wait=step % 2 == 0)
        print(step, float(model.weight.double().sum()), flush=True)
"""


def test_killed_process_finds_last_save(directory: str) -> None:
    sums: dict[int, float] = {}
    last = 0
    for kill_after in (3, 8, 5):
        child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), directory], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        word, step, total = child.stdout.readline().split()
        # The save of `last` was waited for. At most two later steps may have been saved before the kill.
        assert word == "restored" and last <= int(step) <= last + 2, (step, last)
        if int(step) in sums:
            assert sums[int(step)] == float(total)
        for _ in range(kill_after):
            step, total = child.stdout.readline().split()
            sums[int(step)] = float(total)
            last = int(step) if int(step) % 2 == 0 else last
        child.send_signal(signal.SIGKILL)
        # The lines that the process printed before it died.
        for line in child.stdout:
            if line.endswith("\n"):
                step, total = line.split()
                sums[int(step)] = float(total)
                last = int(step) if int(step) % 2 == 0 else last
        child.wait()


def test_interrupted_save_keeps_previous_version(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Short batches, so that a save consists of several.
    monkeypatch.setattr(page_tree, "_BATCH_BYTES", 300)
    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, 1)
    blocks = list(checkpointer.blocks(checkpointer.extents_there(model.state_dict())))
    with Checkpointer(directory, model, optimizer, scheduler) as run:
        run.save(1)
        sound = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        sound_blocks = checkpointer.blocks
        ended = set()
        for count in range(1, len(blocks) + 5):
            train(model, optimizer, scheduler, 1)

            def ending(tensors: Any, count: int = count, **named: Any) -> Iterator[Any]:
                for number, block in enumerate(sound_blocks(tensors, **named)):
                    if number == count:
                        raise InterruptedError
                    yield block

            monkeypatch.setattr(checkpointer, "blocks", ending)
            with pytest.raises(InterruptedError):
                run.save(2)
            monkeypatch.setattr(checkpointer, "blocks", sound_blocks)
            ended.add("saving" in run.store.root)
            assert run.restore() == 1
            for name, tensor in model.state_dict().items():
                assert (tensor == sound[name]).all(), (count, name)
        assert ended == {False, True}, "before the first batch, and after it"
    with Checkpointer(directory, model, optimizer, scheduler) as run:
        assert run.restore() == 1
        train(model, optimizer, scheduler, 1)
        weights = model.embed.weight.clone()
        run.save(2)
        train(model, optimizer, scheduler, 1)
        assert run.restore() == 2 and (model.embed.weight == weights).all()
        assert "saving" not in run.store.root
        assert [version.step for version in run.versions()] == [1, 2]


def test_version_pages_are_on_disk(directory: str) -> None:
    model, optimizer, scheduler = make()
    with Checkpointer(directory, model, optimizer, scheduler) as run:
        run.save(1)
        run.save(2)
        places = {info.place for info in run.store.pages() if info.key != page_tree.MANIFEST_KEY}
    assert places == {"disk"}


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("wait", [False, True])
def test_many_short_pages_stay_within_memory_limit(
        directory: str, monkeypatch: pytest.MonkeyPatch, digests: bool, wait: bool) -> None:
    monkeypatch.setattr(page_tree, "_BATCH_BYTES", 3 << 20)
    state = {f"t{at}": torch.full((100,), float(at)) for at in range(3000)}
    model = torch.nn.Linear(1, 1)
    with Checkpointer(directory, model, extra={"state": state}, rng=False, digests=digests,
                      memory={"budget": {"disk": 8 << 20}}) as run:
        for step in range(3):
            for tensor in state.values():
                tensor += 1
            run.save(step, wait=wait)
        assert run.restore() == 2 and all((state[f"t{at}"] == at + 3).all() for at in range(3000))
        assert run.restore(1) == 1 and all((state[f"t{at}"] == at + 2).all() for at in range(3000))
        assert len([info for info in run.store.snapshots() if info.name is None]) <= 1


MEMORY = """
    import resource, sys, torch, remanent.torch
    state = {f"w{n}": torch.full((1 << 20,), float(n)) for n in range(64)}
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    run = remanent.torch.Checkpointer(sys.argv[1], extra={"state": state}, rng=False)
    before = peak()
    for step in range(3):
        for tensor in state.values():
            tensor += 1
        run.save(step)
    run.close()
    print(peak() - before)
"""


def test_save_uses_little_additional_memory(directory: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(MEMORY), directory], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # In MiB, for a state of 256 MiB.
    assert int(done.stdout) < 128, done.stdout


def test_pages_in_memory_move_to_disk(directory: str) -> None:
    # Pages in memory, as `remanent import` creates them.
    with remanent.Store(directory, device="host") as store, store.batch() as batch:
        for name, count in (("same", 1000), ("other", 1000), ("longer", 10)):
            metadata = {"name": name, "dtype": "F32", "shape": [count]}
            batch.create(torch.ones(count), key=name, metadata=metadata)
    tensors = {"same": torch.ones(1000), "other": torch.zeros(1000), "longer": torch.ones(100_000)}
    save_file(tensors, directory)
    loaded = load_file(directory)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name] == tensor).all(), name
    with remanent.View(directory) as view:
        assert {view.info(name).place for name in tensors} == {"disk"}


def halfway(run: Any, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a save that is interrupted after some batches."""
    sound = checkpointer.blocks

    def ending(*given: Any, **named: Any) -> Iterator[Any]:
        for number, block in enumerate(sound(*given, **named)):
            if number == 3:
                until = time.monotonic() + 60
                while "saving" not in run.store.root and time.monotonic() < until:
                    time.sleep(0.001)
                raise InterruptedError
            yield block

    monkeypatch.setattr(checkpointer, "blocks", ending)
    with pytest.raises(InterruptedError):
        run.save(step)
    monkeypatch.setattr(checkpointer, "blocks", sound)
    assert "saving" in run.store.root


@pytest.mark.parametrize("how", ["fork", "given up", "not kept yet"])
def test_previous_version_is_kept_by_any_rule(
    directory: str, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_tree, "_BATCH_BYTES", 300)
    state = {f"w{number}": torch.full((100,), 1.0) for number in range(5)}
    with Checkpointer(directory, extra={"state": state}, rng=False) as run:
        if how == "not kept yet":
            monkeypatch.setattr(run._versions, "keep", lambda *given: 0)
        run.save(1, name="first")
        if how == "given up":
            run.give_up("first")
        if how == "fork":
            run.fork(tmp_path / "fork")
            directory = str(tmp_path / "fork")
    with Checkpointer(directory, extra={"state": state}, rng=False) as run:
        for tensor in state.values():
            tensor.fill_(2.0)
        halfway(run, 2, monkeypatch)
    with Checkpointer(directory, extra={"state": state}, rng=False) as run:
        assert run.restore() == 1 and all((tensor == 1).all() for tensor in state.values())


def test_interrupted_save_is_no_version(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tree, "_BATCH_BYTES", 300)
    monkeypatch.setattr(checkpointer, "_DELETED_AT_ONCE", 2)
    state = {"first": torch.ones(100)}
    with Checkpointer(directory, extra={"state": state}, rng=False) as run:
        run.save(1)
        for number in range(9):
            state[f"w{number}"] = torch.full((100,), float(number))
        for _ in range(3):
            halfway(run, 2, monkeypatch)
        half = run.store.lsn
        run.store.snapshot("mine")
        for call in (lambda: run.restore(at=f"lsn:{half}"), lambda: run.diff(1, "name:mine"),
                     lambda: run.fork(f"{directory}-fork", at="name:mine"), lambda: load_file(directory)):
            with pytest.raises(remanent.NoStateError, match="the state is that of an interrupted save"):
                call()
        assert [version.step for version in run.versions()] == [1]
        run.save(2)
        held = page_tree.read_manifest(run.store).pages.keys()
        assert {info.key for info in run.store.pages() if "dtype" in info.metadata} == held
        assert [str(key) for key in held if "~" in str(key)] == [], "their own keys"
        assert run.restore() == 2 and len(state) == 10


def test_swapped_arrays_are_detected_as_changed(directory: str) -> None:
    base = torch.arange(10.0)
    state = {"a": base[0:6], "b": base[4:10]}
    with Checkpointer(directory, extra={"state": state}, rng=False) as run:
        run.save(1, name="one")
        state["a"], state["b"] = state["b"], state["a"]
        run.save(2)
        assert run.diff("one") == {"state/a": Difference(6, (0,), 4.0), "state/b": Difference(6, (0,), 4.0)}
