"""Progress bars on standard error, for long work."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, TypeVar

# The delay in seconds before a bar is shown: shorter work needs none.
_DELAY = 1.0


class _Sized(Protocol):
    """A piece of work with a number of bytes."""

    @property
    def nbytes(self) -> int: ...


_S = TypeVar("_S", bound=_Sized | None)


class Bar:
    """A progress bar that counts up to `total` bytes.

    :param shown: False shows no bar. None or True shows one if standard error is a terminal and tqdm is installed.
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
        if self._bar is not None:
            self._bar.update(count)

    def counting(self, pieces: Iterable[_S]) -> Iterator[_S]:
        """Yields the pieces. Each piece counts as done when the next one is requested."""
        for piece in pieces:
            yield piece
            if piece is not None:
                self.add(piece.nbytes)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()
