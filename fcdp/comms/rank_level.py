"""Gather and reduce-scatter along one axis of the cluster, directly from and into the places where data lies.

Data is seen as *rows* ``[R, K, c]``: K cells of c elements for the K ranks of the axis, R times. Rows may be strided,
cells are contiguous, so neither collective needs a copy to bring ranks next to each other in memory:

* NCCL: one collective per contiguous row, in place; for strided rows one for all, through separate memory.
* gloo: point-to-point on every cell. Its own reduce-scatter is an all-reduce, which sends twice the bytes.
* gloo with CUDA tensors: through host memory. For tests of stream order, not for speed."""

from typing import Any, Protocol

import torch
import torch.distributed as dist

from common.communication import Wait, start_exchange, turns
from fcdp.strategy.strategy import Axis
from fcdp.strategy.topology import Purpose, Topology
from fcdp.traffic import Traffic


def nothing() -> None:
    """Wait for a collective that is complete, or ordered on the current stream."""


class CommLevel(Protocol):
    """Ranks along an axis that gather and reduce among themselves: what collectives are put together from."""

    axis: Axis
    size: int
    index: int  # this rank's place on its line of the axis

    def gather(self, rows: torch.Tensor) -> Wait:
        """See :meth:`RankLevel.gather`."""

    def reduce_scatter(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """See :meth:`RankLevel.reduce_scatter`."""


class RankLevel:
    """The ranks on one line of ``axis``, in a process group that lives until ``topology`` is closed."""

    def __init__(self, topology: Topology, axis: Axis, purpose: Purpose, traffic: Traffic):
        self.axis = axis
        self.size = axis.size
        self.index = axis.index(topology.rank)
        self._turns = turns(self.index, self.size)
        self._topology = topology
        self._purpose: Purpose = purpose
        self._traffic = traffic
        self._crosses_nodes = axis.crosses_nodes(topology.ranks_per_node)
        topology.group(axis, purpose)  # made here, where all ranks are

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._topology.group(self.axis, self._purpose)

    def gather(self, rows: torch.Tensor) -> Wait:
        """Fill every cell of ``rows`` ``[R, K, c]`` from the rank it belongs to; this rank's cells hold its data.

        Return a function to call before reading. On NCCL the current stream is in order already."""
        if not rows.numel():
            return nothing
        self._count(rows)
        if uses_gloo(self._group, rows.device):
            sends = [(to, row[self.index]) for row in rows for to, _ in self._turns]
            return self._exchange(sends, [(source, row[source]) for row in rows for _, source in self._turns])
        if rows[0].is_contiguous():
            for row in rows:
                all_gather(row.view(-1), row[self.index], self._group)
        else:
            # One collective on separate memory, of the size of these rows, and a copy: messages cell by cell would
            # be as many times a message's latency.
            mine = rows[:, self.index].contiguous()
            gathered = mine.new_empty((self.size, *mine.shape))
            all_gather(gathered.view(-1), mine.view(-1), self._group)
            rows.copy_(gathered.transpose(0, 1))
        return nothing

    def reduce_scatter(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """Set ``output`` ``[R, c]`` to the sum over ranks of their ``rows[:, <this rank>]``, added in rank order."""
        self._count(rows)
        if not rows.numel():
            return
        if not uses_gloo(self._group, rows.device):
            for row, result in zip(rows, output, strict=True):
                _reduce_scatter(result, row.contiguous().view(-1), self._group)
            return
        # Sent as they are, received by sender, then added in the order of ranks on every rank.
        received = rows.new_empty((rows.size(0), self.size - 1, rows.size(2)))
        self._all_to_all(rows, received)()
        terms = list(received.unbind(1))
        terms.insert(self.index, rows[:, self.index])
        torch.add(terms[0], terms[1], out=output)
        for term in terms[2:]:
            output.add_(term)

    def all_to_all(self, rows: torch.Tensor, received: torch.Tensor) -> Wait:
        """Send cell k of every row to rank k, and receive what the others have for this rank.

        ``received`` ``[R, K-1, c]`` is by sender, without this rank. Return a function to call before reading it; until
        then ``rows`` must stay."""
        if not rows.numel():
            return nothing
        nbytes = rows.numel() // self.size * rows.element_size()
        for to, _ in self._turns:
            rank = self._topology.rank + (to - self.index) * self.axis.stride
            self._traffic.sent(
                self._purpose, rank // self._topology.ranks_per_node != self._topology.node, nbytes
            )
        return self._all_to_all(rows, received)

    def shift(self, cell: torch.Tensor, to: int, target: torch.Tensor, source: int) -> Wait:
        """Make one step of a ring: send ``cell`` to rank ``to`` while rank ``source`` fills ``target``.

        Until the returned function is called ``cell`` must stay. On NCCL it orders the stream current then."""
        self._traffic.sent(self._purpose, self._crosses_nodes, cell.numel() * cell.element_size())
        return self._exchange([(to, cell)], [(source, target)])

    def _exchange(
        self, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]
    ) -> Wait:
        """Send and receive cells. gloo has no point-to-point for CUDA tensors: they go by way of the host."""
        if sends[0][1].device.type == "cpu" or not uses_gloo(self._group, sends[0][1].device):
            return start_exchange(sends, receives, self._group)
        arrived = [(source, torch.empty(target.shape, dtype=target.dtype)) for source, target in receives]
        start_exchange([(to, cell.cpu()) for to, cell in sends], arrived, self._group)()
        for (_, target), (_, cell) in zip(receives, arrived, strict=True):
            target.copy_(cell)
        return nothing

    def _all_to_all(self, rows: torch.Tensor, received: torch.Tensor) -> Wait:
        sends = [(to, row[to]) for row in rows for to, _ in self._turns]
        # This rank has no cell in ``received``.
        receives = [
            (source, row[source - (source > self.index)]) for row in received for _, source in self._turns
        ]
        return self._exchange(sends, receives)

    def _count(self, rows: torch.Tensor) -> None:
        nbytes = rows.numel() // self.size * (self.size - 1) * rows.element_size()
        self._traffic.sent(self._purpose, self._crosses_nodes, nbytes)


class FlatRing(RankLevel):
    """One ring through the ranks of several levels (the strategies' ``flat``), as NCCL has them.

    Every rank sends to the next one only, so (E-1)/E of the buffer of E ranks passes each border between nodes; a
    direct exchange would send that from every rank of a node. gloo has such a ring for gathers only.
    """

    def gather(self, rows: torch.Tensor) -> Wait:
        if not uses_gloo(self._group, rows.device) or rows.device.type != "cpu":
            return super().gather(rows)
        self._count(rows)
        if rows.size(0) == 1 and rows.is_contiguous():
            wait: Wait = all_gather(rows.view(-1), rows[0, self.index], self._group, async_op=True).wait
            return wait

        def pass_on() -> None:  # in every step, the cell that has arrived last
            for step in range(self.size - 1):
                sent = (self.index - step) % self.size
                came = (self.index - step - 1) % self.size
                arrived = torch.empty_like(rows[:, came], memory_format=torch.contiguous_format)
                self._pass_on(rows[:, sent].contiguous(), arrived)
                rows[:, came].copy_(arrived)

        return pass_on

    def reduce_scatter(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """See :meth:`RankLevel.reduce_scatter`; a cell's sum begins at the rank after its own, and ends at its own."""
        if not uses_gloo(self._group, rows.device) or rows.device.type != "cpu":
            super().reduce_scatter(rows, output)
            return
        self._count(rows)
        arrived = torch.empty_like(output)
        carried = rows[:, self.index - 1].contiguous()
        for step in range(1, self.size):
            self._pass_on(carried, arrived)
            cell = (self.index - 1 - step) % self.size
            if step == self.size - 1:
                torch.add(arrived, rows[:, cell], out=output)
            else:
                carried = arrived + rows[:, cell]

    def _pass_on(self, sent: torch.Tensor, arrived: torch.Tensor) -> None:
        self._exchange([((self.index + 1) % self.size, sent)], [((self.index - 1) % self.size, arrived)])()

    def _count(self, rows: torch.Tensor) -> None:
        """Count what this rank sends, all of which goes to its neighbour."""
        rank = self._topology.rank
        ranks_per_node = self._topology.ranks_per_node
        step = self.axis.stride if self.index < self.size - 1 else self.axis.stride * (1 - self.size)
        nbytes = rows.numel() // self.size * (self.size - 1) * rows.element_size()
        self._traffic.sent(self._purpose, (rank + step) // ranks_per_node != rank // ranks_per_node, nbytes)


def uses_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether tensors on ``device`` go through gloo in this group, which may have a backend per device type."""
    configuration = dist.get_backend_config(group)
    for part in configuration.split(","):
        kind, _, backend = part.rpartition(":")
        if kind in ("", device.type):
            return backend == "gloo"
    return False


def all_gather(
    output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> Any:
    """Call the flat all-gather under the name that this PyTorch does not deprecate."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, mine, group=group, async_op=async_op)


def _reduce_scatter(output: torch.Tensor, data: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Call the flat reduce-scatter (sum) under the name that this PyTorch does not deprecate."""
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce(output, data, group=group)


class SideStream:
    """A CUDA stream for work that overlaps with the current stream's: what is enqueued inside ``with side.current():``.
    On the CPU there is none."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def start(self, data: torch.Tensor) -> "SideStream":
        """Begin on the device of ``data``, after all that the current stream has been given."""
        if data.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(data.device)
            self.follow()
        return self

    def current(self) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self._stream)

    def follow(self) -> None:
        """Order what is enqueued here from now on after what the current stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def mark(self) -> torch.cuda.Event | None:
        """Return an event at this point of what is enqueued here; None on the CPU."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, until: torch.cuda.Event | None = None) -> None:
        """Order the current stream from now on after what is enqueued here, all of it or up to ``until``."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(until or self._stream.record_event())
