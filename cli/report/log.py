"""The record of a run: what is needed to repeat it, and all steps in files, trackers, and the terminal."""

import contextlib
import json
import math
import os
import platform
import shlex
import socket
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cli.job.job import Job
from cli.options.command import parse_command_line
from cli.options.config_file import effective_config
from cli.options.option import WRITTEN, option_fields
from cli.options.settings import CONFIG, DESCRIPTION, RUN, Settings
from cli.report.page import RunPage, facts_of
from cli.report.progress import Progress
from cli.report.results import EvaluationResult, StepMetrics, StepResult, learned_metrics, named_metrics
from common.errors import UserError, on_one_line
from common.files import replace_file
from common.hardware.machine import describe_machine
from common.store.errors import StoreError, described

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "datasets", "accelerate", "numpy", "kvikio")


def versions() -> dict[str, str]:
    """Return library versions by name, ``-`` if not installed, without importing any library."""
    kvikio = next((name for name in ("kvikio-cu13", "kvikio-cu12") if version_of(name) != "-"), "kvikio")
    return {
        "fuyou": version_of("fuyou"),
        "Python": platform.python_version(),
        **{name: version_of(kvikio if name == "kvikio" else name) for name in LIBRARIES},
        "system": platform.platform(),
        "NVIDIA driver": nvidia_driver() or "-",
    }


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver, if there is one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


METRICS = "metrics.jsonl"


class RunDirectory:
    """Creates the run directory, or opens it when a run is resumed.

    Args:
        done: steps that were taken before; with 0, files of an earlier run are replaced.
    """

    def __init__(self, job: Job, done: int) -> None:
        self.path = job.output / RUN
        self.path.mkdir(exist_ok=True)
        before = self._load() if done else {}
        self.id: str = before.get("id") or uuid.uuid4().hex  # The same when the run is resumed
        calls = before.get("calls")
        self._before: list[dict[str, Any]] = calls if isinstance(calls, list) else []
        self._call = _describe(job, done)

    @property
    def metrics_file(self) -> Path:
        return self.path / METRICS

    def write(self, job: Job, plan: Mapping[str, Any]) -> None:
        """Write configuration and description, with the plan as JSON."""
        description = {"id": self.id, "store": job.run_name, "calls": [*self._before, {**self._call, "plan": plan}]}
        _replace(self.path / DESCRIPTION, json.dumps(description, indent=2, default=str) + "\n")
        context = job.settings.context or parse_command_line(job.settings.arguments)
        context.meta.setdefault(WRITTEN, {})["dtype"] = job.settings.dtype  # on another machine, too
        _replace(self.path / CONFIG, effective_config(context, of_run=True))

    def _load(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.path / DESCRIPTION).read_text()))
        except (OSError, ValueError, TypeError, RecursionError):
            return {}


def _describe(job: Job, done: int) -> dict[str, Any]:
    return {
        "began": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["finetune", *job.settings.arguments]),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "machine": describe_machine(),
        "computing_on": job.computing_on,
        "computing_in": job.settings.dtype,
        "versions": versions(),
        "model": job.architecture,
        "parameters": job.parameters,
        "data": job.batches.description,
        "data_key": job.data_key,
        "after_step": done,
        "steps": job.steps,
        "seq_len": job.seq_len,
    }


def _replace(file: Path, text: str) -> None:
    with described("writing", file):
        replace_file(file, text)


PROJECT = "finetune"  # Project that runs are filed under, unless a tracker's own environment variable names another


@dataclass(frozen=True)
class TrackedRun:
    """Name, id, and directory of a run, for trackers."""

    name: str
    id: str
    directory: Path  # Directory of the run, where trackers may write


@dataclass(frozen=True)
class _Tracker:
    """A tracker, as accelerate wraps it."""

    arguments: Callable[[TrackedRun], dict[str, Any]]  # Arguments of accelerate's class for a run
    metric_name: Callable[[str], str] = str  # Function that changes what the tracker does not allow in names of metrics


def _mlflow_name(name: str) -> str:
    return name.replace("(", "_").replace(")", "").replace("%", "percent")


_TRACKERS = {
    "tensorboard": _Tracker(lambda run: {"run_name": "tensorboard", "logging_dir": run.directory}),
    "wandb": _Tracker(
        lambda run: {
            "run_name": os.environ.get("WANDB_PROJECT", PROJECT),
            "name": run.name,
            "id": run.id,
            "resume": "allow",
            "dir": str(run.directory),
        }
    ),
    "trackio": _Tracker(
        lambda run: {
            "run_name": os.environ.get("TRACKIO_PROJECT", PROJECT),
            "name": f"{run.name}-{run.id[:6]}",
            "resume": "allow",
            "embed": False,
        }
    ),
    "mlflow": _Tracker(lambda run: {"experiment_name": PROJECT, "run_name": run.name}, _mlflow_name),
}


class Trackers:
    """Sends metrics to all trackers of a run; a tracker that fails is dropped, and the run continues.

    Args:
        names: trackers of ``--log-to``; ``jsonl`` is ignored.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun, options: Mapping[str, Any]) -> None:
        self._open: dict[str, Any] = {}
        for name in dict.fromkeys(names):
            if name in _TRACKERS:
                self._open[name] = _begin(name, run, options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, tracker in list(self._open.items()):
            with self._watching(name):
                tracker.log(
                    {_TRACKERS[name].metric_name(metric): value for metric, value in metrics.items()}, step=step
                )

    def finish(self) -> None:
        for name, tracker in list(self._open.items()):
            with self._watching(name):
                tracker.finish()
        self._open.clear()

    @contextlib.contextmanager
    def _watching(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            del self._open[name]
            print(f"finetune: {name} gets no more metrics: {_one_line(error)}", file=sys.stderr, flush=True)


def _begin(name: str, run: TrackedRun, options: Mapping[str, Any]) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PartialState(cpu=True)  # accelerate's classes read it, and it would otherwise look for GPUs
            tracker = LOGGER_TYPE_TO_CLASS[name](**_TRACKERS[name].arguments(run))
            tracker.start()
            tracker.store_init_configuration(dict(options))
    except Exception as error:
        raise UserError(
            f"--log-to {name} cannot start: {_one_line(error)}. Fix that, or leave {name} out: metrics.jsonl is always "
            "written."
        ) from error
    return tracker


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {on_one_line(error).removesuffix('.') or 'no message'}"


HISTORY_FILE = "losses.jsonl"  # File in the output directory; the same whenever the run is repeated


class History:
    """Appends JSON lines to a file, after removing those of steps that were lost.

    Args:
        committed: steps that the run has committed; later lines are removed. 0 begins a new file.
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
        """Append the values of a step, null for those that are not finite, so that a power cut loses none."""
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
