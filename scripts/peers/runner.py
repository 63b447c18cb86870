"""The benchmark's side of a contender: start it, have it step, watch what it takes, end it in any case."""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from memory_meter import PeakMeter

from common.units import format_bytes
from peers.contender import MARK, Task

SCRIPTS = Path(__file__).parents[1]
LEAST_AVAILABLE_BYTES = 400 << 20
"""A contender that leaves the machine less than this is ended: better than leaving the choice to the kernel."""
LOOK_EVERY_S = 0.2
END_GRACE_S = 60.0


class ContenderFailedError(Exception):
    """A contender said no, died or was ended; the message says why, with its last words."""


@dataclass(frozen=True)
class Step:
    """One step of a contender."""

    seconds: float
    loss: float
    read_bytes: int  # What its processes read from drives between the step's beginning and its end
    written_bytes: int


class Contender:
    """A contender's process tree, in a separate session, so that Ctrl-C reaches the benchmark only.

    Args:
        python: interpreter that runs it.
        module: ``peers.in_memory``, for instance.
        environment: added to ours.
        prefix: command to run it under.
        watch: measure its memory; takes up to 3% of one core.

    Raises:
        ContenderFailedError: it did not come up.
    """

    def __init__(
        self, python: Path, module: str, task: Task, environment: Mapping[str, str], *, prefix: Sequence[str] = (),
        timeout_s: float = 900.0, watch: bool = True,
    ):  # fmt: skip
        self._timeout = timeout_s
        self._processes: list[psutil.Process] = []
        self._looked = 0.0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._task = tempfile.NamedTemporaryFile("w", suffix=".json")  # noqa: SIM115
        json.dump(asdict(task), self._task)
        self._task.flush()
        self._lines = b""
        self._process = subprocess.Popen(
            [*prefix, str(python), "-m", module, self._task.name],
            env={**os.environ, "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}", **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        self._meter = PeakMeter(self._pids) if watch else None
        try:
            if self._meter:
                self._meter.start()
            began = time.monotonic()
            # What it said when it was ready: ``parameters`` and the contender's facts
            self.facts = self._hear("ready")
            self.startup_s = time.monotonic() - began  # Seconds from its start until it was ready
        except BaseException:
            self.close()
            raise

    def limit_to(self, deadline: float) -> None:
        """From now on, wait until ``deadline`` (monotonic clock) at most."""
        self._timeout = max(1.0, deadline - time.monotonic())

    def step(self) -> Step:
        """Have it take one training step."""
        before = self.io_bytes()
        self._say("step")
        heard = self._hear("step")
        after = self.io_bytes()
        return Step(heard["seconds"], heard["loss"], after[0] - before[0], after[1] - before[1])

    @property
    def peak_bytes(self) -> int:
        """Most memory its processes held together since they were started: proportional set size."""
        return self._meter.peak_bytes if self._meter else 0

    def io_bytes(self) -> tuple[int, int]:
        """Bytes its living processes have read from and written to drives."""
        read = written = 0
        for process in self._tree(fresh=True):
            with contextlib.suppress(OSError):
                table = dict(
                    line.split(": ") for line in Path(f"/proc/{process.pid}/io").read_text().splitlines()
                )
                read, written = read + int(table["read_bytes"]), written + int(table["write_bytes"])
        return read, written

    def close(self) -> None:
        """End it, in peace if it listens; returns when all its processes are gone. May be called twice."""
        if self._meter:
            self._meter.stop()
        with contextlib.suppress(OSError, ContenderFailedError):
            if self._process.poll() is None and getattr(self, "facts", None):
                self._say("end")
                self._process.wait(END_GRACE_S)
        self.kill()
        for file in (self._process.stdin, self._process.stdout, self._log, self._task):
            with contextlib.suppress(OSError):
                file.close()  # type: ignore[union-attr]

    def kill(self) -> None:
        """End it at once."""
        left = self._tree(fresh=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        psutil.wait_procs(left, timeout=10)

    def last_words(self, lines: int = 4) -> str:
        """The end of what it wrote on stderr, without blank lines."""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").splitlines()
        return " | ".join([line.strip() for line in text if line.strip()][-lines:])[-600:]

    def __enter__(self) -> "Contender":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.kill()
        self.close()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure() from error

    def _hear(self, event: str) -> dict[str, Any]:
        """The next line behind the marker, which must be ``event``."""
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + self._timeout
        while True:
            while b"\n" in self._lines:
                line, self._lines = self._lines.split(b"\n", 1)
                if line.startswith(MARK.encode()):
                    content: dict[str, Any] = json.loads(line[len(MARK) :])
                    if content["event"] == event:
                        return content
            if select.select([pipe], [], [], LOOK_EVERY_S)[0]:
                news = os.read(pipe, 1 << 16)
                if not news:
                    raise self._failure()
                self._lines += news
            available = psutil.virtual_memory().available
            if available < LEAST_AVAILABLE_BYTES:
                self.kill()
                raise ContenderFailedError(
                    f"ended by the benchmark: {format_bytes(available)} of memory were left"
                )
            if time.monotonic() > deadline:
                words = self.last_words()
                self.kill()
                raise ContenderFailedError(f"time limit: no {event} within {self._timeout:.0f} s ({words})")

    def _failure(self) -> ContenderFailedError:
        try:
            status = self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.returncode
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return ContenderFailedError(f"{how}: {self.last_words()}")

    def _tree(self, fresh: bool = False) -> list[psutil.Process]:
        """It and its descendants; read again once a second, because the look is not free."""
        if fresh or time.monotonic() > self._looked + 1.0:
            try:
                top = psutil.Process(self._process.pid)
                self._processes = [top, *top.children(recursive=True)]
            except psutil.Error:
                self._processes = [process for process in self._processes if process.is_running()]
            self._looked = time.monotonic()
        return self._processes

    def _pids(self) -> list[int]:
        return [process.pid for process in self._tree()]
