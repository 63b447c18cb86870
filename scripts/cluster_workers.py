"""Benchmarks on an emulated cluster: ranks that report results, and have the rate of the links changed under them; what
they train, and what is kept of it.

A script starts itself on every node: `lead` in the parent, :func:`report` and :func:`set_rate` in the ranks. Rank 0
talks to the parent through its standard streams.
"""

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from netcluster import Cluster, rank_environments

from common.errors import FinetuneError

_REPORT = "REPORT "
_SET_RATE = "SET_RATE "


def lead(
    cluster: Cluster, ranks: int, script: str, arguments: Sequence[str],
    change_rate: Callable[[str], None] | None = None,
) -> Iterator[Any]:  # fmt: skip
    """Start ``script`` as ``ranks`` ranks on each node, and yield what it reports.

    Args:
        change_rate: does what ranks ask for with :func:`set_rate`; None: it is the rate of every link between nodes.

    Raises:
        FinetuneError: a rank failed.
    """
    leader: subprocess.Popen[str] | None = None
    for node, environment in rank_environments(cluster, ranks):
        pipes: dict[str, Any] = (
            {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if leader is None else {}
        )
        threads = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        process = cluster.start(node, [sys.executable, script, *arguments], environment | threads, **pipes)
        leader = leader or process
    assert leader is not None and leader.stdout is not None and leader.stdin is not None
    answers: IO[str] = leader.stdin
    for line in leader.stdout:
        if line.startswith(_SET_RATE):
            (change_rate or cluster.set_rate)(line.removeprefix(_SET_RATE).strip())
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
    """From now on links have this rate, as the ``change_rate`` of :func:`lead` understands it. Collective."""
    if dist.get_rank() == 0:
        print(_SET_RATE + rate, flush=True)
        sys.stdin.readline()
    dist.barrier()


def llama_config(hidden: int, layers: int, vocabulary: int) -> Any:
    """Of a small Llama whose sizes are in the proportions of large ones."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip


def make_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model to train, with the same first weights in every process."""
    import transformers

    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def write_record(out: str | None, results: Sequence[Any], **facts: Any) -> None:
    """Keep ``results`` (dataclasses) and where they come from in the JSON file ``out``; None: nowhere."""
    if out is not None:
        body = {
            **facts, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__,
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "results": [dataclasses.asdict(result) for result in results],
        }  # fmt: skip
        Path(out).write_text(json.dumps(body, indent=1), encoding="utf-8")
