"""Values that a state may contain, and whether they are saved unchanged or rejected by path.

The rows are enumerated from the libraries where these list their own types. `difference` compares two values: type,
bits, dtype, shape, strides, and the sharing of containers and memory.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import math
import pathlib
import random
import struct
import types
import uuid
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None


class Row(NamedTuple):
    """The name of a value, the value, and the beginning of the error's pattern, or None if the value is saved."""

    name: str
    make: Callable[[], Any]
    refused: str | None = None


class Pair(NamedTuple):
    left: Any
    right: Any


class Color(enum.Enum):
    RED = "r"
    BLUE = 2
    ALIAS = 2


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    HELLO = "hello"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class OwnFlag(enum.Flag):
    A = 1
    B = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return super()._missing_(value)


@dataclasses.dataclass
class Config:
    rate: float
    layers: list[int]
    tensor: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: Any


@dataclasses.dataclass
class SelfCounting:
    n: int

    def __post_init__(self) -> None:
        self.calls = 1


@dataclasses.dataclass
class DictLike(dict):  # type: ignore[type-arg]
    n: int


class Meters(float):
    def __new__(cls, value: float) -> Meters:
        raise AssertionError("a restore calls no class of a program")


class Tagged(str):
    pass


class Raw(bytes):
    pass


class Index(int):
    def __int__(self) -> int:
        return 99


class OwnDict(dict):  # type: ignore[type-arg]
    pass


class OwnList(list):  # type: ignore[type-arg]
    pass


class OwnTensor(torch.Tensor):
    pass


class OwnArray(numpy.ndarray):  # type: ignore[type-arg]
    pass


def tagged(**attributes: Any) -> Any:
    made = Tagged("x")
    made.__dict__.update(attributes)
    return made


def nan(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<Q", bits))[0]
    return number


def local_enum() -> Any:
    return enum.Enum("Local", "A").A  # type: ignore[attr-defined]


def with_cycle() -> Any:
    made: list[Any] = [1]
    made.append({"again": made})
    return made


def deep(depth: int, of: Any = ()) -> Any:
    for _ in range(depth):
        of = [of] if isinstance(of, list) else (of,)
    return of


def annotated(ordered: Any) -> Any:
    ordered._metadata = OrderedDict([("", {"version": 2}), ("a", {"version": 1})])
    return ordered


def advanced(stream: io.BytesIO) -> io.BytesIO:
    stream.seek(2)
    return stream


NAN_KEY = "a NaN as a key"
VALUES = [
    Row("None", lambda: None), Row("bool", lambda: [True, False]), Row("int", lambda: [0, -1, 1 << 53, (1 << 53) + 1]),
    Row("int of many digits", lambda: [1 << 200, -(1 << 20000)]),
    Row("float", lambda: [0.1, -0.0, math.inf, -math.inf, 5e-324, 1.7976931348623157e308]),
    Row("NaN", lambda: [math.nan, -math.nan, nan(0x7FF0000000000001), nan(0xFFF8000000000123)]),
    Row("complex", lambda: [complex(-0.0, 0.0), complex(math.nan, -math.inf), complex(nan(0xFFF8000000000001), 1)]),
    Row("str", lambda: ["", "\0\"\\/~$", "\ud800", "é𝄞"]), Row("bytes", lambda: [b"", b"\0\xff"]),
    Row("bytearray", lambda: bytearray(b"\1")), Row("BytesIO", lambda: advanced(io.BytesIO(b"abc"))),
    Row("closed BytesIO", lambda: (made := io.BytesIO(), made.close(), made)[2], "a closed BytesIO"),
    Row("StringIO", lambda: io.StringIO("a"), "a StringIO"),
    Row("memoryview", lambda: memoryview(b"a"), "a memoryview"),
    Row("list", lambda: [[], [1, [2]]]), Row("tuple", lambda: ((), (1, ([],)))),
    Row("dict", lambda: {"b": 1, "a": {}, "$": 2}), Row("dict order", lambda: dict.fromkeys("zay")),
    Row("OrderedDict", lambda: OrderedDict(z=1, a=OrderedDict())),
    Row("OrderedDict with attributes", lambda: annotated(OrderedDict(a=torch.ones(2)))),
    Row("defaultdict", lambda: defaultdict(list, {3: [1]})),
    Row("defaultdict of nothing", lambda: defaultdict(None, a=1)),
    Row("defaultdict of a Counter", lambda: defaultdict(Counter, a=Counter(b=1))),
    Row("defaultdict of a function", lambda: defaultdict(lambda: 0), "a defaultdict that calls"),
    Row("defaultdict of a class", lambda: defaultdict(Config), "a defaultdict that calls"),
    Row("Counter", lambda: Counter({2: 1, "x": -3, 1.5: 0})), Row("deque", lambda: deque([1, {"a": torch.ones(1)}], 5)),
    Row("deque without a limit", lambda: deque("ab")), Row("set", lambda: {1, "a", (2, None), frozenset((3,))}),
    Row("frozenset", lambda: frozenset((1.5, b"x"))),
    Row("set of tensors", lambda: {torch.ones(1)}, "a Tensor as a key"),
    Row("range", lambda: [range(3), range(10, 0, -3), range(1 << 70)]),
    Row("slice", lambda: [slice(3), slice(None, -1, 2), slice([1], "a")]),
    Row("namedtuple", lambda: Pair(1, [torch.ones(2)])),
    Row("Enum", lambda: [Color.RED, Color.ALIAS, Level.LOW, Word.HELLO]),
    Row("Flag", lambda: [Access.READ, Access.READ | Access.WRITE, Access(0)]),
    Row("Flag with code of its own", lambda: OwnFlag.A | OwnFlag.B, "a OwnFlag cannot be stored: it is not a named member"),
    Row("dataclass", lambda: Config(math.nan, [1], torch.ones(2))),
    Row("frozen dataclass with slots", lambda: Point(1, [2])),
    Row("dataclass with more state", lambda: SelfCounting(1), "a SelfCounting cannot be stored: it has attributes"),
    Row("dataclass that is a dict", lambda: DictLike(1), "a DictLike cannot be stored: it has a base"),
    Row("class in a function", local_enum, "a Local cannot be stored: it has a class that cannot be found"),
    Row("float subclass", lambda: float.__new__(Meters, -0.0)), Row("str subclass", lambda: Tagged("\ud800")),
    Row("int subclass", lambda: [Index(7), Index(1 << 70)]), Row("bytes subclass", lambda: Raw(b"a")),
    Row("str subclass with attributes", lambda: tagged(a=1), "a Tagged cannot be stored: it has attributes"),
    Row("dict subclass", lambda: OwnDict(a=1), "a OwnDict"), Row("list subclass", lambda: OwnList(), "a OwnList"),
    Row("Path", lambda: [pathlib.Path("/a/ b"), pathlib.PurePosixPath("."), pathlib.PureWindowsPath("C:\\x")]),
    Row("date", lambda: [datetime.date(2, 1, 3), datetime.datetime(2026, 10, 25, 2, 30, 1, 5, fold=1)]),
    Row("time", lambda: [datetime.time(1, 2, 3, 4, fold=1), datetime.timedelta(-1, 5, 7), datetime.timedelta.max]),
    Row("timezone", lambda: [datetime.timezone.utc, datetime.timezone(datetime.timedelta(hours=-3), "X"),
                             datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(seconds=1)))]),
    Row("Decimal", lambda: [decimal.Decimal("1.10"), decimal.Decimal("-0E-7"), decimal.Decimal("-sNaN123")]),
    Row("Fraction", lambda: fractions.Fraction(-3, 1 << 80)), Row("UUID", lambda: uuid.UUID(int=5)),
    Row("torch's plain types", lambda: [torch.float8_e5m2, torch.device("cuda", 1), torch.Size([2, 0])]),
    Row("random states", lambda: [random.Random(1).getstate(), numpy.random.RandomState(1).get_state()]),
    Row("function", lambda: print, "a builtin_function_or_method"), Row("class", lambda: int, "a type"),
    Row("module", lambda: math, "a module"), Row("Random", lambda: random.Random(1), "a Random"),
    Row("UserDict", lambda: UserDict(a=1), "a UserDict"), Row("ChainMap", lambda: ChainMap({}), "a ChainMap"),
    Row("mappingproxy", lambda: types.MappingProxyType({}), "a mappingproxy"),
    Row("Ellipsis", lambda: ..., "a ellipsis"),
    Row("cycle", with_cycle, "the value contains itself"), Row("nested 90 deep", lambda: deep(90, [])),
    Row("nested 100000 deep", lambda: deep(100000, []), "values are nested more than 100 levels deep"),
    Row("tuples nested 100000 deep", lambda: deep(100000), "values are nested more than 100 levels deep"),
    Row("key nested 300 deep", lambda: {deep(300): 1}, "values are nested more than 100 levels deep"),
]

# Each dict has keys with texts that could collide. Each value is a separate tensor, so a collision would be detected.
KEYS = [
    Row("slash", lambda: {"a/b": 0, "a": {"b": 0}, "a~1b": 0, "a~": {"1b": 0}, "": {"": 0}, "/": 0}),
    Row("int and str", lambda: {1: 0, "1": 0, -1: 0, "-1": 0, 1 << 70: 0, str(1 << 70): 0, "~1": 0, "~:1": 0,
                                '~:"1"': 0}),
    Row("None and str", lambda: {None: 0, "None": 0, "null": 0, "~:null": 0}),
    Row("bool and str", lambda: {True: 0, False: 0, "True": 0, "true": 0}),
    Row("float and str", lambda: {1.5: 0, "1.5": 0, math.inf: 0, "inf": 0, 1e300: 0, -0.0: 0}),
    Row("tuple and str", lambda: {(0, 1): 0, "(0, 1)": 0, (0, (1,)): 0, ((0, 1),): 0, ("0", 1): 0, (): 0}),
    Row("bytes and str", lambda: {b"a": 0, "a": 0, "b'a'": 0, b"a/b": 0}),
    Row("halves of pairs", lambda: {"\ud800": 0, "\ud801": 0, "\ufffd": 0, "?": 0}),
    Row("list and dict", lambda: {"h": [0, 0], "h/0": 0, "h/1": [0]}),
    Row("Enum and other keys", lambda: {frozenset((1,)): 0, Color.RED: 0, "Color.RED": 0, Pair(1, 2): 0, (1, 3): 0,
                                        pathlib.Path("/a"): 0, "/a": 0, datetime.date(1, 1, 1): 0,
                                        numpy.float32(7.5): 0,
                                        Tagged("a"): 0}),
    Row("NaN", lambda: {math.nan: 0}, NAN_KEY), Row("NaN in a tuple", lambda: {(1, math.nan): 0}, NAN_KEY),
    Row("tensor", lambda: {torch.ones(1): 0}, "a Tensor as a key"),
    Row("object", lambda: {Config: 0}, "a type as a key"),
    Row("frozen dataclass", lambda: {Point(1, 2): 0}, "a Point as a key"),
]


def _tensor_of(dtype: torch.dtype) -> torch.Tensor:
    """Returns a matrix of this dtype with given bits, without arithmetic on the elements."""
    raw = torch.arange(1, 1 + 8 * max(1, dtype.itemsize), dtype=torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    return raw.view(dtype).reshape(2, -1)


# Element types that torch lists and the store does not support.
_NO_SUCH = "cannot be stored"
TORCH_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)


def torch_dtype_rows(kept: dict[torch.dtype, str]) -> list[Row]:
    """Returns a row for each dtype of the installed torch."""
    rows = []
    for dtype in TORCH_DTYPES:
        name = str(dtype).removeprefix("torch.")
        if dtype in kept:
            rows.append(Row(name, lambda dtype=dtype: _tensor_of(dtype)))  # type: ignore[misc]
        else:
            refused = f"elements of type torch.{name} {_NO_SUCH}"
            rows.append(Row(name, lambda dtype=dtype: _empty(dtype), refused))  # type: ignore[misc]
    return rows


def _empty(dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(0, dtype=dtype)
    except (RuntimeError, NotImplementedError):
        return torch._empty_affine_quantized([1], scale=1.0, zero_point=0, dtype=dtype)


NUMPY_DTYPES = [numpy.dtype(kind) for kind in "?bhilqBHILQefdgFDG"] + [
    numpy.dtype(name) for name in ("M8[ns]", "M8[25s]", "m8[D]", "S3", "U2", "V4", "O", ">i4", ">f8", "i4,f4")] + (
    [numpy.dtype(numpy.dtypes.StringDType())] if hasattr(numpy.dtypes, "StringDType") else []) + (
    [] if ml_dtypes is None else sorted({numpy.dtype(kind) for kind in vars(ml_dtypes).values()
                                         if isinstance(kind, type) and issubclass(kind, numpy.generic)}, key=str))


def _numpy_refused(dtype: Any) -> str | None:
    if dtype.type.__module__ == "ml_dtypes":
        return None
    for is_it, reason in ((dtype.hasobject or dtype.kind == "T", "its elements are objects"),
                          (not dtype.isnative, "its byte order is not that of this machine"),
                          (dtype.char in "gG", "its bits depend on the platform"),
                          (dtype.kind == "V", "its elements are structures")):
        if is_it:
            return f"an array of .* cannot be stored, because {reason}"
    return None


def _array_of(dtype: Any) -> Any:
    if dtype.kind in "OT":
        return numpy.array(["a", "b"], dtype)
    raw = numpy.arange(1, 1 + 4 * dtype.itemsize, dtype=numpy.uint8)
    if dtype.kind in "?b":
        raw %= 2
    if dtype.kind == "U":
        return numpy.array([["a", "é"], ["", "ab"]], dtype)
    return raw.view(dtype).reshape(2, 2)


NUMPY_ARRAYS = [Row(f"array of {dtype}",
                    lambda dtype=dtype: _array_of(dtype), _numpy_refused(dtype))  # type: ignore[misc]
                for dtype in NUMPY_DTYPES]


def _scalar_of(dtype: Any) -> Any:
    return _array_of(dtype).reshape(-1)[1]


def _scalar_refused(dtype: Any) -> str | None:
    if dtype.type in (numpy.longdouble, numpy.clongdouble, numpy.void, numpy.longlong, numpy.ulonglong):
        return "a NumPy scalar of type .* cannot be stored"
    return None


# Named by type, because longlong and int64 are two types with the same dtype.
NUMPY_SCALARS = [Row(f"{dtype.type.__name__} of {dtype}",
                     lambda dtype=dtype: _scalar_of(dtype), _scalar_refused(dtype))  # type: ignore[misc]
                 for dtype in NUMPY_DTYPES if dtype.kind not in "OT" and dtype.isnative]
_MORE = "a .* cannot be stored, because it has state in addition to its elements"
NUMPY_KINDS = [
    Row("C order", lambda: numpy.arange(6.0).reshape(2, 3)),
    Row("Fortran order", lambda: numpy.asfortranarray([[1, 2], [3, 4]])),
    Row("no dimension", lambda: numpy.array(3.5)), Row("empty", lambda: numpy.empty((0, 3), numpy.int8)),
    Row("broadcast", lambda: numpy.broadcast_to(numpy.arange(2, dtype=numpy.int16), (3, 2))),
    Row("read-only", lambda: numpy.frombuffer(b"abcd", numpy.uint16)),
    Row("of bytes", lambda: numpy.frombuffer(bytearray(4), "i4")),
    Row("float NaNs", lambda: numpy.array([0x7FC00001, 0xFF800001], numpy.uint32).view(numpy.float32)),
    Row("masked", lambda: numpy.ma.masked_array([1.0, 2.0], [True, False]), _MORE),
    Row("masked constant", lambda: numpy.ma.masked, _MORE), Row("matrix", lambda: numpy.asmatrix([[1]]), _MORE),
    Row("recarray", lambda: numpy.rec.array([(1, 2.0)]), _MORE),
    Row("chararray", lambda: numpy.char.array(["a"]), _MORE),
    Row("subclass", lambda: numpy.zeros(2).view(OwnArray), _MORE),
    Row("dtype object", lambda: numpy.dtype("f4"), "a Float32DType"),
    Row("Generator", lambda: numpy.random.default_rng(1), "a Generator"),
]


def _fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


def _wrapped() -> Any:
    found = []
    torch.vmap(lambda x: (found.append(x), x)[1])(torch.ones(2))
    return found[0]


def _tracked() -> Any:
    found = []
    torch.func.grad(lambda x: (found.append(x), x.sum())[1])(torch.ones(2))
    return found[0]


def _inference() -> Any:
    with torch.inference_mode():
        return torch.ones(2)


def _sparse(layout: torch.layout) -> Any:
    eye = torch.eye(4)
    if layout in (torch.sparse_bsr, torch.sparse_bsc):
        return eye.to_sparse(layout=layout, blocksize=(2, 2))
    return eye.to_sparse(layout=layout)


_LAYOUTS = sorted((layout for layout in vars(torch).values() if isinstance(layout, torch.layout)
                   and layout not in (torch.strided, torch.jagged, torch._mkldnn)), key=str)
TENSOR_KINDS = [
    Row("plain", lambda: torch.arange(6).reshape(2, 3)), Row("no dimension", lambda: torch.tensor(3.5)),
    Row("empty", lambda: torch.empty(0, 3)), Row("transposed", lambda: torch.arange(6).reshape(2, 3).t()),
    Row("channels last", lambda: torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)),
    Row("requires_grad", lambda: torch.ones(2, requires_grad=True)),
    Row("Parameter", lambda: torch.nn.Parameter(torch.ones(2))),
    Row("frozen Parameter", lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False)),
    Row("expanded", lambda: torch.arange(3.0).reshape(3, 1).expand(3, 4)),
    Row("expanded scalar", lambda: torch.tensor(2).expand(2, 2)),
    Row("expanded rows", lambda: torch.arange(4.0).reshape(2, 2).t().unsqueeze(1).expand(2, 3, 2)),
    Row("windows", lambda: torch.arange(6.0).unfold(0, 3, 1)), Row("inference", _inference),
    Row("conjugate", lambda: torch.tensor([1 + 2j]).conj()),
    Row("negative", lambda: torch.tensor([1 + 2j]).conj().imag),
    Row("float NaNs", lambda: torch.tensor([0x7FC00001, -8388607], dtype=torch.int32).view(torch.float32)),
    Row("subclass", lambda: torch.ones(2).as_subclass(OwnTensor), _MORE), Row("fake", _fake, _MORE),
    Row("lazy Parameter", lambda: torch.nn.UninitializedParameter(), "the tensor is uninitialized"),
    Row("lazy buffer", lambda: torch.nn.UninitializedBuffer(), "the tensor is uninitialized"),
    Row("meta", lambda: torch.empty(2, device="meta"), "a tensor on the meta device has no elements"),
    Row("wrapped by vmap", _wrapped, "a tensor wrapped by a transform such as vmap or grad"),
    Row("wrapped by grad", _tracked, "a tensor wrapped by a transform such as vmap or grad"),
    Row("quantized", lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "elements of type torch.qint8"),
    Row("nested", lambda: torch.nested.nested_tensor([torch.ones(2)]), "a tensor of layout nested"),
    Row("jagged", lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), _MORE),
    *[Row(str(layout),
          lambda layout=layout: _sparse(layout), f"a tensor of layout {layout}")  # type: ignore[misc]
      for layout in _LAYOUTS],
    Row("Generator", lambda: torch.Generator(), "a Generator"),
    Row("storage", lambda: torch.ones(2).untyped_storage(), "a UntypedStorage"),
]


def difference(saved: Any, found: Any, path: str = "", seen: dict[int, int] | None = None) -> str | None:
    """Returns how a value differs from the one that was saved, or None."""
    seen = {} if seen is None else seen
    # Containers are shared after the restore if and only if they were shared before.
    is_mutable = isinstance(saved, (list, dict, set, deque, bytearray, io.BytesIO)) or (
        dataclasses.is_dataclass(saved) and not isinstance(saved, type))
    if is_mutable and seen.setdefault(id(saved), id(found)) != id(found):
        return f"{path}: shared otherwise"
    if type(saved) is not type(found):
        return f"{path}: {type(found)} instead of {type(saved)}"
    if isinstance(saved, torch.Tensor):
        return _tensor_difference(saved, found, path)
    if isinstance(saved, numpy.ndarray):
        pairs: Any = [(saved.dtype, found.dtype), (saved.shape, found.shape), (saved.tobytes(), found.tobytes())]
        if 0 not in saved.strides and saved.size > 1 and saved.flags.forc and saved.dtype.kind not in "SU":
            pairs.append((saved.strides, found.strides))
        return next((f"{path}: {now} instead of {then}" for then, now in pairs if then != now), None)
    if isinstance(saved, numpy.generic):
        same = saved.dtype == found.dtype and saved.tobytes() == found.tobytes()
    elif isinstance(saved, float):
        same = struct.pack("<d", saved) == struct.pack("<d", found)
    elif isinstance(saved, complex):
        same = struct.pack("<dd", saved.real, saved.imag) == struct.pack("<dd", found.real, found.imag)
    elif isinstance(saved, (dict, list, tuple, deque, slice)) or dataclasses.is_dataclass(saved):
        return _parts_difference(saved, found, path, seen)
    elif isinstance(saved, io.BytesIO):
        same = (saved.getvalue(), saved.tell()) == (found.getvalue(), found.tell())
    elif isinstance(saved, decimal.Decimal):
        same = str(saved) == str(found)
    elif isinstance(saved, range):
        same = (saved.start, saved.stop, saved.step) == (found.start, found.stop, found.step)
    elif isinstance(saved, (datetime.datetime, datetime.time)):
        same = repr(saved) == repr(found) and saved.fold == found.fold
    elif isinstance(saved, (str, bytes, int)):
        same = found == saved and str(found) == str(saved) if not isinstance(saved, int) else int.__eq__(saved, found)
    else:
        same = bool(saved == found)
    return None if same else f"{path}: {found!r} instead of {saved!r}"


def _parts_difference(saved: Any, found: Any, path: str, seen: dict[int, int]) -> str | None:
    if isinstance(saved, dict):
        marks = [getattr(each, "default_factory", None) for each in (saved, found)]
        attributes = [getattr(each, "__dict__", {}) for each in (saved, found)]
        if difference(list(saved), list(found), f"{path} keys") or marks[0] is not marks[1]:
            return f"{path}: {found!r} instead of {saved!r}"
        pairs = [*((f"{path}/{key}", each, found[key]) for key, each in saved.items())]
        if any(attributes):
            pairs.append((f"{path}.", *attributes))
    elif isinstance(saved, slice):
        pairs = [(path, getattr(saved, name), getattr(found, name)) for name in ("start", "stop", "step")]
    elif dataclasses.is_dataclass(saved):
        pairs = [(f"{path}.{field.name}", getattr(saved, field.name), getattr(found, field.name))
                 for field in dataclasses.fields(saved)]
    else:
        if len(saved) != len(found) or getattr(saved, "maxlen", None) != getattr(found, "maxlen", None):
            return f"{path}: {found!r} instead of {saved!r}"
        pairs = [(f"{path}/{at}", *each) for at, each in enumerate(zip(saved, found, strict=True))]
    return next((found for name, then, now in pairs if (found := difference(then, now, name, seen))), None)


def _tensor_difference(saved: torch.Tensor, found: torch.Tensor, path: str) -> str | None:
    if saved.requires_grad != found.requires_grad:
        return f"{path}: requires_grad"
    saved, found = (each.detach().resolve_conj().resolve_neg() for each in (saved, found))
    pairs: Any = [(saved.dtype, found.dtype), (saved.shape, found.shape)]
    pairs += [(then, now) for length, then, now in zip(saved.shape, saved.stride(), found.stride(), strict=True)
              if length > 1 and saved.numel()] if saved.shape == found.shape else []
    wrong = next((f"{path}: {now} instead of {then}" for then, now in pairs if then != now), None)
    if wrong is None and bits_of(saved) != bits_of(found):
        return f"{path}: other bits"
    return wrong


def bits_of(tensor: torch.Tensor) -> bytes:
    """Returns the elements' bytes, row by row, without arithmetic on the elements."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[tensor.itemsize]
    plain = tensor.detach().view(kind).clone(memory_format=torch.contiguous_format)
    return bytes(plain.view(-1).view(torch.uint8).tolist())
