"""What a run says and writes down while it trains, and where it has left what; of several ranks, the first speaks."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from cli.evaluation import Evaluation
from cli.metrics import Metrics, step_metrics
from cli.prepare import Job
from cli.progress import ClusterLine, Progress, StepLine
from cli.run_directory import RunDirectory
from cli.settings import RUN
from common.models.adapters import MERGED


class Said:
    """The run's directory, every step's figures, and the line on the terminal.

    Args:
        job: the run.
        done: steps behind it.
        plan: what has been planned for it, JSON.
    """

    def __init__(self, job: Job, done: int, plan: Mapping[str, Any]) -> None:
        directory = RunDirectory(job, done)
        directory.write(job, plan)
        self._tokens_per_step = job.settings.batch_size * job.seq_len
        self._metrics = Metrics(job, directory, done)
        self._progress = Progress(job.steps, done)

    def step(self, line: StepLine | ClusterLine, lr: float, seconds: float, ranks: int = 1) -> None:
        """A step is done; the arguments are those of :func:`~cli.metrics.step_metrics`."""
        self._metrics.step(line.step, step_metrics(line, lr, seconds, line.step * self._tokens_per_step, ranks))
        self._progress.show(line)

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Held-out data were looked at after ``step``."""
        self._metrics.evaluation(step, result)
        self._progress.say(f"held out after step {step:,}: {result}")

    def __enter__(self) -> "Said":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, traceback)
        self._metrics.__exit__(kind, error, traceback)


def writing(job: Job) -> str:
    """What is said before the result is written."""
    return f"writing the {'adapters' if job.settings.trains_adapters else 'checkpoint'} to {job.output}"


def where(job: Job, kept: str, place: str, steps: int) -> str:
    """Lines that say where everything is.

    Args:
        job: the run.
        kept, place: what it is continued from, and where that lies.
        steps: taken by this call; without any there is no trace.
    """
    settings = job.settings
    lines = {"run": f"{job.output / RUN} (configuration, versions, metrics)"}
    lines[kept] = f"{place} (may be deleted when this run is not to be continued)"
    if settings.save:
        loads = "PeftModel" if settings.trains_adapters else "AutoModelForCausalLM"
        lines["saved"] = f"{job.output}, for {loads}.from_pretrained"
        if settings.merge:
            lines["merged"] = f"{job.output / MERGED}, for AutoModelForCausalLM.from_pretrained"
    if settings.report is not None:
        lines["report"] = str(settings.report)
    if settings.trace is not None and steps:
        lines["trace"] = f"{settings.trace} (open it in ui.perfetto.dev)"
    return "\n".join(f"{name:8} {text}" for name, text in lines.items())
