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

from cli.inspect.versions import versions
from cli.options.config_file import effective_config, written_by
from cli.options.grouped import WRITTEN
from cli.options.settings import DESCRIPTION, RUN
from cli.train.prepare import Job
from common.files import replace_file
from common.hardware.machine import describe_machine
from common.store.errors import described

CONFIG, METRICS = "config.toml", "metrics.jsonl"
OF_ONE_CALL = ("resume", "overwrite", "leave_ssd", "report", "trace", "debug")
"""Options that belong to a call, not to the run."""


class RunDirectory:
    """Made, or found again, when a run begins or goes on.

    Args:
        job: the run.
        done: steps behind it; with 0, what an earlier run left here is replaced.
    """

    def __init__(self, job: Job, done: int) -> None:
        self.path = job.output / RUN
        self.path.mkdir(exist_ok=True)
        before = self._load() if done else {}
        self.id: str = before.get("id") or uuid.uuid4().hex
        """Stays the same when a run is continued."""
        calls = before.get("calls")
        self._before: list[dict[str, Any]] = calls if isinstance(calls, list) else []
        self._call = _describe(job, done)

    @property
    def metrics_file(self) -> Path:
        """Where what every step measured goes."""
        return self.path / METRICS

    def write(self, job: Job, plan: Mapping[str, Any]) -> None:
        """Write configuration and description.

        Args:
            job: the run.
            plan: what has been planned for it, JSON.
        """
        description = {"id": self.id, "store": job.run_name, "calls": [*self._before, {**self._call, "plan": plan}]}
        _replace(self.path / DESCRIPTION, json.dumps(description, indent=2, default=str) + "\n")
        context = written_by(job.settings.arguments)
        context.meta.setdefault(WRITTEN, {})["dtype"] = job.settings.dtype  # on another machine, too
        _replace(self.path / CONFIG, effective_config(context, absolute=True, leave_out=OF_ONE_CALL))

    def _load(self) -> dict[str, Any]:
        """What is there; of a run whose description is lost, nothing."""
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
    """Complete or not at all."""
    with described("writing", file):
        replace_file(file, text)
