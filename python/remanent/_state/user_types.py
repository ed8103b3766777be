"""Encodes values of classes that a program defines: named tuples, enum members, dataclasses, and subclasses of numbers
and strings.

A version contains the name of such a class, `module:qualified name`. The class is looked up only in modules that the
program has already imported, so a restore imports no module and runs no code named in a version. The class must be of
the same kind, with the same fields or members. Instances are created without calling the class. A value with additional
state, which would be lost, is rejected when it is saved.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from remanent._store.errors import NoStateError, RefusedError

# Base types, and functions that return the plain value with the base's own method, which a class may override.
_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__, float: float.__float__, str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None))}
# The type flag Py_TPFLAGS_HEAPTYPE, which is set for classes defined in Python.
_DEFINED_IN_PYTHON = 1 << 9
_AS_THEN = "import the module, with the class as it was when the version was saved, before the restore"


class Encoded(NamedTuple):
    """An encoded value: the first elements of its tag, and the content that becomes the tag's last element."""

    head: list[Any]
    content: Any
    is_mutable: bool


# Converts a plain value to JSON; errors name the path.
Code = Callable[[str, Any], Any]


def encode(path: str, value: Any, code: Code) -> Encoded | None:
    """Encodes a value of a class that the program defines, as `plain_values.encode` does. Returns None for other
    values."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return _member(path, value, code)
    if issubclass(kind, tuple) and _fields_of(kind) is not None and _is_thin(kind, tuple):
        _refuse_attributes(path, value, {})
        return Encoded(["namedtuple", _name(path, kind), list(_fields_of(kind) or ())], list(value), False)
    if dataclasses.is_dataclass(kind):
        return _dataclass(path, value)
    for base, plain in _PLAIN.items():
        if issubclass(kind, base) and kind is not base and _is_thin(kind, base):
            _refuse_attributes(path, value, {})
            return Encoded(["subclass", base.__name__, _name(path, kind), code(path, plain(value))], None, False)
    return None


def _member(path: str, value: enum.Enum, code: Code) -> Encoded:
    kind, name = type(value), value._name_
    if _members(kind).get(name or "") is value:
        held = [code(path, value._value_)] if _is_plain(value._value_) else []
        return Encoded(["enum", _name(path, kind), name, *held], None, False)
    if isinstance(value, enum.Flag) and _combines(kind) and type(value._value_) is int:
        return Encoded(["flag", _name(path, kind), code(path, value._value_)], None, False)
    raise _refused(path, kind, "is not a named member of its enumeration")


def _members(kind: type) -> dict[str, Any]:
    members: dict[str, Any] = vars(kind)["_member_map_"]
    return members


def _is_plain(value: Any) -> bool:
    """Returns whether an enum member's value can be compared with the value in a version."""
    return value is None or type(value) in (bool, *_PLAIN) and value == value


def _combines(kind: Any) -> bool:
    """Returns whether an enum creates combined flags without code of its own."""
    own, of_flags = (getattr(each._missing_, "__func__", None) for each in (kind, enum.Flag))
    return own is of_flags


def _dataclass(path: str, value: Any) -> Encoded:
    kind = type(value)
    if not _is_made_plainly(kind):
        raise _refused(path, kind, "has a base class or a __new__ that may add state to its fields")
    fields = [field.name for field in dataclasses.fields(kind)]
    held: dict[str, Any] = {}
    for name in fields:
        place = _slot(kind, name)
        try:
            held[name] = value.__dict__[name] if place is None else place.__get__(value)
        except (AttributeError, KeyError):
            raise _refused(path, kind, f"has no value of its field {name}") from None
    _refuse_attributes(path, value, held)
    return Encoded(["dataclass", _name(path, kind)], held, True)


def _is_made_plainly(kind: Any) -> bool:
    made: Any = object
    return kind.__new__ is made.__new__


def _slot(kind: type, name: str) -> Any:
    """Returns the slot descriptor of an attribute, or None if the attribute is in the instance's `__dict__`."""
    for each in kind.__mro__:
        found = vars(each).get(name)
        if isinstance(found, types.MemberDescriptorType):
            return found
    return None


def _refuse_attributes(path: str, value: Any, fields: dict[str, Any]) -> None:
    """Raises `RefusedError` if a value has attributes in addition to `fields`."""
    kind = type(value)
    held = set(getattr(value, "__dict__", {}))
    for each in kind.__mro__:
        held |= {name for name, found in vars(each).items() if _has(value, found)}
    if more := held - fields.keys():
        raise _refused(path, kind, f"has attributes in addition to its value: {', '.join(sorted(more))}")


def _has(value: Any, slot: Any) -> bool:
    if not isinstance(slot, types.MemberDescriptorType):
        return False
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _is_thin(kind: type, base: type) -> bool:
    """Returns whether all classes between `kind` and `base` are defined in Python."""
    found: Any = kind
    while found is not base and found is not object and found.__flags__ & _DEFINED_IN_PYTHON:
        found = found.__base__
    return found is base


def _refused(path: str, kind: type, reason: str) -> RefusedError:
    return RefusedError(f"{path.removeprefix('/')}: a {kind.__name__} cannot be stored: it {reason}",
                        remedy="store its contents as plain values, or remove it from the state")


def _fields_of(kind: type) -> tuple[str, ...] | None:
    """Returns the field names of a named tuple class, or None for another class."""
    fields = next((vars(each)["_fields"] for each in kind.__mro__ if "_fields" in vars(each)), None)
    return fields if isinstance(fields, tuple) else None


def _name(path: str, kind: type) -> str:
    """Returns the name by which a restore can find the class. Raises `RefusedError` if there is none."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _found(name) is not kind:
        raise _refused(path, kind, f"has a class that cannot be found as {name}, such as one defined in a function")
    return name


def _found(name: str) -> Any:
    """Returns the object with this name, or None. Only dicts are searched, because attribute access could run code."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
    return found


def _class(name: str, is_such: Callable[[Any], bool], what: str) -> Any:
    found = _found(name)
    if found is None:
        module, _, qualified = name.partition(":")
        raise NoStateError(f"the version contains a value of {module}.{qualified}, which the program has not imported",
                           remedy=f"import {module} before the restore")
    if not (isinstance(found, type) and is_such(found)):
        raise NoStateError(f"the version contains a value of {name}, which is no longer {what}", remedy=_AS_THEN)
    return found


def _made_namedtuple(name: str, fields: list[str], items: list[Any]) -> Any:
    kind = _class(name, lambda kind: issubclass(kind, tuple) and _fields_of(kind) == tuple(fields)
                  and _is_thin(kind, tuple), f"a named tuple of {', '.join(fields)}")
    return tuple.__new__(kind, items)


def _made_member(name: str, member: str, *value: Any) -> Any:
    kind = _class(name, lambda kind: issubclass(kind, enum.Enum) and member in _members(kind),
                  f"an enumeration with the member {member}")
    found = _members(kind)[member]
    if value and (type(found._value_) is not type(value[0]) or found._value_ != value[0]):
        raise NoStateError(f"the version contains {name}.{member} with the value {value[0]!r}, which is now "
                           f"{found._value_!r}", remedy=_AS_THEN)
    return found


def _made_flag(name: str, value: int) -> Any:
    kind = _class(name, lambda kind: issubclass(kind, enum.Flag) and _combines(kind), "an enumeration of flags")
    try:
        # This does not call a custom metaclass.
        made = enum.EnumType.__call__(kind, value)
    except ValueError:
        made = None
    if made is None or made._value_ != value:
        raise NoStateError(f"the version contains {name} with the value {value}, which no longer exists", remedy=_AS_THEN)
    return made


def _made_dataclass(name: str, held: dict[str, Any]) -> Any:
    kind = _class(name, lambda kind: dataclasses.is_dataclass(kind) and _is_made_plainly(kind)
                  and [field.name for field in dataclasses.fields(kind)] == list(held),
                  f"a dataclass with the fields {', '.join(held)}")
    made = object.__new__(kind)
    for field, value in held.items():
        place = _slot(kind, field)
        if place is None:
            made.__dict__[field] = value
        else:
            place.__set__(made, value)
    return made


def _made_subclass(base: str, name: str, value: Any) -> Any:
    plain: Any = type(value)
    kind = _class(name, lambda kind: plain.__name__ == base and issubclass(kind, plain) and _is_thin(kind, plain)
                  and not issubclass(kind, enum.Enum), f"a class of {base}")
    return plain.__new__(kind, value)


DECODERS: dict[str, Callable[..., Any]] = {
    "namedtuple": _made_namedtuple, "enum": _made_member, "flag": _made_flag, "dataclass": _made_dataclass,
    "subclass": _made_subclass,
}
#: The kinds among these that are mutable containers, and those whose tag ends with content of the walk.
MUTABLE = frozenset(("dataclass",))
WITH_CONTENT = frozenset(("dataclass", "namedtuple"))
