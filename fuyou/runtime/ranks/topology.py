"""What the engine needs to know of a cluster. ``fcdp.Topology`` has it."""

from typing import Protocol

import torch.distributed as dist

from fuyou.layout.share import Share


class Groups(Protocol):
    """One process group for each level; None for a level of one rank, where there is nothing to send."""

    @property
    def intra_node(self) -> dist.ProcessGroup | None:
        """The ranks of this node."""
        ...

    @property
    def inter_node(self) -> dist.ProcessGroup | None:
        """The ranks with this rank's place in the other nodes."""
        ...


class ClusterTopology(Protocol):
    """A cluster of ``nodes`` machines with ``ranks_per_node`` ranks each, numbered node by node, as a rank sees it."""

    nodes: int
    ranks_per_node: int
    node: int
    local_rank: int

    @property
    def gather_groups(self) -> Groups:
        """Process groups for gathering parameters."""
        ...

    @property
    def reduce_groups(self) -> Groups:
        """Process groups for reducing gradients, which may be under way while parameters are gathered."""
        ...


def share_of(topology: ClusterTopology | None) -> Share:
    """Return which part of every record is this rank's; the whole of it without a topology."""
    if topology is None:
        return Share()
    return Share(topology.nodes, topology.ranks_per_node, topology.node, topology.local_rank)
