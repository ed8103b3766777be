"""Arrays of bytes with names, as pages of a store; and a tree of plain values beside them.

A *block* is one page: the bytes of one array, or of several that share memory. One more page, the manifest, holds
JSON: which arrays lie in which page, and how; and a tree of plain values, in which arrays stand by their names.
Nothing is pickled. A page that holds one whole array also has `name`, `dtype` and `shape` in its metadata, as the
pages that `remanent import` makes, so that `remanent diff`, `blame` and `bisect` know its elements. If all pages are
of that kind and there is no tree, a header as in a safetensors file lies beside them: `remanent export` gives the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from remanent import _native, _values
from remanent._errors import DamagedError, NoStateError, TakenError
from remanent._kept_versions import (
    KEEP_DEFAULT,
    PENDING_BYTES,
    SAVED_AT,
    KeptVersions,
    keep_named,
    log_files,
    open_store,
)
from remanent._native import ArrayLayout, Block

MANIFEST_KEY = "remanent tensors"
HEADER_KEY = "safetensors header"
_RESERVED = (MANIFEST_KEY, HEADER_KEY)
_KEY_LEN_MAX = 64
# Two numbers of four bits as one element, and those numbers one by one.
_PAIRS, _NUMBERS = "F4_X2", "F4"
# Elements that a file of weights cannot have.
_OF_NO_FILE = ("C32", "C128", _PAIRS)
# Bytes of one batch, where a save may take several; a longer page has one of its own.
_BATCH_BYTES = 64 << 20
# Of captured blocks a batch has this many times as much, for mostly little of them changed. All of it would be fewer
# bytes than a batch may have.
_CAPTURED_PARTS = 6
# Each block counts as this many of a batch's bytes at least. A short page on disk is not written by itself: until the
# next snapshot it waits in memory, for which the budget has room for some batches at a time.
_COST_MIN = 20 << 10


class Plan(Protocol):
    """What adapts one library's arrays: see `flatten`."""

    def __call__(self, path: str, value: object) -> object | None:
        """A value of JSON that stands for this one, if it is the library's."""


class Captures(Protocol):
    """What captures blocks where they lie: see `_copies`."""

    def capture(self, batch: _native.Batch, key: str, block: Block, width: int) -> None: ...

    def begin(self, key: str, block: Block, width: int) -> None: ...

    def end(self) -> None: ...


# A page on disk that is to hold the bytes of a block, by its key.
Update = tuple[str, Block]
# The arrays of a page.
Arrays = tuple[ArrayLayout, ...]


def update(batch: _native.Batch, updates: Iterable[Update], logged_max: int | None = None) -> bool:
    """Puts updates into a batch; returns whether anything changed. Each reads its page.

    :param logged_max: how many bytes of memory the changed elements of all pages may take until the next snapshot. A
        page whose changes would take more is written whole. None is the default of `Batch.update`.
    """
    changed = False
    for key, block in updates:
        changed |= batch.update(key, block.data if block.nbytes else b"", width=_width_of(block),
                                logged_max=logged_max) != 0
    return changed


@dataclass
class Manifest:
    """What a store holds: arrays by page, and the tree."""

    pages: dict[str, Arrays]
    tree: Any = None
    metadata: dict[str, str] | None = None


class LastManifest:
    """The manifest that was put last, for the next time that it is read: most of it will be put again."""

    def __init__(self) -> None:
        self._text: bytes | None = None
        self._pages: dict[str, Arrays] = {}
        # The JSON of the pages.
        self._listed = ""

    def pages(self, reader: _native.Reader) -> dict[str, Arrays]:
        """The arrays that the store holds, by page."""
        text = reader[MANIFEST_KEY] if MANIFEST_KEY in reader else None
        if text is None or text != self._text:
            self._text, self._pages, self._listed = None, {}, ""
            with contextlib.suppress(NoStateError):
                self._pages = read_manifest(reader).pages
        return self._pages

    def put(self, pages: dict[str, Arrays], tree: str, metadata: Mapping[str, str] | None) -> bytes:
        """The text of a manifest of these pages and this tree."""
        if not self._listed or pages != self._pages or list(pages) != list(self._pages):
            listed = {key: [array.listed() for array in arrays] for key, arrays in pages.items()}
            self._listed = json.dumps(listed, separators=(",", ":"))
        self._pages = pages
        said = "" if metadata is None else f',"metadata":{json.dumps(metadata, separators=(",", ":"))}'
        self._text = f'{{"format":1,"pages":{self._listed},"tree":{tree}{said}}}'.encode()
        return self._text


def key_of(name: str, taken: Callable[[str], bool]) -> str:
    """The key of an array's page: its name where that can be one, else its beginning and a hash."""
    if name and len(name.encode()) <= _KEY_LEN_MAX and name not in _RESERVED and not taken(name):
        return name
    for number in range(1 << 20):
        ending = "~" + hashlib.blake2b(f"{number}:{name}".encode(), digest_size=8).hexdigest()
        start = name.encode()[: _KEY_LEN_MAX - len(ending)].decode(errors="ignore")
        if not taken(start + ending):
            return start + ending
    raise AssertionError("a million hashes of eight bytes are not all taken")


def read_manifest(reader: _native.Reader) -> Manifest:
    """What the store holds. Of a store that `remanent import` filled, its tensors."""
    if MANIFEST_KEY in reader:
        try:
            held = json.loads(reader[MANIFEST_KEY])
            pages = {
                key: tuple(ArrayLayout(*array) for array in arrays)
                for key, arrays in held["pages"].items()
            }
            return Manifest(pages, held["tree"], held.get("metadata"))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise DamagedError(f"page {MANIFEST_KEY!r} is no list of tensors: {error}", remedy="another program wrote "
                               "to this page: restore an earlier version") from error
    pages = {}
    for info in reader.pages():
        said = info.metadata
        if {"name", "dtype", "shape"} <= said.keys() and info.key is not None:
            pages[info.key] = (_of_metadata(said),)
    if not pages:
        raise NoStateError("the store holds no tensors", remedy="save some first, or give another directory")
    return Manifest(pages, metadata=_metadata_of(reader))


def _metadata_of(reader: _native.Reader) -> dict[str, str] | None:
    """The metadata of a safetensors file that was imported."""
    if HEADER_KEY not in reader:
        return None
    try:
        said = json.loads(reader[HEADER_KEY][8:])
    except ValueError as error:
        raise DamagedError(f"page {HEADER_KEY!r} is no header of a safetensors file: {error}", remedy="another program "
                           "wrote to this page: restore an earlier version") from error
    return said.get("__metadata__") if isinstance(said, dict) else None


def _of_file(array: ArrayLayout) -> tuple[str, list[int]]:
    """The dtype and the shape that a file of weights gives to an array: it counts numbers, where two are an element."""
    if array.dtype != _PAIRS or not array.shape:
        return array.dtype, list(array.shape)
    return _NUMBERS, [*array.shape[:-1], 2 * array.shape[-1]]


def _of_metadata(said: Mapping[str, Any]) -> ArrayLayout:
    """The array of a page that has its name, dtype and shape, as a file of weights gives them."""
    *outer, last = said["shape"] or [1]
    if said["dtype"] == _NUMBERS and last % 2 == 0:
        return ArrayLayout(said["name"], _PAIRS, [*outer, last // 2])
    return ArrayLayout(said["name"], said["dtype"], said["shape"])


def _header(pages: Mapping[str, Arrays], sizes: Mapping[str, int], metadata: Mapping[str, str] | None) -> bytes | None:
    """The header of a safetensors file with these arrays; None if it could not hold them."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for key, arrays in pages.items():
        array = arrays[0]
        dtype, shape = _of_file(array)
        if len(arrays) > 1 or array.stride is not None or dtype in _OF_NO_FILE or array.name == "__metadata__":
            return None
        entries[array.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + sizes[key]]}
        offset += sizes[key]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def put(store: _native.Store, batch: _native.Batch, blocks: Iterable[Block | None], tree: str = "null", *,
        place: str = "disk", logged_max: int | None = None, captures: Captures | None = None,
        flush: Callable[[list[Update]], _native.Batch] | None = None,
        last: LastManifest | None = None, metadata: Mapping[str, str] | None = None) -> tuple[_native.Batch, bool]:
    """Makes the store hold these arrays and this tree, and no others of before; what did not change is not logged.

    The caller is the store's only writer meanwhile. Blocks are taken one by one, so that a caller may copy each from
    a GPU only when it is wanted; their bytes are read when the batch is committed, and stay as they are until then.

    On disk, pages take no memory beside their blocks. Of a page of which little changed the changed elements are logged,
    and wait in memory for the next snapshot, up to `logged_max` bytes for all pages; any other changed page is written
    whole. In memory they are compared where they lie, and only what changed is logged. Of blocks that are captured the commit finds what changed, and they count as changed here.
    New ones on disk are begun: they are captured in the batch after the next flush.

    `flush` does the updates that it is given in the batch, commits it, now or later, and gives a new one: then no more
    than some megabytes of blocks are held at a time, and the store is in between two versions until the last batch.
    None in place of a block asks for that. Returns the last batch, and whether anything in it changed.

    :param tree: as JSON.
    :param last: of the call before, and for the next one.
    :param metadata: text by name, which is kept with the arrays.
    """
    last = last or LastManifest()
    old = last.pages(store)
    key_by_name = {array.name: key for key, arrays in old.items() for array in arrays}
    foreign = set(store.keys()) - old.keys()
    new: dict[str, Arrays] = {}
    sizes: dict[str, int] = {}
    changed = False
    updates: list[Update] = []
    # Bytes of the blocks in the batch.
    held = 0

    def taken(key: str) -> bool:
        return key in old or key in new or key in foreign

    for block in blocks:
        cost = 0
        if block is not None:
            cost = max(block.nbytes // _CAPTURED_PARTS if block.captured else block.nbytes, _COST_MIN)
        if flush is not None and (block is None or held + cost > _BATCH_BYTES and held):
            batch, held = flush(updates), 0
            updates = []
        if block is None:
            continue
        held += cost
        first = block.arrays[0]
        key = key_by_name.get(first.name)
        if key is None or key in new:
            key = key_of(first.name, taken)
        # Those of before, if they are the same: nothing is kept that is there already.
        before = old.get(key)
        new[key] = before if before is not None and before == block.arrays else block.arrays
        sizes[key] = block.nbytes
        whole = len(block.arrays) == 1 and first.stride is None
        dtype, shape = _of_file(first)
        said: dict[str, Any] = {"dtype": dtype}
        if whole:
            said |= {"name": first.name, "shape": shape}
        width = _width_of(block)
        is_captured = captures is not None and block.captured
        if key not in old:
            content = block.data if block.nbytes else 0
            # In both ways its bytes go to a file of their own: from a GPU's memory they would go to the log.
            if captures is not None and is_captured and place == "disk":
                content = block.nbytes
                captures.begin(key, block, width)
            elif is_captured:
                content = block.data.cpu()
            batch.create(content, key=key, place=place, metadata=said, at_commit=True)
            changed = True
            continue
        info = store.info(key)
        was = info.metadata
        for name in was.keys() - said.keys():
            batch.remove_metadata(key, name)
            changed = True
        for name, value in said.items():
            if name not in was or was[name] != value:
                batch.set_metadata(key, name, value)
                changed = True
        if info.place != place:
            batch.move_to(key, place)
            changed = True
        if captures is not None and is_captured and info.length == block.nbytes:
            captures.capture(batch, key, block, width)
            changed = True
        elif captures is not None and is_captured and place == "disk":
            batch.resize(key, block.nbytes)
            captures.begin(key, block, width)
            changed = True
        elif place == "host" and not is_captured and info.length == block.nbytes and block.nbytes:
            # The lease ends before the commit, which would have to copy the page for it.
            with store.lease(key, "uint8", [block.nbytes]) as held_there:
                changed |= batch.write_changes(key, held_there, block.data, width=width) > 0
        elif info.length != block.nbytes or block.nbytes:
            updates.append((key, block))
    changed |= update(batch, updates, logged_max)
    if captures is not None:
        captures.end()
    for key in old.keys() - new.keys():
        batch.delete(key)
        changed = True
    header = _header(new, sizes, metadata) if tree == "null" else None
    for key, content in ((MANIFEST_KEY, last.put(new, tree, metadata)), (HEADER_KEY, header)):
        changed |= _put_page(store, batch, key, content)
    return batch, changed


def save(directory: str | os.PathLike[str], blocks: Iterable[Block], tree: str = "null", *, note: str | None,
         name: str | None, durable: bool, kept: KeptVersions = KeptVersions(KEEP_DEFAULT),
         metadata: Mapping[str, str] | None = None) -> int:
    """Makes these arrays and this tree the newest version in `directory`, as `put` does; returns its Lsn.

    Then removes the versions that are not kept.
    """
    segments = log_files(directory)
    with open_store(directory) as store:
        if name is not None and any(info.name == name for info in store.snapshots()):
            raise TakenError(f"name: another version is named {name!r}", remedy="give the name up with `prune` first",
                             path=str(directory), name=name)
        # Half of the memory is left to short pages, which count for nothing here.
        logged_max = max(0, PENDING_BYTES // 2 - store.stats()["pending_bytes"])
        batch, changed = put(store, store.batch(note=note), blocks, tree, logged_max=logged_max,
                             metadata=metadata)
        if changed or note is not None:
            batch.set_root(SAVED_AT, time.time())
            store.commit(batch, "durable" if durable else "logged")
        elif durable:
            store.wait_durable()
        lsn = store.lsn
        if name is not None:
            keep_named(store, name)
        elif store.stats()["pending_bytes"] > PENDING_BYTES // 4:
            # The next open would have to replay all of it.
            store.snapshot(exact=True)
        kept.apply(store, segments)
        return lsn


def _width_of(block: Block) -> int:
    """Bytes of an element of its first array, by which it is compared with its page."""
    return min(16, _native.dtype(block.arrays[0].dtype)[2])


def _put_page(store: _native.Store, batch: _native.Batch, key: str, content: bytes | None) -> bool:
    if key not in store:
        if content is not None:
            batch.create(content, key=key)
        return content is not None
    before = store[key]
    if before == content:
        return False
    if content is None:
        batch.delete(key)
    elif len(before) == len(content):
        batch.write_changes(key, before, content)
    else:
        batch.resize(key, len(content))
        batch.write(key, 0, content)
    return True


# The tree: plain values as JSON, with one key of its own for what JSON does not tell apart.
TAG = _values.TAG


class Leaves(NamedTuple):
    """Values that `flatten` takes as they are: of these types, and of none that is made of them."""

    kinds: frozenset[type]
    # What stands for one is this and its name: its path, without the slash at the beginning.
    tag: str
    into: dict[str, Any]
    # An attribute; a value of which it is true goes to `adapt`.
    unless: str | None = None


def flatten(path: str, value: object, adapt: Plan, leaves: Leaves | None = None) -> Any:
    """A value as JSON that `unflatten` turns back. `adapt` takes what is an array or a library's own.

    No two places of the value have the same path. A path ends in the key of a dict as it is if that is a name, with
    `~0` for `~` and `~1` for `/`; in decimal if it is an integer, or a place in a list; and in `~:` and the key's JSON
    if it is anything else, or a name that looks like an integer among keys that are not all names.

    >>> from remanent._pages import flatten, unflatten
    >>> value = {"lr": 0.1, 3: (1, None), "big": 1 << 70, "raw": b"x", "$": [True]}
    >>> unflatten(flatten("optimizer", value, lambda path, value: None), lambda tag: None) == value
    True
    >>> flatten("optimizer", {"hook": print}, lambda path, value: None)
    Traceback (most recent call last):
    remanent._errors.RefusedError: optimizer/hook: a builtin_function_or_method cannot be stored
    """
    return json.loads(_native.flatten(path, value, adapt, leaves))


def unflatten(held: Any, adapt: Callable[[list[Any]], Any] = _values.unknown) -> Any:
    """The value of which `flatten` made this JSON, all of it. `adapt` takes the tags that `flatten`'s made.

    :raises NoStateError: for a value of a class that the program has not imported, or has otherwise than then.
    """
    return _values.Decoder(adapt).value(held)


def segment(name: str) -> str:
    """A name as it is in the paths of `flatten`, if all keys beside it are names."""
    return _native.segment(name)


def path_of(*names: str) -> str:
    """The path of `flatten` for a value in dicts whose keys are all names, by its keys."""
    return "/".join(map(segment, names))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of an array whose elements lie row by row, in elements."""
    strides = [1] * len(shape)
    for at in range(len(shape) - 1, 0, -1):
        strides[at - 1] = strides[at] * max(1, shape[at])
    return tuple(strides)
