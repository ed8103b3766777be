"""The states of torch's optimizers, restored into their existing tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kinds import optimizer_makers, step  # noqa: E402

from remanent._state.optimizers import OptimizerLoad  # noqa: E402
from remanent.torch import Checkpointer  # noqa: E402

optim = torch.optim
MAKERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda given: optim.Adam(given), "amsgrad": lambda given: optim.Adam(given, amsgrad=True),
    "AdamW": lambda given: optim.AdamW(given, foreach=True), "fused": lambda given: optim.AdamW(given, fused=True),
    "capturable": lambda given: optim.AdamW(given, capturable=True), "Adamax": lambda given: optim.Adamax(given),
    "NAdam": lambda given: optim.NAdam(given), "RAdam": lambda given: optim.RAdam(given),
    "SGD": lambda given: optim.SGD(given, lr=0.1), "ASGD": lambda given: optim.ASGD(given),
    "momentum": lambda given: optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda given: optim.RMSprop(given, momentum=0.9, centered=True),
    "Adagrad": lambda given: optim.Adagrad(given), "Adadelta": lambda given: optim.Adadelta(given),
    "Rprop": lambda given: optim.Rprop(given), "Adafactor": lambda given: optim.Adafactor(given),
    "LBFGS": lambda given: optim.LBFGS(given, max_iter=3),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU, and none of these runs on one"))]


def tensors_of(optimizer: Any) -> dict[str, Any]:
    return {f"{at}/{name}": value for at, held in optimizer.state_dict()["state"].items()
            for name, value in held.items() if isinstance(value, torch.Tensor)}


def run_of(
    make: Callable[[Any], Any], device: str, dtype: torch.dtype
) -> tuple[Any, Any, Callable[[int], list[float]]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(device, dtype)
    optimizer = make(model.parameters())

    def train(steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.randn(5, 6, device=device, dtype=dtype)

            def closure(x: Any = x) -> Any:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure)))
        return losses

    return model, optimizer, train


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MAKERS)
def test_restored_optimizer_keeps_tensors_and_continues(
    directory: str, kind: str, dtype: torch.dtype, device: str
) -> None:
    if kind == "capturable" and device == "cpu":
        pytest.skip("capturable optimizers are for GPUs")
    if dtype == torch.bfloat16 and kind in ("LBFGS", "NAdam", "ASGD"):
        pytest.skip("LBFGS divides by zero there, and of the others torch's own load_state_dict rounds 32 bits to 16")
    _, optimizer, train = run_of(MAKERS[kind], device, dtype)
    with Checkpointer(directory, optimizer=optimizer, keep=9) as run:
        run.save(0)
        train(2)
        run.save(2)
        saved = copy.deepcopy(optimizer.state_dict())
        train(3)
        held = tensors_of(optimizer)
        places = {name: tensor.data_ptr() for name, tensor in held.items()}
        run.restore(2)
        now = optimizer.state_dict()
        assert now["param_groups"] == saved["param_groups"]
        for at, values in saved["state"].items():
            for name, value in values.items():
                found = now["state"][at][name]
                if isinstance(value, torch.Tensor):
                    # `load_state_dict` of torch moves states that the optimizer keeps on the host to the parameter's
                    # device.
                    assert torch.equal(found.cpu(), value.cpu()) and found.dtype == value.dtype, (at, name)
                    if found.device == value.device:
                        assert found.data_ptr() == places[f"{at}/{name}"], (at, name)
                        assert found is held[f"{at}/{name}"], (at, name)
        # Before its first step, the optimizer had no state or its initial one.
        run.restore(0)
        assert all(key in ("step", "sum", "state_sum") for held in optimizer.state.values() for key in held)
        # The next restore creates tensors that belong to this optimizer.
        run.restore(2)
        assert all(torch.equal(each.cpu(), saved["state"][int(name.split("/")[0])][name.split("/")[1]].cpu())
                   for name, each in tensors_of(optimizer).items())


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "capturable"])
def test_run_continues_bit_for_bit(directory: str, kind: str) -> None:
    model, optimizer, train = run_of(MAKERS[kind], "cpu", torch.float32)
    with Checkpointer(directory, model, optimizer) as run:
        train(2)
        run.save(2)
        expected = train(4)
        assert run.restore() == 2 and train(4) == expected
        assert run.restore() == 2 and train(4) == expected


def test_shared_or_different_states_get_new_tensors(directory: str) -> None:
    model, optimizer, train = run_of(lambda given: optim.Adam(given, lr=0.1), "cpu", torch.float32)
    train(1)
    weight, bias, other, last = list(model.parameters())

    def restored(step: int, expected: Any) -> None:
        assert run.restore(step) == step
        found = tensors_of(optimizer)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name

    def copies() -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in tensors_of(optimizer).items()}

    with Checkpointer(directory, model, optimizer, keep=9) as run:
        run.save(1)
        apart = copies()
        # Two states become the same tensor, and one shares memory with a parameter.
        optimizer.state[weight]["exp_avg_sq"] = optimizer.state[weight]["exp_avg"]
        optimizer.state[bias]["exp_avg"] = bias.detach()
        run.save(2)
        one = copies()
        values = [parameter.detach().clone() for parameter in model.parameters()]
        restored(1, apart)
        assert optimizer.state[weight]["exp_avg"].data_ptr() != optimizer.state[weight]["exp_avg_sq"].data_ptr()
        restored(2, one)
        assert optimizer.state[weight]["exp_avg"].data_ptr() == optimizer.state[weight]["exp_avg_sq"].data_ptr()
        optimizer.state[bias]["exp_avg"] = bias.detach()
        restored(1, apart)
        assert all(map(torch.equal, model.parameters(), values)), "no state was put into a parameter"
        # States with another shape or element type, and states that are freed, expanded or parts of one tensor.
        whole = torch.zeros(8 * 6 + 8)
        optimizer.state[weight]["exp_avg"] = whole[:48].view(8, 6)
        optimizer.state[bias]["exp_avg"] = whole[44:52]
        optimizer.state[other]["exp_avg"] = torch.zeros(3, 8, dtype=torch.float64)
        optimizer.state[other]["exp_avg_sq"] = torch.zeros(1, 1).expand(3, 8)
        optimizer.state[last]["exp_avg"] = torch.zeros(7)
        optimizer.state[last]["exp_avg_sq"].untyped_storage().resize_(0)
        restored(1, apart)
        assert optimizer.state[other]["exp_avg"].dtype == torch.float32
        # No state, and then another list of parameters.
        optimizer.state.clear()
        restored(1, apart)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        before = copies()
        with pytest.raises(ValueError, match="parameter groups"):
            run.restore(2)
        assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(optimizer).items())


def test_optimizer_with_own_load_gets_saved_state(directory: str) -> None:
    given: list[Any] = []

    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            given.append(state_dict["state"][0]["momentum_buffer"])
            super().load_state_dict(copy.deepcopy(state_dict))

    _, optimizer, train = run_of(lambda given: Own(given, lr=0.1, momentum=0.9), "cpu", torch.float32)
    train(1)
    with Checkpointer(directory, optimizer=optimizer) as run:
        run.save(1)
        held = optimizer.state_dict()["state"][0]["momentum_buffer"]
        held.zero_()
        run.restore()
        assert given[0] is not held and not held.any() and optimizer.state_dict()["state"][0]["momentum_buffer"].any()


def devices_of(optimizer: Any) -> dict[str, str]:
    return {name: tensor.device.type for name, tensor in tensors_of(optimizer).items()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_states_are_on_devices_chosen_by_torch(device: str) -> None:
    makers: dict[str, Any] = optimizer_makers() | {
        f"{kind.__name__} capturable": lambda given, kind=kind: kind(given, capturable=True)
        for kind in (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.ASGD, optim.Rprop)}
    seen = []
    for name, make in makers.items():
        saved = make([torch.nn.Parameter(torch.ones(2, 3))])
        # The host does not support CUDA graphs, and the first step raises an error if the optimizer is capturable.
        saved.param_groups[0]["capturable"] = False
        step(saved, 1)
        saved.param_groups[0]["capturable"] = "capturable" in name
        state = saved.state_dict()
        try:
            ours, theirs, moved = (make([torch.nn.Parameter(torch.ones(2, 3, device=device))]) for _ in range(3))
        except RuntimeError:
            # Fused steps do not support the meta device.
            continue
        theirs.load_state_dict(copy.deepcopy(state))
        OptimizerLoad("optimizer", ours, copy.deepcopy(state), cast=False).load()
        assert devices_of(ours) == devices_of(theirs), name
        seen += devices_of(ours).values()
        # State that an optimizer keeps on another device stays there, even if the version has other element types.
        [parameter] = moved.param_groups[0]["params"]
        for key, value in state["state"].get(0, {}).items():
            if isinstance(value, torch.Tensor):
                moved.state[parameter][key] = torch.zeros(value.shape, dtype=torch.float64)
        OptimizerLoad("optimizer", moved, copy.deepcopy(state), cast=False).load()
        assert set(devices_of(moved).values()) <= {"cpu"}, name
    assert len(seen) > 50 and set(seen) == {"cpu", device}
