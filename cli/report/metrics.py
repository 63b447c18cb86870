"""What a step measured, under the names that torchtitan gives such figures, and where they go.

Names that torchtitan has (``torchtitan/components/metrics.py``, v0.2.2) mean what they mean there: rates are per
device, and memory is in GiB. What it has no name for follows its pattern: ``ssd/read(GiB)``, ``memory/host(GiB)``,
``validation_metrics/perplexity``.
"""

from collections.abc import Mapping

from cli.options.command import plain_options
from cli.report.evaluation_result import EvaluationResult
from cli.report.history import HISTORY_FILE, History
from cli.report.progress import ClusterLine, StepLine
from cli.report.run_directory import RunDirectory
from cli.report.trackers import TrackedRun, Trackers
from cli.train.prepare import Job

_GIB = 1 << 30


def step_metrics(
    line: StepLine | ClusterLine, lr: float, seconds: float, seen: int, ranks: int = 1
) -> dict[str, float]:
    """A step's figures by name.

    Args:
        line: what was measured.
        lr: learning rate.
        seconds: from the end of the step before to that of this one.
        seen: tokens that the run has trained on up to here, padding counted.
        ranks: devices that share the work.
    """
    metrics = {
        "loss_metrics/global_avg_loss": line.loss,
        **({} if line.aux_loss is None else {"loss_metrics/aux_loss": line.aux_loss}),
        "grad_norm": line.grad_norm,
        "lr": lr,
        "skipped": float(line.skipped),
        "n_tokens_seen": seen,
        "throughput(tps)": line.tokens_per_second / ranks,
        "tflops": line.flops_per_second / ranks / 1e12,
        "time_metrics/end_to_end(s)": seconds,
        "memory/max_active(GiB)": line.device_bytes / _GIB,
        "memory/host(GiB)": line.host_bytes / _GIB,
    }
    if isinstance(line, ClusterLine):
        return metrics | {"network/sent(GiB)": line.sent_bytes / _GIB}
    busy = {f"time_metrics/busy_{name}(s)": value for name, value in line.busy_seconds.items()}
    return (
        metrics
        | busy
        | {
            "memory/ssd(GiB)": line.ssd_bytes / _GIB,
            "ssd/read(GiB)": line.read_per_second * seconds / _GIB,
            "ssd/written(GiB)": line.written_per_second * seconds / _GIB,
        }
    )


def _options(job: Job) -> dict[str, str | int | float | bool]:
    """What was asked for, and what was decided where that was left open."""
    return {**plain_options(job.settings.arguments), "dtype": job.settings.dtype}


class Metrics:
    """Writes down every step: ``losses.jsonl``, the run directory's ``metrics.jsonl``, and the trackers' own.

    Args:
        job: the run.
        directory: of the run.
        done: steps behind it.
    """

    def __init__(self, job: Job, directory: RunDirectory, done: int) -> None:
        names = job.settings.log_to
        run = TrackedRun(job.output.name, directory.id, directory.path)
        self._trackers = Trackers(names, run, _options(job) if names else {})
        self._losses = History(job.output / HISTORY_FILE, done)
        self._all = History(directory.metrics_file, done)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done; ``metrics`` are those of :func:`step_metrics`."""
        learned = {"loss": metrics["loss_metrics/global_avg_loss"], "grad_norm": metrics["grad_norm"]}
        self._losses.append(step, {**learned, "lr": metrics["lr"]})
        self._write(step, metrics)

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Held-out data were looked at after ``step``."""
        self._write(step, {
            "validation_metrics/loss": result.loss,
            "validation_metrics/perplexity": result.perplexity,
            "validation_metrics/throughput(tps)": result.tokens_per_second,
        })  # fmt: skip

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._all.append(step, metrics)
        self._trackers.log(step, metrics)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exception: object) -> None:
        self._trackers.finish()
        self._all.__exit__(*exception)
        self._losses.__exit__(*exception)
