"""Every kind of optimizer and module in the installed torch, so that a new release adds rows."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Options that are tested, one row per option, with each optimizer that has them. "capturable" requires a GPU.
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("amsgrad", True), ("foreach", True), ("fused", True), ("maximize", True), ("differentiable", False),
    ("momentum", 0.9), ("centered", True), ("nesterov", True), ("decoupled_weight_decay", True),
)
_TOGETHER: dict[str, dict[str, Any]] = {"nesterov": {"momentum": 0.9}}


def optimizer_makers() -> dict[str, Callable[[list[Any]], torch.optim.Optimizer]]:
    """Returns functions that create each optimizer of `torch.optim`, with its defaults and with each of its options."""
    found: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {}
    for name, kind in sorted(vars(torch.optim).items()):
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
            continue
        accepted = inspect.signature(kind).parameters
        for option, value in (("", None), *_OPTIONS, ("lr", torch.tensor(0.01))):
            if option and option not in accepted:
                continue
            given = {"lr": 0.01, **_TOGETHER.get(option, {}), **({option: value} if option else {})}
            row = f"{name} {option}={value}" if option else name
            try:
                kind([torch.nn.Parameter(torch.ones(2, 2))], **given)
            except (ValueError, RuntimeError):
                # The optimizer does not support the option, such as "fused" on the host, or a tensor as lr with
                # "foreach".
                continue
            found[row] = lambda parameters, kind=kind, given=given: kind(parameters, **given)
    return found


def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Takes a step with gradients that depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = gradient.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else gradient
    # LBFGS evaluates the loss again.
    optimizer.step(lambda: torch.tensor(float(seed)))


def same(value: Any, other: Any) -> bool:
    """Returns whether two values have the same types, and tensors the same bits, on any devices."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return (type(value), value.dtype, value.shape) == (type(other), other.dtype, other.shape) and bool(
            torch.equal(_bytes(value), _bytes(other)))
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(same, value, other))
    if type(value).__module__ == "numpy":
        return bool(value.dtype == other.dtype and value.shape == other.shape and value.tobytes() == other.tobytes())
    return bool(value == other) or value != value


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


# Arguments of modules that cannot be created with any of `_ARGUMENTS`.
_SPECIAL: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "AdaptiveLogSoftmaxWithLoss": ((4, 10, [4]), {}), "Bilinear": ((2, 3, 4), {}), "GroupNorm": ((2, 4), {}),
    "MultiheadAttention": ((4, 2), {}), "Transformer": ((4, 2, 1, 1, 8), {}), "LayerNorm": ((4,), {}),
    "TransformerDecoderLayer": ((4, 2, 8), {}), "TransformerEncoderLayer": ((4, 2, 8), {}),
    "Unflatten": ((1, (2, 2)), {}), "Fold": ((4, 2), {}), "ParameterList": (([torch.nn.Parameter(torch.ones(2))],), {}),
    "ParameterDict": (({"w": torch.nn.Parameter(torch.ones(2))},), {}),
    "ModuleList": (([torch.nn.Linear(2, 2)],), {}), "ModuleDict": (({"inner": torch.nn.Linear(2, 2)},), {}),
    "Sequential": ((torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), {}),
    "TransformerEncoder": ((torch.nn.TransformerEncoderLayer(4, 2, 8), 1), {"enable_nested_tensor": False}),
    "TransformerDecoder": ((torch.nn.TransformerDecoderLayer(4, 2, 8), 1), {}),
    "DataParallel": ((torch.nn.Linear(2, 2),), {}), "NLLLoss": ((torch.ones(3),), {}),
    "CrossEntropyLoss": ((torch.ones(3),), {}), "BCEWithLogitsLoss": ((), {"pos_weight": torch.ones(3)}),
    "Threshold": ((1.0, 2.0), {}),
    "RNNBase": (("LSTM", 2, 3), {}),
}
_ARGUMENTS: tuple[tuple[Any, ...], ...] = ((), (4,), (4, 4), (4, 4, 2), (4, 4, 2, 2))
# Base classes that cannot be used as modules, and wrappers that need other processes.
_NONE = {"Module", "Container", "DistributedDataParallel", "Buffer", "Parameter", "UninitializedBuffer",
         "UninitializedParameter"}


def module_makers() -> dict[str, Callable[[], torch.nn.Module]]:
    """Returns functions that create a module of each kind in `torch.nn`, and variants with hooks and parametrizations.
    """
    found: dict[str, Callable[[], torch.nn.Module]] = {}
    for name, kind in sorted(vars(torch.nn).items()):
        if isinstance(kind, type) and issubclass(kind, torch.nn.Module) and name not in _NONE:
            found[name] = lambda kind=kind, name=name: _made(name, kind)
    utils = torch.nn.utils
    linear = torch.nn.Linear
    found |= {
        "weight_norm": lambda: _quietly(utils.weight_norm, linear(3, 4)),
        "spectral_norm": lambda: _quietly(utils.spectral_norm, linear(3, 4)),
        "parametrized weight_norm": lambda: utils.parametrizations.weight_norm(linear(3, 4)),
        "parametrized spectral_norm": lambda: utils.parametrizations.spectral_norm(linear(3, 4)),
        "parametrized orthogonal": lambda: utils.parametrizations.orthogonal(linear(4, 4)),
        "pruned": lambda: _pruned(linear(3, 4)),
        "averaged": lambda: torch.optim.swa_utils.AveragedModel(linear(3, 4), use_buffers=True),
        "compiled": lambda: torch.compile(linear(3, 4)),
    }
    return found


def _pruned(module: torch.nn.Module) -> torch.nn.Module:
    from torch.nn.utils import prune

    return prune.l1_unstructured(module, "weight", 3)  # type: ignore[no-any-return]


def _quietly(make: Callable[..., Any], *given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*given)


def _made(name: str, kind: type[torch.nn.Module]) -> torch.nn.Module:
    import copy

    if name in _SPECIAL:
        positional, named = copy.deepcopy(_SPECIAL[name])
        return kind(*positional, **named)
    for positional in _ARGUMENTS:
        try:
            return kind(*positional)
        except (TypeError, ValueError, IndexError, AssertionError):
            continue
    raise AssertionError(f"no arguments make a {name}: name some in _SPECIAL")


def observer_makers() -> Iterator[tuple[str, Callable[[], torch.nn.Module]]]:
    """Returns functions that create each observer and fake quantizer of `torch.ao.quantization` that keeps statistics.
    """
    from torch.ao import quantization

    for where in (quantization.observer, quantization.fake_quantize):
        for name, kind in sorted(vars(where).items()):
            if isinstance(kind, type) and issubclass(kind, torch.nn.Module) and kind.__module__ == where.__name__:
                # Quantizers with fixed parameters have no statistics.
                if not inspect.isabstract(kind) and not name.startswith("FixedQParams"):
                    yield name, kind
