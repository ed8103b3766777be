"""Read-only dicts and lists for copies of a store's contents, so that changes to a copy are not lost silently."""

from __future__ import annotations

from typing import Any, NoReturn

from remanent._store.errors import InvalidTypeError


def freeze(copy: Any, what: str, instead: str) -> Any:
    """Returns `copy` with read-only dicts and lists in place of its dicts and lists.

    :param what: a description of the copy, for the error.
    :param instead: how to change the original, for the error.
    """
    if isinstance(copy, dict):
        return ReadOnlyDict({name: freeze(value, what, instead) for name, value in copy.items()}, what, instead)
    if isinstance(copy, list):
        return ReadOnlyList((freeze(value, what, instead) for value in copy), what, instead)
    return copy


class _ReadOnly:
    """Raises `InvalidTypeError` for each method that changes a dict or list. Copies and unpickled values can be
    changed."""

    _what: str
    _instead: str

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise InvalidTypeError(f"{self._what} is a read-only copy; {self._instead}", remedy=self._instead)

    __setitem__ = __delitem__ = __ior__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = popitem = remove = reverse = setdefault = sort = update = _refuse


class ReadOnlyDict(_ReadOnly, dict[str, Any]):
    """A dict whose methods for changes raise `InvalidTypeError`."""

    def __init__(self, items: dict[str, Any], what: str, instead: str) -> None:
        dict.__init__(self, items)
        self._what, self._instead = what, instead

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


class ReadOnlyList(_ReadOnly, list[Any]):
    """A list whose methods for changes raise `InvalidTypeError`."""

    def __init__(self, items: Any, what: str, instead: str) -> None:
        list.__init__(self, items)
        self._what, self._instead = what, instead

    def __reduce__(self) -> tuple[Any, ...]:
        return (list, (list(self),))
