"""What a run says and writes down while it trains; of several ranks, the first speaks."""

from collections.abc import Mapping
from typing import Any

from cli.report.evaluation_result import EvaluationResult
from cli.report.metrics import Metrics, step_metrics
from cli.report.progress import ClusterLine, Progress, StepLine
from cli.report.run_directory import RunDirectory
from cli.train.prepare import Job


class MetricsLogger:
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
        """A step is done; the arguments are those of :func:`~cli.report.metrics.step_metrics`."""
        self._metrics.step(line.step, step_metrics(line, lr, seconds, line.step * self._tokens_per_step, ranks))
        self._progress.show(line)

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Held-out data were looked at after ``step``."""
        self._metrics.evaluation(step, result)
        self._progress.say(f"held out after step {step:,}: {result}")

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.__exit__(*exception)
        self._metrics.__exit__(*exception)
