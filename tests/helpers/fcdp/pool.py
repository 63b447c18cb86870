"""Processes, started once, that run one case after another as the ranks of small clusters on loopback.

Python and the libraries are imported once, in a server from which the ranks are forked.
"""

import faulthandler
import gc
import math
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.helpers import bits
from tests.helpers.processes import forked

DEADLINE_S = 240


class RankError(AssertionError):
    """A rank raised; the message holds every rank's traceback."""


class Pool:
    """``pool.run((nodes, ranks_per_node), function, *args)`` returns what each rank's call returned.

    With three numbers, nodes have levels inside: nodes, pairs in each, ranks in each pair.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.helpers.fcdp.cases"])
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._layout: tuple[int, ...] | None = None
        self._port = 0

    def run(
        self, layout: tuple[int, ...], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(topology, *args, **kwargs)`` on every rank of a cluster of ``layout``."""
        world = math.prod(layout)
        while len(self._processes) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(len(self._processes), theirs, forked.address()), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        if layout != self._layout:
            # A new process group for everyone in it: a port tells it from the one before.
            self._layout = layout
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self._port = free.getsockname()[1]
        for pipe in self._pipes[:world]:
            pipe.send((layout, self._port, function, args, kwargs))
        answers = []
        for index, pipe in enumerate(self._pipes[:world]):
            if not pipe.poll(DEADLINE_S):
                self.close()
                raise RankError(f"rank {index} of {layout} has not answered in {DEADLINE_S} s")
            answers.append(pipe.recv())
        failed = [f"--- rank {rank}\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        if failed:
            self._layout = None
            raise RankError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        """End the ranks; those of the next call are new."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self._pipes, self._processes, self._layout = [], [], None


def _serve(index: int, pipe: Connection, server: str) -> None:
    """One rank: keeps its process group and topology as long as the layout stays the same.

    Args:
        server: what its optimizer processes are forked from.
    """
    import torch
    import torch.distributed as dist

    import fcdp
    from fcdp.strategy.mesh import Levels

    # What the libraries are made of is no garbage: looking through it takes longer than most cases
    gc.freeze()
    torch.set_num_threads(bits.threads())
    forked.use(server)
    forked.stand_in(setattr)
    topology: fcdp.Topology | None = None
    current: int | None = None
    while True:
        try:
            layout, port, function, args, kwargs = pipe.recv()
        except EOFError:
            break
        # Before the parent loses patience: where a rank that hangs is.
        faulthandler.dump_traceback_later(DEADLINE_S - 5)
        try:
            if port != current:
                _leave(topology)
                topology, current = None, None
                world = math.prod(layout)
                os.environ.update(RANK=str(index), WORLD_SIZE=str(world))
                dist.init_process_group(
                    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=index, world_size=world
                )
                nodes, *inside = layout
                topology = fcdp.Topology(nodes, math.prod(inside), levels=Levels((*reversed(inside), nodes)))
                current = port
            answer = (True, function(topology, *args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
            # What is still in progress belongs to a collective that is no more.
            _leave(topology)
            topology, current = None, None
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
    _leave(topology)


def _leave(topology: Any) -> None:
    import torch.distributed as dist

    gc.collect()  # a model of the case before holds groups, threads and descriptors as long as its cycles do
    if topology is not None:
        topology.close()
    if dist.is_initialized():
        dist.destroy_process_group()
