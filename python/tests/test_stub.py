"""The stub of the native module states the docstrings, parameters and defaults of the module itself."""

from __future__ import annotations

import ast
import inspect

import native_stub
import pytest

STUB = native_stub.STUB.read_text()
DEFINITIONS = native_stub.definitions(ast.parse(STUB))


def test_docstrings_are_those_of_the_native_module() -> None:
    differing = [name for name, node, native in DEFINITIONS
                 if native_stub.is_public(name) and ast.get_docstring(node) != inspect.getdoc(native)]
    assert differing == [], "run python/tests/native_stub.py"
    assert native_stub.with_docstrings(STUB) == STUB, "run python/tests/native_stub.py"


def test_exported_names_are_those_of_the_native_module() -> None:
    [listed] = [each.value for each in ast.parse(STUB).body
                if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__"]
    assert sorted(ast.literal_eval(listed)) == sorted(native_stub._native.__all__)


def test_every_public_definition_has_a_docstring() -> None:
    assert [name for name, node, _ in DEFINITIONS
            if native_stub.is_public(name) and not ast.get_docstring(node)] == []


def test_missing_and_changed_docstrings_are_detected() -> None:
    changed = STUB.replace('"""Submits', '"""Ignores', 1)
    assert changed != STUB and native_stub.with_docstrings(changed) == STUB
    empty = "@final\nclass Ticket:\n    @property\n    def lsn(self) -> int: ...\n    @property\n" \
            "    def pages(self) -> Sequence[int]: ...\n\ndef close_all() -> None: ...\n"
    whole = native_stub.with_docstrings(empty)
    assert native_stub.with_docstrings(whole) == whole
    assert '    def lsn(self) -> int:\n        """The Lsn of the batch."""\n\n    @property\n' in whole
    assert whole.endswith('def close_all() -> None:\n    """'
                          'Closes all open stores. The package registers this function with `atexit`."""\n')


def stated(node: ast.FunctionDef) -> list[tuple[str, object, object]]:
    """Returns the name, kind and default of each parameter in the stub, except `self` and `cls`."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    parameters = [(each, inspect.Parameter.POSITIONAL_ONLY if each in arguments.posonlyargs
                   else inspect.Parameter.POSITIONAL_OR_KEYWORD, default)
                  for each, default in zip(positional, defaults, strict=True)]
    parameters += [(each, inspect.Parameter.KEYWORD_ONLY, default)
                   for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [(each.arg, kind, inspect.Parameter.empty if default is None else ast.literal_eval(default))
            for each, kind, default in parameters if each.arg not in ("self", "cls")]


@pytest.mark.parametrize(("name", "node", "native"), [
    pytest.param(name, node, native, id=name) for name, node, native in DEFINITIONS
    if isinstance(node, ast.FunctionDef) and callable(native) and (native_stub.is_public(name) or name.endswith("__new__"))
])
def test_parameters_are_those_of_the_native_module(name: str, node: ast.FunctionDef, native: object) -> None:
    if name.endswith(".__new__"):
        native = getattr(native_stub._native, name.removesuffix(".__new__"))
    signature = inspect.signature(native)  # type: ignore[arg-type]
    assert [(each.name, each.kind, each.default) for each in signature.parameters.values() if each.name != "self"] == stated(node)
