"""The cluster as a rank sees it: its node, its place in the node, and the process groups of strategies.

A cluster is ``nodes`` machines with ``ranks_per_node`` processes each, numbered node by node as torchrun and Slurm's
block distribution do: rank = node * ranks_per_node + local_rank. Inside a node there may be further levels, pairs of
GPUs or dies that are connected better than the rest; they, too, are numbered one after the other.
"""

import atexit
import os
import weakref
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.communication.object_collectives import all_gather_object
from common.errors import FinetuneError, UserError
from fcdp.strategy.links import linked_gpus
from fcdp.strategy.mesh import Levels
from fcdp.strategy.routes import Axis

Purpose = Literal["gather", "reduce"]


@dataclass(frozen=True)
class LevelGroups:
    """One process group for each level. A level of one rank has none: nothing is ever sent there."""

    intra_node: dist.ProcessGroup | None
    """The ranks of this node."""
    inter_node: dist.ProcessGroup | None
    """The ranks with this rank's place in the other nodes."""


class Topology:
    """The cluster as one rank sees it. Making one is collective: every rank does, with the same numbers.

    Gathers and reductions have process groups of their own, so that on NCCL, where a communicator does one thing at a
    time, the gather of the next block and the reduction of the last one proceed together.

    Args:
        nodes: number of machines.
        ranks_per_node: processes on each of them; the same number everywhere.
        device: this rank's compute device. None: ``cuda:<local rank>`` where there is CUDA, else the CPU.
        levels: ranks by level where there are levels inside the nodes: ``Levels((2, 4, 16))`` is 16 nodes of four
            pairs.

    Raises:
        UserError: the process group is not initialised, the numbers do not multiply to its size, or ranks disagree.
    """

    def __init__(
        self,
        nodes: int,
        ranks_per_node: int,
        *,
        device: torch.device | str | None = None,
        levels: Levels | None = None,
    ):
        if not dist.is_initialized():
            raise UserError("A Topology needs torch.distributed: call torch.distributed.init_process_group() before.")
        world, rank = dist.get_world_size(), dist.get_rank()
        self.levels = levels or Levels((ranks_per_node, nodes))
        _agree((nodes, ranks_per_node, *self.levels.sizes))
        if (self.levels.nodes, self.levels.ranks_per_node) != (nodes, ranks_per_node):
            raise UserError(
                f"The levels {levels} are {self.levels.nodes} nodes with {self.levels.ranks_per_node} ranks each, but "
                f"there are {nodes} with {ranks_per_node}."
            )
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
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (world,), mesh_dim_names=("world",))
        """All ranks in one dimension: what FSDP2 shards over."""
        self._groups: dict[tuple[Axis, Purpose], dist.ProcessGroup] | None = {}
        self._meshes: dict[int, DeviceMesh] = {world: self.mesh}
        _open.add(self)

    @classmethod
    def from_environment(cls, *, device: torch.device | str | None = None, levels: Levels | None = None) -> "Topology":
        """Return the topology that torchrun's variables describe: LOCAL_WORLD_SIZE ranks in each node.

        Args:
            device: this rank's compute device; None: as :class:`Topology` chooses.
            levels: None: pairs (or larger groups) of GPUs inside the nodes that NVLink connects are found where there
                are any; see :mod:`fcdp.strategy.links`.

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
        nodes = dist.get_world_size() // local_world
        if levels is None and (device is None or torch.device(device).type == "cuda"):
            levels = _found_levels(nodes, local_world)
        return cls(nodes, local_world, device=device, levels=levels)

    def group(self, axis: Axis, purpose: Purpose) -> dist.ProcessGroup:
        """Return this rank's process group on ``axis``. Collective when an axis is asked for the first time.

        Raises:
            FinetuneError: the topology has been closed.
        """
        if self._groups is None:
            raise FinetuneError("This Topology has been closed: what was sharded with it can no longer communicate.")
        found = self._groups.get((axis, purpose))
        if found is None:
            for line in axis.lines(self.world_size):  # every rank takes part in making every group
                made = dist.new_group(line, group_desc=f"fcdp_{purpose}_{axis.size}_ranks_{axis.stride}_apart")
                found = made if self.rank in line else found
            assert found is not None
            self._groups[axis, purpose] = found
        return found

    @property
    def gather_groups(self) -> LevelGroups:
        """Process groups for gathering parameters, by level. Collective at the first use."""
        return self._level_groups("gather")

    @property
    def reduce_groups(self) -> LevelGroups:
        """Process groups for reducing gradients, by level. Collective at the first use."""
        return self._level_groups("reduce")

    def _level_groups(self, purpose: Purpose) -> LevelGroups:
        intra_node, inter_node = Axis(1, self.ranks_per_node), Axis(self.ranks_per_node, self.nodes)
        return LevelGroups(*(self.group(axis, purpose) if axis.size > 1 else None for axis in (intra_node, inter_node)))

    def shard_mesh(self, shards: int) -> DeviceMesh:
        """Return the block of ``shards`` consecutive ranks that this one is in, which FSDP2 shards over. Collective."""
        if shards not in self._meshes:
            whole = init_device_mesh(
                self.device.type, (self.world_size // shards, shards), mesh_dim_names=("replicate", "shard")
            )
            self._meshes[shards] = whole["shard"]
        return self._meshes[shards]

    def close(self) -> None:
        """Let go of the process groups, so that destroy_process_group() can end them. Idempotent.

        A group that outlives ``destroy_process_group`` may abort the interpreter at its end. Topologies that are still
        open then are closed first.
        """
        self._groups = None


def _agree(numbers: tuple[int, ...]) -> None:
    """Refuse, on every rank, numbers that are not the same on every rank."""
    everywhere = all_gather_object(numbers)
    if any(numbers_there != everywhere[0] for numbers_there in everywhere):
        described = ", ".join(f"rank {rank}: {'x'.join(map(str, each))}" for rank, each in enumerate(everywhere))
        raise UserError(
            "Every node needs the same number of ranks, because ranks exchange data with the one in the same place of "
            f"every other node. What the ranks were started with differs ({described}). "
            "Start the same number of processes on every node."
        )


def _found_levels(nodes: int, ranks_per_node: int) -> Levels | None:
    """Return the levels that every node finds in itself; None where a node has none, or nodes differ."""
    found: list[int] = all_gather_object(linked_gpus(ranks_per_node))
    if len(set(found)) > 1 or found[0] == 1:
        return None
    return Levels((found[0], ranks_per_node // found[0], nodes))


_open: "weakref.WeakSet[Topology]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for topology in list(_open):
        topology.close()
