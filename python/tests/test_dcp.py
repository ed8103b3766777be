"""Checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from dcp_ranks import in_ranks

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402

import remanent.dcp  # noqa: E402
from remanent.dcp import StorageReader, StorageWriter  # noqa: E402

@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows the next save to remove discarded checkpoints immediately."""
    monkeypatch.setattr(remanent.dcp, "_VISIBLE_AFTER", -1.0)


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save(state: Any, path: str, **options: Any) -> None:
    dcp.save(state, storage_writer=StorageWriter(path, **options), no_dist=True)


def load(state: Any, path: str) -> Any:
    dcp.load(state, storage_reader=StorageReader(path), no_dist=True)
    return state


def cause(raised: pytest.ExceptionInfo[Any]) -> BaseException:
    """Returns the error with which a rank failed."""
    failure = raised.value.failures[0]
    error: BaseException = failure[0] if isinstance(failure, tuple) else failure
    return error


def image_bytes(root: str) -> int:
    return sum(path.stat().st_size for path in Path(root).glob(".remanent/*/pages/*.pages"))


def test_renamed_checkpoint_survives_concurrent_save(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(directory)
    save({"w": torch.full((4,), 7.0)}, str(root / "a"))
    save({"w": torch.full((4,), 8.0)}, str(root / "b"))
    sound = remanent.dcp._metadata_files

    def renaming(checkpoint: Path, **options: Any) -> list[Path]:
        if checkpoint.name == "a":
            checkpoint.rename(root / "best")
        return sound(checkpoint, **options)

    with monkeypatch.context() as renamed:
        renamed.setattr(remanent.dcp, "_metadata_files", renaming)
        save({"w": torch.full((4,), 9.0)}, str(root / "c"))
    for name, value in (("best", 7), ("b", 8), ("c", 9)):
        assert load({"w": torch.zeros(4)}, str(root / name))["w"].tolist() == [value] * 4


def test_run_continues_from_checkpoint(directory: str) -> None:
    def run(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: Any, optimizer: Any, seed: int) -> float:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "step": 3, "note": ("a", [1.5, None])}

    model, optimizer = run(1)
    for step in range(3):
        train(model, optimizer, step)
    save(state_of(model, optimizer), directory + "/3")
    expected = [train(model, optimizer, step) for step in range(3, 6)]
    other_model, other_optimizer = run(2)
    # An optimizer that has made no step has no state to load into.
    train(other_model, other_optimizer, 0)
    found = load({**state_of(other_model, other_optimizer), "step": 0, "note": None}, directory + "/3")
    set_state_dict(other_model, other_optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    assert (found["step"], found["note"]) == (3, ("a", [1.5, None]))
    assert [train(other_model, other_optimizer, step) for step in range(3, 6)] == expected


def test_metadata_contains_save_id(directory: str) -> None:
    writer, reader = StorageWriter(directory), StorageReader(directory)
    dcp.save({"a": torch.zeros(2)}, storage_writer=writer, no_dist=True)
    meta = reader.read_metadata().storage_meta
    assert meta is not None
    assert (str(meta.checkpoint_id), meta.save_id, meta.load_id) == (directory, writer.save_id, reader.load_id)
    first = writer.save_id
    writer.reset()
    assert writer.save_id != first


def test_all_tensor_types_and_shapes_are_loaded(directory: str) -> None:
    torch.manual_seed(0)
    square = torch.randn(6, 4)
    state = {
        "scalar": torch.tensor(7), "empty": torch.empty(0, 3), "turned": square.T, "every other": square[::2],
        "one of it": square[2:3, 1:3],
        "a name that is much longer than the sixty-four bytes that a key may have": square,
    }
    for name in ("bool", "uint8", "int16", "float16", "bfloat16", "float64", "complex64", "float8_e4m3fn"):
        state[name] = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    save(state, directory + "/all")
    found = load({name: torch.zeros_like(tensor) for name, tensor in state.items()}, directory + "/all")
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name].cpu(), tensor), name
    # `remanent diff` and `blame` use this metadata.
    with remanent.View(directory + "/.remanent/rank-0") as view:
        assert view.info("float16").metadata == {"name": "float16", "dtype": "F16", "shape": [2, 3]}


def test_unchanged_pages_are_not_written_again(directory: str) -> None:
    state = {"frozen": torch.randn(1 << 20), "tuned": torch.zeros(1 << 18), "step": 1}
    save(state, directory + "/1")
    once = image_bytes(directory)
    state["tuned"] += 1
    save(state, directory + "/2")
    assert once > 5 << 20 and image_bytes(directory) - once < 2 << 20
    for step, value in (("1", 0), ("2", 1)):
        found = load({"frozen": torch.zeros(1 << 20), "tuned": torch.zeros(1 << 18)}, f"{directory}/{step}")
        assert torch.equal(found["frozen"], state["frozen"]) and bool((found["tuned"] == value).all())
    # Another shape, another element type, one tensor less and one more.
    other = {"frozen": torch.ones(5, 5), "tuned": torch.ones(1 << 18, dtype=torch.float16), "new": torch.ones(2)}
    save(other, directory + "/3")
    found = load({name: torch.zeros_like(tensor) for name, tensor in other.items()}, directory + "/3")
    assert all(torch.equal(found[name], tensor) for name, tensor in other.items())
    with remanent.View(directory + "/.remanent/rank-0") as view:
        assert sorted(view.keys()) == ["frozen", "new", "tuned"]
    found = load({"frozen": torch.zeros(1 << 20)}, directory + "/1")
    assert torch.equal(found["frozen"], state["frozen"])


def test_next_save_frees_removed_checkpoint(directory: str) -> None:
    def names() -> list[str]:
        with remanent.Store(directory + "/.remanent/rank-0", device="host") as store:
            return [str(info.name).split(" ")[0] for info in store.snapshots()]

    for step in range(3):
        save({"w": torch.full((1 << 18,), float(step))}, f"{directory}/{step}")
    assert names() == ["0@1", "1@2", "2@3"]
    shutil.rmtree(directory + "/0")
    # Metadata that cannot be read may name any snapshot, so none is removed.
    whole = Path(directory + "/1/.metadata").read_bytes()
    Path(directory + "/1/.metadata").write_bytes(whole[:-5] + b"wrong")
    save({"w": torch.full((1 << 18,), 3.0)}, directory + "/3")
    assert names() == ["0@1", "1@2", "2@3", "3@4"]
    with pytest.raises(CheckpointException):
        load({"w": torch.zeros(1 << 18)}, directory + "/1")
    # DCP reports at most the text of a metadata reader's error, so the reader is called directly.
    with pytest.raises(remanent.DamagedError, match="1/.metadata is damaged"):
        StorageReader(directory + "/1").read_metadata()
    Path(directory + "/1/.metadata").write_bytes(whole)
    # DCP's own checkpoints in the same root are ignored.
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=directory + "/theirs", no_dist=True)
    save({"w": torch.full((1 << 18,), 4.0)}, directory + "/4")
    assert names() == ["1@2", "2@3", "3@4", "4@5"]
    for step in range(1, 5):
        assert bool((load({"w": torch.zeros(1 << 18)}, f"{directory}/{step}")["w"] == step).all())
    with pytest.raises(remanent.NoStateError, match="theirs/.metadata has DCP's own format"):
        StorageReader(directory + "/theirs").read_metadata()


def test_checkpoint_stays_complete_until_replaced(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory + "/last"
    save({"a": torch.zeros(1000), "b": torch.zeros(1000)}, path)

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(BaseException):
        patched.setattr(StorageWriter, "finish", crash)
        save({"a": torch.ones(1000), "b": torch.ones(1000)}, path)
    found = load({"a": torch.full((1000,), 5.0), "b": torch.full((1000,), 5.0)}, path)
    assert not found["a"].any() and not found["b"].any()
    with pytest.raises(CheckpointException) as raised:
        save({"a": torch.ones(1000)}, path, overwrite=False)
    assert isinstance(cause(raised), remanent.TakenError)
    assert "already contains a checkpoint" in str(raised.value)
    save({"a": torch.ones(1000), "b": torch.ones(1000)}, path)
    assert bool(load({"a": torch.zeros(1000), "b": torch.zeros(1000)}, path)["b"].all())


def test_many_short_tensors_are_saved(directory: str) -> None:
    count = 15_000
    save({f"{number}": torch.tensor(number) for number in range(count)}, directory + "/1")
    found = load({f"{number}": torch.tensor(-1) for number in range(0, count, 1000)}, directory + "/1")
    assert [int(tensor) for tensor in found.values()] == list(range(0, count, 1000))
    save({"0": torch.tensor(0)}, directory + "/2")
    with remanent.View(directory + "/.remanent/rank-0") as view:
        assert view.keys() == ["0"]


def test_targets_of_every_kind_are_loaded(directory: str) -> None:
    state = {"real": torch.arange(12.0).reshape(3, 4), "complex": torch.tensor([1 + 2j, 3 - 1j])}
    save(state, directory + "/1")
    targets = {
        "real": [torch.zeros(4, 3).T, torch.zeros(3, 8)[:, ::2], torch.zeros(3, 4, dtype=torch.float16)],
        "complex": [torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2, 2, dtype=torch.complex64)[:, 0]],
    }
    for name, each in targets.items():
        for target in each:
            dcp.load({name: target}, storage_reader=StorageReader(directory + "/1", cast=True), no_dist=True)
            assert torch.equal(target.to(state[name].dtype), state[name])
    with torch.inference_mode():
        inferred = load({"real": torch.zeros(4, 3).T}, directory + "/1")["real"]
    assert torch.equal(inferred, state["real"])


def test_saves_to_same_root_are_serialized(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(number: int) -> None:
        save({"w": torch.full((1 << 18,), float(number))}, f"{directory}/{number}")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A checkpoint that is durable but not visible yet is kept while other saves begin and end.
    publish = StorageWriter.finish

    def slow(writer: StorageWriter, **arguments: Any) -> None:
        if Path(writer.checkpoint_id).name == "slow":
            for number in range(4, 7):
                one(number)
        publish(writer, **arguments)

    monkeypatch.setattr(StorageWriter, "finish", slow)
    save({"w": torch.full((1 << 18,), 9.0)}, directory + "/slow")
    monkeypatch.chdir(directory)
    save({"w": torch.full((1 << 18,), 8.0)}, "8")
    monkeypatch.chdir(directory + "/8")
    save({"w": torch.full((1 << 18,), 10.0)}, ".")
    one(11)
    one(12)
    for name, number in [*((str(each), each) for each in (*range(7), 11, 12)), ("slow", 9), ("8", 10)]:
        assert bool((load({"w": torch.zeros(1 << 18)}, f"{directory}/{name}")["w"] == number).all()), name
    assert not list(Path(directory).glob(".remanent/saving-*"))


def test_forked_child_does_not_affect_save(directory: str) -> None:
    stores = Path(directory)
    stores.mkdir(exist_ok=True)
    saving = remanent.dcp._Saving(stores, "0123456789abcdef")
    token = frozenset([saving.token])
    (lives, say), (ends, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        saving.__del__()
        os.close(end)
        os.write(say, b"1")
        os.read(ends, 1)
        os._exit(0)
    assert os.read(lives, 1) == b"1"
    assert remanent.dcp._saving(stores) == token
    # Simulates the death of this process: its descriptor is closed, and the child is still alive.
    os.close(saving._file)
    saving._file = -1
    assert remanent.dcp._saving(stores) == frozenset()
    for descriptor in (lives, say, ends, end):
        os.close(descriptor)
    assert os.waitpid(child, 0)[1] == 0


def test_separate_and_joint_saves_coexist(directory: str) -> None:
    def alone(value: float) -> None:
        state = {"w": torch.full((2,), value)}
        dcp.save(state, storage_writer=StorageWriter(path), no_dist=True, use_collectives=False)

    path = directory + "/1"
    save({"w": torch.ones(2)}, path)
    alone(2.0)
    assert not Path(path + "/.metadata").exists()
    with pytest.raises(CheckpointException) as raised:
        save({"w": torch.ones(2)}, path, overwrite=False)
    assert isinstance(cause(raised), remanent.TakenError)
    assert load({"w": torch.zeros(2)}, path)["w"].tolist() == [2, 2]
    save({"w": torch.full((2,), 3.0)}, path)
    assert [each.name for each in Path(path).iterdir()] == [".metadata"]
    assert load({"w": torch.zeros(2)}, path)["w"].tolist() == [3, 3]


def test_cached_plans_are_supported(directory: str) -> None:
    for step in range(4):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        state = {"w": torch.full((1 << 18,), float(step))}
        dcp.save(state, storage_writer=StorageWriter(f"{directory}/{step}"), planner=planner, no_dist=True)
    for step in range(4):
        assert bool((load({"w": torch.zeros(1 << 18)}, f"{directory}/{step}")["w"] == step).all())


def test_unreadable_root_frees_nothing(directory: str, monkeypatch: pytest.MonkeyPatch,
                                       caplog: pytest.LogCaptureFixture) -> None:
    for step in range(3):
        save({"w": torch.full((4,), float(step))}, f"{directory}/{step}")
    scan = os.scandir

    def refused(path: Any) -> Any:
        if str(path).endswith("/1"):
            raise PermissionError(path)
        return scan(path)

    with monkeypatch.context() as patched, caplog.at_level("WARNING", "remanent"):
        patched.setattr(os, "scandir", refused)
        save({"w": torch.full((4,), 3.0)}, directory + "/3")
    assert "cannot be read" in caplog.text
    assert load({"w": torch.zeros(4)}, directory + "/1")["w"].tolist() == [1] * 4
    # A `.metadata` file of another program is ignored.
    Path(directory + "/other").mkdir()
    Path(directory + "/other/.metadata").write_text("a file of another program")
    shutil.rmtree(directory + "/0")
    save({"w": torch.full((4,), 4.0)}, directory + "/4")
    with remanent.Store(directory + "/.remanent/rank-0", device="host") as store:
        assert len(store.snapshots()) == 4
    # A symbolic link in another folder.
    Path(directory + "/elsewhere").mkdir()
    Path(directory + "/elsewhere/latest").symlink_to(directory + "/4")
    assert load({"w": torch.zeros(4)}, directory + "/elsewhere/latest")["w"].tolist() == [4] * 4


def test_damaged_bytes_are_not_loaded(directory: str) -> None:
    save({"w": torch.randn(1 << 16), "step": 5}, directory + "/1")
    [images] = Path(directory + "/.remanent/rank-0/pages").glob("*.pages")
    found = bytearray(images.read_bytes())
    found[len(found) // 2] ^= 1
    images.write_bytes(found)
    with pytest.raises(CheckpointException) as raised:
        load({"w": torch.zeros(1 << 16)}, directory + "/1")
    assert isinstance(cause(raised), remanent.DamagedError)
    with pytest.raises(CheckpointException):
        load({"w": torch.zeros(1)}, directory + "/2")
    with pytest.raises(remanent.NoStateError, match="there is no checkpoint in"):
        StorageReader(directory + "/2").read_metadata()


def test_unsupported_item_is_rejected_by_name(directory: str) -> None:
    save({"w": torch.ones(2)}, directory + "/1")
    with pytest.raises(CheckpointException) as raised:
        save({"w": torch.zeros(2), "odd": torch.ones(2, 2).to_sparse()}, directory + "/2")
    assert "odd" in str(cause(raised))
    assert bool(load({"w": torch.zeros(2)}, directory + "/1")["w"].all())


# Ranks.


def test_ranks_load_parts_of_other_ranks(tmp_path: Path) -> None:
    root = str(tmp_path)
    in_ranks(2, """
        def run(rank, ranks, root):
            mesh = begin(rank, ranks, root)
            state = {"by rows": of_step(1, mesh, 0), "by columns": of_step(2, mesh, 1), "all": torch.arange(5)}
            # The same name as that of the second rank's part of another tensor.
            state["by rows@5,0"] = torch.full((7,), 3.0)
            dcp.save(state, storage_writer=StorageWriter(root + "/one"))
            work = dcp.async_save(state, storage_writer=StorageWriter(root + "/two"))
            work.result()
            end(rank, ranks, root)
    """, root)
    assert sorted(path.name for path in tmp_path.glob(".remanent/rank-*")) == ["rank-0", "rank-1"]
    said = in_ranks(3, """
        def run(rank, ranks, root):
            mesh = begin(rank, ranks, root)
            for name in ("one", "two"):
                state = {"by rows": of_step(0, mesh, 1), "by columns": of_step(0, mesh, 0)}
                state |= {"all": torch.zeros(5).long(), "by rows@5,0": torch.zeros(7)}
                dcp.load(state, storage_reader=StorageReader(root + "/" + name))
                for key, step in (("by rows", 1), ("by columns", 2)):
                    assert torch.equal(state[key].full_tensor(), torch.arange(60.0).reshape(10, 6) + 1000 * step)
                assert torch.equal(state["all"], torch.arange(5))
                assert bool((state["by rows@5,0"] == 3).all())
            # A single write, because all ranks write to the same pipe.
            os.write(1, f"rank {rank}: fine\\n".encode())
            end(rank, ranks, root)
    """, root)
    assert said == ["rank 0: fine", "rank 1: fine", "rank 2: fine"]
    # A single process can load it, too.
    found = load({"by rows": torch.zeros(10, 6), "by columns": torch.zeros(10, 6)}, root + "/two")
    assert torch.equal(found["by columns"], torch.arange(60.0).reshape(10, 6) + 2000)


def test_other_element_types_are_rejected_before_changes(directory: str) -> None:
    third = torch.full((3,), 1 / 3)
    save({"a": torch.ones(2), "b": third}, directory + "/1")
    state = {"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointException, match="b: the checkpoint has elements of type torch.float32, but the tensor has"):
        load(state, directory + "/1")
    assert not state["a"].any() and not state["b"].any()
    dcp.load(state, storage_reader=StorageReader(directory + "/1", cast=True), no_dist=True)
    assert torch.equal(state["b"], third.to(torch.bfloat16)) and state["a"].all()
