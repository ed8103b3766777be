"""HTML tables for notebooks. All text from a store is escaped, and contents of pages are not shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from remanent._store import _native
from remanent._store.errors import Error

# The largest number of pages that a table lists, so that a notebook stays readable.
_ROWS = 20
_TEXT_LEN = 80


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return escape(text if len(text) <= _TEXT_LEN else text[: _TEXT_LEN - 1] + "…")


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    header = "".join(f"<th>{_cell(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def _shape(metadata: Mapping[str, Any]) -> str:
    if "dtype" not in metadata:
        return ""
    return f"{metadata['dtype']} {metadata.get('shape', '')}"


def reader(pages: _native.Reader) -> str:
    """Returns the HTML for a store, view or replica: a title, a table of its pages and a table of its root."""
    title = f"<p><b>{_cell(repr(pages))}</b></p>"
    try:
        infos, root, lsn = pages.pages(), pages.root, pages.lsn
    except Error as error:
        # The reader is closed, or inherited by a forked child.
        return title + f"<p>{_cell(str(error))}</p>"
    total = sum(info.length for info in infos)
    rows = [(info.page, "" if info.key is None else info.key, _size(info.length), _shape(info.metadata), info.place,
             info.epoch, info.lsn) for info in infos[:_ROWS]]
    more = f"<p>and {len(infos) - _ROWS} more</p>" if len(infos) > _ROWS else ""
    summary = f"<p>{len(infos)} pages, {_size(total)}, lsn {lsn}</p>"
    listed = _table(("page", "key", "length", "elements", "place", "epoch", "lsn"), rows) if rows else ""
    names = sorted(root)[:_ROWS]
    entries = _table(("root", "value"), ((name, _value(root[name])) for name in names)) if names else ""
    return title + summary + listed + more + entries


def _value(value: Any) -> str:
    """Returns the text of a root entry. Bytes and containers are represented by their length."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, (list, dict)):
        return f"{'list' if isinstance(value, list) else 'dict'} of {len(value)}"
    return repr(value)


def snapshot(info: _native.SnapshotInfo) -> str:
    """Returns the HTML table for a snapshot."""
    name = "" if info.name is None else info.name
    rows = [("id", info.id), ("name", name), ("state of lsn", info.end), ("pages", info.pages),
            ("images", _size(info.bytes)), ("written by this snapshot", _size(info.bytes_written)),
            ("read back", "yes" if info.verified else "not yet")]
    return _table(("snapshot", ""), rows)
