"""The training loop: one for an engine on one machine, for ranks out of core and for ranks in memory."""

import contextlib
import json
import math
import shlex
import shutil
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from cli.job.data import write_chat_template
from cli.job.job import Job, TrainedModel
from cli.options.settings import RUN
from cli.report.log import METRICS, SUMMARY, MetricsLogger
from cli.report.results import (
    EvaluationResult,
    IoCounts,
    Measurements,
    MemoryUse,
    Report,
    RunTotals,
    StepMetrics,
    StepResult,
)
from cli.train.interrupts import Stopped
from common.activity import activity
from common.data import Batches
from common.errors import UserError
from fuyou.model.loss.cross_entropy import targets_of

FOLDER, BEST, EVALUATION = "checkpoints", "best", "evaluation.json"
_STEP = "step-"


class Trainer(Protocol):
    """What the loop drives. On several ranks, each has one and all call everything alike."""

    model: TrainedModel
    is_resumed: bool  # Whether to print that the run continues
    plan: Mapping[str, Any]  # Plan of the run, as JSON
    location: tuple[str, str]  # What the run can be continued from, in one word, and where that lies

    @abstractmethod
    def train_step(self, batch: dict[str, torch.Tensor], lr: float) -> StepResult:
        """Take a step with the batch of all ranks, and commit it if that is due."""

    @abstractmethod
    def evaluate(self, batches: Batches) -> EvaluationResult:
        """Return the loss on held-out data."""

    @abstractmethod
    def commit(self) -> None:
        """Make sure that the last step is on the drives."""

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Return the memory in use."""

    @abstractmethod
    def totals(self) -> RunTotals:
        """Return what the run took as a whole, for the report of rank 0."""

    @property
    def last_step(self) -> tuple[StepResult, float] | None:
        """Result and learning rate of the last committed step of a continued run; None: its line is there for sure."""
        return None

    def prepare(self) -> None:
        """Compute what training needs before its first step, if that is not there."""
        return

    def commit_if_due(self, step: int) -> None:
        """Commit the last step if that is due, and not done by :meth:`train_step`."""
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

    def finish(self) -> None:
        """Commit the last step of all, and write what is to be seen of it."""
        self.commit()


class Process(Protocol):
    """The process that trains: alone, or as one of several ranks."""

    is_rank0: bool  # Whether this process reports for all
    world_size: int
    restarted: bool  # Whether the ranks were started again after one was lost

    def enter(self, where: str) -> None:
        """Note how far the run has come, for messages; raise KeyboardInterrupt if it was interrupted."""

    def agree(self, wish: bool) -> bool:
        """Return whether any rank wishes something; collective."""


@dataclass(frozen=True)
class RunResult:
    """What a call of ``finetune`` has done."""

    report: Report
    total_written: int  # Bytes written to SSD, the making of the store included
    is_saved: bool  # Whether the result was exported


def train(job: Job, trainer: Trainer, process: Process) -> RunResult | None:
    """Take all steps that are left, export the result, write the report, and print how it went.

    Return the result, on rank 0. If the user stops the run, raise KeyboardInterrupt, or with several ranks Stopped.
    """
    settings, model, done = job.settings, trainer.model, trainer.model.step_count
    if process.is_rank0 and trainer.is_resumed:
        restarted = " (restarted: a rank was lost)" if process.restarted else ""
        print(f"resume   after step {done:,} of {job.steps:,}{restarted}", flush=True)
        for change in settings.changes:
            print(f"changed  {change}", flush=True)
    process.enter("before the first step")
    with activity("preparing the first step"):
        trainer.prepare()
    flops = model.model_flops_per_token(job.seq_len), model.hardware_flops_per_token(job.seq_len)
    measured = Measurements(job.rows * job.seq_len, *flops)
    with contextlib.ExitStack() as stack:
        logger = None
        if process.is_rank0:
            logger = stack.enter_context(MetricsLogger(job, done, trainer.plan, trainer.last_step))
        after = AfterStep(job, trainer, process, logger)
        if not settings.export:
            _take_steps(job, trainer, process, logger, measured, after)
    process.enter("after the last step")
    with activity("writing the last step to the drives"):
        trainer.finish()
    process.enter("after the last step")
    is_saved = settings.save and not after.time_is_up
    if is_saved:
        _export(job, trainer, process.is_rank0)
    if process.is_rank0 and after.last_words:
        print(after.last_words, flush=True)
    with activity("adding up"):
        totals = trainer.totals()
    if not process.is_rank0:
        return None
    report = measured.report(totals)
    if report.steps:
        report.write(job.output / RUN / SUMMARY)
        print(report.summary(totals.total_written))
    elif not settings.export:
        print(f"nothing to do: all {job.steps:,} steps are done")
    print(_where(job, trainer.location, report.steps, is_saved), flush=True)
    return RunResult(report, totals.total_written, is_saved)


def _take_steps(
    job: Job,
    trainer: Trainer,
    process: Process,
    logger: MetricsLogger | None,
    measured: Measurements,
    after: "AfterStep",
) -> None:
    done = trainer.model.step_count
    after.run(done)  # what a run that was killed has left undone, or the evaluation before the first step
    interval, was_interrupted = _Interval(trainer), True
    for step in range(done + 1, job.steps + 1):
        if after.is_over():
            break
        process.enter(f"in step {step}")
        batch = job.batches.batch(step - 1)
        _check_ids(job, batch)
        lr = job.learning_rate.at(step)
        # The line of each step says when the next one is due; after an evaluation or a checkpoint it comes later.
        with activity(f"taking step {step} of {job.steps}") if was_interrupted else contextlib.nullcontext():
            result = trainer.train_step(batch, lr)
        if step == 1 and result.grad_norm == 0:
            raise UserError(
                "The gradient of the first step is exactly 0 for everything that is trained, so the run would "
                "learn nothing: check what --peft-config adapts, and the labels of the data."
            )
        if after.evaluates(step):
            trainer.wait_for_writes()
        seconds, io = interval.next()
        measured.add(seconds, result)
        if logger is not None:
            metrics = StepMetrics(
                step=step,
                result=result,
                lr=lr,
                seconds=seconds,
                tokens=measured.tokens_per_step,
                model_flops_per_token=measured.model_flops,
                memory=trainer.memory(),
                io=io,
                ranks=process.world_size,
                epoch=step * job.settings.batch_size / job.batches.rows if job.settings.data else None,
            )
            logger.step(metrics)
        trainer.commit_if_due(step)  # after the line of the step, which is dropped again if there is no commit
        if trainer.stop_requested() and step < job.steps:
            trainer.commit()
            raise Stopped(f"stopped after step {step}, which is committed. {job.settings.how_to_continue}")
        was_interrupted = after.run(step)
        if was_interrupted:
            interval = _Interval(trainer)
        if after.is_late(step, seconds):
            break
    after.is_over()


class _Interval:
    """Time and traffic from the end of one step to that of the next: what a step writes back runs on into the next."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._start_time, self._start_io = time.perf_counter(), trainer.io_counts()

    def next(self) -> tuple[float, IoCounts | None]:
        """Return seconds and bytes since the last call, or since the beginning."""
        start_time, self._start_time = self._start_time, time.perf_counter()
        start_io, self._start_io = self._start_io, self._trainer.io_counts()
        io = None if start_io is None or self._start_io is None else self._start_io - start_io
        return self._start_time - start_time, io


def _check_ids(job: Job, batch: dict[str, Any]) -> None:
    largest = int(batch["input_ids"].max())
    if largest >= job.vocab_size:
        raise UserError(
            f"The tokenizer gives token {largest}, and the model knows {job.vocab_size:,} tokens (0 to "
            f"{job.vocab_size - 1}): {job.checkpoint} holds a tokenizer that does not belong to its model."
        )


class AfterStep:
    """What is due after a step, the same on all ranks: an evaluation, checkpoints, and the end of the run.

    None of it is part of the step's commit. So each is done only where its result is not there yet, and a continued run
    begins with what its last committed step still lacks: it ends with the files of a run that was never killed.
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
        return any([self._evaluate(step), self._save_best(step), self._save(step)])

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
        self.time_is_up = self._process.agree(late)
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
        return self._process.agree(lacks)

    def _write(self, name: str, evaluation: dict[str, float] | None = None) -> None:
        path, partial, is_rank0 = self._folder / name, self._folder / f"{name}.partial", self._process.is_rank0
        if is_rank0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        try:
            _save(self._job, self._trainer.model, partial, is_rank0)
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


def evaluate(
    batches: Batches, batch_size: int, loss_of: Callable[[dict[str, torch.Tensor]], float]
) -> EvaluationResult:
    """Return the mean loss of every row, taken once, from ``loss_of`` a batch with at least one label.

    The last batch is completed with rows that were seen; their labels are taken away.
    """
    start_time, total, tokens, computed = time.perf_counter(), 0.0, 0, 0
    for number in range(batches.steps_per_epoch):
        batch = batches.batch(number)
        batch["labels"][batches.rows - number * batch_size :] = -100
        count = int((targets_of(batch["labels"], not batches.labels_ahead) != -100).sum())
        if count:
            total += loss_of(batch) * count
            tokens += count
        computed += batch["input_ids"].numel()
    return EvaluationResult(total / tokens, tokens, computed / (time.perf_counter() - start_time))


def _export(job: Job, trainer: Trainer, is_rank0: bool) -> None:
    settings = job.settings
    what = f"writing the {'adapters' if settings.trains_adapters else 'checkpoint'} to {job.output}"
    if is_rank0:
        done = f" as step {trainer.model.step_count:,} of {job.steps:,} left it" if settings.export else ""
        print(f"{what}{done}", flush=True)
    with activity(what):
        _save(job, trainer.model, job.output, is_rank0)


def _save(job: Job, model: TrainedModel, directory: Path, is_rank0: bool) -> None:
    """Write what was trained for others to load, with its chat template. Collective."""
    model.save_pretrained(directory)
    if is_rank0:
        write_chat_template(job.settings, directory)


def _where(job: Job, location: tuple[str, str], steps: int, is_saved: bool) -> str:
    settings, (kept, place) = job.settings, location
    lines = {"run": f"{job.output / RUN} (configuration, versions, metrics, summary; index.html to look at)"}
    lines[kept] = f"{place} (safe to delete unless you will resume)"
    if is_saved:
        loads = "PeftModel" if settings.trains_adapters else job.task_type.auto_class
        lines["saved"] = f"{job.output}, for {loads}.from_pretrained"
        if settings.trains_adapters and job.checkpoint is not None:
            words = ["finetune", "export", "--model", job.checkpoint, "--adapter", job.output, "--output", "DIR"]
            lines["to merge"] = shlex.join(map(str, words))
    if settings.trace is not None and steps:
        lines["trace"] = f"{settings.trace} (open it in ui.perfetto.dev)"
    return "\n".join(f"{name:8} {text}" for name, text in lines.items())
