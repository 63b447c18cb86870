"""Everything that a run shows and writes down while it trains. On several ranks, rank 0 has one."""

from collections.abc import Mapping
from typing import Any

from cli.job.job import Job
from cli.options.option import option_fields
from cli.options.settings import CONFIG, Settings
from cli.report.history import HISTORY_FILE, History
from cli.report.metrics import named_metrics
from cli.report.page.run_page import RunPage, facts_of
from cli.report.progress import Progress
from cli.report.results import EvaluationResult, StepMetrics
from cli.report.run_directory import RunDirectory
from cli.report.trackers import TrackedRun, Trackers


class MetricsLogger:
    """A metrics logger writes every step to files and trackers, and draws the line on the terminal.

    The files are ``losses.jsonl``, and ``metrics.jsonl`` in the run directory, which it makes.

    Args:
        job: the run.
        done: steps that are behind it.
        plan: what was planned for it, as JSON.
    """

    def __init__(self, job: Job, done: int, plan: Mapping[str, Any]) -> None:
        directory = RunDirectory(job, done)
        directory.write(job, plan)
        names = job.settings.log_to
        options = plain_options(job.settings)
        self._trackers = Trackers(names, TrackedRun(job.output.name, directory.id, directory.path), options)
        self._losses = History(job.output / HISTORY_FILE, done)
        self._metrics = History(directory.metrics_file, done)
        config = (directory.path / CONFIG).read_text()
        self._page = RunPage(facts_of(job, plan, config), directory.metrics_file)
        self._page.update(at_once=True)
        self._progress = Progress(job.steps, done, job.settings.log_every, job.settings.quiet)

    def step(self, metrics: StepMetrics) -> None:
        """Log a step that is done."""
        result = metrics.result
        self._losses.append(metrics.step, {"loss": result.loss, "grad_norm": result.grad_norm, "lr": metrics.lr})
        self._write(metrics.step, named_metrics(metrics))
        self._progress.show(metrics)
        self._page.update(at_once=metrics.step == 1, lanes=result.busy_intervals)

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Log what the held-out data gave after ``step``."""
        tokens = {} if result.watched else {"validation_metrics/perplexity": result.perplexity}
        named = {
            "validation_metrics/loss": result.loss,
            **tokens,
            **{f"validation_metrics/{name}": value for name, value in result.watched.items()},
            "validation_metrics/throughput(tps)": result.tokens_per_second,
        }
        self._write(step, named)
        self._page.update(at_once=True)
        self._progress.say(f"eval at step {step:,}: {result}")

    def _write(self, step: int, named: Mapping[str, float]) -> None:
        self._metrics.append(step, named)
        self._trackers.log(step, named)

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.__exit__(*exception)
        self._page.update(at_once=True)
        self._trackers.finish()
        self._metrics.__exit__(*exception)
        self._losses.__exit__(*exception)


def plain_options(settings: Settings) -> dict[str, str | int | float | bool]:
    """Return every option that has a value, as trackers take them."""
    plain: dict[str, str | int | float | bool] = {}
    for field in option_fields(Settings):
        value = getattr(settings, field.name)
        if value is not None and value != ():
            text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            plain[field.name] = value if isinstance(value, int | float) else text
    return plain
