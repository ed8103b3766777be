"""Every public name is documented, and the examples of the engine's classes run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import remanent

CLASSES = [each for each in map(remanent.__dict__.get, dir(remanent)) if inspect.isclass(each)]


def documented() -> list[tuple[str, str]]:
    found = []
    for owner in CLASSES:
        if owner.__module__ == "remanent":
            found.append((owner.__name__, owner.__doc__ or ""))
            for name, member in vars(owner).items():
                if not name.startswith("_"):
                    found.append((f"{owner.__name__}.{name}", inspect.getdoc(member) or ""))
    return found


def test_every_public_name_is_documented() -> None:
    short = [name for name, text in documented() if len(text.split()) < 3]
    short += [owner.__name__ for owner in CLASSES if not owner.__doc__]
    assert not short


def run_examples(test: doctest.DocTest) -> None:
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=output.append)
    assert runner.failures == 0 and runner.tries > 0, "".join(output)


@pytest.mark.parametrize(("name", "text"), [each for each in documented() if ">>>" in each[1]])
def test_class_example_runs(name: str, text: str, tmp_path: Path) -> None:
    names = {"remanent": remanent, "directory": str(tmp_path / "example")}
    run_examples(doctest.DocTestParser().get_doctest(inspect.cleandoc(text), names, name, None, 0))


# Modules with examples, and the package that they need.
EXAMPLES = {
    "remanent": None, "remanent._state.page_tree": None, "remanent.kv": None,
    "remanent._checkpoint.checkpointer": "torch", "remanent._versions.retention": "torch", "remanent.dcp": "torch",
    "remanent.torch": "torch", "remanent.weights": "torch", "remanent._tensors.tensor_files": "safetensors.torch",
    "remanent._dcp.archives": "torch", "remanent._dcp.formats": "safetensors.torch",
    "remanent.integrations.torch_checkpointing": "torch_checkpointing",
    "remanent.jax": "jax",
}


@pytest.mark.parametrize("module", [pytest.param(module, marks=pytest.mark.jax) if needs == "jax" else module
                                    for module, needs in EXAMPLES.items()])
def test_module_examples_run(module: str, tmp_path: Path) -> None:
    if needs := EXAMPLES[module]:
        pytest.importorskip(needs)
    tests = [test for test in doctest.DocTestFinder().find(importlib.import_module(module)) if test.examples]
    assert tests
    for number, test in enumerate(tests):
        test.globs |= {"remanent": remanent, "directory": str(tmp_path / f"example{number}")}
        run_examples(test)


def test_readme_examples_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    names = {"remanent": remanent, "directory": str(tmp_path / "example")}
    run_examples(doctest.DocTestParser().get_doctest(readme, names, "README.md", None, 0))


DOCS = Path(__file__).parents[2] / "docs"
ADAPTERS = DOCS / "adapters.md"


@pytest.mark.parametrize("page", ["adapters.md", "guides/training.md", "guides/kv-cache.md", "guides/weights.md"])
def test_page_examples_run(page: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    names = {"remanent": remanent, "directory": str(tmp_path / "example")}
    run_examples(doctest.DocTestParser().get_doctest((DOCS / page).read_text(), names, page, None, 0))


def test_repository_readme_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    page = (DOCS.parent / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for _ in range(2):  # The second time restores.
        exec(compile(code, "README.md", "exec"), {})
    from remanent.torch import Checkpointer
    with Checkpointer(tmp_path / "run") as run:
        assert [version.step for version in run.versions()] == [18, 19, 20]


def test_pages_fit_a_screen() -> None:
    for page in [*DOCS.glob("guides/*.md"), DOCS.parent / "README.md", DOCS.parent / "python" / "README.md"]:
        sections = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
        assert max(section.count("\n") for section in sections) <= 42, page
        assert page.parent.name != "guides" or len(page.read_text().splitlines()) <= 80, page
    python = (DOCS.parent / "python" / "README.md").read_text()
    assert max(map(len, python.splitlines())) <= 110


def test_adapters_page_shows_module_configurations() -> None:
    """The configurations on the page are those in the modules' docstrings, which the adapters' tests run."""
    page = ADAPTERS.read_text()
    shown = [each for each in re.findall(r"```(?:sh|python)\n(.*?)```", page, re.DOTALL) if ">>>" not in each]
    folder = Path(remanent.__file__).parent
    texts = {module: ast.get_docstring(ast.parse((folder / f"{module.replace('.', '/')}.py").read_text())) or ""
             for module in re.findall(r"\| `remanent\.([\w.]+)` \|", page)}
    used: set[str] = set()
    for code in shown:
        owners = {module for module, text in texts.items() if textwrap.indent(code.rstrip(), " " * 4) in text}
        assert owners, f"no module shows this:\n{code}"
        used |= owners
    # All other adapters have examples, which run.
    assert texts.keys() - used == {"dcp", "kv"}


def test_main_classes_have_examples() -> None:
    texts = dict(documented())
    for name in ("Store", "Batch", "Ticket", "View", "LiveView", "Lease", "Array", "Follower", "Replica", "Reader", "PageInfo"):
        assert ">>>" in texts[name], name
