"""Progress bars that draw nothing and record their updates, for tests of what is counted."""

from __future__ import annotations

from remanent._util.progress import Bar

# The label of a bar, its total, its `shown` argument, and the amounts that were added.
Made = tuple[str, int, bool | None, list[int]]


def counted(made: list[Made]) -> type[Bar]:
    """Returns a class of bars that records each instance."""

    class Counted(Bar):
        def __init__(self, total: int, what: str, shown: bool | None = None) -> None:
            super().__init__(total, what, False)
            self.counts: list[int] = []
            made.append((what, total, shown, self.counts))

        def add(self, count: int) -> None:
            self.counts.append(count)

    return Counted
