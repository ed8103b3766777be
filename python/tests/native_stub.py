"""Copies the docstrings of `remanent._store._native` into its stub, which editors and type checkers read.

    python tests/native_stub.py     # in python/, with the package installed, after a change of a docstring in src/

`test_stub.py` fails if the stub and the native module differ.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

from remanent._store import _native

STUB = Path(__file__).parents[1] / "remanent" / "_store" / "_native.pyi"

Definition = ast.ClassDef | ast.FunctionDef


def definitions(tree: ast.Module) -> list[tuple[str, Definition, Any]]:
    """Returns the name, the node and the native object of each class, function, constructor and public method."""
    found: list[tuple[str, Definition, Any]] = []
    for node in tree.body:
        # Private classes describe arguments to type checkers, and exist only in the stub.
        if isinstance(node, ast.FunctionDef) or isinstance(node, ast.ClassDef) and is_public(node.name):
            owner = getattr(_native, node.name)
            found.append((node.name, node, owner))
            if isinstance(node, ast.ClassDef):
                found += [(f"{node.name}.{member.name}", member, native_of(owner, member.name))
                          for member in node.body if isinstance(member, ast.FunctionDef)
                          and (is_public(member.name) or member.name == "__new__")]
    return found


def native_of(owner: Any, name: str) -> Any:
    """Returns a method of a native class without calling it."""
    native = inspect.getattr_static(owner, name)
    return native.__func__ if isinstance(native, staticmethod) else native


def is_public(name: str) -> bool:
    return not name.rpartition(".")[2].startswith("_")


def docstring(text: str, indent: int) -> list[str]:
    """Returns the lines of a docstring."""
    assert '"""' not in text, text
    quotes = 'r"""' if "\\" in text else '"""'
    lines = [f"{' ' * indent}{line}".rstrip() for line in f"{quotes}{text}".splitlines()]
    return [*lines[:-1], f'{lines[-1]}"""'] if len(lines) == 1 else [*lines, f'{" " * indent}"""']


def with_docstrings(stub: str) -> str:
    """Returns the stub with the docstrings of the native module in the place of its own."""
    lines = stub.splitlines()
    for name, node, native in reversed(definitions(ast.parse(stub))):
        if not is_public(name):
            continue
        first, text = node.body[0], docstring(inspect.getdoc(native) or "", node.col_offset + 4)
        is_documented, is_empty = ast.get_docstring(node) is not None, ast.unparse(first) == "..."
        start, end = first.lineno - 1, first.end_lineno or 0
        if is_empty:  # `...` ends the line of the definition.
            lines[start] = lines[start].removesuffix(" ...")
            start = end
        elif not is_documented:  # The decorator of a class's first member is above the member.
            start = end = node.body[0].lineno - 1 - len(getattr(first, "decorator_list", ()))
        # Black separates a documented definition from the next one.
        if end < len(lines) and lines[end]:
            text.append("")
        lines[start:end] = text
    return "\n".join(lines) + "\n"


def main() -> None:
    STUB.write_text(with_docstrings(STUB.read_text()))


if __name__ == "__main__":
    sys.exit(main())
