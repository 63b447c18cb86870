"""Gather and reduce inside one level of the cluster, in place, point to point.

Data is seen as *cells* ``[K, c]``, one for each of the K ranks of the level, of which the first ``filled[k]`` elements
of cell k mean something and the rest is padding. Every rank sends what theory says and no more, to its neighbour first,
and sums are made in fp32 in the order of ranks, so that they come out the same, bit for
bit, on every run, and as a single rank makes them that computes the same micro-batches one after the other.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def gather(cells: torch.Tensor, group: dist.ProcessGroup, filled: Sequence[int] | None = None) -> None:
    """Fill every cell of ``cells`` ``[K, c]`` from the rank it belongs to; this rank's own holds its data already.

    ``filled``: elements of each cell, on all ranks alike; None: all are full.
    """
    own = group.rank()
    parts = [cell[:count] for cell, count in zip(cells, filled or [cells.shape[1]] * group.size(), strict=True)]
    _exchange([parts[own]] * group.size(), parts, group)


def reduce_scatter(cells: torch.Tensor, group: dist.ProcessGroup, filled: Sequence[int], arriving_bytes: int) -> None:
    """This rank's cell becomes the sum of that cell over all ranks; the other cells keep what they hold.

    Summed in fp32 in the order of ranks, then rounded once to the dtype of ``cells``.

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


def _exchange(send: list[torch.Tensor], receive: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """``send[k]`` goes to rank k, and ``receive[k]`` comes from it; nothing is sent to ourselves, nor what is empty.

    Returns when all has arrived (gloo), or when the current stream is in order (NCCL).
    """
    own, size = group.rank(), group.size()
    operations = []
    for step in range(1, size):  # everyone starts with its neighbour, so that not all send to rank 0 first
        to, source = (own + step) % size, (own - step) % size
        if send[to].numel():
            operations.append(dist.P2POp(dist.isend, send[to], group=group, group_peer=to))
        if receive[source].numel():
            operations.append(dist.P2POp(dist.irecv, receive[source], group=group, group_peer=source))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
