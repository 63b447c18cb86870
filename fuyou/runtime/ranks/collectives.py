"""Process groups of a cluster, and all-gather and reduce-scatter within one, in place, point to point.

Data is seen as *cells* ``[K, c]``, one for each of the K ranks of a process group, of which the first ``filled[k]``
elements of cell k mean something and the rest is padding. Every rank sends what theory says and no more, to its
neighbour first. Sums are made in fp32 in the order of ranks, so that they come out the same, bit for bit, on every run,
and as a single rank makes them that computes the same micro-batches one after the other.

:mod:`fcdp.comms.rank_level` has other collectives on the same messages: those read strided rows, write elsewhere,
sum in the dtype of the data and are waited for later.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from common.communication import start_exchange, turns
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
        """Process groups for reducing gradients, which may run while parameters are gathered."""
        ...


def share_of(topology: ClusterTopology | None) -> Share:
    """Return which part of every record is this rank's; the whole of it without a topology."""
    if topology is None:
        return Share()
    return Share(topology.nodes, topology.ranks_per_node, topology.node, topology.local_rank)


def connect(topology: ClusterTopology, device: torch.device) -> None:
    """Exchange one number on every communicator, on all ranks in one order. Collective.

    NCCL makes a communicator when it is first used, and takes device memory for it: before anybody measures how much
    is free, and not while several threads launch.
    """
    for groups in (topology.gather_groups, topology.reduce_groups):
        for group in (groups.intra_node, groups.inter_node):
            if group is not None:
                gather(torch.zeros((group.size(), 1), device=device), group)


def gather(cells: torch.Tensor, group: dist.ProcessGroup, filled: Sequence[int] | None = None) -> None:
    """Fill every cell of ``cells`` ``[K, c]`` from the rank it belongs to; this rank's own holds its data already.

    Args:
        filled: elements of each cell, on all ranks alike; None: all are full.
    """
    rank = group.rank()
    parts = [cell[:count] for cell, count in zip(cells, filled or [cells.shape[1]] * group.size(), strict=True)]
    _exchange([parts[rank]] * group.size(), parts, group)


def reduce_scatter(cells: torch.Tensor, group: dist.ProcessGroup, filled: Sequence[int], arriving_bytes: int) -> None:
    """Sum this rank's cell over all ranks, in place; the other cells keep what they hold.

    The sum is taken in fp32 in the order of ranks, then rounded once to the dtype of ``cells``.

    Args:
        cells: ``[K, c]``.
        filled: elements of each cell, on all ranks alike.
        arriving_bytes: memory to take for what arrives and for sums: longer cells are summed piece by piece.
    """
    rank, size = group.rank(), group.size()
    # K - 1 cells that arrive, and two fp32 values for every element: the sum, and the next term of it.
    piece = max(1, arriving_bytes // ((size - 1) * cells.element_size() + 8))
    for start in range(0, max(filled), piece):
        parts = [cell[start : min(start + piece, count)] for cell, count in zip(cells, filled, strict=True)]
        arrived = torch.empty((size - 1, parts[rank].numel()), dtype=cells.dtype, device=cells.device)
        terms = list(arrived)
        terms.insert(rank, parts[rank])
        _exchange(parts, terms, group)
        total = terms[0].float()
        for term in terms[1:]:
            total += term
        parts[rank].copy_(total)


def _exchange(send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Send ``send[k]`` to rank k and receive ``receive[k]`` from it, for all ranks but this one, and wait."""
    order = turns(group.rank(), group.size())
    start_exchange([(to, send[to]) for to, _ in order], [(source, receive[source]) for _, source in order], group)()
