"""The record of a run: what is needed to repeat it, and all steps in files and the terminal."""

import contextlib
import json
import math
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
from cli.report.page import RunPage, facts_of
from cli.report.progress import Progress
from cli.report.results import EvaluationResult, StepMetrics, StepResult, learned_metrics, named_metrics
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
    """Return a library's version, ``-`` if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


METRICS, SUMMARY = "metrics.jsonl", "summary.json"
"""Files in the run's directory: every step, and the report of the last call that took steps."""


def open_run_directory(job: Job, done: int, plan: Mapping[str, Any]) -> Path:
    """Write the run's configuration and description, with its plan; return its directory.

    If no steps are ``done``, files of an earlier run are replaced.
    """
    path, before = job.output / RUN, dict[str, Any]()
    path.mkdir(exist_ok=True)
    if done:
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            before = dict(json.loads((path / DESCRIPTION).read_text()))
    call = {
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
        "plan": plan,
    }
    calls, run_id = before.get("calls"), str(before.get("id") or uuid.uuid4().hex)  # The id stays when it is resumed
    description = {"id": run_id, "store": job.run_name, "calls": [*(calls if isinstance(calls, list) else []), call]}
    context = job.settings.context or parse_command_line(job.settings.arguments)
    context.meta.setdefault(WRITTEN, {})["dtype"] = job.settings.dtype  # on another machine, too
    for name, text in (
        (DESCRIPTION, json.dumps(description, indent=2, default=str) + "\n"),
        (CONFIG, effective_config(context, of_run=True)),
    ):
        with described("writing", path / name):
            replace_file(path / name, text)
    return path


HISTORY_FILE = "losses.jsonl"  # File in the output directory; the same whenever the run is repeated


class History:
    """Appends JSON lines to a file, after removing those of steps after the ``committed`` one; 0 begins a new file."""

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
    """Writes every step to ``losses.jsonl`` and ``run/metrics.jsonl``, and shows progress. Rank 0 only.

    ``last`` is the result and learning rate of the last step ``done``, which a killed process may not have logged.
    """

    def __init__(
        self, job: Job, done: int, plan: Mapping[str, Any], last: tuple[StepResult, float] | None = None
    ) -> None:
        path = open_run_directory(job, done, plan)
        self._losses = History(job.output / HISTORY_FILE, done)
        self._metrics = History(path / METRICS, done)
        if done and last is not None:
            result, lr = last
            if self._losses.last_step != done:
                self._losses.append(done, {"loss": result.loss, "grad_norm": result.grad_norm, "lr": lr})
            if self._metrics.last_step != done:
                self._metrics.append(done, learned_metrics(done, result, lr, job.rows * job.seq_len))
        self._page = RunPage(facts_of(job, plan, (path / CONFIG).read_text()), path / METRICS)
        self._page.update(at_once=True)
        self._progress = Progress(job.steps, done, job.settings.log_every)

    def step(self, metrics: StepMetrics) -> None:
        result = metrics.result
        self._losses.append(metrics.step, {"loss": result.loss, "grad_norm": result.grad_norm, "lr": metrics.lr})
        self._metrics.append(metrics.step, named_metrics(metrics))
        self._progress.show(metrics)
        self._page.update(at_once=metrics.step == 1)

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        tokens = {} if result.watched else {"validation_metrics/perplexity": result.perplexity}
        named = {
            "validation_metrics/loss": result.loss,
            **tokens,
            **{f"validation_metrics/{name}": value for name, value in result.watched.items()},
            "validation_metrics/throughput(tps)": result.tokens_per_second,
        }
        self._metrics.append(step, named)
        self._page.update(at_once=True)
        self._progress.say(f"eval at step {step:,}: {result}")

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.__exit__(*exception)
        with contextlib.suppress(StoreError) if exception[0] else contextlib.nullcontext():  # a full drive, say
            self._page.update(at_once=True)
        self._metrics.__exit__(*exception)
        self._losses.__exit__(*exception)
