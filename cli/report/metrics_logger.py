"""Everything that a run shows and writes down while it trains. On several ranks, rank 0 has one."""

from collections.abc import Mapping
from typing import Any

from cli.job.job import Job
from cli.report.metrics import Metrics
from cli.report.progress import Progress
from cli.report.results import EvaluationResult, StepMetrics
from cli.report.run_directory import RunDirectory


class MetricsLogger:
    """A metrics logger keeps the run directory, writes every step's metrics, and draws the line on the terminal.

    Args:
        job: the run.
        done: steps that are behind it.
        plan: what was planned for it, as JSON.
    """

    def __init__(self, job: Job, done: int, plan: Mapping[str, Any]) -> None:
        directory = RunDirectory(job, done)
        directory.write(job, plan)
        self._metrics = Metrics(job, directory, done)
        self._progress = Progress(job.steps, done)

    def step(self, metrics: StepMetrics) -> None:
        """Log a step that is done."""
        self._metrics.step(metrics)
        self._progress.show(metrics)

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Log what the held-out data gave after ``step``."""
        self._metrics.evaluation(step, result)
        self._progress.say(f"held out after step {step:,}: {result}")

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.__exit__(*exception)
        self._metrics.__exit__(*exception)
