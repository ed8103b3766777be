"""Checks of ranks that save together: each is a function that four ranks execute.

    python rank_checks.py cpu|cuda DIRECTORY [CHECK …]

Without names, runs all checks except those of archives. Prints a line for each check: its name, and "fine" if it
succeeded on all ranks. The ranks are forks of this process, which has imported torch. On GPUs there are as many ranks
as GPUs, and checks that need four ranks are skipped. Some checks have several consecutive stages with different numbers
of ranks.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import rank_archives
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from children import ended, forked
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import remanent
from remanent._checkpoint import checkpointer, replicas, restoration
from remanent._tensors import gpu_scratch
from remanent.dcp import StorageReader, StorageWriter
from remanent.torch import Checkpointer, Difference, Version

DEVICE = sys.argv[1]
RANKS = 4 if DEVICE == "cpu" else torch.cuda.device_count()


class Training:
    """A model of FSDP2 and its optimizer, and a separate tensor of each rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        # Seven and three rows on four ranks: the parts have several sizes, and one part is empty.
        self.model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(DEVICE)
        fully_shard(self.model, mesh=init_device_mesh(DEVICE, (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.own: dict[str, Any] = {"rank": dist.get_rank()}

    def step(self) -> float:
        self.optimizer.zero_grad()
        # Each rank has its own random numbers, whose state is saved with the rank.
        loss = self.model(torch.randn(4, 10, device=DEVICE)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self, taken: Callable[[Any], torch.Tensor] = DTensor.to_local) -> list[torch.Tensor]:
        """Returns copies of each tensor's part that this rank has, or of all of it."""
        found = [taken(parameter.detach()).clone() for parameter in self.model.parameters()]
        for each in self.optimizer.state.values():
            found += [taken(each["exp_avg"]).clone(), taken(each["exp_avg_sq"]).clone(), each["step"].clone()]
        return found

    def run(self, directory: Path, **options: Any) -> Checkpointer:
        return Checkpointer(directory, self.model, self.optimizer, extra={"own": self.own},
                            process_group=dist.group.WORLD, **options)


WAYS: list[dict[str, Any]] = [{}, {"overlap": True}, {"room": 300}, {"digests": True}]
if DEVICE == "cuda":
    WAYS.append({"device_room": 1 << 20})


def every_save_option_restores_all_parts(directory: Path) -> None:
    for number, options in enumerate(WAYS):
        training = Training()
        with training.run(directory / str(number), **options) as run:
            saved = {}
            for step in range(1, 6):
                training.step()
                saved[step] = training.state()
                run.save(step, wait=step % 2 == 0)
            for step in (4, 5):
                assert run.restore(step) == step and same(training.state(), saved[step]), options


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def raises(kind: type[BaseException], text: str) -> Any:
    return pytest.raises(kind, match=text)


def restored_run_continues_bit_for_bit(directory: Path) -> None:
    training = Training()
    torch.manual_seed(dist.get_rank())
    with training.run(directory) as run:
        training.step()
        run.save(1, name="first")
        at_first, losses = training.state(), [training.step() for _ in range(3)]
        run.save(4, wait=False).wait()
        at_fourth = training.state()
        training.own["rank"] = -1
        assert run.restore("first") == 1 and same(training.state(), at_first)
        assert training.own["rank"] == dist.get_rank()
        assert [training.step() for _ in range(3)] == losses
        assert [(version.step, version.name) for version in run.versions()] == [(1, "first"), (4, None)]
    again = Training()
    with again.run(directory) as run:
        # The new optimizer has no state yet.
        assert run.restore() == 4 and same(again.state(), at_fourth)
        run.fork(directory / "fork", at="first")
        assert run.diff("first", 4)["model/0.weight"]
        run.give_up("first")
        assert [version.step for version in run.versions()] == [4]
    with again.run(directory / "fork") as run:
        assert run.restore() == 1 and same(again.state(), at_first)
        again.step()
        run.save(2)


def rejection_on_one_rank_saves_nothing(directory: Path) -> None:
    rank = dist.get_rank()
    training = Training()
    with training.run(directory) as run:
        run.save(1)
        if rank == 2:
            training.own["odd"] = threading.Lock()
        with raises(remanent.RefusedError, "lock cannot be stored" if rank == 2 else "rank 2: own/odd: a lock"):
            run.save(2)
        training.own.pop("odd", None)
        with raises(remanent.RefusedError, "rank 1 saved step 30" if rank != 1 else "rank 0 saved step 3 "):
            run.save(30 if rank == 1 else 3)
        # A failure of a save with `wait=False` is raised by the next save.
        if rank == 3:
            training.own["odd"] = threading.Lock()
            with raises(remanent.RefusedError, "lock cannot be stored"):
                run.save(4, wait=False)
            del training.own["odd"]
        else:
            run.save(4, wait=False)
        with raises(remanent.RefusedError, "rank 3: own/odd" if rank != 3 else "rank 0: "):
            run.save(5)
        assert [version.step for version in run.versions()] == [1]
        run.save(6)
        assert run.restore() == 6


def busy_save_is_refused_on_all_ranks_or_none(directory: Path) -> None:
    training = Training()
    with training.run(directory) as run:
        held = threading.Event()
        keep = run._versions.keep

        def later(*given: Any) -> None:
            if dist.get_rank() == 1:
                held.wait(60)
            keep(*given)

        run._versions.keep = later
        saved = run.save(1, wait=False)
        with raises(remanent.InUseError, "step 1 is in progress"):
            run.save(2, busy="refuse")
        left = run.save(2, busy="coalesce", wait=False)
        if dist.get_rank() == 2:
            with raises(remanent.InvalidError, "is not an integer"):
                run.save(2.5, busy="coalesce", wait=False)
        else:
            run.save(2, busy="coalesce", wait=False)
        held.set()
        saved.wait()
        dist.barrier()
        run.save(3, busy="refuse")
        assert left.wait(60) and left.version_step == 3
        assert [version.step for version in run.versions()] == [1, 3]


def damage_newest_images(store: Path) -> None:
    """Changes the headers and the pages of a store's newest image file."""
    newest = max((store / "pages").glob("*.pages"))
    content = bytearray(newest.read_bytes())
    for at in range(0, len(content), 64):
        content[at] ^= 1
    newest.write_bytes(content)


def damage_on_one_rank_changes_no_rank(directory: Path) -> None:
    rank = dist.get_rank()
    training = Training()
    with training.run(directory, keep=3) as run:
        for step in range(1, 4):
            training.step()
            run.save(step)
        training.step()
        before = training.state()
        dist.barrier()
        if rank == 1:
            damage_newest_images(directory / "rank-1")
        dist.barrier()
        with raises(remanent.DamagedError, "rank 1: " if rank != 1 else ".pages|damaged"):
            run.restore()
        assert same(training.state(), before)
        read: list[str] = []
        sound = restoration.load_pages

        def noted(view: Any, pages: Any, *where: Any) -> Any:
            read.extend(each.name for arrays in pages.values() for each in arrays if 0 not in each.shape)
            return sound(view, pages, *where)

        restoration.load_pages = noted
        assert run.restore(1) == 1 and not same(training.state(), before)
        restoration.load_pages = sound
        assert all(name.startswith("rng/") for name in read), "all parts were read into the model's and the optimizer's"


def damaged_point_is_not_skipped(directory: Path) -> None:
    rank = dist.get_rank()
    training = Training()
    with training.run(directory, keep=2) as run:
        run.save(1)
        run.save(2)
        dist.barrier()
        points = sorted((directory / "points").iterdir())
        whole = points[-1].read_bytes()
        dist.barrier()
        for content in (whole[:-3] + b"9" + whole[-2:], whole[:40], b"", b"another program's\\n"):
            if rank == 0:
                points[-1].write_bytes(content)
            dist.barrier()
            with raises(remanent.DamagedError, "point is damaged"):
                run.restore()
            assert [version.step for version in run.versions()] == [1]
            dist.barrier()
        assert run.restore(1) == 1
        # The damaged point may name any snapshot, so no snapshot is removed.
        for step in range(3, 6):
            run.save(step)
        snapshots = [info.name for info in run.store.snapshots() if info.name is not None]
        assert len(snapshots) == 5, snapshots
        dist.barrier()
        if rank == 0:
            points[-1].write_bytes(whole)
        dist.barrier()
        run.save(6)
        assert [version.step for version in run.versions()] == [5, 6]
        assert len([info for info in run.store.snapshots() if info.name is not None]) == 2


def swapped_stores_of_ranks_are_detected(directory: Path) -> None:
    training = Training()
    with training.run(directory) as run:
        run.save(1)
    dist.barrier()
    if dist.get_rank() == 0:
        os.rename(directory / "rank-2", directory / "aside")
        os.rename(directory / "rank-3", directory / "rank-2")
        os.rename(directory / "aside", directory / "rank-3")
    dist.barrier()
    with training.run(directory) as run:
        with raises(remanent.Error, "rank 2|was saved to store|no snapshot|there is no"):
            run.restore()


def unsuitable_directories_are_rejected(directory: Path) -> None:
    training = Training()
    if dist.get_rank() == 0:
        remanent.Store(directory / "store", device="host").close()
    dist.barrier()
    with raises(remanent.RefusedError, "is a store"):
        training.run(directory / "store")
    with training.run(directory / "four") as run:
        run.save(1)
        with raises(remanent.LockedError, "rank-"):
            training.run(directory / "four")
        try:
            training.run(directory / "four")
        except remanent.LockedError as error:
            # The error has the same attributes on all ranks as on the rank that raised it.
            assert error.holder and error.path and "rank-" in error.path
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with Checkpointer(directory / "two", extra={"own": training.own}, process_group=pair) as run:
            run.save(1)
            training.own["rank"] = -1
            assert run.restore() == 1 and training.own["rank"] == dist.get_rank()
    with raises(remanent.RefusedError, "model/0.weight: other ranks have parts of this DTensor"):
        with Checkpointer(directory / f"alone-{dist.get_rank()}", training.model) as alone:
            alone.save(1)


def failure_on_one_rank_keeps_ranks_in_step(directory: Path) -> None:
    rank = dist.get_rank()
    # If the constructor fails on one rank, it fails on all ranks, and all ranks can try again.
    odd = {"own": threading.Lock() if rank == 1 else {}}
    with raises(remanent.RefusedError, "own: a lock is neither a dict nor has state_dict" if rank == 1 else "rank 1: own: a lock"):
        Checkpointer(directory, extra=odd, process_group=dist.group.WORLD)
    training = Training()
    with training.run(directory) as run:
        run.save(1)
        # An interrupt of the wait, by Ctrl-C or a scheduler's signal, does not end work that other ranks take part in.
        interrupted = directory / "interrupted"
        if rank == 2:
            # Processes that a script starts in the background ignore SIGINT.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
            with raises(KeyboardInterrupt, ""):
                run.restore()
            interrupted.touch()
        else:
            while not interrupted.exists():
                time.sleep(0.01)
            assert run.restore() == 1
        run.save(2)
        for step, busy, text in ((3.5, "wait", "is not an integer"), (3.5, "refuse", "is not an integer"),
                                 (4, "refused", "must be \"wait\"")):
            with raises(remanent.InvalidError, text):
                if rank == 3:
                    run.save(step, busy=busy)
                else:
                    run.save(4, busy="wait" if busy == "refused" else busy)
        for _ in range(5):
            with raises(remanent.RefusedError, "rank 1 saved step 3" if rank != 1 else "rank 0 saved step 5"):
                run.save(3 if rank == 1 else 5)
        assert [version.step for version in run.versions()] == [1, 2]
        names = [info.name for info in run.store.snapshots() if info.name is not None]
        assert len(names) <= 3, f"of saves that failed there is {names}"
        run.save(6, name="newest")
        run.give_up("newest")
        assert run.restore() == 6
        assert [(version.step, version.name) for version in run.versions()] == [(1, None), (2, None), (6, None)]
        with raises(remanent.RankFailedError, "rank . tried to |has ended"):
            run.give_up("one") if rank == 0 else run.save(7)
        with raises(remanent.RankFailedError, "has ended"):
            run.save(8)
    for call in (run.restore, lambda: run.give_up("one"), lambda: run.save(9), lambda: run.diff(1, 2)):
        with raises(remanent.ClosedError, "closed"):
            call()
    with training.run(directory) as run:
        assert run.restore() == 6


def bisect_tests_versions_on_all_ranks(directory: Path) -> None:
    rank = dist.get_rank()
    own = {"w": torch.zeros(3)}
    with Checkpointer(directory, extra={"own": own}, rng=False, keep=99, process_group=dist.group.WORLD) as run:
        if rank == 1:
            # The Lsns of this rank's versions differ from those of the other ranks.
            run.store["aside"] = b"a page"
        for step in range(1, 21):
            # The first bad step differs from rank to rank.
            own["w"][1] = step >= 5 + 3 * rank
            run.save(step)
        versions = run.versions()

        def is_good(version: Version) -> bool:
            assert run.restore(version) == version.step
            return not own["w"][1]

        # The first bad version of the first rank is the first one that is bad on any rank.
        assert run.bisect(is_good, good=1) == versions[4]
        assert run.bisect(lambda version: None if (version.step, rank) == (11, 2) else version.step < 7, good=2,
                          bad=versions[19]) == versions[6]

        def fails(version: Version) -> bool:
            if rank == 3:
                raise ValueError("no loss")
            return True

        with raises(ValueError if rank == 3 else remanent.RankFailedError, "no loss"):
            run.bisect(fails, good=1)
        [first, second] = run.blame("own/w", 1)
        assert (first.step, second.step, second.after) == (1, 5 + 3 * rank, 1.0)
        assert run.diff(versions[3], 5) == ({"own/w": Difference(1, (1,), 1.0)} if rank == 0 else {})
        with raises(remanent.OutOfBoundsError, "is outside a tensor"):
            run.blame("own/w", 3)
        assert run.restore() == 20


def process_may_become_another_rank(directory: Path) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    for number, now in enumerate((rank, RANKS - 1 - rank)):
        dist.init_process_group("gloo", init_method=f"file://{directory}/meet-{number}", rank=now, world_size=RANKS)
        module = torch.nn.Module()
        mesh = init_device_mesh("cpu", (RANKS,))
        module.register_buffer("rows", distribute_tensor(torch.arange(10.0), mesh, [Shard(0)], src_data_rank=None))
        with Checkpointer(directory / str(number), module, process_group=dist.group.WORLD) as run:
            run.save(1)
            module.rows.zero_()
            turned = torch.nn.Module()
            turned.register_buffer("rows", distribute_tensor(torch.zeros(10), mesh, [Replicate()], src_data_rank=None))
        with Checkpointer(directory / str(number), turned, process_group=dist.group.WORLD) as run:
            run.restore()
            assert torch.equal(turned.rows.to_local(), torch.arange(10.0)), turned.rows.to_local()
        dist.barrier()
        if number == 0:
            dist.destroy_process_group()


def run_follows_its_moved_directory(directory: Path) -> None:
    """The run's directory is moved and another run is created at the old path, or the process changes its working
    directory."""
    weight = torch.zeros(100, device=DEVICE)

    def run_at(path: Path | str) -> Checkpointer:
        return Checkpointer(path, extra={"s": {"w": weight}}, rng=False, keep=2, process_group=dist.group.WORLD)

    def saved(run: Checkpointer, step: int, name: str | None = None) -> None:
        weight.fill_(step)
        run.save(step, name=name)

    def found(run: Checkpointer, at: int | str | None = None) -> float:
        run.restore(at)
        return weight[0].item()

    path, moved = directory / "run", directory / "moved"
    if dist.get_rank() == 0:
        # A rank's store may be on another disk.
        (directory / "disk").mkdir()
        path.mkdir()
        (path / "rank-0").symlink_to(directory / "disk")
    dist.barrier()
    with run_at(path) as run:
        saved(run, 1, "best")
        saved(run, 2)
        dist.barrier()
        if dist.get_rank() == 0:
            os.rename(path, moved)
        dist.barrier()
        with run_at(path) as other:
            saved(other, 101)
            saved(run, 3)
            saved(run, 4)
            assert [version.step for version in run.versions()] == [1, 3, 4]
            assert (found(run), found(run, "best"), found(run, 3), found(other)) == (4, 1, 3, 101)
    with run_at(path) as other:
        assert [version.step for version in other.versions()] == [101] and found(other) == 101
    os.chdir(moved.parent)
    with run_at("moved") as run:
        assert (found(run), found(run, "best")) == (4, 1)
        os.chdir("/")
        saved(run, 5)
        assert (found(run), [version.step for version in run.versions()]) == (5, [1, 4, 5])
    with run_at(moved) as run:
        assert (found(run), found(run, "best")) == (5, 1)


def begin_with_one(directory: Path) -> None:
    weight = torch.zeros(100)
    with Checkpointer(directory / "run", extra={"s": {"w": weight}}, rng=False, keep=99,
                      process_group=dist.group.WORLD) as run:
        for step in range(1, 6):
            weight.fill_(step)
            run.save(step)


def continue_with_two_ranks(directory: Path) -> None:
    """The second rank's earlier versions refer to batches of the first rank."""
    weight = torch.zeros(100)
    with Checkpointer(directory / "run", extra={"s": {"w": weight}}, rng=False, keep=99,
                      process_group=dist.group.WORLD) as run:
        run.restore()
        for step in range(6, 11):
            weight.fill_(step)
            run.save(step)
        versions = run.versions()
        if dist.get_rank() == 1:
            assert len({version.lsn for version in versions}) < len(versions)

        def is_good(version: Version) -> bool:
            run.restore(version)
            assert weight[0].item() == version.step
            return version.step < 4

        for good in (1, versions[0], versions[2]):
            assert run.bisect(is_good, good=good).step == 4


def stores_of_former_ranks_are_removed(directory: Path) -> None:
    """This includes stores that a killed process has partly removed."""
    path = directory / "run"
    if dist.get_rank() == 0:
        for left in ("rank-7", "removed-7", "removed-8"):
            (path / left).mkdir(parents=True)
            (path / left / "file").write_bytes(b"left")
    dist.barrier()
    weight = torch.zeros(100, device=DEVICE)
    with Checkpointer(path, extra={"s": {"w": weight}}, rng=False, process_group=dist.group.WORLD) as run:
        run.save(1)
    left = sorted(each.name for each in path.iterdir())
    assert left == ["points", *(f"rank-{rank}" for rank in range(dist.get_world_size()))], left


def ambiguous_redistribution_is_rejected(directory: Path) -> None:
    rank = dist.get_rank()
    pairs = [DeviceMesh(DEVICE, [0, 1]), DeviceMesh(DEVICE, [2, 3])]
    square = init_device_mesh(DEVICE, (2, 2))

    def module(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> torch.nn.Module:
        made = torch.nn.Module()
        made.register_buffer("x", distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None))
        return made

    def restored(into: torch.nn.Module, saved: str, group: Any = None) -> torch.Tensor:
        with Checkpointer(directory / saved, into, process_group=group or dist.group.WORLD) as run:
            run.restore()
        return into.x.to_local()

    def save(name: str, made: torch.nn.Module) -> None:
        with Checkpointer(directory / name, made, process_group=dist.group.WORLD) as run:
            run.save(1)

    # Two pipeline stages have tensors of the same name, as is usual for optimizers.
    stage, numbers = rank // 2, torch.arange(8.0)
    save("stages", module(numbers + 100 * stage, pairs[stage], Shard(0)))
    again = restored(module(numbers * 0, pairs[stage], Shard(0)), "stages")
    assert torch.equal(again, (numbers + 100 * stage).chunk(2)[rank % 2])
    with raises(remanent.NoStateError, "several tensors of this name"):
        restored(module(numbers * 0, pairs[stage], Replicate()), "stages")
    # A part of every other row is not a contiguous box.
    save("rows", module(numbers, square, Shard(0), Shard(0)))
    with raises(remanent.NoStateError, "its parts are not contiguous"):
        restored(module(numbers * 0, square, _StridedShard(0, split_factor=2), Replicate()), "rows")
    # Tensors that only some ranks saved, restored on other ranks.
    for name, tensor in (("rows of two", numbers), ("one number", torch.tensor(3.0))):
        placement = Shard(0) if tensor.ndim else Replicate()
        save(name, module(tensor, pairs[1], placement))
        found = restored(module(tensor * 0, pairs[0], placement), name)
        assert rank > 1 or torch.equal(found, tensor.chunk(2)[rank] if tensor.ndim else tensor), found
    # A process group in which the ranks have other numbers.
    group = dist.new_group([2, 3])
    if rank > 1:
        found = restored(module(numbers * 0, pairs[1], Shard(0)), "rows of two", group)
        assert torch.equal(found, numbers.chunk(2)[rank - 2]), found


def dtensors_are_restored_in_current_layout(directory: Path) -> None:
    flat, square = init_device_mesh(DEVICE, (RANKS,)), init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(60.0).view(10, 6)

    def made(numbers: torch.Tensor) -> torch.nn.Module:
        module = torch.nn.Module()
        for name, mesh, placements in (("rows", flat, [Shard(0)]), ("columns", flat, [Shard(1)]),
                                       ("all", flat, [Replicate()]), ("both", square, [Shard(1), Shard(0)]),
                                       ("some", square, [Replicate(), Shard(0)]),
                                       ("twice", square, [Shard(0), Shard(0)])):
            module.register_buffer(name, distribute_tensor(numbers, mesh, placements))
        return module

    module = made(whole)
    with Checkpointer(directory, module, process_group=dist.group.WORLD) as run:
        run.save(1)
    other = made(torch.zeros_like(whole))
    with Checkpointer(directory, other, process_group=dist.group.WORLD) as run:
        assert run.restore() == 1
        for name, tensor in other.named_buffers():
            assert isinstance(tensor, DTensor)
            assert torch.equal(tensor.to_local(), module.get_buffer(name).to_local()), name
            assert torch.equal(tensor.full_tensor(), whole), name
    # DTensors are restored in the run's current layout, whatever the saved layout was.
    turned = torch.nn.Module()
    for name, mesh, placements in (("rows", square, [Shard(1), Replicate()]), ("columns", flat, [Replicate()]),
                                   ("all", square, [Shard(0), Shard(1)]), ("both", flat, [Shard(0)]),
                                   ("some", square, [Replicate(), Shard(0)]),
                                   ("twice", flat, [Shard(1)])):
        turned.register_buffer(name, distribute_tensor(torch.zeros_like(whole), mesh, placements))
    with Checkpointer(directory, turned, process_group=dist.group.WORLD) as run:
        assert run.restore() == 1
        for name, tensor in turned.named_buffers():
            assert torch.equal(tensor.full_tensor(), whole), name
    with Checkpointer(directory, torch.nn.Module(), process_group=dist.group.WORLD) as run:
        with raises(remanent.InvalidError, "model: the model does not contain all, both, columns"):
            run.restore()
    with Checkpointer(directory, extra={"model": {}}, process_group=dist.group.WORLD) as run:
        with raises(remanent.NoStateError, "on the mesh cpu .4. .*, which the model does not use"):
            run.restore()
    partial = DTensor.from_local(torch.ones(2), flat, [Partial()])
    with Checkpointer(directory, extra={"own": {"sum": partial}}, process_group=dist.group.WORLD) as run:
        with raises(remanent.RefusedError, "own/sum: a DTensor with the placement P"):
            run.save(2)


def begin(directory: Path) -> None:
    training = Training()
    with training.run(directory, keep=1) as run:
        training.step()
        run.save(1, name="first")
        training.step()
        run.save(2)
        if dist.get_rank() == 0:
            torch.save(training.state(DTensor.full_tensor), directory / "expected")
        else:
            training.state(DTensor.full_tensor)


def continue_run(directory: Path) -> None:
    """Continues from the newest version, and from the first one, which four ranks saved."""
    rank, count = dist.get_rank(), dist.get_world_size()
    training = Training()
    torch.manual_seed(100 + rank)
    own_random = torch.get_rng_state()
    with training.run(directory, keep=1) as run:
        before = run.versions()[-1].step
        saved_by = len(json.loads(sorted((directory / "points").iterdir())[-1].read_bytes().splitlines()[1])["parts"])
        assert run.restore() == before
        assert same(training.state(DTensor.full_tensor), torch.load(directory / "expected"))
        assert training.own["rank"] == rank % saved_by
        if rank >= saved_by:
            assert torch.equal(torch.get_rng_state(), own_random)
        if count != 4:
            with raises(remanent.RefusedError, "the version has 4 ranks, but the run has"):
                run.fork(directory / "fork", "first")
        assert run.restore("first") == 1
        assert run.restore(before) == before
        training.own["rank"] = rank
        training.step()
        dist.barrier()
        run.save(before + 1)
        state = training.state(DTensor.full_tensor)
        if rank == 0:
            torch.save(state, directory / "expected")
        # A process that is killed while it removes the store of a former rank leaves such a directory.
        (directory / "removed-7").mkdir(exist_ok=True)
        if before == 5:
            # After this, no version has more ranks than the current run.
            run.give_up("first")
            run.save(before + 2)
            dist.barrier()
            assert sorted(path.name for path in directory.glob("r*-*")) == [f"rank-{each}" for each in range(count)]


class OfDcp(Training):
    """A `Training` that torch.distributed.checkpoint saves and loads."""

    def dcp_state(self) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def load(self, path: Path) -> None:
        # If the optimizer has made no step, `get_state_dict` creates the state that is loaded into.
        state = self.dcp_state()
        dcp.load(state, storage_reader=StorageReader(path))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])

    def save(self, path: Path) -> None:
        """Saves this state, and the complete tensors with which a later load is compared."""
        dcp.save(self.dcp_state(), storage_writer=StorageWriter(path))
        state = self.state(DTensor.full_tensor)
        if dist.get_rank() == 0:
            torch.save(state, path.with_name(f"all of {path.name}"))
        dist.barrier()


def begin_dcp(directory: Path) -> None:
    training = OfDcp()
    for _ in range(3):
        training.step()
    training.save(directory / "0")


def continue_dcp(directory: Path) -> None:
    """Continues from the last save of a different number of ranks."""
    newest = max(int(path.name) for path in directory.iterdir() if path.name.isdecimal())
    training = OfDcp()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.to_local().fill_(9)
    training.load(directory / f"{newest}")
    expected = torch.load(directory / f"all of {newest}")
    assert same(training.state(DTensor.full_tensor), expected)
    training.step()
    assert not same(training.state(DTensor.full_tensor), expected)
    training.save(directory / f"{newest + 1}")


def load_dcp_unsharded(directory: Path) -> None:
    """A model that is not sharded loads everything that the ranks saved."""
    model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, storage_reader=StorageReader(directory / "3"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = [parameter.detach() for parameter in model.parameters()]
    for each in optimizer.state.values():
        found += [each["exp_avg"], each["exp_avg_sq"], each["step"]]
    assert same(found, torch.load(directory / "all of 3"))


class HostScratch(gpu_scratch.Scratch):
    """Scratch memory on the host, where a restore needs none."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        self._pool = None
        self._divide(torch.zeros(sum(length + 256 for length in lengths.values()), dtype=torch.uint8), lengths)


class Copies:
    """Equal models on all ranks, a buffer that differs, and a record of the pages that this rank loads."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6))).to(DEVICE)
        self.model.register_buffer("rank", torch.full((5,), dist.get_rank(), device=DEVICE))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()
        # Ranks may have tensors of their own, which change the layout of the memory for a restore.
        self.own: dict[str, Any] = {"w": torch.ones(500 * dist.get_rank(), device=DEVICE)}
        self.run = Checkpointer(directory, self.model, self.optimizer, extra={"own": self.own},
                                process_group=dist.group.WORLD, replicated=True, rng=False, **options)

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.linspace(-1, 1, parameter.numel(), device=DEVICE).view(parameter.shape)
        self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        found = [each.detach().clone() for each in self.model.state_dict().values()]
        for each in self.optimizer.state.values():
            found += [each["exp_avg"].clone(), each["exp_avg_sq"].clone(), each["step"].clone()]
        return found

    def restored(self) -> list[int]:
        """Restores the newest version and returns the number of bytes that each rank loaded."""
        loaded: list[int] = []

        class Recorded:
            def __init__(self, view: Any) -> None:
                self._view = view

            def __getattr__(self, name: str) -> Any:
                return getattr(self._view, name)

            def __contains__(self, key: str) -> bool:
                return key in self._view

            def __getitem__(self, key: str) -> bytes:
                return bytes(self._view[key])

            def load(self, pages: Any, device: str = "host") -> None:
                loaded.append(sum(each.numel() for each in pages.values()))
                self._view.load(pages, device)

        class Patched(restoration.Restoration):
            def __init__(self, views: Any, *rest: Any, **options: Any) -> None:
                views.own = Recorded(views.own)
                super().__init__(views, *rest, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpointer, "Restoration", Patched)
            patch.setattr(replicas, "_BYTES_MIN", 0)
            patch.setattr(replicas, "_ROUND_LEN", 5000)
            patch.setattr(replicas, "_RATE_MIN", 0)
            if DEVICE == "cpu":
                patch.setattr(restoration, "scratch_for", lambda device, lengths: HostScratch(lengths))
            self.run.restore()
        all_loaded: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_loaded, sum(loaded))
        return all_loaded

    def spoil(self) -> None:
        for each in self.model.state_dict().values():
            each.zero_()
        for of_parameter in self.optimizer.state.values():
            of_parameter["exp_avg"].fill_(7)


def replicas_load_shares_and_exchange_them(directory: Path) -> None:
    ranks = dist.get_world_size()
    copies = Copies(directory)
    copies.run.save(1)
    saved = copies.state()
    nbytes = sum(each.nbytes for each in saved)
    copies.spoil()
    loaded = copies.restored()
    assert same(copies.state(), saved)
    # Each equal page is loaded by one rank.
    own = 4 * 500 * (ranks - 1)
    assert nbytes <= sum(loaded) < 1.2 * nbytes + ranks * own and max(loaded) < 1.5 * nbytes / ranks + own, loaded


def page_that_arrives_damaged_is_loaded(directory: Path) -> None:
    copies = Copies(directory)
    copies.run.save(1)
    saved = copies.state()
    copies.spoil()
    broadcast = dist.broadcast

    def damaging(memory: torch.Tensor, source: int, *rest: Any, **options: Any) -> Any:
        sent = broadcast(memory, source, *rest, **options)
        if source != dist.get_rank() and dist.get_rank() == 1:
            sent.wait()
            memory[len(memory) // 2] ^= 1
        return sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", damaging)
        loaded = copies.restored()
    assert same(copies.state(), saved)
    assert loaded[1] > loaded[0]


def damaged_share_of_one_rank_changes_nothing(directory: Path) -> None:
    copies = Copies(directory)
    copies.run.save(1)
    saved = copies.state()
    copies.step()
    now = copies.state()
    if dist.get_rank() == 1:
        damage_newest_images(directory / "rank-1")
    dist.barrier()
    with raises(remanent.DamagedError, "" if dist.get_rank() == 1 else "rank 1: "):
        copies.restored()
    assert same(copies.state(), now) and not same(now, saved)


def diverged_replicas_are_named_and_not_saved(directory: Path) -> None:
    last = dist.get_world_size() - 1
    copies = Copies(directory, compare_every=2)
    copies.run.save(1)
    copies.run.save(2)
    exp_avg = next(iter(copies.optimizer.state.values()))["exp_avg"]
    changed = [(copies.model[2].weight.detach()[3, 4:6], 2.5), (exp_avg[0, :1], 3.5)]
    before = [each.clone() for each, _ in changed]
    if dist.get_rank() == last:
        for each, value in changed:
            each.fill_(value)
    # Only every second save compares.
    copies.run.save(3)
    with pytest.raises(remanent.ReplicasDivergedError) as raised:
        copies.run.save(4)
    others = list(range(last))
    names = {each.name: (each.groups, each.differing, each.first) for each in raised.value.tensors}
    assert names == {"model/2.weight": ([others, [last]], [0] * last + [2], 100),
                     "optimizer/state/0/exp_avg": ([others, [last]], [0] * last + [1], 0)}, names
    assert "model/2.weight" in str(raised.value) and copies.run.versions()[-1].step == 3
    # The next save compares again.
    with pytest.raises(remanent.ReplicasDivergedError):
        copies.run.save(4)
    for (each, _), old in zip(changed, before, strict=True):
        each.copy_(old)
    copies.run.save(4)
    copies.run.save(5)
    assert copies.run.versions()[-1].step == 5


def failed_save_keeps_comparisons_in_step(directory: Path) -> None:
    copies = Copies(directory, compare_every=2)
    copies.run.save(1)
    if dist.get_rank() == 1:
        copies.own["odd"] = threading.Lock()
    with raises(remanent.RefusedError, "lock cannot be stored"):
        copies.run.save(2)
    copies.own.pop("odd", None)
    # One rank cannot begin, and the others wait for it with their comparison.
    with raises(remanent.InvalidError, "step: -3 is below 0"):
        copies.run.save(-3 if dist.get_rank() == 1 else 3)
    for step in range(4, 8):
        copies.run.save(step)
    assert copies.run.versions()[-1].step == 7


def ranks_agree_on_being_replicas(directory: Path) -> None:
    is_first = dist.get_rank() == 0
    for options in ({"replicated": is_first}, {"replicated": True, "compare_every": 2 if is_first else None}):
        with raises(remanent.InvalidError, "rank [0-3] passed True"):
            Checkpointer(directory, torch.nn.Linear(2, 1), process_group=dist.group.WORLD, **options)


Check = Callable[[Path], None]
# The stages of each check: the number of ranks, and the function that they run.
CHECKS: dict[str, list[tuple[int, Check]]] = {check.__name__: [(RANKS, check)] for check in (
    restored_run_continues_bit_for_bit,
    every_save_option_restores_all_parts,
    rejection_on_one_rank_saves_nothing,
    busy_save_is_refused_on_all_ranks_or_none,
    damage_on_one_rank_changes_no_rank,
    damaged_point_is_not_skipped,
    swapped_stores_of_ranks_are_detected,
    unsuitable_directories_are_rejected,
    failure_on_one_rank_keeps_ranks_in_step,
    bisect_tests_versions_on_all_ranks,
    process_may_become_another_rank,
    run_follows_its_moved_directory,
    stores_of_former_ranks_are_removed,
    ambiguous_redistribution_is_rejected,
    dtensors_are_restored_in_current_layout,
    replicas_load_shares_and_exchange_them,
    page_that_arrives_damaged_is_loaded,
    damaged_share_of_one_rank_changes_nothing,
    diverged_replicas_are_named_and_not_saved,
    failed_save_keeps_comparisons_in_step,
    ranks_agree_on_being_replicas,
)}
CHECKS["dcp_loads_fsdp_model_with_other_rank_counts"] = [
    (2, begin_dcp), (1, continue_dcp), (4, continue_dcp), (3, continue_dcp), (1, load_dcp_unsharded)]
CHECKS["new_ranks_find_earlier_versions"] = [(1, begin_with_one), (2, continue_with_two_ranks)]
CHECKS["number_of_ranks_may_change"] = [
    (4, begin), (3, continue_run), (1, continue_run), (4, continue_run), (2, continue_run)]
ON_GPUS = ("restored_run_continues_bit_for_bit", "every_save_option_restores_all_parts",
           "damaged_point_is_not_skipped", "replicas_load_shares_and_exchange_them",
           "page_that_arrives_damaged_is_loaded", "diverged_replicas_are_named_and_not_saved")


def main(directory: Path, names: list[str]) -> None:
    def work(rank: int, count: int, check: Check, meeting: Path, of_check: Path) -> int:
        if DEVICE == "cuda":
            torch.cuda.set_device(rank)
        backend = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=count)
        check(of_check)
        # No rank exits before all ranks have finished.
        dist.barrier()
        return 0

    for name in names or (CHECKS if DEVICE == "cpu" else ON_GPUS):
        of_check = directory / name
        of_check.mkdir(parents=True)
        ends: list[list[int]] = []
        for number, (count, check) in enumerate((CHECKS | rank_archives.CHECKS)[name]):
            meeting = directory / f"meet-{name}-{number}"
            ranks = [forked(functools.partial(work, rank, count, check, meeting, of_check)) for rank in range(count)]
            ends.append([ended(pid) for pid in ranks])
        print(name, "fine" if not any(map(any, ends)) else f"ended with {ends}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[2]), sys.argv[3:])
