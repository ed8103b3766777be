"""Models with quantized weights of torchao and bitsandbytes: a save is restored unchanged, or refused by name."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")

from kinds import same  # noqa: E402

from remanent.torch import Checkpointer, load_file, load_model, save_file, save_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def plain() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(128, 128)).to(torch.bfloat16)


def configs() -> Iterator[Any]:
    """Returns the kinds of quantization in torchao, with their defaults."""
    base = importlib.import_module("torchao.core.config").AOBaseConfig
    for package in ("quantization", "sparsity"):
        top = importlib.import_module(f"torchao.{package}")
        for found in pkgutil.walk_packages(top.__path__, f"{top.__name__}.", onerror=lambda name: None):
            with contextlib.suppress(Exception):
                importlib.import_module(found.name)
    waiting, seen = [base], set()
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind not in seen:
            seen.add(kind)
            with contextlib.suppress(Exception):
                yield kind()


def quantized() -> Iterator[tuple[str, Any]]:
    """Returns a model for each kind that works on this machine."""
    quantize = importlib.import_module("torchao.quantization").quantize_
    for config in configs():
        model = plain()
        with contextlib.suppress(Exception):
            quantize(model, config)
            yield type(config).__name__, model


def test_torchao_tensors_are_rejected_by_name(directory: str) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    save_model(plain(), f"{directory}/plain")
    with Checkpointer(f"{directory}/run", plain(), rng=False) as run:
        run.save(1)
    kinds = set()
    for name, model in quantized():
        state = model.state_dict()
        kind = type(state["0.weight"])
        if kind is torch.Tensor:
            # Quantization-aware training does not change the weights.
            save_file(state, f"{directory}/{name}")
            assert same(load_file(f"{directory}/{name}"), dict(state)), name
            continue
        kinds.add(kind.__name__)
        before = copy.deepcopy(state["0.bias"])
        said = f"0.weight: a {kind.__module__}.{kind.__name__} cannot be stored"
        with pytest.raises(remanent.RefusedError, match=said):
            save_file(state, f"{directory}/{name}")
        assert not os.path.exists(f"{directory}/{name}")
        with Checkpointer(f"{directory}/{name}", model) as run:
            with pytest.raises(remanent.RefusedError, match=said):
                run.save(1)
            assert run.versions() == []
        with torch.no_grad():
            model[0].bias.fill_(7)
        with Checkpointer(f"{directory}/run", model, rng=False) as run, pytest.raises(remanent.InvalidError, match=kind.__name__):
            run.restore()
        with pytest.raises(remanent.MismatchError, match=kind.__name__):
            load_model(model, f"{directory}/plain")
        assert (model[0].bias == 7).all() and not same(before, model[0].bias)
    assert len(kinds) > 2, kinds


def test_bitsandbytes_layers_are_restored_or_rejected(directory: str) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    layers = importlib.import_module("bitsandbytes.nn")
    outcomes = {}
    for name, kind in sorted(vars(layers).items()):
        if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
            continue
        saved, found = (kind(64, 64).to("cpu") for _ in range(2))
        try:
            for model in (saved, found):
                # The first call quantizes the weights.
                model(torch.randn(2, 64) if name.startswith(("Linear", "Outlier")) else torch.tensor([1, 2]))
            state, before = copy.deepcopy(saved.state_dict()), copy.deepcopy(found.state_dict())
        except (NotImplementedError, RuntimeError):
            # The layer has no state or does not support this machine.
            continue
        with Checkpointer(f"{directory}/{name}", saved, rng=False) as run:
            run.save(1)
        with Checkpointer(f"{directory}/{name}", found, rng=False) as run:
            try:
                run.restore()
            except remanent.InvalidError as error:
                assert "load_state_dict does not accept it" in str(error), name
                outcomes[name] = same(dict(found.state_dict()), dict(before))
            else:
                outcomes[name] = same(dict(found.state_dict()), dict(state))
    assert len(outcomes) > 5 and all(outcomes.values()), outcomes
