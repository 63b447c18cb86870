"""The directory ``run`` in the output directory: what is needed to repeat the run, and its metrics.

``config.toml`` has every option in effect (``finetune --config .../config.toml`` repeats the run), ``run.json``
describes each call of ``finetune`` with its plan, and ``metrics.jsonl`` has the metrics of every step.
"""

import json
import os
import platform
import shlex
import socket
import uuid
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cli.job.job import Job
from cli.options.command import parse_command_line
from cli.options.config_file import effective_config
from cli.options.option import WRITTEN
from cli.options.settings import CONFIG, DESCRIPTION, RUN
from common.files import replace_file
from common.hardware.machine import describe_machine
from common.store.errors import described

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
