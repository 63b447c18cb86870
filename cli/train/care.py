"""What a run does for itself next to its steps: checkpoints on the way, the best one, early stopping, a time limit."""

import sys
import time
from typing import Protocol

from tqdm import tqdm

from cli.job.job import Job
from cli.options.settings import RUN
from cli.report.run_directory import METRICS
from cli.train.checkpoints import BestEvaluation, Checkpoints
from cli.train.exporting import Exporter, export
from common.activity import activity


class CaredTrainer(Protocol):
    """A trainer, as far as this needs it."""

    @property
    def model(self) -> Exporter:
        """What is trained."""

    def agree(self, wish: bool) -> bool:
        """Return whether any rank wishes something; collective."""


class CaringProcess(Protocol):
    """A process that trains, as far as this needs it."""

    is_rank0: bool

    def enter(self, where: str) -> None:
        """Note how far the run has come."""


class RunCare:
    """What a run does for itself next to its steps: it saves, it keeps the best, and it ends in time.

    Args:
        job: the run.
        trainer: what is trained.
        process: this process.
    """

    def __init__(self, job: Job, trainer: CaredTrainer, process: CaringProcess) -> None:
        settings = self._settings = job.settings
        self._job, self._trainer, self._process = job, trainer, process
        self._checkpoints = Checkpoints(
            job.output,
            settings.keep,
            process.is_rank0,
            lambda directory: export(job, trainer.model, directory, process.is_rank0),
        )
        self._best = BestEvaluation.of_history(job.output / RUN / METRICS, trainer.model.step_count)
        self.time_is_up = False
        self.last_words = ""
        """Line that says why the run has ended before its last step."""
        self._is_over = settings.export or self._has_not_improved()

    def is_over(self) -> bool:
        """Return whether no further step is to be taken."""
        return self._is_over

    def after_step(self, step: int, seconds: float) -> None:
        """Save if it is due, and see whether there is time for another step like the one that took ``seconds``."""
        settings = self._settings
        if settings.save_every is not None and step % settings.save_every == 0 and step < self._job.steps:
            self._process.enter(f"saving after step {step}")
            with activity(f"saving the checkpoint of step {step}"):
                path = self._checkpoints.save(step)
            self._say(f"saved    {path}")
        if settings.max_hours is not None and step < self._job.steps:
            late = time.time() - settings.started_at + seconds > settings.max_hours * 3600
            if self._trainer.agree(late):
                self.time_is_up = self._is_over = True
                self.last_words = (
                    f"ended after step {step:,} of {self._job.steps:,}, which is committed: another one would go "
                    f"beyond --max-hours {settings.max_hours:g}. {settings.how_to_continue}"
                )

    def after_evaluation(self, step: int, loss: float) -> None:
        """Keep the best checkpoint, and end the run when no evaluation finds a better one any more."""
        is_best = self._best.take(step, loss)
        if is_best and step and self._settings.save_every is not None:
            with activity("saving the best checkpoint so far"):
                path = self._checkpoints.save_best(step, loss)
            self._say(f"saved    {path}: the best so far")
        if self._has_not_improved():
            self._is_over = True

    def _has_not_improved(self) -> bool:
        """Return whether evaluations have found nothing better for as long as ``--patience`` waits."""
        patience, best = self._settings.patience, self._best
        if patience is None or best.since < patience:
            return False
        self.last_words = (
            f"ended early: no evaluation was better than that of step {best.step:,} (loss {best.loss:.4f}) "
            f"{best.since} times in a row (--patience {patience})"
        )
        return True

    def _say(self, text: str) -> None:
        if self._process.is_rank0 and not self._settings.quiet:
            tqdm.write(text)
            sys.stdout.flush()
