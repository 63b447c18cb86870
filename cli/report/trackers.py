"""Send metrics to the trackers of ``--log-to``, through ``accelerate.tracking``."""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, on_one_line

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
    """Replace characters that MLflow rejects: it allows letters, digits, and ``_-. :/``."""
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

    Raises:
        UserError: if a tracker cannot start.
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
