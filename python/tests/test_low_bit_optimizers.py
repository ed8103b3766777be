"""The optimizers of torchao and bitsandbytes: each state is restored as it was saved, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")

from kinds import same, step  # noqa: E402

from remanent.torch import Checkpointer  # noqa: E402


def makers_of(package: str) -> dict[str, Any]:
    """Returns the optimizers of a package, by name."""
    optimizers = pytest.importorskip(f"{package}.optim", reason=f"{package} is not installed")
    return {name: kind for name, kind in sorted(vars(optimizers).items())
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}


def made(makers: dict[str, Any], dtype: torch.dtype, length: int) -> dict[str, Any]:
    found = {}
    for name, kind in makers.items():
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(length, 64).to(dtype))]
        try:
            options = {"momentum": 0.9} if name.startswith(("SGD", "LARS", "RMSprop", "PytorchLARS")) else {}
            found[name] = kind(parameters, lr=0.01, **options)
        except (TypeError, ValueError, NotImplementedError, RuntimeError, AssertionError):
            # Wrappers of other optimizers, and optimizers that need a GPU.
            continue
    return found


def stepped(optimizers: dict[str, Any]) -> dict[str, Any]:
    """Returns the optimizers that can take a step on this machine."""
    found = {}
    for name, optimizer in optimizers.items():
        try:
            step(optimizer, 1)
            step(optimizer, 2)
        except (NotImplementedError, RuntimeError, AssertionError):
            continue
        found[name] = optimizer
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitsandbytes_states_are_restored(directory: str, dtype: torch.dtype) -> None:
    makers = makers_of("bitsandbytes")
    saved = stepped(made(makers, dtype, 128))
    assert len(saved) > 20 and any(name.endswith("8bit") for name in saved), sorted(saved)
    expected = {name: copy.deepcopy(optimizer.state_dict()) for name, optimizer in saved.items()}
    with Checkpointer(directory, extra=saved) as run:
        run.save(1)
    for has_state in (False, True):
        found = {name: optimizer for name, optimizer in made(makers, dtype, 128).items() if name in saved}
        if has_state:
            found = stepped(found)
        with Checkpointer(directory, extra=found) as run:
            run.restore()
        others = [name for name, optimizer in found.items() if not same(optimizer.state_dict(), expected[name])]
        assert not others, others


@pytest.mark.filterwarnings("ignore")
def test_torchao_states_are_restored_or_rejected(directory: str) -> None:
    makers = makers_of("torchao")
    # Short states are plain tensors; longer ones are of torchao's own tensor types.
    for length in (8, 256):
        saved = made(makers, torch.bfloat16, length)
        assert len(saved) > 4, sorted(saved)
        for at, (name, optimizer) in enumerate(saved.items()):
            [parameter] = optimizer.param_groups[0]["params"]
            # The state that the first step creates, here without a compiler.
            optimizer.state[parameter] = {
                "step": torch.tensor(3.0), "exp_avg": optimizer._new_buffer(parameter, True),
                "exp_avg_sq": optimizer._new_buffer(parameter, False)}
            path = f"{directory}{length}{at}"
            is_plain = type(optimizer.state[parameter]["exp_avg"]) is torch.Tensor
            with Checkpointer(path, optimizer=optimizer) as run:
                if not is_plain:
                    with pytest.raises(remanent.RefusedError, match=r"optimizer/state/0/exp_avg: a torchao\..*OptimState"):
                        run.save(1)
                    continue
                optimizer.state[parameter]["exp_avg"].fill_(1 / 3)
                run.save(1)
            for has_state in (False, True):
                found = made({name: makers[name]}, torch.bfloat16, length)[name]
                if has_state:
                    [other] = found.param_groups[0]["params"]
                    found.state[other] = {key: torch.zeros_like(value) for key, value in optimizer.state[parameter].items()}
                with Checkpointer(path, optimizer=found) as run:
                    run.restore()
                assert same(found.state_dict(), optimizer.state_dict())
