"""Exchanges messages between the ranks of a process group."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from remanent._store import errors
from remanent._store.errors import Error, InvalidError, RankFailedError

_T = TypeVar("_T")

# The longest wait for another rank, which may be writing its part to a slow disk.
TIMEOUT = datetime.timedelta(minutes=30)


class Ranks:
    """The ranks of a process group. All ranks must call the same methods in the same order.

    Messages use a separate Gloo group over the network, so that messages from another thread do not interfere with the
    collectives of the training. Messages are JSON, and nothing is unpickled. If two ranks make different calls, they
    leave the group, after which all communication fails immediately.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise InvalidError("process_group: this process is not a member of the group")
        # The current operation, which must be the same on all ranks.
        self.doing = "begin"
        self._group: Any = None
        try:
            members = dist.get_process_group_ranks(process_group)
            self.rank = dist.get_rank(process_group)
            self.count = len(members)
            # Torch reuses its own names for groups. A new group would therefore find the store entries of a destroyed
            # group of the same ranks.
            store = PrefixStore(f"remanent/{members}", _get_default_store())
            number = store.add(f"made by {self.rank}", 1)
            self._group = dist.ProcessGroupGloo(PrefixStore(str(number), store), self.rank, self.count, TIMEOUT)
        except (KeyError, RuntimeError, ValueError) as error:
            raise _unreachable() from error

    def gather(self, said: Any) -> list[Any]:
        """Returns the values that all ranks passed as `said`, in rank order."""
        own = _bytes_of([self.doing, said])
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.count)]
        self._all(lambda group: group.allgather([lengths], [torch.tensor([len(own)], device="cpu")]))
        padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8, device="cpu")
        padded[: len(own)] = own
        gathered = [torch.zeros_like(padded) for _ in range(self.count)]
        self._all(lambda group: group.allgather([gathered], [padded]))
        told = [_value_of(each[: int(length)]) for each, length in zip(gathered, lengths, strict=True)]
        for rank, (doing, _) in enumerate(told):
            self._check(rank, doing)
        return [said for _, said in told]

    def _check(self, rank: int, doing: str) -> None:
        """Leaves the group and raises an error if another rank makes another call."""
        if doing != self.doing:
            self.end()
            raise RankFailedError(f"rank {rank} tried to {doing}, but rank {self.rank} to {self.doing}", rank=rank,
                                  remedy="make the same calls on all ranks; restart all ranks and restore")

    def tell(self, said: Any) -> Any:
        """Returns the value that the first rank passed as `said`."""
        own = _bytes_of([self.doing, said] if self.rank == 0 else None)
        length = torch.tensor([len(own)], device="cpu")
        self._all(lambda group: group.broadcast([length]))
        told = own if self.rank == 0 else torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        self._all(lambda group: group.broadcast([told]))
        doing, value = _value_of(told)
        self._check(0, doing)
        return value

    def _all(self, begin: Callable[[Any], Any]) -> None:
        """Runs one collective. If the collective fails or is interrupted, the next one would not match those of other
        ranks, so this rank leaves the group."""
        if self._group is None:
            raise _unreachable()
        try:
            begin(self._group).wait()
        except RuntimeError as error:
            self.end()
            raise _unreachable() from error
        except BaseException:
            self.end()
            raise

    def by_first(self, work: Callable[[], Any]) -> Any:
        """Runs `work` on the first rank and returns its JSON result on all ranks. If `work` fails, all ranks raise an
        error."""
        failure: BaseException | None = None
        said = None
        if self.rank == 0:
            try:
                said = {"done": work()}
            except BaseException as error:
                failure, said = error, {"failed": described(error)}
        said = self.tell(said)
        if failure is not None:
            raise failure
        if "failed" in said:
            raise failure_of(0, said["failed"])
        return said["done"]

    def all_or_none(self, work: Callable[[], _T]) -> _T:
        """Returns the result of `work` on this rank. If `work` fails on any rank, all ranks raise an error."""
        failure: BaseException | None = None
        try:
            done = work()
        except BaseException as error:
            failure = error
        failures = self.gather(None if failure is None else described(failure))
        if failure is not None:
            raise failure
        raise_first(failures)
        return done

    def end(self) -> None:
        """Leaves the group. Later messages of the other ranks fail."""
        self._group = None


def described(error: BaseException) -> dict[str, Any]:
    """Returns a failure and its attributes as JSON values, to send to other ranks."""
    said = {"kind": type(error).__name__, "message": str(error), "details": {}}
    if isinstance(error, Error):
        said["details"] = {name: value for name, value in error.__dict__.items()
                           if name != "message" and isinstance(value, (str, int, float, type(None)))}
    return said


def failure_of(rank: int, said: dict[str, Any]) -> Error:
    """Returns the failure of another rank as an exception, with the same class if the class belongs to this package."""
    kind = getattr(errors, said["kind"], None) if said["kind"] in errors.__all__ else None
    if kind is not None:
        error: Error = kind(f"rank {rank}: {said['message']}", **said["details"])
        return error
    message = f"rank {rank}: {said['kind']}: {said['message']}"
    return RankFailedError(message, remedy="see the error of that rank", rank=rank)


def raise_first(failures: list[dict[str, Any] | None]) -> None:
    """Raises the failure of the first rank that failed, if any."""
    for rank, said in enumerate(failures):
        if said is not None:
            raise failure_of(rank, said)


def _unreachable() -> RankFailedError:
    return RankFailedError("another rank has ended or cannot be reached", remedy="restart all ranks and restore",
                           rank=None)


def _bytes_of(said: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(said, separators=(",", ":")).encode()), dtype=torch.uint8)


def _value_of(told: torch.Tensor) -> Any:
    return json.loads(bytes(told.numpy()))
