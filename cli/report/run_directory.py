"""``run`` inside the output directory: all it takes to repeat the run, and what it measured.

``config.toml`` has every option as it was in effect (``finetune --config .../config.toml`` does the same again),
``run.json`` says what each call of ``finetune`` found and planned, and ``metrics.jsonl`` what every step measured.
"""

import json
import os
import shlex
import socket
import uuid
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from cli.job.job import Job
from cli.options.command import parse_command_line
from cli.options.config_file import effective_config
from cli.options.option import WRITTEN
from cli.options.settings import CONFIG, DESCRIPTION, RUN
from cli.report.versions import versions
from common.files.atomic import replace_file
from common.hardware.machine import describe_machine
from common.store.errors import described

METRICS = "metrics.jsonl"


class RunDirectory:
    """A run directory is made when a run begins, and found again when it goes on.

    Args:
        job: the run.
        done: steps that are behind it; with 0, what an earlier run left here is replaced.
    """

    def __init__(self, job: Job, done: int) -> None:
        self.path = job.output / RUN
        self.path.mkdir(exist_ok=True)
        before = self._load() if done else {}
        self.id: str = before.get("id") or uuid.uuid4().hex
        """Id of the run, which stays the same when it is continued."""
        calls = before.get("calls")
        self._before: list[dict[str, Any]] = calls if isinstance(calls, list) else []
        self._call = _describe(job, done)

    @property
    def metrics_file(self) -> Path:
        """File that gets the metrics of every step."""
        return self.path / METRICS

    def write(self, job: Job, plan: Mapping[str, Any]) -> None:
        """Write configuration and description.

        Args:
            job: the run.
            plan: what was planned for it, as JSON.
        """
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
