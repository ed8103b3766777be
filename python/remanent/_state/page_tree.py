"""Stores named arrays of bytes as pages of a store, with a tree of plain values.

A *block* is one page: the bytes of one array, or of several arrays that share memory. An additional page, the manifest,
contains JSON. The manifest lists the arrays of each page and their layout, and contains a tree of plain values, in
which names represent arrays. Nothing is pickled. A page with a single complete array also has `name`, `dtype` and
`shape` in its metadata, like the pages that `remanent import` creates. `remanent diff`, `blame` and `bisect` can
therefore interpret its elements. If all pages are of that kind and there is no tree, the header of a safetensors file
is stored as another page, and `remanent export` writes the file.
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

from remanent._state import plain_values
from remanent._store import _native
from remanent._store._native import ArrayLayout, Block
from remanent._store.errors import DamagedError, DiskFullError, NoStateError, TakenError
from remanent._versions.retention import (
    KEEP_DEFAULT,
    PENDING_BYTES,
    REPLAYED_BYTES,
    SAVED_AT,
    KeptVersions,
    keep_named,
    log_files,
    open_store,
    replayed_bytes,
)

MANIFEST_KEY = "remanent tensors"
HEADER_KEY = "safetensors header"
_RESERVED = (MANIFEST_KEY, HEADER_KEY)
_KEY_LEN_MAX = 64
# An element of two 4-bit numbers, and such a number by itself.
_PAIRS, _NUMBERS = "F4_X2", "F4"
# Element types that a weight file cannot contain.
_OF_NO_FILE = ("C32", "C128", _PAIRS)
# The length of a batch in bytes if a save consists of several batches. A longer page gets its own batch.
_BATCH_BYTES = 64 << 20
# The number of bytes that one call compares with the pages. A key press such as Ctrl-C takes effect between calls.
_COMPARED_BYTES = 512 << 20
# A batch may contain this many times `_BATCH_BYTES` of captured blocks, because usually only a small part of them
# changed. Even if all of them changed, the batch would not exceed the limit of the log.
_CAPTURED_PARTS = 6
# The smallest size in bytes that is charged for a block in a batch. Changes of short pages on disk are held in memory
# until the next snapshot, and the budget suffices for a few batches at a time.
_COST_MIN = 20 << 10


class Plan(Protocol):
    """Converts the arrays of one library; see `flatten`."""

    def __call__(self, path: str, value: object) -> object | None:
        """Returns the JSON value that represents `value` if it belongs to the library, else None."""


class Captures(Protocol):
    """Captures blocks in place; see `Copies`."""

    def capture(self, batch: _native.Batch, key: str, block: Block, width: int) -> None: ...

    def begin(self, key: str, block: Block, width: int) -> None: ...

    def end(self) -> None: ...


# The key of a page on disk, and the block with its new bytes.
Update = tuple[str, Block]
# The arrays of a page.
Arrays = tuple[ArrayLayout, ...]


def update(batch: _native.Batch, updates: Iterable[Update], logged_max: int | None = None) -> bool:
    """Adds updates to a batch and returns whether any element changed. Each update reads its page.

    :param logged_max: the bytes of memory that the changed elements of all pages may occupy until the next snapshot. A
        page whose changes would exceed this is written completely. None uses the default of `Batch.update`.
    """
    changed, held = False, 0
    group: list[tuple[str, Any, int]] = []
    for key, block in updates:
        # With one page too many, all other threads would wait for the one that compares it.
        if held >= _COMPARED_BYTES:
            changed |= _compare(batch, group, logged_max)
            group, held = [], 0
        group.append((key, block.data if block.nbytes else b"", _width_of(block)))
        held += block.nbytes
    return _compare(batch, group, logged_max) or changed


def _compare(batch: _native.Batch, updates: list[tuple[str, Any, int]], logged_max: int | None) -> bool:
    return any(count != 0 for count in batch._update_many(updates, logged_max=logged_max))


@dataclass
class Manifest:
    """The contents of a store: its arrays by page, and the tree of plain values."""

    pages: dict[str, Arrays]
    tree: Any = None
    metadata: dict[str, str] | None = None


class LastManifest:
    """The last manifest that was written, cached for the next save, which usually repeats most of it."""

    def __init__(self) -> None:
        self._text: bytes | None = None
        self._pages: dict[str, Arrays] = {}
        # The JSON of the pages.
        self._listed = ""

    def pages(self, reader: _native.Reader) -> dict[str, Arrays]:
        """Returns the arrays in the store, by page."""
        text = reader[MANIFEST_KEY] if MANIFEST_KEY in reader else None
        if text is None or text != self._text:
            self._text, self._pages, self._listed = None, {}, ""
            with contextlib.suppress(NoStateError):
                self._pages = read_manifest(reader).pages
        return self._pages

    def put(self, pages: dict[str, Arrays], tree: str, metadata: Mapping[str, str] | None) -> bytes:
        """Returns the JSON of a manifest with these pages and this tree, and caches it."""
        if not self._listed or pages != self._pages or list(pages) != list(self._pages):
            listed = {key: [array.listed() for array in arrays] for key, arrays in pages.items()}
            self._listed = json.dumps(listed, separators=(",", ":"))
        self._pages = pages
        metadata_text = "" if metadata is None else f',"metadata":{json.dumps(metadata, separators=(",", ":"))}'
        self._text = f'{{"format":1,"pages":{self._listed},"tree":{tree}{metadata_text}}}'.encode()
        return self._text


def key_of(name: str, taken: Callable[[str], bool]) -> str:
    """Returns the key for an array's page: the array's name if possible, or else the beginning of the name and a
    hash."""
    if name and len(name.encode()) <= _KEY_LEN_MAX and name not in _RESERVED and not taken(name):
        return name
    for number in range(1 << 20):
        ending = "~" + hashlib.blake2b(f"{number}:{name}".encode(), digest_size=8).hexdigest()
        start = name.encode()[: _KEY_LEN_MAX - len(ending)].decode(errors="ignore")
        if not taken(start + ending):
            return start + ending
    raise AssertionError("a million hashes of eight bytes are not all taken")


def read_manifest(reader: _native.Reader) -> Manifest:
    """Returns the manifest of a store. The tensors of a store that `remanent import` filled are also returned as a
    manifest."""
    if MANIFEST_KEY in reader:
        try:
            held = json.loads(reader[MANIFEST_KEY])
            pages = {
                key: tuple(ArrayLayout(*array) for array in arrays)
                for key, arrays in held["pages"].items()
            }
            return Manifest(pages, held["tree"], held.get("metadata"))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise DamagedError(f"page {MANIFEST_KEY!r} is not a list of tensors, so another program wrote to it: {error}",
                               remedy="restore an earlier version") from error
    pages = {}
    for info in reader.pages():
        page_metadata = info.metadata
        if {"name", "dtype", "shape"} <= page_metadata.keys() and info.key is not None:
            pages[info.key] = (_of_metadata(page_metadata),)
    if not pages:
        raise NoStateError("the store contains no tensors", remedy="save tensors first, or use another directory")
    return Manifest(pages, metadata=_metadata_of(reader))


def _metadata_of(reader: _native.Reader) -> dict[str, str] | None:
    """Returns the metadata in the header of an imported safetensors file, or None."""
    if HEADER_KEY not in reader:
        return None
    try:
        header = json.loads(reader[HEADER_KEY][8:])
    except ValueError as error:
        raise DamagedError(f"page {HEADER_KEY!r} is not the header of a safetensors file, so another program wrote to "
                           f"it: {error}", remedy="restore an earlier version") from error
    return header.get("__metadata__") if isinstance(header, dict) else None


def _of_file(array: ArrayLayout) -> tuple[str, list[int]]:
    """Returns the dtype and shape of an array in a weight file. The shape in a weight file counts 4-bit numbers, not
    pairs of them."""
    if array.dtype != _PAIRS or not array.shape:
        return array.dtype, list(array.shape)
    return _NUMBERS, [*array.shape[:-1], 2 * array.shape[-1]]


def _of_metadata(page_metadata: Mapping[str, Any]) -> ArrayLayout:
    """Returns the layout of an array whose page has the name, dtype and shape of a weight file in its metadata."""
    *outer, last = page_metadata["shape"] or [1]
    if page_metadata["dtype"] == _NUMBERS and last % 2 == 0:
        return ArrayLayout(page_metadata["name"], _PAIRS, [*outer, last // 2])
    return ArrayLayout(page_metadata["name"], page_metadata["dtype"], page_metadata["shape"])


def _header(pages: Mapping[str, Arrays], sizes: Mapping[str, int], metadata: Mapping[str, str] | None) -> bytes | None:
    """Returns the header of a safetensors file with these arrays, or None if such a file cannot contain them."""
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
    """Changes the store to contain exactly these arrays and this tree. Unchanged data is not logged.

    The caller must be the only writer of the store during the call. Blocks are requested one at a time, so that the
    caller can copy each from a GPU when it is needed. The bytes of a block are read when the batch is committed and
    must not change before then.

    Pages on disk need no memory in addition to their blocks. If only a small part of a page changed, its changed
    elements are logged, and held in memory until the next snapshot, up to `logged_max` bytes for all pages. Any other
    changed page is written completely. Pages in memory are compared in place, and only changes are logged.

    The changes of captured blocks are only found by the commit, so the result reports every captured block as changed.
    If a captured block has no page on disk yet, the page is created, and the block is captured in the batch after the
    next flush.

    `flush` adds the passed updates to the batch, commits the batch now or later, and returns a new one. With `flush`,
    only a few megabytes of blocks are held at a time, and the store is between two versions until the last batch. A
    None in place of a block requests a flush.

    :returns: the last batch, and whether it contains a change.

    :param tree: the tree as JSON text.
    :param last: the manifest of the previous call, updated for the next call.
    :param metadata: text values by name that are stored with the arrays.
    """
    last = last or LastManifest()
    old = last.pages(store)
    key_by_name = {array.name: key for key, arrays in old.items() for array in arrays}
    foreign = set(store.keys()) - old.keys()
    new: dict[str, Arrays] = {}
    sizes: dict[str, int] = {}
    changed = False
    updates: list[Update] = []
    # The bytes of the blocks in the batch.
    held = 0

    def taken(key: str) -> bool:
        return key in old or key in new or key in foreign

    for block in blocks:
        cost = 0 if block is None else _batch_cost(block)
        if flush is not None and (block is None or held + cost > _BATCH_BYTES and held):
            batch, held = flush(updates), 0
            updates = []
        if block is None:
            continue
        held += cost
        name = block.arrays[0].name
        key = key_by_name.get(name)
        if key is None or key in new:
            key = key_of(name, taken)
        # Reuse the previous layout objects if they are equal, so that equal layouts are not kept twice.
        before = old.get(key)
        new[key] = before if before is not None and before == block.arrays else block.arrays
        sizes[key] = block.nbytes
        width = _width_of(block)
        if key not in old:
            _create_page(batch, key, block, place, width, captures)
            changed = True
            continue
        info = store.info(key)
        changed |= _change_metadata(batch, key, info.metadata, _page_metadata(block))
        is_captured = captures is not None and block.captured
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
            # The lease ends before the commit, which would otherwise have to copy the page.
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


def _batch_cost(block: Block) -> int:
    """Returns the bytes that are charged for a block in a batch."""
    return max(block.nbytes // _CAPTURED_PARTS if block.captured else block.nbytes, _COST_MIN)


def _page_metadata(block: Block) -> dict[str, Any]:
    """Returns the metadata of a block's page."""
    first = block.arrays[0]
    dtype, shape = _of_file(first)
    if len(block.arrays) == 1 and first.stride is None:
        return {"dtype": dtype, "name": first.name, "shape": shape}
    return {"dtype": dtype}


def _create_page(batch: _native.Batch, key: str, block: Block, place: str, width: int,
                 captures: Captures | None) -> None:
    content = block.data if block.nbytes else 0
    # Write the bytes of a captured block to a separate file, by a later capture or from host memory. Bytes in GPU
    # memory would be written to the log.
    if captures is not None and block.captured and place == "disk":
        content = block.nbytes
        captures.begin(key, block, width)
    elif captures is not None and block.captured:
        content = block.data.cpu()
    batch.create(content, key=key, place=place, metadata=_page_metadata(block), at_commit=True)


def _change_metadata(batch: _native.Batch, key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Replaces the metadata of a page, and returns whether any entry changed."""
    removed = old.keys() - new.keys()
    for name in removed:
        batch.remove_metadata(key, name)
    different = [(name, value) for name, value in new.items() if name not in old or old[name] != value]
    for name, value in different:
        batch.set_metadata(key, name, value)
    return bool(removed or different)


def save(directory: str | os.PathLike[str], blocks: Iterable[Block], tree: str = "null", *, note: str | None,
         name: str | None, durable: bool, kept: KeptVersions = KeptVersions(KEEP_DEFAULT),
         metadata: Mapping[str, str] | None = None) -> int:
    """Saves these arrays and this tree as the newest version in `directory`, as `put` does, and returns its Lsn.

    Versions that `kept` does not keep are then removed.
    """
    segments = log_files(directory)
    with open_store(directory) as store:
        if name is not None and any(info.name == name for info in store.snapshots()):
            raise TakenError(f"name: another version is named {name!r}", remedy="remove the name with `prune` first",
                             path=str(directory), name=name)
        # Half of the memory is left to short pages, which do not count here.
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
        elif store.stats()["pending_bytes"] > PENDING_BYTES // 4 or replayed_bytes(store) > REPLAYED_BYTES:
            # The next open would otherwise have to hold or replay all of it. The version is complete without the
            # snapshot, so a full disk only makes the next save slower.
            with contextlib.suppress(DiskFullError):
                store.snapshot(exact=True)
        kept.apply(store, segments)
        return lsn


def _width_of(block: Block) -> int:
    """Returns the bytes per element of the first array. The block is compared with its page in units of this size."""
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


# The tree: plain values as JSON, with a reserved key for what JSON cannot distinguish.
TAG = plain_values.TAG


class Leaves(NamedTuple):
    """Types whose values `flatten` collects instead of converting them. Only values of exactly these types are
    collected."""

    kinds: frozenset[type]
    # The tag that represents such a value together with its name, which is its path without the leading slash.
    tag: str
    into: dict[str, Any]
    # An attribute; a value for which it is true is passed to `adapt`.
    unless: str | None = None


def flatten(path: str, value: object, adapt: Plan, leaves: Leaves | None = None) -> Any:
    """Converts a value to JSON, which `unflatten` converts back. `adapt` converts arrays and objects of other
    libraries.

    Each value has a unique path, which ends with its key in a dict or its index in a list. A key that is a name is
    unchanged, except that `~` becomes `~0` and `/` becomes `~1`. An integer is written in decimal. Any other key, or a
    name that looks like an integer in a dict whose keys are not all names, becomes `~:` and the key's JSON.

    >>> from remanent._state.page_tree import flatten, unflatten
    >>> value = {"lr": 0.1, 3: (1, None), "big": 1 << 70, "raw": b"x", "$": [True]}
    >>> unflatten(flatten("optimizer", value, lambda path, value: None), lambda tag: None) == value
    True
    >>> flatten("optimizer", {"hook": print}, lambda path, value: None)
    Traceback (most recent call last):
    remanent.RefusedError: optimizer/hook: a builtin_function_or_method cannot be stored
    """
    return json.loads(_native.flatten(path, value, adapt, leaves))


def unflatten(held: Any, adapt: Callable[[list[Any]], Any] = plain_values.unknown) -> Any:
    """Converts JSON of `flatten` back to a value. `adapt` converts the tags that the `adapt` of `flatten` created.

    :raises NoStateError: a value has a class that the program has not imported, or that has changed since the save.
    """
    return plain_values.Decoder(adapt).value(held)


def segment(name: str) -> str:
    """Returns a name as it appears in paths of `flatten` if all keys of its dict are names."""
    return _native.segment(name)


def path_of(*names: str) -> str:
    """Returns the path that `flatten` gives a value in nested dicts whose keys are all names."""
    return "/".join(map(segment, names))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of an array in row-major order, in elements."""
    strides = [1] * len(shape)
    for at in range(len(shape) - 1, 0, -1):
        strides[at - 1] = strides[at] * max(1, shape[at])
    return tuple(strides)
