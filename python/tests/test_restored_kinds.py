"""Every kind of optimizer and module of torch is restored with the same bits, dtypes, shapes and types."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")

from kinds import module_makers, observer_makers, optimizer_makers, same, step  # noqa: E402

from remanent.torch import Checkpointer, load_model, save_model  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Uses one thread of torch, because tensors here are so short that threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Fp32Moments(torch.optim.Optimizer):
    """Keeps moments in 32 bits, codes, a mask and a large number, for parameters of any kind."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["m"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["codes"] = torch.arange(parameter.numel()).to(torch.uint8)
                    state["mask"] = torch.ones_like(parameter, dtype=torch.bool)
                    state["seen"] = torch.full((1,), 2**40 + 1, dtype=torch.int64)
                    state["rows"] = [torch.ones(2, dtype=torch.float64), {"inner": torch.tensor(7)}]
                state["m"].mul_(0.9).add_(parameter.grad.float(), alpha=1 / 3)
                state["seen"] += 1
                state["codes"] += 3
                parameter.add_(state["m"].to(parameter.dtype), alpha=-group["lr"])


class CastsBySuper(Fp32Moments):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(copy.deepcopy(state_dict))


OWN: dict[str, Callable[[Any], Any]] = {"own": Fp32Moments, "own load": CastsBySuper}


def optimizers() -> dict[str, Any]:
    made = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for name, make in (optimizer_makers() | OWN).items():
            if name.startswith("LBFGS") and dtype == torch.bfloat16:
                # LBFGS divides by zero with bfloat16.
                continue
            generator = torch.Generator().manual_seed(0)
            parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
                          for shape in ((3, 4), (2, 2))]
            made[f"{name}, {dtype}"] = make(parameters)
    return made


@pytest.mark.parametrize("has_state", [True, False])
def test_optimizers_are_restored_as_saved(directory: str, has_state: bool) -> None:
    saved = optimizers()
    for at in range(2):
        for optimizer in saved.values():
            step(optimizer, at)
    expected = {name: copy.deepcopy(optimizer.state_dict()) for name, optimizer in saved.items()}
    with Checkpointer(directory, extra=saved, rng=False) as run:
        run.save(2)
    found = optimizers()
    if has_state:
        for optimizer in found.values():
            step(optimizer, 7)
    for name, optimizer in found.items():
        for group, other in zip(optimizer.param_groups, saved[name].param_groups, strict=True):
            for parameter, value in zip(group["params"], other["params"], strict=True):
                parameter.data.copy_(value.data)
    with Checkpointer(directory, extra=found, rng=False) as run:
        assert run.restore() == 2
    others = [name for name, optimizer in found.items() if not same(optimizer.state_dict(), expected[name])]
    assert not others, others
    for at in (3, 4):
        for optimizer in (*saved.values(), *found.values()):
            step(optimizer, at)
    others = [name for name, optimizer in found.items()
              if not same(optimizer.state_dict(), saved[name].state_dict())]
    assert not others, others


def run_of(names: list[list[str]], named: bool = True, kind: Any = torch.optim.Adam) -> tuple[Any, Any]:
    module = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(3)) for name in "abc"})
    groups = [{"params": [(name, module[name]) if named else module[name] for name in group], "lr": 0.1 + len(group)}
              for group in names]
    return module, kind(groups)


def trained(module: Any, optimizer: Any) -> dict[str, Any]:
    for at, name in enumerate("abc"):
        module[name].grad = torch.full((3,), float(at + 1))
    optimizer.step()
    return states(module, optimizer)


def states(module: Any, optimizer: Any) -> dict[str, Any]:
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    return {name: (rates[id(parameter)], {key: value.clone() for key, value in optimizer.state[parameter].items()})
            for name, parameter in module.items()}


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("names", [[["a"], ["c", "b"]], [["b", "c"], ["a"]], [["c", "b"], ["a"]], [["a"], ["b", "c"]]])
def test_named_parameters_get_their_own_state(directory: str, names: list[list[str]], has_state: bool) -> None:
    module, optimizer = run_of([["a"], ["b", "c"]])
    expected = trained(module, optimizer)
    with Checkpointer(directory, module, optimizer) as run:
        run.save(1)
    module, optimizer = run_of(names)
    if has_state:
        trained(module, optimizer)
        for state in optimizer.state.values():
            state["exp_avg"] += 5
    with Checkpointer(directory, module, optimizer) as run:
        run.restore()
    assert same(states(module, optimizer), expected)
    assert [group["param_names"] for group in optimizer.param_groups] == names


class OwnLoad(torch.optim.Adam):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize(("names", "named", "kind"), [
    ([["a", "b"], ["c"]], True, torch.optim.Adam), ([["a"], ["b"]], True, torch.optim.Adam),
    ([["a", "b", "c"]], False, torch.optim.Adam), ([["a"], ["b"], ["c"]], False, torch.optim.Adam),
    ([["a"], ["c", "b"]], True, OwnLoad),
])
def test_other_parameter_groups_are_rejected(directory: str, names: Any, named: bool, kind: Any) -> None:
    module, optimizer = run_of([["a"], ["b", "c"]], named, kind)
    trained(module, optimizer)
    with Checkpointer(directory, module, optimizer) as run:
        run.save(1)
    module, optimizer = run_of(names, named, kind)
    for parameter in module.values():
        parameter.data.fill_(9)
    before = copy.deepcopy(optimizer.state_dict())
    with Checkpointer(directory, module, optimizer) as run:
        with pytest.raises(remanent.InvalidError, match="optimizer: the version's parameter groups"):
            run.restore()
    assert same(optimizer.state_dict(), before) and all((value == 9).all() for value in module.values())


def filled(module: Any, seed: int) -> Any:
    """Returns the module with distinct values in every tensor that has a shape."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if not torch.nn.parameter.is_lazy(tensor) and tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator))
            elif not torch.nn.parameter.is_lazy(tensor):
                tensor.fill_(seed % 2)
    return module


def modules(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.ModuleDict({name.replace(".", ","): filled(make(), seed) for name, make in module_makers().items()
                                if not name.startswith("Lazy")})


@pytest.mark.filterwarnings("ignore")
def test_modules_are_restored_as_saved(directory: str) -> None:
    saved, found = modules(1), modules(2)
    assert len(saved) > 120
    expected = {name: value.clone() for name, value in saved.state_dict().items()}
    assert any(not same(value, expected[name]) for name, value in found.state_dict().items())
    with Checkpointer(directory, saved, rng=False) as run:
        run.save(1)
    with Checkpointer(directory, found, rng=False) as run:
        run.restore()
    others = [name for name, value in found.state_dict().items() if not same(value, expected[name])]
    assert not others, others
    assert found.state_dict()._metadata == saved.state_dict()._metadata


@pytest.mark.filterwarnings("ignore")
def test_lazy_modules_get_saved_shapes(directory: str) -> None:
    inputs = {"1d": (2, 3, 8), "2d": (2, 3, 8, 8), "3d": (2, 3, 8, 8, 8), "Linear": (2, 3)}

    def lazies() -> Any:
        return torch.nn.ModuleDict({name: make() for name, make in module_makers().items() if name.startswith("Lazy")})

    saved, found = lazies(), lazies()
    assert len(saved) > 10
    for name, module in saved.items():
        module(torch.randn(next(shape for ending, shape in inputs.items() if name.lower().endswith(ending.lower()))))
    with Checkpointer(directory, saved, rng=False) as run:
        run.save(1)
    with Checkpointer(directory, found, rng=False) as run:
        run.restore()
    assert same(dict(found.state_dict()), dict(saved.state_dict()))


@pytest.mark.filterwarnings("ignore")
def test_observers_keep_their_statistics(directory: str) -> None:
    def observers() -> Any:
        return torch.nn.ModuleDict({name: make() for name, make in observer_makers()})

    saved, found = observers(), observers()
    for module in saved.values():
        module.to(torch.float32)(torch.randn(5, 4))
        if isinstance(getattr(module, "eps", None), torch.Tensor):
            module.eps.fill_(1e-3)
    shapes = {name: value.shape for name, value in found.state_dict().items()}
    assert any(value.shape != shapes[name] for name, value in saved.state_dict().items())
    with Checkpointer(directory, saved, rng=False) as run:
        run.save(1)
    with Checkpointer(directory, found, rng=False) as run:
        run.restore()
    assert same(dict(found.state_dict()), dict(saved.state_dict()))


class Tuned(torch.nn.Module):
    """Upgrades states of its first version when it loads them."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}w"] = state[f"{prefix}w"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Loader:
    """An object that contains a module, and whose state includes the state of the module."""

    def __init__(self) -> None:
        self.tuned = Tuned()

    def state_dict(self) -> Any:
        return {"nets": [self.tuned.state_dict()], "position": 3}

    def load_state_dict(self, state: Any) -> None:
        self.tuned.load_state_dict(state["nets"][0])


def test_module_versions_are_kept(directory: str) -> None:
    saved, loader = torch.nn.Sequential(Tuned()), Loader()
    with Checkpointer(directory, saved, extra={"loader": loader}) as run:
        run.save(1)
        with torch.no_grad():
            saved[0].w.fill_(5)
            loader.tuned.w.fill_(5)
        run.restore()
    assert saved[0].w.tolist() == loader.tuned.w.tolist() == [1, 1]


def test_runs_without_module_versions_are_restored(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Checkpointer._state
    monkeypatch.setattr(Checkpointer, "_state", lambda run: {name: dict(value) for name, value in sound(run).items()})
    model = torch.nn.BatchNorm1d(3)
    with Checkpointer(directory, model) as run:
        run.save(1)
        model.weight.data.fill_(5)
        run.restore()
    assert model.weight.tolist() == [1, 1, 1]


class History(torch.nn.Linear):
    """Has an extra state that grows."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.history = b""

    def get_extra_state(self) -> Any:
        return torch.frombuffer(bytearray(b"head" + self.history), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        self.history = bytes(state.numpy())[4:]


class Resized(torch.nn.Module):
    """Gives its buffer the shape of the value that it loads."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(float(length)))
        self.register_load_state_dict_pre_hook(self._resize)

    @staticmethod
    def _resize(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        module.seen.resize_(state[f"{prefix}seen"].shape)


def test_extra_states_and_buffers_may_change_length(directory: str) -> None:
    saved = torch.nn.ModuleDict({"history": History(), "resized": Resized(9)})
    found = torch.nn.ModuleDict({"history": History(), "resized": Resized(2)})
    saved["history"].history = b"most" * 100
    with Checkpointer(directory, saved) as run:
        run.save(1)
    with Checkpointer(directory, found) as run:
        run.restore()
    assert found["history"].history == saved["history"].history
    assert same(dict(found.state_dict()), dict(saved.state_dict()))


class Expanded(torch.nn.Module):
    def __init__(self, buffer: Any) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("b", buffer)


@pytest.mark.parametrize(("then", "fits"), [
    (torch.full((1, 4), 7.0).expand(6, 4), True), (torch.arange(4.0).expand(6, 4), True),
    (torch.arange(24.0).reshape(6, 4), False),
])
def test_expanded_buffers_accept_representable_values(directory: str, then: Any, fits: bool) -> None:
    saved, found = Expanded(then), Expanded(torch.ones(1, 4).expand(6, 4))
    saved.w.data.fill_(5)
    with Checkpointer(directory, saved) as run:
        run.save(1)
    with Checkpointer(directory, found) as run:
        if fits:
            run.restore()
        else:
            with pytest.raises(remanent.InvalidError, match="model/b: the tensor is expanded"):
                run.restore()
    assert torch.equal(found.b, then if fits else torch.ones(6, 4)) and found.b.stride() == (0, 1)
    assert (found.w == (5 if fits else 0)).all()


def freed() -> Any:
    model = torch.nn.Linear(2, 2)
    model.bias.untyped_storage().resize_(0)
    return model


@pytest.mark.parametrize(("make", "said"), [
    (lambda: torch.nn.Linear(2, 2, device="meta"), "model/weight: the tensor is on the meta device"),
    (lambda: torch.nn.Sequential(Tuned().to("meta")), "model/0.w: the tensor is on the meta device"),
    (lambda: torch.nn.Linear(2, 2, dtype=torch.bfloat16), "model/bias: the version has elements of type torch.float32"),
    (lambda: torch.nn.Linear(2, 2, dtype=torch.float64), "model/bias: the version has elements of type torch.float32"),
    (freed, "model/bias: the tensor's storage of 8 bytes was freed"),
], ids=["meta", "meta, own load", "bfloat16", "float64", "freed"])
def test_models_that_cannot_hold_values_are_rejected(directory: str, make: Any, said: str) -> None:
    model = make()
    part = torch.nn.Sequential(Tuned()) if isinstance(model, torch.nn.Sequential) else torch.nn.Linear(2, 2)
    with Checkpointer(directory, part, extra={"a": {"x": 1}}) as run:
        run.save(1)
    extra = {"a": {"x": 2}}
    with Checkpointer(directory, model, extra=extra) as run:
        with pytest.raises(remanent.InvalidError, match=said):
            run.restore()
    assert extra == {"a": {"x": 2}}


class Packed(torch.Tensor):
    """Codes and a scale that represent elements, like quantized tensors of other libraries."""

    @staticmethod
    def __new__(cls, codes: Any, scale: float) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Any, scale: float) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Packed(given[0].codes, given[0].scale)
        raise NotImplementedError(function)


def packed() -> Any:
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(Packed(torch.ones(2, 2, dtype=torch.int8), 0.5), requires_grad=False)
    return model


def sparse() -> Any:
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.ones(2, 2).to_sparse())
    return model


class SavesMore(torch.nn.Linear):
    """Has a scale in its state that it does not load."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.scale"] = torch.ones(2)


@pytest.mark.parametrize(("then", "now", "said"), [
    (torch.nn.Linear, packed, f"the version contains a plain tensor, but the model has a {__name__}.Packed"),
    (torch.nn.Linear, sparse, "the version contains a dense tensor, but the model has one of layout torch.sparse_coo"),
    (SavesMore, lambda: SavesMore(2, 2), "weight.scale: .*torch's load_state_dict does not accept it"),
], ids=["wrapper", "sparse", "saves more"])
def test_values_that_torch_cannot_load_are_rejected(directory: str, then: Any, now: Any, said: str) -> None:
    saved, model = then(2, 2), now()
    before = model.bias.detach().clone()
    with Checkpointer(f"{directory}/run", saved, rng=False) as run:
        run.save(1)
    save_model(saved, f"{directory}/model")
    with Checkpointer(f"{directory}/run", model, rng=False) as run:
        with pytest.raises(remanent.InvalidError, match=said):
            run.restore()
    with pytest.raises(remanent.MismatchError, match=said):
        load_model(model, f"{directory}/model")
    assert torch.equal(model.bias, before)
    if now is packed:
        with pytest.raises(remanent.RefusedError, match=f"weight: a {__name__}.Packed cannot be stored"):
            save_model(model, f"{directory}/other")


def test_cast_converts_elements(directory: str) -> None:
    saved, found = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    adam = torch.optim.Adam(saved.parameters())
    step(adam, 0)
    with Checkpointer(directory, saved, adam) as run:
        run.save(1)
    other = torch.optim.Adam(found.parameters())
    with Checkpointer(directory, found, other) as run:
        run.restore(cast=True)
    by_torch = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    by_torch.load_state_dict(saved.state_dict())
    expected = torch.optim.Adam(by_torch.parameters())
    expected.load_state_dict(adam.state_dict())
    assert same(dict(found.state_dict()), dict(by_torch.state_dict()))
    assert same(other.state_dict(), expected.state_dict())


def wrappers() -> dict[str, Callable[[], Any]]:
    def plain() -> Any:
        return torch.nn.Sequential(Tuned(), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))

    def inner_compiled() -> Any:
        model = plain()
        model[2] = torch.compile(model[2])
        return model

    def checkpointed() -> Any:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model = plain()
        model[1] = checkpoint_wrapper(model[1])
        return model

    return {"plain": plain, "compiled": lambda: torch.compile(plain()), "inner compiled": inner_compiled,
            "parallel": lambda: torch.nn.DataParallel(plain()), "checkpointed": checkpointed,
            "compiled parallel": lambda: torch.compile(torch.nn.DataParallel(plain()))}


@pytest.mark.parametrize("then", wrappers())
def test_wrapped_and_plain_models_are_interchangeable(directory: str, then: str) -> None:
    saved = filled(wrappers()[then](), 1)
    with Checkpointer(directory, saved, rng=False) as run:
        run.save(1)
    for now, make in wrappers().items():
        found = filled(make(), 2)
        places = [tensor.data_ptr() for tensor in found.state_dict().values()]
        with Checkpointer(directory, found, rng=False) as run:
            run.restore()
        values = list(found.state_dict().values())
        assert all(map(same, values, saved.state_dict().values())), now
        assert [tensor.data_ptr() for tensor in values] == places


def test_names_differing_beyond_wrappers_are_rejected(directory: str) -> None:
    saved = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})
    with Checkpointer(directory, saved) as run:
        run.save(1)
    for other in (torch.nn.ModuleDict({"modules_": torch.nn.Linear(2, 2)}), torch.nn.Linear(2, 2, bias=False),
                  torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2), "_orig_mod": torch.nn.Linear(2, 2)})):
        with Checkpointer(directory, other) as run:
            with pytest.raises(remanent.InvalidError, match="model: the version does not contain "):
                run.restore()
