"""Progress of long work on a terminal's standard error, where tqdm is installed; nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, TypeVar

# Seconds before a bar is drawn: what is over by then needs none.
_DELAY = 1.0


class _Sized(Protocol):
    """What is done piece by piece, each of some bytes."""

    @property
    def nbytes(self) -> int: ...


_S = TypeVar("_S", bound=_Sized | None)


class Bar:
    """A bar that counts to `total` bytes.

    :param shown: False draws none; None draws one if standard error is a terminal and tqdm is there.
    """

    def __init__(self, total: int, what: str, shown: bool | None = None) -> None:
        self._bar: Any = None
        if shown is False or sys.stderr is None or not sys.stderr.isatty():
            return
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, delay=_DELAY, leave=False,
                         file=sys.stderr)

    def add(self, count: int) -> None:
        """Notes that `count` more bytes are done."""
        if self._bar is not None:
            self._bar.update(count)

    def counting(self, pieces: Iterable[_S]) -> Iterator[_S]:
        """The pieces, each of which is done once the next one is asked for."""
        for piece in pieces:
            yield piece
            if piece is not None:
                self.add(piece.nbytes)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()
