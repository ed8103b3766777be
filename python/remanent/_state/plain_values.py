"""Converts plain values to JSON and back. Covers the values that `_native.flatten` leaves to Python, and dict keys.

A value is restored with the same bits and type, or is rejected by its path. JSON of the form `{"$": [kind, …]}`
represents such a value. A mutable container in several places of a state is stored once and restored as a single
object. A container that contains itself is rejected. `user_types` handles classes that a program defines.
"""

from __future__ import annotations

import base64
import datetime
import io
import pathlib
import struct
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from remanent._state import user_types
from remanent._state.user_types import Encoded
from remanent._store.errors import DamagedError, NoStateError, RefusedError

TAG = "$"
# Larger whole numbers are not stored as JSON numbers: readers of other languages lose their last digits.
_INT_MAX = 1 << 53
# Beyond this many bits Python neither writes nor parses decimals.
_DECIMAL_BITS_MAX = 4096
_DEPTH_MAX = 100
# The NaN that `float("nan")` creates.
_NAN_BITS = 0x7FF8 << 48
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
# The supported values of `default_factory` of a defaultdict, by name. Functions are not supported, because they cannot
# be stored.
_FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set,
                                     frozenset, Counter, OrderedDict, deque)}


class _Kind(NamedTuple):
    """The conversion of values of one type. The tag of such a value begins with the type's name."""

    # Returns what follows the name in the tag: plain JSON, and the content for the walk, or None.
    encode: Callable[[str, Any], tuple[list[Any], Any]]
    decode: Callable[..., Any]
    is_mutable: bool = False
    has_content: bool = False


def encode_or_leave(path: str, value: Any) -> Any:
    """Encodes a value as `encode` does, but omits values that cannot be stored. Used to search a state for tensors."""
    try:
        return encode(path, value) or {}
    except RefusedError:
        return {}


def encode(path: str, value: Any) -> Encoded | None:
    """Returns the first elements of a value's tag, the content that the native code writes after them (or None), and
    whether the value is a mutable container. Returns None for an unknown type.

    :raises RefusedError: the value could not be restored exactly. The message names its path.
    """
    kind = _KINDS.get(type(value))
    if kind is not None:
        head, content = kind.encode(path, value)
        return Encoded([type(value).__name__, *head], content, kind.is_mutable)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return Encoded(_numpy_scalar(path, value, numpy), None, False)
    return user_types.encode(path, value, _plain)


def key(path: str, value: Any, depth: int = 0) -> Any:
    """Returns the JSON of a dict key or a set element.

    :raises RefusedError: the key is not a plain value. The message names the path of its container.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        if abs(value) <= _INT_MAX:
            return value
        return {TAG: ["int", str(value) if value.bit_length() <= _DECIMAL_BITS_MAX else hex(value)]}
    if depth > _DEPTH_MAX:
        raise _refused(path, f"values are nested more than {_DEPTH_MAX} levels deep")
    if kind is tuple:
        return {TAG: ["tuple", [key(path, each, depth + 1) for each in value]]}
    # A dict can contain several NaN keys, which a restore could not distinguish.
    if value != value:
        raise _refused(path, "a NaN as a key cannot be stored")
    if kind is float:
        return _number(value)
    encoded = encode(path, value)
    if encoded is None or encoded.is_mutable:
        raise _refused(path, f"a {kind.__name__} as a key cannot be stored")
    if encoded.content is None:
        return {TAG: encoded.head}
    # A slice or a named tuple, whose content is a list.
    return {TAG: [*encoded.head, [key(path, each, depth + 1) for each in encoded.content]]}


class Decoder:
    """Decodes the JSON of a state. A single call of `value` must decode all of it."""

    def __init__(self, adapt: Callable[[list[Any]], Any]) -> None:
        self._adapt = adapt
        # The containers in the order in which the walk visited them.
        self._containers: list[Any] = []

    def value(self, held: Any) -> Any:
        if isinstance(held, list):
            items: list[Any] = []
            self._containers.append(items)
            items.extend([self.value(each) for each in held])
            return items
        if not isinstance(held, dict):
            return held
        if TAG not in held:
            made: dict[Any, Any] = {}
            self._containers.append(made)
            for name, each in held.items():
                made[name] = self.value(each)
            return made
        return self._tagged(held[TAG])

    def _tagged(self, tag: list[Any]) -> Any:
        name, *rest = tag
        if name == "tuple":
            return tuple([self.value(each) for each in rest[0]])
        if name == "int":
            return int(rest[0], 16 if "x" in rest[0] else 10)
        if name == "float":
            return _float(rest[0])
        if name in ("dict", "OrderedDict"):
            return self._items(name, *rest)
        if name == "same":
            if not 0 <= rest[0] < len(self._containers):
                raise DamagedError(f"the tree refers to container {rest[0]}, but contains only {len(self._containers)}",
                                   remedy="restore an earlier version")
            return self._containers[rest[0]]
        kind = _BY_NAME.get(name)
        if kind is None:
            return self._adapt(tag)
        number = len(self._containers)
        if kind.is_mutable:
            self._containers.append(None)
        content = [self.value(rest.pop())] if kind.has_content else []
        made = kind.decode(*map(self._plain, rest), *content)
        if kind.is_mutable:
            self._containers[number] = made
        return made

    def _plain(self, held: Any) -> Any:
        """Decodes a value whose containers have no numbers in the tree."""
        return Decoder(self._adapt).value(held)

    def _items(self, name: str, items: list[Any], attributes: Any = None) -> Any:
        made: Any = OrderedDict() if name == "OrderedDict" else {}
        self._containers.append(made)
        for held, each in items:
            made[self._plain(held)] = self.value(each)
        if attributes is not None:
            made.__dict__.update(self.value(attributes))
        return made


def unknown(tag: list[Any]) -> Any:
    """Raises `NoStateError` for a tag of an unknown kind."""
    raise NoStateError(f"the version contains a value of kind {tag[0]!r}, which this release of remanent does not know",
                       remedy="use the release that saved the version, or a later one")


def _refused(path: str, reason: str) -> RefusedError:
    return RefusedError(f"{path.removeprefix('/')}: {reason}",
                        remedy="store its contents as plain values, or remove it from the state")


def _plain(path: str, value: Any) -> Any:
    return _number(value) if type(value) is float else key(path, value)


def _number(number: float) -> Any:
    """Returns a float as JSON. Infinities and NaNs, which JSON cannot represent, become a tag."""
    return number if abs(number) < float("inf") else {TAG: ["float", float_text(number)]}


def float_text(number: float) -> str:
    """Returns a float as text that preserves all bits, including those of a NaN."""
    [bits] = struct.unpack("<Q", struct.pack("<d", number))
    return repr(number) if number == number or bits == _NAN_BITS else f"nan:{bits:016x}"


def _float(text: str) -> float:
    name, _, bits = text.partition(":")
    if not bits:
        return float(name)
    number: float = struct.unpack("<d", struct.pack("<Q", int(bits, 16)))[0]
    return number


def _text(content: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(content).decode()



def _defaultdict(path: str, value: defaultdict[Any, Any]) -> tuple[list[Any], Any]:
    factory = value.default_factory
    if factory is None:
        return [None], dict(value)
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        kinds = ", ".join(_FACTORIES)
        raise RefusedError(f"{path.removeprefix('/')}: a defaultdict that calls {factory!r} cannot be stored",
                           remedy=f"store dict(value), or use one of {kinds} as its default_factory")
    return [name], dict(value)


def _made_defaultdict(name: str | None, items: dict[Any, Any]) -> defaultdict[Any, Any]:
    if name is not None and name not in _FACTORIES:
        raise DamagedError(f"a defaultdict in the tree has the unknown default_factory {name!r}",
                           remedy="restore an earlier version")
    return defaultdict(None if name is None else _FACTORIES[name], items)


def _without_attributes(path: str, value: Any) -> None:
    if getattr(value, "__dict__", None):
        names = ", ".join(sorted(value.__dict__))
        raise _refused(path, f"a {type(value).__name__} with attributes of its own ({names}) cannot be stored")


def _counter(path: str, value: Any) -> tuple[list[Any], Any]:
    _without_attributes(path, value)
    return [], dict(value)


def _made_counter(items: dict[Any, Any]) -> Any:
    made: Any = Counter()
    # `dict.update` sets the counts unchanged, whereas `Counter.update` would add them.
    dict.update(made, items)
    return made


def _elements(path: str, value: Any) -> tuple[list[Any], Any]:
    import json

    # The order of a set may differ in each process. Sort the elements, so that equal sets have equal JSON.
    return [sorted((key(path, each) for each in value), key=json.dumps)], None


def _bytes_io(path: str, value: io.BytesIO) -> tuple[list[Any], Any]:
    if value.closed:
        raise _refused(path, "a closed BytesIO cannot be stored")
    _without_attributes(path, value)
    return [_text(value.getbuffer()), value.tell()], None


def _made_bytes_io(text: str, position: int) -> io.BytesIO:
    made = io.BytesIO(base64.b64decode(text))
    made.seek(position)
    return made


def _zone(path: str, zone: Any) -> Any:
    if zone is None:
        return None
    if type(zone) is not datetime.timezone:
        raise _refused(path, f"a time in the zone {zone!r} cannot be stored; use datetime.timezone")
    return {TAG: ["timezone", *_timezone(path, zone)[0]]}


def _timezone(path: str, value: Any) -> tuple[list[Any], Any]:
    offset, *name = value.__getinitargs__()
    return [_timedelta(path, offset)[0], *name], None


def _timedelta(path: str, value: datetime.timedelta) -> tuple[list[Any], Any]:
    return [value.days, value.seconds, value.microseconds], None


def _datetime(path: str, value: datetime.datetime) -> tuple[list[Any], Any]:
    return [value.year, value.month, value.day, *_clock(path, value)], None


def _time(path: str, value: datetime.time) -> tuple[list[Any], Any]:
    return _clock(path, value), None


def _clock(path: str, value: Any) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, _zone(path, value.tzinfo), value.fold]


def _fraction(path: str, value: Fraction) -> tuple[list[Any], Any]:
    return [key(path, value.numerator), key(path, value.denominator)], None


def _uuid(path: str, value: uuid.UUID) -> tuple[list[Any], Any]:
    return [value.hex, value.is_safe.name], None


def _numpy_scalar(path: str, value: Any, numpy: Any) -> list[Any]:
    """Returns the tag of a NumPy scalar, which contains the scalar's bytes. Types of ml_dtypes are named as in that
    module."""
    kind, dtype = type(value), value.dtype
    if kind is numpy.str_:
        return ["numpy_str", str.__str__(value)]
    if kind is numpy.bytes_:
        return ["numpy_bytes", _text(value)]
    name = kind.__name__ if kind.__module__ == "ml_dtypes" else dtype.str
    if kind in (numpy.longdouble, numpy.clongdouble):
        raise _refused(path, f"a NumPy scalar of type {kind.__name__} cannot be stored, because its bits depend on the "
                       "platform")
    if dtype.kind in "VOUS" and kind.__module__ != "ml_dtypes" or numpy_dtype(name).type is not kind:
        raise _refused(path, f"a NumPy scalar of type {kind.__name__} cannot be stored")
    return ["numpy", name, value.tobytes().hex()]


def numpy_dtype(name: str) -> Any:
    """Returns the dtype with a name from a version: a NumPy dtype, or one of ml_dtypes if the program has imported that
    package.

    :raises NoStateError: the program has not imported ml_dtypes.
    """
    import numpy

    if not name.isidentifier():
        return numpy.dtype(name)
    found = getattr(sys.modules.get("ml_dtypes"), name, None)
    if found is None:
        raise NoStateError(f"the version contains elements of ml_dtypes.{name}, but the program has not imported ml_dtypes",
                           remedy="import ml_dtypes before the restore")
    return numpy.dtype(found)


def _made_numpy(name: str, content: str) -> Any:
    import numpy

    return numpy.frombuffer(bytes.fromhex(content), numpy_dtype(name))[0]


def _made_scalar(name: str, value: Any) -> Any:
    """Decodes a scalar of an older version, which contains the value instead of the bytes."""
    import numpy

    return numpy.dtype(name).type(value)


def _made_numpy_str(text: str) -> Any:
    import numpy

    return numpy.str_(text)


def _made_numpy_bytes(text: str) -> Any:
    import numpy

    return numpy.bytes_(base64.b64decode(text))


_KINDS: dict[type, _Kind] = {
    bytes: _Kind(lambda path, value: ([_text(value)], None), base64.b64decode),
    bytearray: _Kind(lambda path, value: ([_text(value)], None), lambda text: bytearray(base64.b64decode(text)), True),
    complex: _Kind(lambda path, value: ([float_text(value.real), float_text(value.imag)], None),
                   lambda real, imag: complex(_float(real), _float(imag))),
    defaultdict: _Kind(_defaultdict, _made_defaultdict, True, True),
    Counter: _Kind(_counter, _made_counter, True, True),
    deque: _Kind(lambda path, value: ([value.maxlen], list(value)), lambda maxlen, items: deque(items, maxlen), True,
                 True),
    set: _Kind(_elements, set, True),
    frozenset: _Kind(_elements, frozenset),
    range: _Kind(lambda path, value: ([key(path, each) for each in (value.start, value.stop, value.step)], None),
                 range),
    slice: _Kind(lambda path, value: ([], [value.start, value.stop, value.step]), lambda given: slice(*given), False,
                 True),
    io.BytesIO: _Kind(_bytes_io, _made_bytes_io, True),
    datetime.timedelta: _Kind(_timedelta, datetime.timedelta),
    datetime.timezone: _Kind(_timezone, lambda offset, *name: datetime.timezone(datetime.timedelta(*offset), *name)),
    datetime.date: _Kind(lambda path, value: ([value.year, value.month, value.day], None), datetime.date),
    datetime.time: _Kind(_time, lambda *given: datetime.time(*given[:-1], fold=given[-1])),
    datetime.datetime: _Kind(_datetime, lambda *given: datetime.datetime(*given[:-1], fold=given[-1])),
    Decimal: _Kind(lambda path, value: ([str(value)], None), Decimal),
    Fraction: _Kind(_fraction, Fraction),
    uuid.UUID: _Kind(_uuid, lambda text, is_safe: uuid.UUID(text, is_safe=uuid.SafeUUID[is_safe])),
    **{kind: _Kind(lambda path, value: ([str(value)], None), kind) for kind in _PATHS},
}
# Kinds whose tags are not the name of a type.
_OTHERS: dict[str, Callable[..., Any]] = {
    "numpy": _made_numpy, "numpy_str": _made_numpy_str, "numpy_bytes": _made_numpy_bytes, "scalar": _made_scalar,
    **user_types.DECODERS}
_BY_NAME: dict[str, _Kind] = {kind.__name__: how for kind, how in _KINDS.items()} | {
    name: _Kind(lambda path, value: ([], None), made, name in user_types.MUTABLE, name in user_types.WITH_CONTENT)
    for name, made in _OTHERS.items()}
