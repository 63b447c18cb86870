"""The trackers of ``--log-to``, by way of accelerate: they get the lines of ``metrics.jsonl`` as these are written."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cli.job.job import Job
from cli.options.run_record import RUN, TRACKERS
from cli.options.settings import Settings
from common.errors import UserError, on_one_line
from common.files import make_directory
from common.options import option_fields


class Trackers:
    """Sends a run's metrics to the trackers that it names. One that fails is left out, and the run continues."""

    def __init__(self, job: Job) -> None:
        self.say: Callable[[str], object] = print
        id = job.outputs.id
        folder = job.output / RUN / TRACKERS
        name = f"{job.output.name}-{id[:8]}"  # not that of the run that this one may have replaced
        self._open: dict[str, Any] = {}
        for tracker in dict.fromkeys(job.settings.log_to):
            if tracker == "wandb":  # continues the run of the same id
                project = os.environ.get("WANDB_PROJECT", "finetune")
                start = {"run_name": project, "name": name, "id": id, "resume": "allow", "dir": str(folder)}
            else:
                start = {"run_name": name}
            self._open[tracker] = _begin(tracker, start, folder, job.settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        for name, tracker in list(self._open.items()):
            with self._watching(name):
                tracker.log(dict(metrics), step=step)

    def close(self) -> None:
        """Let all trackers send what is left."""
        for name, tracker in list(self._open.items()):
            with self._watching(name):
                tracker.finish()
        self._open.clear()

    @contextlib.contextmanager
    def _watching(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of any kind: a tracker is no reason to stop a run
            del self._open[name]
            self.say(f"tracker  {name} gets no more metrics: {type(error).__name__}: {on_one_line(error)}")


def _begin(name: str, arguments: dict[str, Any], folder: Path, settings: Settings) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PartialState(cpu=True)  # accelerate's trackers read it; without it they would look for GPUs
            kind: Any = LOGGER_TYPE_TO_CLASS[name]
            if kind.requires_logging_directory:
                arguments["logging_dir"] = str(folder)
            make_directory(folder)
            tracker = kind(**arguments)
            tracker.start()
            tracker.store_init_configuration(_plain(settings))
    except Exception as error:
        raise UserError(
            f"--log-to {name} cannot start: {type(error).__name__}: {on_one_line(error).removesuffix('.')}. Fix that, "
            f"or leave {name} out: metrics.jsonl is always written."
        ) from error
    return tracker


def _plain(settings: Settings) -> dict[str, str | int | float | bool]:
    """Return the options that have a value, as trackers take them."""
    plain: dict[str, str | int | float | bool] = {}
    for field in option_fields(Settings):
        value = getattr(settings, field.name)
        if isinstance(value, tuple):
            value = " ".join(map(str, value))
        if value not in (None, ""):
            plain[field.name] = value if isinstance(value, int | float) else str(value)
    return plain
