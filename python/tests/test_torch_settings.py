"""Calls behave the same under torch's global settings and contexts as without them."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")

from kinds import same, step  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from remanent.torch import Checkpointer, load_file, save_file  # noqa: E402


@contextlib.contextmanager
def set_for_a_while(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
        assert get() == value, "the call changed the setting"
    finally:
        put(before)


class Passes(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class PassesOn(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def deterministic() -> Any:
    return set_for_a_while(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


future = torch.__future__
SETTINGS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "default device meta": lambda: set_for_a_while(torch.get_default_device, torch.set_default_device,
                                                   torch.device("meta")),
    "device meta": lambda: torch.device("meta"),
    "default dtype": lambda: set_for_a_while(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    "inference mode": torch.inference_mode, "no_grad": torch.no_grad, "deterministic": deterministic,
    "swap_module_params": lambda: set_for_a_while(
        future.get_swap_module_params_on_conversion, future.set_swap_module_params_on_conversion, True),
    "overwrite_module_params": lambda: set_for_a_while(
        future.get_overwrite_module_params_on_conversion, future.set_overwrite_module_params_on_conversion, True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "function mode": Passes, "dispatch mode": PassesOn,
}


def run_of(seed: int) -> tuple[Any, Any, dict[str, Any]]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.register_buffer("gaps", torch.randn(4, 5)[:, 1:3])
    state: dict[str, Any] = {"w": torch.randn(3), "n": seed, "z": torch.randn(2, dtype=torch.complex64).conj()}
    return model, torch.optim.AdamW(model.parameters(), lr=0.1), state


def values(model: Any, optimizer: Any, state: Any) -> Any:
    state = {name: value.resolve_conj() if name == "z" else value for name, value in state.items()}
    return {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict(), state


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("name", SETTINGS)
def test_run_is_saved_and_restored_under_each_setting(directory: str, name: str) -> None:
    model, optimizer, state = run_of(1)
    step(optimizer, 1)
    rng = torch.get_rng_state()
    saved = Checkpointer(directory, model, optimizer, extra={"state": state})
    with SETTINGS[name](), warnings.catch_warnings():
        warnings.simplefilter("error")
        saved.save(1)
    saved.close()
    expected = values(model, optimizer, state)
    for has_state in (False, True):
        found = run_of(2)
        if has_state:
            step(found[1], 2)
        else:
            found[2].clear()
        # Torch cannot swap a tensor that has a weak reference.
        held_weakly = weakref.ref(found[0][0].weight)
        places = [(tensor, tensor.data_ptr()) for tensor in (*found[0].parameters(), *found[0].buffers())]
        with Checkpointer(directory, found[0], found[1], extra={"state": found[2]}) as run:
            with SETTINGS[name](), warnings.catch_warnings():
                warnings.simplefilter("error")
                assert run.restore() == 1
        assert same(values(*found), expected) and torch.equal(torch.get_rng_state(), rng)
        now = [*found[0].parameters(), *found[0].buffers()]
        assert held_weakly() is found[0][0].weight
        assert all(tensor is each and tensor.data_ptr() == place
                   for tensor, (each, place) in zip(now, places, strict=True))
        held = [*found[2].values(), *(each for one in found[1].state.values() for each in one.values())]
        assert not any(isinstance(each, torch.Tensor) and each.is_inference() for each in held)
        found[0](torch.randn(5, 3)).sum().backward()
        found[1].step()


@pytest.mark.parametrize("name", SETTINGS)
def test_tensors_are_saved_and_loaded_under_each_setting(directory: str, name: str) -> None:
    base = torch.arange(12.0)
    tensors = {"base": base, "view": base[3:9], "gaps": base.view(3, 4)[:, 1:3], "empty": torch.empty(0, 2),
               "one": torch.tensor(1.5, dtype=torch.bfloat16), "conj": torch.ones(2, dtype=torch.complex64).conj()}
    for at in range(2):
        with SETTINGS[name](), warnings.catch_warnings():
            warnings.simplefilter("error")
            save_file(tensors, directory)
            found = load_file(directory)
        assert found.keys() == tensors.keys()
        assert all(same(found[key].resolve_conj(), value.resolve_conj()) for key, value in tensors.items())
        assert found["view"].data_ptr() == found["base"].data_ptr() + 12
        assert not any(tensor.is_inference() for tensor in found.values())
        base += 1


def test_calls_are_rejected_in_fake_tensor_mode(directory: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, optimizer, state = run_of(1)
    step(optimizer, 1)
    save_file({"w": state["w"]}, directory + "-file")
    with Checkpointer(directory, model, optimizer, extra={"state": state}) as run:
        run.save(1)
        before = values(model, optimizer, state)
        for call in (lambda: run.save(2), run.restore, lambda: save_file({"w": state["w"]}, directory + "-file"),
                     lambda: load_file(directory + "-file")):
            with FakeTensorMode(), pytest.raises(remanent.RefusedError, match="FakeTensor"):
                call()
        assert same(values(model, optimizer, state), before)
        assert [version.step for version in run.versions()] == [1]
        run.save(3)
        assert run.restore() == 3
