"""``--log-to``: the trackers that people look at runs in, by way of ``accelerate.tracking``, which wraps them all."""

import contextlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError

PROJECT = "finetune"
"""Under which trackers that know projects file a run, unless their own environment variable names another."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run."""

    name: str
    id: str
    directory: Path
    """Of the run."""


@dataclass(frozen=True)
class _Kind:
    """One tracker."""

    module: str
    """That must be installed."""
    arguments: Callable[[TrackedRun], dict[str, Any]]
    """Of accelerate's class."""
    metric_name: Callable[[str], str] = str
    """Changes what the tracker does not allow in names."""

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


def _mlflow_name(name: str) -> str:
    """MLflow's names have letters, digits and ``_-. :/`` only."""
    return name.replace("(", "_").replace(")", "").replace("%", "percent")


_KINDS = {
    "tensorboard": _Kind("tensorboard", lambda run: {"run_name": "tensorboard", "logging_dir": run.directory}),
    "wandb": _Kind(
        "wandb",
        lambda run: {
            "run_name": os.environ.get("WANDB_PROJECT", PROJECT), "name": run.name, "id": run.id, "resume": "allow",
            "dir": str(run.directory),
        },
    ),
    "trackio": _Kind(
        "trackio",
        lambda run: {
            "run_name": os.environ.get("TRACKIO_PROJECT", PROJECT), "name": f"{run.name}-{run.id[:6]}",
            "resume": "allow", "embed": False,
        },
    ),
    "mlflow": _Kind("mlflow", lambda run: {"experiment_name": PROJECT, "run_name": run.name}, _mlflow_name),
}  # fmt: skip


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse trackers that are not installed.

    Raises:
        UserError: says what to install.
    """
    for name in names:
        if name in _KINDS and not _KINDS[name].is_installed:
            raise UserError(
                f"--log-to {name}: the package {_KINDS[name].module} is not installed. Install it with "
                f"`{Path(sys.executable).name} -m pip install {_KINDS[name].module}`, or leave {name} out: "
                "metrics.jsonl is always written."
            )


class Trackers:
    """All trackers of a run. One that fails in the middle of it is given up, not the run.

    Args:
        names: those of ``--log-to``.
        run: what they are told of it.
        options: the run's, by name: text and numbers.

    Raises:
        UserError: a tracker cannot begin.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun, options: Mapping[str, Any]) -> None:
        self._open: dict[str, Any] = {}
        for name in dict.fromkeys(names):
            if name in _KINDS:
                self._open[name] = _begin(name, run, options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on what ``step`` measured."""
        for name, tracker in list(self._open.items()):
            with self._watching(name):
                tracker.log({_KINDS[name].metric_name(metric): value for metric, value in metrics.items()}, step=step)

    def finish(self) -> None:
        """Let trackers send what they still have."""
        for name, tracker in list(self._open.items()):
            with self._watching(name):
                tracker.finish()
        self._open.clear()

    @contextlib.contextmanager
    def _watching(self, name: str) -> Iterator[None]:
        """Give up on a tracker that fails: each has a network and a mind of its own."""
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
            PartialState(cpu=True)  # accelerate's classes look at it, and it would otherwise look for GPUs of its own
            tracker = LOGGER_TYPE_TO_CLASS[name](**_KINDS[name].arguments(run))
            tracker.start()
            tracker.store_init_configuration(dict(options))
    except Exception as error:
        raise UserError(
            f"--log-to {name}: it cannot begin: {_one_line(error)}. Mend that, or leave {name} out: metrics.jsonl is "
            "always written."
        ) from error
    return tracker


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()).removesuffix('.') or 'no message'}"
