"""Log every step and evaluation of a run to files, trackers, and the terminal."""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cli.job.job import Job
from cli.options.option import option_fields
from cli.options.settings import CONFIG, Settings
from cli.report.progress import Progress
from cli.report.results import EvaluationResult, StepMetrics, StepResult, learned_metrics, named_metrics
from cli.report.run_directory import RunDirectory
from cli.report.run_page import RunPage, facts_of
from cli.report.trackers import TrackedRun, Trackers
from common.files import replace_file
from common.store.errors import StoreError, described

HISTORY_FILE = "losses.jsonl"  # File in the output directory; the same whenever the run is repeated


class History:
    """Appends JSON lines to a file, after removing those of steps that were lost.

    Args:
        committed: steps that the run has committed; later lines are removed. 0 begins a new file.

    Raises:
        StoreError: if the system refuses.
    """

    def __init__(self, path: Path, committed: int) -> None:
        lines = path.read_text(errors="replace").splitlines() if committed and path.exists() else []
        committed_lines = [line for line in lines if _step(line) <= committed]
        self._path = path
        self.last_step = _step(committed_lines[-1]) if committed_lines else 0.0
        with described("writing", path):
            replace_file(path, "".join(f"{line}\n" for line in committed_lines))
            self._file = path.open("a")

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of a step, null for those that are not finite, so that a power cut loses none.

        Raises:
            StoreError: if the system refuses.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with described("writing", self._path):
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def __enter__(self) -> "History":
        return self

    def __exit__(self, *exception: object) -> None:
        with described("writing", self._path):
            self._file.close()


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")


class MetricsLogger:
    """Writes every step to ``losses.jsonl``, ``run/metrics.jsonl``, and trackers, and shows progress. Rank 0 only.

    Args:
        done: steps that were taken before.
        last: result and learning rate of the last step, which a killed process may not have logged; None: it has.
    """

    def __init__(
        self, job: Job, done: int, plan: Mapping[str, Any], last: tuple[StepResult, float] | None = None
    ) -> None:
        directory = RunDirectory(job, done)
        directory.write(job, plan)
        names = job.settings.log_to
        options = plain_options(job.settings)
        self._trackers = Trackers(names, TrackedRun(job.output.name, directory.id, directory.path), options)
        self._losses = History(job.output / HISTORY_FILE, done)
        self._metrics = History(directory.metrics_file, done)
        config = (directory.path / CONFIG).read_text()
        if done and last is not None:
            self._log_last_step(done, *last, job.rows * job.seq_len)
        self._page = RunPage(facts_of(job, plan, config), directory.metrics_file)
        self._page.update(at_once=True)
        self._progress = Progress(job.steps, done, job.settings.log_every)

    def step(self, metrics: StepMetrics) -> None:
        result = metrics.result
        self._losses.append(metrics.step, {"loss": result.loss, "grad_norm": result.grad_norm, "lr": metrics.lr})
        self._write(metrics.step, named_metrics(metrics))
        self._progress.show(metrics)
        self._page.update(at_once=metrics.step == 1, lanes=result.busy_intervals)

    def _log_last_step(self, step: int, result: StepResult, lr: float, tokens: int) -> None:
        if self._losses.last_step != step:
            self._losses.append(step, {"loss": result.loss, "grad_norm": result.grad_norm, "lr": lr})
        if self._metrics.last_step != step:
            self._write(step, learned_metrics(step, result, lr, tokens))

    def evaluation(self, step: int, result: EvaluationResult) -> None:
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
        with contextlib.suppress(StoreError) if exception[0] else contextlib.nullcontext():  # a full drive, say
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
