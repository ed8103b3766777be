"""Small JSON files with a checksum. The first line contains the checksum, and each further line contains one part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from remanent._store.errors import DamagedError


def begins(kind: str) -> bytes:
    """Returns the first bytes of a file of this kind, which are the same in all versions of the format."""
    return f'{{"remanent {kind}": '.encode()


def seal(kind: str, parts: Iterable[Any]) -> bytes:
    """Returns the contents of a file with these parts.

    >>> from remanent._util.checksummed_json import parts_of, seal
    >>> content = seal("example", [{"step": 1}, "all the rest"])
    >>> content.splitlines()[1:]
    [b'{"step":1}', b'"all the rest"']
    """
    lines = [json.dumps(part, separators=(",", ":"), allow_nan=False).encode() + b"\n" for part in parts]
    body = b"".join(lines)
    return _sum_line(kind, body) + b"\n" + body


def parts_of(kind: str, content: bytes, path: Path) -> list[bytes]:
    """Returns the parts of a file's contents, each as the bytes of its JSON.

    :raises DamagedError: the contents are damaged, or were written by a newer version of this package.
    """
    first, _, body = content.partition(b"\n")
    if first != _sum_line(kind, body):
        raise DamagedError(f"{path} is damaged, or was written by a newer version of this package",
                           remedy=f"load another {kind}", path=str(path.parent))
    return body.splitlines()


def _sum_line(kind: str, body: bytes) -> bytes:
    return begins(kind) + b'1, "blake2b": "' + hashlib.blake2b(body, digest_size=16).hexdigest().encode() + b'"}'
