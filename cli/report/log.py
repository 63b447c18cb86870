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
from cli.options.settings import CONFIG, DESCRIPTION, RUN
from cli.report.page import RunPage
from cli.report.progress import Progress
from cli.report.results import EvaluationResult, StepResult
from common.files import replace_file
from common.hardware.machine import describe_machine
from common.store.errors import StoreError, described

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "datasets", "accelerate", "numpy", "kvikio")


def versions() -> dict[str, str]:
    """Return library versions by name, ``-`` if not installed, without importing any library."""
    kvikio = next((name for name in ("kvikio-cu13", "kvikio-cu12") if _version(name) != "-"), "kvikio")
    return {
        "fuyou": _version("fuyou"),
        "Python": platform.python_version(),
        **{name: _version(kvikio if name == "kvikio" else name) for name in LIBRARIES},
        "system": platform.platform(),
        "NVIDIA driver": _nvidia_driver(),
    }


def _nvidia_driver() -> str:
    import pynvml

    with contextlib.suppress(pynvml.NVMLError), contextlib.ExitStack() as stack:
        pynvml.nvmlInit()
        stack.callback(pynvml.nvmlShutdown)
        return str(pynvml.nvmlSystemGetDriverVersion())
    return "-"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


METRICS = "metrics.jsonl"  # File in the run's directory with every step


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
        "command": shlex.join(["finetune", *job.arguments]),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "machine": describe_machine(),
        "computing_on": job.computing_on,
        "computing_in": job.engine.dtype,
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
    for name, text in (
        (DESCRIPTION, json.dumps(description, indent=2, default=str) + "\n"),
        (CONFIG, job.configuration),
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

    def close(self) -> None:
        """Close the file."""
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
        self._tokens = job.rows * job.seq_len
        if done and last is not None:
            self._log(done, *last, {})
        self._page = RunPage(job, plan, (path / CONFIG).read_text(), path / METRICS)
        self._page.update(at_once=True)
        self._progress = Progress(job.steps, job.log_every)
        self.say = self._progress.say

    def step(self, step: int, result: StepResult, lr: float, took: Mapping[str, float], text: str) -> None:
        """Log a step with the metrics of what it took, and show it with ``text``."""
        self._log(step, result, lr, took)
        self._progress.show(step, took["time_metrics/end_to_end(s)"], text)
        self._page.update(at_once=step == 1)

    def _log(self, step: int, result: StepResult, lr: float, took: Mapping[str, float]) -> None:
        if self._losses.last_step < step:
            self._losses.append(step, {"loss": result.loss, "grad_norm": result.grad_norm, "lr": lr})
        if self._metrics.last_step < step:
            self._metrics.append(step, {**result.learned(step, lr, self._tokens), **took})

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Log and show an evaluation."""
        watched = result.watched or {"perplexity": result.perplexity}
        named = {"loss": result.loss, **watched, "throughput(tps)": result.tokens_per_second}
        self._metrics.append(step, {f"validation_metrics/{name}": value for name, value in named.items()})
        self._page.update(at_once=True)
        self.say(f"eval at step {step:,}: {result}")

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.close()
        with contextlib.suppress(StoreError) if exception[0] else contextlib.nullcontext():  # a full drive, say
            self._page.update(at_once=True)
        self._metrics.close()
        self._losses.close()
