"""The record of a run: what is needed to repeat it, and all steps in files and the terminal."""

import contextlib
import json
import math
import os
import platform
import shlex
import socket
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cli.job.job import Job
from cli.job.outputs import FILES, HISTORY_FILE
from cli.options.loss_sum import EVALUATION, LINE_SUM, LOSSES, LossSum, line_sum
from cli.options.run_record import (
    CONFIG,
    DESCRIPTION,
    ENDED_AFTER,
    METRICS,
    OUTPUT,
    RUN,
    described_stores,
    note_end,
    read_description,
)
from cli.report.page import RunPage
from cli.report.progress import Progress
from cli.report.results import EvaluationResult, StepResult
from cli.report.trackers import Trackers
from common.files import make_directory, replace_file, sync
from common.hardware.machine import describe_machine
from common.store.errors import StoreError, described

LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "safetensors",
    "tokenizers",
    "datasets",
    "accelerate",
    "numpy",
    "kvikio",
)


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


def open_run_directory(job: Job, done: int, plan: Mapping[str, Any]) -> dict[str, str]:
    """Write the run's configuration and description, with its plan; return the content of these files by name.

    If no steps are ``done``, files of an earlier run are replaced. Both are on the drives when this returns, before the
    first step is taken: a run whose store cannot be found later is known by them.
    """
    path = job.output / RUN
    make_directory(path)
    before = read_description(job.output) if done else {}
    call = {
        "began": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["finetune", *job.settings.arguments]),
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
    calls = before.get("calls")
    description = {
        "id": job.outputs.id,
        "store": job.run_name,
        OUTPUT: str(job.output.resolve()),
        **described_stores([folder / job.run_name for folder in job.ssd]),
        "calls": [*(calls if isinstance(calls, list) else []), call],
    }
    takes_steps = done < job.steps and not job.settings.export
    if not takes_steps:
        description |= {name: before[name] for name in (ENDED_AFTER, LOSSES) if name in before}
    files = {DESCRIPTION: json.dumps(description, indent=2, default=str) + "\n", CONFIG: job.configuration}
    if not takes_steps and (path / CONFIG).is_file():  # options of a call that takes none are not the run's
        files[CONFIG] = (path / CONFIG).read_text()
    for name, text in files.items():
        with described("writing", path / name):
            replace_file(path / name, text)
    return files


class History:
    """Appends JSON lines to a file, after removing those of steps after the ``committed`` one; 0 begins a new file.

    Of each step, its newest line and that of its newest evaluation stay: one on other held-out data replaces another.
    """

    def __init__(self, path: Path, committed: int) -> None:
        lines = path.read_text(errors="replace").splitlines() if committed and path.is_file() else []
        newest = {(_step(line), EVALUATION in line): line for line in lines if _step(line) <= committed}
        self._path = path
        self.say: Callable[[str], object] = print
        self.last_step = max((step for step, _ in newest), default=0.0)
        self.steps = {step for step, is_evaluation in newest if not is_evaluation}  # that have a line
        with described("writing", path):
            replace_file(path, "".join(f"{line}\n" for line in newest.values()))
            self._open()

    def _open(self) -> None:
        self._file = self._path.open("a")
        self._status = os.fstat(self._file.fileno())  # As of the last write

    def _find(self) -> None:
        """Continue in a new file where the file was moved, replaced, or deleted, and print a line."""
        with contextlib.suppress(FileNotFoundError):
            status = self._path.stat()
            if os.path.samestat(status, self._status):
                if status.st_size < self._status.st_size:
                    self.say(f"gap      {self._path} was cut during the run: lines of earlier steps are lost")
                return
        self._file.close()
        make_directory(self._path.parent)
        self._open()
        if self._status.st_size and not self._path.read_bytes().endswith(b"\n"):
            self._file.write("\n")
        sync(self._path.parent)
        self.say(
            f"gap      {self._path} was moved, replaced, or deleted during the run: it begins again here"
        )

    def append(self, step: int, values: Mapping[str, float], summed: bool = False) -> None:
        """Append the values of a step, null for those that are not finite, so that a power cut loses none.

        ``summed``: with a hash of the line.
        """
        line = {
            "step": step,
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
        }
        if summed:
            line[LINE_SUM] = line_sum(line)
        with described("writing", self._path):
            self._find()
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._status = os.fstat(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with described("writing", self._path):
            self._file.close()


def spans(steps: Iterable[int]) -> str:
    """Return the ascending ``steps`` in words, the ends of the first few series; empty if there are none."""
    ends = list[list[int]]()
    for step in steps:
        if ends and ends[-1][1] == step - 1:
            ends[-1][1] = step
        else:
            ends.append([step, step])
    words = [f"{first:,} to {last:,}" if first < last else f"{first:,}" for first, last in ends]
    is_single = len(ends) == 1 and ends[0][0] == ends[0][1]
    more = f" and {len(words) - 5:,} more series" if len(words) > 5 else ""
    return f"{'step' if is_single else 'steps'} {', '.join(words[:5])}{more}" if ends else ""


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")


class MetricsLogger:
    """Writes every step to ``losses.jsonl`` and ``run/metrics.jsonl``, and shows progress. Rank 0 only.

    ``last`` is the result and learning rate of the last step ``done``, which a killed process may not have logged;
    ``losses`` is the hash over the losses of the steps that are done.
    """

    def __init__(
        self,
        job: Job,
        done: int,
        plan: Mapping[str, Any],
        last: tuple[StepResult, float] | None = None,
        losses: LossSum | None = None,
    ) -> None:
        self._outputs = job.outputs
        path = job.output / RUN
        self._files = open_run_directory(job, done, plan)
        self._trackers = Trackers(job)
        self._losses = History(job.output / HISTORY_FILE, done)
        self._metrics = History(path / METRICS, done)
        self._tokens = job.rows * job.seq_len
        if done and last is not None:
            self._log(done, *last, {})
        self._page = RunPage(job, plan, self._files[CONFIG], path / METRICS)
        self._page.update(at_once=True)
        self._progress = Progress(job.steps, job.settings.log_every)
        self.say = self._losses.say = self._metrics.say = self._trackers.say = self._progress.say
        for name, history in ((f"{RUN}/{METRICS}", self._metrics), (HISTORY_FILE, self._losses)):
            known = history.steps | ({done} if last is not None else set())
            if missing := spans(step for step in range(1, done + 1) if step not in known):
                self.say(
                    f"gap      {name} has no lines for {missing}: it is older than the run's store, or damaged"
                )
            elif losses is not None and losses.is_of_another(job.output / name):
                steps = spans(range(losses.since + 1, losses.step + 1))
                self.say(
                    f"changed  {name} has other losses than this run for {steps}: it is of another run, or edited"
                )

    def step(self, step: int, result: StepResult, lr: float, took: Mapping[str, float], text: str) -> None:
        """Log a step with the metrics of what it took, and show it with ``text``.

        Raises:
            UserError: the output directory was moved, or removed.
        """
        self._keep_files()
        self._log(step, result, lr, took)
        self._progress.show(step, took["time_metrics/end_to_end(s)"], text)
        self._page.update(at_once=step == 1)

    def _log(self, step: int, result: StepResult, lr: float, took: Mapping[str, float]) -> None:
        if self._losses.last_step < step:
            self._losses.append(step, {"loss": result.loss, "grad_norm": result.grad_norm, "lr": lr})
        if self._metrics.last_step < step:
            metrics = {**result.learned(step, lr, self._tokens), **took}
            self._metrics.append(step, metrics)
            self._trackers.log(step, metrics)

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Log and show an evaluation. Raises as :meth:`step`."""
        self._keep_files()
        watched = result.watched or {"perplexity": result.perplexity}
        named = {"loss": result.loss, **watched, "throughput(tps)": result.tokens_per_second}
        metrics = {f"validation_metrics/{name}": value for name, value in named.items()}
        self._metrics.append(step, metrics, summed=True)
        self._trackers.log(step, metrics)
        self._page.update(at_once=True)
        self.say(f"eval at step {step:,}: {result}")

    def note_end(self, step: int, losses: LossSum) -> None:
        """Note that the run was done after ``step``, and all of its results are written.

        ``losses`` is the hash over the losses of all steps: that in the last commit lacks the last step.
        """
        self._keep_files()
        description = json.loads(self._files[DESCRIPTION])
        losses.put(description)
        note_end(self._outputs.directory, step, description)

    def _keep_files(self) -> None:
        """Write again what was deleted of the files that describe the run: without them it is not found later."""
        self._outputs.check_in_place()
        folder = self._outputs.directory / RUN
        lost = [name for name in (*self._files, FILES) if not (folder / name).exists()]
        for name in lost:
            with described("writing", folder / name):
                make_directory(folder)
                if name == FILES:
                    self._outputs.write()
                else:
                    replace_file(folder / name, self._files[name])
            self.say(f"written  {folder / name}, which was deleted during the run")

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.close()
        self._trackers.close()
        with contextlib.suppress(StoreError) if exception[0] else contextlib.nullcontext():
            # A full drive, say
            self._page.update(at_once=True)
        self._metrics.close()
        self._losses.close()
