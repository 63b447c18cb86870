"""Benchmarks on an emulated cluster: ranks that report results, and have the rate of the links changed under them.

A script starts itself on every node: `lead` in the parent, :func:`report` and :func:`set_rate` in the ranks. Rank 0
talks to the parent through its standard streams.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any

import torch.distributed as dist
from netcluster import Cluster, rank_environments

from common.errors import FinetuneError

_REPORT = "REPORT "
_SET_RATE = "SET_RATE "


def lead(cluster: Cluster, ranks: int, script: str, arguments: Sequence[str]) -> Iterator[Any]:
    """Start ``script`` as ``ranks`` ranks on each node, and yield what it reports.

    Raises:
        FinetuneError: a rank failed.
    """
    leader: subprocess.Popen[str] | None = None
    for node, environment in rank_environments(cluster, ranks):
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if leader is None else {}
        threads = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        process = cluster.start(node, [sys.executable, script, *arguments], environment | threads, **pipes)
        leader = leader or process
    assert leader is not None and leader.stdout is not None and leader.stdin is not None
    answers: IO[str] = leader.stdin
    for line in leader.stdout:
        if line.startswith(_SET_RATE):
            cluster.set_rate(line.removeprefix(_SET_RATE).strip())
            answers.write("done\n")
            answers.flush()
        elif line.startswith(_REPORT):
            yield json.loads(line.removeprefix(_REPORT))
    if cluster.wait():
        raise FinetuneError("A rank failed; what it said is above.")


def report(result: Any) -> None:
    """Tell the parent, on rank 0."""
    if dist.get_rank() == 0:
        print(_REPORT + json.dumps(result), flush=True)


def set_rate(rate: str) -> None:
    """From now on links have this rate. Collective."""
    if dist.get_rank() == 0:
        print(_SET_RATE + rate, flush=True)
        sys.stdin.readline()
    dist.barrier()
