"""The checkpoint manager for torchtitan: built from the documented configuration, in two ranks of FSDP2."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from pathlib import Path

import pytest
from dcp_ranks import in_ranks

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import stand_ins  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

HOST = stand_ins.torchtitan()

from remanent.dcp import StorageReader, restore_from_archive  # noqa: E402
from remanent.integrations import torchtitan  # noqa: E402

RUN = f"""
    import types
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import stand_ins
    stand_ins.torchtitan()

    import remanent.dcp
    from remanent.integrations.torchtitan import CheckpointManager
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpointer.dcp import CheckpointManager as Theirs

    # The next save frees removed checkpoints, even if it begins immediately.
    remanent.dcp._VISIBLE_AFTER = -1.0

    class Optimizers:
        def __init__(self, model):
            self.model, self.one = model, torch.optim.AdamW(model.parameters(), lr=0.1)

        def state_dict(self):
            return get_optimizer_state_dict(self.model, self.one)

        def load_state_dict(self, state):
            set_optimizer_state_dict(self.model, self.one, state)

    class Trainer:
        # The trainer's `state_dict` is part of each checkpoint, as in torchtitan.
        def __init__(self, config, root, mesh, seed):
            torch.manual_seed(seed)
            self.step, self.losses = 0, []
            self.model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
            fully_shard(self.model, mesh=mesh)
            self.optimizers = Optimizers(self.model)
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizers.one, 0.9)
            self.train(0)
            self.checkpointer = config.build(
                dataloader=None, model_parts=[self.model], optimizers=self.optimizers, lr_schedulers=self.scheduler,
                states={{"train_state": self}}, sd_adapter=None, base_folder=root)

        def state_dict(self):
            return {{"step": self.step}}

        def load_state_dict(self, state):
            self.step = state["step"]

        def train(self, until):
            while True:
                torch.manual_seed(self.step * 2 + dist.get_rank())
                loss = self.model(torch.randn(4, 10)).square().mean()
                self.optimizers.one.zero_grad()
                loss.backward()
                if hasattr(self, "checkpointer"):
                    self.checkpointer.maybe_wait_for_staging()
                self.optimizers.one.step()
                self.losses.append(loss.item())
                if self.step >= until:
                    return
                self.step += 1
                self.scheduler.step()
                self.checkpointer.save(self.step, last_step=self.step == until)
"""


def shown() -> str:
    """Returns the configuration in the module's docstring, for the stand-in for torchtitan."""
    text = inspect.cleandoc(torchtitan.__doc__ or "")
    code = text[text.index("    from remanent.integrations.torchtitan"):text.index("\nCheckpoints are those")]
    return textwrap.dedent(code).replace("from torchtitan.models.llama3.config_registry import llama3_debugmodel", "")


def test_documented_configuration_creates_manager() -> None:
    print(f"the host is {HOST}")
    names: dict[str, object] = {}
    exec(shown(), names)

    class Config:
        checkpoint: object

    names["llama3_debugmodel"] = Config
    config = names["llama3_debugmodel_remanent"]().checkpoint  # type: ignore[operator]
    assert type(config) is torchtitan.CheckpointManager.Config and config._owner is torchtitan.CheckpointManager
    assert (config.interval, config.keep_latest_k, config.async_mode) == (100, 3, "async_with_pinned_mem")
    config.enable = False
    manager = config.build(dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={},
                           sd_adapter=None)
    assert not manager.save(100) and not manager.load()
    manager.close()


def test_ranks_continue_from_manager_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    said = in_ranks(2, RUN + """
    def run(rank, ranks, root):
        mesh = begin(rank, ranks, root)
        for mode in ("disabled", "async", "async_with_pinned_mem"):
            config = CheckpointManager.Config(enable=True, interval=2, keep_latest_k=2, last_save_model_only=False,
                                              async_mode=mode, verify=True, folder=mode,
                                              archive_url=f"file://{root}/bucket" if mode == "async" else None)
            first = Trainer(config, root, mesh, 0)
            assert not first.checkpointer.load()
            first.train(9)
            first.checkpointer.maybe_wait_for_saving()
            first.checkpointer.close()
            dist.barrier()
            other = Trainer(config, root, mesh, 1)
            assert other.checkpointer.load() and other.step == 9
            assert other.checkpointer.load(8) and other.step == 8
            count = len(other.losses)
            other.train(9)
            assert other.losses[count:] == first.losses[-2:], (other.losses, first.losses)
            other.checkpointer.close()
            # `keep_latest_k` keeps two checkpoints, so this one was removed.
            assert not os.path.exists(f"{root}/{mode}/step-2/.metadata")
        # A run switches to this manager from torchtitan's own.
        options = {"enable": True, "interval": 2, "last_save_model_only": False}
        first = Trainer(Theirs.Config(**options), root, mesh, 0)
        first.train(5)
        first.checkpointer.close()
        dist.barrier()
        assert remanent.dcp.is_of_dcp(root + "/checkpoint/step-4")
        other = Trainer(CheckpointManager.Config(**options), root, mesh, 1)
        assert other.checkpointer.load(4) and other.step == 4
        count = len(other.losses)
        other.train(5)
        assert other.losses[count:] == first.losses[-2:]
        assert not remanent.dcp.is_of_dcp(root + "/checkpoint/step-5")
        again = Trainer(CheckpointManager.Config(**options), root, mesh, 2)
        assert again.checkpointer.load() and again.step == 5
        os.write(1, f"rank {rank}: fine\\n".encode())
        end(rank, ranks, root)
    """, str(tmp_path))
    assert said == ["rank 0: fine", "rank 1: fine"]
    assert sorted(each.name for each in tmp_path.glob("async/.remanent/rank-*")) == ["rank-0", "rank-1"]
    shutil.rmtree(tmp_path / "async")
    restored = restore_from_archive(tmp_path / "async", {"url": (tmp_path / "bucket").as_uri()})
    assert [path.name for path in restored[-2:]] == ["step-8", "step-9"]
    state = {"train_state": {"step": 0}}
    dcp.load(state, storage_reader=StorageReader(restored[-1]), no_dist=True)
    assert state["train_state"]["step"] == 9
