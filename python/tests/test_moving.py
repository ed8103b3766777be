"""Tensors that move between two saves: storages are freed and allocated again, swapped or converted, and states appear
and disappear.
"""

from __future__ import annotations

from typing import Any

import pytest
from runs import copy_of, state_of

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")

from remanent.dcp import Stager, StorageWriter  # noqa: E402
from remanent.torch import Checkpointer, save_file  # noqa: E402
from remanent.weights import Publisher  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU, and none of these runs on one"))]
WAYS: list[dict[str, Any]] = [{}, {"room": 300}, {"overlap": True}, {"digests": True}]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(20, 300), torch.nn.Linear(300, 20)
        self.tied = torch.nn.Linear(20, 300, bias=False)
        self.tied.weight = self.into.weight
        self.register_buffer("seen", torch.zeros(3, 4).T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.out(self.tied(x) + self.into(x))  # type: ignore[no-any-return]


def freed_and_made_again(model: Model, optimizer: Any) -> None:
    for tensor in (model.into.weight, model.out.bias):
        storage, held = tensor.untyped_storage(), tensor.detach().clone()
        storage.resize_(0)
        # Another tensor may get the freed memory.
        torch.full_like(held, 9)
        storage.resize_(held.nbytes)
        with torch.no_grad():
            tensor.copy_(held)


def data_set(model: Model, optimizer: Any) -> None:
    for tensor in (model.into.weight, model.out.weight, model.seen):
        tensor.data = tensor.detach().clone() + 1
    # A slice of a longer tensor, which is not contiguous.
    model.out.weight.data = torch.cat([model.out.weight.data] * 2, dim=1)[:, 100:400]


def swapped(model: Model, optimizer: Any) -> None:
    torch.utils.swap_tensors(model.seen, model.seen.detach().clone() + 1)
    bias = torch.nn.Parameter(model.out.bias.detach() + 1)
    # A gradient's hook refers to the tensor, which would prevent the swap.
    model.out.bias.grad = None
    torch.utils.swap_tensors(model.out.bias, bias)


def moved_away_and_back(model: Model, optimizer: Any) -> None:
    device = model.out.weight.device
    model.to("cpu", torch.float64).to(device, torch.float32)
    if device.type == "cuda":
        assert model.out.weight.is_cuda


def optimizer_begun_anew(model: Model, optimizer: Any) -> None:
    optimizer.state.clear()


def optimizer_loaded(model: Model, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def averages_moved(model: Model, optimizer: Any) -> None:
    for held in optimizer.state.values():
        held["exp_avg"] = held["exp_avg"] + 1
        held["exp_avg_sq"].set_(held["exp_avg_sq"].clone())


MOVES = [freed_and_made_again, data_set, swapped, moved_away_and_back, optimizer_begun_anew, optimizer_loaded,
         averages_moved]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", WAYS, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize("wait", [True, False])
def test_save_reads_moved_tensors(directory: str, options: dict[str, Any], wait: bool, device: str) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if wait and "overlap" in options:
        pytest.skip("a save that waits does not overlap")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(8, 20, device=device)).square().mean().backward()
        optimizer.step()

    expected = {}
    with Checkpointer(directory, model, optimizer, rng=False, keep=99, **options) as run:
        for number, move in enumerate(MOVES * 2):
            step()
            expected[number] = copy_of(state_of(model, optimizer))
            saved = run.save(number, wait=wait)
            # After this, no copy reads the tensors. With `overlap`, `optimizer.step` waits by itself.
            saved.wait_copied()
            move(model, optimizer)
        places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        for number, tensors in expected.items():
            assert run.restore(number) == number
            now = state_of(model, optimizer)
            assert now.keys() == tensors.keys(), number
            for name, tensor in tensors.items():
                assert torch.equal(now[name], tensor), f"{name} of save {number}, before {MOVES[number % 7].__name__}"
        assert places == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("device", DEVICES)
def test_tensor_with_freed_storage_is_rejected(directory: str, device: str) -> None:
    model = Model().to(device)
    weight, held = model.into.weight, model.into.weight.detach().clone()

    def refused(call: Any, name: str) -> None:
        with pytest.raises(remanent.RefusedError, match=f"{name}: the tensor's storage was freed or shortened"):
            call()

    def calls() -> None:
        for options in WAYS:
            if "overlap" in options:
                continue
            with Checkpointer(directory + "-".join(options), model, **options) as run:
                for wait in (True, False):
                    refused(lambda: run.save(2, wait=wait), "model/into.weight")
                assert [version.step for version in run.versions()] == [1]
        with Publisher(directory + "-weights") as publisher:
            refused(lambda: publisher.publish(model, 1), "into.weight")
        refused(lambda: save_file(model.state_dict(), directory + "-file"), "into.weight")
        stager = Stager()
        refused(lambda: stager.stage({"model": model.state_dict()}), "model/into.weight")
        stager.close()

    for options in WAYS:
        if "overlap" not in options:
            with Checkpointer(directory + "-".join(options), model, **options) as run:
                run.save(1)
    for length in (0, held.nbytes - 4):
        weight.untyped_storage().resize_(length)
        calls()
    weight.untyped_storage().resize_(held.nbytes)
    with torch.no_grad():
        weight.copy_(held)
    with Checkpointer(directory, model) as run:
        run.save(3)
        weight.data.zero_()
        assert run.restore() == 3 and torch.equal(weight, held)


def test_dcp_rejects_tensor_with_freed_storage(directory: str) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(dcp.api.CheckpointException, match="w: the tensor's storage was freed or shortened"):
        dcp.save({"w": tensor}, storage_writer=StorageWriter(directory + "/1"), no_dist=True)


class EightBit(torch.optim.Optimizer):
    """An optimizer whose averages are bytes with a scale per block of 256, like those of bitsandbytes.

    Short parameters have averages of 32 bits, and all blocks share a table with the value of each byte.
    """

    BLOCK = 256

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                short = parameter.numel() < 2 * self.BLOCK
                if not state:
                    state["step"] = 0
                    if short:
                        state["state1"] = torch.zeros_like(parameter)
                    else:
                        blocks = -(-parameter.numel() // self.BLOCK)
                        state["state1"] = torch.zeros_like(parameter, dtype=torch.uint8)
                        state["absmax1"] = torch.zeros(blocks, device=parameter.device)
                        state["qmap1"] = self._table(parameter.device)
                state["step"] += 1
                average = state["state1"].clone() if short else self._wide(state)
                average.mul_(group["betas"][0]).add_(parameter.grad, alpha=1 - group["betas"][0])
                if short:
                    state["state1"].copy_(average)
                else:
                    self._narrow(state, average)
                    average = self._wide(state)
                parameter.add_(average, alpha=-group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Torch's own method casts the states of floating-point parameters to the parameters' types. The saved values
        # are restored afterwards, as bitsandbytes does.
        super().load_state_dict(state_dict)
        parameters = [each for group in self.param_groups for each in group["params"]]
        for at, held in state_dict["state"].items():
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    self.state[parameters[at]][name] = value.to(parameters[at].device)

    def _table(self, device: Any) -> torch.Tensor:
        # One table for all parameters on a device.
        if not hasattr(self, "_tables"):
            self._tables: dict[Any, torch.Tensor] = {}
        return self._tables.setdefault(device, torch.linspace(-1, 1, 256, device=device))

    def _blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.reshape(-1)
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.BLOCK)).view(-1, self.BLOCK)

    def _wide(self, state: dict[str, Any]) -> torch.Tensor:
        wide = state["qmap1"][self._blocks(state["state1"]).long()] * state["absmax1"][:, None]
        return wide.reshape(-1)[: state["state1"].numel()].view(state["state1"].shape)

    def _narrow(self, state: dict[str, Any], average: torch.Tensor) -> None:
        blocks = self._blocks(average)
        scale = blocks.abs().amax(dim=1)
        state["absmax1"].copy_(scale)
        levels = ((blocks / scale.clamp(min=1e-30)[:, None] + 1) * 127.5).round().to(torch.uint8)
        state["state1"].copy_(levels.reshape(-1)[: average.numel()].view(average.shape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", WAYS, ids=lambda options: ",".join(options) or "plain")
def test_run_with_8_bit_optimizer_continues_bit_for_bit(directory: str, options: dict[str, Any], device: str) -> None:
    def make() -> tuple[Model, EightBit]:
        torch.manual_seed(0)
        model = Model().to(device)
        return model, EightBit(model.parameters(), lr=0.05)

    def train(model: Model, optimizer: EightBit, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 20, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = make()
    with Checkpointer(directory, model, optimizer, **options) as run:
        train(model, optimizer, 3)
        run.save(3, wait=False)
        expected = train(model, optimizer, 4)
        run.save(7)
        assert run.restore(3) == 3 and train(model, optimizer, 4) == expected
        differ = run.diff(3, 7)
        assert differ["optimizer/state/0/state1"] and not any("qmap1" in name for name in differ)
        # The table is stored once.
        [tables] = [name for name in run.store.keys() if "qmap1" in str(name)]
    other_model, other = make()
    with Checkpointer(directory, other_model, other, **options) as run:
        assert run.restore(3) == 3 and train(other_model, other, 4) == expected
        long, short = other.state[other_model.into.weight], other.state[other_model.out.bias]
        assert {name: each.dtype for name, each in long.items() if name != "step"} == {
            "state1": torch.uint8, "absmax1": torch.float32, "qmap1": torch.float32}
        assert short["state1"].dtype == torch.float32 and "qmap1" not in short
