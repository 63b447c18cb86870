"""Process groups of a cluster: all-gather and reduce-scatter in place, point to point, and small messages.

Data is seen as *cells* ``[K, c]``, one for each of the K ranks of a process group, of which the first ``filled[k]``
elements of cell k mean something and the rest is padding. Every rank sends what theory says and no more, to its
neighbour first. Sums are made in fp32 in the order of ranks, so that they come out the same, bit for bit, on every run,
and as a single rank makes them that computes the same micro-batches one after the other.

:mod:`fcdp.comms.rank_level` has other collectives on the same messages: those read strided rows, write elsewhere,
sum in the dtype of the data and are waited for later.
"""

import socket
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from common.communication import all_gather_object, start_exchange, timeout_of, turns
from fuyou.layout.share import Share


class Groups(Protocol):
    """One process group for each level; None for a level of one rank, where there is nothing to send.

    Attributes:
        intra_node: the ranks of this node.
        inter_node: the ranks with this rank's place in the other nodes.
    """

    @property
    def intra_node(self) -> dist.ProcessGroup | None: ...
    @property
    def inter_node(self) -> dist.ProcessGroup | None: ...


class ClusterTopology(Protocol):
    """A cluster of ``nodes`` machines with ``ranks_per_node`` ranks each, numbered node by node, as a rank sees it.

    Attributes:
        gather_groups: for gathering parameters.
        reduce_groups: for reducing gradients, which may run while parameters are gathered.
    """

    nodes: int
    ranks_per_node: int
    node: int
    local_rank: int

    @property
    def gather_groups(self) -> Groups: ...
    @property
    def reduce_groups(self) -> Groups: ...


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
    parts = [
        cell[:count] for cell, count in zip(cells, filled or [cells.shape[1]] * group.size(), strict=True)
    ]
    _exchange([parts[rank]] * group.size(), parts, group)


def reduce_scatter(
    cells: torch.Tensor, group: dist.ProcessGroup, filled: Sequence[int], arriving_bytes: int
) -> None:
    """Sum this rank's cell over all ranks, in place; the other cells keep what they hold.

    The sum is taken in fp32 in the order of ranks, then rounded once to the dtype of ``cells``.

    Args:
        cells: ``[K, c]``.
        filled: elements of each cell, on all ranks alike.
        arriving_bytes: memory to take for what arrives and for sums: longer cells are summed piece by piece.
    """
    rank = group.rank()
    size = group.size()
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


def _exchange(
    send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Send ``send[k]`` to rank k and receive ``receive[k]`` from it, for all ranks but this one, and wait."""
    order = turns(group.rank(), group.size())
    start_exchange(
        [(to, send[to]) for to, _ in order], [(source, receive[source]) for _, source in order], group
    )()


class Agreement:
    """Process groups of gloo for small messages between all ranks. Making one is collective, and so is every call.

    The thread of commits has a separate group: its messages must not mix with those of the caller's thread. A rank
    that is alone agrees with itself, and needs no groups.
    """

    def __init__(self, share: Share):
        self.share = share
        self._group: dist.ProcessGroup | None = None
        self._commits: dist.ProcessGroup | None = None
        if not self.is_alone:
            timeout = timeout_of(dist.distributed_c10d._get_default_group(), torch.device("cpu"))
            self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc="fuyou_agreement")
            self._commits = dist.new_group(backend="gloo", timeout=timeout, group_desc="fuyou_commits")

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.share.world_size == 1

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, which is JSON, in the order of ranks."""
        return [value] if self.is_alone else all_gather_object(value, self._group)

    def all_gather_at_commit(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` as :meth:`all_gather_object` does, in the thread of commits."""
        return all_gather_object(value, self._commits)

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Send tensors to ranks and receive others, in the order in which the other end lists them."""
        if self._group is not None:
            start_exchange(sends, receives, self._group)()

    def close(self) -> None:
        """Let go of the groups, so that ``destroy_process_group`` can end them."""
        self._group = self._commits = None


def rank_name(share: Share, rank: int, host: str | None) -> str:
    node, local_rank = divmod(rank, share.ranks_per_node)
    known = [
        *([host] if host is not None else []),
        *([f"rank {local_rank} of it"] if share.ranks_per_node > 1 else []),
    ]
    return f"node {node} ({', '.join(known)})" if known else f"node {node}"


def host() -> str:
    return socket.gethostname()
