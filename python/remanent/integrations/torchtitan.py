"""A checkpoint manager for torchtitan with durable, verified and deduplicated checkpoints.

The manager replaces torchtitan's own manager in a configuration and supports all of its options:

    from remanent.integrations.torchtitan import CheckpointManager
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    def llama3_debugmodel_remanent():
        config = llama3_debugmodel()
        config.checkpoint = CheckpointManager.Config(
            enable=True, interval=100, keep_latest_k=3, async_mode="async_with_pinned_mem")
        return config

Checkpoints are those of `remanent.dcp`. Data that does not change between checkpoints is written once, and `.metadata`
exists only after all ranks are durable. For "async" and "async_with_pinned_mem", `remanent.dcp.Stager` makes the
copies, and a thread of the same process writes them. Files for Hugging Face are written by torchtitan's own manager.
Checkpoints that torchtitan's own manager saved can be loaded, so a run can switch to this manager and continue.
torchtitan 0.3.0 or later is required.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from remanent.dcp import Stager, StorageReader, StorageWriter, is_of_dcp
from remanent.integrations import _hosts

with _hosts.importing(_hosts.TORCHTITAN):
    from torchtitan.components.checkpointer.base import MODEL
    from torchtitan.components.checkpointer.dcp import AsyncMode
    from torchtitan.components.checkpointer.dcp import CheckpointManager as DcpCheckpointManager
    from torchtitan.tools.utils import GarbageCollection

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

    from remanent._store.options import ArchiveOptions

__all__ = ["CheckpointManager"]


def __dir__() -> list[str]:
    return __all__


class CheckpointManager(DcpCheckpointManager):
    """A torchtitan checkpoint manager that saves to one store per rank. See `CheckpointManager.Config` for its
    options."""

    @dataclass(kw_only=True, slots=True)
    class Config(DcpCheckpointManager.Config):
        """The options of torchtitan's own manager, `verify` and `archive_url`."""

        verify: bool = False
        """Whether to read back everything from the disk before a save completes."""

        archive_url: str | None = None
        """The URL of the archive to which checkpoints are saved as well, see `remanent.dcp.StorageWriter`. After the
        loss of all machines, call `remanent.dcp.restore_from_archive` for the folder of checkpoints before the job
        starts. None archives nothing."""

    def __init__(self, config: Config, **given: Any) -> None:
        super().__init__(config, **given)
        if not self.enable:
            return
        self._verify = config.verify
        self._archive: ArchiveOptions | None = None if config.archive_url is None else {"url": config.archive_url}
        if self.async_mode is not AsyncMode.DISABLED:
            # torchtitan waits for the copies before an optimizer step, or else for a future that contains none.
            overlap = self.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM
            self.stager = Stager(wait=not overlap, overlap=overlap)

    @torch.no_grad()
    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode,
        enable_garbage_collection: bool = False, to_hf: bool = False
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Saves a checkpoint to `checkpoint_id`. Called by torchtitan."""
        saving: Future[Any] | AsyncSaveResponse | None = None
        if to_hf:
            saving = super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
            return saving
        writer = StorageWriter(checkpoint_id, verify=self._verify, archive=self._archive)
        if async_mode is AsyncMode.DISABLED:
            save(state_dict, storage_writer=writer)
        else:
            saving = async_save(state_dict, storage_writer=writer, process_group=self.pg, async_stager=self.stager)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saving

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Loads the checkpoint at `checkpoint_id` into `state_dict`. Called by torchtitan."""
        if from_hf or is_of_dcp(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        # A checkpoint may have been exported with other element types, which torchtitan has options for.
        load(state_dict, storage_reader=StorageReader(checkpoint_id, cast=True))
        # The model's tensors are flat in the dict, next to the other states.
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)
