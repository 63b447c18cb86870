"""What every run does, in whichever way it trains: at its beginning, with its batches, and at its end."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from cli.options.settings import RUN
from cli.report.summary import Measurements, Report
from cli.train.prepare import LONG_RECORDS, Job
from common.errors import UserError
from common.models.adapters.adapters import MERGED


class Trained(Protocol):
    """What a run trains."""

    step_count: int
    user_state: dict[str, Any]

    def model_flops_per_token(self, seq_len: int) -> float:
        """Recomputation not counted."""

    def hardware_flops_per_token(self, seq_len: int) -> float:
        """The same with the recomputed forward pass counted."""

    def save_pretrained(self, directory: Path, *, merge: bool = False, allow_nonfinite: bool = False) -> None:
        """Export what was trained."""


def check_same_run(job: Job, trained: Trained, launches: Collection[str] = ()) -> None:
    """Remember what must stay the same, or compare it with what the run began with.

    Args:
        launches: of the launchers that have started the run's ranks, to be remembered as well.

    Raises:
        UserError: they differ.
    """
    if launches:
        trained.user_state["launches"] = sorted({*trained.user_state.get("launches", ()), *launches})
    fixed = job.fixed_settings
    began: dict[str, Any] | None = trained.user_state.get("run")
    if began is None:
        trained.user_state["run"] = fixed
        return
    for option in {**began, **fixed}:
        before, now = began.get(option), fixed.get(option)
        if before == now:
            continue
        if option == LONG_RECORDS:
            if not (before and now):  # a run of an earlier version, or without data: their key tells
                continue
            raise UserError(
                f"--resume: this run began with {before}, and now it is {now}. Give {before}, or begin a new run in "
                "another --output."
            )
        if option == "--data":
            raise UserError(
                "--resume: --data is not what this run began with: other or changed texts, or another tokenizer "
                f"({before} then, {now} now). Give what it began with, or begin a new run in another --output."
            )
        raise UserError(
            f"--resume: this run began with {option} {before}, and now it is {now}. Give {option} {before}, "
            "or begin a new run in another --output."
        )
    if trained.step_count > job.steps:
        raise UserError(f"--resume: this run has {trained.step_count} steps behind it, more than --steps {job.steps}.")


def say_resumed(job: Job, trained: Trained, restarts: int = 0) -> None:
    """Say from where a run goes on, and how often its launcher has started it again."""
    after = f" (start {restarts + 1}: a rank was lost)" if restarts else ""
    print(f"resume   after step {trained.step_count:,} of {job.steps:,}{after}", flush=True)


def measurements(job: Job, trained: Trained) -> Measurements:
    """Of no step yet."""
    flops = trained.model_flops_per_token(job.seq_len), trained.hardware_flops_per_token(job.seq_len)
    return Measurements(job.settings.batch_size * job.seq_len, *flops)


def check_ids(job: Job, batch: dict[str, Any]) -> None:
    """Refuse tokens that the model does not know.

    Raises:
        UserError: there is one.
    """
    largest = int(batch["input_ids"].max())
    if largest >= job.vocab_size:
        raise UserError(
            f"The tokenizer gives token {largest}, and the model knows {job.vocab_size:,} tokens (0 to "
            f"{job.vocab_size - 1}): {job.checkpoint} holds a tokenizer that does not belong to its model."
        )


def save(job: Job, trained: Trained, speaks: bool = True) -> None:
    """Export the result, if it is wanted. Of several ranks, all call this, and one ``speaks``."""
    if not job.settings.save:
        return
    if speaks:
        print(f"writing the {'adapters' if job.settings.trains_adapters else 'checkpoint'} to {job.output}", flush=True)
    trained.save_pretrained(job.output, merge=job.settings.merge, allow_nonfinite=job.settings.allow_nonfinite)


def conclude(job: Job, report: Report, total_written: int, kept: str, place: str) -> None:
    """Write the report, if it is wanted, and say how it went and where everything is.

    Args:
        total_written: bytes written to SSD, the making of the store included.
        kept, place: what the run is continued from, and where that lies.
    """
    if job.settings.report is not None:
        report.write(job.settings.report.expanduser())
    print(report.summary(total_written))
    print(_where(job, kept, place, report.steps), flush=True)


def _where(job: Job, kept: str, place: str, steps: int) -> str:
    """Lines that say where everything is; without any of the ``steps``, there is no trace."""
    settings = job.settings
    lines = {"run": f"{job.output / RUN} (configuration, versions, metrics)"}
    lines[kept] = f"{place} (may be deleted when this run is not to be continued)"
    if settings.save:
        model = job.task_type.auto_class
        loads = "PeftModel" if settings.trains_adapters else model
        lines["saved"] = f"{job.output}, for {loads}.from_pretrained"
        if settings.merge:
            lines["merged"] = f"{job.output / MERGED}, for {model}.from_pretrained"
    if settings.report is not None:
        lines["report"] = str(settings.report)
    if settings.trace is not None and steps:
        lines["trace"] = f"{settings.trace} (open it in ui.perfetto.dev)"
    return "\n".join(f"{name:8} {text}" for name, text in lines.items())
