"""What the training loop drives: an engine on one machine, or one of several ranks, in memory or out of core."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from cli.report.results import EvaluationResult, IoCounts, MemoryUse, RunTotals, StepResult
from common.data import Batches


class TrainedModel(Protocol):
    """An engine or a trainer of the libraries, as far as all of them are alike."""

    step_count: int

    def model_flops_per_token(self, seq_len: int) -> float:
        """Return FLOPs per token, recomputation not counted."""

    def hardware_flops_per_token(self, seq_len: int) -> float:
        """Return FLOPs per token, recomputation counted."""

    def save_pretrained(self, directory: Path, *, merge: bool = False, allow_nonfinite: bool = False) -> None:
        """Export what was trained."""

    def close(self) -> None:
        """Give memory and processes back."""


class Trainer(Protocol):
    """What the loop drives. On several ranks, each has one and all call everything alike."""

    model: TrainedModel
    is_resumed: bool
    """Whether to print that the run continues."""
    plan: Mapping[str, Any]
    """Plan of the run, as JSON."""
    location: tuple[str, str]
    """What the run can be continued from, in one word, and where that lies."""

    @abstractmethod
    def train_step(self, batch: dict[str, torch.Tensor], lr: float) -> StepResult:
        """Take a step with the batch of all ranks, and commit it if that is due."""

    @abstractmethod
    def evaluate(self, batches: Batches) -> EvaluationResult:
        """Return the loss on held-out data."""

    @property
    def last_step(self) -> tuple[StepResult, float] | None:
        """Result and learning rate of the last committed step of a continued run; None: its line is there for sure."""
        return None

    def commit_if_due(self, step: int) -> None:
        """Commit the last step if that is due, and not done by :meth:`train_step`."""
        return

    @abstractmethod
    def commit(self) -> None:
        """Make sure that the last step is on the drives."""

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Return the memory in use."""

    @abstractmethod
    def totals(self) -> RunTotals:
        """Return what the run took as a whole, for the report of rank 0."""

    def prepare(self) -> None:
        """Compute what training needs before its first step, if that is not there."""
        return

    def wait_for_writes(self) -> None:
        """Wait for what steps still write, so that no evaluation has to."""
        return

    def io_counts(self) -> IoCounts | None:
        """Return the bytes that this node has moved from and to its SSDs; None: states are in memory."""
        return None

    def stop_requested(self) -> bool:
        """Return whether any rank wants to stop after this step; the same on all ranks."""
        return False

    def agree(self, wish: bool) -> bool:
        """Return whether any rank wishes something; collective."""
        return wish

    def finish(self) -> None:
        """Commit the last step of all, and write what is to be seen of it."""
        self.commit()


class Process(Protocol):
    """The process that trains: alone, or as one of several ranks."""

    is_rank0: bool
    """Whether this process reports for all."""
    world_size: int
    """Ranks that train together."""
    restarted: bool
    """Whether the ranks were started again after one was lost."""

    def enter(self, where: str) -> None:
        """Note how far the run has come, for messages.

        Raises:
            KeyboardInterrupt: it was interrupted.
        """
