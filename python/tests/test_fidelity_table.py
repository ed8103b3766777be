"""`docs/fidelity.md`: how a save and a restore treat each kind of value, compared with the current behaviour.

The rows are those that the libraries list themselves, so a new release may add some. A value without a row on the page
must be saved or refused like any other; `REMANENT_WRITE_FIDELITY=1` rewrites the page from the current results.
"""

from __future__ import annotations

import copy
import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")
numpy = pytest.importorskip("numpy", reason="NumPy is not installed")

import fidelity_rows as rows  # noqa: E402
import kinds  # noqa: E402
from fidelity_rows import Row, difference  # noqa: E402

from remanent.torch import Checkpointer, load_file, save_file  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "fidelity.md"
SAME, REFUSED, NO_STATE = "same bits", "refused by name", "no state"

# A function that creates an object of a run.
Maker = Callable[[], Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Uses one thread of torch, because tensors here are so short that threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameters(dtype: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((3, 4), (2, 2))]


def optimizers() -> dict[str, Maker]:
    found: dict[str, Maker] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for name, make in kinds.optimizer_makers().items():
            # LBFGS divides by zero with bfloat16.
            if not (name.startswith("LBFGS") and dtype == torch.bfloat16):
                found[f"{name}, {dtype}"] = lambda make=make, dtype=dtype: make(parameters(dtype))
    return found


# Schedulers that need arguments in addition to an optimizer.
_SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "MultiplicativeLR": lambda optimizer: torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "ExponentialLR": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "CosineAnnealingLR": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "CosineAnnealingWarmRestarts":
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "CyclicLR": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)],
        [2]),
    "ChainedScheduler": lambda optimizer: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)]),
}


def schedulers() -> dict[str, Maker]:
    found: dict[str, Maker] = {}
    modules = (torch.optim.lr_scheduler, torch.optim.swa_utils)
    for module in modules:
        for name, kind in sorted(vars(module).items()):
            if not isinstance(kind, type) or not issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
                continue
            if kind.__module__ == module.__name__ and name != "LRScheduler" and not name.startswith("_"):
                found[name] = lambda kind=kind, name=name: scheduled(name, kind)
    return found


def scheduled(name: str, kind: Any) -> Any:
    optimizer = torch.optim.SGD(parameters(torch.float32), lr=0.1, momentum=0.9)
    if name in _SCHEDULES:
        return _SCHEDULES[name](optimizer)
    return kind(optimizer, 0.05) if name == "SWALR" else kind(optimizer)


def used_scheduler(scheduler: Any) -> None:
    for at in range(3):
        scheduler.optimizer.step() if hasattr(scheduler, "optimizer") else None
        scheduler.step(1.0 / (at + 1)) if type(scheduler).__name__ == "ReduceLROnPlateau" else scheduler.step()


def others() -> dict[str, Maker]:
    """Returns other objects of torch that keep state in a training run."""
    linear = torch.nn.Linear
    swa = torch.optim.swa_utils
    found: dict[str, Maker] = {
        "GradScaler": lambda: torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1),
        "AveragedModel": lambda: swa.AveragedModel(linear(3, 2), use_buffers=True),
        "AveragedModel with EMA": lambda: swa.AveragedModel(linear(3, 2), multi_avg_fn=swa.get_ema_multi_avg_fn()),
        "Generator": lambda: torch.Generator(),
    }
    for name, kind in sorted(vars(torch.utils.data.sampler).items()):
        if isinstance(kind, type) and issubclass(kind, torch.utils.data.Sampler) and not name.startswith("_"):
            found[name] = lambda kind=kind, name=name: sampler(name, kind)
    found["DistributedSampler"] = lambda: torch.utils.data.DistributedSampler(range(8), num_replicas=2, rank=0)
    found["DataLoader"] = lambda: torch.utils.data.DataLoader(range(8))  # type: ignore[arg-type]
    return found


def sampler(name: str, kind: Any) -> Any:
    if name == "BatchSampler":
        return kind(torch.utils.data.SequentialSampler(range(8)), 2, False)
    if name == "WeightedRandomSampler":
        return kind([0.5, 0.5], 2)
    return kind() if name == "Sampler" else kind(range(8))


def used_other(made: Any) -> None:
    if isinstance(made, torch.amp.GradScaler):
        made.scale(torch.ones(1))
        made.update(16.0)
    elif isinstance(made, torch.optim.swa_utils.AveragedModel):
        made.update_parameters(torch.nn.Linear(3, 2))


def filled(module: Any) -> None:
    """Fills every tensor of a module with distinct values."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if not torch.nn.parameter.is_lazy(tensor):
                drawn = torch.rand(tensor.shape, generator=generator)
                tensor.copy_(drawn if tensor.is_floating_point() else drawn.round())


def of_objects(makers: dict[str, Maker], use: Callable[[Any], None], folder: Path) -> dict[str, str]:
    """Returns the results for objects with a state."""
    made = {name: make() for name, make in makers.items()}
    for each in made.values():
        use(each)
    refused = refused_of(made, folder)
    states = {name: copy.deepcopy(state_of(each)) for name, each in made.items() if name not in refused}
    fresh = {name: makers[name]() for name in states}
    restore_into(fresh, list(makers), folder)
    found = dict.fromkeys(refused, REFUSED)
    for name, each in fresh.items():
        lost = difference(states[name], state_of(each))
        found[name] = (SAME if states[name] else NO_STATE) if lost is None else f"other values: {lost}"
    return {name: found[name] for name in makers}


def refused_of(made: dict[str, Any], folder: Path) -> set[str]:
    """Saves these objects as parts of a run. Returns the names of the objects that are rejected."""
    refused: set[str] = set()
    names = list(made)
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        parts = {f"p{at}": made[name] for at, name in enumerate(names) if name not in refused}
        try:
            with Checkpointer(folder, extra=parts, rng=False) as run:
                run.save(1)
        except remanent.Error as error:
            named = re.match(r"p(\d+)\b", str(error))
            assert named, f"no part is named: {error}"
            refused.add(names[int(named[1])])
        else:
            return refused


def restore_into(fresh: dict[str, Any], names: list[str], folder: Path) -> None:
    """Restores the objects that `refused_of` saved into the objects of `fresh`.

    :param names: the names of all objects in the original order, which determines the name of each part.
    """
    parts = {f"p{at}": fresh[name] for at, name in enumerate(names) if name in fresh}
    with Checkpointer(folder, extra=parts, rng=False) as run:
        run.restore()


def state_of(made: Any) -> Any:
    state = made.state_dict()
    # Functions of a scheduler are not part of its state; the program creates them again.
    return dict(state) if isinstance(state, dict) else state


def of_values(table: list[Row], folder: Path) -> dict[str, str]:
    """Returns the results for values in a state that is a dict."""
    made = {row.name: {"of": row.make()} for row in table}
    refused = refused_of(made, folder)
    fresh: dict[str, Any] = {name: {} for name in made if name not in refused}
    restore_into(fresh, list(made), folder)
    found = dict.fromkeys(refused, REFUSED)
    for name, each in fresh.items():
        lost = difference(made[name]["of"], each["of"])
        found[name] = SAME if lost is None else f"other values: {lost}"
    return {name: found[name] for name in made}


def of_files(table: list[Row], folder: Path) -> dict[str, str]:
    """Returns the results of `save_file` and `load_file` for tensors."""
    found = {}
    for row in table:
        tensor = row.make()
        try:
            save_file({"of": tensor}, folder / "each")
        except remanent.Error as error:
            assert str(error).startswith("of"), f"{row.name}: {error}"
            found[row.name] = REFUSED
        else:
            loaded = load_file(folder / "each")["of"]
            # `save_file` stores neither tensor subclasses nor gradients.
            plain = tensor.detach()
            plain = plain.as_subclass(torch.Tensor) if type(plain) is not torch.Tensor else plain
            lost = difference(plain, loaded)
            found[row.name] = SAME if lost is None else f"other values: {lost}"
            shutil.rmtree(folder / "each")
    return found


def observed(root: Path) -> dict[str, dict[str, str]]:
    """Returns the result of each row, by section."""
    from remanent._tensors.conversion import SHORT

    dtypes = rows.torch_dtype_rows(SHORT)
    folder = root / "run"
    modules = {name: make for name, make in kinds.module_makers().items() if not name.startswith("Lazy")}
    return {
        "Optimizers of `torch.optim`": of_objects(optimizers(), lambda made: kinds.step(made, 1), folder),
        "Schedulers": of_objects(schedulers(), used_scheduler, folder),
        "Scalers, averaged models, samplers": of_objects(others(), used_other, folder),
        "Modules of `torch.nn`": of_objects(modules, filled, folder),
        "Plain values and containers": of_values(rows.VALUES, folder),
        "Keys of dicts": of_values(rows.KEYS, folder),
        "Types of elements of torch, by `Checkpointer`": of_values(dtypes, folder),
        "Types of elements of torch, by `save_file`": of_files(dtypes, folder),
        "Kinds of tensors, by `Checkpointer`": of_values(rows.TENSOR_KINDS, folder),
        "Arrays of NumPy and ml_dtypes": of_values(rows.NUMPY_ARRAYS, folder),
        "Scalars of NumPy and ml_dtypes": of_values(rows.NUMPY_SCALARS, folder),
        "Kinds of arrays": of_values(rows.NUMPY_KINDS, folder),
    }


HEAD = """# What a restore gives back

A restore returns the same bits, dtype, shape, type and aliasing, or the save refuses the value by its name before it
writes anything. Nothing is converted unless a call asks for it: `Checkpointer.restore(cast=True)`, or a dtype in an
Orbax template.

`python/tests/test_fidelity_table.py` observes every row and fails if this page states otherwise. With
`REMANENT_WRITE_FIDELITY=1` it writes the page. The rows are the kinds that each library lists. *No state* means that
the object has none, so nothing can be lost. Trees of JAX arrays are tested in `python/tests/test_jax.py`, Orbax in
`python/tests/test_orbax.py`.

"""


def written(found: dict[str, dict[str, str]]) -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__.split('+')[0]}, NumPy {numpy.__version__}"
    if rows.ml_dtypes is not None:
        versions += f", ml_dtypes {rows.ml_dtypes.__version__}"
    text = HEAD + f"Observed with {versions}.\n"
    for section, results in found.items():
        text += f"\n## {section}\n\n| | same bits | refused by name | no state |\n|---|---|---|---|\n"
        for name, result in results.items():
            marks = " | ".join("x" if result == each else "" for each in (SAME, REFUSED, NO_STATE))
            text += f"| {shown(name)} | {marks} |\n"
    return text


def shown(name: str) -> str:
    return name.replace("|", "\\|").replace("torch.", "")


def read(page: str) -> dict[tuple[str, str], str]:
    """Returns the results that the page states, by section and row."""
    found, section = {}, ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif row := re.fullmatch(r"\| (.+) \| (x?) \| (x?) \| (x?) \|", line):
            [result] = [each for each, mark in zip((SAME, REFUSED, NO_STATE), row.groups()[1:], strict=True) if mark]
            found[section, row[1]] = result
    return found


@pytest.mark.filterwarnings("ignore")
def test_page_states_observed_fidelity(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = observed(tmp_path)
    results = {(section, shown(name)): result for section, each in found.items() for name, result in each.items()}
    wrong = {row: result for row, result in results.items() if result not in (SAME, REFUSED, NO_STATE)}
    assert not wrong, wrong
    if os.environ.get("REMANENT_WRITE_FIDELITY"):
        PAGE.write_text(written(found))
    stated = read(PAGE.read_text())
    assert len(stated) > 300
    changed = {row: (stated[row], result) for row, result in results.items() if row in stated and stated[row] != result}
    assert not changed, f"the page states otherwise: {changed}"
