"""All-gather and reduce-scatter inside one process group, in place, point to point.

Data is seen as *cells* ``[K, c]``, one for each of the K ranks of a process group, of which the first ``filled[k]``
elements of cell k mean something and the rest is padding. Every rank sends what theory says and no more, to its
neighbour first. Sums are made in fp32 in the order of ranks, so that they come out the same, bit for bit, on every run,
and as a single rank makes them that computes the same micro-batches one after the other.

:mod:`fcdp.comms.rank_level` has collectives of its own on the same messages: those read strided rows, write elsewhere,
sum in the dtype of the data and are waited for later.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from common.communication.point_to_point import start_exchange, turns
from fuyou.runtime.ranks.topology import ClusterTopology


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
    own = group.rank()
    parts = [cell[:count] for cell, count in zip(cells, filled or [cells.shape[1]] * group.size(), strict=True)]
    _exchange([parts[own]] * group.size(), parts, group)


def reduce_scatter(cells: torch.Tensor, group: dist.ProcessGroup, filled: Sequence[int], arriving_bytes: int) -> None:
    """Sum this rank's cell over all ranks, in place; the other cells keep what they hold.

    The sum is taken in fp32 in the order of ranks, then rounded once to the dtype of ``cells``.

    Args:
        cells: ``[K, c]``.
        filled: elements of each cell, on all ranks alike.
        arriving_bytes: memory to take for what arrives and for sums: longer cells are summed piece by piece.
    """
    own, size = group.rank(), group.size()
    # K - 1 cells that arrive, and two fp32 values for every element: the sum, and the next term of it.
    piece = max(1, arriving_bytes // ((size - 1) * cells.element_size() + 8))
    for start in range(0, max(filled), piece):
        parts = [cell[start : min(start + piece, count)] for cell, count in zip(cells, filled, strict=True)]
        arrived = torch.empty((size - 1, parts[own].numel()), dtype=cells.dtype, device=cells.device)
        terms = list(arrived)
        terms.insert(own, parts[own])
        _exchange(parts, terms, group)
        total = terms[0].float()
        for term in terms[1:]:
            total += term
        parts[own].copy_(total)


def _exchange(send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Send ``send[k]`` to rank k and receive ``receive[k]`` from it, for all ranks but this one, and wait."""
    order = turns(group.rank(), group.size())
    start_exchange([(to, send[to]) for to, _ in order], [(source, receive[source]) for _, source in order], group)()
