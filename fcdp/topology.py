"""Where this rank stands: its node, its place in the node, and the process groups of the two levels.

A cluster is ``nodes`` machines with ``ranks_per_node`` processes each, numbered node by node as torchrun and Slurm's
block distribution do: rank = node * ranks_per_node + local_rank. Two-level collectives move data first between ranks
with the same place in their nodes (*across*) and then between the ranks of one node (*inside*), or the other way round.
"""

import atexit
import os
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.errors import FinetuneError, UserError


@dataclass(frozen=True)
class LevelGroups:
    """One process group for each level. A level of one rank has none: nothing is ever sent there."""

    inside: dist.ProcessGroup | None
    """The ranks of this node."""
    across: dist.ProcessGroup | None
    """The ranks with this rank's place in the other nodes."""


class Topology:
    """The cluster as one rank sees it. Making one is collective: every rank does, with the same numbers.

    Gathers and reductions have process groups of their own, so that on NCCL, where a communicator does one thing at a
    time, the gather of the next block and the reduction of the last one proceed together.

    Args:
        nodes: how many machines.
        ranks_per_node: processes on each of them; the same number everywhere.
        device: this rank's compute device. None: ``cuda:<local rank>`` where there is CUDA, else the CPU.

    Raises:
        UserError: the process group is not initialised, the numbers do not multiply to its size, or ranks disagree.
    """

    def __init__(self, nodes: int, ranks_per_node: int, *, device: torch.device | str | None = None):
        if not dist.is_initialized():
            raise UserError("A Topology needs torch.distributed: call torch.distributed.init_process_group() before.")
        world, rank = dist.get_world_size(), dist.get_rank()
        _agree((nodes, ranks_per_node))
        if nodes < 1 or nodes * ranks_per_node != world:
            raise UserError(
                f"{nodes} nodes with {ranks_per_node} ranks each are {nodes * ranks_per_node} ranks, "
                f"but torch.distributed runs {world}."
            )
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self.world_size = world
        self.rank = rank
        self.node, self.local_rank = divmod(rank, ranks_per_node)
        if device is None:
            device = torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        self.device = torch.device(device)
        #: All ranks in one dimension: what FSDP2 shards over.
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (world,), mesh_dim_names=("world",))
        self._gather: LevelGroups | None = self._make_groups("gather")
        self._reduce: LevelGroups | None = self._make_groups("reduce")
        _open.add(self)

    @classmethod
    def from_environment(cls, *, device: torch.device | str | None = None) -> "Topology":
        """The topology that torchrun's variables describe: LOCAL_WORLD_SIZE ranks in each node.

        Raises:
            UserError: LOCAL_WORLD_SIZE is missing, or nodes have different numbers of ranks.
        """
        if not dist.is_initialized():
            raise UserError("A Topology needs torch.distributed: call torch.distributed.init_process_group() before.")
        if "LOCAL_WORLD_SIZE" not in os.environ:
            raise UserError(
                "LOCAL_WORLD_SIZE is not set, so it is unknown which ranks share a node. Start the processes with "
                "torchrun, or give the numbers: Topology(nodes=..., ranks_per_node=...)."
            )
        local_world = int(os.environ["LOCAL_WORLD_SIZE"])
        _agree((local_world,))
        return cls(dist.get_world_size() // local_world, local_world, device=device)

    @property
    def gather_groups(self) -> LevelGroups:
        """For gathering parameters."""
        return self._opened(self._gather)

    @property
    def reduce_groups(self) -> LevelGroups:
        """For reducing gradients."""
        return self._opened(self._reduce)

    def hybrid_mesh(self) -> DeviceMesh:
        """Nodes by ranks in a node: replicate over the first dimension, shard over the second. Collective."""
        return init_device_mesh(
            self.device.type, (self.nodes, self.ranks_per_node), mesh_dim_names=("replicate", "shard")
        )

    def close(self) -> None:
        """Let go of the process groups, so that destroy_process_group() can end them. Idempotent.

        A group that outlives ``destroy_process_group`` may abort the interpreter at its end. Topologies that are still
        open then are closed first.
        """
        self._gather = self._reduce = None

    def _opened(self, groups: LevelGroups | None) -> LevelGroups:
        if groups is None:
            raise FinetuneError("This Topology has been closed: what was sharded with it can no longer communicate.")
        return groups

    def _make_groups(self, purpose: str) -> LevelGroups:
        """This rank's two groups. Every rank takes part in making every group, in the same order."""
        inside = across = None
        ranks = torch.arange(self.world_size).view(self.nodes, self.ranks_per_node)
        if self.ranks_per_node > 1:
            for node in range(self.nodes):
                group = dist.new_group(ranks[node].tolist(), group_desc=f"fcdp_{purpose}_inside_node_{node}")
                inside = group if node == self.node else inside
        if self.nodes > 1:
            for place in range(self.ranks_per_node):
                group = dist.new_group(ranks[:, place].tolist(), group_desc=f"fcdp_{purpose}_across_nodes_{place}")
                across = group if place == self.local_rank else across
        return LevelGroups(inside, across)


def _agree(numbers: tuple[int, ...]) -> None:
    """Refuse, on every rank, numbers that are not the same on every rank."""
    everywhere: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everywhere, numbers)
    if len(set(everywhere)) > 1:
        described = ", ".join(f"rank {rank}: {'x'.join(map(str, told))}" for rank, told in enumerate(everywhere))
        raise UserError(
            "Every node needs the same number of ranks, because ranks exchange data with the one in the same place of "
            f"every other node. What the ranks were started with differs ({described}). "
            "Start the same number of processes on every node."
        )


_open: "weakref.WeakSet[Topology]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for topology in list(_open):
        topology.close()
