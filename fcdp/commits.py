"""Commits: whole states of a run on a file system that all nodes share, written by all ranks together.

A commit is a folder ``step-<N>``, one of PyTorch's distributed checkpoints, which any number of ranks can load. It is
written beside the last one, under another name; it counts once it is renamed, and only then the last one goes. So
whatever happens, the newest commit that is there is whole.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from common.errors import FinetuneError
from common.store.sealed import sync_directory

_RUN_FILE = "run.json"
_INCOMPLETE = "incomplete"


class Commits:
    """The commits of one run.

    Args:
        directory: the same on all nodes; made when needed.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    def newest(self) -> int | None:
        """The step of the newest commit; None if there is none."""
        found = [re.fullmatch(r"step-(\d+)", path.name) for path in self.directory.glob("step-*")]
        return max((int(match[1]) for match in found if match), default=None)

    def describe(self, step: int) -> dict[str, Any]:
        """What the commit of ``step`` was saved with.

        Raises:
            FinetuneError: it cannot be read.
        """
        file = self._folder(step) / _RUN_FILE
        try:
            content: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise FinetuneError(f"{file} cannot be read ({error}): the commit of step {step} is damaged.") from error
        return content

    def save(self, step: int, state: dict[str, torch.Tensor], description: dict[str, Any]) -> None:
        """Commit ``state`` (DTensors, by name) and drop older commits. Collective; on return it is on the drives.

        Args:
            description: JSON, for :meth:`describe`.
        """
        beside = self.directory / _INCOMPLETE
        if dist.get_rank() == 0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        dist.barrier()
        dcp.save(state, checkpoint_id=beside)
        if dist.get_rank() == 0:
            with (beside / _RUN_FILE).open("w") as file:
                json.dump(description, file)
                file.flush()
                os.fsync(file.fileno())
            sync_directory(beside)  # or a power cut could leave a commit without some of its files
            older = list(self.directory.glob("step-*"))
            shutil.rmtree(self._folder(step), ignore_errors=True)
            beside.rename(self._folder(step))
            sync_directory(self.directory)
            for folder in older:
                if folder != self._folder(step):
                    shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()

    def load(self, step: int, state: dict[str, torch.Tensor]) -> None:
        """Read a commit into the tensors of ``state``, however they are sharded. Collective.

        Raises:
            FinetuneError: it is damaged, or of another model.
        """
        try:
            dcp.load(state, checkpoint_id=self._folder(step))
        except dcp.CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise FinetuneError(f"{self._folder(step)} cannot be loaded: {first}") from error

    def discard(self) -> None:
        """Remove all commits. For one rank to do."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _folder(self, step: int) -> Path:
        return self.directory / f"step-{step}"
