"""Two launchers on one machine, as two nodes."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.processes import forked

ROOT = Path(__file__).parents[3]
BEGIN = ("-m", "cli.main")
COMMON = (
    "--batch-size", "4", "--seq-len", "32", "--gpu", "cpu", "--lr", "1e-3", "--schedule", "constant", "--dtype", "fp32",
    "--max-grad-norm", "1",
)  # fmt: skip
UNMEASURED = ("--strategy", "fcdp")
"""Nothing is measured to choose a strategy: tests of other things begin sooner."""


OTHER_RUNS = {"--help", "--version", "--config", "--resume", "--data"}
OTHER_COMMANDS = {"recipe", "plan", "check", "profile", "verify", "export", "evaluate", "chat", "demo"}


def with_data(words: list[str]) -> list[str]:
    """Return a command line that trains on random tokens if it trains and names no data."""
    names = {word.partition("=")[0] for word in words}
    if names & OTHER_RUNS or {word.removeprefix("--") for word in words} & OTHER_COMMANDS:
        return words
    at = words.index("--model") + 2 if "--model" in words else 0
    return [*words[:at], "--data", "random", *words[at:]]


def same(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in got] == [line["step"] for line in wanted]
    for name in ("loss", "grad_norm", "lr"):
        assert [line[name] for line in got] == pytest.approx([line[name] for line in wanted], rel=2e-5), name


class Node:
    """A launcher in a separate process, with what it says; forked, unless its code is to be another than ours."""

    def __init__(
        self, name: str, folder: Path, *words: object, code: Path = ROOT, begin: tuple[str, ...] = BEGIN
    ):
        self.log = folder / f"{name}.log"
        start: Any = forked.Popen if code == ROOT else subprocess.Popen
        with self.log.open("w") as log:
            self.process = start(
                [sys.executable, *begin, *with_data([*map(str, words)])],
                cwd=code, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self.log.read_text()

    def ranks(self) -> dict[int, psutil.Process]:
        """By number in the whole run."""
        children = psutil.Process(self.process.pid).children()
        return {
            int(child.name().removeprefix("rank ")): child
            for child in children
            if child.name().startswith("rank")
        }

    def end(self) -> None:
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
        self.process.wait()


class Pair:
    """Two nodes that meet on loopback."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.nodes: list[Node] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        self.meet = ("--nodes", 2, "--rdzv-endpoint", self.endpoint)

    def start(self, *words: object, names: tuple[str, ...] = ("first", "second"), **how: Any) -> None:
        """``how``: the code that they run, and how it begins."""
        self.nodes += [Node(name, self._folder, *words, *self.meet, **how) for name in names]

    def wait_for(self, pattern: str, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not any(re.search(pattern, node.said, re.MULTILINE) for node in self.nodes):
            alive = any(node.process.poll() is None for node in self.nodes)
            assert alive and time.monotonic() < deadline, "\n----\n".join(node.said for node in self.nodes)
            time.sleep(0.02)

    def statuses(self, seconds: float) -> list[int]:
        """Of both, once they have ended within ``seconds``."""
        deadline = time.monotonic() + seconds
        return [node.process.wait(max(0.0, deadline - time.monotonic())) for node in self.nodes]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    nodes = Pair(tmp_path)
    yield nodes
    for node in nodes.nodes:
        node.end()
