"""Parts of a run's state, for tests that save and restore them."""

from __future__ import annotations

from typing import Any


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Returns the tensors of a model and of its optimizer's state, by name."""
    state = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for at, each in optimizer.state_dict()["state"].items():
        state |= {f"{name}/{at}": tensor for name, tensor in each.items()}
    return state


def copy_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in state.items()}
