"""Many trials, each in a process forked from this one, which has imported everything once."""

import contextlib
import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

import fuyou.optimizer.process.main
import fuyou.optimizer.process.start


class _Forked:
    """Stands in for the ``subprocess.Popen`` of the optimizer process: a fork imports nothing."""

    def __init__(self, args: Sequence[str], *, pass_fds: Sequence[int], **_: Any):
        self.args = args
        self._status: int | None = None
        self.pid = os.fork()
        if not self.pid:
            self._serve(pass_fds)

    def _serve(self, pass_fds: Sequence[int]) -> NoReturn:
        try:
            inherited = sorted({*pass_fds, 0, 1, 2})
            for low, high in zip(inherited, [*inherited[1:], 4096], strict=True):
                # Above all the other end of the pipe
                os.closerange(low + 1, high)
            fuyou.optimizer.process.main.main(pass_fds[0])
        finally:
            os._exit(0)

    def poll(self) -> int | None:
        """Return the exit status, or None."""
        return self._waited(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait as ``subprocess.Popen.wait`` does."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.002)
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        """End it."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _waited(self, flags: int) -> int | None:
        if self._status is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, flags)
                if pid:
                    self._status = os.waitstatus_to_exitcode(status)
        return self._status


@dataclass
class _Running:
    task: Any
    pid: int
    output: int
    deadline: float
    said: bytes = b""


def run_forked(
    tasks: Sequence[Any], work: Callable[[Any], dict[str, Any]], *, jobs: int, seconds: float
) -> Iterator[tuple[Any, dict[str, Any] | None, str]]:
    """Do ``work`` for every task in a separate process.

    Args:
        work: what it returns must be fit for JSON.
        jobs: processes at a time.
        seconds: that each may take.

    Yields:
        The task, its result or None, and where there is none, why: ``"hang"``, or how the process ended.
    """
    fuyou.optimizer.process.start.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    gc.freeze()  # pages stay shared
    waiting, running = list(tasks), dict[int, _Running]()
    with selectors.DefaultSelector() as selector:
        while waiting or running:
            while waiting and len(running) < jobs:
                task_process = _start(waiting.pop(0), work, seconds)
                running[task_process.output] = task_process
                selector.register(task_process.output, selectors.EVENT_READ)
            soonest = min(child.deadline for child in running.values())
            for key, _ in selector.select(max(0.0, soonest - time.monotonic())):
                task_process = running[key.fd]
                piece = os.read(key.fd, 1 << 16)
                task_process.said += piece
                if not piece:
                    task_process.deadline = -1.0
            for fd, task_process in list(running.items()):
                if task_process.deadline < time.monotonic():
                    selector.unregister(fd)
                    del running[fd]
                    yield task_process.task, *_end(task_process)


def _start(task: Any, work: Callable[[Any], dict[str, Any]], seconds: float) -> _Running:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Running(task, pid, reading, time.monotonic() + seconds)
    status = 1
    try:
        os.setsid()  # with all that it starts, it is a group that can be ended by its number
        os.close(reading)
        torch.set_num_threads(1)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        result = json.dumps(work(task)).encode()
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(result)
        status = 0
    finally:
        os._exit(status)


def _end(one: _Running) -> tuple[dict[str, Any] | None, str]:
    hung = one.deadline > 0
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)
    os.close(one.output)
    _, status = os.waitpid(one.pid, 0)
    if hung:
        return None, "hang"
    try:
        return json.loads(one.said), ""
    except ValueError:
        return None, f"its process ended with {os.waitstatus_to_exitcode(status)}"
