"""The training loop: one for an engine on one machine, for ranks out of core and for ranks in memory."""

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from cli.job.job import Job
from cli.options.settings import RUN
from cli.report.metrics_logger import MetricsLogger
from cli.report.results import IoCounts, StepMetrics
from cli.report.summary import Measurements, Report
from cli.train.after_step import AfterStep
from cli.train.exporting import export, merged_into
from cli.train.interrupts import Stopped
from cli.train.publishing import push
from cli.train.trainer import Process, Trainer
from common.activity import activity
from common.errors import UserError
from common.models.adapters.adapters import MERGED


@dataclass(frozen=True)
class RunResult:
    """What a call of ``finetune`` has done."""

    report: Report
    total_written: int
    """Bytes written to SSD, the making of the store included."""


def train(job: Job, trainer: Trainer, process: Process) -> Measurements:
    """Take all steps that are left, and export the result.

    Raises:
        Stopped: the user has stopped a run of several ranks; the message says how to continue.
        KeyboardInterrupt: the user has stopped a run of one process.
        UserError, FinetuneError: a batch or a step failed.
    """
    if process.is_rank0 and trainer.is_resumed:
        _print_resumed(job, trainer.model.step_count, process.restarted)
        for change in job.settings.changes:
            print(f"changed  {change}", flush=True)
    process.enter("before the first step")
    with activity("preparing the first step"):
        trainer.prepare()
    with contextlib.ExitStack() as stack:
        logger = None
        if process.is_rank0:
            logger = stack.enter_context(MetricsLogger(job, trainer.model.step_count, trainer.plan, trainer.last_step))
        measured, after = _take_steps(job, trainer, process, logger)
    process.enter("after the last step")
    with activity("writing the last step to the drives"):
        trainer.finish()
    process.enter("after the last step")
    if job.settings.save and not after.time_is_up:
        _export(job, trainer, process.is_rank0)
        measured.is_saved = True
    if process.is_rank0 and after.last_words:
        print(after.last_words, flush=True)
    return measured


def conclude(job: Job, trainer: Trainer, process: Process, measured: Measurements) -> RunResult | None:
    """Write the report, if one is wanted, and print how it went and where everything is.

    Returns:
        The result, on rank 0.
    """
    with activity("adding up"):
        totals = trainer.totals()
    if not process.is_rank0:
        return None
    report = measured.report(totals)
    if job.settings.report is not None:
        report.write(job.settings.report.expanduser())
    if report.steps:
        print(report.summary(totals.total_written))
    elif not job.settings.export:
        print(f"nothing to do: all {job.steps:,} steps are done")
    print(_where(job, trainer.location, report.steps, measured.is_saved), flush=True)
    return RunResult(report, totals.total_written)


def _take_steps(
    job: Job, trainer: Trainer, process: Process, logger: MetricsLogger | None
) -> tuple[Measurements, AfterStep]:
    done = trainer.model.step_count
    measured = Measurements(
        tokens_per_step=job.rows * job.seq_len,
        model_flops=trainer.model.model_flops_per_token(job.seq_len),
        hardware_flops=trainer.model.hardware_flops_per_token(job.seq_len),
    )
    after = AfterStep(job, trainer, process, logger)
    if job.settings.export:
        return measured, after
    after.run(done)  # what a run that was killed has left undone, or the evaluation before the first step
    interval = _Interval(trainer)
    for step in range(done + 1, job.steps + 1):
        if after.is_over():
            break
        process.enter(f"in step {step}")
        batch = job.batches.batch(step - 1)
        _check_ids(job, batch)
        lr = job.learning_rate.at(step)
        # The line of each step says when the next one is due; before the first one nothing does.
        with activity(f"taking step {step} of {job.steps}") if step == done + 1 else contextlib.nullcontext():
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
        if after.run(step):
            interval = _Interval(trainer)
        if after.is_late(step, seconds):
            break
    after.is_over()
    return measured, after


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
    """Refuse a batch with tokens that the model does not know.

    Raises:
        UserError: there is one.
    """
    largest = int(batch["input_ids"].max())
    if largest >= job.vocab_size:
        raise UserError(
            f"The tokenizer gives token {largest}, and the model knows {job.vocab_size:,} tokens (0 to "
            f"{job.vocab_size - 1}): {job.checkpoint} holds a tokenizer that does not belong to its model."
        )


def _export(job: Job, trainer: Trainer, is_rank0: bool) -> None:
    """Export the result."""
    settings = job.settings
    what = f"writing the {'adapters' if settings.trains_adapters else 'checkpoint'} to {job.output}"
    if is_rank0:
        done = f" as step {trainer.model.step_count:,} of {job.steps:,} left it" if settings.export else ""
        print(f"{what}{done}", flush=True)
    with activity(what):
        export(job, trainer.model, job.output, is_rank0, settings.merge)
    if not is_rank0:
        return
    if settings.push_to_hub is not None:
        print(push(job), flush=True)


def _print_resumed(job: Job, step_count: int, restarted: bool) -> None:
    """Print from where a run continues, and whether that is a restart."""
    after = " (restarted: a rank was lost)" if restarted else ""
    print(f"resume   after step {step_count:,} of {job.steps:,}{after}", flush=True)


def _where(job: Job, location: tuple[str, str], steps: int, is_saved: bool) -> str:
    """Return lines that say where everything is; without any of the ``steps``, there is no trace."""
    settings, (kept, place) = job.settings, location
    lines = {"run": f"{job.output / RUN} (configuration, versions, metrics; index.html to look at)"}
    lines[kept] = f"{place} (safe to delete unless you will resume)"
    if is_saved:
        model = job.task_type.auto_class
        loads = "PeftModel" if settings.trains_adapters else model
        lines["saved"] = f"{job.output}, for {loads}.from_pretrained"
        if settings.merge:
            lines["merged"] = f"{job.output / MERGED}, for {model}.from_pretrained: {merged_into(job)}"
    if settings.report is not None:
        lines["report"] = str(settings.report)
    if settings.trace is not None and steps:
        lines["trace"] = f"{settings.trace} (open it in ui.perfetto.dev)"
    return "\n".join(f"{name:8} {text}" for name, text in lines.items())
