"""The cluster as a rank sees it: its node, its place in the node, and the process groups of strategies.

Ranks are numbered node by node, as torchrun and Slurm's block distribution do: rank = node * ranks_per_node +
local_rank. Levels inside a node, such as pairs of GPUs, are also numbered one after the other."""

import atexit
import itertools
import os
import socket
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.communication import all_gather_object, timeout_of
from common.errors import FinetuneError, UserError
from common.hardware.machine import nvlink_peers
from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import Axis

Purpose = Literal["gather", "reduce"]


class LevelGroups(NamedTuple):
    """One process group for each level. A level of one rank has none: nothing is ever sent there."""

    intra_node: dist.ProcessGroup | None  # the ranks of this node
    inter_node: dist.ProcessGroup | None  # the ranks with this rank's place in the other nodes


class Topology:
    """The cluster as one rank sees it. Collective: every rank that takes part makes one with the same numbers.

    Gathers and reductions have separate process groups, as an NCCL communicator does one thing at a time.

    Args:
        ranks_per_node: processes on each machine; the same number everywhere.
        device: this rank's compute device, which becomes CUDA's current one. None: the mesh's; without a mesh
            ``cuda:<local rank>`` where there is CUDA (the only one where each rank sees one GPU), else the CPU.
        levels: levels inside the nodes: ``Levels((2, 4, 16))`` is 16 nodes of four pairs.
        mesh: one-dimensional mesh of the ranks that take part, node by node; None: all ranks of the process group.
    """

    def __init__(
        self,
        nodes: int,
        ranks_per_node: int,
        *,
        device: torch.device | str | None = None,
        levels: Levels | None = None,
        mesh: DeviceMesh | None = None,
    ):
        _need_process_group()
        group = None if mesh is None else mesh.get_group()
        world = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self.device = _choose_device(device, mesh, rank % max(ranks_per_node, 1))
        self.levels = levels or Levels((ranks_per_node, nodes))
        _agree((nodes, ranks_per_node, *self.levels.sizes, self.levels.nodes_per_switch or 0), group)
        if (self.levels.nodes, self.levels.ranks_per_node) != (nodes, ranks_per_node):
            raise UserError(
                f"The levels {levels} are {self.levels.nodes} nodes with {self.levels.ranks_per_node} ranks each, but "
                f"there are {nodes} with {ranks_per_node}."
            )
        if nodes < 1 or nodes * ranks_per_node != world:
            raise UserError(
                f"{nodes} nodes with {ranks_per_node} ranks each are {nodes * ranks_per_node} ranks, "
                f"but {'torch.distributed' if mesh is None else 'the mesh'} runs {world}."
            )
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self.world_size = world  # number of ranks that take part
        self.rank = rank  # this rank's place among those that take part
        self.node, self.local_rank = divmod(rank, ranks_per_node)
        # The ranks that take part, in one dimension: what FSDP2 shards over.
        self.mesh: DeviceMesh = mesh or init_device_mesh(
            self.device.type, (world,), mesh_dim_names=("world",)
        )
        self.ranks: list[int] = dist.get_process_group_ranks(group)  # global ranks, by place
        self._axes = Axis(1, ranks_per_node), Axis(ranks_per_node, nodes)
        self._groups: dict[tuple[Axis, Purpose], dist.ProcessGroup] | None = {}
        self._meshes: dict[int, DeviceMesh] = {world: self.mesh}
        _open.add(self)

    @classmethod
    def from_environment(
        cls,
        *,
        device: torch.device | str | None = None,
        levels: Levels | None = None,
        nodes_per_switch: int | None = None,
    ) -> "Topology":
        """Return the topology that torchrun's variables describe: LOCAL_WORLD_SIZE ranks in each node.

        Without ``levels``, those inside the nodes are found by NVLink; see :func:`linked_gpus`. ``nodes_per_switch``
        consecutive nodes are under one leaf switch, for the scope ``switch``."""
        _need_process_group()
        if "LOCAL_WORLD_SIZE" not in os.environ:
            raise UserError(
                "LOCAL_WORLD_SIZE is not set, so it is unknown which ranks share a node. Start the processes with "
                "torchrun, or give the numbers: Topology(nodes=..., ranks_per_node=...)."
            )
        local_world = int(os.environ["LOCAL_WORLD_SIZE"])
        # First: NCCL exchanges on that device
        chosen = _choose_device(device, None, dist.get_rank() % local_world)
        _agree((local_world,))
        nodes = dist.get_world_size() // local_world
        if levels is None and (device is None or chosen.type == "cuda"):
            sizes: set[int] = set(all_gather_object(linked_gpus(local_world)))
            if len(sizes) == 1 and (size := sizes.pop()) > 1:  # every node has the same groups
                levels = Levels((size, local_world // size, nodes))
        if nodes_per_switch is not None:
            levels = replace(levels or Levels((local_world, nodes)), nodes_per_switch=nodes_per_switch)
        return cls(nodes, local_world, device=chosen, levels=levels)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> "Topology":
        """Return the topology of the ranks that FSDP2 shards over with ``mesh``; other ranks need not take part.

        Nodes are told apart by torchrun's LOCAL_WORLD_SIZE, Slurm's SLURM_NODEID, or hosts' names. ``mesh`` has one
        dimension, or two, of which the second shards; it may be a part of a larger one."""
        _need_process_group()
        if mesh.ndim > 2:
            raise UserError(
                f"A data-parallel mesh has one dimension, or two for hybrid sharding, but this one is {mesh}. Take the "
                "part of it that parameters are sharded over: mesh['dp'], by its name."
            )
        if mesh.ndim == 2:
            if mesh.mesh_dim_names is None:
                raise UserError(
                    "A mesh of two dimensions needs names, as for fully_shard: mesh_dim_names=(..., ...)."
                )
            mesh = mesh[mesh.mesh_dim_names[1]]
        ranks = mesh.mesh.tolist()
        places = dist.get_process_group_ranks(mesh.get_group())
        if ranks != places:
            raise UserError(
                f"The mesh has the ranks {ranks} in this order, but its process group has them as {places}, as PyTorch "
                "sorts them: shards would be read in one order and sent in the other. Make the mesh of rising ranks."
            )
        _choose_device(None, mesh, 0)
        node = os.environ.get("SLURM_NODEID", socket.gethostname())
        if "LOCAL_WORLD_SIZE" in os.environ:
            node = str(dist.get_rank() // int(os.environ["LOCAL_WORLD_SIZE"]))
        nodes: list[str] = all_gather_object(f"node {node}", mesh.get_group())
        runs = [len(list(run)) for _, run in itertools.groupby(nodes)]
        if len(runs) != len(set(nodes)) or len(set(runs)) > 1:
            raise UserError(
                f"The mesh's ranks must lie node by node, the same number on each, because ranks exchange data with "
                f"the one in the same place of every other node. They lie on {', '.join(nodes)}. Make the mesh so that "
                "the dimension that parameters are sharded over has whole nodes, or a part of each, in a row."
            )
        return cls(len(runs), runs[0], mesh=mesh)

    def group(self, axis: Axis, purpose: Purpose) -> dist.ProcessGroup:
        """Return this rank's process group on ``axis``. Collective on the axis when requested the first time."""
        if self._groups is None:
            raise FinetuneError(
                "This Topology was closed: what was sharded with it can no longer communicate."
            )
        line = self._groups.get((axis, purpose))
        if line is None:
            # Every rank makes the group of its line only: ranks that do not take part know nothing of it.
            line = dist.new_group(
                [self.ranks[index] for index in axis.line(self.rank)],
                timeout=timeout_of(self.mesh.get_group(), self.device),
                use_local_synchronization=True,
                group_desc=f"fcdp_{purpose}_{axis.size}_ranks_{axis.stride}_apart",
            )
            assert line is not None
            self._groups[axis, purpose] = line
        return line

    @property
    def gather_groups(self) -> LevelGroups:
        """Process groups for gathering parameters, by level. Collective at the first use."""
        return LevelGroups(*(self.group(axis, "gather") if axis.size > 1 else None for axis in self._axes))

    @property
    def reduce_groups(self) -> LevelGroups:
        """Process groups for reducing gradients, by level. Collective at the first use."""
        return LevelGroups(*(self.group(axis, "reduce") if axis.size > 1 else None for axis in self._axes))

    def shard_mesh(self, shards: int) -> DeviceMesh:
        """Return the block of ``shards`` consecutive ranks that this one is in, which FSDP2 shards over. Collective."""
        if shards not in self._meshes:
            if self.ranks != list(range(dist.get_world_size())):
                raise UserError(
                    f"A strategy that shards optimizer states over {shards} of {self.world_size} ranks makes meshes of "
                    "its own, which only works where all ranks of the process group train. Give fully_shard a mesh of "
                    "two dimensions instead: FSDP2 then replicates over the first."
                )
            whole = init_device_mesh(
                self.device.type, (self.world_size // shards, shards), mesh_dim_names=("replicate", "shard")
            )
            for group in whole.get_all_groups():  # which do not inherit it
                if (timeout := timeout_of(self.mesh.get_group(), self.device)) is not None:
                    dist.distributed_c10d._set_pg_timeout(timeout, group)
            self._meshes[shards] = whole["shard"]
        return self._meshes[shards]

    def close(self) -> None:
        """Release the process groups, before destroy_process_group(): those left may abort the interpreter.
        Idempotent."""
        self._groups = None


def _need_process_group() -> None:
    if not dist.is_initialized():
        raise UserError(
            "A Topology needs torch.distributed: call torch.distributed.init_process_group() before."
        )


def _choose_device(
    device: torch.device | str | None, mesh: DeviceMesh | None, local_rank: int
) -> torch.device:
    """Return this rank's device, CUDA's current one from now on: objects, too, travel through it with NCCL."""
    if device is None and mesh is not None:
        cuda = mesh.device_type == "cuda"
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device(mesh.device_type)
    if device is None:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    device = torch.device(device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def _agree(numbers: tuple[int, ...], group: dist.ProcessGroup | None = None) -> None:
    """Refuse, on every rank, numbers that are not the same on every rank."""
    everywhere = all_gather_object(numbers, group)
    if any(numbers_there != everywhere[0] for numbers_there in everywhere):
        described = ", ".join(
            f"rank {rank}: {'x'.join(map(str, each))}" for rank, each in enumerate(everywhere)
        )
        raise UserError(
            "Every node needs the same number of ranks, because ranks exchange data with the one in the same place of "
            f"every other node. What the ranks were started with differs ({described}). "
            "Start the same number of processes on every node."
        )


def linked_gpus(count: int) -> int:
    """Return how many of the first ``count`` GPUs form a group in a node; 1: no groups, one for all, or unequal
    ones."""
    peers = nvlink_peers()
    if len(peers) < count:
        return 1
    return group_size([{peer for peer in linked if peer < count} for linked in peers[:count]])


def group_size(peers: Sequence[set[int]]) -> int:
    """Return the size of equal groups of consecutive GPUs, each linked to (``peers``) its whole group and nothing else;
    else 1, also if all are linked to all."""
    count = len(peers)
    size = len(peers[0]) + 1 if peers else 1
    if size == count or count % size:
        return 1
    for index, linked in enumerate(peers):
        first = index - index % size
        if linked != set(range(first, first + size)) - {index}:
            return 1
    return size


_open: "weakref.WeakSet[Topology]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for topology in list(_open):
        topology.close()
