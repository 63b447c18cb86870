"""What is due after a step: an evaluation, the best checkpoint, a regular checkpoint, and the end of the run.

None of it is part of the step's commit. So each is done only where its result is not there yet, and a continued run
begins with what its last committed step still lacks: it ends with the files of a run that was never killed.
"""

import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from cli.job.job import Job
from cli.options.settings import RUN
from cli.report.metrics_logger import MetricsLogger
from cli.report.run_directory import METRICS
from cli.train.exporting import export
from cli.train.trainer import Process, Trainer
from common.activity import activity

FOLDER, BEST, EVALUATION = "checkpoints", "best", "evaluation.json"
_STEP = "step-"


class AfterStep:
    """Does what is due after each step, the same on all ranks.

    Args:
        job: the run.
        trainer: what is trained.
        process: this process.
        logger: of rank 0.
    """

    def __init__(self, job: Job, trainer: Trainer, process: Process, logger: MetricsLogger | None) -> None:
        self._job, self._settings = job, job.settings
        self._trainer, self._process, self._logger = trainer, process, logger
        self._folder = job.output / FOLDER
        self._losses = read_evaluations(job.output / RUN / METRICS, trainer.model.step_count)
        self.time_is_up = False
        self.last_words = ""  # why the run has ended before its last step

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation is due: before the first step, after the last, and as ``--eval-every`` says."""
        if self._job.held_out is None or step in self._losses:
            return False
        every = self._settings.eval_every
        return step in (0, self._job.steps) or (every is not None and step % every == 0)

    def run(self, step: int) -> bool:
        """Do what is due after ``step``, as far as it was not done; return whether anything was."""
        done = [self._evaluate(step), self._save_best(step), self._save(step)]
        return any(done)

    def is_over(self) -> bool:
        """Return whether evaluations have found nothing better for as long as ``--patience`` waits."""
        best, since = best_of(self._losses)
        if self._settings.patience is None or since < self._settings.patience:
            return False
        loss = self._losses.get(best, math.nan)
        self.last_words = (
            f"ended early: no evaluation was better than that of step {best:,} (loss {loss:.4f}) "
            f"{since} times in a row (--patience {self._settings.patience})"
        )
        return True

    def is_late(self, step: int, seconds: float) -> bool:
        """Return whether another step like the last one, of ``seconds``, would go beyond ``--max-hours``."""
        settings = self._settings
        if settings.max_hours is None or step == self._job.steps:
            return False
        late = time.time() - settings.started_at + seconds > settings.max_hours * 3600
        self.time_is_up = self._trainer.agree(late)
        if self.time_is_up:
            self.last_words = (
                f"ended after step {step:,} of {self._job.steps:,}, which is committed: another one would go "
                f"beyond --max-hours {settings.max_hours:g}. {settings.how_to_continue}"
            )
        return self.time_is_up

    def _evaluate(self, step: int) -> bool:
        if not self.evaluates(step):
            return False
        assert self._job.held_out is not None
        self._process.enter(f"evaluating after step {step}")
        with activity(f"evaluating after step {step}"):
            result = self._trainer.evaluate(self._job.held_out)
        if self._logger is not None:
            self._logger.evaluation(step, result)
        self._losses[step] = result.loss
        return True

    def _save_best(self, step: int) -> bool:
        if self._settings.save_every is None or not step or best_of(self._losses)[0] != step:
            return False
        evaluation = {"step": step, "loss": self._losses[step]}
        if not self._lacks(lambda: json.loads((self._folder / BEST / EVALUATION).read_text()) == evaluation):
            return False
        with activity("saving the best checkpoint so far"):
            self._write(BEST, evaluation)
        self._say(f"saved    {self._folder / BEST}: the best so far")
        return True

    def _save(self, step: int) -> bool:
        every = self._settings.save_every
        if every is None or not step or step % every or step == self._job.steps:
            return False
        path = self._folder / f"{_STEP}{step}"
        is_due = self._lacks(path.is_dir)
        if is_due:
            self._process.enter(f"saving after step {step}")
            with activity(f"saving the checkpoint of step {step}"):
                self._write(path.name)
            self._say(f"saved    {path}")
        if self._process.is_rank0:
            for old in regular_checkpoints(self._folder, step)[: -self._settings.keep]:
                shutil.rmtree(old)
        return is_due

    def _lacks(self, is_there: Callable[[], bool]) -> bool:
        """Return whether something is missing by what rank 0 sees, which alone writes. Collective."""
        lacks = self._process.is_rank0
        if lacks:
            with contextlib.suppress(OSError, ValueError):
                lacks = not is_there()
        return self._trainer.agree(lacks)

    def _write(self, name: str, evaluation: dict[str, float] | None = None) -> None:
        """Export the model as it is after the last step to a checkpoint, which is there whole or not at all."""
        path, partial, is_rank0 = self._folder / name, self._folder / f"{name}.partial", self._process.is_rank0
        if is_rank0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        try:
            export(self._job, self._trainer.model, partial, is_rank0)
            if is_rank0 and evaluation is not None:
                (partial / EVALUATION).write_text(json.dumps(evaluation) + "\n")
        except BaseException:
            if is_rank0:
                shutil.rmtree(partial, ignore_errors=True)  # it may have filled the drive
            raise
        if is_rank0:
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)

    def _say(self, text: str) -> None:
        if self._process.is_rank0:
            tqdm.write(text)
            sys.stdout.flush()


def read_evaluations(metrics: Path, done: int) -> dict[int, float]:
    """Return the loss of each evaluation up to step ``done`` by its step, from the run's own file."""
    losses: dict[int, float] = {}
    for line in metrics.read_text(errors="replace").splitlines() if done and metrics.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off by a crash
            entry = json.loads(line)
            step, loss = int(entry["step"]), entry.get("validation_metrics/loss", "none")
            if loss != "none" and step <= done:
                losses[step] = math.nan if loss is None else float(loss)
    return losses


def best_of(losses: dict[int, float]) -> tuple[int, int]:
    """Return the step whose evaluation gave the lowest loss, 0 without any, and the number of evaluations after it."""
    best, least, since = 0, math.inf, 0
    for step, loss in sorted(losses.items()):
        since += 1
        if loss < least:
            best, least, since = step, loss, 0
    return best, since


def regular_checkpoints(folder: Path, last: int) -> list[Path]:
    """Return the checkpoints of ``--save-every`` up to a step, the oldest first."""
    numbers = [path.name.removeprefix(_STEP) for path in folder.glob(f"{_STEP}*")]
    return [
        folder / f"{_STEP}{step}" for step in sorted(int(text) for text in numbers if text.isdigit()) if step <= last
    ]
