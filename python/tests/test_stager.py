"""Copies of states for `dcp.async_save`."""

from __future__ import annotations

import collections
import concurrent.futures
import gc
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from dcp_ranks import in_ranks

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.staging import AsyncStager  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse  # noqa: E402

from remanent.dcp import Stager, StorageReader, StorageWriter  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WAYS = [{}, {"wait": True}, {"overlap": True}]


class Pair(NamedTuple):
    left: Any
    right: Any


def staged(stager: Stager, state: dict[str, Any]) -> dict[str, Any]:
    found = stager.stage(state)
    return found.result() if isinstance(found, concurrent.futures.Future) else found


def loaded(path: str, state: dict[str, Any]) -> dict[str, Any]:
    dcp.load(state, storage_reader=StorageReader(path), no_dist=True)
    return state


def address(tensor: Any) -> int:
    """Returns the address of the memory that contains a tensor."""
    return int(tensor.untyped_storage().data_ptr())


@pytest.mark.parametrize("options", WAYS)
def test_stager_copies_state_at_call(directory: str, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = {"position": [0]}
    stager = Stager(**options)
    assert isinstance(stager, AsyncStager)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader}

    expected = {}
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        loader["position"][0] = step
        expected[step] = [each.detach().clone() for each in model.parameters()]
        expected[step] += [each["exp_avg"].clone() for each in optimizer.state.values()]
        writer = StorageWriter(f"{directory}/{step}")
        saving = dcp.async_save(state(), storage_writer=writer, async_stager=stager, no_dist=True)
        if options.get("wait"):
            assert isinstance(saving, concurrent.futures.Future)
        else:
            assert isinstance(saving, AsyncSaveResponse)
            if options:
                saving.staging_completion.result()
            saving = saving.upload_completion
        loader["position"][0] = -1
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(9)
            for held in optimizer.state.values():
                held["exp_avg"].fill_(9)
        saving.result()
    stager.close()
    for step, tensors in expected.items():
        found = loaded(f"{directory}/{step}", state())
        assert found["loader"] == {"position": [step]}
        now = [each.detach() for each in model.parameters()]
        now += [each["exp_avg"] for each in optimizer.state.values()]
        assert all(map(torch.equal, now, tensors)), step


def test_copies_equal_originals() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state: dict[str, Any] = {
        "whole": base, "turned": base.T, "row": base[2], "every other": base[:, ::2].clone()[:, ::2],
        "scalar": torch.tensor(7), "empty": torch.empty(0, 3), "short": torch.ones(3, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)), "conjugated": torch.tensor([1 + 2j]).conj(),
        "nested": collections.OrderedDict(list=[torch.zeros(2), (torch.ones(1), None)]), "pair": Pair(base, 3),
        "loader": {"seen": {1, 2}, "rows": [1, 2]}, 5: "x",
    }
    stager = Stager()
    found = staged(stager, state)
    assert list(found) == list(state)
    for name in ("whole", "turned", "row", "every other", "scalar", "empty", "short", "parameter", "conjugated"):
        assert torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype, name
        assert not found[name].requires_grad
    assert type(found["nested"]) is collections.OrderedDict and type(found["pair"]) is Pair
    assert torch.equal(found["nested"]["list"][1][0], torch.ones(1)) and found["nested"]["list"][1][1] is None
    assert found["loader"] == state["loader"] and found["loader"]["seen"] is not state["loader"]["seen"]
    assert found[5] == "x"
    base.zero_()
    state["loader"]["rows"].append(3)
    assert found["row"].tolist() == [12, 13, 14, 15, 16, 17] and found["loader"]["rows"] == [1, 2]
    # The copies overlap in the same way as the tensors.
    found["whole"][2, 0] = -1
    assert found["row"][0] == found["turned"][0, 2] == found["pair"].left[2, 0] == -1
    stager.close()


def test_memory_is_kept_while_in_use() -> None:
    state = {"a": torch.ones(1000), "b": torch.ones(3, dtype=torch.int16)}
    stager = Stager(wait=True)
    first = staged(stager, state)
    one, view = address(first["a"]), first["a"][5:7]
    state["a"].fill_(2)
    second = staged(stager, state)
    two = address(second["a"])
    assert one != two
    del first
    state["a"].fill_(3)
    # A view of the first copy still exists.
    third = staged(stager, state)
    assert address(third["a"]) not in (one, two) and view.tolist() == [1, 1] and second["a"][0] == 2
    del view, second
    gc.collect()
    assert address(staged(stager, state)["a"]) in (one, two)
    # A longer state needs a new piece of memory, and pieces that are too short are freed.
    state["c"] = torch.ones(100_000)
    longer = staged(stager, state)
    assert address(longer["c"]) not in (one, two) and not stager._memory._free
    stager.close()
    assert longer["c"].sum() == 100_000
    del longer
    gc.collect()
    assert not stager._memory._free
    with pytest.raises(remanent.ClosedError):
        stager.stage(state)


def test_unfinished_save_keeps_its_copies(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write = StorageWriter.write_data

    def late(self: StorageWriter, *given: Any) -> Any:
        assert may_write.wait(60)
        return write(self, *given)

    monkeypatch.setattr(StorageWriter, "write_data", late)
    state, stager = {"w": torch.zeros(1000)}, Stager()
    saving = []
    for step in range(3):
        state["w"].fill_(step)
        writer = StorageWriter(f"{directory}/{step}")
        saving.append(dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True))
    may_write.set()
    for each in saving:
        each.upload_completion.result()
    stager.close()
    for step in range(3):
        assert bool((loaded(f"{directory}/{step}", {"w": torch.full((1000,), 9.0)})["w"] == step).all()), step


def test_uncopyable_value_is_rejected_by_name(directory: str) -> None:
    stager = Stager()
    for odd, text in ((threading.Lock(), "loader/odd: a lock cannot be copied"),
                      (torch.ones(2, 2).to_sparse(), "loader/odd: a tensor of layout torch.sparse")):
        with pytest.raises(remanent.RefusedError, match=text):
            dcp.async_save({"loader": {"odd": odd}}, storage_writer=StorageWriter(directory + "/1"),
                           async_stager=stager, no_dist=True)
    assert not Path(directory).exists()
    # The next save succeeds.
    assert staged(stager, {"w": torch.ones(2)})["w"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="wait and overlap"):
        Stager(wait=True, overlap=True)
    stager.close()


def test_ranks_save_parts_at_call(tmp_path: Path) -> None:
    root = str(tmp_path)
    said = in_ranks(2, """
        from remanent.dcp import Stager

        def run(rank, ranks, root):
            mesh = begin(rank, ranks, root)
            for number, options in enumerate(({}, {"wait": True}, {"overlap": True})):
                state = {"rows": of_step(1, mesh, 0), "own": {"columns": of_step(2, mesh, 1)}, "all": torch.arange(5)}
                stager = Stager(**options)
                for step in range(3):
                    state["rows"].to_local().add_(1)
                    saving = dcp.async_save(state, storage_writer=StorageWriter(f"{root}/{number}-{step}"),
                                            async_stager=stager)
                    if not options.get("wait"):
                        saving.staging_completion.result()
                        saving = saving.upload_completion
                    # A change for the next step. The save in progress must not contain it.
                    state["rows"].to_local().add_(10)
                    saving.result()
                    state["rows"].to_local().sub_(10)
                stager.close()
            os.write(1, f"rank {rank}: fine\\n".encode())
            end(rank, ranks, root)
    """, root)
    assert said == ["rank 0: fine", "rank 1: fine"]
    whole = torch.arange(60.0).reshape(10, 6)
    for number in range(3):
        for step in range(3):
            state = {"rows": torch.zeros(10, 6), "own": {"columns": torch.zeros(10, 6)}, "all": torch.zeros(5).long()}
            found = loaded(f"{root}/{number}-{step}", state)
            assert torch.equal(found["rows"], whole + 1001 + step), (number, step)
            assert torch.equal(found["own"]["columns"], whole + 2000)
            assert torch.equal(found["all"], torch.arange(5))
