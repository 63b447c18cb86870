"""Metrics of a step under the names that torchtitan gives them, and the files and trackers that they go to.

Names that torchtitan has (``torchtitan/components/metrics.py``, v0.2.2) mean what they mean there: rates are per
device, and memory is in GiB. What it has no name for follows its pattern: ``ssd/read(GiB)``, ``memory/host(GiB)``,
``validation_metrics/perplexity``.
"""

from collections.abc import Mapping

from cli.job.job import Job
from cli.options.config_file import plain_options
from cli.report.history import HISTORY_FILE, History
from cli.report.results import EvaluationResult, StepMetrics
from cli.report.run_directory import RunDirectory
from cli.report.trackers import TrackedRun, Trackers

_GIB = 1 << 30


def named_metrics(metrics: StepMetrics) -> dict[str, float]:
    """Return a step's figures by their names in torchtitan."""
    result, memory, io = metrics.result, metrics.memory, metrics.io
    named = {
        "loss_metrics/global_avg_loss": result.loss,
        **({} if result.aux_loss is None else {"loss_metrics/aux_loss": result.aux_loss}),
        "grad_norm": result.grad_norm,
        "lr": metrics.lr,
        "skipped": float(result.skipped),
        "n_tokens_seen": metrics.step * metrics.tokens,
        "throughput(tps)": metrics.tokens_per_second / metrics.ranks,
        "tflops": metrics.flops_per_second / metrics.ranks / 1e12,
        "time_metrics/end_to_end(s)": metrics.seconds,
        "memory/max_active(GiB)": memory.device_bytes / _GIB,
        "memory/host(GiB)": memory.host_bytes / _GIB,
    }
    if io is None:
        return named | {"network/sent(GiB)": (result.sent_bytes or 0) / _GIB}
    return {
        **named,
        **{f"time_metrics/busy_{name}(s)": value for name, value in result.busy_seconds.items()},
        "memory/ssd(GiB)": memory.ssd_bytes / _GIB,
        "ssd/read(GiB)": io.read / _GIB,
        "ssd/written(GiB)": io.written / _GIB,
    }


def _options(job: Job) -> dict[str, str | int | float | bool]:
    """Return the options as they were typed, with what was decided where that was left open."""
    return {**plain_options(job.settings.arguments), "dtype": job.settings.dtype}


class Metrics:
    """Metrics writes every step to ``losses.jsonl``, to the run directory's ``metrics.jsonl`` and to the trackers.

    Args:
        job: the run.
        directory: its run directory.
        done: steps that are behind it.
    """

    def __init__(self, job: Job, directory: RunDirectory, done: int) -> None:
        names = job.settings.log_to
        run = TrackedRun(job.output.name, directory.id, directory.path)
        self._trackers = Trackers(names, run, _options(job) if names else {})
        self._losses = History(job.output / HISTORY_FILE, done)
        self._all = History(directory.metrics_file, done)

    def step(self, metrics: StepMetrics) -> None:
        """Write a step that is done."""
        result = metrics.result
        self._losses.append(metrics.step, {"loss": result.loss, "grad_norm": result.grad_norm, "lr": metrics.lr})
        self._write(metrics.step, named_metrics(metrics))

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Write what the held-out data gave after ``step``."""
        named = {
            "validation_metrics/loss": result.loss,
            "validation_metrics/perplexity": result.perplexity,
            "validation_metrics/throughput(tps)": result.tokens_per_second,
        }
        self._write(step, named)

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._all.append(step, metrics)
        self._trackers.log(step, metrics)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exception: object) -> None:
        self._trackers.finish()
        self._all.__exit__(*exception)
        self._losses.__exit__(*exception)
