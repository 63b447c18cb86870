"""An optimizer process that is forked from the test's own: up at once, where a new one imports PyTorch for seconds."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch

from fuyou.optimizer.process import client, main


class ForkedProcess:
    """As much of :class:`subprocess.Popen` as the engine's link uses."""

    def __init__(self, command: Sequence[str], **_: object):
        self._status: int | None = None
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                main.main(int(command[-1]))
                status = 0
            finally:
                os._exit(status)

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 60) -> int:
        deadline = time.monotonic() + timeout
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout)
            else:
                time.sleep(0.001)
        return self._status


@pytest.fixture
def forked_optimizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fork the optimizer process. Only with a single thread: OpenMP's others would not exist in it."""
    forking = SimpleNamespace(Popen=ForkedProcess, DEVNULL=None, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(client, "subprocess", forking)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
