"""Finds the step at which a run went wrong, and forks the run from the version before.

    python time_travel.py [--device cuda]

Each training step is saved as a version. At one step, some weights become so large that the loss never recovers.
`bisect` then finds the first bad version by binary search. `diff` returns the tensors that this version changed and by
how much, and `blame` the values of an element in each version. A fork continues from the version before.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from remanent.torch import Checkpointer, Version

STEPS, BAD_STEP = 32, 21


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(16, 64), torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        guess: torch.Tensor = self.out(torch.tanh(self.into(x)))
        return guess.squeeze(1)


def make(device: str) -> tuple[Model, torch.optim.SGD]:
    torch.manual_seed(0)
    model = Model().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train(model: Model, optimizer: torch.optim.SGD, *, is_bad: bool = False) -> float:
    x = torch.randn(64, 16, device=model.out.weight.device)
    loss = (model(x) - x.mean(dim=1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if is_bad:
        with torch.no_grad():
            model.out.weight[0, 10:13] = 1e4
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", help="device of the model: cpu or cuda")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = make(device)
        with Checkpointer(Path(folder) / "run", model, optimizer, keep=STEPS) as run:
            for step in range(1, STEPS + 1):
                loss = train(model, optimizer, is_bad=step == BAD_STEP)
                run.save(step)
            print(f"after {STEPS} steps, the loss is {loss:.3g}")

            def is_good(version: Version) -> bool:
                run.restore(version)
                return all(float(parameter.detach().abs().max()) < 100 for parameter in model.parameters())

            bad = run.bisect(is_good, good=1, bad=STEPS).step
            assert bad == BAD_STEP
            print(f"version {bad} is the first bad version; it differs from the previous version in:")
            changed = run.diff(bad - 1, bad)
            differ = {name: found for name, found in changed.items() if found and name.startswith("model")}
            for name, found in differ.items():
                print(f"  {name}: {found.elements} elements, by up to {found.largest:.3g}")
            name, worst = max(differ.items(), key=lambda each: each[1].largest)
            assert name == "model/out.weight"
            change = next(change for change in run.blame(name, (0, 10)) if change.step == bad)
            print(f"{name}[0, 10] went from {change.before:.3g} to {change.after:.3g} in step {change.step}")
            run.fork(Path(folder) / "again", bad - 1)
        with Checkpointer(Path(folder) / "again", model, optimizer, keep=2) as again:
            step = again.restore()
            assert step == BAD_STEP - 1
            for step in range(BAD_STEP, STEPS + 1):
                mended = train(model, optimizer)
                again.save(step)
            print(f"a fork of version {BAD_STEP - 1} has a loss of {mended:.3g} after {STEPS} steps")
    assert mended < 1 < loss


if __name__ == "__main__":
    main()
